"""The settings of context parallelism, and what it changes in the core."""

import math
from dataclasses import dataclass, replace

from nanodomino.layers.varlen import fits_varlen
from nanodomino.options.context_parallel import places
from nanodomino.options.context_parallel.attention import ExchangedHeads, GatheredKeys
from nanodomino.settings.rules import check_divisible
from nanodomino.settings.flags import layout_setting

ATTENTION = {"all_gather": GatheredKeys, "a2a": ExchangedHeads}


@dataclass(frozen=True)
class Settings:
    """The part of Config that is about context parallelism."""
    context_parallel_size: int = layout_setting(
        1, "number of ranks that share the tokens of each sample, for samples that are too long for a single rank",
        alias="--cp")
    cp_comm_type: str = layout_setting(
        "all_gather", "what the ranks that share a sample exchange for attention (all_gather: every rank gets all keys "
                      "and values; a2a: every rank gets whole samples, but only some of the heads)",
        choices=("all_gather", "a2a"), needs="--cp above 1")

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def inner_axes(self):
        return super().inner_axes | ({"cp": self.cp} if self.cp > 1 else {})

    @property
    def sample_parts(self):
        return self.cp

    @property
    def communicates_inside(self):
        return self.cp > 1 or super().communicates_inside

    @property
    def all_chunks_read_tokens(self):
        return self.cp > 1 or super().all_chunks_read_tokens

    @property
    def uses_attention_bias(self):
        gathers = self.cp > 1 and self.cp_comm_type == "all_gather"
        return gathers and not fits_varlen(self) or super().uses_attention_bias

    def own_places(self, whole, mesh, dim=1):
        return whole if self.cp == 1 else places.own_places(whole, mesh, dim)

    def own_part(self, batch, mesh):
        """Return the batch with this rank's tokens. Other options' tensors stay whole: attention needs all of them."""
        if self.cp == 1:
            return super().own_part(batch, mesh)
        own = {name: places.own_places(getattr(batch, name), mesh)
               for name in ("tokens", "labels", "loss_mask", "positions")}
        extras = {name: self.own_part(value, mesh) if isinstance(value, type(batch)) else value
                  for name, value in batch.extras.items()}
        return replace(batch, **own, in_order=False, extras=extras)

    def inside(self, sublayer, mesh, ops, compiled):
        if self.cp == 1 or not sublayer.attends:
            return super().inside(sublayer, mesh, ops, compiled)
        return ATTENTION[self.cp_comm_type](sublayer, mesh, ops, compiled, self)

    def on_one_rank(self):
        return replace(super().on_one_rank(), context_parallel_size=1)

    @property
    def sent_inside(self):
        words = "gather of keys and values" if self.cp_comm_type == "all_gather" else "all-to-all"
        return (*super().sent_inside, *((words,) if self.cp > 1 else ()))

    # ---- defaults and rules

    @property
    def ranks_beside_tp_and_pp(self):
        return math.lcm(self.cp, super().ranks_beside_tp_and_pp)

    @property
    def seq_length_divisor(self):
        """A rank holds two equal parts of a sample, and other options may cut each part again."""
        return self.cp * math.lcm(2, super().seq_length_divisor) if self.cp > 1 else super().seq_length_divisor

    def check_rules(self):
        super().check_rules()
        if self.cp > 1 and self.cp_comm_type == "a2a":
            check_divisible("num-query-groups", self.num_query_groups, f"tp x cp = {self.tp} x {self.cp} =",
                            self.tp * self.cp, "--cp-comm-type all_gather, since with a2a every rank gets whole groups")
