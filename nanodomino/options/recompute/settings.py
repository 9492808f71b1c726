"""The settings of recomputation, and what it changes in the core."""

from dataclasses import dataclass

from nanodomino.options.recompute import GRANULARITIES, RecomputingTape
from nanodomino.settings.flags import layout_setting


@dataclass(frozen=True)
class Settings:
    """The part of Config that is about recomputation."""
    recompute_granularity: str = layout_setting(
        "none", "what backward recomputes to save memory; selective: the attention core and the activation function; "
                "full: all that it needs inside a sublayer, from the sublayer's stored input",
        choices=GRANULARITIES)
    checkpoint_in_cpu: bool = layout_setting(
        False, "with full recomputation, move the stored sublayer inputs from the GPU to host memory",
        needs="--recompute-granularity full")

    @property
    def recomputes(self):
        return self.recompute_granularity != "none"

    @property
    def offloads_to_host(self):
        """Whether stored sublayer inputs move to host memory. On the CPU this has no effect."""
        return self.checkpoint_in_cpu and self.recompute_granularity == "full"

    def tape_policy(self, device, slices, residual_norm):
        if not self.recomputes:
            return super().tape_policy(device, slices, residual_norm)
        return RecomputingTape(self, device, slices, residual_norm)

    @property
    def in_words(self):
        how = f", {self.recompute_granularity} recomputation" + " from the host's memory" * self.offloads_to_host
        return super().in_words + how * self.recomputes
