"""What a run prints before the first step and in a step; metrics.jsonl.

TensorBoard shows the points of metrics.jsonl, also after a restart, and never ends a run.
"""

import json
import math
import os
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import needs
from support.harness import report_without_a_run, tiny
from support.runs import make_corpus, metrics, saved_steps, train_in_pool

from nanodomino.checkpoint.load import checkpoints_of
from nanodomino.checkpoint.save import delete_checkpoint
from nanodomino.estimate.formulas import flops_per_token, parameter_count
from nanodomino.model import meta_stage
from nanodomino.run.report import continue_metrics, what_hides_what
from nanodomino.run.session import Session
from nanodomino.schedules.simulation import describe_stage
from nanodomino.zero import StepResult


@pytest.fixture
def report(tmp_path):
    """report(config, ...) -> a Report that writes to tmp_path."""
    return partial(report_without_a_run, tmp_path)


@pytest.mark.parametrize("schedule, chunks, layers, held", [
    ("1f1b", 1, 5, ["embedding, layers 0 to 2", "layers 3 to 4, head"]),
    ("interleaved", 2, 5, ["embedding, layers 0 to 1; layer 3", "layer 2; layer 4, head"]),
    ("interleaved", 3, 6, ["embedding, layer 0; layer 2; layer 4", "layer 1; layer 3; layer 5, head"]),
    ("zb-v", 2, 8, ["embedding, layers 0 to 1; layers 6 to 7, head", "layers 2 to 3; layers 4 to 5"])])
def test_the_layers_shown_for_each_stage_are_the_models(schedule, chunks, layers, held):
    config = tiny(2, pipeline_model_parallel_size=2, schedule=schedule, virtual_stages=chunks, num_layers=layers)
    assert [describe_stage(config, stage) for stage in range(2)] == held
    for stage, words in enumerate(held):
        model = meta_stage(config, stage)
        numbers = [list(map(int, re.findall(r"\d+", shown))) for shown in words.split(";")]
        assert [[chunk.layers[end].mlp.site for end in (0, -1)] for chunk in model.chunks] == [
            [f"layers.{shown[end]}.mlp" for end in (0, -1)] for shown in numbers]
        assert ("embedding" in words, "head" in words) == (model.pre_process, model.post_process)


@pytest.mark.parametrize("changes, words", [
    (dict(tensor_model_parallel_size=1, data_parallel_size=2), "a layer sends nothing, so there is nothing to hide"),
    (dict(slices=2), "hidden by the compute of another slice, in backward weight gradients help"),
    (dict(micro_batch_size=1), "hidden by the matmul of the next columns (only the reduce), in backward weight"),
    (dict(slices=1, schedule="paired"), "hidden by the compute of another microbatch, in backward weight grad"),
    (dict(slices=1, schedule="zb-v"), "hidden by nothing in forward; try --slices 2"),
    (dict(num_experts=4, disable_bias_linear=True, expert_model_parallel_size=2, tensor_model_parallel_size=1,
          columns=2), "hidden by nothing in forward, in backward weight gradients help; try --slices 2")])
def test_the_start_says_what_hides_what(changes, words):
    changes = dict(tensor_model_parallel_size=2) | changes
    assert words in what_hides_what(tiny(2 * changes.get("expert_model_parallel_size", 1), **changes))


def test_epochs_and_memory_are_announced(report, capsys):
    """5 steps of 24 samples; the text has 124 samples, or 3."""
    report(memory="it is small")
    assert capsys.readouterr().out.endswith("\n5 steps = 0.97 epochs of this text; it is small\n")
    report(train=25, memory="it is small")
    assert "\n5 steps = 40 epochs of this text (more than 4 teach little: arXiv 2305.16264); it is small\n" in (
        capsys.readouterr().out)


def test_perplexity_and_bits_per_byte_are_reported(report, tmp_path, capsys):
    """A token is 2 bytes here. 90 of the 100 x 8 labels are masked. While a split is scored, the bar says so."""
    shown, bits, bar = report(), 2.0 * 710 / math.log(2) / 1600, []
    run = SimpleNamespace(report=shown, datasets={"valid": None}, config=tiny(1), done=3)
    Session.report_loss(run, "valid", lambda data, whole: bar.append(shown.bar.desc) or (2.0, 710, 100))
    assert [*bar, shown.bar.desc] == ["score valid: ", "train: "]
    assert ("step     3 | valid loss 2.0000 (unigram 3.20, bigram 2.40) | perplexity 7.39 | "
            f"{bits:.4f} bits per byte | 710 of 999 tokens\n") in capsys.readouterr().out
    assert metrics(tmp_path)[-1] == dict(step=3, valid_loss=2.0, valid_perplexity=math.exp(2.0), valid_tokens=710,
                                         valid_bits_per_byte=pytest.approx(bits))
    shown.corpus.text_bytes = lambda *_: None                  # the tokenizer can't be loaded
    shown.losses(5, "test", 800.0, 0, 1)
    assert "bits" not in capsys.readouterr().out and metrics(tmp_path)[-1]["test_perplexity"] == math.exp(700)


def result_of(statistics=(), **changes) -> StepResult:
    return StepResult(**dict(loss=1.0, grad_norm=1.0, skipped=False, stop=False, loss_scale=1.0, tokens=100.0,
                             statistics=statistics) | changes)


def test_every_number_of_a_step_is_recorded_printed_and_drawn(report, tmp_path, capsys, monkeypatch):
    """A step of a quarter of a second on two hosts with eight GPUs each, all of which MFU counts."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config, points = tiny(16, dtype="float16", global_batch_size=48, tensor_model_parallel_size=2, log_interval=3), []
    shown, mfu = report(config, "cuda"), 39.936e9 * flops_per_token(config) / (16 * 989e12)
    shown.tokens_per_step *= 26_000_000                        # otherwise MFU would be a billionth
    shown.tensorboard = SimpleNamespace(add_scalar=lambda *point: points.append(point), flush=lambda: None)
    shown.step(3, result_of(loss=1.5, grad_norm=0.25, loss_scale=512.0), 0.01, seconds=0.25)
    shown.end(3, 12.34)
    values = dict(loss=1.5, grad_norm=0.25, lr=0.01, tokens=3 * 48 * 8, step_ms=250.0,
                  tokens_per_second=39_936_000_000.0, mfu=pytest.approx(mfu), skipped=False, loss_scale=512.0)
    assert metrics(tmp_path)[-1] == dict(step=3) | values
    assert points == [(name, value, 3) for name, value in values.items()]
    said = ("step     3 | loss 1.5000 (unigram 3.20, bigram 2.40) | grad norm 0.250 | lr 1.00e-02 | 250 ms | "
            f"39,936,000,000 tokens/s | mfu {100 * mfu:.1f}% | loss scale 512\n3 of 5 steps done, 12.3 s, ")
    assert said in capsys.readouterr().out and 0.05 < mfu < 0.95


def test_the_losses_of_depths_and_the_load_of_experts_are_reported(report, tmp_path, capsys):
    """A depth's loss is a mean over the tokens that the depth counts."""
    config = tiny(1, num_layers=2, mtp_num_layers=2, log_interval=1, num_experts=2, disable_bias_linear=True)
    report(config).step(1, result_of([60.0, 20.0, 70.0, 10.0] + 4 * [30.0, 10.0, 0.0]), 0.1, seconds=1.0)
    said, line = capsys.readouterr().out, metrics(tmp_path)[-1]
    assert "layers 0 to 1, head, 2 depths of multi-token prediction" in said
    assert " | mtp 1 loss 3.0000 | mtp 2 loss 7.0000" in said
    assert (line["mtp_1_loss"], line["mtp_2_loss"], line["busiest_expert"]) == (3.0, 7.0, 1.5)
    assert set(line["expert_load"]) == {"layers.0", "layers.1", "mtp.0.layer", "mtp.1.layer"}


def test_the_load_of_each_expert_is_recorded_with_each_progress_line(report, tmp_path, capsys):
    """Here every second step. Two layers of three have 4 experts. A skipped step may have a loss that is not finite."""
    config = tiny(1, num_experts=4, disable_bias_linear=True, moe_layer_freq=2, log_interval=2)
    shown, tokens = report(config), config.global_batch_size * config.seq_length // 2      # those that count
    counts = [96, 96, 96, 96, 0.03 * tokens, 48, 96, 48, 192, 0.04 * tokens]
    for step in (1, 2, 3):
        shown.step(step, result_of(counts, tokens=tokens), 0.1, seconds=1.0)
    said, total, lines = capsys.readouterr().out, parameter_count(config), metrics(tmp_path)[1:]
    unused = 2 * 2 * 2 * config.hidden_size * config.ffn_hidden_size               # 2 experts in each of 2 layers
    assert f"{total:,} parameters ({total - unused:,} active), float64 on cpu" in said
    assert said.count(" | auxiliary loss 0.0700 | busiest expert 2.00 x\n") == 2
    assert [(line["auxiliary_loss"], line["busiest_expert"]) for line in lines] == [(pytest.approx(0.07), 2.0)] * 3
    loads = {"layers.0": [1.0, 1.0, 1.0, 1.0], "layers.2": [0.5, 1.0, 0.5, 2.0]}
    assert [line.get("expert_load") for line in lines] == [loads, loads, None]
    for bad, options, shown_as in ((0.5, dict(tokens=0.0), 0.0), (math.nan, dict(skipped=True), None),
                                   (math.inf, dict(skipped=True), None)):          # no token counts: no loss does
        shown.step(4, result_of([*counts[:-1], bad], **options), 0.1, seconds=1.0)
        assert metrics(tmp_path)[-1]["auxiliary_loss"] == shown_as


def lines_of(*steps) -> list[bytes]:
    return [b'{"step": %d, "loss": 1.0}\n' % step for step in steps]


@pytest.mark.parametrize("cut", [
    b'{"step": 5, "lo', b'{"step": 5, "loss": 1.0}', b"\0\0", b'{"step": 5, "test_loss": 1.0}\n',
    b"[" * 99999 + b"\n"], ids=len)
def test_lines_that_a_resumed_run_will_redo_or_that_cannot_be_read_are_cut(tmp_path, cut):
    """An incomplete line of a killed run. A run that starts over has no lines."""
    path, middle = tmp_path / "metrics.jsonl", [cut] if cut.endswith(b"\n") else []
    path.write_bytes(b"".join([*lines_of(0, 1), *middle, *lines_of(5, 6), cut]))
    file = continue_metrics(path, 5, {"test_loss"})
    file.write(b"{}\n")
    assert path.read_bytes() == b"".join([*lines_of(0, 1, 5), b"{}\n"])
    assert not continue_metrics(path, 0, set()).tell()


def test_a_full_disk_is_one_warning(report, tmp_path, capsys):
    """Also for TensorBoard, and whatever else goes wrong there."""
    shown = report()
    kept, shown.metrics = shown.metrics, open("/dev/full", "wb", buffering=0)
    shown.tensorboard = SimpleNamespace(add_scalar=lambda *_: os.stat("/nowhere"), flush=lambda: None)
    for step in (1, 2):
        shown.record(step=step, loss=1.0)
    shown.metrics = kept
    shown.record(step=3, loss=1.0)
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[1:] == lines_of(3)
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl can't be written ([Errno 28] No space left") == 1
    assert said.count("--tensorboard-dir can't be written ([Errno 2] No such file") == 1


def shown(folder):
    """{name: [(step, value)]}, read by TensorBoard's own reader."""
    reader = needs("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0}).Reload()
    return {name: [(event.step, event.value) for event in accumulator.Scalars(name)]
            for name in accumulator.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_metrics_and_hides_the_points_of_steps_that_are_redone(pool, tmp_path):
    """A skipped step is a 1; a value that is not finite, null in metrics.jsonl, is a gap. A run does not remember the
    folder: a run from elsewhere must not make folders here."""
    needs("tensorboard")
    make_corpus(tmp_path)
    run, board = tmp_path / "run", tmp_path / "board"
    flags = ("--run-dir", run, "--save-interval", 2, "--eval-interval", 2, "--num-experts", 4, "--ep", 2, "--tp", 1,
             "--disable-bias-linear", "--log-interval", 1)
    for steps in (5, 8):
        ended = train_in_pool(pool, tmp_path, *flags, "--tensorboard-dir", board, "--train-iters", steps, world_size=2,
                              bad_steps=[3])
        assert ended.code == 0 and len(os.listdir(board)) == 1 + (steps == 8), "one rank writes"
        expected = {}
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            for name, value in line.items():
                if name not in ("step", "tokenizer", "expert_load") and value is not None:
                    expected.setdefault(name, []).append((line["step"], pytest.approx(float(value), rel=1e-6)))
        assert shown(board) == expected, "in fp32"
        if steps == 5:
            delete_checkpoint(checkpoints_of(run)[0])
    assert {"valid_bits_per_byte", "test_perplexity", "bigram_entropy", "busiest_expert"} < expected.keys()
    assert [step for step, _ in expected["loss"]] == [1, 2, 4, 5, 6, 7, 8] and expected["skipped"][2] == (3, 1.0)
    shutil.rmtree(board)
    train_in_pool(pool, tmp_path, *flags, "--train-iters", 9, world_size=2)
    assert saved_steps(run)[0] == 9 and not board.exists()
