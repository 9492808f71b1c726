"""Attention within the documents of a sample: with an attention bias or, on GPUs, without one.

A sample may hold parts of several documents, and options may keep attention within them. With a bias [b, 1, s, s],
attention computes all scores, and then discards those between documents. In 16 bit, the bias of a sample of 32,768
tokens takes 2.1 GB. torch's varlen_attn needs no bias. It takes all samples of a slice as one sequence, with the
positions where documents start. It computes only the scores within each document:

    samples      a  b  #  c | d  e  #  #         #: end-of-text; each sample starts a document, too
    documents    0  0  0  1 | 0  0  0  1
    starts       0        3   4        7   8     the last number is the length of the sequence

varlen_attn is a form of flash attention. It takes groups of heads, but no dropout and only numbers of 16 bits.
Otherwise, and on CPUs, attention uses the bias.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from nanodomino.comm.world import has_flash_attention
from nanodomino.layers.attention_mask import to_device


@dataclass(frozen=True)
class DocumentStarts:
    """Says where documents start in a slice whose samples are joined to one sequence of b s tokens."""
    starts: torch.Tensor      # [documents + 1] int32, on the GPU; the last number is b s
    longest: int              # the number of tokens of the longest document
    keys: "DocumentStarts | None" = None     # document starts of k and v, if these have more tokens than q; None: q's


def fits_varlen(config) -> bool:
    """Return whether varlen_attn can compute this model's attention on GPUs that have the kernel."""
    # torch's kernel takes multiples of 8 channels; above 192, some GPUs have no backward
    return (config.params_dtype.itemsize == 2 and config.attention_dropout == 0.0
            and config.kv_channels % 8 == 0 and config.kv_channels <= 192)


def uses_varlen(config, device: torch.device) -> bool:
    """Return whether attention within documents uses varlen_attn on this device."""
    return fits_varlen(config) and has_flash_attention(device)


def first_of_document(documents):
    """Return whether each token is the first of its document in this sample, [b, s], for document numbers [b, s]."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def attention_bias(documents, dtype):
    """Return what is added to the scores, [b, 1, s, s]: -inf for later tokens and other documents, 0 for the rest."""
    s = documents.size(1)
    causal = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    allowed = (documents[:, :, None] == documents[:, None, :]) & causal
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, -torch.inf).unsqueeze(1)


def inputs_within_documents(config, documents, device: torch.device) -> dict:
    """Return the fields of AttentionInputs that keep attention within documents.

    documents: the document numbers [b, s], in the host's memory
    """
    if uses_varlen(config, device):
        return dict(attend=partial(varlen_attention, documents=find_starts(documents, device)))
    return dict(attention_bias=attention_bias(to_device(documents, device), config.params_dtype))


def find_starts(documents, device: torch.device) -> DocumentStarts:
    """Return the DocumentStarts of the document numbers [b, s], which are in the host's memory."""
    starts = F.pad(first_of_document(documents).flatten().nonzero().flatten(), (0, 1), value=documents.numel())
    return starts_of(starts, device)


def starts_of(starts, device: torch.device, keys=None) -> DocumentStarts:
    """Return the DocumentStarts of starts [documents + 1], which are in the host's memory."""
    return DocumentStarts(to_device(starts.int(), device), int(starts.diff().max()), keys)


def varlen_attention(q, k, v, documents: DocumentStarts):
    """Return the attention output [b, heads, s, d] for q [b, heads, s, d], k and v [b, groups, s, d]."""
    from torch.nn.attention.varlen import varlen_attn          # imported here, because this import takes a second

    b, grouped = q.size(0), k.size(1) < q.size(1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))         # [b s, heads, d], without a copy
    keys = documents.keys or documents
    context = varlen_attn(q, k, v, documents.starts, keys.starts, documents.longest, keys.longest,
                          window_size=(-1, 0), enable_gqa=grouped)         # the window makes attention causal
    return context.unflatten(0, (b, -1)).transpose(1, 2)
