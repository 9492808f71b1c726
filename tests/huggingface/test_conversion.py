"""Imported models equal those of Transformers in logits and gradients, and come back with the same bits.

All comparisons are in float64, on models whose weights and biases are all random.
"""

import copy
import dataclasses
import os

import pytest
import torch
import torch.nn.functional as F
from support import needs
from support.checkpoints import save_steps
from support.harness import FixedData, build, difference, full_tensors, tiny, train_steps
from support.huggingface import (GPT2_SIZES, LENGTH, MODELS, VOCABULARY, change_config, change_tensors,
                                 config_of, same_bits, weights_of, with_exact_norms)
from support.runs import main_on_rank, make_corpus, metric_points

from nanodomino.checkpoint.format import verify
from nanodomino.checkpoint.load import checkpoints_of, full_weights, load_weights
from nanodomino.comm.world import LaunchInfo
from nanodomino.corpus.prepared_folder import load_corpus
from nanodomino.data import TokenDataset
from nanodomino.errors import UserError
from nanodomino.files import read_json
from nanodomino.generate.__main__ import main as generate_main
from nanodomino.huggingface import convert
from nanodomino.huggingface.__main__ import main
from nanodomino.huggingface.convert import GENERATION, export_model, import_model, special_tokens
from nanodomino.huggingface.families import load_configuration, nearest_preset, read_config, write_config
from nanodomino.settings.config import Config
from nanodomino.settings.presets import PRESETS


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


# ---- the numbers

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
    rows = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    data = FixedData(rows[None, :, :-1], rows[None, :, 1:], torch.ones(1, 4, LENGTH))
    model.zero_grad()
    loss = F.cross_entropy(with_exact_norms(model)(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    with torch.no_grad():                                      # the gradients as the weights of a model
        graded = copy.deepcopy(model)
        for weight, source in zip(graded.parameters(), model.parameters(), strict=True):
            weight.copy_(source.grad)
    graded.save_pretrained(tmp_path / "gradients")
    import_model(tmp_path / "gradients", tmp_path / "expected", check=False)
    outcomes = pool.run(gradients_rank, tmp_path / "imported", options, data,
                        world_size=tp * pp * options.get("data_parallel_size", 1))
    assert outcomes[0].losses == [pytest.approx(float(loss.detach()), rel=1e-9)]
    found = full_tensors(outcomes, lambda outcome: outcome.gradients[0])
    expected = {name: gradient.view_as(found[name]) for name, gradient in full_weights(tmp_path / "expected").items()}
    assert difference(found, expected) < 1e-9


@pytest.mark.parametrize("name", SOME_MODELS)
def test_logits_are_exact_and_transformers_loads_an_export_with_the_same_bits(
        transformers, saved, tmp_path, monkeypatch, name):
    """A second import gives the same bits, also from several files."""
    model, folder = saved(name)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained",
                      lambda *args, **options: with_exact_norms(load(*args, **options)))
        result = import_model(folder, tmp_path / "imported")
    assert float(result.rpartition("equal to Transformers' up to ")[2]) < 1e-9
    out, split = tmp_path / "out", tmp_path / "split"
    export_model(tmp_path / "imported", out)
    loaded, problems = load(out, output_loading_info=True)
    assert not any(problems.values()), problems
    assert type(loaded) is type(model) or name == "mistral", "a Mistral is exported as a Llama"
    assert same_bits(loaded.state_dict(), model.state_dict())
    for entry in ("vocab_size", "tie_word_embeddings", "eos_token_id", "bos_token_id", "rope_parameters",
                  *(["head_dim"] if not name.startswith("qwen2") else []),
                  *(["sliding_window", "use_sliding_window", "layer_types"] if "window" in name else [])):
        assert getattr(loaded.config, entry, None) == getattr(model.config, entry, None)
    (out / "consolidated.safetensors").touch()                 # Mistral's folders hold the weights twice
    model.save_pretrained(split, max_shard_size=90_000)
    assert len([*split.glob("model-*.safetensors")]) > 1
    for source in (out, split):
        import_model(source, again := tmp_path / f"{source.name} again")
        assert same_bits(weights_of(tmp_path / "imported"), weights_of(again))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
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
        export_model(tmp_path / "imported", out, asked)
        assert read_json(out / "config.json")["dtype"] == expected
        assert same_bits(transformers.AutoModelForCausalLM.from_pretrained(out).state_dict(),
                         {name: weight.to(getattr(torch, expected)) for name, weight in model.state_dict().items()})


def test_tensors_of_several_dtypes_are_imported_in_a_dtype_that_holds_them_all(folder, tmp_path):
    mixed = folder("gpt2")
    change_tensors(mixed, lambda tensors: tensors.update({
        name: tensor.to([torch.bfloat16, torch.float16][i % 2]) for i, (name, tensor) in enumerate(tensors.items())}))
    assert "in float32" in import_model(mixed, tmp_path / "imported")


# ---- files of other writers

def assert_imports_alike(changed, original, tmp_path):
    import_model(changed, tmp_path / "changed")
    import_model(original, tmp_path / "original")
    assert same_bits(weights_of(tmp_path / "changed"), weights_of(tmp_path / "original"))
    assert config_of(tmp_path / "changed") == config_of(tmp_path / "original")


def test_names_without_prefix_and_old_buffers_are_understood(saved, folder, tmp_path):
    """OpenAI's gpt2 on the hub has such names, and stores masks, which are not weights."""
    def as_openai(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.uint8)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    changed = folder("gpt2")
    change_tensors(changed, as_openai)
    change_config(changed, n_ctx=LENGTH, architectures=..., hidden_size=48, n_layer=..., num_hidden_layers=3)
    assert_imports_alike(changed, saved("gpt2")[1], tmp_path)


def test_a_tied_head_may_be_stored_if_it_equals_the_embedding(saved, folder, tmp_path):
    changed = folder("gpt2")
    change_tensors(changed, lambda tensors: tensors.update(
        {"lm_head.weight": tensors["transformer.wte.weight"].clone()}))
    assert_imports_alike(changed, saved("gpt2")[1], tmp_path)
    change_tensors(changed, lambda tensors: tensors["lm_head.weight"].view(-1)[-1:].add_(1))
    with pytest.raises(UserError, match="the logit of the same token is .* in Transformers and .* in nanodomino"):
        import_model(changed, tmp_path / "differs")


def test_tokenizer_files_and_special_tokens_are_copied_both_ways(folder, tmp_path, capsys):
    """By the commands of the README. The manifest lists them too; other files are not copied."""
    changed = folder("gpt2")
    (changed / GENERATION).unlink()
    special = dict(bos_token_id=4, eos_token_id=5, pad_token_id=6)
    change_config(changed, **special)
    for name in ("tokenizer.json", "merges.txt", "training_args.bin"):
        (changed / name).write_text("{}")
    out = tmp_path / "out"
    main(["import", str(changed), "--output", str(tmp_path / "imported")])
    main(["export", str(tmp_path / "imported"), str(out), "--dtype", "float32"])
    imported, exported = capsys.readouterr().out.splitlines()
    for words in ("GPT2LMHeadModel, 40 tensors", "in float64", "with tokenizer.json, merges.txt"):
        assert words in imported
    assert "in float32" in exported
    assert {"tokenizer.json", "merges.txt", GENERATION} < verify(tmp_path / "imported")["files"].keys()
    assert (out / "merges.txt").read_text() == "{}" and not (out / "training_args.bin").exists()
    assert special.items() <= read_json(out / "config.json").items()
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
    assert read_json(out / GENERATION) == dict(eos_token_id=256, top_k=3), "what generate ends at"
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


# ---- without tensors

CHOICES = [dict(disable_bias_linear=False), dict(disable_bias_linear=False, add_qkv_bias=False),
           dict(use_rope_scaling=True, rope_scaling_factor=3.0), dict(kv_channels=14, add_qkv_bias=True),
           dict(model="qwen3-0.6b", hidden_size=2048, ffn_hidden_size=6144),        # as wide as qwen3-30b-a3b
           dict(model="nano-moe", qk_layernorm=True, num_experts=1, moe_router_topk=1, moe_router_pre_softmax=True)]


@pytest.mark.parametrize("choices", [*(dict(model=preset) for preset in PRESETS),
                                     *(dict(model="nano-llama") | choices for choices in CHOICES)],
                         ids=lambda choices: " ".join(map(str, choices.values())))
def test_every_preset_has_a_family(transformers, tmp_path, choices):
    """write_config() compares what it has written with the model. A file restores the same."""
    config, preset = Config(**choices).resolve(1).with_vocabulary(50257), choices["model"]
    (configuration := write_config(config, "float32")).save_pretrained(tmp_path)
    assert read_config(load_configuration(tmp_path), "") == read_config(configuration, "")
    assert configuration.model_type == "gpt2" or "gpt" not in preset and preset != "nano"


@pytest.mark.table
@pytest.mark.parametrize("settings, preset", [
    (dict(hidden_size=1820), "llama3.2-1b"), (dict(hidden_size=3270), "gpt3-6.7b"),
    ({setting: value for setting, value in PRESETS["qwen3-30b-a3b"].items()
      if not setting.startswith(("num_experts", "moe_"))}, "llama3.2-1b")])
def test_the_nearest_preset_is_the_nearest_by_ratio_and_has_experts_only_if_the_model_has(settings, preset):
    """By difference, 1820 would be nearest to gpt2-xl's 1600, and 3270 to gpt3-2.7b's 2560."""
    assert nearest_preset(settings) == preset


def test_export_says_that_it_leaves_depths_and_document_boundaries_out(pool, tmp_path):
    """The other weights come from generators seeded by their names, so they equal those of a model without depths."""
    load_file = needs("safetensors.torch").load_file
    for depths in (0, 2):
        config = tiny(1, mtp_num_layers=depths, reset_attention_mask=depths > 0, dtype="float32")
        assert pool.run(save_steps, config, str(tmp_path / str(depths)), world_size=1) == [[None]]
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
@pytest.mark.parametrize("family, more, tensors", [
    ("gpt2", GPT2_SIZES | dict(n_embd=256, n_inner=1024, n_layer=10), 124),
    ("mixtral", MODELS["mixtral"][1] | dict(hidden_size=256, intermediate_size=256, num_local_experts=24), 162)])
def test_without_the_proof_no_model_is_in_memory_as_a_whole(transformers, tmp_path, monkeypatch, family, more, tensors):
    """The models have 32 and 59 MB in fp32, tensors of at most 1 MB, and in a layer experts of 19 MB together."""
    configuration = transformers.AutoConfig.for_model(family, **more)
    transformers.AutoModelForCausalLM.from_config(configuration).bfloat16().save_pretrained(tmp_path / "model")
    seen, before = [], anonymous_bytes()
    for name in ("convert_from_hf", "convert_to_hf"):
        def observed(*args, function=getattr(convert, name)):
            seen.append(anonymous_bytes())
            return function(*args)
        monkeypatch.setattr(convert, name, observed)
    import_model(tmp_path / "model", tmp_path / "imported", check=False)
    assert len(seen) == tensors and max(seen) - before < 12 * 2**20
    export_model(tmp_path / "imported", tmp_path / "out", "float32")
    assert len(seen) >= 2 * tensors and max(seen) - before < 20 * 2**20
