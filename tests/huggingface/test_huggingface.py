"""Models from and to Hugging Face: the logits of Transformers' own, the same bits there and back, on any layout, in
bounded memory; and what is not built here is refused by its name.

Transformers computes RMSNorm in fp32 whatever the type of its input, so `exact` puts torch's own in its place: all else
is its code, in float64.
"""

import dataclasses
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.jobs import make_corpus
from support.harness import FixedData, build, difference, full_tensors, train_steps
from support.train_in_pool import main_on_rank, metric_points

from nanodomino.checkpoint.folders import checkpoints_of
from nanodomino.checkpoint.load import load_weights, read_single_process
from nanodomino.checkpoint.manifest import read_manifest, verify
from nanodomino.checkpoint.safe_load import SafeReader
from nanodomino.comm.world import LaunchInfo
from nanodomino.config.config import Config
from nanodomino.config.presets import PRESETS
from nanodomino.config.records import from_record
from nanodomino.corpus.folder import load_corpus
from nanodomino.data import TokenDataset
from nanodomino.errors import UserError
from nanodomino.generate.__main__ import main as generate_main
from nanodomino.huggingface import export_model as exporting, import_model as importing
from nanodomino.huggingface.__main__ import main, size_in_bytes
from nanodomino.huggingface.export_model import export_model, split_into_files
from nanodomino.huggingface.families import FAMILIES, family_of, read_config, write_config
from nanodomino.huggingface.import_model import import_model
from nanodomino.huggingface.safetensors_files import GENERATION
from nanodomino.huggingface.tensor_mapping import LLAMA_MODULES, map_tensors

HOMES = {"convert_from_hf": importing, "convert_to_hf": exporting}
VOCABULARY, LENGTH = 300, 24
SIZES = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=104, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2,
             max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=5, pad_token_id=None)
GPT2_SIZES = dict(vocab_size=VOCABULARY, n_embd=48, n_inner=104, n_layer=3, n_head=4, n_positions=LENGTH,
                  bos_token_id=None, eos_token_id=5)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192, rope_theta=500_000.0)
MODELS = {       # name: (model_type, its configuration, the first position)
    "gpt2": ("gpt2", GPT2_SIZES, 0),
    "gpt2 untied": ("gpt2", GPT2_SIZES | dict(tie_word_embeddings=False, n_inner=None, layer_norm_epsilon=1e-3), 0),
    "llama": ("llama", SIZES, 0),
    "llama tied": ("llama", SIZES | dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=10,
                                         rms_norm_eps=1e-3), 0),
    "llama 3.1": ("llama", SIZES | dict(max_position_embeddings=16384, num_key_value_heads=1, head_dim=32,
                                        rope_parameters=LLAMA3), 9000),
    "llama interpolated": ("llama",
                           SIZES | dict(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=5000.0)), 0),
    "llama with biases": ("llama", SIZES | dict(attention_bias=True, mlp_bias=True), 0),
    "mistral": ("mistral", SIZES | dict(sliding_window=LENGTH, head_dim=14), 0),
    "qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True), 0),
    "qwen3": ("qwen3", SIZES | dict(head_dim=20), 0),
}
DEFAULT = ["gpt2", "llama 3.1", "qwen2", "qwen3"]


def some(names, others=MODELS):
    """These by default, the others in the exhaustive run."""
    return [*names, *[pytest.param(name, marks=pytest.mark.exhaustive) for name in others if name not in names]]


@pytest.fixture(scope="module")
def package():
    pytest.importorskip("safetensors", reason="needs safetensors: pip install -r requirements-extra.txt")
    transformers = pytest.importorskip("transformers",
                                       reason="needs transformers: pip install -r requirements-extra.txt")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def saved(package, tmp_path_factory):
    """saved(name) -> (Transformers' model with random weights in float64, the folder that save_pretrained made of
    it)."""
    made = {}

    def saved(name):
        if name not in made:
            kind, sizes, _ = MODELS[name]
            torch.manual_seed(0)
            configuration = package.AutoConfig.for_model(kind, **sizes)
            model = package.AutoModelForCausalLM.from_config(configuration).double().eval()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.normal_(0.0, 0.2).add_(weight.dim() == 1)
            made[name] = model, tmp_path_factory.mktemp("saved") / "model"
            model.save_pretrained(made[name][1])
        return made[name]

    return saved


@pytest.fixture
def folder(saved, tmp_path):
    """folder(name) -> a copy of that folder, to be spoiled."""
    def folder(name="llama"):
        return Path(shutil.copytree(saved(name)[1], tmp_path / "spoiled"))

    return folder


def change(folder: Path, **values):
    """Lines of its config.json; ... takes one away."""
    path = folder / "config.json"
    record = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in record.items() if value is not ...}))


def change_tensors(folder: Path, act):
    """act({name: tensor}) on its weights."""
    from safetensors.torch import load_file, save_file
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    act(tensors)
    save_file(tensors, folder / "model.safetensors")


def exact(model):
    """Its norms in the type of their input."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = lambda x, norm=norm: F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return model


def config_of(checkpoint: Path) -> Config:
    return from_record(read_manifest(checkpoint)["config"], checkpoint)


def weights_of(checkpoint: Path) -> dict:
    """Every tensor of a checkpoint by its global name, the vocabulary's without padding."""
    config = config_of(checkpoint)
    index = SafeReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(record.size, dtype=record.properties.dtype) for name, record in index.items()
               if name.startswith("weight.")}
    read_single_process(tensors, SafeReader(checkpoint))
    vocabulary = ("embedding.word_embeddings", "output_layer")
    return {name: tensor[:config.vocab_size] if any(one in name for one in vocabulary) else tensor
            for name, tensor in tensors.items()}


def same_bits(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(one[name].dtype == other[name].dtype
                                              and torch.equal(one[name], other[name]) for name in one)


# ---- the numbers

def logits_rank(folder, tokens, positions, tp):
    config = dataclasses.replace(config_of(folder), tensor_model_parallel_size=tp)
    mesh, model, _, _ = build(config)
    load_weights(folder, model, mesh)
    model.parallel_output = False
    with torch.no_grad():
        return model(tokens, positions)


@pytest.mark.parametrize("name", some(DEFAULT))
def test_the_logits_are_those_of_transformers(pool, saved, tmp_path, name):
    """In float64, of a model whose weights and biases are all random; on two tensor-parallel ranks too, where there are
    two groups or more."""
    model, folder = saved(name)
    import_model(folder, tmp_path / "checkpoint")
    positions = MODELS[name][2] + torch.arange(LENGTH).expand(2, -1)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = exact(model)(tokens, position_ids=positions).logits
    assert expected.std() > 0.5, "or this shows nothing"
    for tp in range(1, min(2, config_of(tmp_path / "checkpoint").num_query_groups) + 1):
        for found in pool.run(logits_rank, tmp_path / "checkpoint", tokens, positions, tp, world_size=tp):
            assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def gradients_rank(folder, options, data):
    """Losses and gradients of a step from the imported weights."""
    config = dataclasses.replace(config_of(folder), **dict(dtype="float64", seq_length=LENGTH, global_batch_size=4,
                                                           micro_batch_size=4, slices=2) | options)
    built = build(config)
    load_weights(folder, built[1], built[0])
    return train_steps(built, config, data, range(1, 2))


LAYOUTS = {"one": {}, "tp2-columns": dict(tensor_model_parallel_size=2, columns=3),
           "pp2": dict(pipeline_model_parallel_size=2),
           "tp2-pp2-cut": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
           "tp4": dict(tensor_model_parallel_size=4, slices=1)}


@pytest.mark.parametrize("name, layout", [
    pytest.param(name, layout, marks=[] if (name, layout) in (("llama tied", "tp4"), ("qwen3", "tp2-pp2-cut"),
                                                              ("qwen2", "tp2-columns"), ("gpt2", "pp2"))
                 else pytest.mark.exhaustive)
    for name in MODELS for layout in LAYOUTS])
def test_every_gradient_is_that_of_transformers(pool, saved, tmp_path, name, layout):
    """In float64, on layouts: groups of heads as many as heads, fewer, one a rank; tied and untied."""
    model, folder = saved(name)
    import_model(folder, tmp_path / "checkpoint")
    config, options = config_of(tmp_path / "checkpoint"), LAYOUTS[layout]
    tp, pp = (options.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline"))
    if config.num_query_groups % tp:
        pytest.skip(f"{config.num_query_groups} groups on {tp} ranks are refused")
    rows = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    data = FixedData(rows[None, :, :-1], rows[None, :, 1:], torch.ones(1, 4, LENGTH))
    model.zero_grad()
    expected_loss = F.cross_entropy(exact(model)(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    expected_loss.backward()
    theirs = {one: weight.grad for one, weight in model.named_parameters()}
    expected = {mapping.name: mapping.conversion.from_hf([theirs[name] for name in mapping.hf_shapes], config)
                for mapping in map_tensors(config, family_of(config).modules)}
    outcomes = pool.run(gradients_rank, tmp_path / "checkpoint", options, data, world_size=tp * pp)
    found = full_tensors(outcomes, lambda outcome: outcome.gradients[0], tp)
    assert outcomes[0].losses == [pytest.approx(float(expected_loss.detach()), rel=1e-9)]
    assert difference(found, {one: gradient.reshape(found[one].shape) for one, gradient in expected.items()}) < 1e-9


@pytest.mark.parametrize("name", some(DEFAULT))
def test_transformers_loads_what_is_exported_and_nothing_is_lost(package, saved, tmp_path, name):
    """Import, export: the same tensors under the same names, and the same logits. Once more import: the same bits. In
    several files, or one."""
    model, folder = saved(name)
    import_model(folder, tmp_path / "one")
    for size in (10**9, 30_000):
        export_model(tmp_path / "one", tmp_path / str(size), None, size)
        again, told = package.AutoModelForCausalLM.from_pretrained(tmp_path / str(size), output_loading_info=True)
        assert not any(told.values()), told
        assert type(again) is type(model) or name == "mistral", "which is a Llama"
        tensors, expected = again.state_dict(), model.state_dict()
        assert same_bits(tensors, expected)
        tokens = torch.arange(LENGTH).unsqueeze(0)
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, again(tokens).logits)
            assert (exact(again)(tokens).logits - exact(model)(tokens).logits).abs().max() < 1e-12
        import_model(tmp_path / str(size), tmp_path / f"{size} again")
        assert same_bits(weights_of(tmp_path / "one"), weights_of(tmp_path / f"{size} again"))
        keep = ("vocab_size", "tie_word_embeddings", "eos_token_id", "bos_token_id", "rope_parameters", "head_dim")
        assert {one: getattr(again.config, one, None) for one in keep if name != "qwen2" or one != "head_dim"} == {
            one: getattr(model.config, one, None) for one in keep if name != "qwen2" or one != "head_dim"}
    assert len(list((tmp_path / "30000").glob("model-*.safetensors"))) > 3
    assert (tmp_path / "1000000000" / "model.safetensors").exists()
    assert len({one.stat().st_mode
                for one in (tmp_path / "30000").iterdir()}) == 1, "whoever may read one file may read all"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_each_type_comes_back_with_its_bits(saved, package, tmp_path, dtype):
    """The checkpoint has fp32, or float64; the type that was imported is the one that is exported, unless another is
    asked for."""
    torch.manual_seed(1)
    configuration = package.AutoConfig.for_model("gpt2", **GPT2_SIZES)
    model = package.AutoModelForCausalLM.from_config(configuration).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    told = import_model(tmp_path / "model", tmp_path / "one")
    assert dtype in told
    assert {one.dtype for one in weights_of(tmp_path / "one").values()} == {torch.float64 if dtype == "float64"
                                                                            else torch.float32}
    export_model(tmp_path / "one", tmp_path / "back", None, 10**9)
    assert same_bits(package.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict(), model.state_dict())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == dtype
    export_model(tmp_path / "one", tmp_path / "half", "bfloat16", 10**9)
    half = package.AutoModelForCausalLM.from_pretrained(tmp_path / "half").state_dict()
    assert same_bits(half, {name: weight.bfloat16() for name, weight in model.state_dict().items()})


def test_tensors_of_several_types_are_kept_in_one_that_holds_them_all(folder, tmp_path):
    def act(tensors):
        for i, name in enumerate(tensors):
            tensors[name] = tensors[name].to(torch.bfloat16 if i % 2 else torch.float16)

    spoiled = folder("gpt2")
    change_tensors(spoiled, act)
    assert "in float32" in import_model(spoiled, tmp_path / "one")


def test_the_paddings_rows_are_zeros(saved, tmp_path):
    """They are no words: nothing is said of them, and nothing exported."""
    import_model(saved("gpt2")[1], tmp_path / "one")
    words = {"weight.embedding.word_embeddings.weight": torch.empty(384, 48, dtype=torch.float64)}
    read_single_process(words, SafeReader(tmp_path / "one"))
    (words,) = words.values()
    assert not words[VOCABULARY:].any() and words[:VOCABULARY].any(dim=1).all()


# ---- other writers' files

def test_names_without_a_prefix_and_buffers_of_old_files_are_understood(saved, folder, tmp_path):
    """As OpenAI's gpt2 lies on the hub; and masks, which are no weights, of another type."""
    def act(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.uint8)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    spoiled = folder("gpt2")
    change_tensors(spoiled, act)
    change(spoiled, n_ctx=LENGTH, task_specific_params={"text-generation": {"do_sample": True}}, architectures=...)
    import_model(spoiled, tmp_path / "one")
    import_model(saved("gpt2")[1], tmp_path / "other")
    assert same_bits(weights_of(tmp_path / "one"), weights_of(tmp_path / "other"))


def test_a_llamas_config_of_older_versions_is_understood(saved, folder, tmp_path):
    """rope_theta and rope_scaling stood at the top; inv_freq was saved; what is left out is what Transformers takes it
    for."""
    spoiled = folder("llama 3.1")
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    change(spoiled, rope_parameters=..., rope_theta=500000.0, rope_scaling=scaling, torch_dtype="float64",
           pretraining_tp=1, rope_interleaved=False,
           is_llama_config=True, _name_or_path="x", hidden_act=..., rms_norm_eps=..., attention_bias=..., mlp_bias=...,
           tie_word_embeddings=...)
    change_tensors(spoiled,
                   lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    import_model(spoiled, tmp_path / "one")
    import_model(saved("llama 3.1")[1], tmp_path / "other")
    assert same_bits(weights_of(tmp_path / "one"), weights_of(tmp_path / "other"))
    assert config_of(tmp_path / "one") == config_of(tmp_path / "other")


def test_a_tied_file_may_hold_the_head_too_if_it_is_the_same(saved, folder, tmp_path):
    spoiled = folder("gpt2")
    change_tensors(spoiled,
                   lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}))
    import_model(spoiled, tmp_path / "one")
    import_model(saved("gpt2")[1], tmp_path / "other")
    assert same_bits(weights_of(tmp_path / "one"), weights_of(tmp_path / "other"))
    change_tensors(spoiled, lambda tensors: tensors["lm_head.weight"].view(-1)[-1:].add_(1))
    sentence = "lm_head.weight differs from its transformer.wte.weight; set tie_word_embeddings to false"
    with pytest.raises(UserError, match=sentence):
        import_model(spoiled, tmp_path / "third")


def test_the_tokenizers_files_and_special_tokens_come_along(folder, tmp_path):
    """There and back; the manifest knows them. Of a run they are taken from the folder of its text."""
    spoiled = folder("gpt2")
    (spoiled / GENERATION).unlink()
    for name in ("tokenizer.json", "merges.txt"):
        (spoiled / name).write_text(name)
    (spoiled / "training_args.bin").write_text("a program")
    assert "with tokenizer.json, merges.txt" in import_model(spoiled, tmp_path / "one")
    assert {"tokenizer.json", "merges.txt", GENERATION} < verify(tmp_path / "one")["files"].keys()
    export_model(tmp_path / "one", tmp_path / "back", None, 10**9)
    assert (tmp_path / "back" / "merges.txt").read_text() == "merges.txt"
    assert not (tmp_path / "back" / "training_args.bin").exists()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 5


# ---- a run

@pytest.mark.parametrize("name, tp, pp",
                         [("gpt2", 2, 1), ("llama", 2, 2), *[pytest.param(*one, marks=pytest.mark.exhaustive)
                                                             for one in (
    ("gpt2 untied", 4, 1), ("llama with biases", 2, 1), ("qwen2", 2, 2), ("qwen3", 1, 2), ("mistral", 2, 1))]])
def test_an_imported_model_is_trained_on_and_exported(pool, package, saved, tmp_path, name, tp, pp):
    """train.py takes the sizes from the checkpoint; its first loss is that of Transformers' model on the same text;
    what comes out after two steps loads, and has the run's weights, bit for bit."""
    model, folder = saved(name)
    corpus = load_corpus(make_corpus(tmp_path))
    (corpus.path / "tokenizer.json").write_text("{}")
    import_model(folder, tmp_path / "checkpoint")
    flags = (f"--load {tmp_path / 'checkpoint'} {'--finetune' if pp > 1 else ''} --data-path {corpus.path} --run-dir "
             f"{tmp_path / 'run'} "
             f"--train-iters 2 --global-batch-size 8 --micro-batch-size 2 --tp {tp} --pp {pp} --dtype float64 "
             f"--eval-iters 0 --sample-tokens 0 --device cpu --lr 1e-3").split()
    ended = pool.run(main_on_rank, flags, (), world_size=tp * pp)
    assert ended[0].code == 0, ended[0]
    config = config_of(checkpoints_of(tmp_path / "run")[0])
    batch = TokenDataset(corpus, "train", config.seq_length, config.seed).batch(0, 0, 0, 1, 8, 8)
    with torch.no_grad():
        expected = F.cross_entropy(exact(model)(batch.tokens).logits.flatten(0, 1), batch.labels.flatten())
    assert metric_points(tmp_path / "run", "loss")[0] == (1, pytest.approx(float(expected), rel=1e-9))

    assert "with tokenizer.json" in export_model(tmp_path / "run", tmp_path / "out", None, 10**9)
    again, told = package.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()) and again.config.eos_token_id == corpus.end_of_text
    import_model(tmp_path / "out", tmp_path / "again")
    assert same_bits(weights_of(tmp_path / "again"), weights_of(checkpoints_of(tmp_path / "run")[0]))
    assert not same_bits(weights_of(tmp_path / "again"), weights_of(tmp_path / "checkpoint"))


def test_generate_asks_for_a_tokenizer_where_the_checkpoint_knows_of_none(saved, tmp_path):
    import_model(saved("gpt2")[1], tmp_path / "one")
    with pytest.raises(UserError,
                       match="was imported, not trained, without a tokenizer.json; give a data folder as --data-path"):
        generate_main(["--load", str(tmp_path / "one"), "--device", "cpu"], LaunchInfo())


# ---- presets, by count: what is exported says of a model what its makers say

@pytest.mark.parametrize("choices", [*[dict(model=preset) for preset in PRESETS],
                                     *[dict(model="nano-llama") | choices for choices in (
    dict(rotary_seq_len_interpolation_factor=3.0), dict(disable_bias_linear=False),
    dict(layernorm_epsilon=0.5, rotary_base=7.0), dict(num_query_groups=1),
    dict(use_rope_scaling=True, rope_scaling_factor=3.0), dict(disable_bias_linear=False, add_qkv_bias=False),
    dict(kv_channels=14, add_qkv_bias=True),
    dict(untie_embeddings_and_output_weights=True, max_position_embeddings=999))]],
    ids=lambda choices: " ".join(map(str, choices.values())))
def test_every_preset_has_a_family_and_comes_back(choices):
    """Sizes and choices through config.json; no tensor is made."""
    config, preset = Config(**choices).resolve(1).with_vocabulary(50257), choices["model"]
    values = json.loads(json.dumps(write_config(config, "float32")))
    again = read_config(values, "config.json")
    model = [one.name for one in dataclasses.fields(Config) if one.metadata["affects"] == "model"
             and one.name != "model"]
    same = {name: getattr(config, name) for name in model if config.use_rope_scaling or name != "rope_scaling_factor"}
    assert {name: getattr(again, name) for name in same} == same
    assert FAMILIES[values["model_type"]] is family_of(config)
    if "gpt" in preset or preset == "nano":
        assert values["model_type"] == "gpt2"


def test_files_are_cut_between_our_tensors(saved):
    config = read_config(json.loads((saved("llama")[1] / "config.json").read_text()), "config.json")
    mappings = map_tensors(config, LLAMA_MODULES)
    for most in (1, 30_000, 10**9):
        files = split_into_files(mappings, torch.float32, most)
        assert sum(files, []) == mappings and all(files)
        sizes = [[4 * sum(shape.numel() for shape in mapping.hf_shapes.values()) for mapping in file] for file in files]
        assert all(sum(some) <= most or len(some) == 1 for some in sizes)
        assert all(sum(first) + second[0] > most for first, second in zip(sizes, sizes[1:])), "each as full as it goes"
    assert [size_in_bytes(text) for text in ("5GB", "500 mb", "7kb", "12")] == [5 * 10**9, 5 * 10**8, 7000, 12]


# ---- memory

def anonymous_bytes() -> int:
    """What this process has in memory that is no page of a file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux how much memory it has")
def test_no_model_is_ever_whole(package, tmp_path, monkeypatch):
    """60 MB in fp32, of tensors of 1 MB; a few of them are there at once, one way and the other."""
    sizes = GPT2_SIZES | dict(n_embd=256, n_inner=1024, n_layer=20, n_head=4)
    configuration = package.AutoConfig.for_model("gpt2", **sizes)
    package.AutoModelForCausalLM.from_config(configuration).bfloat16().save_pretrained(tmp_path / "model")
    seen = []
    for name in ("convert_from_hf", "convert_to_hf"):
        def look(*arguments, inner=getattr(HOMES[name], name)):
            made = inner(*arguments)
            seen.append(anonymous_bytes())
            return made
        monkeypatch.setattr(HOMES[name], name, look)
    before = anonymous_bytes()
    import_model(tmp_path / "model", tmp_path / "one")
    assert len(seen) == 244 and max(seen) - before < 12 * 2**20
    seen.clear()
    export_model(tmp_path / "one", tmp_path / "out", "float32", 4 * 10**6)
    assert len(seen) == 244 and max(seen) - before < 20 * 2**20


# ---- what is refused, and how

CONFIGS = [      # model, what its config.json says instead, the sentence
    ("gpt2", dict(activation_function="gelu"),
     'has activation_function "gelu", but nanodomino supports only "gelu_new" or "gelu_pytorch_tanh"'),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "has scale_attn_by_inverse_layer_idx true, but"),
    ("gpt2", dict(scale_attn_weights=False), "has scale_attn_weights false, but"),
    ("gpt2", dict(reorder_and_upcast_attn=True), "has reorder_and_upcast_attn true, but"),
    ("gpt2", dict(add_cross_attention=True), "has add_cross_attention true, but"),
    ("gpt2", dict(n_layer=0), "has n_layer 0, but it must be a positive whole number; correct it"),
    ("gpt2", dict(n_embd=...), "has n_embd null, but it must be a positive whole number"),
    ("gpt2", dict(n_head="4"), 'has n_head "4", but it must be a positive whole number'),
    ("gpt2", dict(n_positions=True), "has n_positions true, but it must be a positive whole number"),
    ("gpt2", dict(n_head=5),
     "describes an impossible model: hidden-size 48 must be divisible by num-attention-heads 5"),
    ("gpt2", dict(layer_norm_epsilon=-1.0), "has layer_norm_epsilon -1.0, but it must be a positive number"),
    ("gpt2", dict(tie_word_embeddings="yes"),
     'has tie_word_embeddings "yes", but nanodomino supports only true or false'),
    ("gpt2", dict(architectures=["BertForMaskedLM"]),
     'has the architecture "BertForMaskedLM", but only GPT2LMHeadModel, Llama'),
    ("gpt2", dict(architectures=["GPT2LMHeadModel", "LlamaForCausalLM"]),
     "has the architecture .*, but only GPT2LMHeadModel"),
    ("gpt2", dict(model_type="llama"),
     'has the architecture GPT2LMHeadModel and model_type "llama", which contradict each other'),
    ("gpt2", dict(model_type=["gpt2"]), "which contradict each other"),
    ("gpt2", dict(model_type="mamba", architectures=...),
     'has model_type "mamba" and no architectures, but only gpt2, llama, mistral, qwen2, qwen3 can be imported'),
    ("gpt2", dict(quantization_config={"bits": 4}),
     'has quantization_config {"bits": 4}, which nanodomino does not know'),
    ("llama", dict(logit_scale=2.0),
     "has logit_scale 2.0, which nanodomino does not know and which may change the logits"),
    ("llama", dict(output_multiplier=2.0), "has output_multiplier 2.0, which nanodomino does not know"),
    ("llama", dict(rope_interleaved=True), "has rope_interleaved true, which nanodomino does not know"),
    ("llama", dict(hidden_act="gelu"), 'has hidden_act "gelu", but nanodomino supports only "silu" or "swish"'),
    ("llama", dict(attention_bias=True),
     "has attention_bias true and mlp_bias false, but nanodomino has biases in both or in neither"),
    ("llama", dict(mlp_bias=True), "has attention_bias false and mlp_bias true, but"),
    ("llama", dict(num_key_value_heads=3),
     "describes an impossible model: num-attention-heads 4 must be divisible by num-query-groups 3"),
    ("llama", dict(partial_rotary_factor=0.5), "has partial_rotary_factor 0.5, but"),
    ("llama", dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
     "has partial_rotary_factor 0.5, but"),
    ("llama", dict(rope_scaling=dict(type="yarn", factor=4.0)),
     'has rope of type "yarn", but nanodomino supports only default, linear, llama3'),
    ("llama", dict(rope_scaling=dict(rope_type="dynamic", factor=4.0)), 'has rope of type "dynamic", but'),
    ("llama", dict(rope_scaling=[2.0]), r"has rope_scaling \[2.0\], but it must be an object"),
    ("llama", dict(rope_scaling=dict(rope_type="linear")), "has factor null, but it must be a positive number"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(low_freq_factor=2.0)),
     "has low_freq_factor 2.0, but nanodomino supports only 1"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(high_freq_factor=8.0)), "has high_freq_factor 8.0, but"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(original_max_position_embeddings=4096)),
     "scales rope from original_max_position_embeddings"),
    ("llama", dict(rope_scaling=LLAMA3, original_max_position_embeddings=4096),
     "scales rope from original_max_position_embeddings"),
    ("llama", dict(rope_parameters=dict(rope_type="default", attention_factor=2.0)),
     "has attention_factor 2.0, which nanodomino does not know"),
    ("llama", dict(rope_parameters=dict(full_attention=dict(rope_theta=1.0))),
     "has full_attention .*, which nanodomino does not know"),
    ("llama", dict(rope_parameters=dict(rope_theta=0)), "has rope_theta 0, but it must be a positive number"),
    ("mistral", dict(sliding_window=LENGTH - 1),
     f"has sliding_window {LENGTH - 1}, below max_position_embeddings {LENGTH}, but nanodomino's attention sees all"),
    ("mistral", dict(sliding_window=..., max_position_embeddings=8192),
     "has sliding_window 4096, below max_position_embeddings 8192, but"),
    ("mistral", dict(attention_bias=True), "has attention_bias true, which nanodomino does not know"),
    ("qwen2", dict(use_sliding_window=True), "has use_sliding_window true, but"),
    ("qwen2", dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
     "has layer_types .*, but nanodomino has full attention in every layer"),
    ("qwen3", dict(attention_bias=True), "has attention_bias true, but nanodomino supports only false"),
]


@pytest.mark.parametrize("name, values, sentence", CONFIGS,
                         ids=[f"{name} {' '.join(values)}" for name, values, _ in CONFIGS])
def test_a_model_that_is_not_built_here_is_refused_before_a_tensor_is_read(folder, tmp_path, name, values, sentence):
    spoiled = folder(name)
    change(spoiled, **values)
    with pytest.raises(UserError, match=sentence) as error:
        import_model(spoiled, tmp_path / "one")
    assert "config.json" in str(error.value) and "\n" not in str(error.value) and not list(tmp_path.glob("*one*"))


NAME = {"gpt2": "transformer.h.1.mlp.c_fc.weight", "llama": "model.layers.1.mlp.up_proj.weight"}
TENSORS = [      # what happens to the tensors, the sentence
    (lambda tensors, name: tensors.pop(name),
     r"lacks {name}, which a \w+ with this config.json has; download the folder again"),
    (lambda tensors, name: [tensors.pop(one) for one in list(tensors)[:5]], "lacks .*, .*, .* and others, which a"),
    (lambda tensors, name: tensors.update({name: tensors[name][1:].clone()}),
     r"{name} in .* has shape \(\d+, \d+\), but config.json implies \(\d+, \d+\)"),
    (lambda tensors, name: tensors.update({name: tensors[name].t().contiguous()}), "{name} in .* has shape"),
    (lambda tensors, name: tensors.update({"score.weight": torch.ones(2, 48)}),
     r"holds score.weight, which a \w+ with this config.json does not have"),
    # under both names
    (lambda tensors, name: tensors.update({name.partition(".")[2]: tensors[name].clone()}),
     "holds .*, which a .* does not have"),
    (lambda tensors, name: tensors.update({name: tensors[name].to(torch.int8)}),
     "{name} in .* has type I8, but weights must be of type F64, F32, F16, BF16"),
]


@pytest.mark.parametrize("number", range(len(TENSORS)))
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_tensor_that_is_missing_foreign_or_of_another_shape_is_named(folder, tmp_path, model, number):
    act, sentence = TENSORS[number]
    spoiled = folder(model)
    change_tensors(spoiled, lambda tensors: act(tensors, NAME[model]))
    with pytest.raises(UserError, match=sentence.format(name=NAME[model])):
        import_model(spoiled, tmp_path / "one")
    assert not list(tmp_path.glob("*one*"))


def test_an_untied_model_without_a_head_is_refused(folder, tmp_path):
    spoiled = folder("gpt2")
    change(spoiled, tie_word_embeddings=False)
    with pytest.raises(UserError, match="lacks lm_head.weight, which a GPT2LMHeadModel with this config.json has"):
        import_model(spoiled, tmp_path / "one")


def several(folder: Path, parts=3) -> Path:
    """The same weights in so many files, with an index."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / "model.safetensors")
    weight_map = {name: f"part-{i % parts}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    return folder


def rewrite(path: Path, act):
    values = json.loads(path.read_text())
    act(values)
    path.write_text(json.dumps(values))


INDEX = "model.safetensors.index.json"
FILES = [        # what happens to a folder with three files and an index, the sentence
    (lambda one: (one / "config.json").unlink(), "has no config.json; give the folder of a model"),
    (lambda one: (one / "config.json").write_text("{"), "config.json can't be read .*; download the folder again"),
    (lambda one: (one / "config.json").write_bytes(b"\xff"), "config.json can't be read"),
    (lambda one: (one / "config.json").write_text("[]"), "config.json must hold one JSON object"),
    (lambda one: (one / INDEX).unlink(),
     "has neither model.safetensors nor model.safetensors.index.json; give a folder in the format that"),
    (lambda one: (one / INDEX).write_text("{}"),
     "must have a weight_map from each tensor to a file in the same folder"),
    (lambda one: rewrite(one / INDEX, lambda index: index["weight_map"].update(x="../part-0.safetensors")),
     "must have a weight_map from each tensor to a file in the same folder"),
    (lambda one: rewrite(one / INDEX,
                         lambda index: index["weight_map"].update({"lm_head.weight": "part-0.safetensors"})),
     "lists lm_head.weight in part-0.safetensors, but it is not there"),
    (lambda one: (one / "part-1.safetensors").unlink(), "part-1.safetensors is missing; download the folder again"),
    (lambda one: os.truncate(one / "part-1.safetensors", 5000),
     "part-1.safetensors is damaged or not a safetensors file .*; download it again"),
    (lambda one: (one / "part-1.safetensors").write_bytes(b""), "part-1.safetensors is damaged"),
    (lambda one: (one / "part-1.safetensors").write_bytes(b"\xff" * 100), "part-1.safetensors is damaged"),
    (lambda one: shutil.copy(one / "part-1.safetensors", one / "part-2.safetensors"),
     "is in both .*part-1.safetensors and .*part-2.safetensors"),
    (lambda one: shutil.rmtree(one), "there is no folder .*; give one with config.json and model.safetensors"),
]


@pytest.mark.parametrize("act, sentence", FILES, ids=[sentence[:40] for _, sentence in FILES])
def test_a_broken_folder_is_refused(folder, tmp_path, act, sentence):
    spoiled = several(folder("gpt2"))
    act(spoiled)
    with pytest.raises(UserError, match=sentence) as error:
        import_model(spoiled, tmp_path / "one")
    assert "\n" not in str(error.value) and not list(tmp_path.glob("*one*"))


def test_several_files_are_as_good_as_one(saved, folder, tmp_path):
    import_model(several(folder("gpt2")), tmp_path / "one")
    import_model(saved("gpt2")[1], tmp_path / "other")
    assert same_bits(weights_of(tmp_path / "one"), weights_of(tmp_path / "other"))


def test_nothing_is_overwritten_and_names_must_fit(saved, tmp_path):
    (tmp_path / "there").write_text("")
    import_model(saved("gpt2")[1], tmp_path / "runs" / "one")
    for act in (lambda: import_model(saved("gpt2")[1], tmp_path / "there"),
                lambda: export_model(tmp_path / "runs" / "one", tmp_path / "there", None, 1)):
        with pytest.raises(UserError,
                           match="there already exists, and nothing is overwritten; choose another name, or move it "
                                 "away"):
            act()
    with pytest.raises(UserError, match="is a name for step 7, but an imported model is at step 0"):
        import_model(saved("gpt2")[1], tmp_path / "step-00000007")
    with pytest.raises(UserError,
                       match=r"can't be written \(Not a directory\); free some space, or choose another folder"):
        import_model(saved("gpt2")[1], tmp_path / "there" / "one")


@pytest.mark.parametrize("name", ["convert_from_hf", "convert_to_hf"])
def test_whole_or_not_there(saved, tmp_path, monkeypatch, name):
    """The disk is full, or the process is killed, in the middle: no folder of that name; the next time all is well."""
    import_model(saved("gpt2")[1], tmp_path / "one")
    if name == "convert_from_hf":
        act = partial(import_model, saved("gpt2")[1])
    else:
        act = partial(export_model, tmp_path / "one", dtype_name=None, max_bytes=10**9)
    inner, calls = getattr(HOMES[name], name), []

    def fail(*arguments):
        calls.append(1)
        if len(calls) == 9:
            raise OSError(28, os.strerror(28))
        return inner(*arguments)

    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "left").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(HOMES[name], name, fail)
        with pytest.raises(UserError,
                           match=r"out can't be written \(No space left on device\); free some space, or choose "
                                 r"another folder"):
            act(tmp_path / "out")
    assert len(calls) == 9 and not list(tmp_path.glob("*out*"))
    act(tmp_path / "out")
    assert not (tmp_path / "out" / "left").exists()


def small(**choices) -> Config:
    return Config(**dict(num_layers=2, hidden_size=16, num_attention_heads=4) | choices).resolve(1).with_vocabulary(257)


@pytest.mark.parametrize("choices, sentence", [
    (dict(normalization="RMSNorm"), "GPT2LMHeadModel needs normalization LayerNorm, not RMSNorm; export another model"),
    (dict(position_embedding_type="none"), "GPT2LMHeadModel needs position-embedding-type learned_absolute, not none"),
    (dict(swiglu=True), "GPT2LMHeadModel needs swiglu False, not True"),
    (dict(disable_bias_linear=True), "GPT2LMHeadModel needs disable-bias-linear False, not True"),
    (dict(kv_channels=8), "GPT2LMHeadModel needs kv-channels 4, not 8"),
    (dict(model="nano-llama", rotary_percent=0.5), "LlamaForCausalLM needs rotary-percent 1.0, not 0.5"),
    (dict(model="nano-llama", qk_layernorm=True, add_qkv_bias=True), "needs .*, not True"),
    (dict(model="nano-llama", use_rope_scaling=True, rotary_seq_len_interpolation_factor=2.0),
     "only one rope scaling, but this model has"),
])
def test_what_no_family_has_is_not_exported(choices, sentence):
    with pytest.raises(UserError, match=sentence):
        write_config(small(**choices), "float32")


def test_a_llama_whose_heads_do_not_divide_its_width_is_not_exported():
    with pytest.raises(UserError,
                       match="Transformers requires that a Llama's hidden-size 18 is divisible by its "
                             "num-attention-heads 4"):
        write_config(small(model="nano-llama", hidden_size=18, kv_channels=8), "float32")


def test_a_number_that_is_too_large_for_the_type_is_named(folder, tmp_path):
    spoiled = folder("gpt2")
    change_tensors(spoiled, lambda tensors: tensors[NAME["gpt2"]].view(-1)[7:8].fill_(-70000.0))
    import_model(spoiled, tmp_path / "one")
    with pytest.raises(UserError,
                       match=rf"{NAME['gpt2']} has values up to 70000, above the maximum 65504 of torch.float16; "
                             rf"export with --dtype bfloat16"):
        export_model(tmp_path / "one", tmp_path / "out", "float16", 10**9)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("arguments, sentence", [
    ("", "arguments are required: import | export; python -m nanodomino.huggingface --help lists every flag"),
    ("import DIR", "--output"), ("export DIR", "arguments are required: DIR; "),
    ("export DIR OUT --dtype int8", "int8"), ("import DIR --output X --dtype float16",
                                              "unrecognized arguments: --dtype float16; "),
    ("export DIR OUT --max-shard-size 5TB",
     "--max-shard-size must be a number of B, KB, MB or GB, but is 5TB; try 5GB"),
    ("export DIR OUT --max-shard-size 0", "--max-shard-size must be"),
    ("export nowhere OUT", "there is no folder nowhere to load from"),
    ("import nowhere --output OUT", "there is no folder nowhere; give one with config.json")])
def test_a_mistyped_command_is_one_sentence(package, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence) as error:
        main(arguments.split())
    assert "\n" not in str(error.value) and not os.listdir(tmp_path)


@pytest.mark.parametrize("arguments", ["import DIR --output X", "export DIR X"])
def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch, arguments):
    for name in [name for name in sys.modules if name.startswith("safetensors")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UserError,
                       match="need the package safetensors, which can't be imported .*; pip install -r "
                             "requirements-extra.txt"):
        main(arguments.split())


def test_the_commands_of_the_readme_run(package, saved, tmp_path, capsys):
    _, folder = saved("gpt2")
    assert main(["import", str(folder), "--output", str(tmp_path / "one")]) == 0
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "out"), "--dtype", "float32", "--max-shard-size",
                 "40KB"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "GPT2LMHeadModel, 40 tensors" in first and "in float64" in first and "in float32" in second
