"""Says how well the depths of multi-token prediction predict, from StepResult.statistics.

A depth's loss is the mean over the tokens of the global batch that the depth counts, without the factor
--mtp-loss-scaling-factor. Like the main model, a depth knows all tokens in front of the token that it predicts, and it
has another layer. So its loss may be lower than the main loss.
"""

from nanodomino.config.config import Config


class DepthLosses:
    """Holds the loss of each depth in one step. Without depths, each method returns {} or ""."""

    def __init__(self, config: Config, statistics=()):
        """statistics: StepResult.statistics; empty before the first step."""
        depths, width = config.mtp_num_layers if statistics else 0, config.statistics_per_layer
        rows = (statistics[len(statistics) - depth * width:][:width] for depth in range(depths, 0, -1))
        self.losses = [total / max(tokens, 1.0) for *_, total, tokens in rows]

    def metrics(self) -> dict:
        """Return what metrics.jsonl records of a step: mtp_1_loss for depth 1, and so on."""
        return {f"mtp_{depth}_loss": loss for depth, loss in enumerate(self.losses, 1)}

    def in_words(self) -> str:
        """Return, for example, ' | mtp 1 loss 2.6510'."""
        return "".join(f" | mtp {depth} loss {loss:.4f}" for depth, loss in enumerate(self.losses, 1))
