"""Exercise 1: the grid of ranks."""

from itertools import permutations

from ..fake_ranks import World
from ..judge import expect, patched

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
NAMES = ["(pp_rank, dp_rank, tp_rank)", "the row of stages", "the row of replicas", "the row of tp ranks"]


def plain(result):
    """The result with ints and lists in place of tensors and tuples."""
    try:
        coordinates, *rows = result
        return [tuple(map(int, coordinates)), *([int(rank) for rank in row] for row in rows)]
    except (TypeError, ValueError):
        return None


def check(answer, reference):
    def all_ranks(function):
        return [[plain(function(rank, *layout)) for rank in range(layout[0] * layout[1] * layout[2])]
                for layout in LAYOUTS]

    found, = World(1).run(lambda: all_ranks(answer.rank_grid))
    right = all_ranks(reference.rank_grid)
    if found == right:
        expect(isinstance(answer.rank_grid(0, 2, 2, 2)[3][0], int),
               "The rows must hold ints, because dist.new_group() takes ints: call .tolist() on a tensor.")
        return
    expect(all(result and len(result) == 4 for layout in found for result in layout),
           "rank_grid must return four things: ((pp_rank, dp_rank, tp_rank), stages, replicas, shards), where the last "
           "three are lists of ranks.")
    for sentence, patches in MISTAKES.items():
        expect(found != all_ranks(patched(*patches).rank_grid), sentence)
    for layout, results, rights in zip(LAYOUTS, found, right):
        for rank, (result, its_right) in enumerate(zip(results, rights)):
            for name, one, other in zip(NAMES, result, its_right):
                tp, pp, dp = layout
                expect(name == NAMES[0] or rank in one or rank not in other,
                       f"On rank {rank} of tp {tp} x pp {pp} x dp {dp}, {name} is {one}, but a row must contain the "
                       f"rank itself: {other}.")
                expect(sorted(one) == one or name == NAMES[0] or sorted(one) != other,
                       f"On rank {rank} of tp {tp} x pp {pp} x dp {dp}, {name} is {one}, but must be in the order of "
                       f"the grid, {other}, because all ranks must list a group alike.")
                expect(one == other, f"On rank {rank} of tp {tp} x pp {pp} x dp {dp}, {name} is {one} instead of "
                                     f"{other}.")
