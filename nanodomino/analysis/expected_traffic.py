from collections import Counter
from dataclasses import dataclass

from nanodomino.analysis.sizes import (bucket_sizes, bytes_per_element, bytes_per_main_element, gradient_reductions,
                                       hidden_bytes, optimizer_shards, residual_bytes, slice_count, stage_actions,
                                       stage_model, tokens_per_microbatch)
from nanodomino.config.config import Config


# ---- communication

@dataclass(frozen=True)
class Traffic:
    """Collectives or messages of one rank. bytes: of the whole tensor, summed over the calls: what is reduced, what a
    scatter starts from, what a gather ends with."""
    group: str           # tp, pp, dp, embedding, world
    kind: str            # all_reduce, reduce_scatter, all_gather, send, receive
    calls: int
    bytes: int
    why: str = ""
    backward: bool = False


def bytes_sent(kind: str, payload: float, ranks: int) -> float:
    """What each of `ranks` in a ring sends. What is received, another one has sent."""
    around = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks,
              "all_gather": (ranks - 1) / ranks, "send": 1.0, "receive": 0.0}
    return around.get(kind, 0.0) * payload                     # of a kind that has no formula nobody knows


def chunk_count(count: int, size: int) -> int:
    """How many torch.chunk makes of `size`: `count` or fewer."""
    return -(-size // -(-size // count))


def step_traffic(config: Config, at) -> list[Traffic]:
    """Everything that a rank puts on the wires, or awaits from them, in one step."""
    return tensor_parallel_traffic(config, at) + pipeline_traffic(config, at) + once_per_step_traffic(config, at)


def tensor_parallel_traffic(config: Config, at, chunks=None) -> list[Traffic]:
    """Each pair of products costs one sum of X forward (of its outputs) and one backward (of its input's gradient).
    Where the stream is cut that is a scatter, and a gather comes before; and in backward another, of the input.
    chunks: some of the stage's; None for all."""
    if config.tp == 1:
        return []
    w, n, x, chunks = bytes_per_main_element(config), tokens_per_microbatch(config), hidden_bytes(config), chunks or stage_model(config, at).chunks
    whole = config.microbatches * slice_count(config)
    cut = whole * chunk_count(config.columns, config.hidden_size)
    is_cut = config.sequence_shards > 1

    def sums(calls, size, why, backward=False, kind="reduce_scatter" if is_cut else "all_reduce"):
        return Traffic("tp", kind, calls, config.microbatches * size, why, backward)

    def gathers(count, why, backward=False):
        return [sums(count * cut, count * x, why, backward, "all_gather")] * is_cut

    sublayers = sum(len(chunk.sublayers) for chunk in chunks)
    found = [sums(sublayers * cut, sublayers * x, "layers forward"), *gathers(sublayers, "layers forward"),
             sums(sublayers * cut, sublayers * x, "layers backward", True),
             *gathers(2 * sublayers, "layers backward", True)]
    if any(chunk.pre_process for chunk in chunks):
        found += [sums(whole, x, "embedding")] + gathers(1, "embedding", True)
    if any(chunk.post_process for chunk in chunks):
        found += gathers(1, "head") + [sums(2 * whole, 3 * w * n, "cross entropy", kind="all_reduce")]
        found += [sums(cut, x, "head", True)]
    return found


def pipeline_traffic(config: Config, at) -> list[Traffic]:
    """One X, or a rank's part of it, over each boundary forward, one back, for each microbatch: counted in the stage's
    actions. A boundary inside of the stage has no wires."""
    counts, placement = Counter(), config.placement
    for half in (half for action in stage_actions(config, at) for half in action.halves):
        for kind, other in (("send", placement.target), ("receive", placement.source)):
            other = other(at.pp_rank, half)
            counts[kind, half.direction < 0] += other is not None and other[0] != at.pp_rank
    return [Traffic("pp", kind, count, round(count * residual_bytes(config)), "gradients" if up else "activations", up)
            for (kind, up), count in counts.items() if count]


def once_per_step_traffic(config: Config, at) -> list[Traffic]:
    """Once a step gradients are summed (in ZeRO-2 once a microbatch) and weights gathered; first and last stage agree
    on a tied matrix, tensor-parallel ranks on what is whole on each if they have worked on rows of their own, and all
    ranks on the step."""
    e, w, flat, times = bytes_per_element(config), bytes_per_main_element(config), bucket_sizes(config, at), gradient_reductions(config)
    padded, count = sum(size for _, size in flat), len(flat)
    tied = [size // optimizer_shards(config) for kind, size in flat if kind.tied]
    copies = [size // optimizer_shards(config) for kind, size in flat if kind.partial_gradient]
    found = [Traffic("embedding", "all_reduce", len(tied), w * sum(tied), "tied embedding")] if tied else []
    found += [Traffic("tp", "all_reduce", len(copies), w * sum(copies), "norms, biases")] if copies else []
    if optimizer_shards(config) > 1:
        found += [Traffic("dp", "reduce_scatter", times * count, times * w * padded, "gradients", backward=True),
                  Traffic("dp", "all_gather", count, e * padded, "weights")]
    elif config.dp > 1:
        found += [Traffic("dp", "all_reduce", count, w * padded, "gradients", backward=True)]
    return found + [Traffic("world", "all_reduce", 1, 4 * 8, "loss, tokens, norm, stop")]


def totals_by_group(found: list[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """(group, kind) -> (calls, bytes)."""
    sums = {}
    for one in found:
        calls, size = sums.get((one.group, one.kind), (0, 0))
        sums[one.group, one.kind] = (calls + one.calls, size + one.bytes)
    return sums
