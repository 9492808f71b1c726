"""Run torch's varlen_attn on a CPU, in any dtype.

    with flash_on_cpu() as sequences: ...

torch's own varlen_attn runs, with its autograd formula. Only the two flash attention kernels below it are replaced, by
torch's attention for CPUs, one document after the other. A document may have more keys than queries: then the last
query attends to all keys. Within the context, nanodomino.layers takes the CPU for a GPU that has the kernels.
`sequences` lists, for each forward, how many queries the documents have.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from nanodomino.layers import attention_mask


def attention(q, k, v, window, gradient=None):
    """Return one document's causal attention by torch's kernel for CPUs: the output [n, heads, d] or, given its
    gradient, the gradients of q [n, heads, d], k and v [m, groups, d]. window: how many tokens before itself a query
    sees; -1: all"""
    n, m, groups = len(q), len(k), k.size(1)
    hidden = torch.ones(n, m, dtype=torch.bool).triu(1 + m - n)
    if window >= 0:
        hidden |= torch.ones(n, m, dtype=torch.bool).tril(m - n - window - 1)
    mask = torch.zeros(n, m, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    given = [x.repeat_interleave(q.size(1) // x.size(1), dim=1).transpose(0, 1)[None] for x in (q, k, v)]
    result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, attn_mask=mask)
    if gradient is None:
        return result[0][0].transpose(0, 1)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient.transpose(0, 1)[None], *given, *result, 0.0, False, attn_mask=mask)
    grad_q, *others = (x[0].transpose(0, 1) for x in gradients)
    return grad_q, *(x.unflatten(1, (groups, -1)).sum(dim=2) for x in others)


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
        out = torch.cat([attention(*document, before) for document in zip(q.split(n), k.split(m), v.split(m))])
        return out, q.new_zeros(q.size(1), len(q)), q.new_zeros(2), q.new_zeros(0), q.new_zeros(0)

    def backward(gradient, q, k, v, out, logsumexp, starts, starts_k, longest, longest_k, dropout, is_causal, rng_state,
                 unused, **windows):
        n, m = lengths_of(q, k, v, starts, starts_k, longest, longest_k, dropout, is_causal, windows)
        documents = zip(q.split(n), k.split(m), v.split(m), gradient.split(n))
        gradients = (attention(*document, windows["window_size_left"], grad_out) for *document, grad_out in documents)
        return tuple(map(torch.cat, zip(*gradients)))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        with mock.patch.object(attention_mask, "uses_varlen", lambda config, device: True):
            yield sequences
