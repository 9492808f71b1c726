"""The collectives and messages of one rank in one step: calls and bytes. `bench.py comm` checks them exactly.

With the symbols of sizes.py; X is the bytes of one activation [b, s, h]:

    what                                      collectives                              source
    tensor parallel, a layer and microbatch   2 all-reduces of X forward, 2 backward   1909.08053, section 3
      sequence parallelism                    forward 2 all-gathers, 2 reduce-         2205.05198, section 4.2.2
                                              scatters; backward 4 and 2: each
                                              sublayer gathers h again for its
                                              column-parallel weight gradient
      s slices, k columns                     s k times as many calls, same bytes      2409.15241, section 3
    embedding; head                           1 all-reduce of X forward; 1 backward    1909.08053, section 3
    cross entropy, a microbatch               all-reduces: a maximum of w b s, a sum   1909.08053, section 3; two sums
                                              of 2 w b s                               packed into one
    a stage boundary and microbatch           X sent forward, X back; with sequence    2104.04473, section 2.2
                                              parallelism X/t
    ZeRO-1, a step                            per parameter w bytes reduce-scattered,  1910.02054, section 7
                                              e bytes all-gathered
    ZeRO-2, a step                            the reduce-scatter m times
    tied embedding on two stages, a step      an all-reduce of w V h/t; with ZeRO of this rank's 1/d of it

The p v chunks have p v - 1 boundaries; nothing is sent between two chunks of the same stage. In a ring of n ranks
each rank sends 2 (n-1)/n of the bytes of an all-reduce, and (n-1)/n of those of a reduce-scatter or an all-gather.
"""

from collections import Counter
from dataclasses import dataclass

from nanodomino.analysis.sizes import (bucket_sizes, bytes_per_element, bytes_per_main_element, gradient_reductions,
                                       hidden_bytes, optimizer_shards, residual_bytes, slice_count, stage_actions,
                                       stage_model, tokens_per_microbatch)
from nanodomino.config.config import Config
from nanodomino.mesh import Mesh


@dataclass(frozen=True)
class Traffic:
    """Collectives or messages of one rank.

    bytes: of the whole tensor, summed over the calls: the all-reduced tensor, a reduce-scatter's input, an all-gather's
    output.
    """
    group: str           # tp, pp, dp, embedding, world
    kind: str            # all_reduce, reduce_scatter, all_gather, send, receive
    calls: int
    bytes: int
    why: str = ""
    backward: bool = False


def bytes_sent(kind: str, payload: float, ranks: int) -> float:
    """Return the bytes that each of `ranks` in a ring sends; 0 for a kind without a formula."""
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks,
               "all_gather": (ranks - 1) / ranks, "send": 1.0}
    return factors.get(kind, 0.0) * payload


def column_count(chunks: int, size: int) -> int:
    """Return the number of tensors that torch.chunk makes of `size` rows: `chunks` or fewer."""
    return -(-size // -(-size // chunks))


def step_traffic(config: Config, mesh: Mesh) -> list[Traffic]:
    """Return all collectives and messages of a rank in one step."""
    return tensor_parallel_traffic(config, mesh) + pipeline_traffic(config, mesh) + optimizer_traffic(config, mesh)


def tensor_parallel_traffic(config: Config, mesh: Mesh, chunks=None) -> list[Traffic]:
    """Return the tp group's collectives. chunks: some of the stage's chunks; None for all.

    Each sublayer all-reduces its output forward and its input's gradient backward. With sequence parallelism both
    become an all-gather and a reduce-scatter, and backward gathers the input h once more for the weight gradient.
    """
    if config.tp == 1:
        return []
    w, n, x = bytes_per_main_element(config), tokens_per_microbatch(config), hidden_bytes(config)
    chunks = chunks or stage_model(config, mesh).chunks
    calls = config.microbatches * slice_count(config)
    column_calls = calls * column_count(config.columns, config.hidden_size)
    sequence_parallel = config.sequence_shards > 1

    def reduce(calls, size, why, backward=False, kind="reduce_scatter" if sequence_parallel else "all_reduce"):
        return Traffic("tp", kind, calls, config.microbatches * size, why, backward)

    def gathers(count, why, backward=False):
        return [reduce(count * column_calls, count * x, why, backward, "all_gather")] * sequence_parallel

    sublayers = sum(len(chunk.sublayers) for chunk in chunks)
    found = [reduce(sublayers * column_calls, sublayers * x, "layers forward"), *gathers(sublayers, "layers forward"),
             reduce(sublayers * column_calls, sublayers * x, "layers backward", True),
             *gathers(2 * sublayers, "layers backward", True)]
    if any(chunk.pre_process for chunk in chunks):
        found += [reduce(calls, x, "embedding")] + gathers(1, "embedding", True)
    if any(chunk.post_process for chunk in chunks):
        found += gathers(1, "head") + [reduce(2 * calls, 3 * w * n, "cross entropy", kind="all_reduce")]
        found += [reduce(column_calls, x, "head", True)]
    return found


def pipeline_traffic(config: Config, mesh: Mesh) -> list[Traffic]:
    """Return the messages between stages, counted in the stage's actions."""
    counts, placement = Counter(), config.placement
    for half in (half for action in stage_actions(config, mesh) for half in action.halves):
        for kind, other_end in (("send", placement.target), ("receive", placement.source)):
            location = other_end(mesh.pp_rank, half)
            counts[kind, half.direction < 0] += location is not None and location[0] != mesh.pp_rank
    return [Traffic("pp", kind, count, round(count * residual_bytes(config)),
                    "gradients" if backward else "activations", backward)
            for (kind, backward), count in counts.items() if count]


def optimizer_traffic(config: Config, mesh: Mesh) -> list[Traffic]:
    """Return the dp group's collectives and the other all-reduces that finish a step.

    Gradients are summed over the replicas once a step, in ZeRO-2 once a microbatch. The first and the last stage sum
    the gradient of a tied embedding. The tp ranks sum the gradients of the norms of q and k, as each rank has only some
    heads, and with sequence parallelism those of norms, row-parallel biases and positions, as each rank has only some
    tokens. All ranks sum the loss, the token count, the squared norm and the stop flag.
    """
    e, w, shards = bytes_per_element(config), bytes_per_main_element(config), optimizer_shards(config)
    buckets, times = bucket_sizes(config, mesh), gradient_reductions(config)
    elements, count = sum(size for _, size in buckets), len(buckets)
    tied = [size // shards for kind, size in buckets if kind.tied]
    partial = [size // shards for kind, size in buckets if kind.partial_gradient]
    found = [Traffic("embedding", "all_reduce", len(tied), w * sum(tied), "tied embedding")] if tied else []
    found += [Traffic("tp", "all_reduce", len(partial), w * sum(partial), "norms, biases")] if partial else []
    if shards > 1:
        found += [Traffic("dp", "reduce_scatter", times * count, times * w * elements, "gradients", backward=True),
                  Traffic("dp", "all_gather", count, e * elements, "weights")]
    elif config.dp > 1:
        found += [Traffic("dp", "all_reduce", count, w * elements, "gradients", backward=True)]
    return found + [Traffic("world", "all_reduce", 1, 4 * 8, "loss, tokens, norm, stop")]


def totals_by_group(found: list[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return {(group, kind): (calls, bytes)}."""
    totals = {}
    for traffic in found:
        calls, size = totals.get((traffic.group, traffic.kind), (0, 0))
        totals[traffic.group, traffic.kind] = (calls + traffic.calls, size + traffic.bytes)
    return totals
