"""Runs train.py as a user does: its numbers do not depend on the layout, and its files hold what they should."""

import contextlib
import dataclasses
import io
import json
import math
import shutil
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from support import ROOT
from support.harness import build, tiny
from support.reference import random_weights
from support.runs import TINY, main_on_rank, make_corpus, metric_points, metrics, saved_steps, torchrun, train_in_pool

import train
from data.prepare import prepare
from nanodomino.comm.world import LaunchInfo
from nanodomino.corpus.prepared_folder import load_corpus
from nanodomino.domino import run_to_end
from nanodomino.estimate.formulas import find_peak_flops
from nanodomino.model import GPT
from nanodomino.run import session
from nanodomino.run.session import from_command_line
from nanodomino.settings.config import Config
from nanodomino.settings.records import news


SHALLOW = "--num-layers", 2             # everything else is the default


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small corpus: this project's own source code."""
    folder = tmp_path_factory.mktemp("corpus") / "prepared"
    prepare([str(ROOT / "nanodomino")], folder, split=(98, 1, 1))
    return folder


def run(pool, processes, *flags) -> str:
    """Run train.py on so many ranks. It must succeed. Return the output of rank 0."""
    ended = pool.run(main_on_rank, list(map(str, flags)), world_size=processes)[0]
    assert ended.code == 0, ended.output
    return ended.output


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("alone") / "B"
    return folder, run(pool, 1, *SHALLOW, "--dtype", "float64", "--train-iters", 3, "--run-dir", folder, "--data-path",
                       corpus, "--eval-interval", 2, "--eval-iters", 1, "--sample-tokens", 20)


def nearly(points):
    """Return the points (step, value) for a comparison up to rounding in float64."""
    return [(step, pytest.approx(value, rel=1e-9)) for step, value in points]


@pytest.mark.table
def test_a_split_without_a_whole_sample_is_left_out(monkeypatch):
    """A sample of 8 tokens needs 9 for its labels. TokenDataset refuses a train split that is too short."""
    monkeypatch.setattr(train, "TokenDataset", lambda corpus, split, *_: split)
    corpus = SimpleNamespace(tokens=dict(train=1, valid=8, test=9), end_of_text=0)
    assert [*train.dataset_builder(Config(seq_length=8), corpus, None)] == ["train", "test"]


@pytest.mark.parametrize("processes", [pytest.param(8, marks=pytest.mark.exhaustive), 2])
def test_the_defaults_give_the_same_numbers_for_any_number_of_processes(pool, tmp_path, corpus, alone, processes):
    """The global batch, the order of the data and the initial weights do not depend on the number of processes."""
    run(pool, processes, *SHALLOW, "--dtype", "float64", "--train-iters", 3, "--run-dir", tmp_path / "A", "--data-path",
        corpus, "--eval-interval", 2, "--eval-iters", 1, "--sample-tokens", 4)
    for name in ("loss", "grad_norm", "lr", "tokens", "valid_loss", "test_loss"):
        assert metric_points(tmp_path / "A", name) == nearly(metric_points(alone[0], name)), name


def test_a_run_leaves_its_config_and_one_line_of_metrics_a_step(alone, corpus):
    run_dir, printed = alone
    steps = [line for line in metrics(run_dir) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3] and len(metric_points(run_dir, "test_loss")) == 1
    assert [step for step, _ in metric_points(run_dir, "valid_loss")] == [2, 3]
    assert set(steps[0]) == {"step", "loss", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_second", "mfu",
                             "skipped", "loss_scale"}
    assert steps[-1]["tokens"] == 3 * 16 * 128 and steps[-1]["mfu"] is None
    stream = np.fromfile(corpus / "valid.bin", np.uint16)
    found = (metric_points(run_dir, f"valid_{name}") for name in ("tokens", "loss", "bits_per_byte"))
    for windows, (_, size), (_, loss), (_, bits) in zip((16, (len(stream) - 1) // 128), *found, strict=True):
        labels = stream[1:windows * 128 + 1]                   # bytes, and the ends of documents
        assert (size, bits) == (len(labels), pytest.approx(loss / math.log(2) * size / (labels < 256).sum()))
    config = json.loads((run_dir / "config.json").read_text())
    assert config["train_iters"] == 3 and config["data_path"] == str(corpus) and config["vocab_size"] == 257
    for text in ("rank grid", "schedule 1f1b", "(unigram ", "bigram ", "valid loss", "test loss", "perplexity",
                 "peak memory", "a sample"):
        assert text in printed


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes, backend", [(2, "aot_eager"), (1, "inductor")])
def test_compiled_runs_give_the_same_losses(tmp_path, corpus, alone, processes, backend):
    """torchrun starts this run, as in the README; the other tests start ranks without it."""
    flags = (*SHALLOW, "--dtype", "float64", "--train-iters", 3, "--run-dir", "A", "--data-path", corpus,
             "--eval-iters", 0, "--compile", "--compile-backend", backend, "--exit-interval", 2)
    log = tmp_path / "output.txt"
    assert torchrun(tmp_path, log, processes, ROOT / "train.py", *flags).wait(600) == 0, log.read_text()
    for name in ("loss", "grad_norm"):
        assert metric_points(tmp_path / "A", name) == nearly(metric_points(alone[0], name)[:2]), name


def test_the_first_process_of_every_host_prepares_the_default_corpus(tmp_path, corpus, monkeypatch):
    """Hosts may not share a disk: on the second of two hosts with 8 processes each, rank 8 prepares, rank 9 waits."""
    prepared = []
    monkeypatch.setattr(session, "DEFAULT_CORPUS", tmp_path / "data")
    monkeypatch.setattr(session, "prepare_default_corpus",
                        lambda folder: prepared.append(shutil.copytree(corpus, folder)))
    monkeypatch.setattr(session.time, "sleep", lambda seconds: 1 / bool(prepared))
    with pytest.raises(ZeroDivisionError):                     # rank 9 would wait
        session.find_corpus(tiny(1), LaunchInfo(9, 16, 1, 8))
    assert not prepared
    for rank, local_rank in ((8, 0), (9, 1)):
        assert session.find_corpus(tiny(1), LaunchInfo(rank, 16, local_rank, 8)).path == tmp_path / "data"
    assert prepared == [tmp_path / "data"]


def drawn_with(seed, folder):
    """Return what --seed decides: initial weights, a batch, losses under dropout, the sample at the end."""
    flags = [*TINY, "--dtype", "float64", "--sample-tokens", "12", "--data-path", folder, "--seed", str(seed)]
    corpus = load_corpus(folder)
    config = from_command_line(flags, 1).with_vocabulary(corpus.vocab_size)
    mesh, drawn, _, _ = build(config)
    _, model, _, stage = build(config, random_weights(config))           # the same weights for all seeds
    data = train.dataset_builder(config, corpus, mesh.device)["train"]
    written = io.StringIO()
    with contextlib.redirect_stdout(written), torch.no_grad():
        session.write_sample(model, corpus, data)
    still = train.get_batch(data, config, mesh, 0, False, 0, 0)
    losses, _ = run_to_end(stage.forward(still))
    return {"weights": torch.cat([weight.flatten() for weight in drawn.parameters()]).tolist(),
            "data": train.get_batch(data, config, mesh, 0, True, 0, 0).tokens.tolist(),
            "masks": losses.tolist(), "sample": written.getvalue()}


def test_the_seed_draws_the_weights_the_masks_the_order_of_the_data_and_the_sample(pool, corpus):
    """Two seeds give two different results of each kind; the same seed gives the same."""
    one, again, other = (pool.run(drawn_with, seed, str(corpus), world_size=1)[0] for seed in (1, 1, 2))
    assert one == again and [name for name in one if one[name] == other[name]] == []
    assert "a sample" in one["sample"]


def test_a_run_that_continues_with_other_settings_names_them():
    """A changed learning rate, or a finished decay that begins again, is allowed but easily overlooked."""
    config = tiny(1, lr=1.0, min_lr=0.5, lr_decay_style="linear", lr_warmup_fraction=0.0, train_iters=4)
    changed = partial(dataclasses.replace, config)
    jump = "the learning rate goes from 5.00e-01 to 6.88e-01 (--lr-decay-iters 4 keeps its decay)"
    for other, expected in ((changed(exit_interval=7, run_dir="elsewhere", load="x"), []),
                            (changed(clip_grad=0.5, hysteresis=3), ["clip_grad 0.5 (was 0.1)", "hysteresis 3 (was 2)"]),
                            (changed(train_iters=8), ["train_iters 8 (was 4)", jump]),
                            (changed(train_iters=8, lr_decay_iters=4), ["train_iters 8 (was 4)"]),
                            (changed(train_iters=8, lr_decay_style="constant"), [
                                "train_iters 8 (was 4)", "lr_decay_style constant (was linear)",
                                "the learning rate goes from 5.00e-01 to 1.00e+00"]),
                            (changed(lr_decay_iters=3), ["lr_decay_iters 3 (was 4)"])):
        assert news(config, other, 4) == expected
    stable = changed(lr_decay_style="WSD", lr_wsd_decay_iters=2)
    longer, jump = dataclasses.replace(stable, train_iters=8), "the learning rate goes from 5.00e-01 to 1.00e+00"
    assert news(stable, longer, 2) == ["train_iters 8 (was 4)"], "the decay has not started"
    assert news(stable, longer, 4)[1].startswith(jump)
    assert news(config, changed(clip_grad=0.5, train_iters=9), 0) == [], "a new training"


# ---- started again

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a corpus, for runs in the pool."""
    return make_corpus(tmp_path_factory.mktemp("small")).parent


def test_the_same_command_with_an_exit_interval_resumes_each_time(pool, small, tmp_path):
    """A scheduler repeats a command blindly: three starts do two steps each, and the fourth does none."""
    command = ("--run-dir", tmp_path / "run", "--train-iters", 6, "--exit-interval", 2, "--keep-last", 5)
    for steps in (2, 4, 6, 6):
        ended = train_in_pool(pool, small, *command)
        assert ended.code == 0
        assert [step for step, _ in metric_points(tmp_path / "run", "loss")] == list(range(1, steps + 1))
        assert saved_steps(tmp_path / "run") == list(range(steps, 0, -2))
        assert ("stopped early" in ended.output) == (steps < 6) and f"{steps} of 6 steps done" in ended.output
        assert [step for step, _ in metric_points(tmp_path / "run", "test_loss")] == [6] * (steps == 6)
    assert "this run has already done 6 steps" in ended.output


def test_a_run_with_nothing_left_keeps_its_settings_on_record(pool, small, tmp_path):
    """It trains no step with new settings, so the next start must compare with those of the last trained step.

    It also says that finished steps cannot be traced. Its old test loss is removed when the run is extended, and is not
    there twice otherwise: the readers of metrics.jsonl take the first.
    """
    command = ("--run-dir", tmp_path / "run", "--train-iters")
    train_in_pool(pool, small, *command, 2, "--lr", 0.01)
    loss = metric_points(tmp_path / "run", "test_loss")
    printed = train_in_pool(pool, small, *command, 2, "--lr", 0.02, "--trace", "1:2").output
    assert "this run has already done 2 steps" in printed
    train_in_pool(pool, small, *command, 2, "--eval-iters", 0)                 # scores nothing, and removes nothing
    assert "2 of 2 steps done" in printed and metric_points(tmp_path / "run", "test_loss") == loss
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lr"] == 0.01
    printed = train_in_pool(pool, small, *command, 3, "--lr", 0.02).output
    assert "resuming after step 2 of 3; train_iters 3 (was 2); lr 0.02 (was 0.01)" in printed
    assert [step for step, _ in metric_points(tmp_path / "run", "test_loss")] == [3]


def main_without_initial_weights(flags):
    """Run train.py on this rank. Each parameter starts as NaN, and drawing it is an error."""
    unwritten = lambda data: torch.nn.parameter.Parameter(data.fill_(torch.nan))  # noqa: E731
    with mock.patch.object(GPT, "initialize", side_effect=AssertionError("drawn")), \
            mock.patch.object(torch.nn, "Parameter", unwritten):
        return main_on_rank(flags)


def test_no_weight_is_drawn_that_a_checkpoint_replaces(pool, small, tmp_path):
    flags = [*TINY, "--seq-length", "12", "--data-path", str(small / "tokens"), "--dtype", "bfloat16", "--tp", "2",
             "--eval-iters", "0", "--run-dir", str(tmp_path / "run"), "--train-iters", "4"]
    pool.run(main_on_rank, [*flags, "--exit-interval", "2"], world_size=2)
    ended = pool.run(main_without_initial_weights, flags, world_size=2)
    assert [rank.code for rank in ended] == [0, 0]
    losses = [loss for _, loss in metric_points(tmp_path / "run", "loss")]
    assert len(losses) == 4 and None not in losses, "no weight is NaN"


def test_train_iters_0_evaluates_and_finetune_begins_with_a_validation(pool, tmp_path):
    """Both report the loss of the weights that they start from, also in a folder that exists, with the run's own masks
    and positions: a sample of 12 tokens holds several documents. An evaluation leaves no checkpoint."""
    small, run, own = tmp_path, tmp_path / "run", ("--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask")
    (small / "text.jsonl").write_text("".join(f'{{"text": "{i * 7919 % 1013}"}}\n' for i in range(2500)))
    prepare(small / "text.jsonl", small / "tokens")
    train_in_pool(pool, small, "--run-dir", run, "--train-iters", 3, *own, world_size=2)
    trained = [*metric_points(run, "valid_loss"), *metric_points(run, "test_loss")]
    for name, flags, step in (("loaded", (), 3), ("tuned", ["--finetune"], 0)):
        (tmp_path / name).mkdir()
        ended = train_in_pool(pool, small, "--run-dir", tmp_path / name, "--load", run, *flags, "--train-iters", 0)
        assert ended.code == 0 and "evaluating without training" in ended.output, ended
        assert "learning rate" not in ended.output
        assert "eod_mask_loss True, reset_position_ids True, reset_attention_mask True" in ended.output
        assert "warning" not in ended.output and f"{step} of {step} steps done" in ended.output
        found = [*metric_points(tmp_path / name, "valid_loss"), *metric_points(tmp_path / name, "test_loss")]
        assert found == [(step, pytest.approx(loss, rel=1e-5)) for _, loss in trained]
        assert metric_points(tmp_path / name, "loss") == saved_steps(tmp_path / name) == []
        assert metric_points(tmp_path / name, "valid_bits_per_byte")[0][1] > 0
    ended = train_in_pool(pool, small, "--run-dir", tmp_path / "more", "--load", run, "--finetune", "--train-iters", 2)
    baseline, last = metric_points(tmp_path / "more", "valid_loss")
    assert baseline == (0, pytest.approx(trained[0][1], rel=1e-5)) and last[0] == 2
    assert "2 steps = " in ended.output and "peak learning rate 0.0004, a tenth of the default without" in ended.output
    assert ended.output.index("step     0 | valid") < ended.output.index("step     1 |")
    for steps in (0, 3):
        ended = train_in_pool(pool, small, "--run-dir", run, "--train-iters", steps)
        assert ended.code == 0 and saved_steps(run) == [3] and len(metric_points(run, "loss")) == 3
        again = [*metric_points(run, "valid_loss"), *metric_points(run, "test_loss")]
        assert again == [(3, pytest.approx(loss, rel=1e-5)) for _, loss in trained], "each once"


@pytest.mark.parametrize("flags, batch, lr", [("", 512, 6e-4), ("--finetune", 16, 6e-5),
                                              ("--finetune --global-batch-size 64 --lr 1", 64, 1.0)])
def test_finetune_has_a_small_batch_and_learning_rate_by_default(flags, batch, lr):
    """A preset's suit pre-training: 512 x 1024 tokens are several texts, and its rate would wreck a trained model."""
    config = from_command_line(["--model", "gpt2", "--load", "x", *flags.split()], 2)
    assert (config.global_batch_size, config.lr, config.min_lr) == pytest.approx((batch, lr, lr / 10))


@pytest.mark.parametrize("name, peak", [("NVIDIA A10", 125e12), ("NVIDIA A10G", None), ("NVIDIA RTX A4000", None),
                                        ("NVIDIA H100 80GB HBM3", 989e12),
                                        ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
                                        ("NVIDIA GB200", None)])
def test_a_gpu_counts_by_its_whole_name(monkeypatch, name, peak):
    """A name that only contains a known name is another GPU, and no MFU is better than a wrong one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak_flops(dataclasses.replace(tiny(1), dtype="bfloat16"), torch.device("cuda")) == peak
