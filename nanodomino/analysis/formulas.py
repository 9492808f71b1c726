"""The formulas that a student of distributed training should know by heart. dry_run/ finds out all the rest.

    b, s, h, ffn   samples of a microbatch, tokens of a sample, hidden size, width of the MLP
    t, d, m        tensor and data parallel sizes, microbatches of a step
    X              bytes of one activation [b, s, h], such as the output of a layer

    what                                            bytes                            source
    model state, 16-bit training                    6 + 12/d per parameter           1910.02054, sections 3.1 and 5.1,
    model state, fp32 training                      8 + 8/d per parameter            here with fp32 gradients and AdamW
      ZeRO-2, 16-bit; fp32                          2 + 16/d; 4 + 12/d               1910.02054, section 5.2
    activations of a GPT-2 layer and microbatch     4 X + (4 + 2 ffn/h) X/t          2205.05198, section 4; norm
      selective recomputation                       4 X + (3 + ffn/h) X/t            statistics and log-sum-exp come on
      full recomputation                            2 X                              top
      sequence parallelism                          4 X becomes 4 X/t, 2 X 2 X/t     2205.05198, section 4.2.2
    microbatches alive on stage r of p              1F1B: min(m, p - r)              2104.04473, section 2.2

    what a rank launches                            collectives                      source
    tensor parallel, a layer and microbatch         2 all-reduces of X forward,      1909.08053, section 3
                                                    2 backward
      sequence parallelism                          2 all-gathers and 2 reduce-      2205.05198, section 4.2.2
                                                    scatters forward; 4 and 2
                                                    backward, because each sublayer
                                                    gathers h again
      Domino with n slices                          n times as many, each 1/n        2409.15241, section 3
    a stage boundary and microbatch                 X forward, X back                2104.04473, section 2.2
    ZeRO-1, a step                                  per parameter 4 bytes reduce-    1910.02054, section 7
                                                    scattered, 2 all-gathered

    bubble of 1F1B on equal stages                  (p - 1)/m of the ideal time      2104.04473, section 2.2

A test compares these with a dry run.
"""

from collections import Counter

from nanodomino.settings.config import Config
from nanodomino.model import meta_model
from nanodomino.parallel import VocabParallelEmbedding


def parameters_by_kind(config: Config) -> Counter:
    """Count the parameters of the whole model by their ParameterKind, as parameter_count() does."""
    model, count = meta_model(config), Counter()
    for weight in model.parameters():
        count[weight.spec.kind] += weight.numel()
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            count[module.weight.spec.kind] -= padding
    return count


def parameter_count(config: Config) -> int:
    """Count the parameters of the whole model. A tied matrix counts once; rows that pad the vocabulary do not count."""
    return sum(parameters_by_kind(config).values())


def active_parameter_count(config: Config) -> int:
    """Count the parameters that a token uses."""
    return round(sum(count * config.active_share(kind) for kind, count in parameters_by_kind(config).items()))


def flops_per_token(config: Config) -> float:
    """Return the training FLOPs per token: 6 N + 12 L n d s (PaLM, 2204.02311, appendix B; nanoGPT).

    N: active parameters without learned position embeddings; L: layers; n heads of size d. Attention counts all pairs
    of tokens, although a causal mask needs only half of them, and with a window at most its tokens for each query. Each
    layer behind the head multiplies by the head once more.
    """
    learned = config.position_embedding_type == "learned_absolute"
    parameters = active_parameter_count(config) - learned * config.max_position_embeddings * config.hidden_size
    parameters += config.mtp_num_layers * config.vocab_size * config.hidden_size
    windows = map(config.attention_window, range(config.num_layers + config.mtp_num_layers))
    keys = sum(config.seq_length if window is None else min(window + 1, config.seq_length) for window in windows)
    return 6 * parameters + 12 * keys * config.num_attention_heads * config.kv_channels


def mfu(config: Config, seconds: float, peak: float) -> float:
    """Return the model FLOPs utilization: the FLOPs of a step (flops_per_token) divided by those that all GPUs could do
    in `seconds`. peak: FLOP/s of one GPU."""
    return flops_per_token(config) * config.global_batch_size * config.seq_length / (seconds * peak * config.world_size)


def state_bytes_per_parameter(config: Config) -> float:
    """Return the bytes of model state that a rank holds per parameter in the matrices of layers, without padding."""
    element, shards = config.params_dtype.itemsize, config.dp * config.cp
    main = max(4, element)                                     # gradients, moments and master weights
    stored = len(config.optimizer_spec.moments) + (element < main)
    return (element + main / (shards if config.zero_stage == 2 else 1)
            + stored * main / (shards if config.zero_stage else 1))


def bytes_sent(kind: str, payload: float, ranks: int) -> float:
    """Return the bytes that each rank sends to the other `ranks` - 1 ranks, in a ring except for an all-to-all; 0 for
    other kinds, such as receive.

    payload: the bytes of the whole tensor: what is all-reduced or sent, a reduce-scatter's or an all-to-all's input, an
        all-gather's output.
    """
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0,
               **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), (ranks - 1) / ranks)}
    return factors.get(kind, 0.0) * payload
