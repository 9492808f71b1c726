"""TensorBoard shows the points of metrics.jsonl, also after a restart, and never ends a run."""

import json
import os
import shutil

import pytest
from support import needs
from support.harness import report_without_a_run, tiny
from support.runs import make_corpus, saved_steps, train_in_pool

from nanodomino.checkpoint.load import checkpoints_of, delete_checkpoint


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


def test_a_failure_is_one_warning(tmp_path, capsys):
    needs("tensorboard")
    report = report_without_a_run(tmp_path, tiny(1, tensorboard_dir=str(tmp_path / "board")))
    report.tensorboard.add_scalar = lambda *_: os.stat("/nowhere")
    for step in (1, 2):
        report.record(step=step, loss=1.0)
    assert capsys.readouterr().out.count("--tensorboard-dir can't be written ([Errno 2] No such file") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("loss") == 2
