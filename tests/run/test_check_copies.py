"""Copies of a parameter are compared bit by bit; those that differ are named with their ranks."""

import pytest
import torch
from support.harness import build, random_data, tiny

import train
from nanodomino.run import check_copies
from nanodomino.run.determinism import checksum, drift_warning

BOX = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=12)


def nudged_rank(config, data, nudges):
    """Return the warnings before and after each (rank, name, place) of `nudges` changes the last bit of an element."""
    mesh, model, optimizer, stage = build(config)
    train.train_step(1, stage, optimizer, data, config, mesh)
    before = drift_warning(model, optimizer, mesh)
    for rank, name, place in nudges:
        if rank == torch.distributed.get_rank():
            weight = dict(model.named_parameters())[name.removeprefix("the master of ")]
            numbers = weight.detach()
            if name.startswith("the master of "):              # of the own part, which begins with it
                numbers = optimizer.bucket_of[weight].master
                place += optimizer.bucket_of[weight].offsets[weight]
            numbers.view(-1).view({4: torch.int32, 2: torch.int16}[numbers.element_size()])[place] ^= 1
    return before, drift_warning(model, optimizer, mesh)


EXPERTS = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2, num_experts=4, num_layers=2,
               disable_bias_linear=True, moe_router_enable_expert_bias=True)


@pytest.mark.parametrize("options, nudges, said", [
    (BOX, [], []),
    (BOX, [(1, "layers.0.attention.norm.weight", 0), (2, "layers.0.mlp.dense_h_to_4h.weight", 5)],
     ["layers.0.attention.norm.weight differs between rank 0, 2, 3 and rank 1; ",
      "layers.0.mlp.dense_h_to_4h.weight differs between rank 0 and rank 2)"]),
    (BOX, [(5, "the master of final_norm.weight", 3), (7, "embedding.word_embeddings.weight", 9)],
     ["the master of final_norm.weight differs between rank 4 and rank 5",
      "embedding.word_embeddings.weight differs between rank 1, 3, 5 and rank 7"]),
    (BOX, [(4, f"layers.2.{name}", 1) for name in ("attention.norm.weight", "attention.norm.bias", "mlp.norm.weight",
                                                   "mlp.norm.bias")],
     ["layers.2.attention.norm.weight differs between rank 4 and rank 5, 6, 7", ", and 1 more)"]),
    # with four replicas and ep 2, an expert has a copy two replicas away
    (EXPERTS, [(4, "layers.0.mlp.experts.dense_h_to_4h", 5)],
     ["(layers.0.mlp.experts.dense_h_to_4h differs between rank 0 and rank 4)"]),
    (EXPERTS, [(5, "layers.1.mlp.router.expert_bias", 2)],
     ["(layers.1.mlp.router.expert_bias differs between rank 0, 1, 2, 3, 4, 6, 7 and rank 5)"])],
    ids=["sound", "tp and dp", "master and tied", "many", "expert", "expert bias"])
def test_copies_that_differ_are_named_with_their_ranks(pool, options, nudges, said):
    """Replicated parameters over tp, all over dp, the tied embedding on the first and last stage, the router on all
    ranks: each is compared only with its own copies."""
    config = tiny(8, **options, dtype="bfloat16")
    results = pool.run(nudged_rank, config, random_data(config, 1), nudges)
    assert len(set(results)) == 1 and results[0][0] == "", results[0]
    assert all(words in results[0][1] for words in said) and bool(results[0][1]) == bool(said), results[0][1]


def test_the_checksum_depends_on_every_bit_and_its_place(monkeypatch):
    """Also if one element goes up and another down by one bit, which a plain sum would miss; for any chunk size."""
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    before = int(checksum(weight))
    for bit in range(32):
        changed = weight.clone()
        changed.view(torch.int32)[777] ^= torch.tensor(1 << bit if bit < 31 else -1 << 31,
                                                       dtype=torch.int64).to(torch.int32)
        assert int(checksum(changed)) != before
    monkeypatch.setattr(check_copies, "CHUNK", 64)
    before = int(checksum(weight))
    for first, other in ((3, 500), (3, 3 + 64), (0, 1)):
        changed = weight.clone()
        changed.view(torch.int32)[first] += 1
        changed.view(torch.int32)[other] -= 1
        assert int(checksum(changed)) != before
    assert int(checksum(weight.view(10, 100))) == before
