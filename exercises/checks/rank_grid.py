"""Exercise 1: the grid of ranks."""

from itertools import permutations

import torch

from ..fake_ranks import on_ranks
from ..judge import expect, judge

HINTS = (
    "The lists hold this rank and the ranks that differ from it only in pp_rank (stages), only in dp_rank (replicas) "
    "or only in tp_rank (shards).",
    "In the picture, rank 5 of tp 2 x pp 2 x dp 2 gets ((1, 0, 1), [1, 5], [5, 7], [4, 5]).",
    "torch.arange(n).view(a, b, c) numbers a grid; its last axis varies fastest. Which axis is that in the picture?")
LAYOUTS = [(2, 2, 2), (2, 3, 4), (4, 2, 1), (3, 1, 2)]            # tp, pp, dp
AXES = {"stages": "grid[:, j, k].tolist()", "replicas": "grid[i, :, k].tolist()", "shards": "grid[i, j].tolist()"}
MISTAKES = {
    f"Your grid counts in the order {' x '.join(order)} (the last varies fastest), but the picture counts pp x dp x "
    "tp: the tp ranks are neighbours, because they send the most and should share the fastest links.":
        (".view(pp, dp, tp)", f".view({', '.join(order)}).permute({[*map(order.index, ('pp', 'dp', 'tp'))]})")
    for order in permutations(("dp", "pp", "tp")) if order != ("pp", "dp", "tp")} | {
    f"The three rows stand in the order {', '.join(names)}, so values would be summed over the wrong ranks, such as "
    "activations of different samples over replicas; return stages, replicas, shards.":
        (", ".join(AXES.values()), ", ".join(map(AXES.get, names)))
    for names in permutations(AXES) if names != (*AXES,)}
NAMES = ["The tuple (pp_rank, dp_rank, tp_rank)", "The row of stages", "The row of replicas", "The row of tp ranks"]


@on_ranks(1)
def program(minimal):
    """Call rank_grid for all ranks of each layout. Tensors and tuples may stand for ints and lists."""
    found = {}
    for tp, pp, dp in LAYOUTS:
        for rank in range(tp * pp * dp):
            result = minimal.rank_grid(rank, tp, pp, dp)
            expect(isinstance(result, tuple | list) and len(result) == 4 and all(
                   isinstance(part, tuple | list | torch.Tensor) for part in result),
                   "rank_grid must return four things: ((pp_rank, dp_rank, tp_rank), stages, replicas, shards), where "
                   "the last three are lists of ranks.")
            found |= {f"{name} of rank {rank} of tp {tp} x pp {pp} x dp {dp}": [*map(int, part)]
                      for name, part in zip(NAMES, result)}
    return found


def check(answer, reference):
    judge(program, answer, MISTAKES)
    expect(isinstance(answer.rank_grid(0, 2, 2, 2)[3][0], int),
           "The rows must hold ints, because dist.new_group() takes ints: call .tolist() on a tensor.")
