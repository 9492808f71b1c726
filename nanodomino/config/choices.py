"""What the core asks its Config: which class computes a part of the model, what it needs, what it sends.

The core is a dense GPT with tensor, pipeline and data parallelism. What goes beyond it lies in options/, a file or a
folder for each. The core does not call these files: it calls a method below, and the method chooses. So each choice is
made in one place, and all that depends on `--num-experts` is found by searching for num_experts.
"""

import dataclasses
import math
from itertools import islice

import torch
from torch import nn

from nanodomino.domino import LinearPair
from nanodomino.errors import counted
from nanodomino.generate.cache import KeyValueCache
from nanodomino.layers.attention_mask import fits_varlen
from nanodomino.layers.sublayers import MLP
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.options import context_parallel
from nanodomino.options.context_parallel import ATTENTION
from nanodomino.options.documents import DocumentCache, mark_documents
from nanodomino.options.experts import MoE, MoEInside, sign_updates
from nanodomino.options.fp8 import FORMATS, RECIPES, Fp8Recipe, Fp8Weight, check_gpu
from nanodomino.options.multi_token_prediction import PredictionDepth, PredictionDepths, add_depths
from nanodomino.options.muon import MUON
from nanodomino.options.recompute import GRANULARITIES, RecomputingTape
from nanodomino.options.router import SCORE_FUNCTIONS
from nanodomino.options.sequence_parallel import ShardedResidual
from nanodomino.overlap.slices import NothingBehindHead, ReplicatedResidual, WholeTape


# {setting: its values} of the settings that choose from a table of an option
ALLOWED = dict(optimizer=OPTIMIZERS | {"muon": MUON}, cp_comm_type=ATTENTION, moe_router_score_function=SCORE_FUNCTIONS,
               recompute_granularity=GRANULARITIES, fp8_format=FORMATS, fp8_recipe=RECIPES)


class Choices:
    """The base of Config, whose fields these methods read."""

    # ---- the model

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts instead of an MLP."""
        return bool(self.num_experts) and layer % self.moe_layer_freq == 0

    def mlp_class(self, layer: int) -> type:
        """Return the class of a layer's second sublayer."""
        return MoE if self.has_experts(layer) else MLP

    def attention_window(self, layer: int) -> int | None:
        """Return how many tokens before itself a token sees in this layer, counted from 0; None: all."""
        return None if layer < self.full_attention_layers else self.window_size

    def layer_site(self, number: int) -> str:
        """Return the name of a layer, which seeds its initial weights and dropout masks. The layers of the depths are
        numbered after the model's last layer."""
        return f"layers.{number}" if number < self.num_layers else f"mtp.{number - self.num_layers}.layer"

    def modules_behind_head(self, mesh, layer_class) -> dict:
        """Return {name: module} of what the stage with the head holds besides the model."""
        depths = [PredictionDepth(self, mesh, f"mtp.{number}", layer_class(self, mesh, self.num_layers + number))
                  for number in range(self.mtp_num_layers)]
        return {"mtp": nn.ModuleList(depths)} if depths else {}

    def reported_behind_head(self, model) -> list:
        """Return the modules that backward reports behind the head; see GPT.reported_modules."""
        return [module for depth in getattr(model, "mtp", ())
                for module in (depth.layer.attention, depth.layer.mlp, depth.enorm, depth.hnorm, depth.eh_proj,
                               model.final_norm, *model.head, model.embedding.word_embeddings)]

    @property
    def statistics(self) -> dict[str, int]:
        """{name: count} of the numbers that a step adds up for the report, for the whole model: of each depth the sum
        of its losses and the number of tokens that it counts; of each layer with experts how many tokens chose each
        expert, and the sum of the router's losses."""
        layers = filter(self.has_experts, range(self.num_layers + self.mtp_num_layers))
        return ({f"mtp.{number}": 2 for number in range(self.mtp_num_layers)}
                | {f"{self.layer_site(layer)}.mlp": self.num_experts + 1 for layer in layers})

    # ---- a sublayer in training

    def inside(self, sublayer, mesh, ops, compiled):
        """Return the object that computes everything between a sublayer's norm and its reduce; see LinearPair."""
        if isinstance(sublayer, MoE):
            return MoEInside(sublayer, ops, compiled)
        if self.cp > 1 and sublayer.attends:
            pair = ATTENTION[self.cp_comm_type](sublayer, mesh, ops, compiled, self)
        else:
            pair = LinearPair(sublayer, ops, compiled)
        ends = ("layers.0.", f"layers.{self.num_layers - 1}.")
        if self.fp8_format and not (self.first_last_layers_bf16 and pair.site.startswith(ends)):
            recipe = Fp8Recipe.of(self.fp8_format, self.fp8_recipe, self.params_dtype, compiled, self.fp8_wgrad)
            pair.column, pair.row = Fp8Weight(pair.column, recipe), Fp8Weight(pair.row, recipe)
        return pair

    @property
    def communicates_inside(self) -> bool:
        """Whether insides launch collectives of their own."""
        return self.cp > 1 or self.ep > 1

    @property
    def sequence_shards(self) -> int:
        """The number of tp ranks that share the rows of the residual stream."""
        return self.tp if self.sequence_parallel else 1

    def residual_stream(self, mesh) -> ReplicatedResidual:
        """Return the object that gathers and reduces the residual stream."""
        return (ShardedResidual if self.sequence_shards > 1 else ReplicatedResidual)(mesh.tp_group)

    def tape_policy(self, device, slices: int, residual_norm) -> WholeTape:
        """Return the object that says what the tapes of a stage keep."""
        recomputes = self.recompute_granularity != "none"
        return RecomputingTape(self, device, slices, residual_norm) if recomputes else WholeTape()

    @property
    def offloads_to_host(self) -> bool:
        """Whether stored sublayer inputs move to host memory. On the CPU this has no effect."""
        return self.checkpoint_in_cpu and self.recompute_granularity == "full"

    def behind_head(self, domino) -> NothingBehindHead:
        """Return the object that runs what is behind the head."""
        return PredictionDepths(domino) if hasattr(domino.model, "mtp") else NothingBehindHead()

    # ---- data

    @property
    def uses_document_boundaries(self) -> bool:
        """Whether positions or attention depend on where the documents in a sample end."""
        return self.reset_position_ids or self.reset_attention_mask

    def prepare_batch(self, batch, rows, end_of_text: int):
        """Return the batch of rows [b, s + 1] of token ids, which are in the host's memory, with documents and depths.
        """
        return add_depths(self, mark_documents(self, batch, rows, end_of_text), rows, end_of_text)

    def own_places(self, whole, mesh, dim=1):
        """Return this rank's tokens of `whole` [b, s, ..]. dim: the dimension of s."""
        return whole if self.cp == 1 else context_parallel.own_places(whole, mesh, dim)

    def own_part(self, batch, mesh):
        """Return the batch with this rank's tokens of each sample. Documents stay whole: attention needs all of them.
        """
        if self.cp == 1:
            return batch
        own = {name: context_parallel.own_places(getattr(batch, name), mesh)
               for name in ("tokens", "labels", "loss_mask", "positions")}
        extras = {name: self.own_part(value, mesh) if isinstance(value, type(batch)) else value
                  for name, value in batch.extras.items()}
        return dataclasses.replace(batch, **own, in_order=False, extras=extras)

    @property
    def all_chunks_read_tokens(self) -> bool:
        """Whether chunks without embedding and head need the tokens."""
        return self.cp > 1 or self.uses_document_boundaries

    @property
    def uses_attention_bias(self) -> bool:
        """Whether attention may need a bias."""
        gathers = self.cp > 1 and self.cp_comm_type == "all_gather"
        return bool(self.reset_attention_mask or self.window_size) or gathers and not fits_varlen(self)

    # ---- ranks and parameters

    @property
    def inner_axes(self) -> dict[str, int]:
        """{name: size} of the axes between dp and tp."""
        return {"cp": self.cp} if self.cp > 1 else {}

    def more_groups(self, rows) -> dict:
        """Return the rows of further groups; see make_mesh(). Neighbours in the dp group share the experts. The counts
        have their own group; on the rows' group they would queue behind rows."""
        if self.ep == 1:
            return {}
        neighbours = [row[i:i + self.ep] for row in rows["dp"] for i in range(0, len(row), self.ep)]
        same = [row[i::self.ep] for row in rows["dp"] for i in range(self.ep)]
        return {"ep": neighbours, "ep_counts": neighbours, "expert_dp": same}

    @property
    def expert_replicas(self) -> str:
        """The group of ranks that hold the same experts."""
        return "expert_dp" if self.ep > 1 else "dp"

    @property
    def mesh_options(self) -> dict:
        """The arguments of make_mesh() beside the sizes of pp, dp and tp."""
        return dict(inner_axes=self.inner_axes, more_groups=self.more_groups)

    def on_one_rank(self):
        """Return the Config with which one process would hold the whole model."""
        return dataclasses.replace(self, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
                                   context_parallel_size=1, expert_model_parallel_size=1)

    def addends(self, shards: tuple[str, ...]) -> set[str]:
        """Return the groups over which each rank computes only an addend of a parameter's gradient: with a sharded
        stream the tp group, because each tp rank has only some of the tokens. shards: the axes over which the parameter
        is cut."""
        return {"tp"} if self.sequence_shards > 1 and "tp" not in shards else set()

    @property
    def matrix_update(self) -> str:
        """How matrices of layers are updated: a key of `updates`."""
        return "muon" if self.optimizer == "muon" else "decay"

    @property
    def updates(self) -> dict:
        """{update: (OptimizerSpec, weight decay)}; see ParameterKind."""
        others = OPTIMIZERS["adamw"] if self.optimizer == "muon" else self.optimizer_spec
        return {"decay": (others, self.weight_decay), "no_decay": (others, 0.0), "sign": (sign_updates, 0.0),
                self.matrix_update: (self.optimizer_spec, self.weight_decay)}

    # ---- text

    @property
    def cache_class(self) -> type[KeyValueCache]:
        """The class that keeps keys and values during generation."""
        return DocumentCache if self.uses_document_boundaries else KeyValueCache

    @property
    def groups_that_generate_together(self) -> tuple[str, ...]:
        """The names of groups whose ranks must choose the same tokens."""
        return ("ep",) if self.ep > 1 else ()

    def for_export(self):
        """Return (the Config of the part of the model that Hugging Face knows, "; " and words about the rest)."""
        left_out = f"; without the {counted(self.mtp_num_layers, 'depth')} of multi-token prediction"
        return dataclasses.replace(self, mtp_num_layers=0), left_out * (self.mtp_num_layers > 0)

    # ---- reports and estimates

    @property
    def in_words(self) -> str:
        """", " and a few words for the line that describes a run."""
        how = f", {self.recompute_granularity} recomputation" + " from the host's memory" * self.offloads_to_host
        return (", sequence parallel" * (self.sequence_shards > 1) + how * (self.recompute_granularity != "none")
                + (f", fp8 {self.fp8_format} {self.fp8_recipe}" if self.fp8_format else ""))

    @property
    def behind_head_in_words(self) -> str:
        """Such words for the line of the stage with the head."""
        depths = f", {counted(self.mtp_num_layers, 'depth')} of multi-token prediction"
        return depths * (self.mtp_num_layers > 0)

    @property
    def sent_inside(self) -> tuple[str, ...]:
        """What insides send."""
        words = "gather of keys and values" if self.cp_comm_type == "all_gather" else "all-to-all"
        return (words,) * (self.cp > 1) + ("all-to-all",) * (self.ep > 1)

    def step_metrics(self, result) -> dict:
        """Return what metrics.jsonl records of a StepResult besides loss, norm and loss scale. Dicts are details.

        mtp_1_loss, ...: a depth's mean loss over the n tokens that it counts. Training adds f/D x n / (tokens of the
            main loss) times this mean; see depths.py. It may be lower than the main loss: a depth also knows all tokens
            before the one that it predicts, and has one more layer
        auxiliary_loss: what the auxiliary losses and z-losses of all routers add to the loss; see router.py
        busiest_expert: the largest load in any layer
        expert_load: {layer: how often each expert was chosen, divided by the mean of the layer}
        """
        rest, tokens = iter(result.statistics), result.tokens or math.inf
        rows = {name: list(islice(rest, count)) for name, count in self.statistics.items()}
        pairs = [rows.pop(f"mtp.{number}") for number in range(self.mtp_num_layers)]
        metrics = {f"mtp_{depth}_loss": total / max(count, 1.0) for depth, (total, count) in enumerate(pairs, 1)}
        if rows:
            loads = {name.removesuffix(".mlp"): [round(count * self.num_experts / sum(counts), 4) for count in counts]
                     for name, (*counts, _) in rows.items()}
            metrics |= dict(auxiliary_loss=sum(row[-1] for row in rows.values()) / tokens,
                            busiest_expert=max(map(max, loads.values())), expert_load=loads)
        return metrics

    def step_in_words(self, metrics: dict) -> str:
        """Return the part of a progress line that is about step_metrics()."""
        words = "".join(f" | mtp {depth} loss {metrics[f'mtp_{depth}_loss']:.4f}"
                        for depth in range(1, self.mtp_num_layers + 1))
        if self.num_experts:
            words += (f" | auxiliary loss {metrics['auxiliary_loss']:.4f} | busiest expert "
                      f"{metrics['busiest_expert']:.2f} x")
        return words

    def active_share(self, kind) -> float:
        """Return the share of the parameters of a kind that a token uses: of the experts, k of E."""
        return self.moe_router_topk / self.num_experts if "ep" in kind.shards else 1.0

    @property
    def layer_period(self) -> int:
        """Layers are alike if their numbers differ by a multiple of this number."""
        return self.moe_layer_freq if self.num_experts else 1

    @property
    def weight_shards(self) -> int:
        """The largest number of ranks over which a parameter is cut."""
        return self.tp * self.pp * self.ep

    @property
    def ranks_beside_tp_and_pp(self) -> int:
        """A replica has a multiple of this number of ranks, times tp x pp."""
        return math.lcm(self.cp, self.ep)

    @property
    def seq_length_divisor(self) -> int:
        """The number that must divide seq_length. With context parallelism a rank holds two equal parts of a sample,
        and sequence parallelism cuts each part again."""
        return self.cp * math.lcm(2, self.sequence_shards) if self.cp > 1 else self.sequence_shards

    def check_device(self, device: torch.device):
        """Raise UserError if the device can't run the model."""
        check_gpu(self, device)
