"""The seams of the core: what options may change, with what a dense GPT does instead.

The core is a dense GPT with tensor, pipeline and data parallelism. It asks its Config at each of these seams, and names
no option. An option's Settings class (nanodomino/options/) is a base of Config. It overrides some of these methods, and
calls super() for what it does not change. So options can be combined, and each can be left out.
"""

import dataclasses
from itertools import islice

from nanodomino.domino import LinearPair
from nanodomino.generate.cache import KeyValueCache
from nanodomino.layers.sublayers import MLP
from nanodomino.mesh import no_more_groups
from nanodomino.overlap.slices import NothingBehindHead, ReplicatedResidual, WholeTape


class Seams:
    """The base of all Settings."""

    # ---- the model

    def layer_site(self, number: int) -> str:
        """Return the name of a layer, which seeds its initial weights and dropout masks."""
        return f"layers.{number}"

    def mlp_class(self, layer: int) -> type:
        """Return the class of a layer's second sublayer."""
        return MLP

    layers_behind_head = 0               # how many further layers the last stage holds
    looks_up_words_behind_head = False   # whether these layers need the word embedding

    def modules_behind_head(self, mesh, layer_class) -> dict:
        """Return {name: module} of what the stage with the head holds besides the model."""
        return {}

    def reported_behind_head(self, model) -> list:
        """Return the modules that backward reports behind the head; see GPT.reported_modules."""
        return []

    @property
    def statistics(self) -> dict[str, int]:
        """Return {name: count} of the numbers that a step adds up for the report, for the whole model."""
        return {}

    # ---- a sublayer in training

    def inside(self, sublayer, mesh, ops, compiled):
        """Return the object that computes everything between a sublayer's norm and its reduce; see LinearPair."""
        return LinearPair(sublayer, ops, compiled)

    communicates_inside = False          # whether insides launch collectives of their own

    def residual_stream(self, mesh) -> ReplicatedResidual:
        """Return the object that gathers and reduces the residual stream."""
        return ReplicatedResidual(mesh.tp_group)

    sequence_shards = 1                  # the number of tp ranks that share the rows of the residual stream

    def tape_policy(self, device, slices: int, residual_norm) -> WholeTape:
        """Return the object that says what the tapes of a stage keep."""
        return WholeTape()

    def behind_head(self, domino) -> NothingBehindHead:
        """Return the object that runs what is behind the head."""
        return NothingBehindHead()

    schedule_settings = ()               # (name, value) pairs of the settings of the schedule

    # ---- data

    def prepare_batch(self, batch, rows, end_of_text: int):
        """Return the batch of rows [b, s + 1] of token ids, which are in the host's memory, with what options add."""
        return batch

    def goes_on(self, rows, distance: int, end_of_text: int):
        """Return whether each token and the one `distance` places later belong to one text, [b, s + 1 - distance];
        None: all do."""
        return None

    sample_parts = 1                     # the number of ranks that share the tokens of each sample

    def own_places(self, whole, mesh, dim=1):
        """Return this rank's tokens of `whole` [b, s, ..]. dim: the dimension of s."""
        return whole

    def own_part(self, batch, mesh):
        """Return the batch with this rank's tokens of each sample."""
        return batch

    all_chunks_read_tokens = False       # whether chunks without embedding and head need the tokens

    def attention_extras(self, extras: dict, device) -> dict:
        """Return further fields of AttentionInputs. extras: what prepare_batch() has added to the batch."""
        return {}

    uses_attention_bias = False          # whether attention may need a bias

    # ---- ranks and parameters

    @property
    def inner_axes(self) -> dict[str, int]:
        """Return {name: size} of the axes between dp and tp."""
        return {}

    def more_groups(self, rows) -> dict:
        """Return the rows of further groups; see make_mesh()."""
        return no_more_groups(rows)

    @property
    def mesh_options(self) -> dict:
        """Return the arguments of make_mesh() that come from options."""
        return dict(inner_axes=self.inner_axes, more_groups=self.more_groups)

    def on_one_rank(self):
        """Return the Config with which one process would hold the whole model."""
        return dataclasses.replace(self, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)

    def addends(self, shards: tuple[str, ...]) -> set[str]:
        """Return the groups over which each rank computes only an addend of a parameter's gradient. shards: the axes
        over which the parameter is cut."""
        return set()

    matrix_update = "decay"              # how matrices of layers are updated: a key of `updates`

    @property
    def updates(self) -> dict:
        """Return {update: (OptimizerSpec, weight decay)}; see ParameterKind."""
        return {"decay": (self.optimizer_spec, self.weight_decay), "no_decay": (self.optimizer_spec, 0.0)}

    # ---- text

    cache_class = KeyValueCache          # keeps keys and values during generation
    groups_that_generate_together = ()   # the names of groups whose ranks must choose the same tokens

    def for_export(self):
        """Return (the Config of the part of the model that Hugging Face knows, "; " and words about the rest)."""
        return self, ""

    # ---- reports and estimates

    in_words = ""                        # ", " and a few words for the line that describes a run
    behind_head_in_words = ""            # such words for the line of the stage with the head
    sent_inside = ()                     # what insides send, such as "all-to-all"

    def step_metrics(self, result) -> dict:
        """Return what metrics.jsonl records of a StepResult besides loss, norm and loss scale. Dicts are details."""
        return {}

    def step_in_words(self, metrics: dict) -> str:
        """Return the part of a progress line that is about step_metrics()."""
        return ""

    def counts_of(self, statistics: tuple[float]) -> dict[str, list[float]]:
        """Return {name: numbers} of StepResult.statistics."""
        rest = iter(statistics)
        return {name: list(islice(rest, count)) for name, count in self.statistics.items()}

    def active_share(self, kind) -> float:
        """Return the share of the parameters of a kind that a token uses."""
        return 1.0

    layer_period = 1                     # layers are alike if their numbers differ by a multiple of this number
    has_special_ends = False             # whether the first and the last layer cost more or less than others

    @property
    def weight_shards(self) -> int:
        """The largest number of ranks over which a parameter is cut."""
        return self.tp * self.pp

    # ---- settings: defaults and rules

    ranks_beside_tp_and_pp = 1           # a replica has a multiple of this number of ranks, times tp x pp

    def option_defaults(self) -> dict:
        """Return {name: value} of defaults that depend on other settings."""
        return {}

    sizes_divisible_by_tp = ()           # names of further settings
    seq_length_divisor = 1               # the number that must divide seq_length

    def check_given(self, names):
        """Raise UserError if one of the given settings `names` has no effect."""

    def check_device(self, device):
        """Raise UserError if the device can't run the model."""

    def check_record(self, record: dict, checkpoint):
        """Raise UserError if the weights of a checkpoint with these settings do not fit."""
