"""Computes the memory that attention needs in addition if ranks share the tokens of each sample, in bytes of one rank.

layers/context_parallel.py explains the two ways, all_gather and a2a. The symbols are those of sizes.py. Let c be the
number of ranks that share a sample, and Q and K the bytes of q and of k of a rank's own tokens, for all heads; v is as
large as k. A tape keeps of a layer and microbatch:

    what                              all_gather                                a2a
    q, k, v that attention reads      Q/t + 2 c K/t; on GPUs without a bias     Q/t + 2 K/t, as without cp
                                      c + 1/2 instead of c
    output before it is sent back     none                                      Q/t
    attention bias, for all layers    e s/c x s for each slice, and for each    with --reset-attention-mask:
                                      sample with --reset-attention-mask; GPUs  e s x s for each sample; GPUs
                                      rarely need it                            rarely need it
    numbers of the keys to read,      8 bytes per key                           none
    for all layers

In backward, the gradients of the c K/t keys and values exist several times, so this can be the peak of the step.
"""

from nanodomino.analysis.sizes import bytes_per_element, hidden_bytes, query_and_key_bytes, slice_count
from nanodomino.config.config import Config
from nanodomino.layers.varlen import fits_varlen


def gathers_keys(config: Config) -> bool:
    """Return whether each rank gathers the keys and values of whole samples."""
    return config.cp > 1 and config.cp_comm_type == "all_gather"


def needs_bias(config: Config) -> bool:
    """Return whether attention needs a bias, because a token does not simply attend to all tokens before it. GPUs
    before Ampere always need one, but here count as newer GPUs (layers/varlen.py)."""
    return ((config.reset_attention_mask or gathers_keys(config))
            and not (config.device == "cuda" and fits_varlen(config)))


def bias_bytes(config: Config) -> int:
    """Return the bytes of the attention bias of a microbatch. A rank has the rows of the queries that it computes. The
    samples of a slice share one bias if attention may cross documents."""
    samples = config.micro_batch_size if config.reset_attention_mask else slice_count(config)
    queries = config.seq_length // (config.cp if gathers_keys(config) else 1)
    return bytes_per_element(config) * samples * queries * config.seq_length * needs_bias(config)


def keys_per_token(config: Config) -> float:
    """Return how many keys attention reads, divided by the number of tokens that the rank holds."""
    return (config.cp if needs_bias(config) else config.cp + 0.5) if gathers_keys(config) else 1


def kept_by_exchange(config: Config, statistics: float) -> dict[str, float]:
    """Return {name: bytes} of what the core of an attention layer keeps besides its output, if cp > 1. statistics: the
    bytes of the statistics of the norms of q and k.

    The tape's entry "qkv" has the bytes of q, k and v of own tokens. It stands for qkv itself if a view of it is kept,
    else for those tensors among q, k and v that attention reads and that have these bytes.
    """
    t, (q, k), kept = config.tp, query_and_key_bytes(config), {}
    unfused = config.attention_dropout > 0
    if gathers_keys(config):
        keeps_qkv = config.qk_layernorm or not (k < q or config.rope or unfused)
        kept["keys, values of all ranks"] = 2 * k / t * (keys_per_token(config) - (not keeps_qkv))
        return kept | ({"q before its norm": (q + statistics) / t} if config.qk_layernorm else {})
    if config.qk_layernorm:
        kept["q, k, v before norms"] = (q + 2 * k + statistics) / t
    if not unfused:
        kept["attention output"] = q / t
        if k < q and config.num_query_groups > t * config.cp:
            kept["q by head"] = q / t                          # a copy, because q, k and v arrive group by group
    return kept


def attention_working_bytes(config: Config) -> float:
    """Estimate the peak bytes of temporary tensors in the backward of an attention layer, if cp > 1.

    Besides the gradients of x and y these are the gradients of what attention read, and of what is sent back. On CPUs
    a reduce-scatter receives into another buffer (comm/scatter_and_gather.py).
    """
    t, (q, k) = config.tp, query_and_key_bytes(config)
    if gathers_keys(config):
        return 2 * hidden_bytes(config) + (2 * q + 6 * k * keys_per_token(config)) / t
    return 2 * hidden_bytes(config) + 2 * (2 * q + 2 * k) / t
