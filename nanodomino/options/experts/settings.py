"""The settings of experts, and what it changes in the core."""

import math
from dataclasses import dataclass, replace

from nanodomino.errors import require
from nanodomino.optim.optimizers import OptimizerSpec, SignUpdate
from nanodomino.options.experts import MoE, MoEInside
from nanodomino.options.router import SCORE_FUNCTIONS
from nanodomino.settings.presets import LLAMA, LLAMA_FIELDS, PRESET_FIELDS
from nanodomino.settings.rules import divisors
from nanodomino.settings.flags import family_setting, layout_setting, model_setting

EXPERTS = "--num-experts"            # what most settings need to have an effect
# A token passes through as many weights of experts in nano-moe as of MLPs in nano-llama. The other sizes come from the
# configurations published with the models' weights (2401.04088, 2505.09388).
PRESETS = {name: LLAMA | dict(zip(PRESET_FIELDS + LLAMA_FIELDS, values)) | more for name, *values, more in (
    ("nano-moe",      8,   96,  8,  128, 4e-3,     16,  4, 0.06,  4,   128, dict(
        num_experts=8, moe_aux_loss_coeff=0.01)),
    ("mixtral-8x7b", 32, 4096, 32, 4096, 3e-4,    512,  1, 0.02,  8, 14336, dict(
        untie_embeddings_and_output_weights=True, rotary_base=1_000_000.0, num_experts=8, moe_aux_loss_coeff=0.01)),
    ("qwen3-30b-a3b", 48, 2048, 32, 4096, 3e-4,   512,  1, 0.02,  4,  6144, dict(
        untie_embeddings_and_output_weights=True, kv_channels=128, rotary_base=1_000_000.0, layernorm_epsilon=1e-6,
        qk_layernorm=True, num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768, moe_aux_loss_coeff=0.001)),
)}
SIGN = OptimizerSpec(lambda groups, config, zero: SignUpdate(groups, config.moe_router_bias_update_rate), moments=(),
                     counts_in_norm=False)


@dataclass(frozen=True)
class Settings:
    """The part of Config that is about experts."""
    num_experts: int = model_setting(
        None, "number of experts in a layer with experts (default: the preset's, else no layer has experts)",
        derived=True, at_most=4096)
    moe_layer_freq: int = model_setting(
        1, "give every Nth layer experts instead of an MLP, from the first layer on", needs=EXPERTS)
    moe_router_topk: int = family_setting("number of experts that each token uses", needs=EXPERTS)
    moe_ffn_hidden_size: int = model_setting(
        None, "width of each expert (default: --ffn-hidden-size)", derived=True, at_most=2**24, needs=EXPERTS)
    moe_shared_expert_intermediate_size: int = model_setting(
        None, "width of an expert that every token uses besides (default: none)", derived=True, at_most=2**24,
        needs=EXPERTS)
    moe_router_score_function: str = model_setting(
        "softmax", "how the router turns logits into scores", choices=SCORE_FUNCTIONS, needs=EXPERTS)
    moe_router_pre_softmax: bool = model_setting(
        False, "weight each chosen expert by its softmax over all experts, not over the chosen ones",
        needs=(EXPERTS, "--moe-router-score-function softmax"))
    moe_router_topk_scaling_factor: float = model_setting(
        1.0, "factor on the weights of the chosen experts", above=0.0, needs=EXPERTS)
    moe_router_enable_expert_bias: bool = model_setting(
        False, "balance the experts by a bias on their scores that follows the load", needs=EXPERTS)
    moe_router_bias_update_rate: float = model_setting(
        1e-3, "change of the expert bias after each step", affects="losses", above=0.0,
        needs=(EXPERTS, "--moe-router-enable-expert-bias"))
    moe_aux_loss_coeff: float = family_setting(
        "coefficient of the load-balancing loss of each sample; it and the z-loss are summed over all tokens, also "
        "those that the loss mask leaves out, and divided by the number of tokens that count",
        affects="losses", needs=EXPERTS)
    moe_z_loss_coeff: float = model_setting(
        0.0, "coefficient of the router's z-loss", affects="losses", needs=EXPERTS)
    expert_model_parallel_size: int = layout_setting(
        1, "number of ranks that share the experts of a layer; divides dp x cp and --num-experts", alias="--ep",
        needs=EXPERTS)

    @property
    def ep(self) -> int:
        return self.expert_model_parallel_size

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts instead of an MLP."""
        return bool(self.num_experts) and layer % self.moe_layer_freq == 0

    def mlp_class(self, layer):
        return MoE if self.has_experts(layer) else super().mlp_class(layer)

    def inside(self, sublayer, mesh, ops, compiled):
        if isinstance(sublayer, MoE):
            return MoEInside(sublayer, ops, compiled)
        return super().inside(sublayer, mesh, ops, compiled)

    @property
    def communicates_inside(self):
        return self.ep > 1 or super().communicates_inside

    @property
    def expert_replicas(self) -> str:
        """The group of ranks that hold the same experts."""
        return "expert_dp" if self.ep > 1 else "dp"

    def more_groups(self, rows):
        """Neighbours in the dp group share the experts. The counts have their own group; on the rows' group they would
        queue behind rows."""
        if self.ep == 1:
            return super().more_groups(rows)
        neighbours = [row[i:i + self.ep] for row in rows["dp"] for i in range(0, len(row), self.ep)]
        same = [row[i::self.ep] for row in rows["dp"] for i in range(self.ep)]
        return super().more_groups(rows) | {"ep": neighbours, "ep_counts": neighbours, "expert_dp": same}

    @property
    def thread_blocks(self):
        return super().thread_blocks | {"ep": 16, "ep_counts": 1, "expert_dp": 16}

    @property
    def groups_that_generate_together(self):
        return (*super().groups_that_generate_together, *(("ep",) if self.ep > 1 else ()))

    @property
    def statistics(self):
        """The counts of each layer with experts: how many tokens chose each expert, then the sum of the router's
        losses. The layers behind the head are numbered after the model's last layer."""
        return super().statistics | {
            f"{self.layer_site(layer)}.mlp": self.num_experts + 1
            for layer in filter(self.has_experts, range(self.num_layers + self.layers_behind_head))}

    @property
    def updates(self):
        return super().updates | {"sign": (SIGN, 0.0)}

    # ---- reports and estimates

    @property
    def sent_inside(self):
        return (*super().sent_inside, *(("all-to-all",) if self.ep > 1 else ()))

    def active_share(self, kind):
        """A token uses k of the E experts."""
        return self.moe_router_topk / self.num_experts if "ep" in kind.shards else super().active_share(kind)

    @property
    def layer_period(self):
        return self.moe_layer_freq if self.num_experts else super().layer_period

    @property
    def weight_shards(self):
        return self.ep * super().weight_shards

    def on_one_rank(self):
        return replace(super().on_one_rank(), expert_model_parallel_size=1)

    def step_metrics(self, result):
        """auxiliary_loss: what the auxiliary losses and z-losses of all routers add to the loss; see router.py
        busiest_expert: the largest load in any layer
        expert_load: {layer: how often each expert was chosen, divided by the mean of the layer}
        """
        metrics, tokens = super().step_metrics(result), result.tokens or math.inf
        rows = {name.removesuffix(".mlp"): row for name, row in self.counts_of(result.statistics).items()
                if name.endswith(".mlp")}
        if rows:
            loads = {layer: [round(count * self.num_experts / sum(counts), 4) for count in counts]
                     for layer, (*counts, _) in rows.items()}
            metrics |= dict(auxiliary_loss=sum(row[-1] for row in rows.values()) / tokens,
                            busiest_expert=max(map(max, loads.values())), expert_load=loads)
        return metrics

    def step_in_words(self, metrics):
        words = super().step_in_words(metrics)
        if "busiest_expert" not in metrics:
            return words
        return (f"{words} | auxiliary loss {metrics['auxiliary_loss']:.4f} | busiest expert "
                f"{metrics['busiest_expert']:.2f} x")

    # ---- defaults and rules

    @property
    def ranks_beside_tp_and_pp(self):
        return math.lcm(self.ep, super().ranks_beside_tp_and_pp)

    def option_defaults(self):
        defaults = dict(moe_router_topk=2, moe_aux_loss_coeff=0.0,
                        moe_ffn_hidden_size=self.ffn_hidden_size if self.num_experts else None)
        return super().option_defaults() | {
            name: value for name, value in defaults.items() if getattr(self, name) is None}

    @property
    def sizes_divisible_by_tp(self):
        own = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
        return (*super().sizes_divisible_by_tp, *(own if self.num_experts else ()))

    def check_rules(self):
        if self.num_experts:
            self.check_expert_rules()
        super().check_rules()

    def check_expert_rules(self):
        require(self.disable_bias_linear, "experts have no biases, so --num-experts needs --disable-bias-linear; add "
                "it")
        require(self.moe_router_topk <= self.num_experts, f"moe-router-topk {self.moe_router_topk} must be at most "
                f"num-experts {self.num_experts}; try --moe-router-topk {self.num_experts}")
        require(self.moe_router_topk > 1 or self.moe_router_score_function != "softmax" or self.moe_router_pre_softmax,
                "moe-router-topk must be at least 2 with --moe-router-score-function softmax, but is 1: the softmax "
                "over a single chosen expert is always 1, so the router would learn nothing from the loss of the "
                "model; add --moe-router-pre-softmax")
        both = math.gcd(self.num_experts, self.dp * self.sample_parts)
        require(both % self.ep == 0, f"expert-model-parallel-size {self.ep} must divide num-experts {self.num_experts} "
                f"and the data x context parallel size {self.dp} x {self.sample_parts}; try --ep {divisors(both)}")

    def check_given(self, names):
        super().check_given(names)
        require("ffn_hidden_size" not in names or not self.num_experts or self.moe_layer_freq > 1
                or self.ffn_hidden_size == self.moe_ffn_hidden_size,
                f"--ffn-hidden-size {self.ffn_hidden_size} has no effect, because every layer has experts of width "
                f"{self.moe_ffn_hidden_size}; leave it out")
