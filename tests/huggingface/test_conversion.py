"""Imported models equal those of Transformers in logits and gradients, and come back with the same bits.

All comparisons are in float64, on models whose weights and biases are all random.
"""

import dataclasses
import json
import os

import pytest
import torch
import torch.nn.functional as F
from support import needs
from support.checkpoints import save_steps
from support.harness import FixedData, build, difference, full_tensors, tiny, train_steps
from support.huggingface import (GPT2_SIZES, LENGTH, LLAMA3, MODELS, VOCABULARY, change_config, change_tensors,
                                 config_of, published_tensors, same_bits, weights_of, with_exact_norms)
from support.runs import main_on_rank, make_corpus, metric_points

from nanodomino.checkpoint.format import verify
from nanodomino.checkpoint.load import checkpoints_of, load_weights
from nanodomino.comm.world import LaunchInfo
from nanodomino.corpus.prepared_folder import load_corpus
from nanodomino.data import TokenDataset
from nanodomino.errors import UserError
from nanodomino.generate.__main__ import main as generate_main
from nanodomino.huggingface import convert
from nanodomino.huggingface.__main__ import main
from nanodomino.huggingface.convert import GENERATION, export_model, import_model, special_tokens, split_into_files
from nanodomino.huggingface.families import FAMILIES, family_of, nearest_preset, read_config, write_config
from nanodomino.huggingface.tensors import LLAMA_MODULES, map_tensors
from nanodomino.settings.config import Config
from nanodomino.settings.presets import PRESETS


LARGE = 10**9            # bytes, above the size of any model here
BY_DEFAULT = ("gpt2", "llama 3.1", "qwen2", "qwen3", "mixtral", "qwen3-moe", "mistral with a window",
              "qwen2 with a window", "qwen3 with a window", "mixtral with a window", "qwen3-moe with a window")
SOME_MODELS = [*BY_DEFAULT, *(pytest.param(name, marks=pytest.mark.exhaustive)
                              for name in MODELS if name not in BY_DEFAULT)]
LAYOUTS = {"one": {}, "tp2-columns": dict(tensor_model_parallel_size=2, columns=3),
           "pp2": dict(pipeline_model_parallel_size=2),
           "tp2-pp2-cut": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
           "tp4": dict(tensor_model_parallel_size=4, slices=1),
           "tp2-ep2": dict(tensor_model_parallel_size=2, data_parallel_size=2, expert_model_parallel_size=2,
                           micro_batch_size=2)}
DEFAULT_COMBINATIONS = (("llama tied", "tp4"), ("qwen3", "tp2-pp2-cut"), ("qwen2", "tp2-columns"), ("gpt2", "pp2"),
                        ("mixtral", "tp2-ep2"), ("qwen3-moe", "one"), ("qwen3-moe unnormalized", "tp2-ep2"),
                        ("mistral with a window", "pp2"), ("qwen2 with a window", "tp2-pp2-cut"))


def random_tokens(*shape, seed=1):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# ---- the numbers

def logits_rank(folder, tokens, positions, tp):
    config = dataclasses.replace(config_of(folder), tensor_model_parallel_size=tp)
    mesh, model, _, _ = build(config)
    load_weights(folder, model)
    model.parallel_output = False
    with torch.no_grad():
        return model(tokens, positions)


@pytest.mark.parametrize("name", SOME_MODELS)
def test_logits_equal_those_of_transformers(pool, saved, tmp_path, name):
    """On one rank, and on two tensor-parallel ranks if the model has at least two groups of heads."""
    model, folder = saved(name)
    import_model(folder, tmp_path / "imported")
    tokens, positions = random_tokens(2, LENGTH), MODELS[name][2] + torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        expected = with_exact_norms(model)(tokens, position_ids=positions).logits
    assert expected.std() > 0.5, "or the comparison shows nothing"
    for tp in range(1, min(2, config_of(tmp_path / "imported").num_query_groups) + 1):
        for logits in pool.run(logits_rank, tmp_path / "imported", tokens, positions, tp, world_size=tp):
            assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()


def gradients_rank(folder, options, data):
    """Losses and gradients of one step from the imported weights."""
    config = dataclasses.replace(config_of(folder), **dict(
        dtype="float64", seq_length=LENGTH, global_batch_size=4, micro_batch_size=4, slices=2) | options)
    built = build(config)
    load_weights(folder, built[1])
    return train_steps(built, config, data, range(1, 2))


@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=[] if (name, layout) in DEFAULT_COMBINATIONS else pytest.mark.exhaustive)
    for name in MODELS for layout in LAYOUTS])
def test_gradients_equal_those_of_transformers(pool, saved, tmp_path, name, layout):
    """With as many groups as heads, with fewer, and with one group per rank; with tied and untied embeddings."""
    model, folder = saved(name)
    import_model(folder, tmp_path / "imported")
    config, options = config_of(tmp_path / "imported"), LAYOUTS[layout]
    tp, pp = (options.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline"))
    if "ep" in layout and not config.num_experts:
        pytest.skip("the model has no experts")
    if config.num_query_groups % tp:
        pytest.skip(f"{config.num_query_groups} groups can't be divided among {tp} ranks")
    rows = random_tokens(4, LENGTH + 1, seed=2)
    data = FixedData(rows[None, :, :-1], rows[None, :, 1:], torch.ones(1, 4, LENGTH))
    model.zero_grad()
    loss = F.cross_entropy(with_exact_norms(model)(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    gradients, expected = published_tensors(model, {name: weight.grad for name, weight in model.named_parameters()}), {}
    for mapping in map_tensors(config, family_of(config).modules):
        part = mapping.from_hf([gradients.pop(name) for name in mapping.hf_shapes], config)
        expected[mapping.name] = torch.cat([expected.get(mapping.name, torch.empty(0)), part.flatten()])
    assert not gradients
    outcomes = pool.run(gradients_rank, tmp_path / "imported", options, data,
                        world_size=tp * pp * options.get("data_parallel_size", 1))
    found = full_tensors(outcomes, lambda outcome: outcome.gradients[0])
    assert outcomes[0].losses == [pytest.approx(float(loss.detach()), rel=1e-9)]
    assert difference(found, {name: gradient.reshape(found[name].shape) for name, gradient in expected.items()}) < 1e-9


@pytest.mark.parametrize("name", SOME_MODELS)
def test_transformers_loads_an_export_and_nothing_is_lost(transformers, saved, tmp_path, name):
    """Import and export, in one file or several, give the same tensors, names and logits; a second import, the same
    bits."""
    model, folder = saved(name)
    import_model(folder, tmp_path / "imported")
    for size in (LARGE, 30_000):
        out = tmp_path / str(size)
        export_model(tmp_path / "imported", out, None, size)
        loaded, problems = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(problems.values()), problems
        assert type(loaded) is type(model) or name == "mistral", "a Mistral is exported as a Llama"
        assert same_bits(loaded.state_dict(), model.state_dict())
        tokens = torch.arange(LENGTH).unsqueeze(0)
        with torch.no_grad():
            difference = with_exact_norms(loaded)(tokens).logits - with_exact_norms(model)(tokens).logits
        assert difference.abs().max() < 1e-12
        (out / "consolidated.safetensors").touch()             # Mistral's folders hold the weights twice
        import_model(out, tmp_path / f"{size} again")
        assert same_bits(weights_of(tmp_path / "imported"), weights_of(tmp_path / f"{size} again"))
        for entry in ("vocab_size", "tie_word_embeddings", "eos_token_id", "bos_token_id", "rope_parameters",
                      *(["head_dim"] if not name.startswith("qwen2") else []),
                      *(["sliding_window", "use_sliding_window", "layer_types"] if "window" in name else [])):
            assert getattr(loaded.config, entry, None) == getattr(model.config, entry, None)
    assert (tmp_path / str(LARGE) / "model.safetensors").exists()
    files = [path.read_bytes() for path in (tmp_path / "30000").glob("model-*.safetensors")]
    tensors = sum(len(file) - 8 - int.from_bytes(file[:8], "little") for file in files)      # without the headers
    index = json.loads((tmp_path / "30000" / "model.safetensors.index.json").read_text())
    assert len(files) > 3 and index["metadata"]["total_size"] == tensors
    assert len({path.stat().st_mode for path in (tmp_path / "30000").iterdir()}) == 1, "all files have the same mode"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_each_dtype_comes_back_with_its_bits(saved, transformers, tmp_path, dtype):
    """A checkpoint holds fp32 or fp64; export uses the imported dtype unless another one is asked for."""
    torch.manual_seed(1)
    configuration = transformers.AutoConfig.for_model("gpt2", **GPT2_SIZES)
    model = transformers.AutoModelForCausalLM.from_config(configuration).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    assert f"in {dtype}" in import_model(tmp_path / "model", tmp_path / "imported")
    wide = torch.float64 if dtype == "float64" else torch.float32
    assert {weight.dtype for weight in weights_of(tmp_path / "imported").values()} == {wide}
    for asked, expected in ((None, dtype), ("bfloat16", "bfloat16")):
        out = tmp_path / f"{asked}"
        export_model(tmp_path / "imported", out, asked, LARGE)
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == expected
        assert same_bits(transformers.AutoModelForCausalLM.from_pretrained(out).state_dict(),
                         {name: weight.to(getattr(torch, expected)) for name, weight in model.state_dict().items()})


def test_tensors_of_several_dtypes_are_imported_in_a_dtype_that_holds_them_all(folder, tmp_path):
    def mix(tensors):
        for i, name in enumerate(tensors):
            tensors[name] = tensors[name].to(torch.bfloat16 if i % 2 else torch.float16)

    mixed = folder("gpt2")
    change_tensors(mixed, mix)
    assert "in float32" in import_model(mixed, tmp_path / "imported")


# ---- files of other writers

def assert_imports_alike(changed, original, tmp_path):
    import_model(changed, tmp_path / "changed")
    import_model(original, tmp_path / "original")
    assert same_bits(weights_of(tmp_path / "changed"), weights_of(tmp_path / "original"))
    assert config_of(tmp_path / "changed") == config_of(tmp_path / "original")


def test_names_without_prefix_and_old_buffers_are_understood(saved, folder, tmp_path):
    """OpenAI's gpt2 on the hub has such names, and stores masks, which are not weights. Some writers give its sizes
    the names of other families."""
    def as_openai(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.uint8)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    changed = folder("gpt2")
    change_tensors(changed, as_openai)
    change_config(changed, n_ctx=LENGTH, task_specific_params={"text-generation": {"do_sample": True}},
                  architectures=..., hidden_size=48, n_layer=..., num_hidden_layers=3)
    assert_imports_alike(changed, saved("gpt2")[1], tmp_path)


def test_a_config_json_of_an_older_llama_is_understood(saved, folder, tmp_path):
    """It has rope_theta and rope_scaling at the top, stores inv_freq, and leaves out what has Transformers' default."""
    changed = folder("llama 3.1")
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    change_config(changed, rope_parameters=..., rope_theta=500000.0, rope_scaling=scaling, torch_dtype="float64",
                  pretraining_tp=1, rope_interleaved=False, is_llama_config=True, _name_or_path="x", hidden_act=...,
                  rms_norm_eps=..., attention_bias=..., mlp_bias=..., tie_word_embeddings=...)
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    change_tensors(changed, lambda tensors: tensors.update(inv_freq))
    assert_imports_alike(changed, saved("llama 3.1")[1], tmp_path)


def test_a_tied_head_may_be_stored_if_it_equals_the_embedding(saved, folder, tmp_path):
    changed = folder("gpt2")
    change_tensors(changed, lambda tensors: tensors.update(
        {"lm_head.weight": tensors["transformer.wte.weight"].clone()}))
    assert_imports_alike(changed, saved("gpt2")[1], tmp_path)
    change_tensors(changed, lambda tensors: tensors["lm_head.weight"].view(-1)[-1:].add_(1))
    with pytest.raises(UserError, match="lm_head.weight differs from its transformer.wte.weight; set tie_word"):
        import_model(changed, tmp_path / "differs")


def test_tokenizer_files_and_special_tokens_are_copied_both_ways(folder, tmp_path):
    """The manifest lists them too; other files are not copied."""
    changed = folder("gpt2")
    (changed / GENERATION).unlink()
    special = dict(bos_token_id=4, eos_token_id=5, pad_token_id=6)
    change_config(changed, **special)
    for name in ("tokenizer.json", "merges.txt", "training_args.bin"):
        (changed / name).write_text(name)
    assert "with tokenizer.json, merges.txt" in import_model(changed, tmp_path / "imported")
    assert {"tokenizer.json", "merges.txt", GENERATION} < verify(tmp_path / "imported")["files"].keys()
    out = tmp_path / "out"
    export_model(tmp_path / "imported", out)
    assert (out / "merges.txt").read_text() == "merges.txt" and not (out / "training_args.bin").exists()
    assert special.items() <= json.loads((out / "config.json").read_text()).items()
    (changed / GENERATION).write_text('{"eos_token_id": 3}')
    import_model(changed, tmp_path / "own")
    assert (tmp_path / "own" / GENERATION).read_text() == '{"eos_token_id": 3}', "ids of the model's own file stay"


# ---- runs

@pytest.mark.parametrize("name, tp, pp", [("gpt2", 2, 1), ("llama", 2, 2), *[
    pytest.param(*combination, marks=pytest.mark.exhaustive) for combination in (
        ("gpt2 untied", 4, 1), ("llama with biases", 2, 1), ("qwen2", 2, 2), ("qwen3", 1, 2), ("mistral", 2, 1),
        ("mixtral", 2, 2), ("qwen3-moe", 2, 1))]])
def test_an_imported_model_is_trained_and_exported(pool, transformers, saved, tmp_path, name, tp, pp):
    """train.py takes the sizes from the checkpoint, and its first loss equals that of Transformers on the same text.
    The export after two steps loads, has the run's weights bit for bit, and the tokenizer of the run's data folder."""
    model, folder = saved(name)
    corpus = load_corpus(make_corpus(tmp_path))
    (corpus.path / "tokenizer.json").write_text("{}")
    (corpus.path / GENERATION).write_text('{"eos_token_id": 5, "top_k": 3}')
    import_model(folder, tmp_path / "imported")
    flags = (f"--load {tmp_path / 'imported'} {'--finetune' if pp > 1 else ''} --data-path {corpus.path} "
             f"--run-dir {tmp_path / 'run'} --train-iters 2 --global-batch-size 8 --micro-batch-size 2 --tp {tp} "
             f"--pp {pp} --dtype float64 --eval-iters 0 --sample-tokens 0 --device cpu --lr 1e-3").split()
    ended = pool.run(main_on_rank, flags, (), world_size=tp * pp)
    assert ended[0].code == 0, ended[0]
    checkpoint = checkpoints_of(tmp_path / "run")[0]
    config = config_of(checkpoint)
    batch = TokenDataset(corpus, "train", config.seq_length, config.seed).batch(0, 0, 0, 1, 8, 8)
    with torch.no_grad():
        expected = F.cross_entropy(with_exact_norms(model)(batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
    assert metric_points(tmp_path / "run", "loss")[0] == (1, pytest.approx(float(expected), rel=1e-9))

    out = tmp_path / "out"
    assert "with tokenizer.json" in export_model(tmp_path / "run", out)
    loaded, problems = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(problems.values()) and loaded.config.eos_token_id == corpus.end_of_text == 256
    assert json.loads((out / GENERATION).read_text()) == dict(eos_token_id=256, top_k=3), "what generate ends at"
    (out / GENERATION).write_text('{"eos_token_id": [5, 256]}')
    assert special_tokens(out, corpus.path / "meta.json")["eos_token_id"] == [5, 256], "a list may name others too"
    import_model(out, tmp_path / "again")
    assert same_bits(weights_of(tmp_path / "again"), weights_of(checkpoint))
    assert not same_bits(weights_of(tmp_path / "again"), weights_of(tmp_path / "imported"))


def test_generate_asks_for_a_tokenizer_if_the_checkpoint_has_none(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)      # SIGPIPE would end the tests at the next dead worker
    import_model(saved("gpt2")[1], tmp_path / "imported")
    with pytest.raises(UserError, match="was imported from a folder without a tokenizer.json; give a data"):
        generate_main(["--load", str(tmp_path / "imported"), "--device", "cpu"], LaunchInfo())


def test_the_commands_of_the_readme_run(saved, tmp_path, capsys):
    checkpoint, out = str(tmp_path / "imported"), str(tmp_path / "out")
    main(["import", str(saved("gpt2")[1]), "--output", checkpoint])
    main(["export", checkpoint, out, "--dtype", "float32"])
    imported, exported = capsys.readouterr().out.splitlines()
    assert "GPT2LMHeadModel, 40 tensors" in imported and "in float64" in imported and "in float32" in exported


# ---- without tensors

CHOICES = [dict(rotary_seq_len_interpolation_factor=3.0), dict(disable_bias_linear=False), dict(num_query_groups=1),
           dict(layernorm_epsilon=0.5, rotary_base=7.0), dict(use_rope_scaling=True, rope_scaling_factor=3.0),
           dict(disable_bias_linear=False, add_qkv_bias=False), dict(kv_channels=14, add_qkv_bias=True),
           dict(untie_embeddings_and_output_weights=True, max_position_embeddings=999)]
CHOICES_OF_EXPERTS = [dict(moe_router_topk=3, kv_channels=10), dict(qk_layernorm=True, ffn_hidden_size=77),
                      dict(qk_layernorm=True, moe_router_pre_softmax=True, moe_ffn_hidden_size=55, num_experts=1,
                           moe_router_topk=1)]


@pytest.mark.parametrize("choices", [*(dict(model=preset) for preset in PRESETS),
                                     *(dict(model="nano-llama") | choices for choices in CHOICES),
                                     # Qwen3-1.7B: without experts, but as wide as qwen3-30b-a3b
                                     dict(model="qwen3-0.6b", num_layers=28, hidden_size=2048, ffn_hidden_size=6144),
                                     dict(model="qwen3-0.6b", hidden_size=20, num_attention_heads=3, kv_channels=6,
                                          num_query_groups=3),
                                     *(dict(model="nano-moe") | choices for choices in CHOICES_OF_EXPERTS)],
                         ids=lambda choices: " ".join(map(str, choices.values())))
def test_every_preset_has_a_family_and_its_settings_come_back(choices):
    config, preset = Config(**choices).resolve(1).with_vocabulary(50257), choices["model"]
    values = json.loads(json.dumps(write_config(config, "float32")))
    restored = read_config(values, "config.json")
    settings = [field.name for field in dataclasses.fields(Config) if field.metadata["affects"] == "model"
                and field.name != "model" and (config.use_rope_scaling or field.name != "rope_scaling_factor")]
    assert {name: getattr(restored, name) for name in settings} == {name: getattr(config, name) for name in settings}
    assert FAMILIES[values["model_type"]] is family_of(config)
    assert values["model_type"] == "gpt2" or "gpt" not in preset and preset != "nano"


def test_files_end_between_parameters_and_are_as_full_as_possible(saved):
    config = read_config(json.loads((saved("llama")[1] / "config.json").read_text()), "config.json")
    mappings = map_tensors(config, LLAMA_MODULES)
    exactly_two = 4 * sum(shape.numel() for mapping in mappings[:2] for shape in mapping.hf_shapes.values())
    for limit in (1, 30_000, exactly_two, LARGE):
        files = split_into_files(mappings, torch.float32, limit)
        assert sum(files, []) == mappings and all(files)
        sizes = [[4 * sum(shape.numel() for shape in mapping.hf_shapes.values()) for mapping in file] for file in files]
        assert all(sum(file) <= limit or len(file) == 1 for file in sizes)
        assert all(sum(first) + second[0] > limit for first, second in zip(sizes, sizes[1:]))


@pytest.mark.table
@pytest.mark.parametrize("settings, preset", [
    (dict(hidden_size=1820), "llama3.2-1b"), (dict(hidden_size=3270), "gpt3-6.7b"),
    ({setting: value for setting, value in PRESETS["qwen3-30b-a3b"].items()
      if not setting.startswith(("num_experts", "moe_"))}, "llama3.2-1b")])
def test_the_nearest_preset_is_the_nearest_by_ratio_and_has_experts_only_if_the_model_has(settings, preset):
    """By difference, 1820 would be nearest to gpt2-xl's 1600, and 3270 to gpt3-2.7b's 2560."""
    assert nearest_preset(settings) == preset


def test_missing_entries_have_the_defaults_of_transformers(transformers):
    for model_type, family in FAMILIES.items():
        values = transformers.AutoConfig.for_model(model_type).to_dict()
        values |= values.get("rope_parameters") or {}
        values |= {entry: values[name] for name, entry in family.aliases.items() if name in values}
        defaults = {entry: supported[0] for entry, supported in family.supported.items()} | family.defaults
        if values.get("use_sliding_window") is False:
            del defaults["sliding_window"]
        assert {entry: values.get(entry) for entry in defaults} == defaults, model_type
        assert values.get("rope_theta", 1e4) == family.defaults.get("rope_theta", 1e4), model_type


def test_entries_that_cannot_change_the_logits_are_ignored(saved):
    """Published files call num_experts what Transformers 5 calls num_local_experts."""
    values = json.loads((saved("qwen3-moe")[1] / "config.json").read_text())
    config = read_config(values, "config.json")
    values |= dict(num_experts=values.pop("num_local_experts", None) or values["num_experts"])
    assert "num_experts" in write_config(config, "float32"), "older versions know only this name"
    harmless = dict(output_router_logits=True, router_aux_loss_coef=0.5, use_cache=True, torch_dtype="bfloat16",
                    initializer_range=0.02, logit_scale=0, attention_multiplier=None, use_flag=False,
                    unsloth_version="2025.1", is_llama_config=True)
    assert read_config(values | harmless, "config.json") == config


def save_rank(config, folder):
    assert save_steps(config, folder) == [None]


def test_export_says_that_it_leaves_depths_and_document_boundaries_out(pool, tmp_path):
    """The other weights come from generators seeded by their names, so they equal those of a model without depths."""
    load_file = needs("safetensors.torch").load_file
    for depths in (0, 2):
        config = tiny(1, mtp_num_layers=depths, reset_attention_mask=depths > 0, dtype="float32")
        pool.run(save_rank, config, str(tmp_path / str(depths)), world_size=1)
    said = [export_model(tmp_path / str(depths), tmp_path / f"out-{depths}") for depths in (0, 2)]
    assert said[1] == said[0].replace("out-0", "out-2") + (
        "; without the 2 depths of multi-token prediction; trained with --reset-attention-mask, so give Transformers "
        "one document at a time")
    assert same_bits(*(load_file(tmp_path / f"out-{depths}" / "model.safetensors") for depths in (0, 2)))


# ---- memory

def anonymous_bytes() -> int:
    """The memory of this process that is not mapped from a file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux how much memory a process has")
def test_no_model_is_ever_in_memory_as_a_whole(transformers, tmp_path, monkeypatch):
    """The model has 32 MB in fp32, and its tensors 1 MB; import and export hold a few tensors at a time. The experts of
    a layer of the second model have 19 MB together; import and export hold one or a few of them."""
    configuration = transformers.AutoConfig.for_model("gpt2", **GPT2_SIZES | dict(n_embd=256, n_inner=1024, n_layer=10))
    model = transformers.AutoModelForCausalLM.from_config(configuration).bfloat16()
    model.save_pretrained(tmp_path / "model")
    seen, before = [], anonymous_bytes()
    for name in ("convert_from_hf", "convert_to_hf"):
        def observed(*args, function=getattr(convert, name)):
            tensors = function(*args)
            seen.append(anonymous_bytes())
            return tensors
        monkeypatch.setattr(convert, name, observed)
    import_model(tmp_path / "model", tmp_path / "imported")
    assert len(seen) == 124 and max(seen) - before < 12 * 2**20
    seen.clear()
    export_model(tmp_path / "imported", tmp_path / "out", "float32", 4 * 10**6)
    assert len(seen) == 124 and max(seen) - before < 20 * 2**20
    seen.clear()
    sizes = MODELS["mixtral"][1] | dict(hidden_size=256, intermediate_size=256, num_local_experts=24)
    configuration = transformers.AutoConfig.for_model("mixtral", **sizes)
    transformers.AutoModelForCausalLM.from_config(configuration).save_pretrained(tmp_path / "experts")
    before = anonymous_bytes()
    import_model(tmp_path / "experts", tmp_path / "imported experts")
    export_model(tmp_path / "imported experts", tmp_path / "out of experts", "float32", 4 * 10**6)
    assert len(seen) > 2 * 2 * 3 * 24 and max(seen) - before < 12 * 2**20
