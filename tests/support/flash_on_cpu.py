"""Run torch's varlen_attn on a CPU, in any dtype.

    with flash_on_cpu() as sequences: ...

torch's own varlen_attn runs, with its autograd formula. Only the two flash attention kernels below it are replaced, by
plain attention that computes one document after the other. A document may have more keys than queries: then the last
query attends to all keys. Within the context, nanodomino.layers takes the CPU for a GPU that has the kernels.
`sequences` lists, for each forward, how many queries the documents have.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from nanodomino.layers import attention_mask


def probabilities(q, k, window):
    """Return the causal attention probabilities [heads, n, m] of one document: q [n, heads, d], k [m, heads, d].
    window: how many tokens before itself a query sees; -1: all"""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.size(-1) ** 0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
    if window >= 0:
        later |= torch.ones_like(later).tril(len(k) - len(q) - window - 1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


def per_head(q, *keys_and_values):
    """Repeat each [n, groups, d] so that every head of q [n, heads, d] has its own."""
    return (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in keys_and_values)


def attend(q, k, v, window):
    """Return the attention output [n, heads, d] of one document: q [n, heads, d], k and v [n, groups, d]."""
    k, v = per_head(q, k, v)
    return torch.einsum("hqk,khd->qhd", probabilities(q, k, window), v)


def attend_backward(gradient, q, k, v, window):
    """Return the gradients of q, k and v, by the chain rule. Autograd does not work below a custom operation."""
    groups, (k, v) = k.size(1), per_head(q, k, v)
    p, grad_p = probabilities(q, k, window), torch.einsum("qhd,khd->hqk", gradient, v)
    grad_scores = p * (grad_p - (p * grad_p).sum(dim=-1, keepdim=True)) / q.size(-1) ** 0.5
    grad_k, grad_v = torch.einsum("hqk,qhd->khd", grad_scores, q), torch.einsum("hqk,qhd->khd", p, gradient)
    return (torch.einsum("hqk,khd->qhd", grad_scores, k),
            *(x.unflatten(1, (groups, -1)).sum(dim=2) for x in (grad_k, grad_v)))


def lengths_of(q, k, v, starts, starts_k, longest, longest_k, dropout, is_causal, windows):
    """Check a kernel's arguments as the GPU's kernel would, and more strictly. Return the documents' numbers of
    queries and of keys."""
    lengths, lengths_k = starts.diff().tolist(), starts_k.diff().tolist()
    for first, lasts, most, given in ((starts, q, longest, lengths), (starts_k, k, longest_k, lengths_k)):
        assert first.dtype == torch.int32 and first.is_contiguous()
        assert first[0] == 0 and first[-1] == len(lasts) and most == max(given) and min(given) > 0
    assert all(n <= m for n, m in zip(lengths, lengths_k, strict=True)) and dropout == 0.0
    windows = dict(windows)
    before = windows.pop("window_size_left")
    assert windows == dict(window_size_right=0) and is_causal == (before == -1)       # scaled as usual
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and k.shape == v.shape
    return lengths, lengths_k


@contextmanager
def flash_on_cpu():
    """Replace the kernels. Yields the list of sequences."""
    sequences = []

    def forward(q, k, v, starts, starts_k, longest, longest_k, dropout, is_causal, return_debug_mask, *, seqused_k=None,
                alibi_slopes=None, block_table=None, num_splits=None, **windows):
        n, m = lengths_of(q, k, v, starts, starts_k, longest, longest_k, dropout, is_causal, windows)
        sequences.append(n)
        before = windows["window_size_left"]
        out = torch.cat([attend(*document, before) for document in zip(q.split(n), k.split(m), v.split(m))])
        return out, q.new_zeros(q.size(1), len(q)), q.new_zeros(2), q.new_zeros(0), q.new_zeros(0)

    def backward(gradient, q, k, v, out, logsumexp, starts, starts_k, longest, longest_k, dropout, is_causal, rng_state,
                 unused, **windows):
        n, m = lengths_of(q, k, v, starts, starts_k, longest, longest_k, dropout, is_causal, windows)
        before, documents = windows["window_size_left"], zip(gradient.split(n), q.split(n), k.split(m), v.split(m))
        return tuple(map(torch.cat, zip(*(attend_backward(*document, before) for document in documents))))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        with mock.patch.object(attention_mask, "uses_varlen", lambda config, device: True):
            yield sequences
