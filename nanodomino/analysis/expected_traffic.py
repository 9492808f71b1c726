"""Counts the collectives and messages of one rank in one step: calls and bytes.

`bench.py comm` checks that a real step has exactly these counts. The symbols are those of sizes.py; for example, X is
the bytes of one activation [b, s, h], and w the bytes of one gradient element:

    what                                      collectives                              source
    tensor parallel, a layer and microbatch   2 all-reduces of X forward, 2 backward   1909.08053, section 3
      sequence parallelism                    forward 2 all-gathers, 2 reduce-         2205.05198, section 4.2.2
                                              scatters; backward 4 and 2, because
                                              each sublayer gathers h again for its
                                              column-parallel weight gradient
      with slices and columns                 slices x columns times as many calls,    2409.15241, section 3
                                              the same bytes
    embedding, a microbatch                   1 all-reduce of X forward                1909.08053, section 3
    head, a microbatch                        1 all-reduce of X backward               1909.08053, section 3
    cross entropy, a microbatch               1 all-reduce (maximum) of w b s bytes,   1909.08053, section 3; one call
                                              1 all-reduce (sum) of 2 w b s            for both of its sums
    multi-token prediction, a depth           those of a layer, embedding, head and    2412.19437, section 2.2
                                              cross entropy
    experts, a layer and microbatch           all-to-alls: forward 2 of k X and 1     see layers/moe.py
                                              of 8 E bytes, backward 2 of k X
    context parallel, a layer and microbatch  all_gather: all-gather of k and v of      2407.21783, section 3.3.2
                                              whole samples; backward a reduce-scatter
                                              a2a: all-to-alls of q, k, v and of the    2309.14509, section 3.2
                                              output, the same in backward
      selective or full recomputation         those of forward again in backward
    a stage boundary and microbatch           X sent forward, X back; with sequence    2104.04473, section 2.2
                                              parallelism X/t
    ZeRO-1, a step                            per parameter w bytes reduce-scattered,  1910.02054, section 7
                                              e bytes all-gathered
    ZeRO-2, a step                            m such reduce-scatters, 1 all-gather
      experts                                 the same over d/ep replicas
    word embedding on two stages, a step      1 all-reduce of w V h/t bytes; with ZeRO only of this rank's 1/d of them

With p stages of v chunks there are p v - 1 boundaries. Nothing is sent where both chunks are on the same stage. In a
ring of n ranks, each rank sends 2 (n-1)/n of a tensor to all-reduce it, and (n-1)/n of it to reduce-scatter or
all-gather it. The bytes of all-to-alls of experts assume that all experts are chosen equally often. A rank with popular
experts receives more, but the sum over the ranks of a group is always the same.
"""

from collections import Counter
from dataclasses import dataclass

from nanodomino.analysis.context_parallel import gathers_keys
from nanodomino.analysis.sizes import (bucket_sizes, bytes_per_main_element, bytes_per_weight, gradient_reductions,
                                       hidden_bytes, optimizer_shards, query_and_key_bytes, replica_count,
                                       residual_bytes, slice_count, stage_actions, stage_chunks, stage_model,
                                       tokens_per_microbatch, with_microbatches)
from nanodomino.config.config import Config
from nanodomino.layers.moe import MoE
from nanodomino.mesh import Mesh
from nanodomino.overlap.recompute import GRANULARITIES


@dataclass(frozen=True)
class Traffic:
    """The calls of one kind that a rank makes for one purpose in a step.

    bytes: the size of the whole tensor, summed over the calls. The whole tensor is what is all-reduced or sent, the
    input of a reduce-scatter or an all-to-all, or the output of an all-gather.
    """
    group: str           # tp, cp, pp, dp, ep, expert_dp, embedding, world
    kind: str            # all_reduce, reduce_scatter, all_gather, all_to_all, send, receive
    calls: int
    bytes: int
    why: str = ""        # the purpose, such as "layers forward"
    backward: bool = False


def bytes_sent(kind: str, payload: float, ranks: int) -> float:
    """Return the bytes that each rank sends to the other `ranks` - 1 ranks, in a ring except for an all-to-all; 0 for
    other kinds, such as receive.

    payload: the bytes of the whole tensor, as in Traffic.
    """
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks,
               "all_gather": (ranks - 1) / ranks, "all_to_all": (ranks - 1) / ranks, "send": 1.0}
    return factors.get(kind, 0.0) * payload


def column_count(chunks: int, size: int) -> int:
    """Return how many parts torch.chunk(tensor, chunks) cuts a dimension of length `size` into: at most `chunks`."""
    return -(-size // -(-size // chunks))


def step_traffic(config: Config, mesh: Mesh) -> list[Traffic]:
    """Return all collectives and messages of a rank in one step."""
    return (tensor_parallel_traffic(config, mesh) + context_parallel_traffic(config, mesh)
            + expert_parallel_traffic(config, mesh) + pipeline_traffic(config, mesh) + optimizer_traffic(config, mesh))


def tensor_parallel_traffic(config: Config, mesh: Mesh, chunks=None) -> list[Traffic]:
    """Return the tp group's collectives. chunks: count only these chunks of the stage; None counts all.

    Each sublayer all-reduces its output in forward and the gradient of its input in backward. With sequence
    parallelism each all-reduce becomes an all-gather and a reduce-scatter. Backward then gathers the input h once more,
    for the weight gradient.
    """
    if config.tp == 1:
        return []
    w, n, x = bytes_per_main_element(config), tokens_per_microbatch(config), hidden_bytes(config)
    chunks = chunks or stage_chunks(config, mesh)
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
    heads = config.head_uses * any(chunk.post_process for chunk in chunks)
    lookups = any(chunk.pre_process for chunk in chunks) + max(heads - 1, 0)         # each depth looks up its tokens
    if lookups:
        found += [reduce(lookups * calls, lookups * x, "embedding")] + gathers(lookups, "embedding", True)
    if heads:
        found += gathers(heads, "head")
        found += [reduce(2 * heads * calls, 3 * heads * w * n, "cross entropy", kind="all_reduce"),
                  reduce(heads * column_calls, heads * x, "head", True)]
    return found


def context_parallel_traffic(config: Config, mesh: Mesh, chunks=None) -> list[Traffic]:
    """Return the cp group's collectives. The first one of backward comes first among them. chunks: count only these
    chunks of the stage; None counts all.

    If recomputation drops the core of attention, backward repeats the collectives of forward. With experts, the ranks
    also sum how many tokens of each sample chose each expert.
    """
    if config.cp == 1:
        return []
    chunks, slices = chunks or stage_chunks(config, mesh), slice_count(config)
    layers = config.microbatches * sum(len(chunk.layers) for chunk in chunks)
    routers = config.microbatches * sum(isinstance(layer.mlp, MoE) for chunk in chunks for layer in chunk.layers)
    q, k = (size // config.tp for size in query_and_key_bytes(config))

    def exchange(kind, size, why, backward=False):
        return Traffic("cp", kind, layers * slices, layers * size, why, backward)

    if gathers_keys(config):
        sent = {"k, v": ("all_gather", 2 * k * config.cp)}
        back = [exchange("reduce_scatter", 2 * k * config.cp, "gradients of k, v", True)]
    else:
        sent = {"q, k, v": ("all_to_all", q + 2 * k), "output": ("all_to_all", q)}
        back = [exchange(*sent[name], f"gradients of {name}", True) for name in ("output", "q, k, v")]
    if "activation" in GRANULARITIES[config.recompute_granularity]:
        back += [exchange(*sent[name], f"{name} again", True) for name in sent]
    found = [exchange(*sent[name], name) for name in sent] + back
    if routers:
        counts = bytes_per_main_element(config) * config.micro_batch_size * config.num_experts
        found.append(Traffic("cp", "all_reduce", routers * slices, routers * counts, "tokens of each expert"))
    return found


def expert_parallel_traffic(config: Config, mesh: Mesh, chunks=None) -> list[Traffic]:
    """Return the ep group's all-to-alls. chunks: count only these chunks of the stage; None counts all.

    Forward sends counts, rows and results; backward sends the gradients of both back. If a routing is not balanced, a
    rank sends as many rows, but more or fewer results and gradients of rows.
    """
    chunks = chunks or stage_chunks(config, mesh)
    layers = sum(isinstance(sublayer, MoE) for chunk in chunks for sublayer in chunk.sublayers)
    if config.ep == 1 or layers == 0:
        return []
    calls, rows = layers * config.microbatches, config.moe_router_topk * hidden_bytes(config)
    slices = slice_count(config)
    return [Traffic("ep", "all_to_all", calls * slices, calls * slices * 8 * config.num_experts, "counts of rows"),
            Traffic("ep", "all_to_all", 2 * calls * slices, 2 * calls * rows, "experts forward"),
            Traffic("ep", "all_to_all", 2 * calls * slices, 2 * calls * rows, "experts backward", True)]


def pipeline_traffic(config: Config, mesh: Mesh) -> list[Traffic]:
    """Return this stage's messages to and from other stages, counted from its actions for a single microbatch."""
    counts, placement = Counter(), config.placement
    for half in (half for action in stage_actions(with_microbatches(config, 1), mesh) for half in action.halves):
        for kind, other_end in (("send", placement.target), ("receive", placement.source)):
            location = other_end(mesh.pp_rank, half)
            if location is not None and location[0] != mesh.pp_rank:
                counts[kind, half.direction < 0] += config.microbatches
    return [Traffic("pp", kind, count, round(count * residual_bytes(config)),
                    "gradients" if backward else "activations", backward)
            for (kind, backward), count in counts.items()]


def optimizer_traffic(config: Config, mesh: Mesh) -> list[Traffic]:
    """Return the collectives of gradients and weights, and the other all-reduces that finish a step.

    - dp: gradients are summed over the replicas once per step, in ZeRO-2 once per microbatch.
    - expert_dp: the same for the experts' gradients. With ep = 1 this is the dp group, and counts as dp.
    - embedding: the first and the last stage sum the gradients of a word embedding that both use.
    - tp: some parameters are replicated, but each rank computes only a part of their gradients, so the ranks sum the
      parts. Norms of q and k see only a rank's heads, routers only its features. With sequence parallelism, norms,
      row-parallel biases and position embeddings see only a rank's tokens.
    - world: all ranks sum the loss, the token count, the squared gradient norm, the stop flag and the statistics of
      layers with experts.
    """
    w, found = bytes_per_main_element(config), []
    buckets, times = bucket_sizes(config, mesh), gradient_reductions(config)
    for group, why in (("embedding", "word embedding"), ("tp", "norms, biases, routers")):
        partial = [size // optimizer_shards(config, kind.replicas) for kind, size in buckets if group in kind.addends]
        found += [Traffic(group, "all_reduce", len(partial), w * sum(partial), why)] if partial else []
    for group in ("dp", "expert_dp") if config.ep > 1 else ("dp",):
        summed = [(kind, size) for kind, size in buckets if config.ep == 1 or kind.replicas == group]
        count, elements = len(summed), sum(size for _, size in summed)
        if optimizer_shards(config, group) > 1:
            found += [Traffic(group, "reduce_scatter", times * count, times * w * elements, "gradients", backward=True),
                      Traffic(group, "all_gather", count, sum(bytes_per_weight(config, kind) * size
                                                              for kind, size in summed), "weights")]
        elif replica_count(config, group) > 1:
            found += [Traffic(group, "all_reduce", count, w * elements, "gradients", backward=True)]
    return found + [Traffic("world", "all_reduce", 1, 8 * (4 + stage_model(config, mesh).statistics.numel()),
                            "loss, tokens, norm, stop, statistics")]


def totals_by_group(found: list[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return {(group, kind): (calls, bytes)}, summed over all purposes."""
    totals = {}
    for traffic in found:
        calls, size = totals.get((traffic.group, traffic.kind), (0, 0))
        totals[traffic.group, traffic.kind] = (calls + traffic.calls, size + traffic.bytes)
    return totals
