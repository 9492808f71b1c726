"""What can't be imported or exported exactly is refused in one sentence, and leaves nothing behind."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.huggingface import LENGTH, LLAMA3, change_config, change_tensors, same_bits, weights_of

from nanodomino.errors import UserError
from nanodomino.huggingface import convert, families
from nanodomino.huggingface.__main__ import main
from nanodomino.huggingface.convert import INDEX, export_model, import_model
from nanodomino.huggingface.families import read_config, write_config
from nanodomino.settings.config import Config


def assert_import_refused(folder, tmp_path, message, names=""):
    with pytest.raises(UserError, match=message) as error:
        import_model(folder, tmp_path / "imported")
    assert names in str(error.value) and "\n" not in str(error.value) and not list(tmp_path.glob("*imported*"))


ROPE = "original_max_position_embeddings"
ONLY, WHOLE, POSITIVE = "but nanodomino supports only", ", but it must be a positive whole number", "must be a positive"
UNKNOWN = "which may change the logits and which nanodomino does not know; import another model, or remove the entry"
FULL = ["full_attention"] * 2
CONFIGS = [      # (model, changes of config.json, error)
    ("gpt2", dict(activation_function="gelu"), f'activation_function "gelu", {ONLY} "gelu_new" or "gelu_pytorch_tanh"'),
    ("gpt2", dict(scale_attn_weights=False), f"has scale_attn_weights false, {ONLY} true"),
    ("gpt2", dict(n_layer=0), f"has n_layer 0{WHOLE}; correct it"),
    ("gpt2", dict(hidden_size=32), "has n_embd 48 and hidden_size 32, which mean the same; correct it"),
    ("gpt2", dict(layer_norm_epsilon=-1.0), f"has layer_norm_epsilon -1.0, but it {POSITIVE} number"),
    ("gpt2", dict(tie_word_embeddings=False), "lacks lm_head.weight, which a GPT2LMHeadModel with this config.json"),
    ("gpt2", dict(model_type="gemma3"), 'a model of type "gemma3", but only gpt2, llama, mistral, .* can be imported'),
    ("gpt2", dict(model_type=...), "a model of type null, but only gpt2, llama"),
    ("llama", dict(prefix_scale=2.0), f"has prefix_scale 2.0, {UNKNOWN}"),
    ("llama", dict(attention_bias=True), "has attention_bias true and mlp_bias false, but nanodomino has biases"),
    ("llama", dict(num_key_value_heads=3), "model: num-attention-heads 4 must be divisible by num-query-groups 3"),
    ("llama", dict(partial_rotary_factor=0.5), "has partial_rotary_factor 0.5, but"),
    ("llama", dict(rope_scaling=dict(type="yarn", factor=4.0)), f'has rope_type "yarn", {ONLY} "default" or "linear"'),
    ("llama", dict(rope_scaling=dict(rope_type="linear")), f"has factor null, but it {POSITIVE} number"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(low_freq_factor=2.0)), f"has low_freq_factor 2.0, {ONLY} 1"),
    ("llama", dict(rope_scaling=LLAMA3 | {ROPE: 4096}), f"has {ROPE} 4096, {ONLY} 8192"),
    ("llama", {"rope_scaling": LLAMA3, ROPE: 4096}, f"has {ROPE} 4096, {ONLY} null or 8192"),
    ("llama", dict(rope_parameters=dict(rope_type="default", attention_factor=2.0)), f"_factor 2.0, {UNKNOWN}"),
    ("mistral", dict(sliding_window=1), "has sliding_window 1 and max_window_layers 0, but they must be whole numbers"),
    ("qwen2", dict(layer_types=FULL + ["sliding_attention"]), "and sliding_window null, but nanodomino"),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention"] + FULL),
     "supports only windows in all layers from some layer on; import another model"),
    ("qwen3-moe", dict(decoder_sparse_step=2), f"has decoder_sparse_step 2, {ONLY} 1; import another model"),
    ("qwen3-moe", dict(mlp_only_layers=[0]), rf"has mlp_only_layers \[0\], {UNKNOWN}"),
]


@pytest.mark.parametrize("model, changes, message", CONFIGS,
                         ids=[f"{model} {' '.join(changes)}" for model, changes, _ in CONFIGS])
def test_a_config_json_that_changes_the_model_is_refused(folder, tmp_path, model, changes, message):
    changed = folder(model)
    change_config(changed, **changes)
    assert_import_refused(changed, tmp_path, message, "config.json")


def test_a_sliding_window_may_be_as_long_as_the_longest_sequence(saved):
    values = json.loads((saved("mistral")[1] / "config.json").read_text())
    for window, expected in ((LENGTH, None), (LENGTH - 1, LENGTH - 2), (..., None)):
        given = {name: value for name, value in (values | dict(sliding_window=window)).items() if value is not ...}
        assert read_config(given, "config.json").window_size == expected
    assert read_config(given | dict(max_position_embeddings=8192), "config.json").window_size == 4095    # the default


NAME = "transformer.h.1.mlp.c_fc.weight"
TENSORS = [      # (change of the tensors, error)
    (lambda tensors, name: tensors.pop(name), r"lacks {name}, which a \w+ with this config.json has; download the f"),
    (lambda tensors, name: tensors.update({name: tensors[name][1:].clone()}),
     r"{name} in .* has shape \[\d+, \d+\], but config.json implies \[\d+, \d+\]"),
    (lambda tensors, name: tensors.update({"score.weight": torch.ones(2, 48)}), "holds score.weight, which a .*"),
    (lambda tensors, name: tensors.update({name.partition(".")[2]: tensors[name].clone()}),
     "holds .*, which a .* does not have"),                    # with and without the prefix
    (lambda tensors, name: tensors.update({name: tensors[name].to(torch.int8)}),
     "{name} in .* has type I8, but weights must be of type F64, F32, F16, BF16"),
]


@pytest.mark.parametrize("change, message", TENSORS, ids=[message[:40] for _, message in TENSORS])
def test_a_missing_unknown_or_wrong_tensor_is_named(folder, tmp_path, change, message):
    changed = folder("gpt2")
    change_tensors(changed, lambda tensors: change(tensors, NAME))
    assert_import_refused(changed, tmp_path, message.format(name=NAME))


def split_weights(folder: Path, parts=3) -> Path:
    """Split the weights of a folder into several files."""
    from safetensors.torch import load_file, save_file
    tensors = list(load_file(folder / "model.safetensors").items())
    for part in range(parts):
        save_file(dict(tensors[part::parts]), folder / PART.format(part + 1))
    (folder / "model.safetensors").unlink()
    return folder


PART = "model-{:05d}-of-00003.safetensors"
FILES = [        # (change of a folder with three weight files, error)
    (lambda folder: (folder / "config.json").unlink(), "config.json can't be read .No such file.*; give another"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json can't be read .*; give another file"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json must hold one JSON object"),
    (lambda folder: [path.unlink() for path in folder.glob("model*")], "has neither model.safetensors nor model-00001"),
    (lambda folder: (folder / PART.format(2)).unlink(), "lacks .* and others, which a .*; download the folder again"),
    (lambda folder: os.truncate(folder / PART.format(2), 5000), "00002-of-.* is damaged or can't be read"),
    (lambda folder: (folder / INDEX).write_text('{"weight_map": []}'), "has no weight_map .*; download it again"),
    (lambda folder: shutil.copy(folder / PART.format(2), folder / PART.format(3)), "is in .*-00003-.* and in another"),
]


@pytest.mark.parametrize("change, message", FILES, ids=[message[:40] for _, message in FILES])
def test_a_damaged_folder_is_refused(folder, tmp_path, change, message):
    changed = split_weights(folder("gpt2"))
    change(changed)
    assert_import_refused(changed, tmp_path, message)


def test_the_index_says_which_files_hold_the_weights(saved, folder, tmp_path):
    """They may have any names, and another file that looks like one of them, such as a second copy, is not read."""
    from safetensors.torch import load_file
    changed, names = split_weights(folder("gpt2")), {}
    shutil.copy(changed / PART.format(1), changed / "model-00009.safetensors")
    for part in range(1, 4):
        path = (changed / PART.format(part)).rename(changed / f"weights.{part}.safetensors")
        names |= dict.fromkeys(load_file(path), path.name)
    (changed / INDEX).write_text(json.dumps({"weight_map": names}))
    for source, name in ((saved("gpt2")[1], "whole"), (changed, "split")):
        import_model(source, tmp_path / name)
    assert same_bits(weights_of(tmp_path / "split"), weights_of(tmp_path / "whole"))


# ---- wrong types

WRONG = [None, True, -1, 10**9, 10**40, 1e308, float("nan"), "", "x", "\ud800", [], [1], [[]], {}, {"content": 1}]


def places(value, above=()):
    """Yield the path to each value in a JSON object, as a tuple of keys."""
    for key, below in value.items() if isinstance(value, dict) else ():
        yield (*above, key)
        yield from places(below, (*above, key))


def with_value(record, place: tuple, value):
    """Return a copy of a JSON object with another value at this place."""
    if not place:
        return value
    copied = record.copy()
    copied[place[0]] = with_value(record[place[0]], place[1:], value)
    return copied


@pytest.mark.parametrize("model", ["llama 3.1", *(
    pytest.param(model, marks=pytest.mark.exhaustive) for model in ("gpt2", "mistral", "qwen3", "qwen3-moe"))])
def test_a_wrong_type_anywhere_in_config_json_gives_one_sentence(saved, model):
    """read_config() must succeed, or raise UserError with a short line."""
    values = json.loads((saved(model)[1] / "config.json").read_text())
    record = values | dict(rope_scaling={"type": "linear", "factor": 2.0})
    for place in places(record):
        for value in WRONG:
            try:
                read_config(with_value(record, place, value), "config.json")
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000
            except BaseException as error:
                raise AssertionError(f"config.json with {value!r} at {place}") from error


# ---- output

def test_nothing_is_overwritten_and_names_must_fit(saved, tmp_path):
    (tmp_path / "file").touch()
    import_model(saved("gpt2")[1], tmp_path / "runs" / "imported")
    for act in (lambda out: import_model(saved("gpt2")[1], out),
                lambda out: export_model(tmp_path / "runs" / "imported", out, None, 1)):
        with pytest.raises(UserError, match="file already exists, and nothing is overwritten; choose another name"):
            act(tmp_path / "file")
    with pytest.raises(UserError, match=r"can't be written \(Not a directory\); free some space, or choose"):
        import_model(saved("gpt2")[1], tmp_path / "file" / "imported")


@pytest.mark.parametrize("name", ["convert_from_hf", "convert_to_hf"])
def test_output_is_complete_or_absent(saved, tmp_path, monkeypatch, name):
    """A full disk in the middle leaves no folder; the next attempt removes what a killed process left, and succeeds."""
    import_model(saved("gpt2")[1], tmp_path / "imported")
    function, calls, out = getattr(convert, name), [], tmp_path / "out"

    def act():
        if name == "convert_from_hf":
            return import_model(saved("gpt2")[1], out)
        return export_model(tmp_path / "imported", out)

    def fail(*args):
        calls.append(1)
        if len(calls) == 9:
            raise OSError(28, os.strerror(28))
        return function(*args)

    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "left").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(convert, name, fail)
        with pytest.raises(UserError, match=r"out can't be written \(No space left on device\); free some space"):
            act()
    assert len(calls) == 9 and not list(tmp_path.glob("*out*"))
    act()
    assert out.exists() and not (out / "left").exists()


# ---- export

@pytest.mark.parametrize("choices, message", [
    (dict(normalization="RMSNorm"), "GPT2LMHeadModel needs normalization LayerNorm, not RMSNorm; export another model"),
    (dict(kv_channels=8), "GPT2LMHeadModel needs kv-channels 4, not 8"),
    (dict(num_attention_heads=3, kv_channels=5), "GPT2LMHeadModel needs kv-channels None, not 5"),
    (dict(model="nano-llama", rotary_percent=0.5), "LlamaForCausalLM needs rotary-percent 1.0, not 0.5"),
    (dict(model="nano-llama", qk_layernorm=True, add_qkv_bias=True), "needs .*, not True"),
    (dict(model="nano-llama", use_rope_scaling=True, rotary_seq_len_interpolation_factor=2.0), "only one rope scaling"),
    (dict(model="nano-moe", moe_shared_expert_intermediate_size=8),
     "nearest: MixtralForCausalLM needs moe-shared-expert-intermediate-size None, not 8")])
def test_a_model_that_no_family_fits_is_not_exported(choices, message):
    config = Config(**dict(num_layers=2, hidden_size=16, num_attention_heads=4) | choices)
    with pytest.raises(UserError, match=message):
        write_config(config.resolve(1).with_vocabulary(257), "float32")


def test_a_model_with_a_setting_that_no_family_names_is_not_exported(monkeypatch):
    """Such as a new boolean, without which the exported model would compute something else."""
    monkeypatch.setattr(families, "TRANSLATED", families.TRANSLATED - {"use_rope_scaling"})
    config = Config(model="nano-llama", use_rope_scaling=True).resolve(1).with_vocabulary(257)
    with pytest.raises(UserError, match="LlamaForCausalLM needs use-rope-scaling .*, not True; export another"):
        write_config(config, "float32")


def test_a_value_above_the_maximum_of_the_dtype_is_named(folder, tmp_path):
    changed = folder("gpt2")
    change_tensors(changed, lambda tensors: tensors[NAME].view(-1)[7:8].fill_(-70000.0))
    import_model(changed, tmp_path / "imported")
    with pytest.raises(UserError, match=rf"{NAME} has values up to 70000, above the maximum 65504 of torch.float16"):
        export_model(tmp_path / "imported", tmp_path / "out", "float16")
    assert not list(tmp_path.glob("*out*"))


# ---- command line

@pytest.mark.parametrize("arguments, message", [
    ("", "arguments are required: import | export; python -m nanodomino.huggingface --help lists every flag"),
    ("import DIR", "--output"), ("export DIR", "arguments are required: DIR"), ("export DIR OUT --dtype int8", "int8"),
    ("import DIR --output X --dtype float16", "unrecognized arguments: --dtype float16; "),
    ("export nowhere OUT", "nowhere is no folder to load from"),
    (f"import {__file__} --output OUT", r"refusals.py/config.json can't be read \(Not a directory\); give another"),
    ("import nowhere --output OUT", r"nowhere/config.json can't be read \(No such file or directory\); give another")])
def test_a_mistyped_command_is_refused_in_one_sentence(transformers, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        main(arguments.split())
    assert "\n" not in str(error.value) and not os.listdir(tmp_path)
