"""A setting is declared once. Its flag, its page, its checks and what a resumed run does with it follow."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support import ROOT
from support.checkpoints import train_from
from support.harness import build, random_data, tiny, train_rank, train_steps
from support.runs import TINY, main_on_rank, make_corpus, metric_points, train_in_pool

from data.prepare import prepare
from nanodomino.checkpoint.format import FORMAT, Box, manifest_text, read_manifest, write_boxes, write_manifest
from nanodomino.checkpoint.load import checkpoints_of, recorded_settings, restore
from nanodomino.data import TokenDataset
from nanodomino.errors import UserError
from nanodomino.huggingface.families import read_config
from nanodomino.model import meta_model
from nanodomino.run.folder import open_run
from nanodomino.run.session import command_line_parser, from_command_line
from nanodomino.settings.config import Config
from nanodomino.settings.flags import EFFECTS, Parser, flag_name, flag_settings, markdown
from nanodomino.settings.records import check_settings, from_record
from nanodomino.settings.rules import holds


def settled(*flags, world_size=1) -> Config:
    """The Config of a command line, with a vocabulary."""
    return from_command_line([str(flag) for flag in flags], world_size).with_vocabulary(257)


@pytest.fixture(scope="module")
def old_run(tmp_path_factory) -> Path:
    """A run of three steps with a tiny model, whose weights are 0."""
    run = tmp_path_factory.mktemp("old")
    config = settled(*"--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --train-iters 3".split())
    record = dataclasses.asdict(config)
    (run / "config.json").write_text(json.dumps(record))
    (checkpoint := run / "checkpoints" / "step-00000003").mkdir(parents=True)
    shapes = {name: weight.spec.shape for name, weight in meta_model(config).named_parameters()}
    boxes = [(f"weight.{name}", Box((0,) * len(shape), shape), torch.zeros(shape)) for name, shape in shapes.items()]
    write_boxes(checkpoint / "rank-00000.safetensors", boxes)
    write_manifest(checkpoint, dict(format=FORMAT, step=3, adam_steps=3, config=record), {}, "")
    return run


@pytest.fixture
def begun(tmp_path):
    """begun(*flags) -> (folder, Config) of a run with these settings; it has only a config.json."""
    def begin(*flags, world_size=1):
        config = settled(*flags, "--run-dir", tmp_path / "run", world_size=world_size)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        return tmp_path / "run", config
    return begin


@pytest.mark.table
def test_every_setting_has_an_effect_a_type_and_a_line_of_help():
    for field in dataclasses.fields(Config):
        assert field.metadata["affects"] in EFFECTS
    shown = " ".join(command_line_parser().format_help().split())
    for field in flag_settings(Config):
        assert field.type in (int, float, bool, str) and flag_name(field.name) in shown
        assert field.default is None or isinstance(field.default, field.type)
        assert not field.metadata["choices"] or field.default in (None, *field.metadata["choices"])


def test_an_empty_argument_is_refused_in_one_sentence():
    """As a shell passes "$FLAGS" if the variable is empty."""
    with pytest.raises(UserError, match="unrecognized arguments: ; python train.py --help lists every flag"):
        command_line_parser().parse_args([""])


@pytest.mark.table
def test_docs_settings_is_up_to_date():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == markdown(Config) + "\n", "run python -m nanodomino.settings.config > docs/settings.md"
    assert page.count("\n## ") == len({field.metadata["section"] for field in flag_settings(Config)}), "one each"


# ---- resuming

def test_run_dir_alone_resumes_a_run_with_its_settings(begun):
    run, config = begun("--num-layers", 3, "--lr", 0.5, "--clip-grad", 0.25, "--log-interval", 7, "--bf16", "--seed", 9,
                        "--exit-interval", 2, "--trace", "1:2", "--micro-batch-size", 2)
    again = settled("--run-dir", run)
    assert again.exit_interval is None and again.trace is None, "they hold for one launch"
    assert dataclasses.replace(again, exit_interval=2, trace="1:2") == config
    again = settled("--run-dir", run, "--train-iters", 80, "--lr", 0.1)
    assert (again.train_iters, again.lr, again.num_layers) == (80, 0.1, 3), "a flag overrides what is remembered"
    assert again.min_lr == 0.01, "min_lr follows the new rate"


def test_a_layout_that_was_not_given_follows_the_number_of_processes(begun):
    run, config = begun(world_size=8)
    assert (config.tp, config.pp, config.dp, config.slices) == (2, 2, 2, 2)
    for world_size, flags, layout in ((2, (), (2, 1, 1, 2)), (1, (), (1, 1, 1, 1)), (2, ("--cp", 2), (1, 1, 1, 2))):
        again = settled("--run-dir", run, *flags, world_size=world_size)
        assert (again.tp, again.pp, again.dp, again.slices) == layout


def test_a_layout_that_was_given_is_kept_by_every_later_launch(begun):
    run, _ = begun("--pp", 2, "--micro-batch-size", 2, world_size=4)
    again = settled("--run-dir", run, world_size=2)
    assert (again.pp, again.tp, again.dp, again.micro_batch_size) == (2, 1, 1, 2)
    (run / "config.json").write_text(json.dumps(dataclasses.asdict(again)))
    assert settled("--run-dir", run, world_size=8).pp == 2


@pytest.fixture(scope="module")
def origins(tmp_path_factory, old_run):
    """{what a launch starts from: (folder, effects of the settings that must not change, other settings)}"""
    killed, run, fresh = (tmp_path_factory.mktemp("origins") / name for name in ("killed", "run", "fresh"))
    shutil.copytree(old_run, run)
    killed.mkdir()
    shutil.copy(run / "config.json", killed)
    resumed = "model", "positions", "optimizer", "run"
    return {"a run": (run, resumed, dict(run_dir=str(run))),
            "a run that was killed before its first checkpoint": (killed, resumed, dict(run_dir=str(killed))),
            "--load": (run, resumed[:3], dict(run_dir=str(fresh), load=str(run))),
            "--load --finetune": (run, resumed[:2], dict(run_dir=str(fresh), load=str(run), finetune=True))}


def changed(field: dataclasses.Field, value):
    """Return another valid value of a setting."""
    if choices := field.metadata.get("choices"):
        return next(choice for choice in choices if choice != value)
    other = {bool: lambda: not value, int: lambda: 2 * (value or 1), float: lambda: 2 * (value or 0) + 0.125}
    return other.get(field.type, lambda: "something else")()


@pytest.mark.parametrize("field",
                         [field for field in dataclasses.fields(Config)
                          if field.name not in ("run_dir", "load", "finetune")], ids=lambda field: field.name)
def test_a_changed_setting_is_refused_or_accepted_by_its_effect(origins, monkeypatch, field):
    """For every setting, also future ones, and everything that a launch can start from."""
    # the lock would last as long as this process
    monkeypatch.setattr("nanodomino.run.folder.lock_folder", lambda run_dir: (run_dir / "lock").touch())
    for folder, roles, asked in origins.values():
        config = dataclasses.replace(from_record(recorded_settings(folder), folder), **asked)
        other = dataclasses.replace(config, **{field.name: changed(field, getattr(config, field.name))})
        open_run(config)
        if field.metadata["affects"] in roles:
            with pytest.raises(UserError,
                               match=f"{field.name.replace('_', '-')} .*, but this run has .*go back to the old "):
                open_run(other)
        elif field.name == "mtp_num_layers":
            with pytest.raises(UserError, match="can drop depths but not add any; try --mtp-num-layers 0"):
                open_run(other)
        else:
            open_run(other)


def test_other_training_tokens_are_refused(pool, tmp_path):
    """The message names both data folders, also where the old one has moved."""
    tokens, run, text = make_corpus(tmp_path), ("--run-dir", tmp_path / "run"), tmp_path / "text.txt"
    assert train_in_pool(pool, tmp_path, *run, "--train-iters", 1).code == 0
    tokens.rename(tmp_path / "moved")
    text.write_text(text.read_text().replace("line 7 ", "line 8 "))
    prepare(text, tmp_path / "other")
    ended = train_in_pool(pool, tmp_path, *run, "--train-iters", 3, "--data-path", tmp_path / "other")
    assert ended.code == 2 and "was made with the text of data-sha256 " in ended.output
    assert all(f" (--data-path {tmp_path / name})" in ended.output for name in ("tokens", "other")), ended.output


def test_flags_override_a_config_file(tmp_path):
    """A file without "given" is a user's: its derived settings and those of one launch count, too."""
    path, file = tmp_path / "mine.json", dict(lr=0.5, num_layers=3, exit_interval=4, slices=1, schedule="gpipe",
                                              micro_batch_size=2, min_lr=0.1, ffn_hidden_size=48, columns=2)
    path.write_text(json.dumps(file))
    config = settled("--config", path, "--num-layers", 2)
    assert {name: getattr(config, name) for name in file} == file | {"num_layers": 2}
    assert {*config.given} == file.keys() - {"exit_interval"}


def test_a_file_overrides_what_a_run_remembers(begun, tmp_path):
    """null is the default. In the config.json of a run only some settings are given; the others follow the layout."""
    run, config = begun("--num-layers", 3, "--lr", 0.5, "--fp16", "--loss-scale", 256, world_size=8)
    (tmp_path / "off.json").write_text(json.dumps({"loss_scale": None, "lr": 0.25}))
    again = settled("--run-dir", run, "--config", tmp_path / "off.json")
    assert (again.loss_scale, again.lr, again.dtype, again.num_layers) == (None, 0.25, "float16", 3)
    assert "loss_scale" not in again.given
    (tmp_path / "mine.json").write_text(json.dumps({"run_dir": str(run)}))
    assert settled("--config", tmp_path / "mine.json").lr == 0.5
    assert settled("--run-dir", run, "--bf16", "--config", tmp_path / "off.json").dtype == "bfloat16"
    copied = settled("--config", run / "config.json")
    assert (copied.num_layers, copied.lr, copied.world_size, copied.tp) == (3, 0.5, 1, 1)
    (tmp_path / "null.json").write_text(json.dumps({each.name: None for each in flag_settings(Config)}))
    assert dataclasses.replace(settled("--config", tmp_path / "null.json"), config=None, given=()) == settled()


@pytest.mark.parametrize("content", [None, '{"num_layers": 1, "hid'])
def test_a_run_that_has_lost_its_config_json_takes_the_settings_of_its_checkpoint(tmp_path, content, old_run):
    run = Path(shutil.copytree(old_run, tmp_path / "run"))
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").unlink() if content is None else (run / "config.json").write_text(content)
    for flags in (("--run-dir", run), ("--load", run)):
        config = from_command_line([str(flag) for flag in flags], 1)
        assert (config.num_layers, config.hidden_size) == (saved["num_layers"], saved["hidden_size"])


def test_a_run_of_an_older_version_can_be_resumed(tmp_path):
    """Version 2b3491d wrote older_config.json. What is gone since had no effect; what is new has its default, and is
    not compared: a new setting must not make every older checkpoint unusable."""
    record = json.loads((Path(__file__).parent / "older_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record | dict(warp=1, without_effect=["warp"])))
    config = settled("--run-dir", tmp_path, world_size=2)
    found = {name: value for name, value in dataclasses.asdict(config).items() if name not in ("run_dir", "given")}
    assert found == {name: record.get(name, getattr(Config, name)) for name in found}
    assert set(config.given) == {*record["given"]}
    config = dataclasses.replace(config, window_size=3)
    check_settings(record, "a run", config, "model", "optimizer", "run")
    with pytest.raises(UserError, match="seed 7"):
        check_settings(record | {"seed": 7}, "a run", config, "model", "optimizer", "run")


# ---- from weights

def test_load_takes_the_model_settings_from_the_checkpoint(tmp_path, old_run):
    loaded = settled("--load", old_run)
    assert (loaded.num_layers, loaded.hidden_size, loaded.max_position_embeddings) == (1, 8, 8)
    assert (loaded.seq_length, loaded.train_iters, loaded.finetune) == (8, 3, False)
    tuned = settled("--load", old_run, "--finetune")
    assert tuned.seq_length == 8 and tuned.train_iters == 200, "the rest is this run's own"
    assert not {"seed", "init_method_std"} & {*tuned.given}, "no loss depends on them"
    assert settled("--load", old_run, "--seed", 7).seed == 7
    found = open_run(settled("--load", old_run, "--seq-length", 8, "--optimizer", "muon", "--finetune", "--run-dir",
                             tmp_path))
    assert found.weights_only and found.checkpoint == checkpoints_of(old_run)[0]


def samples_of(flags):
    """Run train.py on this rank. Return (what it printed, the numbers of the samples that it trained on)."""
    with mock.patch.object(TokenDataset, "window_of", autospec=True, side_effect=TokenDataset.window_of) as read:
        return main_on_rank(flags.split()).output, [call.args[1] for call in read.call_args_list]


def test_a_run_that_continues_reads_the_next_samples_whatever_its_batch_size_is(pool, tmp_path):
    """From --load, with --run-dir, and with samples half as long. The count of tokens rises, and other settings go on.
    A fine-tuning starts anew."""
    base = f"{' '.join(TINY)} --micro-batch-size 4 --data-path {make_corpus(tmp_path)}"
    for flags, samples, said in (
            (f"{base} --run-dir A --train-iters 4 --global-batch-size 8 --weight-decay 0.5", range(32), ""),
            ("--run-dir B --load A --train-iters 6 --global-batch-size 4", range(32, 40),
             "; the data go on at sample 32; the learning rate goes from 4.00e-04 to "),
            ("--run-dir B --train-iters 7 --global-batch-size 12", range(40, 52), "global_batch_size 12 (was 4); "),
            ("--run-dir C --load A --train-iters 5 --seq-length 8", range(64, 72), "seq_length 8 (was 16); "),
            (f"{base} --run-dir D --load A --finetune --train-iters 1", range(16), "the weights in ")):
        output, found = pool.run(samples_of, re.sub(r" ([A-D])\b", rf" {tmp_path}/\1", flags), world_size=1)[0]
        assert found == [*samples] and said in output, output
    assert metric_points(tmp_path / "B", "tokens") == [(5, 36 * 16), (6, 40 * 16), (7, 52 * 16)]
    assert metric_points(tmp_path / "C", "tokens") == [(5, 72 * 8)]
    assert settled("--run-dir", tmp_path / "B").weight_decay == 0.5


def test_fine_tuning_extends_the_context_of_a_model_with_rope(pool, tmp_path):
    """No weight depends on the number of positions; without --finetune the run would go on with another model."""
    rope, run = ("--train-iters", 1, "--position-embedding-type", "rope"), make_corpus(tmp_path).parent / "run"
    train_in_pool(pool, tmp_path, "--run-dir", run, *rope)
    longer = ("--run-dir", tmp_path / "new", "--load", run, *rope, "--seq-length", 24)
    assert "try --seq-length 12, or add --finetune" in train_in_pool(pool, tmp_path, *longer).output
    ended = train_in_pool(pool, tmp_path, *longer, "--finetune", "--rotary-base", 500,
                          "--rotary-seq-len-interpolation-factor", 2)
    assert ("; seq_length 24 (was 12); max_position_embeddings 24 (was 12); rotary_base 500.0 (was 10000.0); "
            "rotary_seq_len_interpolation_factor 2.0 (was 1.0)\n") in ended.output and ended.code == 0, ended.output
    assert settled("--load", tmp_path / "new", "--finetune", "--seq-length", 8).max_position_embeddings == 24


def test_the_context_of_learned_positions_is_all_that_the_weights_were_trained_with(tmp_path, begun):
    """Positions that no run has trained do not count. Those of an earlier run do, and all of an imported model."""
    run, config = begun("--seq-length", 16, "--max-position-embeddings", 2048)
    assert config.context_length == 16
    for number, (length, context) in enumerate([(32, 32), (8, 32), (24, 32)]):
        tuned = settled("--load", run, "--finetune", "--seq-length", length, "--run-dir", tmp_path / f"new{number}")
        (run := tmp_path / f"new{number}").mkdir()
        (run / "config.json").write_text(json.dumps(dataclasses.asdict(tuned)))
        assert tuned.context_length == settled("--run-dir", run).context_length == context
    imported = SimpleNamespace(model_type="gpt2", vocab_size=9, num_hidden_layers=1, hidden_size=8,
                               num_attention_heads=2, max_position_embeddings=2048, tie_word_embeddings=True)
    assert read_config(imported, "config.json").context_length == 2048
    assert settled("--model", "nano-llama", "--max-position-embeddings", 999).context_length == 999


def test_a_tilde_is_the_home_directory_in_flags_and_files_but_not_in_a_prompt(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "settings.json").write_text('{"data_path": "~/data"}')
    config = from_command_line([f"--config={tmp_path}/settings.json", "--run-dir=~/run", "--num-layers", "4"], 1)
    assert (config.data_path, config.run_dir) == ("/home/me/data", "/home/me/run")
    parser = Parser()
    parser.add_argument("--prompt")
    parser.add_argument("--input", nargs="+")
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args(["--prompt=~/x", "--input", "a~", "~", "--output=~/out"])
    assert (flags.prompt, flags.input, flags.output) == ("~/x", ["a~", "/home/me"], Path("/home/me/out"))


def test_a_setting_without_effect_is_refused_only_if_its_flag_was_given(begun):
    """A setting without effect that a run remembers, or that a preset or a file sets, is accepted."""
    run, _ = begun("--tp", 2, "--sequence-parallel", "--optimizer", "muon", "--muon-momentum", 0.8, world_size=2)
    alone = settled("--run-dir", run, "--tp", 1)
    assert alone.sequence_parallel and alone.sequence_shards == 1
    assert settled("--config", run / "config.json", "--tp", 1, "--optimizer", "adamw").muon_momentum == 0.8
    assert settled("--model", "llama3.2-1b", "--position-embedding-type", "none").use_rope_scaling
    with pytest.raises(UserError, match="--muon-momentum 0.5 needs --optimizer muon to have an effect"):
        settled("--run-dir", run, "--tp", 1, "--optimizer", "adamw", "--muon-momentum", 0.5)


def test_every_need_can_hold_and_can_fail():
    """For every setting, also future ones: holds() reads the words of its need."""
    configs = [tiny(1), tiny(2, tensor_model_parallel_size=2, num_experts=4, disable_bias_linear=True, dtype="float16",
                             position_embedding_type="rope", mtp_num_layers=1, sample_tokens=0, loss_scale=8.0,
                             use_rope_scaling=True, moe_router_enable_expert_bias=True, lr_decay_style="constant",
                             moe_router_score_function="sigmoid", recompute_granularity="full",
                             schedule="eager-1f1b", window_size=3),
               tiny(2, context_parallel_size=2, temperature=0.0, fp8_format="e4m3", dtype="bfloat16", load="x",
                    position_embedding_type="none", optimizer="muon", lr_decay_style="WSD")]
    for need in {need for field in flag_settings(Config) for need in field.metadata["needs"]}:
        assert {holds(need, config) for config in configs} == {True, False}, need
    assert [[holds(need, config) for config in configs] for need in ("--num-experts", "no --load", "--cp above 1")] == [
        [False, True, False], [True, True, False], [False, False, True]]


def test_a_command_with_load_goes_on_with_its_own_run(begun, old_run, tmp_path, monkeypatch):
    """A scheduler repeats the command at each launch. Before the run's first checkpoint it starts from --load again,
    with all settings of its first launch; then from its own checkpoint, even if the other one is gone."""
    monkeypatch.setattr("nanodomino.run.folder.lock_folder", lambda run_dir: (run_dir / "lock").touch())
    origin = Path(shutil.copytree(old_run, tmp_path / "origin"))
    run, config = begun("--load", origin, "--finetune", "--lr", 0.5)
    again = settled("--run-dir", run, "--load", origin, "--finetune")
    found = open_run(again)
    assert (found.checkpoint, found.weights_only) == (checkpoints_of(origin)[0], True)
    assert (again.num_layers, again.lr) == (1, 0.5) and again == config
    (run / "checkpoints").rmdir()
    shutil.move(origin / "checkpoints", run)
    shutil.rmtree(origin)
    (own,) = checkpoints_of(run)
    (own / "manifest.json").write_text(manifest_text(read_manifest(own) | dict(config=dataclasses.asdict(config))))
    found = open_run(settled("--run-dir", run, "--load", origin, "--finetune"))
    assert (found.checkpoint, found.weights_only) == (own, False)


def finetune_rank(config, folder, data):
    """Return the losses of three steps from the checkpoint's weights alone."""
    mesh, model, optimizer, _ = built = build(config)
    step = restore(checkpoints_of(Path(folder))[0], model, optimizer, mesh, weights_only=True)
    assert step == optimizer.updates == 0
    return train_steps(built, config, data, range(1, 4)).losses


def test_finetune_starts_at_step_0_with_a_new_optimizer(pool, tmp_path):
    """Its losses are those of a new model with the same weights, also with other data, another optimizer and another
    layout."""
    (saved,) = pool.run(train_from, tiny(1), None, random_data(tiny(1), 2), 0, 2, None, str(tmp_path), world_size=1)
    weights = {name: weight for name, (weight, _) in saved.weights.items()}
    config = tiny(2, data_parallel_size=2, optimizer="muon", lr=1e-3)
    data = random_data(config, 3, seed=1)
    anew = pool.run(train_rank, config, weights, data, 3, world_size=2)
    assert pool.run(finetune_rank, config, str(tmp_path), data, world_size=2) == [outcome.losses for outcome in anew]


def test_a_refused_change_is_blamed_on_the_setting_that_was_given():
    """SwiGLU at this width changes ffn-hidden-size too, which nobody has given."""
    plain, swiglu = tiny(1, hidden_size=64), tiny(1, hidden_size=64, swiglu=True)
    assert plain.ffn_hidden_size != swiglu.ffn_hidden_size
    with pytest.raises(UserError, match="^a run was made with swiglu False, but this run has True"):
        check_settings(dataclasses.asdict(plain), "a run", swiglu, "model")
