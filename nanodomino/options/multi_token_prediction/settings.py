"""The settings of multi-token prediction, and what it changes in the core."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import nn

from nanodomino.errors import counted, require
from nanodomino.layers.positions import to_device
from nanodomino.options.multi_token_prediction import PredictionDepth, PredictionDepths
from nanodomino.settings.flags import model_setting


@dataclass(frozen=True)
class Settings:
    """The part of Config that is about multi-token prediction."""
    mtp_num_layers: int = model_setting(
        0, "number of depths of multi-token prediction: depth d is a further layer that predicts the token d places "
           "after the next one", affects="optimizer", at_least=0, at_most=64)
    mtp_loss_scaling_factor: float = model_setting(
        0.1, "factor f: training adds f / depths times the losses of all depths, divided, like the main losses, by the "
             "number of tokens of the main loss", affects="losses", needs="--mtp-num-layers")

    @property
    def layers_behind_head(self):
        return self.mtp_num_layers

    @property
    def looks_up_words_behind_head(self):
        return self.mtp_num_layers > 0

    def layer_site(self, number):
        depth = number - self.num_layers
        return f"mtp.{depth}.layer" if depth >= 0 else super().layer_site(number)

    def modules_behind_head(self, mesh, layer_class):
        depths = [PredictionDepth(self, mesh, f"mtp.{number}", layer_class(self, mesh, self.num_layers + number))
                  for number in range(self.mtp_num_layers)]
        return super().modules_behind_head(mesh, layer_class) | ({"mtp": nn.ModuleList(depths)} if depths else {})

    def reported_behind_head(self, model):
        return super().reported_behind_head(model) + [
            module for depth in getattr(model, "mtp", ())
            for module in (depth.layer.attention, depth.layer.mlp, depth.enorm, depth.hnorm, depth.eh_proj,
                           model.final_norm, *model.head, model.embedding.word_embeddings)]

    @property
    def statistics(self):
        """The sum of a depth's losses, and the number of tokens that it counts."""
        return super().statistics | {f"mtp.{number}": 2 for number in range(self.mtp_num_layers)}

    def behind_head(self, domino):
        return PredictionDepths(domino) if hasattr(domino.model, "mtp") else super().behind_head(domino)

    def prepare_batch(self, batch, rows, end_of_text):
        """Add the batch of depth 1 as extras["ahead"], which contains that of depth 2, and so on.

        Depth d predicts the token d places after the next one. Its loss does not count at the last d places of a
        sample, nor where the token that it predicts belongs to another text. After the last token, token 0 stands in.
        """
        batch = last = super().prepare_batch(batch, rows, end_of_text)
        for depth in range(1, self.mtp_num_layers + 1):
            labels, loss_mask = (F.pad(tensor[:, 1:], (0, 1)) for tensor in (last.labels, last.loss_mask))
            goes_on = self.goes_on(rows, depth + 1, end_of_text)
            if goes_on is not None:
                loss_mask = loss_mask * F.pad(to_device(goes_on.to(loss_mask.dtype), loss_mask.device), (0, depth))
            last.extras["ahead"] = replace(last, tokens=last.labels, labels=labels, loss_mask=loss_mask, extras={})
            last = last.extras["ahead"]
        return batch

    def for_export(self):
        depths, (config, left_out) = counted(self.mtp_num_layers, "depth"), super().for_export()
        return (replace(config, mtp_num_layers=0),
                left_out + f"; without the {depths} of multi-token prediction" * (self.mtp_num_layers > 0))

    @property
    def behind_head_in_words(self):
        depths = f", {counted(self.mtp_num_layers, 'depth')} of multi-token prediction"
        return super().behind_head_in_words + depths * (self.mtp_num_layers > 0)

    def step_metrics(self, result):
        """Add mtp_1_loss, ...: a depth's mean loss over the n tokens that it counts. Training adds f/D x n / (tokens of
        the main loss) times this mean; see depths.py. It may be lower than the main loss: a depth also knows all tokens
        before the one that it predicts, and has one more layer."""
        counts = self.counts_of(result.statistics)
        pairs = [counts[f"mtp.{number}"] for number in range(self.mtp_num_layers)]
        return super().step_metrics(result) | {
            f"mtp_{depth}_loss": total / max(tokens, 1.0) for depth, (total, tokens) in enumerate(pairs, 1)}

    def step_in_words(self, metrics):
        return super().step_in_words(metrics) + "".join(
            f" | mtp {depth} loss {metrics[f'mtp_{depth}_loss']:.4f}" for depth in range(1, self.mtp_num_layers + 1))

    def check_record(self, record, checkpoint):
        super().check_record(record, checkpoint)
        depths = record.get("mtp_num_layers", 0)
        require(self.mtp_num_layers <= depths, f"mtp-num-layers {self.mtp_num_layers} must be at most the {depths} of "
                f"{checkpoint}, because --finetune can drop depths but not add any; try --mtp-num-layers {depths}")

    def check_rules(self):
        super().check_rules()
        require(self.mtp_num_layers < self.seq_length,
                f"mtp-num-layers {self.mtp_num_layers} must be below seq-length {self.seq_length}, or the last depth "
                f"predicts nothing; try --mtp-num-layers {self.seq_length - 1}")
