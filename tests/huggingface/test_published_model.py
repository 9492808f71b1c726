"""A published model, SmolLM2-135M-Instruct, continues, trains and is exported here as in Transformers.

Skipped unless its package is installed: see tests/support/smollm2.py. All comparisons are in fp32, the dtype of the
weights, so they have its rounding errors.
"""

import pytest
import torch
import torch.nn.functional as F

from data.prepare import prepare
from nanodomino.checkpoint.load import load_weights
from nanodomino.corpus.prepared_folder import load_corpus
from nanodomino.corpus.tokenizer import build_tokenizer
from nanodomino.data import TokenDataset
from nanodomino.generate.generation import generate
from nanodomino.huggingface.export_model import export_model
from nanodomino.huggingface.import_model import import_model
from support import ROOT
from support.harness import build
from support.huggingface import config_of
from support.smollm2 import write_smollm2
from support.runs import main_on_rank, metric_points

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def smollm2(transformers, tmp_path_factory):
    """(Transformers' model, its folder, the checkpoint that it was imported to)"""
    folder = write_smollm2(tmp_path_factory.mktemp("smollm2") / "model")
    import_model(folder, folder.with_name("imported"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder), folder, folder.with_name("imported")


def logits_and_text(checkpoint, ids, max_tokens):
    """The logits of a prompt, and the prompt with its most likely continuation."""
    mesh, model, _, _ = build(config_of(checkpoint))
    load_weights(checkpoint, model)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))
    return logits, generate(model, mesh, ids, max_tokens, model.config.vocab_size, temperature=0.0)


@pytest.mark.exhaustive
def test_smollm2_knows_the_capital_of_france(pool, transformers, smollm2):
    model, folder, checkpoint = smollm2
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT)["input_ids"]
    assert build_tokenizer(folder).encode(PROMPT).tolist() == ids
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits
        text = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    (outcome,) = pool.run(logits_and_text, checkpoint, ids, 12, world_size=1)
    assert (outcome[0] - expected).abs().max() < 1e-4 * expected.abs().max()
    assert outcome[1] == text and tokenizer.decode(text).startswith(f"{PROMPT} Paris.")


def loss_of(model, corpus, split, step, samples, shuffle) -> float:
    batch = TokenDataset(corpus, split, 64, seed=1234).batch(step, 0, 0, 1, samples, samples, shuffle)
    with torch.no_grad():
        return float(F.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten()))


@pytest.mark.exhaustive
def test_smollm2_is_fine_tuned_with_the_losses_of_transformers(pool, transformers, smollm2, tmp_path):
    """The first loss is that of the published weights, the validation loss that of the export after three steps."""
    model, folder, checkpoint = smollm2
    prepare([ROOT / "README.md", ROOT / "docs"], tmp_path / "data", folder, progress=False)
    corpus, run = load_corpus(tmp_path / "data"), tmp_path / "run"
    flags = (f"--load {checkpoint} --finetune --data-path {corpus.path} --run-dir {run} --pp 2 --tp 1 --train-iters 3 "
             "--global-batch-size 8 --micro-batch-size 2 --seq-length 64 --lr 1e-5 --eval-iters 1 --sample-tokens 0 "
             "--device cpu --seed 1234").split()
    ended = pool.run(main_on_rank, flags, (), world_size=2)
    assert ended[0].code == 0, ended[0]
    export_model(run, tmp_path / "tuned", None, 10**9)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    first, last = loss_of(model, corpus, "train", 0, 8, True), loss_of(tuned, corpus, "valid", 0, 8, False)
    before = loss_of(model, corpus, "valid", 0, 8, False)
    assert metric_points(run, "loss")[0] == (1, pytest.approx(first, rel=1e-5))
    assert metric_points(run, "valid_loss")[-1] == (3, pytest.approx(last, rel=1e-5))
    assert last < before
