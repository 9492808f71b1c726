"""Finds the tokens of any sample as a pure function of (seed, number of the sample).

A corpus is a folder made by data/prepare.py. It holds one long stream of token ids for each split (train, valid, test),
and meta.json, which describes them. The stream is cut into windows that overlap by one token, since the label of a
position is the next token:

    stream     t0  t1  t2  t3  t4  t5  t6  t7  t8 ...         seq_length s = 4
    window 0  [t0  t1  t2  t3] t4                             tokens t0..t3, labels t1..t4
    window 1                  [t4  t5  t6  t7] t8             tokens t4..t7, labels t5..t8

Training counts the samples k that it has read. Each epoch visits every window once, in a different order:

    sample k  ->  window  permutation(seed, epoch = k // windows)[k % windows]

So every layout trains on the same global batches. A run that continues with another global batch size reads the next
samples; with another seq_length it skips as many as hold the tokens that it has read. Each replica gets a contiguous
part of a global batch, and cuts it in order into microbatches:

    index      0  1  2  3 | 4  5  6  7        global batch 8, dp 2, micro batch 2
               replica 0  |  replica 1
               m0    m1   |  m0    m1

Every rank that needs the tokens of a microbatch reads them from disk; no rank broadcasts them. Evaluation reads the
windows in stream order. If its last global batch is incomplete, padding rows that do not count in the loss fill it up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.errors import counted, require
from nanodomino.layers.attention_mask import to_device


@dataclass
class Batch:
    """Holds a microbatch. A chunk with neither the embedding nor the head usually needs only sample_ids; the tensors in
    its Batch are then None (see get_batch in train.py)."""
    tokens: torch.Tensor | None        # [b, s] int64
    labels: torch.Tensor | None        # [b, s] int64, the next tokens
    loss_mask: torch.Tensor | None     # [b, s] float32, 1 where the loss of a position counts, else 0
    positions: torch.Tensor | None     # [b, s] int64
    sample_ids: list[int]              # [b], the samples' numbers k, which seed their dropout masks
    in_order: bool = True              # positions are 0, 1, .. s - 1 in each row
    extras: dict = field(default_factory=dict)     # what options add: tensors [b, ..] or batches of the same samples

    @staticmethod
    def from_rows(rows, sample_ids, counted=None, device=torch.device("cpu"), prepare=None) -> "Batch":
        """Make a batch on `device` from rows [b, s + 1] of token ids, which are in the host's memory. A row's last
        token is only a label.

        counted: only the first `counted` rows count in the loss; None: all rows count.
        prepare: a function (batch, rows) -> batch, through which options change or extend it."""
        b, s, on_host = len(rows), rows.size(1) - 1, rows
        rows = to_device(rows, device)
        loss_mask = torch.ones(b, s, device=rows.device)
        if counted is not None:
            loss_mask[counted:] = 0
        positions = torch.arange(s, device=rows.device).expand(b, s)
        batch = Batch(rows[:, :-1], rows[:, 1:], loss_mask, positions, sample_ids)
        return prepare(batch, on_host) if prepare else batch

    def split(self, count: int) -> list["Batch"]:
        """Split the samples into `count` slices. Their sizes differ by at most one; the larger slices come first."""
        def cut(value):
            if value is None:
                return [None] * count
            return value.split(count) if isinstance(value, Batch) else value.tensor_split(count)

        tensors = zip(*map(cut, (self.tokens, self.labels, self.loss_mask, self.positions)))
        extras = {name: cut(value) for name, value in self.extras.items()}
        return [Batch(*own, ids.tolist(), self.in_order, {name: parts[index] for name, parts in extras.items()})
                for index, (own, ids) in enumerate(zip(tensors, np.array_split(self.sample_ids, count)))]


def sample_ids_of(first_sample: int, microbatch: int, dp_rank: int, dp: int, micro_batch_size: int,
                  global_batch_size: int) -> list[int]:
    """Return the numbers k of the samples in one microbatch of replica `dp_rank`. first_sample: the global batch's."""
    first = first_sample + dp_rank * (global_batch_size // dp) + microbatch * micro_batch_size
    return list(range(first, first + micro_batch_size))


class TokenDataset:
    """Reads batches of one split onto `device`. Raises UserError if the split has fewer than seq_length + 1 tokens.
    prepare: see Batch.from_rows()."""

    def __init__(self, corpus: Corpus, split: str, seq_length: int, seed: int, device=torch.device("cpu"),
                 prepare: Callable | None = None):
        self.corpus, self.split, self.seq_length, self.seed, self.device = corpus, split, seq_length, seed, device
        self.prepare = prepare
        count = corpus.tokens[split]
        self.windows = max(count - 1, 0) // seq_length
        require(self.windows > 0,
                f"the {split} split of {corpus.path} has {counted(count, 'token')}, but one sample needs seq-length + "
                f"1 = {seq_length + 1}; lower --seq-length, prepare more text, or give {split} a larger share with "
                "data/prepare.py --split")
        self.stream = np.memmap(corpus.path / f"{split}.bin", corpus.dtype, mode="r")
        self.epoch, self.order = None, None

    def window_of(self, sample: int) -> int:
        """Return the number of the window that training sample number `sample` reads."""
        epoch, index = divmod(sample, self.windows)
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch, np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.windows))
        return int(self.order[index])

    def batch(self, first_sample: int, microbatch: int, dp_rank: int, dp: int, micro_batch_size: int,
              global_batch_size: int, shuffle: bool = True) -> Batch:
        """Read one microbatch of replica `dp_rank`. first_sample: the number of the global batch's first sample.

        shuffle: False for evaluation. Then sample k is window k, and the rows of samples beyond the last window hold
        zeros and do not count in the loss.
        Raises UserError if a token id is outside the vocabulary."""
        sample_ids = sample_ids_of(first_sample, microbatch, dp_rank, dp, micro_batch_size, global_batch_size)
        s, counted = self.seq_length, None
        if not shuffle:             # pad: all ranks need batches of the same size, and no window may count twice
            counted = min(max(self.windows - sample_ids[0], 0), micro_batch_size)
        rows = np.zeros((micro_batch_size, s + 1), dtype=np.int64)
        for row, sample in zip(rows[:counted], sample_ids):
            start = (self.window_of(sample) if shuffle else sample) * s
            row[:] = self.stream[start:start + s + 1]
        # Check here: on a GPU the embedding would fail with an unreadable device-side assert.
        require(rows.max() < self.corpus.vocab_size,
                f"{self.corpus.path / self.split}.bin holds token id {rows.max()}, outside the "
                f"vocabulary of {self.corpus.vocab_size}; prepare the text again")
        return Batch.from_rows(torch.from_numpy(rows), sample_ids, counted, self.device, self.prepare)
