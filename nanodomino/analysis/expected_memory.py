"""What a training step must take, from the sizes alone: bytes of state, bytes of activations, bytes on the wires.

Pure functions of a Config and of a place in the rank grid. Shapes and kinds come from the model itself, built without
memory; the formulas of activations and wires are written out, to be learned from. Nothing runs. `bench.py comm` and
`bench.py memory` hold them against a real step, byte for byte; `bench.py plan` evaluates them for clusters that nobody
has at hand. Times, which are a model and no count, are in step_time.py.

    b, s, h       samples of a microbatch, tokens of a sample, hidden size; V padded vocabulary
    t, p, d       tensor, pipeline, data parallel sizes; m microbatches; v chunks of a stage
    e, w          bytes of an element of the weights, and of an fp32 or wider one
    X = e b s h   one activation

    what                                      bytes
    model state, 16-bit training              6 + 12/d a parameter                    1910.02054, sections 3.1 and 5.1,
    model state, fp32 training                8 + 8/d a parameter                     here with fp32 gradients; padding
    the same in ZeRO-2                        2 + 16/d; 4 + 12/d; and some buckets    1910.02054, section 5.2
    activations of a layer and microbatch     4 X + (4 + 2 ffn/h) X/t + small terms   as in 2205.05198, section 4
      sequence parallel                       4 X/t in place of 4 X, here and below   section 4.2.2; stream.py
      selective recomputation                 4 X + (3 + ffn/h) X/t                   section 5; recompute.py
      full recomputation                      2 X, on the GPU or in the host's memory
    the same after its input gradients        4 X + (4 + 2 ffn/h) X/t, in any case    2401.10241, section 2
    microbatches alive on a stage             counted in its actions; 1F1B: p - r     schedules.py
    tensor parallel, a layer and microbatch   2 sums of X forward, 2 back             1909.08053, section 3
      sequence parallel                       2 gathers and 2 scatters; 1 gather more 2205.05198, section 4.2.2
    the same in s slices and k columns        s k times as many calls, same bytes     2409.15241, section 3
    embedding; head                           1 sum of X forward; 1 back              1909.08053, section 3
    cross entropy, a microbatch               a maximum of w b s, a sum of 2 w b s    1909.08053, section 3; packed
    a boundary between stages, a microbatch   X down, X up (or X/t); p v - 1 of them, 2104.04473, section 2.2
                                              of which those inside of a stage have no wires
    ZeRO-1, a step                            w a parameter scattered, e gathered     1910.02054, section 7
    ZeRO-2, a step                            m w a parameter scattered, e gathered   with m microbatches
    tied embedding on two stages, a step      a sum of w V h/t; of the own 1/d of it with ZeRO

On the wires of n ranks in a ring, each sends 2 (n-1)/n of what is summed, (n-1)/n of what is scattered or gathered.
"""

from dataclasses import replace
from itertools import accumulate

from nanodomino.analysis.sizes import (bucket_sizes, bytes_per_element, bytes_per_main_element, gradient_shards,
                                       hidden_bytes, local_vocab_size, mesh_at, optimizer_shards, parameter_count,
                                       qkv_and_mlp_bytes, residual_bytes, slice_count, stage_actions, stage_model,
                                       tokens_per_microbatch)
from nanodomino.config.config import Config
from nanodomino.layers.cross_entropy import CHUNK_BYTES
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.layers.positions import rotary_size
from nanodomino.mesh import PIPELINE_THREAD_BLOCKS, Mesh
from nanodomino.model import Chunk
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.pipeline import ACTIONS_AHEAD
from nanodomino.schedules.actions import Forward
from nanodomino.schedules.placement import message_received, message_sent
from nanodomino.schedules.simulation import peak_microbatches, receives_to_post
from nanodomino.zero import MAX_REDUCES_IN_FLIGHT


def state_bytes(config: Config, at: Mesh) -> dict[str, int]:
    """Of parameters, gradients and optimizer on a rank: exact, with the padding and the optimizer's counts."""
    e, w, flat = bytes_per_element(config), bytes_per_main_element(config), bucket_sizes(config, at)
    padded = sum(size for _, size in flat)
    counts = 4 * len(flat) if OPTIMIZERS[config.optimizer].counts_steps else 0
    return {"parameters": e * padded, "gradients": w * padded // gradient_shards(config),
            "optimizer": optimizer_values_per_weight(config) * w * padded // optimizer_shards(config) + counts}


def optimizer_values_per_weight(config: Config) -> int:
    """Numbers that the optimizer keeps of each weight: its moments, and of 16-bit weights a master copy."""
    return len(OPTIMIZERS[config.optimizer].moments) + (bytes_per_element(config) < bytes_per_main_element(config))


def state_bytes_per_parameter(config: Config) -> float:
    """Bytes, without padding; with AdamW 6 + 12/d or 8 + 8/d, in ZeRO-2 2 + 16/d or 4 + 12/d."""
    return bytes_per_element(config) + bytes_per_main_element(config) / gradient_shards(config) + optimizer_values_per_weight(config) * bytes_per_main_element(config) / optimizer_shards(config)


def average_state_bytes(config: Config) -> int:
    """Of the model state on the average rank: a lower bound, found at once however many layers there are."""
    one, two = (parameter_count(replace(config, num_layers=layers)) for layers in (1, 2))
    parameters = one + (config.num_layers - 1) * (two - one)
    return int(parameters * state_bytes_per_parameter(config) / (config.tp * config.pp))


# ---- activations

def layer_tape_bytes(config: Config) -> dict[str, float]:
    """Bytes that Domino's tape keeps of one layer and one microbatch, by what they are. Backward reads each of them,
    and computes again what it has not (recompute.py)."""
    e, w, t, n = bytes_per_element(config), bytes_per_main_element(config), config.tp, tokens_per_microbatch(config)
    own, (q, k, before, after) = residual_bytes(config), qkv_and_mlp_bytes(config)
    scores = n * config.seq_length * config.num_attention_heads // t           # attention probabilities, counted
    kept = {} if offloads_to_host(config) else {"norm inputs": 2 * own}   # x', which the norm differentiates itself at
    kept["norm statistics"] = 2 * n * norm_statistics_bytes(config) / config.sequence_shards
    forgets = GRANULARITIES[config.recompute_granularity]
    if "h" in forgets:
        return kept
    kept |= {"product inputs": 2 * own,                        # h: the column-parallel weight gradient
             "qkv": (q + 2 * k) / t,                           # with their bias: attention's backward
             "mlp before activation": before / t}              # the activation's backward
    if config.hidden_dropout:
        kept["hidden dropout"] = 2 * w * n * config.hidden_size / config.sequence_shards
    if "activation" in forgets:
        return kept
    kept |= {"context": q / t,                                 # its output: its backward, dense's weight gradient
             "mlp after activation": after / t}                # dense_4h_to_h's weight gradient
    if config.qk_layernorm:                                    # at which the norms differentiate themselves
        heads = config.num_attention_heads + config.num_query_groups
        beside = k if config.attention_dropout else 0          # v, which lies between them; there is a copy too
        kept["q, k before norms"] = (q + k + beside + n * heads * norm_statistics_bytes(config)) / t
    elif k < q and not config.rope and not config.attention_dropout:
        kept["q by head"] = q / t                              # a copy, since q, k and v lie group by group
    if k < q and config.device == "cuda" and not config.attention_dropout and (config.reset_attention_mask or e > 2):
        kept["keys, values of each head"] = 2 * q / t          # fused_attention in sublayers.py says why
    if config.attention_dropout:                               # by hand: probabilities, their mask, their product
        # each slice has a mask of the future, or the documents' in its place
        future = 0 if config.reset_attention_mask else slice_count(config) * config.seq_length ** 2
        kept["attention dropout"] = (2 * e + w) * scores + future + (2 * q / t if k < q else 0)
    else:                                                      # from which its backward finds the probabilities again
        kept["logsumexp"] = w * n * config.num_attention_heads // t
    return kept


def offloads_to_host(config: Config) -> bool:
    """Whether norm inputs leave the memory that the rest is in."""
    return config.checkpoint_in_cpu and config.device == "cuda"


def layer_weight_gradient_bytes(config: Config) -> dict[str, float]:
    """The same once its input gradients are there, for the weight gradients that are done later. It does not depend on
    what was computed again for that, nor on the stream: these products want all rows."""
    t, x, (q, k, before, after) = config.tp, hidden_bytes(config), qkv_and_mlp_bytes(config)
    return {"product inputs": 2 * x, "context": q / t, "mlp after activation": after / t,
            "gradients of sums": 2 * x,                        # in place of the norm inputs
            "gradient of qkv": (q + 2 * k) / t, "gradient before activation": before / t}


def chunk_tape_bytes(config: Config, at, chunk: Chunk) -> dict[str, float]:
    """Of what is not a layer. The first norm's input is the chunk's: the embedding's or the message before."""
    e, w, n, x = bytes_per_element(config), bytes_per_main_element(config), tokens_per_microbatch(config), residual_bytes(config)
    has_mask = config.hidden_dropout and "h" not in GRANULARITIES[config.recompute_granularity]
    mask = w * n * config.hidden_size / config.sequence_shards if has_mask else 0
    kept = {}
    if chunk.pre_process or chunk.post_process or config.uses_document_boundaries:       # then all chunks do
        kept["tokens"] = 8 * (n + config.micro_batch_size)     # a row has one more than positions: the last label
        kept["positions, loss mask"] = 8 * (n if config.reset_position_ids else config.seq_length) + 4 * n
    kept |= document_tape_bytes(config)
    if chunk.pre_process and mask:
        kept["embedding dropout"] = mask
    if chunk.post_process:                                     # the bridge into the head
        kept["head"] = x + hidden_bytes(config) + n * norm_statistics_bytes(config) / config.sequence_shards
        kept["logits"] = e * n * local_vocab_size(config, at)
        kept["losses, maxima, sums"] = 4 * w * n
    else:
        kept["output"] = x
    return kept


def document_tape_bytes(config: Config) -> dict[str, float]:
    """Of what each slice says of its samples' documents to all of a chunk's attentions."""
    e, n, s = bytes_per_element(config), tokens_per_microbatch(config), config.seq_length
    kept = {}
    if config.reset_position_ids and config.rope:
        kept["cos, sin"] = 4 * n * rotary_size(config)
    if config.reset_attention_mask:
        kept |= {"documents": 8 * n, "attention bias": e * n * s}
    return kept


def norm_statistics_bytes(config: Config) -> int:
    """Bytes that a norm keeps of each token, beside what it normalizes."""
    return NORMALIZATIONS[config.normalization].statistics(bytes_per_element(config), bytes_per_main_element(config), config.device == "cuda")


def microbatches_in_flight(config: Config, at: Mesh) -> float:
    """Microbatches that have gone forward on a stage and have something left to do, at most: counted in its actions.
    One in a chunk counts as the part of the stage's layers that are there."""
    chunks = stage_model(config, at).chunks
    layers = sum(len(chunk.layers) for chunk in chunks)
    return peak_microbatches(stage_actions(config, at), lambda chunk: len(chunks[chunk].layers) / layers)


def tape_bytes(config: Config, at) -> int:
    """Of the tapes that are held at once, at most."""
    return round(max(tape_bytes_over_time(config, at)))


def tape_bytes_over_time(config: Config, at) -> list[float]:
    """What is held of tapes after each of the stage's actions. In a pair one tape grows as the other shrinks, a
    sublayer in turn, so no more is held in it than before or after."""
    chunks, by_layer, left = stage_model(config, at).chunks, layer_tape_bytes(config), layer_weight_gradient_bytes(config)
    kept = [len(chunk.layers) * sum(by_layer.values()) + sum(chunk_tape_bytes(config, at, chunk).values())
            - (residual_bytes(config) if shares_input_with_other_tape(config, at, number) else 0) for number, chunk in enumerate(chunks)]
    table = 4 * config.max_position_embeddings * rotary_size(config) * config.rope * (not config.reset_position_ids)
    return [size + table * (size > 0)                          # of which all tapes have a view
            for size in bytes_over_time(config, at, kept, [len(chunk.layers) * sum(left.values()) for chunk in chunks])]


def bytes_over_time(config: Config, at, kept: list[float], left: list[float]) -> list[float]:
    """What is held after each action, by the bytes of each chunk: after its forward, and until its weight gradients."""
    def change(half):
        whole, part = kept[half.chunk], left[half.chunk]
        return {"forward": whole, "backward": -whole,
                "input_backward": part - whole, "weight_backward": -part}[half.kind]

    return list(accumulate(sum(map(change, action.halves)) for action in stage_actions(config, at)))


def shares_input_with_other_tape(config: Config, at, chunk: int) -> bool:
    """Its input is the output on the tape of another chunk of this stage: of several slices it would be a copy."""
    source = config.placement.source(at.pp_rank, Forward(0, chunk))
    return source is not None and source[0] == at.pp_rank and slice_count(config) == 1 and not offloads_to_host(config)


def host_bytes(config: Config, at) -> int:
    """Of what the tapes keep in the host's memory, at most. It is pinned, for which torch takes up to twice as much:
    each tensor's length is rounded up to a power of two."""
    kept = [len(chunk.sublayers) * residual_bytes(config) * offloads_to_host(config) for chunk in stage_model(config, at).chunks]
    return round(max(bytes_over_time(config, at, kept, [0] * len(kept))))


def message_bytes(config: Config, at) -> int:
    """Of messages between stages, or chunks of one, at most: counted in the stage's actions, as P2PCommunicator in
    pipeline.py keeps them. Asked for and not yet taken; sent, until p later ones are under way. One slice's output is
    on the tape already, as long as that lives."""
    table, arriving, sent, tapes, most = config.timetable, {}, [], set(), 0
    receives = receives_to_post(table, ACTIONS_AHEAD["cuda" if config.device == "cuda" else "cpu"])[at.pp_rank]

    def own(half):
        return slice_count(config) > 1 or (half.microbatch, half.chunk) not in tapes

    for action, wanted in zip(stage_actions(config, at), receives):
        arriving |= dict.fromkeys(wanted, True)
        most = max(most, sum(arriving.values()) + sum(map(own, sent)))
        for half in action.halves:
            arriving.pop(message_received(half), None)
        for half in action.halves:                             # the outputs of a pair leave one after the other
            sent = sent[-config.pp:]
            (tapes.add if half.kind == "forward" else tapes.discard)((half.microbatch, half.chunk))
            if given := message_sent(table.placement, at.pp_rank, half):
                taker, message = given
                if taker == at.pp_rank:
                    arriving[message] = own(half)
                else:
                    sent.append(half)
                    most = max(most, sum(arriving.values()) + sum(map(own, sent)))
    return round(residual_bytes(config) * most)


def working_bytes(config: Config, at) -> int:
    """Of what comes and goes, where it is most: an estimate, whose terms are the largest tensors of three moments."""
    e, w, t, n, x = bytes_per_element(config), bytes_per_main_element(config), config.tp, tokens_per_microbatch(config), hidden_bytes(config)
    cuda, (first, *_), (*_, last) = config.device == "cuda", stage_model(config, at).chunks, stage_model(config, at).chunks
    h, ffn, before = config.hidden_size, e * n * config.ffn_hidden_size // t, qkv_and_mlp_bytes(config)[2] // t

    def beside_fp32(inputs, outputs):
        """What a CPU needs for a 16-bit weight gradient: the product, before it is added to fp32; of fp16 both factors
        in fp32."""
        if cuda or e == w:
            return 0
        factors = w * n // slice_count(config) * (inputs + outputs)
        return factors if config.dtype == "float16" else e * inputs * outputs

    head = sum(chunk_tape_bytes(config, at, last).values()) if last.post_process else 0  # gone when the layers' turn comes
    beside = [pair_working_bytes(config, at, resumed - first.pre_process) for resumed in (0, 1, 1 + last.post_process)]
    # backward of an MLP, of one slice of which what is computed again is there
    forgets = GRANULARITIES[config.recompute_granularity]
    again = (ffn * ("activation" in forgets) + (x + before) * ("h" in forgets)) // slice_count(config)
    again += 4 * residual_bytes(config) * offloads_to_host(config)  # x of two sublayers that leave, and of two that come back
    moments = [2 * x + ffn + before + max(0, beside_fp32(h, config.ffn_hidden_size // t) - ffn) - head + beside[2]
               + again]
    if last.post_process:                                                           # forward and backward of the head
        width = local_vocab_size(config, at)
        chunk = min(CHUNK_BYTES["cuda" if cuda else "cpu"] // 4, n * width // slice_count(config))
        chunk *= e if config.fp16_lm_cross_entropy else w
        moments += [2 * x + chunk + beside[0], 2 * x + max(chunk, beside_fp32(h, width)) + beside[1]]
    return int(max(moments)) + gradient_buffer_bytes(config, at)


def gradient_buffer_bytes(config: Config, at) -> int:
    """Of gradients that ZeRO-2 adds up, or has on their way, at most: a sublayer's two matrices, and the word
    embedding's, to which the head adds before, and where chunks meet one more; all buckets that are no matrices; and
    MAX_REDUCES_IN_FLIGHT, which CPUs receive into memory of its own (collectives.py)."""
    if gradient_shards(config) == 1:
        return 0
    flat = bucket_sizes(config, at)
    matrices = sorted(size for kind, size in flat if kind.decay)
    filled = sum(matrices[-2 - config.virtual_stages:]) + sum(size for kind, size in flat if not kind.decay)
    travelling = MAX_REDUCES_IN_FLIGHT * max(size for _, size in flat) * (1 if config.device == "cuda" else 2)
    return bytes_per_main_element(config) * (filled + travelling)


def pair_working_bytes(config: Config, at, sublayers: int) -> float:
    """Of a pair's forward that is through with so many sublayers, none of which its backward has given up in turn, and
    of what both have at hand besides, about 4 X. (The embedding and the head are a turn each.)"""
    if all(len(action.halves) == 1 for action in stage_actions(config, at)):
        return 0
    own, (q, k, before, after) = residual_bytes(config), (one / config.tp for one in qkv_and_mlp_bytes(config))
    forgets = GRANULARITIES[config.recompute_granularity]
    links = [own + ("h" not in forgets) * (own + columns) + ("activation" not in forgets) * rows
             for columns, rows in ((q + 2 * k, q), (before, after))]
    return 4 * hidden_bytes(config) + sum(links[:max(sublayers, 0)])


def tape_and_receive_bytes(config: Config, at) -> int:
    """Of gradients on their way to the sum, with what is still held of tapes, at most: on CPUs a reduce-scatter
    receives into memory of its own (collectives.py), of each chunk after its last action."""
    if optimizer_shards(config) == 1 or gradient_shards(config) > 1 or config.device == "cuda":
        return 0
    chunks, row = stage_model(config, at).chunks, stage_actions(config, at)
    last = {half.chunk: number for number, action in enumerate(row) for half in action.halves}
    part = bytes_per_main_element(config) * sum(size for _, size in bucket_sizes(config, at)) / sum(len(chunk.layers) for chunk in chunks)
    received = [sum(part * len(chunks[chunk].layers) for chunk in last if last[chunk] <= number)
                for number in range(len(row))]
    return round(max(held + here for held, here in zip(tape_bytes_over_time(config, at), received) if here))


def peak_bytes(config: Config, at) -> int:
    """State, messages, and the larger of two moments: activations with what comes and goes beside them, or, once
    backward has used these up, received gradients. An estimate within a few percent."""
    return (sum(state_bytes(config, at).values()) + message_bytes(config, at)
            + max(tape_bytes(config, at) + working_bytes(config, at), tape_and_receive_bytes(config, at)))


def fullest_rank_bytes(config: Config) -> int:
    """The peak of the fullest rank."""
    return max(peak_bytes(config, mesh_at(config, stage)) for stage in range(config.pp))


# What NCCL keeps of a GPU for each connection of a channel, in and out: 10 MiB to receive into (buffers of its three
# protocols, of 4 MiB for large messages: NCCL_BUFFSIZE) and 2 MiB to send from, as NCCL_DEBUG_SUBSYS=ALLOC lists it in
# github.com/NVIDIA/nccl/issues/1685. The quicker the links, the more channels: taken are 24, for NVLink.
CONNECTION_BYTES, CHANNELS = 12 * 2**20, 24


def communicator_bytes(config: Config, at: Mesh) -> int:
    """Of NCCL's own buffers on a GPU, about: outside of torch's allocator, so no part of peak_bytes. A ring has one
    connection in and one out, of however many ranks it is; messages have one with each neighbour, on fewer channels.
    What NCCL adds for trees, and for switches that sum, is left out."""
    if config.device != "cuda":
        return 0
    tied = stage_model(config, at).tied_copy is not None
    rings = CHANNELS * sum((config.world_size > 1, config.tp > 1, config.dp > 1, tied))
    neighbours = sum(at.pp_rank in pair for pair in config.placement.neighbours)
    messages = PIPELINE_THREAD_BLOCKS * (1 + neighbours) if config.pp > 1 else 0           # stages meet in a ring, once
    return CONNECTION_BYTES * (rings + messages)
