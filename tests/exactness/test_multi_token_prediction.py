"""Checks which tokens the depths of multi-token prediction read and count.

test_features.py compares whole training steps on every layout.
"""

import pytest
import torch
from support.harness import END_OF_TEXT, count_depth_masks

from nanodomino.data import Batch, EndOfText


@pytest.mark.parametrize("flags", [(), (True, False), (False, True)], ids=["", "positions", "attention"])
@pytest.mark.parametrize("mask_loss", [False, True])
def test_each_depth_reads_the_batch_one_token_further(flags, mask_loss):
    """Depth d predicts the token d places after the next one: not beyond the last token, and not across the end of a
    document if that has effects. The loss mask belongs to the predicted token. The counts are by hand, in a loop."""
    rows = torch.randint(0, 6, (5, 13), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_rows(rows, list(range(5)), 4, EndOfText(END_OF_TEXT, mask_loss, *flags), depths=3)
    masks = count_depth_masks(rows, batch.loss_mask, 3, any(flags))
    halves = batch.split(2)
    for depth, mask in enumerate(masks, 1):
        batch, previous, halves = batch.ahead, batch, [half.ahead for half in halves]
        assert torch.equal(batch.tokens, previous.labels)
        assert torch.equal(batch.labels[:, :12 - depth], rows[:, depth + 1:])
        assert torch.equal(batch.loss_mask, mask) and 0 < mask.sum() < mask.numel()
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(batch, name))
    assert batch.ahead is None and halves[0].ahead is None
