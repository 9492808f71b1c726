"""Checks which collectives context parallelism needs, and which places and keys each rank has.

test_features.py compares whole training steps on every layout.
"""

import dataclasses
from collections import Counter

import pytest
import torch
from support.harness import build, count_documents, tiny, weights_and_data

from nanodomino.comm.trace import Trace
from nanodomino.domino import run_to_end
from nanodomino.layers.context_parallel import queries_and_keys
from nanodomino.layers.positions import by_rank, in_order
from nanodomino.mesh import meta_mesh
from nanodomino.overlap.recompute import GRANULARITIES


def collectives(config, weights, data):
    """Return the cp group's collectives of a microbatch's forward and of its backward by (kind, site, slice), and the
    gradients."""
    mesh, model, _, stage = build(config, weights, Trace())
    batch = data.batch(0, 0, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
    batch = batch.at_own_places(mesh)
    _, tape = run_to_end(stage.forward(batch))
    in_forward = len(stage.trace.events)
    run_to_end(stage.backward(tape, batch.loss_mask.double()))
    return [Counter((event.kind, event.args["site"], event.args["slice"]) for event in events
                    if event.args.get("group") == "cp" and event.kind != "wait")
            for events in (stage.trace.events[:in_forward], stage.trace.events[in_forward:])], [
                weight.main_grad for weight in model.parameters()]


@pytest.mark.parametrize("comm_type, forward, backward", [
    ("all_gather", dict(all_gather=1), dict(reduce_scatter=1)), ("a2a", dict(all_to_all=2), dict(all_to_all=2))])
def test_recomputation_repeats_the_collectives_of_the_core_with_the_same_bits(pool, comm_type, forward, backward):
    first, config = None, tiny(2, context_parallel_size=2, cp_comm_type=comm_type, slices=2, num_layers=2)
    places = [(f"layers.{layer}.attention", slice) for layer in (0, 1) for slice in (0, 1)]
    for granularity in GRANULARITIES:
        config = dataclasses.replace(config, recompute_granularity=granularity)
        again = Counter(backward) + Counter(forward if granularity != "none" else {})
        outcomes = pool.run(collectives, config, *weights_and_data(config, 1), world_size=2)
        first = first or [gradients for _, gradients in outcomes]
        for (found, gradients), kept in zip(outcomes, first):
            assert all(map(torch.equal, gradients, kept))
            assert found == [{(kind, *place): count for place in places for kind, count in counts.items()}
                             for counts in (forward, again)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_computes_as_many_scores_and_reads_as_many_keys(ranks):
    places = torch.arange(48).view(2, 24)
    own = by_rank(places, ranks)
    assert len({int((1 + part[0]).sum()) for part in own}) == 1
    assert torch.equal(in_order(own), places)
    for rank in range(ranks):
        found = queries_and_keys(tiny(1), torch.zeros_like(places), meta_mesh(1, 1, 1, cp=ranks, cp_rank=rank),
                                 torch.device("cpu"))
        assert found["keys"].numel() == 2 * (24 + 24 // (2 * ranks))


def test_sequences_of_queries_and_their_keys_are_those_counted_by_hand():
    """Eight tokens on two ranks. On rank 0 the first part holds the end of a document and the start of the next."""
    _, documents = count_documents(torch.tensor([[3, 1, 1, 3, 1, 1, 1, 1]]))
    assert documents.tolist() == [[0, 1, 1, 1, 2, 2, 2, 2]]
    expected = [([0], [1], [6, 7], [0, 1, 4, 5, 6, 7]), ([2, 3], [4, 5], [], [1, 2, 3, 4, 5])]
    for rank, (*sequences, keys) in enumerate(expected):
        found = queries_and_keys(tiny(1), documents, meta_mesh(1, 1, 1, cp=2, cp_rank=rank), torch.device("cpu"))
        starts = found["documents"]
        assert starts.starts.diff().tolist() == [len(queries) for queries in sequences if queries]
        assert starts.longest == 2 and starts.keys.longest == [4, 3][rank]
        assert starts.keys.starts.tolist() == [[0, 1, 2, 6], [0, 3, 5]][rank]
        gathered = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])               # the places of rank 0, then of rank 1
        assert gathered[found["keys"]].tolist() == [keys]
