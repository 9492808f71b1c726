import torch
import torch.distributed as dist

from nanodomino.layers.main_grad import wide
from nanodomino.parallel import VocabParallelEmbedding

# Cross entropy of logits z [b, s, width] that lie on t ranks:
#
#     loss = log(sum_j exp(z_j - max)) - (z_label - max)      d loss / d z = exp(z - max) / sum - one_hot(label)
#
#     maximum_and_sum          -> this rank's largest logit, and sum_j exp(z_j - that), both [b, s]
#                                 maximum over ranks [b, s]: without it exp would overflow, a local one would differ
#     parts_of_loss            -> this rank's part of two sums, packed [2, b, s]: of exp(z_j - maximum); of the label's
#                                 z - maximum, which one rank has
#     cross_entropy            -> loss [b, s]
#     cross_entropy_gradient      in the place of the logits: no wires
#
# One tensor of the size of the logits is ever whole: they stay in their own type until the gradient takes their place.
# Sums are of fp32 or wider, and so are the temporaries, some rows at a time; `narrow` ones are of the logits' own type.

CHUNK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}    # of a temporary: a CPU's caches hold it; a GPU is kept busy by it


def in_chunks(function):
    """function(logits [rows, width], others [rows] ...) -> results [rows] ..., run on some rows at a time."""
    def over_chunks(logits, *others):
        rows = max(1, CHUNK_BYTES[logits.device.type] // (4 * logits.size(-1)))
        results = [function(*some) for some in zip(*(tensor.split(rows) for tensor in (logits, *others)))]
        return [torch.cat(parts) for parts in zip(*results)]
    return over_chunks


def maximum_and_sum_of_rows(logits, narrow=False):
    """logits [n, width] -> (the largest, sum of exp(z - largest)), both [n], in fp32 or wider."""
    narrow_largest = logits.amax(dim=-1)
    largest = narrow_largest.to(wide(logits))
    exponentials = (logits - (narrow_largest if narrow else largest).unsqueeze(-1)).exp_()
    return largest, exponentials.sum(dim=-1, dtype=wide(logits))


def exponentials_of_rows(logits, maximum, factor, narrow=False):
    """logits [n, width] become exp(logits - maximum [n]) * factor [n]."""
    maximum, factor = (one.unsqueeze(-1).to(logits.dtype if narrow else one.dtype) for one in (maximum, factor))
    torch.mul((logits - maximum).exp_(), factor, out=logits)
    return ()


def maximum_and_sum(logits, vocabulary: VocabParallelEmbedding, of_rows=in_chunks(maximum_and_sum_of_rows)):
    """Both [b, s]; -inf and 0 on a rank that owns nothing but padding. Overwrites the logits of padding."""
    if not vocabulary.num_words:
        nothing = torch.zeros(logits.shape[:-1], dtype=wide(logits), device=logits.device)
        return nothing - torch.inf, nothing
    logits[..., vocabulary.num_words:] = -torch.inf
    return [one.view(logits.shape[:-1]) for one in of_rows(logits.flatten(0, 1))]


def parts_of_loss(logits, labels, largest, exponentials, maximum, vocabulary: VocabParallelEmbedding):
    """This rank's part of the two sums [2, b, s]. largest, exponentials: what maximum_and_sum found."""
    row, inside = vocabulary.local_rows(labels)
    sums = torch.stack([exponentials * (largest - maximum).exp(), torch.zeros_like(maximum)])
    if vocabulary.num_words:
        sums[1] = (logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) - maximum).where(inside, 0)
    return sums


def cross_entropy(sums):
    """Loss [b, s] from the sums over all ranks."""
    return sums[0].log() - sums[1]


def cross_entropy_gradient(logits, labels, loss, maximum, sums, gradient, vocabulary: VocabParallelEmbedding,
                           of_rows=in_chunks(exponentials_of_rows)):
    """d loss / d logits = (softmax - one_hot(label)) * gradient, on this shard, in the place of the logits.

    At the label, whose probability is exp(-loss), it is expm1(-loss): p - 1 would have lost what p was rounded to."""
    if vocabulary.num_words:
        row, inside = (tensor.unsqueeze(-1) for tensor in vocabulary.local_rows(labels))
        gradient = gradient.to(loss.dtype)
        at_label = (torch.expm1(-loss) * gradient).to(logits.dtype).unsqueeze(-1)
        of_rows(logits.flatten(0, 1), maximum.flatten(), (gradient / sums[0]).flatten())
        logits.scatter_(-1, row, at_label.where(inside, logits.gather(-1, row)))
    return logits


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The steps with blocking reduces, for the plain forward."""

    @staticmethod
    def forward(ctx, logits, labels, vocabulary):
        logits = logits.clone()
        largest, exponentials = maximum_and_sum(logits, vocabulary)
        maximum = largest.clone()
        if vocabulary.group.size() > 1:
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=vocabulary.group)
        sums = parts_of_loss(logits, labels, largest, exponentials, maximum, vocabulary)
        if vocabulary.group.size() > 1:
            dist.all_reduce(sums, group=vocabulary.group)
        loss = cross_entropy(sums)
        ctx.save_for_backward(logits, labels, loss, maximum, sums)
        ctx.vocabulary = vocabulary
        return loss

    @staticmethod
    def backward(ctx, gradient):
        logits, *saved = ctx.saved_tensors
        return cross_entropy_gradient(logits.clone(), *saved, gradient, ctx.vocabulary), None, None


def vocab_parallel_cross_entropy(logits, labels, vocabulary: VocabParallelEmbedding):
    """logits [b, s, width] of this rank, labels [b, s] -> loss of each token [b, s] in fp32 or wider, on every rank."""
    return VocabParallelCrossEntropy.apply(logits, labels, vocabulary)
