"""Says what StepResult.statistics mean: how evenly a step chose its experts, and how well the depths predict.

    auxiliary loss    what all routers add to a token's loss: their auxiliary losses and z-losses, with coefficients;
                      a mean over all tokens, also over those that the loss mask leaves out
    load              how often an expert was chosen, divided by the mean over the experts of its layer; 1 if balanced
    busiest expert    the largest load in any layer
    mtp loss          the mean loss of a depth of multi-token prediction over the tokens that it counts, without the
                      factor --mtp-loss-scaling-factor. A depth knows all tokens in front of the token that it predicts,
                      and it has another layer. So its loss may be lower than the main loss

All count the global batch, so they are the same on every layout.
"""

from nanodomino.config.config import Config


class StepStatistics:
    """Holds what the statistics of one step say. Without experts and depths, each method returns {} or ""."""

    def __init__(self, config: Config, statistics):
        """statistics: StepResult.statistics."""
        layers, width, experts = config.num_layers, config.statistics_per_layer, config.num_experts
        sites = [f"layers.{layer}" for layer in range(layers)]
        sites += [f"mtp.{depth}.layer" for depth in range(config.mtp_num_layers)]
        rows = [statistics[place * width:(place + 1) * width] for place in range(len(sites) if statistics else 0)]
        self.loads = {}                                        # {layer: [load of each expert]}
        for layer in filter(config.has_experts, range(len(rows))):
            counts = rows[layer][:experts]
            self.loads[sites[layer]] = [round(count * experts / sum(counts), 4) for count in counts]
        if self.loads:
            self.auxiliary_loss = sum(row[experts] for row in rows) / (config.global_batch_size * config.seq_length)
            self.busiest = max(map(max, self.loads.values()))
        self.depth_losses = [total / max(tokens, 1.0) for *_, total, tokens in rows[layers:]]

    def metrics(self, in_detail: bool) -> dict:
        """Return what metrics.jsonl records of a step. in_detail: also return the load of each expert."""
        values = {f"mtp_{depth}_loss": loss for depth, loss in enumerate(self.depth_losses, 1)}
        if self.loads:
            values |= dict(auxiliary_loss=self.auxiliary_loss, busiest_expert=self.busiest)
        return values | (dict(expert_load=self.loads) if self.loads and in_detail else {})

    def in_words(self) -> str:
        """Return, for example, ' | mtp 1 loss 2.6510 | auxiliary loss 0.0851 | busiest expert 1.31 x'."""
        return "".join(f" | mtp {depth} loss {loss:.4f}" for depth, loss in enumerate(self.depth_losses, 1)) + (
            f" | auxiliary loss {self.auxiliary_loss:.4f} | busiest expert {self.busiest:.2f} x" if self.loads else "")
