"""Cross entropy over a vocabulary that is cut over t tensor-parallel ranks, without gathering the logits.

For one token, with all its logits z on one rank:

    maximum = z.max()                                     # without it exp would overflow
    exps    = (z - maximum).exp()
    sum_exp = exps.sum()
    loss    = sum_exp.log() - (z[label] - maximum)        # = -log softmax(z)[label]
    grad_z  = exps / sum_exp - one_hot(label)             # = softmax(z), minus 1 at the label

Here each rank has only v/t of a token's logits. Instead of gathering v logits per token, two all-reduces communicate
three numbers per token (Megatron-LM, 1909.08053, section 3):

    local_max_and_sum_exp      this rank's largest logit, and its sum of exp(z - largest), both [b, s]
      all-reduce (max)         maximum [b, s]
    partial_loss_sums          [2, b, s]: this rank's sum_exp, rescaled to the common maximum, and z[label] - maximum,
      all-reduce (sum)         which is 0 on ranks that do not own the label
    loss_from_sums             loss [b, s]
    cross_entropy_gradient     softmax(z) - one_hot(label) for this rank's logits, without communication

**Memory.** Logits are the largest tensor of a step. They stay in their own dtype until the gradient overwrites them.
Training creates no other tensor of their size, because it makes fp32 temporaries for a block of rows at a time. With
`narrow` (--fp16-lm-cross-entropy), the temporaries have the logits' own dtype. Sums are always in fp32 or wider.
"""

import torch
import torch.distributed as dist

from nanodomino.comm.device import kind_of
from nanodomino.layers.gradients import wide_dtype

BLOCK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}    # size of a temporary: fits a CPU's caches, or keeps a GPU busy


def in_blocks(function):
    """Let function(logits [rows, n], *others [rows]) process a few rows at a time, and join the results [rows]."""
    def by_blocks(logits, *others):
        rows = max(1, BLOCK_BYTES[kind_of(logits.device)] // (4 * logits.size(-1)))
        results = [function(*block) for block in zip(*(tensor.split(rows) for tensor in (logits, *others)))]
        return [torch.cat(parts) for parts in zip(*results)]
    return by_blocks


def max_and_sum_exp_of_rows(logits, narrow=False):
    """Return (largest logit, sum of exp(z - largest)) of logits [rows, n], both [rows] in fp32 or wider."""
    wide, largest = wide_dtype(logits), logits.detach().amax(dim=-1, keepdim=True)
    wide_largest = largest.to(wide)
    exps = (logits - (largest if narrow else wide_largest)).exp_()
    return wide_largest.squeeze(-1), exps.sum(dim=-1, dtype=wide)


def scaled_exp_of_rows(logits, maximum, factor, narrow=False):
    """Overwrite logits [rows, n] with exp(logits - maximum [rows]) * factor [rows]."""
    maximum, factor = (x.unsqueeze(-1).to(logits.dtype if narrow else x.dtype) for x in (maximum, factor))
    torch.mul((logits - maximum).exp_(), factor, out=logits)
    return ()


def local_max_and_sum_exp(logits, vocabulary, of_rows=in_blocks(max_and_sum_exp_of_rows)):
    """Return (largest, sum_exp) of logits [b, s, num_logits], both [b, s]. Overwrites the logits of padding with -inf.
    A rank that owns only padding returns -inf and 0."""
    if not vocabulary.num_words:
        zeros = logits[..., :0].sum(dim=-1, dtype=wide_dtype(logits))
        return zeros - torch.inf, zeros
    logits[..., vocabulary.num_words:] = -torch.inf
    return [x.view(logits.shape[:-1]) for x in of_rows(logits.flatten(0, 1))]


def partial_loss_sums(logits, labels, largest, sum_exp, maximum, vocabulary):
    """Return what this rank adds to the second all-reduce: sum_exp and z[label] - maximum, as one tensor [2, b, s].
    largest, sum_exp: the results of local_max_and_sum_exp(). maximum: the largest logit over all ranks."""
    row, is_local = vocabulary.local_rows(labels)
    sums = torch.stack([sum_exp * (largest - maximum).exp(), torch.zeros_like(maximum)])
    if vocabulary.num_words:
        sums[1] = (logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) - maximum).where(is_local, 0)
    return sums


def loss_from_sums(sums):
    """Return the loss [b, s]. sums [2, b, s]: partial_loss_sums() added up over all ranks."""
    return sums[0].log() - sums[1]


def cross_entropy_gradient(logits, labels, loss, maximum, sums, gradient, vocabulary,
                           of_rows=in_blocks(scaled_exp_of_rows)):
    """Overwrite this rank's logits with (softmax - one_hot(label)) * gradient. gradient [b, s]: the gradient of the
    loss. At the label, softmax - 1 is computed as expm1(-loss). If the model is sure of a label, the label's
    probability rounds to 1 in 16 bits, so the plain difference would be 0."""
    if vocabulary.num_words:
        row, is_local = (tensor.unsqueeze(-1) for tensor in vocabulary.local_rows(labels))
        gradient = gradient.to(loss.dtype)
        at_label = (torch.expm1(-loss) * gradient).to(logits.dtype).unsqueeze(-1)
        of_rows(logits.flatten(0, 1), maximum.flatten(), (gradient / sums[0]).flatten())
        logits.scatter_(-1, row, at_label.where(is_local, logits.gather(-1, row)))
    return logits


def vocab_parallel_cross_entropy(logits, labels, vocabulary):
    """Return the loss [b, s], in fp32 or wider, from this rank's logits [b, s, num_logits] and labels [b, s]. Runs the
    steps above with blocking all-reduces and plain autograd. This is the definition."""
    logits = logits.to(wide_dtype(logits), copy=True)
    largest, sum_exp = local_max_and_sum_exp(logits, vocabulary)
    maximum = largest.detach().clone()
    if vocabulary.group.size() > 1:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=vocabulary.group)
    sums = partial_loss_sums(logits, labels, largest, sum_exp, maximum, vocabulary)
    if vocabulary.group.size() > 1:
        dist.all_reduce(sums.detach(), group=vocabulary.group)           # in place, and for autograd the identity, as g
    return loss_from_sums(sums)
