"""What can't be imported or exported exactly is refused in one sentence, and leaves nothing behind."""

import dataclasses
import os
import sys

import pytest
import torch
from support.huggingface import LLAMA3, change_config, change_tensors

from nanodomino.errors import UserError
from nanodomino.huggingface import convert
from nanodomino.huggingface.__main__ import main
from nanodomino.huggingface.convert import INDEX, export_model, import_model
from nanodomino.huggingface.families import read_config, write_config
from nanodomino.settings.config import Config


def assert_import_refused(folder, tmp_path, message):
    with pytest.raises(UserError, match=message) as error:
        import_model(folder, tmp_path / "imported")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000 and not list(tmp_path.glob("*imported*"))


# ---- the proof

PROOF = r"the logit of the same token is \S+ in Transformers and \S+ in nanodomino; import another model"
MISREAD = [      # (model, another reading of its config.json)
    ("gpt2", dict(layernorm_epsilon=1e-3)), ("llama", dict(layernorm_epsilon=1e-5)), ("llama", dict(rotary_base=1e6)),
    ("llama interpolated", dict(rotary_seq_len_interpolation_factor=3.1)), ("llama 3.1", dict(use_rope_scaling=False)),
    ("llama 3.1", dict(rope_scaling_factor=9.0)), ("mistral with a window", dict(window_size=4)),
    ("mistral with a window", dict(window_size=None)), ("qwen2 with a window", dict(full_attention_layers=0)),
    ("qwen2 with a window", dict(full_attention_layers=2)), ("qwen3-moe", dict(moe_router_pre_softmax=True)),
    ("mixtral", dict(moe_router_topk=1, moe_router_pre_softmax=True))]


@pytest.mark.parametrize("model, wrong", MISREAD, ids=[f"{model} {wrong}" for model, wrong in MISREAD])
def test_a_wrong_reading_of_an_entry_shows_in_the_logits(saved, tmp_path, monkeypatch, model, wrong):
    """Rounding makes differences of 1e-6."""
    monkeypatch.setattr(convert, "read_config", lambda *args: dataclasses.replace(read_config(*args), **wrong))
    assert_import_refused(saved(model)[1], tmp_path, PROOF)


@pytest.mark.parametrize("model, changes", [
    ("gpt2", dict(scale_attn_weights=False)), ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
    ("llama", dict(hidden_act="gelu")), ("qwen2 with a window", dict(layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"]))])
def test_an_entry_that_nanodomino_does_not_know_is_found_by_its_effect(folder, tmp_path, model, changes):
    changed = folder(model)
    change_config(changed, **changes)
    assert_import_refused(changed, tmp_path, PROOF)
    assert "logits" not in import_model(changed, tmp_path / "unchecked", check=False)
    change_config(changed, **dict.fromkeys(changes, ...), some_other_entry=2.0, attention_dropout=0.5)
    assert "logits equal to Transformers' up to" in import_model(changed, tmp_path / "imported"), "no effect"


def test_the_proof_needs_memory_for_one_model_in_fp64(saved, tmp_path, monkeypatch):
    elements = 94_800
    monkeypatch.setattr(convert, "free_memory", lambda: 8 * elements)
    assert_import_refused(saved("llama")[1], tmp_path, "needs 0.0 GB of memory, but only 0.0 GB are free; free some")
    monkeypatch.setattr(convert, "free_memory", lambda: 8 * elements + 1)
    import_model(saved("llama")[1], tmp_path / "imported")


# ---- config.json

ROPE = "original_max_position_embeddings"
REFUSED, COMPUTE = r"Transformers can't read .*config.json \(", "but nanodomino would compute"
CONFIGS = [      # (model, changes of config.json, error)
    ("gpt2", dict(activation_function="gelu"), f"has activation_function gelu, {COMPUTE} gelu_new; import another"),
    ("gpt2", dict(n_layer=0), r"an impossible model \(.*num-layers must be at least 1.*\); correct it, or use another"),
    ("gpt2", dict(n_head=5), r"an impossible model \(.*hidden-size 48 must be divisible by num-attention-heads 5"),
    ("gpt2", dict(tie_word_embeddings=False), "lacks lm_head.weight, unlike nanodomino's model with this config.json"),
    ("gpt2", dict(model_type="gemma3"), "config.json describes a model of type gemma3, but only gpt2, llama, mistral"),
    ("llama with biases", dict(mlp_bias=False), "has model.layers.0.mlp.down_proj.bias, .*, unlike nanodomino"),
    ("llama", dict(num_key_value_heads=3), "num-attention-heads 4 must be divisible by num-query-groups 3"),
    ("llama", dict(partial_rotary_factor=0.5), f"'partial_rotary_factor': 0.5.*, {COMPUTE}"),
    ("llama", dict(rope_scaling=dict(type="yarn", factor=4.0)), f"'rope_type': 'yarn'.*, {COMPUTE} .*'default'"),
    ("llama", dict(rope_scaling=dict(type="dynamic", factor=4.0)), f"'rope_type': 'dynamic'.*, {COMPUTE} .*'default'"),
    ("llama", {"rope_scaling": LLAMA3, ROPE: 4096}, PROOF),
    ("llama", dict(rope_parameters=dict(rope_type="default", attention_factor=2.0)), f"_factor': 2.0.*, {COMPUTE}"),
    ("llama", dict(rope_parameters=dict(rope_type="linear", factor="x")), f"{REFUSED}|an impossible model"),
    ("mistral", dict(sliding_window=1), "an impossible model .*window-size must be at least 1"),
    ("qwen2", dict(layer_types=["sliding_window"] * 3), REFUSED), ("qwen3-moe", dict(mlp_only_layers=[0]), PROOF),
    # wrong types
    *(("llama", {entry: value}, f"{REFUSED}|an impossible model|a model of type") for entry, value in (
        ("hidden_size", "48"), ("num_attention_heads", -4), ("rope_parameters", [1]), ("max_position_embeddings", 2.5),
        ("tie_word_embeddings", "\ud800"), ("head_dim", 10**40), ("model_type", ["llama"])))]


NAME, PART = "transformer.h.1.mlp.c_fc.weight", "model-00002-of-00003.safetensors"
TENSORS = [      # (model, change of its tensors, error)
    ("gpt2", lambda tensors: tensors.pop(NAME), f"lacks {NAME}, unlike nanodomino's model with this config.json; impo"),
    ("gpt2", lambda tensors: tensors.update({NAME: tensors[NAME][1:].clone()}),
     rf"{NAME} in .* has shape \[\d+, \d+\] and type torch.float64, but config.json implies \[\d+, \d+\]"),
    ("gpt2", lambda tensors: tensors.update({"score.weight": torch.ones(2, 48)}), "has transformer.score.weight, unl"),
    ("gpt2", lambda tensors: tensors[NAME][1].fill_(torch.nan), f"{NAME} has numbers that are infinite or NaN; impo"),
    ("gpt2", lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int8)}), f"{NAME} in .* type I8, but")]


@pytest.mark.parametrize("model, changes, message", CONFIGS + TENSORS, ids=[
    f"{model} {ascii(changes) if isinstance(changes, dict) else message:.60}"
    for model, changes, message in CONFIGS + TENSORS])
def test_a_model_that_nanodomino_can_not_follow_is_refused(folder, tmp_path, model, changes, message):
    changed = folder(model)
    change_tensors(changed, changes) if callable(changes) else change_config(changed, **changes)
    assert_import_refused(changed, tmp_path, message)


# ---- files

FILES = [        # (change of a folder with three weight files, error)
    (lambda folder: (folder / "config.json").unlink(), "config.json can't be read .No such file.*; give another"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json can't be read .*; give another file"),
    (lambda folder: (folder / INDEX).unlink(), "neither model.safetensors nor a list of weight files .*No such file"),
    (lambda folder: (folder / INDEX).write_text('{"weight_map": []}'), "nor a list of weight files .*; correct it"),
    (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json can't be read"),
    (lambda folder: (folder / PART).unlink(), "00002-of-.* can't be read .No such file"),
    (lambda folder: os.truncate(folder / PART, 5000), "00002-of-.* is damaged or can't be read"),
]


@pytest.mark.parametrize("change, message", FILES, ids=[message[:40] for _, message in FILES])
def test_a_damaged_folder_is_refused(saved, tmp_path, change, message):
    saved("gpt2")[0].save_pretrained(tmp_path / "split", max_shard_size=250_000)
    change(tmp_path / "split")
    assert_import_refused(tmp_path / "split", tmp_path, message)


# ---- output

@pytest.mark.parametrize("name, act", [
    ("convert_from_hf", lambda theirs, ours, out: import_model(theirs, out)),
    ("convert_to_hf", lambda theirs, ours, out: export_model(ours, out))], ids=["import", "export"])
def test_output_is_complete_or_absent(saved, tmp_path, monkeypatch, name, act):
    """A full disk in the middle leaves no folder; the next attempt removes what a killed process left, and succeeds.
    Nothing is overwritten."""
    function, calls, out = getattr(convert, name), [], tmp_path / "out"
    given = saved("gpt2")[1], tmp_path / "imported", out
    import_model(*given[:2])

    def fail(*args):
        calls.append(1)
        if len(calls) == 9:
            raise OSError(28, os.strerror(28))
        return function(*args)

    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "left").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(convert, name, fail)
        with pytest.raises(OSError, match="No space left on device"):
            act(*given)
    assert len(calls) == 9 and not list(tmp_path.glob("*out*"))
    act(*given)
    assert out.exists() and not (out / "left").exists()
    with pytest.raises(UserError, match="out already exists, and nothing is overwritten; choose another name"):
        act(*given)


# ---- export

@pytest.mark.parametrize("choices, message", [
    (dict(normalization="RMSNorm"), "GPT2LMHeadModel needs normalization LayerNorm, not RMSNorm; export another model"),
    (dict(kv_channels=8), "GPT2LMHeadModel needs kv-channels 4, not 8"),
    (dict(num_attention_heads=3, kv_channels=5), "can have these sizes; export another model"),
    (dict(model="nano-llama", rotary_percent=0.5), "LlamaForCausalLM needs rotary-percent 1.0, not 0.5"),
    (dict(model="nano-llama", qk_layernorm=True, add_qkv_bias=True), "needs .*, not True"),
    (dict(model="nano-llama", use_rope_scaling=True, rotary_seq_len_interpolation_factor=2.0),
     "LlamaForCausalLM needs rotary-seq-len-interpolation-factor 1.0, not 2.0"),
    (dict(model="nano-moe", moe_shared_expert_intermediate_size=8),
     "nearest: MixtralForCausalLM needs moe-shared-expert-intermediate-size None, not 8")])
def test_a_model_that_no_family_fits_is_not_exported(transformers, choices, message):
    config = Config(**dict(num_layers=2, hidden_size=16, num_attention_heads=4) | choices)
    with pytest.raises(UserError, match=message):
        write_config(config.resolve(1).with_vocabulary(257), "float32")


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
    ("import nowhere --output OUT", r"nowhere/config.json can't be read \(No such file or directory\); give another")])
def test_a_mistyped_command_is_refused_in_one_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        main(arguments.split())
    assert "\n" not in str(error.value) and not os.listdir(tmp_path)


def test_without_transformers_it_says_what_to_install(saved, tmp_path, monkeypatch):
    import_model(saved("gpt2")[1], tmp_path / "imported")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments in (["import", str(saved("gpt2")[1]), "--output", str(tmp_path / "out")],
                      ["export", str(tmp_path / "imported"), str(tmp_path / "out")]):
        with pytest.raises(UserError, match="needs the package transformers, .*; pip install -r requirements"):
            main(arguments)
