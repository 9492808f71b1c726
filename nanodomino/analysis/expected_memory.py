"""Computes the memory of one rank in bytes: model state, activations, messages, peak.

`bench.py memory` compares the formulas with real runs. The symbols are those of sizes.py; for example, X is the bytes
of one activation [b, s, h], and d the data parallel size.

    what                                            bytes                            source
    model state, 16-bit training                    6 + 12/d per parameter           1910.02054, sections 3.1 and 5.1,
    model state, fp32 training                      8 + 8/d per parameter            here with fp32 gradients
      ZeRO-2, 16-bit; fp32                          2 + 16/d; 4 + 12/d; plus the     1910.02054, section 5.2
                                                    buckets being filled or reduced
      experts                                       the same with d/ep instead of d  see optim/parameters.py
    activations of a layer and microbatch           4 X + (4 + 2 ffn/h) X/t          2205.05198, section 4, for this
      selective recomputation                       4 X + (3 + ffn/h) X/t            model's layers; norm statistics
      full recomputation                            2 X, on the GPU or on its host   and log-sum-exp come on top
      sequence parallelism                          4 X becomes 4 X/t, 2 X becomes   2205.05198, section 4.2.2
                                                    2 X/t
      between input and weight gradients            4 X + (4 + 2 ffn/h) X/t          2401.10241, section 2
    fp8: W and W^T in 8 bits                        2 per parameter of attention     layers/fp8.py
                                                    and MLP, on top
    microbatches in flight on stage r               1F1B: min(m, p - r)              2104.04473, section 2.2; counted in
                                                                                     the schedule's actions

Model state and activations are exact, except that activations of experts assume that all experts are chosen equally
often (sublayer_memory.py). With context parallelism, d counts the dp x cp ranks that hold the same parameters, and
attention keeps more (context_parallel.py). Working memory (temporary tensors) is an estimate, so the peak is one too,
within a few percent.
"""

from dataclasses import replace
from itertools import accumulate

from nanodomino.analysis import context_parallel
from nanodomino.analysis.sizes import (bucket_sizes, bytes_per_element, bytes_per_main_element, bytes_per_weight,
                                       fp8_matrices, gradient_shards, hidden_bytes, linear_in_microbatches,
                                       local_vocab_size, mesh_at, optimizer_shards, parameters_by_kind, replica_count,
                                       residual_bytes, slice_count, stage_actions, stage_chunks, tokens_per_microbatch)
from nanodomino.analysis.sublayer_memory import (INSIDES, deferred_bytes, norm_statistics_bytes, offloads_to_host,
                                                 tape_bytes)
from nanodomino.config.config import Config
from nanodomino.layers.activations import ACTIVATIONS
from nanodomino.layers.attention import Attention
from nanodomino.layers.cross_entropy import CHUNK_BYTES
from nanodomino.layers.mlp import MLP
from nanodomino.layers.positions import rotary_size
from nanodomino.mesh import PIPELINE_THREAD_BLOCKS, Mesh
from nanodomino.model import Chunk
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.pipeline import ACTIONS_AHEAD
from nanodomino.schedules.actions import Forward
from nanodomino.schedules.placement_and_messages import message_received, message_sent
from nanodomino.schedules.simulation import peak_microbatches, receives_to_post
from nanodomino.zero import MAX_REDUCES_IN_FLIGHT

SETTLED = 4      # rounds of p microbatches after which each further round adds the same to every peak

# ---- model state

def state_bytes(config: Config, mesh: Mesh) -> dict[str, int]:
    """Return the exact bytes of a rank's parameters, gradients and optimizer state, with padding and step counts."""
    w, buckets = bytes_per_main_element(config), bucket_sizes(config, mesh)
    stepped = sum(kind.update != "sign" for kind, _ in buckets)
    return {"parameters": sum(bytes_per_weight(config, kind) * size for kind, size in buckets),
            "gradients": sum(w * size // gradient_shards(config, kind.replicas) for kind, size in buckets),
            "optimizer": 4 * stepped * OPTIMIZERS[config.optimizer].counts_steps
            + sum(optimizer_values_per_weight(config, kind.update) * w * size // optimizer_shards(config, kind.replicas)
                  for kind, size in buckets)}


def optimizer_values_per_weight(config: Config, update="decay") -> int:
    """Return how many values the optimizer stores per weight: its moments and, in 16-bit training, the master weight.

    For example, AdamW in bfloat16 stores 3. An update by sign needs none. update: see ParameterKind.
    """
    if update == "sign":
        return 0
    return len(OPTIMIZERS[config.optimizer].moments) + (bytes_per_element(config) < bytes_per_main_element(config))


def state_bytes_per_parameter(config: Config, replicas="dp") -> float:
    """Return the bytes of model state per parameter that a rank holds, without padding. The table above has them for
    AdamW. replicas: "expert_dp" for the experts' parameters, which are sharded over fewer ranks."""
    e, w = bytes_per_element(config), bytes_per_main_element(config)
    return (e + w / gradient_shards(config, replicas)
            + optimizer_values_per_weight(config) * w / optimizer_shards(config, replicas))


def average_state_bytes(config: Config) -> int:
    """Return the bytes of model state, averaged over the ranks: a lower bound for the fullest rank.

    The average is extrapolated from two small models, so this is quick for a model of any depth. Layers with experts
    repeat every moe_layer_freq layers.
    """
    def bytes_with(layers):
        return sum(count * state_bytes_per_parameter(config, kind.replicas) * replica_count(config, kind.replicas)
                   for kind, count in parameters_by_kind(replace(config, num_layers=layers)).items())

    period = min(config.moe_layer_freq, config.num_layers)
    once, twice = (bytes_with(count * period) for count in (1, 2))
    return int((once + (config.num_layers / period - 1) * (twice - once)) / config.world_size)


# ---- activations: what the tapes keep for backward

def chunk_ends_tape_bytes(config: Config, mesh: Mesh, chunk: Chunk) -> dict[str, float]:
    """Return {name: bytes} of what a tape keeps for a chunk besides its layers: tokens, embedding, heads or output.

    Each depth of multi-token prediction has labels and a loss mask of its own. Besides its layer and head, a depth
    keeps the word embeddings that it merges, and the statistics of two norms.
    """
    e, w, n = bytes_per_element(config), bytes_per_main_element(config), tokens_per_microbatch(config)
    kept, statistics = {}, n * norm_statistics_bytes(config) / config.sequence_shards
    if config.cp > 1:                                          # own tokens, labels and positions are copies
        kept["tokens, labels, positions, loss mask"] = (1 + config.mtp_num_layers) * (3 * 8 + 4) * n
    elif chunk.pre_process or chunk.post_process or config.uses_document_boundaries:   # every chunk needs boundaries
        kept["tokens"] = 8 * (n + config.micro_batch_size)     # s + 1 tokens per sample: the last is only a label
        kept["positions, loss mask"] = 8 * (n if config.reset_position_ids else config.seq_length) + 4 * n
        kept["labels, loss masks of depths"] = config.mtp_num_layers * (8 + 4) * n
    kept |= shared_tape_bytes(config)
    if chunk.pre_process and config.hidden_dropout and "h" not in GRANULARITIES[config.recompute_granularity]:
        kept["embedding dropout"] = w * n * config.hidden_size / config.sequence_shards
    if chunk.post_process:
        kept["head"] = config.head_uses * (residual_bytes(config) + hidden_bytes(config) + statistics)
        kept["logits"] = config.head_uses * e * n * local_vocab_size(config, mesh)
        kept["losses, maxima, sums"] = config.head_uses * 4 * w * n
        kept["depths"] = config.mtp_num_layers * (residual_bytes(config) + 2 * statistics)
    else:
        kept["output"] = residual_bytes(config)
    return kept


def shared_tape_bytes(config: Config) -> dict[str, float]:
    """Return {name: bytes} of rotary angles, the attention bias and others, which all attention layers of a chunk
    share. They depend on where documents end and on which tokens the rank holds."""
    n, kept = tokens_per_microbatch(config), {}
    if has_own_angles(config):
        kept["cos, sin"] = 4 * n * rotary_size(config)
    if context_parallel.needs_bias(config):
        kept["attention bias"] = context_parallel.bias_bytes(config)
    if context_parallel.gathers_keys(config):
        kept["numbers of keys"] = 8 * n * context_parallel.keys_per_token(config)
    if config.reset_attention_mask and config.device != "cuda":
        kept["documents"] = 8 * n * config.cp                  # on GPUs they are in the host's memory
    return kept


def has_own_angles(config: Config) -> bool:
    """Return whether a slice copies the rotary angles of its tokens' positions. Otherwise all slices share a table."""
    return config.rope and (config.reset_position_ids or config.cp > 1)


@linear_in_microbatches(SETTLED)
def microbatches_in_flight(config: Config, mesh: Mesh) -> float:
    """Return the largest number of microbatches that are alive on this stage at the same time.

    A microbatch is alive from its forward to the end of its backward. If the stage has several chunks, the microbatch
    counts per chunk, as a fraction: the chunk's share of the stage's layers. So the result may be 2.5.
    """
    chunks = stage_chunks(config, mesh)
    layers = sum(len(chunk.layers) for chunk in chunks)
    return peak_microbatches(stage_actions(config, mesh), lambda chunk: len(chunks[chunk].layers) / layers)


@linear_in_microbatches(SETTLED)
def peak_tape_bytes(config: Config, mesh: Mesh) -> int:
    """Return the peak bytes of all tapes alive at the same time."""
    return round(max(tape_bytes_over_time(config, mesh)))


def tape_bytes_over_time(config: Config, mesh: Mesh) -> list[float]:
    """Return the bytes of all tapes after each of the stage's actions.

    In a pair (a forward and a backward that take turns) one tape grows while the other shrinks, sublayer by sublayer.
    So the peak is never in the middle of a pair.
    """
    chunks = stage_chunks(config, mesh)
    kept = [tape_bytes(config, chunk.sublayers) + sum(chunk_ends_tape_bytes(config, mesh, chunk).values())
            - (residual_bytes(config) if shares_input_with_other_tape(config, mesh, number) else 0)
            for number, chunk in enumerate(chunks)]
    table = 4 * config.max_position_embeddings * rotary_size(config) * config.rope * (not has_own_angles(config))
    return [size + table * (size > 0)                          # cos, sin: every tape holds a view of the same table
            for size in bytes_over_time(config, mesh, kept,
                                        [deferred_bytes(config, chunk.sublayers) for chunk in chunks])]


def bytes_over_time(config: Config, mesh: Mesh, kept: list[float], deferred: list[float]) -> list[float]:
    """Return the bytes of all tapes after each of the stage's actions.

    kept: the bytes of one tape after its forward, by chunk; deferred: its bytes after the input gradients, if weight
    gradients are computed in a later action.
    """
    def change(half):
        whole, part = kept[half.chunk], deferred[half.chunk]
        return {"forward": whole, "backward": -whole,
                "input_backward": part - whole, "weight_backward": -part}[half.kind]

    return list(accumulate(sum(map(change, action.halves)) for action in stage_actions(config, mesh)))


def shares_input_with_other_tape(config: Config, mesh: Mesh, chunk: int) -> bool:
    """Return whether a chunk's input and another chunk's output are one tensor, which is then counted once.

    That is so if the previous chunk of the model is on the same stage. With several slices the input is a copy, so
    nothing is shared.
    """
    source = config.placement.source(mesh.pp_rank, Forward(0, chunk))
    return (source is not None and source[0] == mesh.pp_rank and slice_count(config) == 1
            and not offloads_to_host(config))


@linear_in_microbatches(SETTLED)
def peak_host_bytes(config: Config, mesh: Mesh) -> int:
    """Return the peak bytes that the tapes keep in the host's memory.

    This is pinned memory, where torch rounds each tensor up to a power of two. A run may take up to twice these bytes.
    """
    kept = [len(chunk.sublayers) * residual_bytes(config) * offloads_to_host(config)
            for chunk in stage_chunks(config, mesh)]
    return round(max(bytes_over_time(config, mesh, kept, [0] * len(kept))))


# ---- messages, working memory, peak

@linear_in_microbatches(SETTLED)
def peak_message_bytes(config: Config, mesh: Mesh) -> int:
    """Return the peak bytes of messages between chunks that pipeline.P2PCommunicator holds.

    It holds a receive buffer from the moment the receive is posted until an action uses it. It holds a sent tensor
    until p more have been sent. With one slice the sent tensor is part of a tape, so here it counts only after that
    tape is freed.
    """
    table, arriving, sent, tapes, peak = config.timetable, {}, [], set(), 0
    receives = receives_to_post(table, ACTIONS_AHEAD["cuda" if config.device == "cuda" else "cpu"])[mesh.pp_rank]

    def beside_tape(half):
        return slice_count(config) > 1 or (half.microbatch, half.chunk) not in tapes

    for action, posted in zip(stage_actions(config, mesh), receives):
        arriving |= dict.fromkeys(posted, True)
        peak = max(peak, sum(arriving.values()) + sum(map(beside_tape, sent)))
        for half in action.halves:
            arriving.pop(message_received(half), None)
        for half in action.halves:                             # a pair sends its two outputs one after the other
            sent = sent[-config.pp:]
            (tapes.add if half.kind == "forward" else tapes.discard)((half.microbatch, half.chunk))
            if sending := message_sent(table.placement, mesh.pp_rank, half):
                receiver, message = sending
                if receiver == mesh.pp_rank:
                    arriving[message] = beside_tape(half)
                else:
                    sent.append(half)
                    peak = max(peak, sum(arriving.values()) + sum(map(beside_tape, sent)))
    return round(residual_bytes(config) * peak)


def working_bytes(config: Config, mesh: Mesh) -> int:
    """Estimate the peak bytes of temporary tensors besides the tapes.

    The temporaries are summed at some moments: in the backward of an MLP or experts, with context parallelism also of
    attention, in the head's forward and in the head's backward. The result is the largest of these sums plus ZeRO-2's
    gradient buffers and fp8's weights.
    """
    e, w, t, n = bytes_per_element(config), bytes_per_main_element(config), config.tp, tokens_per_microbatch(config)
    x, cuda, chunks = hidden_bytes(config), config.device == "cuda", stage_chunks(config, mesh)
    first, last = chunks[0], chunks[-1]
    h, ffn = config.hidden_size, e * n * config.ffn_hidden_size // t

    def weight_gradient_bytes(inputs, outputs):
        if cuda or e == w:
            return 0
        # On a CPU, bf16 needs a temporary for the product of the matmul, fp16 needs both factors in fp32.
        factors = w * n // slice_count(config) * (inputs + outputs)
        return factors if config.dtype == "float16" else e * inputs * outputs

    shared = sum(shared_tape_bytes(config).values())
    ends = sum(chunk_ends_tape_bytes(config, mesh, last).values()) - shared
    head = ends / config.head_uses if last.post_process else 0
    at_head, in_layers = (pair_working_bytes(config, mesh, resumed - first.pre_process) for resumed in (0, 1))
    offloaded = 4 * residual_bytes(config) * offloads_to_host(config)     # norm inputs: 2 on their way out, 2 back
    product = fp8_working_bytes(config) if config.fp8_format else weight_gradient_bytes(h, config.ffn_hidden_size // t)
    gradients = {MLP: max(0, product - ffn)}
    # The backward of an MLP or experts, while one slice's activations are recomputed. The part of the tape that belongs
    # to the head behind them is freed by then.
    moments = [inside.working + inside.recomputed(config) / slice_count(config) + gradients.get(kind, 0) - head
               + in_layers + offloaded for kind in {type(layer.mlp) for chunk in chunks for layer in chunk.layers}
               for inside in [INSIDES[kind](config)]]
    if config.cp > 1:          # backward of the last attention, after the last MLP's, while all slices wait in it
        inside, freed = INSIDES[Attention](config), head + tape_bytes(config, last.sublayers[-1:])
        moments += [inside.working + inside.recomputed(config) - freed + in_layers + offloaded]
    if last.post_process:                                      # forward and backward of the head
        width = local_vocab_size(config, mesh)
        chunk = min(CHUNK_BYTES["cuda" if cuda else "cpu"] // 4, n * width // slice_count(config))
        chunk *= e if config.narrow_cross_entropy else w
        moments += [2 * x + chunk + at_head, 2 * x + max(chunk, weight_gradient_bytes(h, width)) + in_layers]
    return int(max(moments)) + gradient_buffer_bytes(config, mesh) + fp8_weight_bytes(config, mesh)


def fp8_weight_bytes(config: Config, mesh: Mesh) -> int:
    """Return the bytes of the weights that layers/fp8.py has converted: W and W^T, from a step's first backward on."""
    return sum(2 * weight.numel() for chunk in stage_chunks(config, mesh) for weight in fp8_matrices(chunk))


def fp8_working_bytes(config: Config) -> float:
    """Estimate the temporaries of fp8 in the backward of an MLP: a weight gradient's product in fp32 with both operands
    in 8 bits or, without torch.compile, the gradient that is being converted, in fp32."""
    n, h = tokens_per_microbatch(config) / slice_count(config), config.hidden_size
    width = ACTIVATIONS[config.activation].inputs * config.ffn_hidden_size / config.tp
    return max(4 * h * width + n * (width + h), 0 if config.device == "cuda" else 4 * n * width)


def gradient_buffer_bytes(config: Config, mesh: Mesh) -> int:
    """Return the peak bytes of ZeRO-2's full-size gradient buckets; 0 in the other stages.

    Backward fills several buckets at a time: a sublayer's two matrices, the word embedding (if tied, the head adds to
    it first), another matrix for each chunk after the first, and all buckets of vectors. Up to MAX_REDUCES_IN_FLIGHT
    buckets are being reduced. On CPUs these count twice, because there a reduce-scatter receives into a buffer as large
    as the bucket (comm/scatter_and_gather.py).
    """
    buckets = [(kind, size) for kind, size in bucket_sizes(config, mesh) if gradient_shards(config, kind.replicas) > 1]
    if not buckets:
        return 0
    matrices = sorted(size for kind, size in buckets if kind.update == "decay")
    filled = sum(matrices[-2 - config.virtual_stages:]) + sum(size for kind, size in buckets if kind.update != "decay")
    reduced = MAX_REDUCES_IN_FLIGHT * max(size for _, size in buckets) * (1 if config.device == "cuda" else 2)
    return bytes_per_main_element(config) * (filled + reduced)


@linear_in_microbatches(SETTLED)
def pair_working_bytes(config: Config, mesh: Mesh, sublayers: int) -> float:
    """Return what a pair adds to the memory of a backward alone, in bytes; 0 if the schedule has no pairs.

    sublayers: how many sublayers the pair's forward is ahead of its backward. The forward's tape has grown by these,
    but the backward's tape has not shrunk by them yet. The forward also holds y of two sublayers, 2 X, and with expert
    parallelism its rows four times: sorted, multiplied, sent, received. Embedding and head each take one turn, like a
    sublayer.
    """
    if all(len(action.halves) == 1 for action in stage_actions(config, mesh)):
        return 0
    kept = [tape_bytes(config, [sublayer]) for sublayer in stage_chunks(config, mesh)[0].sublayers]
    rows = 4 * config.moe_router_topk * (config.ep > 1)
    return (2 + rows) * hidden_bytes(config) + sum(kept[:max(sublayers, 0)])


@linear_in_microbatches(SETTLED)
def tape_and_receive_bytes(config: Config, mesh: Mesh) -> int:
    """Return the peak bytes of tapes plus the buffers that receive gradients; 0 if there are no such buffers.

    Only ZeRO-1 on CPUs has them: there a reduce-scatter receives into a buffer as large as the bucket
    (comm/scatter_and_gather.py). A chunk's buckets are reduced during the chunk's last action of the step. Tapes of
    other chunks may still exist then.
    """
    if optimizer_shards(config) == 1 or gradient_shards(config) > 1 or config.device == "cuda":
        return 0
    chunks, row = stage_chunks(config, mesh), stage_actions(config, mesh)
    last = {half.chunk: number for number, action in enumerate(row) for half in action.halves}
    layers = sum(len(chunk.layers) for chunk in chunks)
    layer = bytes_per_main_element(config) * sum(size for kind, size in bucket_sizes(config, mesh)
                                                 if optimizer_shards(config, kind.replicas) > 1) / layers
    received = [sum(layer * len(chunks[chunk].layers) for chunk in last if last[chunk] <= number)
                for number in range(len(row))]
    # beside the gradient that it sends, a backward then still holds its last sublayer's x, grad_h and grad_y
    working = [0 if action.halves[-1].kind == "weight_backward" else 3 * residual_bytes(config) for action in row]
    tapes = tape_bytes_over_time(config, mesh)
    return round(max(sum(held) for held in zip(tapes, received, working) if held[1]))


def peak_bytes(config: Config, mesh: Mesh) -> int:
    """Estimate a rank's peak memory in bytes, within a few percent.

    It is the sum of state, messages, and the larger of two peaks: tapes with working memory during backward, or the
    remaining tapes with received gradients.
    """
    return (sum(state_bytes(config, mesh).values()) + peak_message_bytes(config, mesh)
            + max(peak_tape_bytes(config, mesh) + working_bytes(config, mesh), tape_and_receive_bytes(config, mesh)))


def fullest_rank_bytes(config: Config) -> int:
    """Return the peak bytes of the rank that needs the most memory."""
    return max(peak_bytes(config, mesh_at(config, stage)) for stage in range(config.pp))


# ---- NCCL

# For each connection of a channel NCCL allocates 10 MiB to receive into and 2 MiB to send from. The 10 MiB are the
# buffers of three protocols; 4 MiB of them are for large messages (NCCL_BUFFSIZE). Source: the output of
# NCCL_DEBUG_SUBSYS=ALLOC in github.com/NVIDIA/nccl/issues/1685. Faster links get more channels; 24 is for NVLink.
CONNECTION_BYTES, CHANNELS = 12 * 2**20, 24


def communicator_bytes(config: Config, mesh: Mesh) -> int:
    """Estimate the bytes of NCCL's own buffers on a GPU. torch does not allocate them, so peak_bytes excludes them.

    In a ring, each rank receives from one rank and sends to one, however many ranks there are. Messages between stages
    use fewer channels, and one connection per neighbour. Trees and in-network reduction would need more memory.
    """
    if config.device != "cuda":
        return 0
    tied = any("embedding" in kind.addends for kind, _ in bucket_sizes(config, mesh))
    experts = 2 + (replica_count(config, "expert_dp") > 1) if config.ep > 1 else 0      # rows, counts, gradients
    groups = config.world_size, config.tp, config.cp, replica_count(config), 1 + tied
    rings = CHANNELS * (sum(ranks > 1 for ranks in groups) + experts)
    neighbours = sum(mesh.pp_rank in pair for pair in config.placement.neighbours)
    messages = PIPELINE_THREAD_BLOCKS * (1 + neighbours) if config.pp > 1 else 0   # 1: pipeline.connect's all-reduce
    return CONNECTION_BYTES * (rings + messages)
