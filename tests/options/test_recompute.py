"""Recomputation gives the same bits, repeats no collective, hides the collectives in flight, and frees its memory."""

import dataclasses
import weakref

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanodomino.comm.trace import Trace
from nanodomino.estimate.rank import dry_run
from nanodomino.layers.dropout_and_positions import MasksAndPositions
from nanodomino.options import recompute
from nanodomino.options.recompute import GRANULARITIES, RecomputePolicy
from nanodomino.overlap.compute import LinearPair
from nanodomino.schedules.definitions import SCHEDULES


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

@pytest.mark.parametrize("schedule, sequence_parallel", [*((schedule, False) for schedule in SCHEDULES), ("1f1b", True),
                                                         ("zb-v", True)])
def test_no_collective_is_repeated(schedule, sequence_parallel):
    """As many collectives and bytes as without. Of a stream that is cut, too: backward gathers a product's input again,
    whether it was kept or computed again."""
    config = tiny(2, **EIGHT, tensor_model_parallel_size=2, slices=2, columns=2, schedule=schedule,
                  sequence_parallel=sequence_parallel, device="cpu")
    plain, *others = (dry_run(train, dataclasses.replace(config, recompute_granularity=one)).traffic
                      for one in GRANULARITIES)
    assert plain["tp", "all_reduce"] and all(other == plain for other in others)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_sublayer_is_recomputed_while_the_all_reduce_above_it_is_in_flight(slices):
    """Between its launch and its wait, so that it hides the all-reduce even with a single slice."""
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


# ---- host offload, on a simulated GPU

class CopyStream(TorchDispatchMode):
    """Stands in for a CUDA stream of copies. A copy is carried out when training's stream waits for its event, so
    whoever reads its target earlier reads NaN."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.copies, self.done, self.has_waited = gpu, [], 0, False

    def wait_stream(self, training):
        self.has_waited = True

    def record_event(self):
        return self, len(self.copies)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        target, source, non_blocking = args
        assert function is torch.ops.aten.copy_.default and non_blocking
        assert self.has_waited, "training may not have computed the source, or still use the target"
        self.has_waited, back = False, source.untyped_storage()._cdata in self.gpu.pinned
        host, here = (source, target) if back else (target, source)
        buffer, storage = host.untyped_storage()._cdata, weakref.ref(here.untyped_storage())
        place, begun = (here.storage_offset(), here.shape, here.stride()), len(self.gpu.trace.events)
        assert buffer not in self.gpu.coming_back, "the buffer's last copy back may not be done"
        self.gpu.coming_back |= {buffer} if back else set()

        def carry_out():
            assert storage() is not None, "the memory was freed before its copy was made"
            found = torch.empty(0, dtype=host.dtype).set_(storage(), *place)
            (found.copy_(host) if back else host.copy_(found))
            if back:
                self.gpu.coming_back.remove(buffer)
                kinds = {event.kind for event in self.gpu.trace.events[begun:]}
                self.gpu.hidden.append(bool(kinds & {"matmul", "weight_gradient"}))

        self.copies.append(carry_out)
        return target


class Gpu:
    """Stands in for torch.cuda's streams and pinned memory, on a CPU. It is also training's stream. hidden: for each
    copy back, whether training computed a matmul between its launch and the wait for it."""

    def __init__(self):
        self.trace, self.pinned, self.coming_back, self.hidden, self.plain_empty = Trace(), {}, set(), [], torch.empty

    def Stream(self, device):
        return CopyStream(self)

    def stream(self, stream):
        return stream

    def current_stream(self):
        return self

    def wait_event(self, event):
        stream, count = event
        for carry_out in stream.copies[stream.done:count]:
            carry_out()
        stream.done = max(stream.done, count)

    def empty(self, *size, pin_memory=False, **options):
        """Fresh memory holds NaN."""
        tensor = self.plain_empty(*size, **options)
        if pin_memory:
            self.pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("changes", [{}, dict(slices=3, columns=2), dict(slices=2, schedule="gpipe", **DROPOUT),
                                     dict(slices=2, schedule="paired"), dict(schedule="zb-v", num_layers=3),
                                     dict(slices=2, sequence_parallel=True)],
                         ids=["one-slice", "slices", "gpipe-dropout", "paired", "zb-v", "sequence-parallel"])
def test_what_was_on_the_host_comes_back_in_time_and_with_the_same_bits(monkeypatch, changes):
    """However late a copy is, nothing reads its target before it is done, and no memory is freed that a copy needs."""
    config = tiny(2, **{**EIGHT, "tensor_model_parallel_size": 2, "global_batch_size": 16,
                        "recompute_granularity": "full", **changes})
    plain, gpu = step_of(config), Gpu()
    monkeypatch.setattr(recompute, "streams_of", lambda device: gpu)
    monkeypatch.setattr(torch, "empty", gpu.empty)
    offloading = dataclasses.replace(config, checkpoint_in_cpu=True)

    def prepare(stage):
        stage.trace = stage.ops.trace = gpu.trace
        stage.tape_policy = RecomputePolicy(offloading, torch.device("cuda"), config.slices, stage.residual_norm)
        stage.tape_policy.host.device = torch.device("cpu")

    assert same_bits(step_of(offloading, prepare), plain)
    tapes = config.microbatches * config.slices * config.virtual_stages
    assert len(gpu.hidden) > tapes and gpu.hidden.count(False) <= tapes, "a tape's first copy back has no cover"
