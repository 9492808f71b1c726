"""Exercise 15: the vocabulary-parallel embedding and its backward."""

import torch

from ..fake_ranks import on_ranks
from ..stages import draw

HINTS = (
    "dist.get_rank(group) times len(words) is this rank's first word. A word that is not here must add zeros: look up "
    "some row that exists, then multiply by is_own.",
    "backward returns a gradient for words, None for tokens and for group. All ranks have the same incoming gradient: "
    "does backward need a message?",
    "A word may occur several times: index_add_ adds all of its gradients, indexing with += only one.")
SUM, MASK = "        dist.all_reduce(embeddings, group=group)\n", "        gradient = gradient * is_own.unsqueeze(-1)\n"
MISTAKES = {
    "The embeddings are this rank's addends: only one rank has a token's word, so all-reduce them.": (SUM, ""),
    "The embeddings are summed over all ranks of the world: pass the group.": (SUM, SUM.replace(", group=group", "")),
    "A rank adds its first row for words that other ranks own: multiply by is_own before the sum.":
        ("words[row] * is_own.unsqueeze(-1)", "words[row]"),
    "A rank of the second group takes its place in the world for its place in the group: use dist.get_rank(group).":
        ("dist.get_rank(group) * len(words)", "dist.get_rank() * len(words)"),
    "The first row gets the gradients of other ranks' words: multiply the gradient by is_own, as in forward.":
        (MASK, ""),
    "A word that occurs several times has the gradient of one place only: `+=` with an index adds once for each row, "
    "so use index_add_.": ("grad_words.index_add_(0, row.flatten(), gradient.flatten(0, 1))",
                        "grad_words[row.flatten()] += gradient.flatten(0, 1)"),
    "The gradient of words is 2 x too large: every rank has the whole gradient already, so backward must not sum over "
    "ranks.": (MASK, MASK + "        gradient = gradient * 2\n"),
}


@on_ranks(4)
def program(minimal):
    """Look words up on two groups of two ranks, with four words on each."""
    rank = minimal.dist.get_rank()
    group = minimal.dist.new_group([0, 1] if rank < 2 else [2, 3])
    words = draw(None, f"words {rank}", (4, 3)).requires_grad_()
    output = minimal.EmbedWords.apply(words, torch.tensor([[0, 5, 5, 1], [7, 2, 5, 1]]), group)
    if isinstance(output, torch.Tensor):
        output.backward(draw(None, f"gradient {group}", (2, 4, 3)))
    return {"The embeddings": output, "The gradient of words": words.grad}
