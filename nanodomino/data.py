"""Tokens on disk -> the batch of (seed, step, microbatch, dp rank).

A corpus is a folder made by data/prepare.py: one long row of token ids per split, and meta.json about them. The row
is cut into windows that overlap by one token, since the label of a position is the token after it:

    row        t0  t1  t2  t3  t4  t5  t6  t7  t8 ...         seq_length s = 4
    window 0  [t0  t1  t2  t3] t4                             tokens t0..t3, labels t1..t4
    window 1                  [t4  t5  t6  t7] t8             tokens t4..t7, labels t5..t8

Training counts samples, k = step x global_batch_size + place in the global batch, and walks the windows epoch by
epoch, each epoch in an order of its own:

    sample k  ->  window  permutation(seed, epoch = k // windows)[k % windows]

So the data of a step is a pure function of (seed, step). A resumed run needs no saved position, and the layout does
not show: the places of a global batch are dealt out in contiguous runs, to replicas first, then to microbatches.

    place      0  1  2  3 | 4  5  6  7        global batch 8, dp 2, micro batch 2
               replica 0  |  replica 1
               m0    m1   |  m0    m1

The ranks of a replica that need tokens, those that hold an end of the model, ask with the same numbers and so read the
same ones: nobody broadcasts. Evaluation takes the windows in their stored order; places past the end are rows that
count for nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanodomino.corpus.folder import Corpus
from nanodomino.errors import require
from nanodomino.layers.positions import document_ids, positions_within_documents


@dataclass(frozen=True)
class Ends:
    """What it means that a document ends, with this token."""
    token: int
    mask_loss: bool = False            # nobody learns to predict it
    reset_positions: bool = False      # the next one begins at place 0
    reset_attention: bool = False      # and is not seen from this one, nor this one from there


@dataclass
class Batch:
    """A microbatch. A chunk between the model's ends gets the sample_ids alone, and None for the tensors."""
    tokens: torch.Tensor        # [b, s] int64
    labels: torch.Tensor        # [b, s] int64, the next tokens
    loss_mask: torch.Tensor     # [b, s] float32, 0 where a position does not count
    positions: torch.Tensor     # [b, s] int64
    sample_ids: list[int]       # [b], each row's number in the order of consumption; seeds its dropout
    documents: torch.Tensor | None = None      # [b, s] int64, see positions.py; None: each row is one
    in_order: bool = True       # positions are 0, 1, .. in each row

    @staticmethod
    def of_rows(rows, sample_ids, counted=None, ends: "Ends | None" = None) -> "Batch":
        """rows [b, s + 1] int64, a token more than a sample; all else is made on their device. Only the first `counted`
        rows count; None: all do. ends: what the end of a document means; None: nothing."""
        b, s = len(rows), rows.size(1) - 1
        labels = rows[:, 1:]
        loss_mask = torch.ones(labels.shape, device=rows.device)
        if counted is not None:
            loss_mask[counted:] = 0
        positions, documents = torch.arange(s, device=rows.device).expand(b, s), None
        if ends and ends.mask_loss:
            loss_mask.masked_fill_(labels == ends.token, 0)
        if ends and (ends.reset_positions or ends.reset_attention):
            documents = document_ids(rows[:, :-1], ends.token)
            positions = positions_within_documents(documents) if ends.reset_positions else positions
        return Batch(rows[:, :-1], labels, loss_mask, positions, sample_ids,
                     documents if ends and ends.reset_attention else None, not (ends and ends.reset_positions))

    def split(self, count: int) -> list["Batch"]:
        """Cut along the samples into `count` parts whose sizes differ by one at most; the longer ones come first."""
        cuts = [tensor.tensor_split(count) if tensor is not None else [None] * count
                for tensor in (self.tokens, self.labels, self.loss_mask, self.positions, self.documents)]
        return [Batch(*part, ids.tolist(), documents, self.in_order)
                for *part, documents, ids in zip(*cuts, np.array_split(self.sample_ids, count))]


def sample_ids_of(step: int, microbatch: int, dp_rank: int, dp: int, micro_batch_size: int,
                  global_batch_size: int) -> list[int]:
    """Which samples of the run are in this microbatch of this replica."""
    first = step * global_batch_size + dp_rank * (global_batch_size // dp) + microbatch * micro_batch_size
    return list(range(first, first + micro_batch_size))


class TokenDataset:
    """One split as batches, on `device`, of windows of `seq_length` tokens. Raises UserError if there is no window."""

    def __init__(self, corpus: Corpus, split: str, seq_length: int, seed: int, ends: Ends | None = None,
                 device=torch.device("cpu")):
        self.corpus, self.split, self.seq_length, self.seed, self.device = corpus, split, seq_length, seed, device
        self.ends = ends
        count = corpus.tokens[split]
        self.windows = max(count - 1, 0) // seq_length
        require(self.windows > 0,
                f"the {split} split of {corpus.path} has {count} tokens, but one sample needs seq-length + 1 = "
                f"{seq_length + 1}; lower --seq-length, prepare more text, or give {split} more of it with "
                "data/prepare.py --split")
        self.row = np.memmap(corpus.path / f"{split}.bin", corpus.dtype, mode="r")
        self.epoch, self.order = None, None

    def window_of(self, sample: int) -> int:
        """The window that training reads as its sample number `sample`; no window twice in an epoch."""
        epoch, place = divmod(sample, self.windows)
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch, np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.windows))
        return int(self.order[place])

    def batch(self, step: int, microbatch: int, dp_rank: int, dp: int, micro_batch_size: int, global_batch_size: int,
              shuffle: bool = True) -> Batch:
        """The rows of one microbatch on one replica.
        `shuffle=False` is evaluation: windows in order, then empty rows."""
        require(global_batch_size % (dp * micro_batch_size) == 0,
                f"global-batch-size {global_batch_size} must be divisible by micro-batch-size x data parallel = "
                f"{micro_batch_size} x {dp} = {micro_batch_size * dp}")
        sample_ids = sample_ids_of(step, microbatch, dp_rank, dp, micro_batch_size, global_batch_size)
        s, counted = self.seq_length, None
        if not shuffle:             # every rank has equally many rows, and none is counted twice
            counted = min(max(self.windows - sample_ids[0], 0), micro_batch_size)
        rows = np.zeros((micro_batch_size, s + 1), dtype=np.int64)
        for row, sample in zip(rows[:counted], sample_ids):
            start = (self.window_of(sample) if shuffle else sample) * s
            row[:] = self.row[start:start + s + 1]
        # An id outside the vocabulary would end as an unreadable device-side assert in the embedding.
        require(rows.max() < self.corpus.vocab_size,
                f"{self.corpus.path / self.split}.bin holds token id {rows.max()}, outside the "
                f"vocabulary of {self.corpus.vocab_size}; prepare the text again")
        rows = torch.from_numpy(rows)
        if self.device.type == "cuda":     # from memory that the GPU reads by itself: the host goes on
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return Batch.of_rows(rows, sample_ids, counted, self.ends)
