"""Exercise 3: the cross entropy of logits that are cut over the vocabulary."""

from types import SimpleNamespace

import torch

from ..fake_ranks import World
from ..judge import expect, judge, run_to_end
from ..stages import draw

FACTS = """
`yield from all_reduce(model, tensor)`, or with dist.ReduceOp.MAX as the third argument, works
in place. Columns from model.vocab on are padding, and a rank may have only padding.
"""
HINTS = (
    "Write softmax cross entropy for one rank first. Which two reductions over the vocabulary does it contain?",
    "exp overflows for large logits. What may be subtracted from all logits of a token without changing the loss? All "
    "ranks must subtract the same number.",
    "This rank's first column is model.grid.tp_rank * logits.size(-1). What value of a padding logit makes its exp 0?",
    "Only one rank has the label's logit: own_rows() says which, and at which column. What must the others add?",
    "The gradient is the softmax minus 1 at the label. It needs no further message: which sum do you have already?")
B, S, COLUMNS = 2, 4, 8
# case: (what is added to all logits of the first token, which must not change its loss; words without padding)
CASES = {"": (0.0, 13), " with large logits": (800.0, 13), " with very negative logits": (-2000.0, 13),
         " if rank 1 has only padding": (0.0, COLUMNS // 2)}
MISTAKES = {
    "The loss counts padding on a rank that has only padding: model.vocab minus its first column is negative there, so "
    "a slice that starts at it leaves columns out.":
        ("max(model.vocab - model.grid.tp_rank * logits.size(-1), 0)",
         "model.vocab - model.grid.tp_rank * logits.size(-1)"),
    "The gradient divides by this rank's own sum of exp: the probabilities of all ranks together must sum to 1, so "
    "divide by the sum over all ranks.":
        ("exps.div_(sums[0].unsqueeze(-1))", "exps / exps.sum(-1, keepdim=True)"),
    "The gradient misses the -1 at the label.":
        ("softmax.scatter_add_(-1, row, -is_own.to(softmax.dtype))", "softmax"),
    "The gradient subtracts 1 on every rank: only the rank that owns the label may, elsewhere column 0 would lose 1.":
        ("-is_own.to(softmax.dtype)", "-torch.ones_like(row, dtype=softmax.dtype)"),
    "The loss counts the label on a rank that does not own it: only the owner may contribute the label's logit, the "
    "other ranks contribute 0.": (".where(is_own, 0)\n    sums", "\n    sums"),
    "Each rank subtracts its own maximum, so the exponentials that are summed have different scales: all-reduce the "
    "maximum with ReduceOp.MAX first, with `yield from`, without which all_reduce() does not run.":
        ("    yield from all_reduce(model, maximum, dist.ReduceOp.MAX)\n", ""),
    "The loss is not finite, because exp overflows or all exps become 0: subtract the token's largest logit over all "
    "ranks before exp.": ("maximum = logits.amax(-1) ", "maximum = 0 * logits.amax(-1) "),
    "The loss subtracts the label's logit as it was: subtract the token's maximum from it, too, as in the sum of exp.":
        ("(logits.gather(-1, row) - maximum.unsqueeze(-1))", "logits.gather(-1, row)"),
    "The loss counts the padding: columns from model.vocab on are no words, so set them to -1e9 first.":
        ("    logits[..., max(model.vocab - model.grid.tp_rank * logits.size(-1), 0):] = -1e9", "    pass"),
    "The loss knows only this rank's part of the vocabulary: all-reduce the sum of exp and the label's logit, with "
    "`yield from`, without which all_reduce() does not run.":
        ("    yield from all_reduce(model, sums)\n", ""),
}


def program(minimal, world=None):
    """Run cross_entropy on two ranks."""
    def rank_program():
        rank, found = minimal.dist.get_rank(), {}
        group = minimal.dist.new_group([0, 1])
        for case, (offset, vocab) in CASES.items():
            model = SimpleNamespace(
                grid=SimpleNamespace(tp=2, tp_rank=rank, tp_group=group), vocab=vocab, verbose=False, action="F0",
                weights={minimal.WORDS: torch.zeros(COLUMNS, 4)}, sizes=minimal.Sizes())
            logits = 3 * draw(None, "logits", (B, S, 2 * COLUMNS)) * COLUMNS ** 0.5
            logits[0, 0] += offset
            labels = torch.tensor([[0, 3, 7, 8], [9, 12, 5, 1]]) % vocab
            result = run_to_end(minimal.cross_entropy(model, logits.chunk(2, -1)[rank].clone(), labels),
                                "cross_entropy")
            expect(isinstance(result, tuple) and len(result) == 2,
                   "cross_entropy must return (losses [b, s], gradient of the logits [b, s, v/t]).")
            found[f"The loss{case}"], found[f"The gradient of the logits{case}"] = result
        return found

    return (world or World(2)).run(rank_program)


def check(answer, reference):
    world = World(2, wire=1.0)
    program(answer, world)
    judge(program, answer, MISTAKES)
    numbers = world.carried[0] / 8 / (B * S) / len(CASES)
    expect(numbers <= 4, f"The numbers are right, but each rank sends {numbers:g} numbers per token where three are "
                         "enough: the maximum, the sum of exp and the label's logit.")
    calls = max(world.counts.values()) // len(CASES)
    expect(calls <= 2, f"The numbers are right, but {calls} all-reduces follow each other where two suffice: stack the "
                       "sum of exp and the label's logit [2, b, s], because each all-reduce costs a latency.")
