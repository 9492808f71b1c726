"""nanodomino/minimal.py computes what train.py computes: losses, gradient norms and weights, in float64."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from support.runs import make_corpus, metric_points, train_in_pool

from nanodomino import minimal
from nanodomino.checkpoint.load import checkpoints_of, full_weights
from nanodomino.schedules.simulation import picture
from nanodomino.settings.config import Config


# 5 layers do not divide by 2 or 4 stages, and a microbatch of 3 does not divide by 2 slices
SIZES = minimal.Sizes(layers=5, hidden=16, heads=4, seq_length=12, global_batch=24, micro_batch=3)
STEPS = 2


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """The corpus, and what train.py makes of it in one process: (losses, norms, weights)."""
    folder = tmp_path_factory.mktemp("minimal")
    make_corpus(folder)
    ended = train_in_pool(pool, folder, "--run-dir", folder / "run", "--dtype", "float64", "--train-iters", STEPS,
                          "--num-layers", 5, "--num-attention-heads", 4, "--global-batch-size", 24,
                          "--micro-batch-size", 3, "--hidden-dropout", 0, "--attention-dropout", 0)
    assert ended.code == 0, ended.output
    losses, norms = ([value for _, value in metric_points(folder / "run", name)] for name in ("loss", "grad_norm"))
    (checkpoint,) = checkpoints_of(folder / "run")
    return folder / "tokens", losses, norms, full_weights(checkpoint)


def train_minimal(corpus: Path, tp, pp, dp, slices):
    """Train on this rank; return (history, {name: (shard, dimension that is cut)})."""
    torch.set_default_dtype(torch.float64)                  # the pool resets it
    grid = minimal.make_grid(tp, pp, dp, torch.device("cpu"))
    sizes = SIZES._replace(micro_batch=6 if tp == 4 else 3)              # fewer all-reduces
    model, history = minimal.train(sizes, grid, slices, STEPS, corpus, report=lambda line: None)
    declared = minimal.declare(sizes, grid, model.sites, model.vocab)
    return history, {name: (weight.detach(), declared[name][1], grid.tp_rank) for name, weight in model.weights.items()}


@pytest.mark.parametrize("tp, pp, dp, slices", [
    (1, 1, 1, 0), (2, 2, 2, 2), (4, 1, 1, 3), (2, 4, 1, 2), (2, 1, 4, 0),
    *[pytest.param(*layout, marks=pytest.mark.exhaustive) for layout in (
        (1, 1, 1, 2), (4, 1, 2, 3), (4, 2, 1, 1), (1, 4, 2, 3), (1, 2, 4, 2), (1, 1, 8, 2), (2, 2, 1, 0),
        (1, 5, 1, 2))]])
def test_it_equals_train_py_on_every_layout(pool, trained, tp, pp, dp, slices):
    corpus, losses, norms, weights = trained
    ranks = pool.run(train_minimal, corpus, tp, pp, dp, slices, world_size=tp * pp * dp)
    for history, shards in ranks:
        assert [loss for loss, _ in history] == pytest.approx(losses, rel=1e-12)
        assert [norm for _, norm in history] == pytest.approx(norms, rel=1e-12)
        for name, (shard, cut, tp_rank) in shards.items():
            whole = weights[name] if cut is None else weights[name].chunk(tp, cut)[tp_rank]
            torch.testing.assert_close(shard, whole, rtol=1e-11, atol=1e-12)
    assert set().union(*(shards for _, shards in ranks)) == set(weights)


def start(monkeypatch, flags="", world=1, rank=0, gpus=0):
    """Run minimal.main() up to the training, as one rank of a world; return sizes, grid, [backend, the GPU if any]."""
    started, taken = [], []
    for name, value in dict(destroy_process_group=None, get_world_size=world, get_rank=rank).items():
        monkeypatch.setattr(minimal.dist, name, lambda value=value, **_: value)
    monkeypatch.setattr(minimal.dist, "init_process_group", lambda backend, *_: taken.append(backend))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append(str(device)))
    monkeypatch.setattr(minimal, "make_grid", lambda tp, pp, dp, device: SimpleNamespace(
        tp=tp, pp=pp, dp=dp, device=str(device)))
    monkeypatch.setattr(minimal, "train", lambda sizes, grid, *others: started.append((sizes, grid)))
    monkeypatch.setattr(sys, "argv", ["minimal.py", *flags.split()])
    minimal.main()
    return *started[0], taken


@pytest.mark.parametrize("world, flags, layout", [
    (1, "", (1, 1, 1)), (2, "", (2, 1, 1)), (4, "", (2, 2, 1)), (8, "", (2, 2, 2)), (8, "--tp 1 --pp 1", (1, 1, 8)),
    (4, "--tp 4 --slices 1", (4, 1, 1))])
def test_its_defaults_are_those_of_train_py_on_any_number_of_processes(monkeypatch, world, flags, layout):
    """Except that a microbatch gets smaller where a replica's part of the batch does."""
    sizes, grid, _ = start(monkeypatch, flags, world)
    config = Config().resolve(1)
    assert (grid.tp, grid.pp, grid.dp) == layout
    assert sizes.micro_batch == min(config.micro_batch_size, config.global_batch_size // grid.dp)
    assert sizes._replace(micro_batch=0) == (
        config.num_layers, config.hidden_size, config.num_attention_heads, config.seq_length,
        config.global_batch_size, 0, config.lr, config.seed)


@pytest.mark.parametrize("gpus, world, device", [(0, 1, "cpu"), (1, 8, "cpu"), (1, 1, "cuda:0"), (8, 8, "cuda:7")])
def test_each_process_takes_its_own_gpu_and_all_take_the_cpu_if_there_are_too_few(monkeypatch, gpus, world, device):
    """A student with one GPU can run the eight processes of the docstring. By default torch would connect only GPUs."""
    _, grid, taken = start(monkeypatch, world=world, rank=world - 1, gpus=gpus)
    assert (grid.device, taken) == (device, ["cpu:gloo,cuda:nccl" if gpus else "gloo"] + [device] * (gpus >= world))


@pytest.mark.parametrize("world, flags", [
    (2, "--tp 16"), (2, "--tp 0"), (16, "--tp 16"), (3, ""), (1, "--tp 2"), (1, "--tp -1 --pp -1"), (1, "--steps -1"),
    (1, "--steps 0"), (1, "--slices -1")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_layout_is_refused_in_one_sentence(monkeypatch, world, flags, rank):
    with pytest.raises(SystemExit) as refused:
        start(monkeypatch, flags, world, rank)
    given = "2 x pp 1" if flags == "--tp 2" else ".*"                  # no pp 2, which nobody gave
    expected = (rf"tp {given} x dp \d+ must be {world} processes; tp must divide 8 heads, and dp 16 samples; steps "
                "must be at least 1, and slices at least 0")
    assert re.fullmatch(expected, refused.value.code) if rank == 0 else refused.value.code == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_without_text_is_refused_in_one_sentence(monkeypatch, tmp_path, rank):
    monkeypatch.setattr(minimal.dist, "get_rank", lambda: rank)
    with pytest.raises(SystemExit) as refused:
        minimal.train(SIZES, None, 0, 1, tmp_path)
    assert refused.value.code == (0 if rank else f"No {tmp_path}/meta.json: first run python data/prepare.py")


def test_the_picture_of_1f1b_is_the_simulated_one():
    drawn = re.findall(r"^# ( {4}stage \d \|.*)$", Path(minimal.__file__).read_text(), re.MULTILINE)
    assert [line.strip() for line in drawn] == [line.strip() for line in picture("1f1b", 3, 4).splitlines()[1:]]


def test_it_is_short_and_imports_nothing_of_ours():
    """At most 400 lines, not counting blank ones."""
    text = (ROOT / "nanodomino/minimal.py").read_text()
    lines = [line for line in text.splitlines() if line not in ("", "#")]
    assert len(lines) <= 400 and max(map(len, lines)) <= 100
    assert not re.search(r"^\s*(import|from) (nanodomino|data|train)", text, re.MULTILINE)
