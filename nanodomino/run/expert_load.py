"""Says how evenly the tokens of a step chose the experts, from StepResult.statistics.

    auxiliary loss    what all routers add to a token's loss: their auxiliary losses and z-losses, with coefficients;
                      a mean over all tokens, also over those that the loss mask leaves out
    load              how often an expert was chosen, divided by the mean over the experts of its layer; 1 if balanced
    busiest expert    the largest load in any layer

All count the global batch, so they are the same on every layout.
"""

from nanodomino.config.config import Config


class ExpertLoad:
    """Holds the auxiliary loss and the loads of one step. Without experts, each method returns {} or ""."""

    def __init__(self, config: Config, statistics=()):
        """statistics: StepResult.statistics; empty before the first step."""
        self.loads, width, experts = {}, config.statistics_per_layer, config.num_experts       # {layer: [load of each]}
        sites = [f"layers.{layer}" for layer in range(config.num_layers)]
        sites += [f"mtp.{depth}.layer" for depth in range(config.mtp_num_layers)]
        for layer in filter(config.has_experts, range(len(sites)) if statistics else ()):
            counts = statistics[layer * width:layer * width + experts]
            self.loads[sites[layer]] = [round(count * len(counts) / sum(counts), 4) for count in counts]
        if self.loads:
            self.auxiliary_loss = sum(statistics[experts::width]) / (config.global_batch_size * config.seq_length)
            self.busiest = max(map(max, self.loads.values()))

    def metrics(self, in_detail: bool) -> dict:
        """Return what metrics.jsonl records of a step. in_detail: also return the load of each expert."""
        if not self.loads:
            return {}
        return dict(auxiliary_loss=self.auxiliary_loss, busiest_expert=self.busiest) | (
            dict(expert_load=self.loads) if in_detail else {})

    def in_words(self) -> str:
        """Return, for example, ' | auxiliary loss 0.0851 | busiest expert 1.31 x'."""
        if not self.loads:
            return ""
        return f" | auxiliary loss {self.auxiliary_loss:.4f} | busiest expert {self.busiest:.2f} x"

    def summary(self) -> str:
        """Return a line about the last step that names the least and the most chosen expert, for the end of a run."""
        named = [(load, f"expert {expert} of {layer}") for layer, loads in self.loads.items()
                 for expert, load in enumerate(loads)]
        if not named:
            return ""
        (least, idle), (most, busy) = min(named), max(named)
        return (f"the experts' load in the last step, as a multiple of their layer's mean: {least:.2f} ({idle}) to "
                f"{most:.2f} ({busy})")
