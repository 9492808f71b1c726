"""What a training step must take, from the sizes alone: bytes of state, bytes of activations, bytes on the wires.

Pure functions of a Config and of a place in the rank grid: nothing is built, nothing runs. `bench.py comm` and
`bench.py memory` hold them against a real step, byte for byte; `bench.py plan` evaluates them for clusters that nobody
has at hand. Times, which are a model and no count, are in step_time.py.

    b, s, h       samples of a microbatch, tokens of a sample, hidden size; L layers of a stage; V padded vocabulary
    t, p, d       tensor, pipeline, data parallel sizes; m microbatches
    e, w          bytes of an element of the weights, and of an fp32 or wider one
    X = e b s h   one activation

    what                                      bytes
    model state, 16-bit training              6 + 12/d a parameter                    1910.02054, sections 3.1 and 5.1,
    model state, fp32 training                8 + 8/d a parameter                     here with fp32 gradients; padding
    activations of a layer and microbatch     4 X + (4 + 2 ffn/h) X/t + small terms   as in 2205.05198, section 4
    microbatches alive, 1F1B, stage r         min(m, p - r)                           2104.04473, section 2.2
    tensor parallel, a layer and microbatch   2 sums of X forward, 2 back             1909.08053, section 3
    the same in s slices and k columns        s k times as many calls, same bytes     2409.15241, section 3
    embedding; head                           1 sum of X forward; 1 back              1909.08053, section 3
    cross entropy, a microbatch               a maximum of w b s, a sum of 2 w b s    1909.08053, section 3; packed
    a boundary between stages, a microbatch   X down, X up                            2104.04473, section 2.2
    ZeRO-1, a step                            w a parameter scattered, e gathered     1910.02054, section 7
    tied embedding on two stages, a step      a sum of w V h/t; of the own 1/d of it with ZeRO-1

On the wires of n ranks in a ring, each sends 2 (n-1)/n of what is summed, (n-1)/n of what is scattered or gathered.
"""

from dataclasses import dataclass

import torch

from nanodomino.config import Config
from nanodomino.model import stage_layers
from nanodomino.zero import ALIGNMENT, Kind

# ---- the grid


@dataclass(frozen=True)
class Coordinates:
    """A process's place in the grid. A Mesh, which has the same three, will do as well."""
    pp_rank: int
    dp_rank: int
    tp_rank: int


def grid(config: Config) -> list[Coordinates]:
    """Of every rank, in order: tp fastest, then dp, then pp (2104.04473, section 3)."""
    return [Coordinates(stage, replica, rank)
            for stage in range(config.pp) for replica in range(config.dp) for rank in range(config.tp)]


def members(config: Config, at, group: str) -> list[int]:
    """World ranks of this place's group: tp, dp, pp, embedding (first and last stage) or world."""
    def rank(pp_rank, dp_rank, tp_rank):
        return (pp_rank * config.dp + dp_rank) * config.tp + tp_rank
    return {"tp": [rank(at.pp_rank, at.dp_rank, i) for i in range(config.tp)],
            "dp": [rank(at.pp_rank, i, at.tp_rank) for i in range(config.dp)],
            "pp": [rank(i, at.dp_rank, at.tp_rank) for i in range(config.pp)],
            "embedding": [rank(i, at.dp_rank, at.tp_rank) for i in (0, config.pp - 1)],
            "world": list(range(config.world_size))}[group]


def ends(config: Config, at) -> tuple[bool, bool]:
    """Whether this place's stage is the first, and whether it is the last."""
    return at.pp_rank == 0, at.pp_rank == config.pp - 1


def layers(config: Config, at) -> int:
    return len(stage_layers(config.num_layers, at.pp_rank, config.pp))


def element(config: Config) -> int:
    """e: bytes of an element of the weights and activations."""
    return getattr(torch, config.dtype).itemsize


def wide(config: Config) -> int:
    """w: bytes of what is kept in fp32, or in the wider type of the weights."""
    return max(4, element(config))


def tokens(config: Config) -> int:
    """Of a microbatch."""
    return config.micro_batch_size * config.seq_length


def activation(config: Config) -> int:
    """X: bytes of the activation of a microbatch."""
    return element(config) * tokens(config) * config.hidden_size


def logits_width(config: Config, at) -> int:
    """Logits of a token on this rank: its words, rounded up to 8 (VocabParallelEmbedding)."""
    rows = config.padded_vocab_size // config.tp
    words = min(max(config.vocab_size - rows * at.tp_rank, 0), rows)
    return min(-(-words // 8) * 8, rows)


# ---- model state

def parameters(config: Config, at) -> list[tuple[int, Kind]]:
    """(elements on this rank, kind) of each parameter, in the model's order."""
    h, t, ffn = config.hidden_size, config.tp, config.ffn_hidden_size
    first, last = ends(config, at)
    matrix, table = Kind(decay=True, sharded=True, tied=False), Kind(decay=True, sharded=False, tied=False)
    shard, copy = Kind(decay=False, sharded=True, tied=False), Kind(decay=False, sharded=False, tied=False)
    two_copies = config.tied and config.pp > 1
    words = config.padded_vocab_size * h // t

    norm = [(h, copy), (h, copy)]
    attention = [(3 * h * h // t, matrix), (3 * h // t, shard), (h * h // t, matrix), (h, copy)]
    mlp = [(ffn * h // t, matrix), (ffn // t, shard), (h * ffn // t, matrix), (h, copy)]
    found = [(words, Kind(True, True, two_copies))] if first or (last and config.tied) else []
    found += [(config.max_position_embeddings * h, table)] if first else []
    found += layers(config, at) * (norm + attention + norm + mlp)
    found += norm if last else []
    return found + ([(words, matrix)] if last and not config.tied else [])


def parts(config: Config) -> int:
    """Into how many parts the optimizer is cut."""
    return config.dp if config.zero_stage == 1 else 1


def buckets(config: Config, at) -> list[tuple[Kind, int]]:
    """(kind, elements with padding) of each flat buffer. Each parameter is rounded up to ALIGNMENT elements, the whole
    to a multiple of that for every part; a buffer is closed once it holds bucket_size parameters."""
    open_buckets, closed = {}, []
    for count, kind in reversed(parameters(config, at)):
        open_buckets.setdefault(kind, []).append(count)
        if sum(open_buckets[kind]) >= config.bucket_size:
            closed.append((kind, open_buckets.pop(kind)))
    return [(kind, round_up(sum(round_up(count, ALIGNMENT) for count in counts), ALIGNMENT * parts(config)))
            for kind, counts in closed + list(open_buckets.items())]


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def state_bytes(config: Config, at) -> dict[str, int]:
    """Of parameters, gradients and optimizer on a rank: exact, with the padding and AdamW's count of each buffer."""
    e, w, flat = element(config), wide(config), buckets(config, at)
    padded = sum(size for _, size in flat)
    kept = 2 if e == w else 3                                  # two moments, and of 16-bit weights a master copy
    return {"parameters": e * padded, "gradients": w * padded,
            "optimizer": kept * w * padded // parts(config) + 4 * len(flat)}


def state_per_parameter(config: Config) -> float:
    """Bytes, without padding: 6 + 12/d or 8 + 8/d."""
    e, w = element(config), wide(config)
    return e + w + (2 if e == w else 3) * w / parts(config)


# ---- activations

def kept_by_layer(config: Config, at) -> dict[str, float]:
    """Bytes that Domino's tape keeps of one layer and one microbatch, by what they are. Backward reads each of them."""
    e, w, t, n, x = element(config), wide(config), config.tp, tokens(config), activation(config)
    ffn = e * n * config.ffn_hidden_size
    scores = n * config.seq_length * config.num_attention_heads // t           # attention probabilities, counted
    statistics = w if config.device == "cuda" else e
    kept = {"norm inputs": 2 * x,                              # x', which the norm differentiates itself at
            "norm statistics": 2 * 2 * n * statistics,         # its mean and deviation, of each token
            "product inputs": 2 * x,                           # h: the column-parallel weight gradient
            "qkv": 3 * x / t,                                  # q, k, v with their bias: attention's backward
            "context": x / t,                                  # its output: its backward, dense's weight gradient
            "mlp before gelu": ffn / t,                        # gelu's backward
            "mlp after gelu": ffn / t}                         # dense_4h_to_h's weight gradient
    if config.attention_dropout:                               # by hand: probabilities, their mask, their product
        slices = min(config.slices, config.micro_batch_size)   # each has a mask of the future, and a factor
        kept["attention dropout"] = (2 * e + w) * scores + slices * (config.seq_length ** 2 + 8)
    else:                                                      # from which its backward finds the probabilities again
        kept["logsumexp"] = w * n * config.num_attention_heads // t
    if config.hidden_dropout:
        kept["hidden dropout"] = 2 * w * n * config.hidden_size
    return kept


def kept_by_ends(config: Config, at) -> dict[str, float]:
    """The same of what is not a layer. The first norm's input is the stage's: the embedding's or the message before."""
    w, n, x, (first, last) = wide(config), tokens(config), activation(config), ends(config, at)
    mask = w * n * config.hidden_size if config.hidden_dropout else 0
    kept = {"tokens, labels, positions, mask": (3 * 8 + 4) * n}
    if first and mask:
        kept["embedding dropout"] = mask
    if last:                                                   # the bridge into the head
        kept["head"] = 2 * x + 2 * n * (w if config.device == "cuda" else element(config))
        kept["softmax"] = w * n * logits_width(config, at)
        kept["losses"] = w * n
    else:
        kept["output"] = x
    return kept


def alive(config: Config, at) -> int:
    """Microbatches whose activations a stage holds at once."""
    return config.microbatches if config.schedule == "gpipe" else min(config.microbatches, config.pp - at.pp_rank)


def activation_bytes(config: Config, at) -> int:
    """Of the tapes of all microbatches that are alive at once."""
    each = layers(config, at) * sum(kept_by_layer(config, at).values()) + sum(kept_by_ends(config, at).values())
    return int(alive(config, at) * each)


def message_bytes(config: Config, at) -> int:
    """Of messages between stages, at most: a stage keeps what it has sent until p later ones are under way (Mail in
    pipeline.py), and has asked for the next of each direction. One slice's output is on the tape already."""
    first, last = ends(config, at)
    sent = min(config.microbatches, config.pp)
    on_tape = alive(config, at) if min(config.slices, config.micro_batch_size) == 1 else 0
    return activation(config) * ((0 if last else max(sent - on_tape, 0) + 1) + (0 if first else sent + 1))


def working_bytes(config: Config, at) -> int:
    """Of what comes and goes, where it is most: an estimate, whose terms are the largest tensors of three moments."""
    e, w, t, n, x, last = (element(config), wide(config), config.tp, tokens(config), activation(config),
                           ends(config, at)[1])
    logits, ffn = n * logits_width(config, at), e * n * config.ffn_hidden_size // t
    product = e * config.hidden_size * config.ffn_hidden_size // t if e < w else 0  # a weight gradient, to be widened
    head = sum(kept_by_ends(config, at).values()) if last else 0                    # gone when the layers' turn comes
    moments = [2 * x + 2 * ffn + max(0, product - ffn) - head]                      # backward of an MLP
    if last:                                                                        # forward and backward of the head
        slices = min(config.slices, config.micro_batch_size)
        moments += [2 * x + w * logits // slices,
                    2 * x + (e * logits + e * config.hidden_size * logits_width(config, at) if e < w else 0)]
    return int(max(moments))


def received_bytes(config: Config, at) -> int:
    """Of gradients on their way to the sum, at the end of backward: on CPUs a reduce-scatter receives into memory of
    its own (collectives.py)."""
    scattered = parts(config) > 1 and config.device != "cuda"
    return wide(config) * sum(size for _, size in buckets(config, at)) if scattered else 0


def peak_bytes(config: Config, at) -> int:
    """State, messages, and the larger of two moments: activations with what comes and goes beside them, or, once
    backward has used these up, received gradients. An estimate within a few percent."""
    return (sum(state_bytes(config, at).values()) + message_bytes(config, at)
            + max(activation_bytes(config, at) + working_bytes(config, at), received_bytes(config, at)))


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


def wire_bytes(kind: str, payload: float, ranks: int) -> float:
    """What each of `ranks` in a ring sends. What is received, another one has sent."""
    around = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks,
              "all_gather": (ranks - 1) / ranks, "send": 1.0, "receive": 0.0}
    return around.get(kind, 0.0) * payload                     # of a kind that has no formula nobody knows


def chunks(count: int, size: int) -> int:
    """How many pieces torch.chunk makes of `size`: `count` or fewer."""
    return -(-size // -(-size // count))


def traffic(config: Config, at) -> list[Traffic]:
    """Everything that a rank puts on the wires, or awaits from them, in one step."""
    return tensor_parallel(config, at) + pipeline(config, at) + replicas(config, at)


def tensor_parallel(config: Config, at) -> list[Traffic]:
    """Each pair of products costs one sum of X forward (of its outputs) and one backward (of its input's gradient)."""
    if config.tp == 1:
        return []
    (first, last), w, n, x = ends(config, at), wide(config), tokens(config), activation(config)
    slices = config.microbatches * min(config.slices, config.micro_batch_size)
    cut = slices * chunks(config.columns, config.hidden_size)
    sublayers = 2 * layers(config, at)

    def sums(calls, size, why, backward=False):
        return Traffic("tp", "all_reduce", calls, config.microbatches * size, why, backward)

    found = [sums(sublayers * cut, sublayers * x, "layers forward"),
             sums(sublayers * cut, sublayers * x, "layers backward", backward=True)]
    found += [sums(slices, x, "embedding")] if first else []
    found += [sums(2 * slices, 3 * w * n, "cross entropy"), sums(cut, x, "head", backward=True)] if last else []
    return found


def pipeline(config: Config, at) -> list[Traffic]:
    """One X over each boundary forward, one back, for each microbatch."""
    m, (first, last) = config.microbatches, ends(config, at)
    size = m * activation(config)
    found = [] if last else [Traffic("pp", "send", m, size, "activations"),
                             Traffic("pp", "receive", m, size, "gradients", backward=True)]
    return found + ([] if first else [Traffic("pp", "receive", m, size, "activations"),
                                      Traffic("pp", "send", m, size, "gradients", backward=True)])


def replicas(config: Config, at) -> list[Traffic]:
    """Once a step: gradients are summed, weights gathered; first and last stage agree on a tied matrix, all ranks on
    the step."""
    e, w, flat = element(config), wide(config), buckets(config, at)
    padded, count = sum(size for _, size in flat), len(flat)
    tied = [size // parts(config) for kind, size in flat if kind.tied]
    found = [Traffic("embedding", "all_reduce", len(tied), w * sum(tied), "tied embedding")] if tied else []
    if config.dp > 1 and config.zero_stage == 1:
        found += [Traffic("dp", "reduce_scatter", count, w * padded, "gradients", backward=True),
                  Traffic("dp", "all_gather", count * (1 if config.device == "cuda" else config.dp), e * padded,
                          "weights")]                          # on CPUs a broadcast of each replica's part
    elif config.dp > 1:
        found += [Traffic("dp", "all_reduce", count, w * padded, "gradients", backward=True)]
    return found + [Traffic("world", "all_reduce", 1, 4 * 8, "loss, tokens, norm, stop")]


def by_group(found: list[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """(group, kind) -> (calls, bytes)."""
    sums = {}
    for one in found:
        calls, size = sums.get((one.group, one.kind), (0, 0))
        sums[one.group, one.kind] = (calls + one.calls, size + one.bytes)
    return sums
