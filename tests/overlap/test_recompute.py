"""Recomputation gives the same bits, repeats no collective, hides the collectives in flight, and frees its memory."""

import dataclasses
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny, train_rank, weights_and_data
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanodomino.comm.trace import Trace
from nanodomino.dry_run.rank import dry_run
from nanodomino.dry_run.shapes import arguments_of, flatten, is_view
from nanodomino.layers.dropout_and_positions import MasksAndPositions
from nanodomino.layers.sublayer_inside import LinearPair
from nanodomino.overlap.recompute import GRANULARITIES, TapePolicy
from nanodomino.schedules.definitions import SCHEDULES

DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.3)
EIGHT = dict(micro_batch_size=4, global_batch_size=8, num_layers=2)          # two microbatches of four samples


def step_of(config, prepare=lambda stage: None, around=lambda mesh: nullcontext()):
    """Run one step of rank 0 in a world without other processes; return (the gradients, what around() gave)."""
    with fake_world(0, config.world_size):
        mesh, model, optimizer, stage = build(config)
        prepare(stage)
        with around(mesh) as given:
            train.train_step(1, stage, optimizer, random_data(config, 1), config, mesh)
        return {name: weight.main_grad.clone() for name, weight in model.named_parameters()}, given


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
    plain, *others = (step_of(dataclasses.replace(config, recompute_granularity=one))[0] for one in GRANULARITIES)
    assert all(same_bits(other, plain) for other in others)


def test_several_steps_on_several_stages_have_the_same_bits_too(pool):
    """With real collectives and messages, uneven slices, and deferred weight gradients."""
    config = tiny(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, schedule="zb-h1", slices=2,
                  global_batch_size=12, **DROPOUT)
    weights, data = weights_and_data(config, 2)
    plain, *others = (pool.run(train_rank, dataclasses.replace(config, recompute_granularity=one), weights, data, 2,
                               world_size=4)
                      for one in GRANULARITIES)
    for other in others:
        for mine, theirs in zip(other, plain):
            assert (mine.losses, mine.norms) == (theirs.losses, theirs.norms)
            assert all(torch.equal(mine.weights[name][0], theirs.weights[name][0]) for name in theirs.weights)


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

    def watched(self, ops, slice, tape, h):
        alive = sum(tensor() is not None for tensor in again)
        assert tape.activation is None
        yield from restore(self, ops, slice, tape, h)
        found.append(alive)
        again.extend(map(weakref.ref, (h[0].tensor, tape.activation)))

    monkeypatch.setattr(LinearPair, "restore", watched)
    # of three slices all but one, and that one's MLP
    for schedule, most in (("1f1b", 0), ("zb-v", 2 * 2 * 3 - 2)):
        again.clear(), found.clear()
        step_of(tiny(2, **{**EIGHT, "global_batch_size": 4}, tensor_model_parallel_size=2, slices=3, schedule=schedule,
                     recompute_granularity="full"))
        assert len(found) == 3 * 4 and max(found) == most


# ---- host offload, on a simulated GPU

class Stream:
    """A stream whose copies are carried out only when training's stream waits for them."""

    def __init__(self, gpu):
        self.gpu, self.seen, self.copies = gpu, 0, []

    def wait_stream(self, training):
        assert training is self.gpu.training
        self.seen = self.gpu.clock

    def record_event(self):
        return SimpleNamespace(stream=self, position=len(self.copies))

    def wait_event(self, event):
        def run():
            for i in range(event.position):
                copy, event.stream.copies[i] = event.stream.copies[i], None
                if copy:
                    copy()

        run() if self is self.gpu.training else self.copies.append(run)


class Gpu(TorchDispatchMode):
    """Streams and pinned memory as torch.cuda has them, on a CPU. What training's stream computes is there at once; a
    copy in another one finds its memory as it is when somebody waits for it. Fresh memory holds no numbers, so that who
    reads too early computes none; memory that is given up before its copy is made is missed."""

    def __init__(self):
        super().__init__()
        # operations of training's stream, and those that take their time
        self.clock = self.products = 0
        # products between the begin of each copy back and the wait for it
        self.windows = []
        self.current = self.training = Stream(self)
        # storage: itself; when training last wrote to it, or was given it
        self.pinned, self.written = {}, {}
        # pinned storage: when training's stream had waited for its last copy back; infinity before
        self.emptied = {}

    @contextmanager
    def enter(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), function.__name__.split(".")[0]
        if self.current is not self.training:
            assert name == "copy_", f"{name} in a stream of copies"
            return self.copy(*args, **kwargs)
        pin = kwargs.pop("pin_memory", False)
        result = function(*args, **kwargs)
        self.clock += 1
        self.products += name in ("mm", "addmm", "bmm")
        if name.startswith("empty") and result.is_floating_point():
            result.fill_(torch.nan)
        if pin:
            self.pinned[result.untyped_storage()._cdata] = result.untyped_storage()
        names, written, _ = arguments_of(function)
        given = dict(zip(names, args)) | kwargs
        changed = [given[name] for name in written] + [result] * (not is_view(function))
        self.written |= {tensor.untyped_storage()._cdata: self.clock for tensor in flatten(changed)}
        return result

    def copy(self, target, source, non_blocking=False):
        (here,) = (one for one in (target, source) if one.untyped_storage()._cdata not in self.pinned)
        host, back, begun = (source if here is target else target), here is target, self.products
        assert non_blocking and self.current.seen >= self.written[here.untyped_storage()._cdata], (
            "training may not be there yet")
        buffer = host.untyped_storage()._cdata
        assert back or self.current.seen >= self.emptied.get(buffer, 0), "its last copy back may not be done yet"
        if back:
            self.emptied[buffer] = float("inf")
        storage, view = weakref.ref(here.untyped_storage()), (here.storage_offset(), here.shape, here.stride())

        def late():
            assert storage() is not None, "given up before its copy was made"
            there = torch.empty(0, dtype=host.dtype).set_(storage(), *view)
            (there.copy_(host) if back else host.copy_(there))
            if back:
                self.windows.append(self.products - begun)
                self.emptied[buffer] = self.clock

        self.current.copies.append(late)
        return target


def step_on_host(config, monkeypatch):
    """Return the gradients of a step with --checkpoint-in-cpu, and the Gpu."""
    gpu, config = Gpu(), dataclasses.replace(config, checkpoint_in_cpu=True)
    for name, stands_in in (("Stream", lambda device: Stream(gpu)), ("stream", gpu.enter),
                            ("current_stream", lambda: gpu.current)):
        monkeypatch.setattr(torch.cuda, name, stands_in)

    def prepare(stage):
        stage.tape_policy = TapePolicy(config, torch.device("cuda"), config.slices, stage.residual_norm)
        stage.tape_policy.host.device = torch.device("cpu")

    gradients, _ = step_of(config, prepare, around=lambda mesh: gpu)
    return gradients, gpu


@pytest.mark.parametrize("changes", [{}, dict(slices=3, columns=2), dict(slices=2, schedule="gpipe", **DROPOUT),
                                     dict(slices=2, schedule="paired"), dict(schedule="zb-v", num_layers=3),
                                     dict(slices=2, sequence_parallel=True)],
                         ids=["one-slice", "slices", "gpipe-dropout", "paired", "zb-v", "sequence-parallel"])
def test_what_was_on_the_host_comes_back_in_time_and_with_the_same_bits(monkeypatch, changes):
    """However late a copy is, nothing reads its target before it is done, and no memory is freed that a copy needs."""
    config = tiny(2, **{**EIGHT, "tensor_model_parallel_size": 2, "global_batch_size": 16,
                        "recompute_granularity": "full", **changes})
    gradients, gpu = step_on_host(config, monkeypatch)
    assert same_bits(gradients, step_of(config)[0])
    # of each tape nothing was to do before
    first = config.microbatches * config.slices * config.virtual_stages
    assert len(gpu.windows) > first and sum(products > 0 for products in gpu.windows) >= len(gpu.windows) - first


@pytest.mark.parametrize("slices, schedule, sublayers", [(3, "gpipe", 8), (2, "interleaved", 4), (1, "interleaved", 4)])
def test_the_gpu_holds_no_x_except_those_that_are_being_copied_out(slices, schedule, sublayers):
    """The host holds x of every sublayer of the microbatches on the stage, the GPU x of at most two sublayers."""
    config = tiny(2, **EIGHT, tensor_model_parallel_size=2, slices=slices, schedule=schedule, device="cuda",
                  recompute_granularity="full", **DROPOUT)
    kept, away = (dry_run(train, dataclasses.replace(config, checkpoint_in_cpu=on)) for on in (False, True))
    x = 4 * 8 * 16 * 8
    assert (kept.host, away.host) == (0, sublayers * x)
    assert kept.activations - away.activations >= away.host - 2 * x
