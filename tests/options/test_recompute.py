"""Recomputation gives the same bits, repeats no collective, hides the collectives in flight, and frees its memory."""

import dataclasses
import weakref
from unittest import mock

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny

import train
from nanodomino.comm.trace import Trace
from nanodomino.estimate.accounts import Launch, Operation, Wait
from nanodomino.estimate.rank import dry_run
from nanodomino.layers.dropout_and_positions import MasksAndPositions
from nanodomino.options import recompute
from nanodomino.options.recompute import GRANULARITIES
from nanodomino.overlap.compute import LinearPair


DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.3)
EIGHT = dict(micro_batch_size=4, global_batch_size=8, num_layers=2)          # two microbatches of four samples


def step_of(config, prepare=lambda stage: None):
    """Run one step of rank 0 in a world without other processes; return its gradients. prepare: changes the stage."""
    with fake_world(0, config.world_size):
        mesh, model, optimizer, stage = build(config)
        prepare(stage)
        train.train_step(1, stage, optimizer, random_data(config, 1), config, mesh)
        return {name: weight.main_grad.clone() for name, weight in model.named_parameters()}


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) and found[name].isfinite().all() for name in found)


# ---- the same numbers

@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, dict(slices=3, columns=2, normalization="RMSNorm"), dict(slices=2, **DROPOUT),
                                     dict(schedule="zb-v", slices=2, num_layers=3, **DROPOUT),
                                     dict(slices=2, columns=2, sequence_parallel=True, **DROPOUT)],
                         ids=["one-slice", "slices-columns", "dropout", "zb-v-dropout", "sequence-parallel"])
def test_gradients_have_the_same_bits(dtype, changes):
    """No operation changes its operands or its order, and dropout draws the same masks."""
    config = tiny(2, **{**EIGHT, "tensor_model_parallel_size": 2, "dtype": dtype, **changes})
    plain, *others = (step_of(dataclasses.replace(config, recompute_granularity=one)) for one in GRANULARITIES)
    assert all(same_bits(other, plain) for other in others)


def test_a_mask_is_drawn_once_if_it_is_kept_and_twice_if_it_is_not(monkeypatch):
    """Full recomputation drops the residual-stream masks; selective already drops attention's."""
    sites, draw = [], MasksAndPositions.draw_masks

    def drawn(self, site, *arguments):
        sites.append(site.split(".")[-1])
        return draw(self, site, *arguments)

    monkeypatch.setattr(MasksAndPositions, "draw_masks", drawn)
    for granularity, core, hidden, embedding in (("none", 1, 1, 1), ("selective", 2, 1, 1), ("full", 2, 2, 2)):
        sites.clear()
        step_of(tiny(1, **EIGHT, **DROPOUT, recompute_granularity=granularity))
        counts = [sites.count(site) / 2 for site in ("core", "hidden", "embedding")]
        assert counts == [2 * core, 4 * hidden, embedding]


# ---- collectives

@pytest.mark.parametrize("schedule, sequence_parallel", [
    ("1f1b", False), ("paired", False), ("zb-v", False), ("1f1b", True), ("zb-v", True)])
def test_no_collective_is_repeated(schedule, sequence_parallel):
    """Recomputation adds neither calls nor bytes, also with a sharded residual stream: there backward gathers a
    matmul's input again whether it was kept or recomputed."""
    config = tiny(2, **EIGHT, tensor_model_parallel_size=2, slices=2, columns=2, schedule=schedule,
                  sequence_parallel=sequence_parallel, device="cpu")
    plain, *others = (dry_run(train, dataclasses.replace(config, recompute_granularity=one)).traffic
                      for one in GRANULARITIES)
    assert plain["tp", "all_reduce"] and all(other == plain for other in others)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_sublayer_is_recomputed_while_the_all_reduce_above_it_is_in_flight(slices):
    """It runs between the launch and the wait, so it hides the all-reduce even with a single slice."""
    config = tiny(2, **{**EIGHT, "global_batch_size": 4}, tensor_model_parallel_size=2, slices=slices,
                  recompute_granularity="full")
    trace = Trace()
    step_of(config, prepare=lambda stage: [setattr(owner, "trace", trace) for owner in (stage, stage.ops)])
    events = [(event.kind, event.args.get("site")) for event in trace.events if event.args.get("slice") == 0]
    backward = events[max(i for i, event in enumerate(events) if event == ("wait", "cross_entropy")):]
    sites = ["head", "layers.1.mlp", "layers.1.attention", "layers.0.mlp", "layers.0.attention"]
    for above, site in zip(sites, sites[1:]):
        launch, wait = backward.index(("all_reduce", above)), backward.index(("wait", above))
        assert backward[launch:wait].count(("matmul", site)) == 1, "the column-parallel product"


# ---- memory

def test_what_was_recomputed_is_freed_before_the_next_sublayer(monkeypatch):
    """Only one slice at a time holds a recomputed sublayer. Deferred weight gradients keep what they need."""
    again, found, restore = [], [], LinearPair.restore

    def watched(self, slice, tape, h):
        alive = sum(tensor() is not None for tensor in again)
        assert tape.activation is None
        yield from restore(self, slice, tape, h)
        found.append(alive)
        again.extend(map(weakref.ref, (h[0].tensor, tape.activation)))

    monkeypatch.setattr(LinearPair, "restore", watched)
    # of three slices all but one, and that one's MLP
    for schedule, most in (("1f1b", 0), ("zb-v", 2 * 2 * 3 - 2)):
        again.clear(), found.clear()
        step_of(tiny(2, **{**EIGHT, "global_batch_size": 4}, tensor_model_parallel_size=2, slices=3, schedule=schedule,
                     recompute_granularity="full"))
        assert len(found) == 3 * 4 and max(found) == most


def test_what_will_be_recomputed_is_freed_before_forward_waits(monkeypatch):
    """No slice holds h or a of a sublayer while another slice computes."""
    computed, found, forward = [], [], LinearPair.forward

    def watched(self, slice, h):
        found.append(sum(tensor() is not None for tensor in computed))
        flights, tape = yield from forward(self, slice, h)
        computed.extend(map(weakref.ref, (h[0].tensor, tape.activation)))
        return flights, tape

    monkeypatch.setattr(LinearPair, "forward", watched)
    step_of(tiny(2, **{**EIGHT, "global_batch_size": 4}, tensor_model_parallel_size=2, slices=3,
                 recompute_granularity="full"))
    assert found == [0] * 3 * 4


# ---- in the host's memory

def test_copies_wait_for_what_they_read_and_memory_is_freed_after_them(monkeypatch):
    """x is freed when the compute stream has waited for the copy of x to the host, and the buffer on the host is used
    again when the compute stream has waited for the copy back."""
    gpu, copy, empty, held = mock.MagicMock(), torch.Tensor.copy_, torch.empty, []
    gpu.Stream.side_effect = [gpu.out, gpu.back]
    gpu.current_stream().wait_event.side_effect = lambda event: held.append(first.x is not None)
    monkeypatch.setattr(recompute, "streams_of", lambda device: gpu)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source, non_blocking: gpu.copy(copy(target, source)))

    def calls():
        names = [name for name, *_ in gpu.mock_calls if name == "copy" or "." in name and "__bool__" not in name]
        gpu.reset_mock()
        return names

    memory, x, y = recompute.HostMemory(torch.device("cpu"), max_leaving=1), torch.ones(3), torch.zeros(3)
    leave = ["out.wait_stream", "stream().__enter__", "copy", "stream().__exit__", "out.record_event"]
    first = memory.leave(x)
    second = memory.leave(y)
    assert calls() == leave + leave + ["current_stream().wait_event"]
    assert first.x is None and second.x is y and first.host is not second.host
    assert torch.equal(memory.take(first), x) and memory.take(second) is y
    assert calls() == [name.replace("out", "back") for name in leave] + ["current_stream().wait_event"]
    assert memory.leave(y).host is first.host and held == [True] * 3


@pytest.mark.parametrize("changes", [{}, dict(slices=3, columns=2), dict(slices=2, schedule="paired"),
                                     dict(schedule="zb-v", num_layers=3), dict(slices=2, sequence_parallel=True)],
                         ids=["one-slice", "slices", "paired", "zb-v", "sequence-parallel"])
def test_a_matmul_hides_every_copy_back_but_a_tapes_first(changes):
    """Copies back start one sublayer early. simulated_gpu/test_hazards.py shows that nothing reads x too early."""
    config = tiny(2, **{**EIGHT, "tensor_model_parallel_size": 2, "global_batch_size": 16, "device": "cuda", **changes},
                  recompute_granularity="full", checkpoint_in_cpu=True)
    events, hidden = dry_run(train, config).events, []
    for i, event in enumerate(events):
        if isinstance(event, Launch) and event.kind == "from host":
            meanwhile = events[i:events.index(Wait(event.number), i)]
            hidden.append(any(isinstance(one, Operation) and one.kind == "matmul" for one in meanwhile))
    tapes = config.microbatches * config.slices * config.virtual_stages
    assert len(hidden) > tapes and hidden.count(False) <= tapes
