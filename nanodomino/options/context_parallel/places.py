"""Says which tokens of a sample each of its c ranks holds (context parallelism).

A token's *place* is its index in the sample. A token attends to all places up to its own. If rank r held the r-th of c
equal parts, the last rank would compute about 2 c - 1 times as many scores as the first. So the sample is cut into 2 c
parts, and rank r holds parts r and 2 c - 1 - r (Llama 3, 2407.21783, section 3.3.2). For c = 2:

    place    0  1 | 2  3 | 4  5 | 6  7         rank 0 computes 1 + 2 + 7 + 8 = 18 scores,
    rank     0  0 | 1  1 | 1  1 | 0  0         rank 1 computes 3 + 4 + 5 + 6 = 18
"""

import torch


def by_rank(whole, ranks: int, dim=1) -> list[torch.Tensor]:
    """Cut `whole` [b, s, ..] into each rank's places: a list of c tensors [b, s/c, ..]. dim: the dimension of s."""
    parts = whole.chunk(2 * ranks, dim)
    return [torch.cat(both, dim) for both in zip(parts[:ranks], reversed(parts[ranks:]))]


def in_order(own_of_each) -> torch.Tensor:
    """Undo by_rank(): join the places of each rank, c tensors [b, s/c, ..], to whole samples [b, s, ..]."""
    first, second = zip(*(own.chunk(2, dim=1) for own in own_of_each))
    return torch.cat([*first, *reversed(second)], dim=1)


def own_places(whole, mesh, dim=1) -> torch.Tensor:
    """Return this rank's places of `whole` [b, s, ..]."""
    ranks, rank = mesh.axis("cp")
    return by_rank(whole, ranks, dim)[rank]
