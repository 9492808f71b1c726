"""What the files of the story ask their Config: which class computes a part of the model, what it needs, what it sends.

The story (see nanodomino/__init__.py) trains a dense GPT with tensor, pipeline and data parallelism. What goes beyond
that lies in options/, a file each. The story does not import these files: it calls a method below, and the method
chooses. So each choice is made in one place, and a search for num_experts finds all that depends on `--num-experts`.
"""

import dataclasses
import math
from functools import partial
from itertools import islice

import torch

from nanodomino.comm.device import capability_of
from nanodomino.errors import require
from nanodomino.generate.generation import KeyValueCache
from nanodomino.layers.sublayers import MLP
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.options import (context_parallel, documents, experts, fp8, multi_token_prediction, recompute, router,
                                sequence_parallel)
from nanodomino.overlap.compute import LinearPair
from nanodomino.overlap.slices import ReplicatedResidual

# the values of the settings that choose from a table of an option
CP_COMM_TYPES, SCORES, GRANULARITIES = context_parallel.ATTENTION, router.SCORE_FUNCTIONS, recompute.GRANULARITIES
FP8_FORMATS, FP8_RECIPES = fp8.FORMATS, fp8.RECIPES


class Choices:
    """The base of Config, whose fields these methods read."""

    # what the stage with the head holds, prepares, runs and reports behind the head: often nothing
    behind_head = property(lambda self: multi_token_prediction.MultiTokenPrediction(self))
    # whether the last stage uses the word embedding: as its head, or behind the head
    words_at_end = property(lambda self: self.tied or self.behind_head.layers > 0)
    # layers are alike if their numbers differ by a multiple of this number
    layer_period = property(lambda self: self.moe_layer_freq if self.num_experts else 1)
    # the number of tp ranks that share the rows of the residual stream
    sequence_shards = property(lambda self: self.tp if self.sequence_parallel else 1)
    # {name: size} of the axes between dp and tp
    inner_axes = property(lambda self: {"cp": self.cp} if self.cp > 1 else {})
    # how matrices of layers are updated: a key of `updates`
    matrix_update = property(lambda self: "muon" if self.optimizer == "muon" else "decay")
    # whether positions or attention depend on where the documents in a sample end
    uses_document_boundaries = property(lambda self: self.reset_position_ids or self.reset_attention_mask)
    # whether some attention is not plainly causal; then it uses varlen_attn or a bias
    masks_attention = property(lambda self: bool(self.reset_attention_mask or self.window_size)
                               or self.cp > 1 and self.cp_comm_type == "all_gather")
    # whether chunks without embedding and head need the tokens
    all_chunks_read_tokens = property(lambda self: self.cp > 1 or self.uses_document_boundaries)
    # the class that keeps keys and values during generation
    cache_class = property(lambda self: documents.DocumentCache if self.uses_document_boundaries else KeyValueCache)
    # the names of groups whose ranks must choose the same tokens
    groups_that_generate_together = property(lambda self: ("ep",) if self.ep > 1 else ())

    # ---- the model

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts instead of an MLP."""
        return bool(self.num_experts) and layer % self.moe_layer_freq == 0

    def mlp_class(self, layer: int) -> type:
        """Return the class of a layer's second sublayer."""
        return experts.MoE if self.has_experts(layer) else MLP

    def attention_window(self, layer: int) -> int | None:
        """Return how many tokens before itself a token sees in this layer, counted from 0; None: all."""
        return None if layer < self.full_attention_layers else self.window_size

    def layer_site(self, layer: int) -> str:
        """Return the name of a layer, which seeds its initial weights and dropout masks. Layers behind the head are
        numbered after the model's last layer."""
        return f"layers.{layer}" if layer < self.num_layers else f"mtp.{layer - self.num_layers}.layer"

    @property
    def statistics(self) -> dict[str, int]:
        """{name: count} of the numbers of the whole model that a step adds up for the report. For a layer with experts
        they are how many tokens chose each expert, and the sum of the router's losses."""
        layers = filter(self.has_experts, range(self.num_layers + self.behind_head.layers))
        return self.behind_head.statistics | {f"{self.layer_site(layer)}.mlp": self.num_experts + 1 for layer in layers}

    # ---- a sublayer in training

    def branch(self, sublayer, layer: int, mesh, ops, compiled):
        """Return the object that computes everything between a sublayer's norm and its reduce; see LinearPair.
        layer: the number of the sublayer's layer, from 0."""
        if isinstance(sublayer, experts.MoE):
            return experts.MoEBranch(sublayer, ops, compiled)
        factor = {}
        if self.fp8_format and not (self.first_last_layers_bf16 and layer in (0, self.num_layers - 1)):
            recipe = fp8.Fp8Recipe(self.fp8_format, self.fp8_recipe, self.params_dtype, compiled, self.fp8_wgrad)
            factor = dict(factor=partial(fp8.Fp8Weight, recipe=recipe))
        if self.cp > 1 and sublayer.attends:
            return context_parallel.ATTENTION[self.cp_comm_type](sublayer, ops, compiled, mesh, **factor)
        return LinearPair(sublayer, ops, compiled, **factor)

    def residual_stream(self, mesh) -> ReplicatedResidual:
        """Return the object that gathers and reduces the residual stream."""
        return (sequence_parallel.ShardedResidual if self.sequence_shards > 1 else ReplicatedResidual)(mesh.tp_group)

    def tape_policy(self, device, slices: int, residual_norm) -> recompute.TapePolicy:
        """Return the object that says what the tapes of a stage keep."""
        return recompute.TapePolicy(self, device, slices, residual_norm)

    # ---- data

    def prepare_batch(self, batch, rows, end_of_text: int):
        """Add to the batch what depends on documents and what the depths behind the head need; return the batch.
        rows [b, s + 1]: its token ids, in the host's memory."""
        return self.behind_head.prepare(documents.mark_documents(self, batch, rows, end_of_text), rows, end_of_text)

    def own_places(self, whole, mesh, dim=1):
        """Return this rank's tokens of `whole` [b, s, ..]. dim: the dimension of s."""
        return whole if self.cp == 1 else context_parallel.own_places(whole, mesh, dim)

    def own_part(self, batch, mesh):
        """Return the batch with this rank's tokens of each sample."""
        return batch if self.cp == 1 else context_parallel.own_part(batch, mesh)

    # ---- ranks and parameters

    @property
    def mesh_options(self) -> dict:
        """The arguments of make_mesh() beside the sizes of pp, dp and tp."""
        return dict(inner_axes=self.inner_axes, more_groups=partial(experts.expert_groups, self.ep))

    @property
    def thread_blocks(self) -> dict[str, int]:
        """{group: the most thread blocks of a GPU that a collective of the group occupies}. A receive occupies its
        blocks from when it is posted until the message arrives, and takes them from the matmuls that hide it."""
        return {"tp": self.tp_max_ctas, "ep_counts": 1, **dict.fromkeys(("dp", "pp", "ep", "expert_dp"), 16)}

    def on_one_rank(self):
        """Return the Config with which one process would hold the whole model."""
        return dataclasses.replace(self, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
                                   context_parallel_size=1, expert_model_parallel_size=1)

    @property
    def seq_length_divisor(self) -> int:
        """The number that must divide seq_length. With context parallelism a rank holds two equal parts of a sample,
        and sequence parallelism cuts each part again."""
        return self.cp * math.lcm(2, self.sequence_shards) if self.cp > 1 else self.sequence_shards

    def addends(self, shards: tuple[str, ...]) -> set[str]:
        """Return the groups over which each rank computes only an addend of a parameter's gradient. With a sharded
        stream, each tp rank has only some of the tokens. shards: the axes over which the parameter is cut."""
        return {"tp"} if self.sequence_shards > 1 and "tp" not in shards else set()

    @property
    def updates(self) -> dict:
        """{update: (OptimizerSpec, weight decay)}; see ParameterKind."""
        others = OPTIMIZERS["adamw"] if self.optimizer == "muon" else self.optimizer_spec
        return {"decay": (others, self.weight_decay), "no_decay": (others, 0.0), "sign": (experts.SIGN, 0.0),
                self.matrix_update: (self.optimizer_spec, self.weight_decay)}

    def check_device(self, device: torch.device):
        """Raise UserError if the device can't run the model."""
        require(not self.fp8_format or capability_of(device) >= (8, 9), "--fp8-format needs a GPU of compute "
                "capability 8.9 or higher (Ada, Hopper or newer); leave it out, or try --device cpu")

    # ---- reports and estimates

    @property
    def in_words(self) -> str:
        """", " and a few words for the line that describes a run."""
        where = " from the host's memory" * (self.checkpoint_in_cpu and self.recompute_granularity == "full")
        return (", sequence parallel" * (self.sequence_shards > 1)
                + f", {self.recompute_granularity} recomputation{where}" * (self.recompute_granularity != "none")
                + f", fp8 {self.fp8_format} {self.fp8_recipe}" * bool(self.fp8_format))

    @property
    def sent_by_branches(self) -> tuple[str, ...]:
        """What branches send in collectives of their own."""
        words = "gather of keys and values" if self.cp_comm_type == "all_gather" else "all-to-all"
        return (words,) * (self.cp > 1) + ("all-to-all",) * (self.ep > 1)

    def step_report(self, result) -> tuple[dict, str]:
        """Return (what metrics.jsonl records of a StepResult's statistics, words about them for the progress line).
        Values that are dicts are details."""
        rest = iter(result.statistics)
        counts = {name: list(islice(rest, count)) for name, count in self.statistics.items()}
        depths, of_depths = self.behind_head.report(counts)
        routers, of_routers = experts.report(counts, result.tokens)
        return depths | routers, of_depths + of_routers

    def active_share(self, kind) -> float:
        """Return the share of the parameters of a kind that a token uses: of the experts, k of E."""
        return self.moe_router_topk / self.num_experts if "ep" in kind.shards else 1.0
