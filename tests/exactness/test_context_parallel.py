"""Training with context parallelism equals one plain process on every layout.

The other side is support/reference.py, which computes every sample whole.
"""

import dataclasses
import itertools
import random
from collections import Counter

import pytest
import torch
from support.harness import FAMILIES, build, check_against_reference, count_documents, tiny, weights_and_data

from nanodomino.comm.trace import Trace
from nanodomino.domino import run_to_end
from nanodomino.layers.context_parallel import queries_and_keys
from nanodomino.layers.positions import by_rank, in_order
from nanodomino.mesh import meta_mesh
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES

STEPS = 2                # the second step sees the weights and moments that the first step wrote
A2A, DROPOUT = dict(cp_comm_type="a2a"), dict(hidden_dropout=0.2, attention_dropout=0.3)
DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.3,
               moe_z_loss_coeff=0.01, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05,
               moe_router_topk=2)


def case(cp, tp, pp, dp, *options, exhaustive=False, **more):
    options = dict(item for option in (*options, more) for item in option.items())
    name = f"cp{cp}-tp{tp}-pp{pp}-dp{dp}-" + "-".join(f"{key}{value}" for key, value in options.items())
    sizes = dict(context_parallel_size=cp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                 global_batch_size=12 if dp <= 2 else 24, num_layers=max(2, 2 * pp - 1), seq_length=16)
    return pytest.param(cp * tp * pp * dp, sizes | options, id=name,
                        marks=pytest.mark.exhaustive if exhaustive else [])


CASES = [
    case(2, 1, 1, 1, slices=1, zero_stage=0),
    case(2, 1, 1, 1, A2A, FAMILIES["qwen3"], slices=3, recompute_granularity="selective"),
    case(4, 1, 1, 1, FAMILIES["llama"], DOCUMENTS, slices=2, recompute_granularity="full"),
    case(2, 1, 1, 2, A2A, DROPOUT, zero_stage=2),
    case(2, 2, 1, 1, DROPOUT, FAMILIES["qwen2"], slices=2, sequence_parallel=True, recompute_granularity="full"),
    case(2, 2, 1, 1, A2A, FAMILIES["llama"], DOCUMENTS, slices=2, columns=2, sequence_parallel=True),
    case(2, 1, 2, 1, FAMILIES["qwen3"], schedule="paired", zero_stage=2, recompute_granularity="selective"),
    case(2, 1, 2, 2, FAMILIES["llama"], schedule="zb-v", slices=2, num_layers=5),
    case(2, 1, 1, 2, EXPERTS, expert_model_parallel_size=4, slices=2),
    case(4, 1, 2, 1, A2A, FAMILIES["mixed"], schedule="zb-h1", slices=3, loss_scale=2.0**12),
]


def crossing():
    """Return exhaustive cases: every layout with every schedule. The other options are drawn for each case."""
    options = dict(slices=(1, 2, 3), columns=(1, 2), zero_stage=(0, 1, 2), recompute_granularity=tuple(GRANULARITIES),
                   loss_scale=(None, 2.0**12), sequence_parallel=(False, True), cp_comm_type=("all_gather", "a2a"))
    groups = [[*FAMILIES.values(), EXPERTS], ({}, DROPOUT), ({}, DOCUMENTS)]
    draw, cases = random.Random("context"), []
    for cp, tp, pp, dp in itertools.product((2, 4), (1, 2, 4), (1, 2, 4), (1, 2)):
        if cp * tp * pp * dp <= 8:
            for schedule in SCHEDULES:
                drawn = {name: draw.choice(values) for name, values in options.items()}
                drawn["sequence_parallel"] &= tp > 1
                family, *more = map(draw.choice, groups)
                if family.get("num_query_groups", 8) < cp * tp:
                    drawn["cp_comm_type"] = "all_gather"
                if family is EXPERTS:
                    drawn["expert_model_parallel_size"] = draw.choice([ep for ep in (1, 2, 4) if ep <= cp * dp])
                cases.append(case(cp, tp, pp, dp, drawn, family, *more, exhaustive=True, schedule=schedule,
                                  num_layers=2 * pp + 1, global_batch_size=24))
    return cases


def pytest_generate_tests(metafunc):
    """Compute the exhaustive cases only if they will run."""
    if metafunc.function is test_training_equals_one_plain_process:
        metafunc.parametrize("world_size, options", CASES + (crossing() if metafunc.config.exhaustive else []))


def test_training_equals_one_plain_process(pool, world_size, options):
    check_against_reference(pool, tiny(world_size, **options), STEPS)


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
