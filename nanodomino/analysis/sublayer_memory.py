"""Lists the bytes that a tape keeps of a microbatch in a sublayer: in attention, in an MLP, in experts.

overlap/recompute.py says what recomputation drops. With full recomputation, attention and MLP keep only the norm's
input x. Experts also keep their rows and results, because recomputing them would repeat an all-to-all.

    tensors of a layer's experts            bytes                      a token's k experts get k copies of its row
    rows, results                           k X each                   in full recomputation too
    before and after the activation         k ffn/h X/t each           SwiGLU: 2 k ffn/h X/t before
    router, row order                       a few numbers per token and expert

With tensorwise fp8 the tape keeps h and the MLP's activation in 1 byte per number (layers/fp8.py). Then X/e replaces X.

**Balanced load is assumed.** A rank with popular experts receives more rows than others, and keeps more.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanodomino.analysis import context_parallel
from nanodomino.analysis.sizes import (bytes_per_element, bytes_per_main_element, hidden_bytes, query_and_key_bytes,
                                       residual_bytes, slice_count, tokens_per_microbatch)
from nanodomino.config.config import Config
from nanodomino.layers.activations import ACTIVATIONS
from nanodomino.layers.attention import Attention
from nanodomino.layers.mlp import MLP
from nanodomino.layers.moe import MoE
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.layers.sublayer import Sublayer
from nanodomino.overlap.recompute import GRANULARITIES


@dataclass
class InsideTape:
    """Holds {name: bytes} of what a tape keeps of a sublayer's inside, for one microbatch.

    kept       in any case
    column     the outputs of the column-parallel matmuls; full recomputation drops them
    core       what the core keeps, and its output; selective recomputation drops this too
    deferred   what weight gradients in a later action need
    working    the peak bytes of other tensors in backward, estimated; 0 if another sublayer of each layer has more
    """
    kept: dict[str, float]
    column: dict[str, float]
    core: dict[str, float]
    deferred: dict[str, float]
    working: float = 0.0

    def recomputed(self, config: Config) -> float:
        """Return the bytes that backward recomputes of h and inside, for one microbatch."""
        dropped = GRANULARITIES[config.recompute_granularity]
        return (sum(self.core.values()) * ("activation" in dropped)
                + (hidden_bytes(config) + sum(self.column.values())) * ("h" in dropped))


def attention_tape(config: Config) -> InsideTape:
    e, w, t, n = bytes_per_element(config), bytes_per_main_element(config), config.tp, tokens_per_microbatch(config)
    x, (q, k) = hidden_bytes(config), query_and_key_bytes(config)
    probabilities = n * config.seq_length * config.num_attention_heads // t                # elements, not bytes
    unfused, core = config.attention_dropout > 0, {"context": q / t}                       # the row-parallel input
    statistics = n * (config.num_attention_heads + config.num_query_groups) * norm_statistics_bytes(config)
    if config.cp > 1:
        core |= context_parallel.kept_by_exchange(config, statistics)
    elif config.qk_layernorm:
        v = k if unfused else 0                                # then v has a copy of its own, besides the one in qkv
        core["q, k before norms"] = (q + k + v + statistics) / t
    elif k < q and not config.rope and not unfused:
        core["q by head"] = q / t                              # a copy, because qkv is stored group by group
    every_head = 2 * q / t * (config.cp if context_parallel.gathers_keys(config) else 1)
    if k < q and config.device == "cuda" and not unfused and (context_parallel.needs_bias(config) or e > 2):
        core["keys, values of each head"] = every_head         # see fused_attention in layers/attention.py
    if unfused:                                                # probabilities, dropout mask, their product
        # Each slice keeps a causal mask, unless an attention bias replaces it (shared_tape_bytes).
        causal_masks = 0 if context_parallel.needs_bias(config) else slice_count(config) * config.seq_length ** 2
        core["attention dropout"] = (2 * e + w) * probabilities + causal_masks + (every_head if k < q else 0)
    else:                                                      # from this, fused attention recomputes probabilities
        core["logsumexp"] = w * n * config.num_attention_heads // t
    has_bias = not config.disable_bias_linear or config.add_qkv_bias
    return InsideTape({}, {"qkv": (q + 2 * k) / t}, core, {
        "column-parallel inputs": input_bytes(config, x), "gradients of row-parallel outputs": output_bytes(config, x),
        "context": q / t,
        "gradient of qkv": gradient_bytes(config, (q + 2 * k) / t, has_bias)},
        working=context_parallel.attention_working_bytes(config) if config.cp > 1 else 0.0)


def mlp_tape(config: Config) -> InsideTape:
    x, (before, after) = hidden_bytes(config), activation_bytes(config, activated_features(config, MLP))
    kept = kept_bytes(config, after)
    return InsideTape({}, {"mlp before activation": before}, {"mlp after activation": kept}, {
        "column-parallel inputs": input_bytes(config, x), "gradients of row-parallel outputs": output_bytes(config, x),
        "mlp after activation": kept,
        "gradient before activation": gradient_bytes(config, before, not config.disable_bias_linear)},
        working=2 * x + after + before)


def experts_tape(config: Config) -> InsideTape:
    x, k, slices = hidden_bytes(config), config.moe_router_topk, slice_count(config)
    before, after = activation_bytes(config, k * config.moe_ffn_hidden_size)
    # Gradients of x, y and h; of results and rows, before and after they travel, and sorted; then within the experts.
    # With ep > 1, each slice holds its rows until they have arrived.
    rows = 3 * k * x + k * x / slices if config.ep > 1 else 3 * k * x / slices
    matmuls = max(before + after, before + 2 * k * x, 2 * after if config.device == "cpu" else 0)
    tape = InsideTape(
        {"experts' rows": k * x, "experts' results": k * x, "router": router_tape_bytes(config),
         "row order": 4 * 8 * k * tokens_per_microbatch(config)},
        {"experts before activation": before}, {"experts after activation": after},
        {"experts' rows": k * x, "gradients of experts' results": k * x, "experts after activation": after,
         "gradient before activation": before}, working=3 * x + rows + matmuls / slices)
    if width := config.moe_shared_expert_intermediate_size:
        before, after = activation_bytes(config, width)
        tape.column["shared expert before activation"] = before
        tape.core["shared expert after activation"] = after
        tape.deferred |= {"column-parallel inputs": x, "gradients of row-parallel outputs": x,
                          "shared expert after activation": after, "gradient before its activation": before}
        tape.working += before
    return tape


def kept_bytes(config: Config, size: float) -> float:
    """Return the bytes of a tensor that attention or MLP keep and multiply. size: its bytes in the training type.

    With tensorwise fp8 the tensor has 1 byte per number, and each slice a scale of 4 bytes.
    """
    tensorwise = config.fp8_format and config.fp8_recipe == "tensorwise"
    return size / bytes_per_element(config) + 4 * slice_count(config) if tensorwise else size


def input_bytes(config: Config, x: float) -> float:
    """Return the bytes of h, the input of a column-parallel matmul. A sharded residual stream keeps and gathers it in
    the training type, in which it takes x bytes."""
    return x if config.sequence_shards > 1 else kept_bytes(config, x)


def output_bytes(config: Config, x: float) -> float:
    """Return the bytes of the gradient of y, which takes x in the training type. Columns of a sharded residual stream
    arrive, and are converted, one by one."""
    return x if config.sequence_shards > 1 and config.columns > 1 else kept_bytes(config, x)


def gradient_bytes(config: Config, gradient: float, has_bias: bool) -> float:
    """Return the bytes of a column-parallel output's gradient until its weight gradient is computed. A bias needs the
    gradient in the training type, too."""
    kept = kept_bytes(config, gradient)
    return kept + gradient if has_bias and kept != gradient else kept


def without_fp8(config: Config) -> Config:
    return replace(config, fp8_format=None)


INSIDES: dict[type, Callable] = {Attention: attention_tape, MLP: mlp_tape, MoE: experts_tape}


def router_tape_bytes(config: Config) -> float:
    """Return the bytes of a Routing, with what its autograd graph keeps from the logits to weights and losses."""
    w, n, count, k = (bytes_per_main_element(config), tokens_per_microbatch(config), config.num_experts,
                      config.moe_router_topk)
    if config.moe_router_score_function == "sigmoid":          # the scores, and the sums that they are divided by
        scores = count + 1 + (k + 1 if k > 1 else 0)
    else:
        scores = count if config.moe_router_pre_softmax else k
    numbers = count + scores + k + count + 1                   # logits, scores, weights; the losses: scores, log of sum
    return (n * (w * numbers + 8 * k)                          # 8 k: the numbers of the chosen experts
            + w * config.micro_batch_size * count + 8 * count * slice_count(config))       # shares, counts


def activated_features(config: Config, kind: type) -> int:
    """Return the width of a token's activations in MLP or MoE, summed over all tp ranks."""
    if kind is MLP:
        return config.ffn_hidden_size
    return config.moe_router_topk * config.moe_ffn_hidden_size + (config.moe_shared_expert_intermediate_size or 0)


def activation_bytes(config: Config, width: int) -> tuple[float, float]:
    """Return a rank's bytes of a microbatch's tensors before and after an activation function of `width` features."""
    after = bytes_per_element(config) * tokens_per_microbatch(config) * width / config.tp
    return ACTIVATIONS[config.activation].inputs * after, after


# ---- sums over sublayers

def sublayers_of(config: Config, layer: int) -> list[type]:
    """Return the classes of a layer's two sublayers."""
    return [Attention, MoE if config.has_experts(layer) else MLP]


def tape_bytes(config: Config, sublayers: list[Sublayer]) -> float:
    """Return the bytes that a tape keeps for these sublayers and one microbatch."""
    return sum(count * sum(sublayer_tape_bytes(here, kind).values()) for here, kind, count in alike(config, sublayers))


def deferred_bytes(config: Config, sublayers: list[Sublayer]) -> float:
    """Return the bytes that a tape keeps for these sublayers' weight gradients; see layer_deferred_bytes()."""
    return sum(count * sum(INSIDES[kind](here).deferred.values()) for here, kind, count in alike(config, sublayers))


def alike(config: Config, sublayers: list[Sublayer]) -> list[tuple[Config, type, int]]:
    """Return (Config, class, count) of the sublayers that compute alike. The Config of those in the training type has
    no fp8."""
    counts = Counter((type(sublayer), sublayer.fp8 is not None) for sublayer in sublayers)
    return [(config if fp8 else without_fp8(config), kind, count) for (kind, fp8), count in counts.items()]


def layer_tape_bytes(config: Config, layer=0) -> dict[str, float]:
    """Return {name of tensors: bytes} of what a tape keeps for one layer and one microbatch. Layers count from 0.

    With recomputation the tape keeps less, and backward recomputes the rest (overlap/recompute.py).
    """
    return sum((Counter(sublayer_tape_bytes(config, kind)) for kind in sublayers_of(config, layer)), Counter())


def sublayer_tape_bytes(config: Config, kind: type) -> dict[str, float]:
    """Return layer_tape_bytes() of one sublayer. kind: a key of INSIDES."""
    inside, residual, n = INSIDES[kind](config), residual_bytes(config), tokens_per_microbatch(config)
    dropped = GRANULARITIES[config.recompute_granularity]
    kept = {} if offloads_to_host(config) else {"norm inputs": residual}
    kept |= {"norm statistics": n * norm_statistics_bytes(config) / config.sequence_shards, **inside.kept}
    if "h" in dropped:
        return kept
    kept |= {"column-parallel inputs": residual if kind is MoE else input_bytes(config, residual), **inside.column}
    if config.hidden_dropout:
        kept["hidden dropout"] = bytes_per_main_element(config) * n * config.hidden_size / config.sequence_shards
    return kept if "activation" in dropped else kept | inside.core


def layer_deferred_bytes(config: Config, layer=0) -> dict[str, float]:
    """Return {name: bytes} of what a tape keeps for a layer's weight gradients once its input gradients are computed.

    These are the inputs and the output gradients of all matmuls. They matter for schedules that split backward, such
    as zb-h1. Recomputation and sequence parallelism do not make them smaller.
    """
    return sum((Counter(INSIDES[kind](config).deferred) for kind in sublayers_of(config, layer)), Counter())


def norm_statistics_bytes(config: Config) -> int:
    """Return the bytes per token that a norm keeps besides its input, such as mean and inverse standard deviation."""
    e, w = bytes_per_element(config), bytes_per_main_element(config)
    return NORMALIZATIONS[config.normalization].statistics_bytes(e, w, config.device == "cuda")


def offloads_to_host(config: Config) -> bool:
    """Return whether norm inputs are moved to the host's memory. A CPU run ignores --checkpoint-in-cpu."""
    return config.offloads_to_host and config.device == "cuda"


