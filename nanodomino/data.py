"""Finds the tokens of any step as a pure function of (seed, step).

A corpus is a folder made by data/prepare.py. It holds one long stream of token ids for each split (train, valid, test),
and meta.json, which describes them. The stream is cut into windows that overlap by one token, since the label of a
position is the next token:

    stream     t0  t1  t2  t3  t4  t5  t6  t7  t8 ...         seq_length s = 4
    window 0  [t0  t1  t2  t3] t4                             tokens t0..t3, labels t1..t4
    window 1                  [t4  t5  t6  t7] t8             tokens t4..t7, labels t5..t8

Training counts samples: k = step x global_batch_size + index in the global batch. Each epoch visits every window once,
in a different order:

    sample k  ->  window  permutation(seed, epoch = k // windows)[k % windows]

So a checkpoint need not store a position in the data, and every layout trains on the same global batches. Each replica
gets a contiguous part of a global batch, and cuts it in order into microbatches:

    index      0  1  2  3 | 4  5  6  7        global batch 8, dp 2, micro batch 2
               replica 0  |  replica 1
               m0    m1   |  m0    m1

Every rank that needs the tokens of a microbatch reads them from disk; no rank broadcasts them. Evaluation reads the
windows in stream order. If its last global batch is incomplete, padding rows that do not count in the loss fill it up.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.errors import counted, require
from nanodomino.layers.positions import document_ids, own_places, positions_within_documents, to_device


@dataclass(frozen=True)
class EndOfText:
    """The token that ends a document, and which of its effects are switched on."""
    token: int
    mask_loss: bool = False            # the loss does not count where this token is the label
    reset_positions: bool = False      # positions restart at 0 after it
    reset_attention: bool = False      # tokens after it attend neither to it nor to earlier tokens

    @classmethod
    def of(cls, token: int, config) -> "EndOfText":
        """Return the EndOfText of a run, where `token` ends documents."""
        return cls(token, config.eod_mask_loss, config.reset_position_ids, config.reset_attention_mask)


@dataclass
class Batch:
    """Holds a microbatch. A chunk with neither the embedding nor the head usually needs only sample_ids; the tensors in
    its Batch are then None (see get_batch in train.py)."""
    tokens: torch.Tensor        # [b, s] int64
    labels: torch.Tensor        # [b, s] int64, the next tokens
    loss_mask: torch.Tensor     # [b, s] float32, 1 where the loss of a position counts, else 0
    positions: torch.Tensor     # [b, s] int64
    sample_ids: list[int]       # [b], the samples' numbers k, which seed their dropout masks
    documents: torch.Tensor | None = None      # [b, s] int64, in the host's memory; None: attention crosses documents
    in_order: bool = True       # positions are 0, 1, .. s - 1 in each row
    ahead: "Batch | None" = None    # for the next depth of multi-token prediction; its tokens are these labels

    @staticmethod
    def from_rows(rows, sample_ids, counted=None, end_of_text: EndOfText | None = None,
                  device=torch.device("cpu"), depths=0) -> "Batch":
        """Make a batch on `device` from rows [b, s + 1] of token ids, which are in the host's memory. A row's last
        token is only a label.

        counted: only the first `counted` rows count in the loss; None: all rows count.
        end_of_text: None if the end-of-text token has no effects.
        depths: the number of depths of multi-token prediction. Depth d predicts the token d places after the next one.
            Its loss does not count at the last d places of a sample. If positions or attention restart in each
            document, it does not count across the end of a document either.
        """
        b, s, on_host = len(rows), rows.size(1) - 1, rows
        rows = to_device(rows, device)
        labels = rows[:, 1:]
        loss_mask = torch.ones(labels.shape, device=rows.device)
        if counted is not None:
            loss_mask[counted:] = 0
        positions, documents = torch.arange(s, device=rows.device).expand(b, s), None
        effects = end_of_text or EndOfText(-1)
        if effects.mask_loss:
            loss_mask.masked_fill_(labels == effects.token, 0)
        if effects.reset_positions or effects.reset_attention:
            documents = document_ids(on_host, effects.token)
        if effects.reset_positions:
            positions = to_device(positions_within_documents(documents[:, :-1]), device)
        batch = Batch(rows[:, :-1], labels, loss_mask, positions, sample_ids,
                      documents[:, :-1] if effects.reset_attention else None, in_order=not effects.reset_positions)
        batch.look_ahead(depths, documents)
        return batch

    def look_ahead(self, depths: int, documents):
        """Fill `ahead` for this many depths. Token 0 stands in for tokens after the last label.

        documents: [b, s + 1], in the host's memory; None: predictions may cross the end of a document.
        """
        last, loss_mask = self, self.loss_mask
        for depth in range(1, depths + 1):
            labels, loss_mask = (F.pad(tensor[:, 1:], (0, 1)) for tensor in (last.labels, loss_mask))
            last.ahead = dataclasses.replace(last, tokens=last.labels, labels=labels, loss_mask=loss_mask)
            last = last.ahead
            if documents is not None:
                same = (documents[:, depth + 1:] == documents[:, :-depth - 1]).to(loss_mask.dtype)
                last.loss_mask = loss_mask * F.pad(to_device(same, loss_mask.device), (0, depth))

    def at_own_places(self, mesh) -> "Batch":
        """Return the batch with this rank's places of each sample [b, s/c]; see layers/positions.py. `documents`
        stays whole, because attention needs to know the documents of all tokens."""
        if mesh.cp == 1:
            return self
        own = [own_places(tensor, mesh) for tensor in (self.tokens, self.labels, self.loss_mask, self.positions)]
        ahead = self.ahead and self.ahead.at_own_places(mesh)
        return Batch(*own, self.sample_ids, self.documents, in_order=False, ahead=ahead)

    def split(self, count: int) -> list["Batch"]:
        """Split the samples into `count` slices. Their sizes differ by at most one; the larger slices come first."""
        slices = [tensor.tensor_split(count) if tensor is not None else [None] * count
                  for tensor in (self.tokens, self.labels, self.loss_mask, self.positions, self.documents)]
        ahead = self.ahead.split(count) if self.ahead else [None] * count
        return [Batch(*tensors, ids.tolist(), documents, self.in_order, ahead)
                for *tensors, documents, ids, ahead in zip(*slices, np.array_split(self.sample_ids, count), ahead)]


def sample_ids_of(step: int, microbatch: int, dp_rank: int, dp: int, micro_batch_size: int,
                  global_batch_size: int) -> list[int]:
    """Return the numbers k of the samples in one microbatch of replica `dp_rank`. Steps count from 0."""
    first = step * global_batch_size + dp_rank * (global_batch_size // dp) + microbatch * micro_batch_size
    return list(range(first, first + micro_batch_size))


class TokenDataset:
    """Reads batches of one split onto `device`. Raises UserError if the split has fewer than seq_length + 1 tokens."""

    def __init__(self, corpus: Corpus, split: str, seq_length: int, seed: int, end_of_text: EndOfText | None = None,
                 device=torch.device("cpu"), depths=0):
        self.corpus, self.split, self.seq_length, self.seed, self.device = corpus, split, seq_length, seed, device
        self.end_of_text, self.depths = end_of_text, depths
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

    def batch(self, step: int, microbatch: int, dp_rank: int, dp: int, micro_batch_size: int, global_batch_size: int,
              shuffle: bool = True) -> Batch:
        """Read one microbatch of replica `dp_rank`. Steps count from 0.

        shuffle: False for evaluation. Then sample k is window k, and the rows of samples beyond the last window hold
        zeros and do not count in the loss.
        Raises UserError if a token id is outside the vocabulary.
        """
        sample_ids = sample_ids_of(step, microbatch, dp_rank, dp, micro_batch_size, global_batch_size)
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
        return Batch.from_rows(torch.from_numpy(rows), sample_ids, counted, self.end_of_text, self.device,
                               self.depths)
