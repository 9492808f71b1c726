"""Which kernels and how many threads a run chooses. Copies of a parameter that differ in a bit are named."""

import contextlib
import io
import os
from unittest import mock

import pytest
import torch
from support.harness import build, random_data, tiny
from support.runs import TINY, main_on_rank, make_corpus

import train
from nanodomino.comm.world import StandIn, standing_for
from nanodomino.run import determinism
from nanodomino.run.determinism import checksum, choose_threads, drift_warning


def kernels_of_a_run(flags):
    """Return (exit code, torch's choices) after a run of train.py."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    code = main_on_rank(flags, ()).code
    return code, dict(strict=torch.get_deterministic_debug_mode() == 2, cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
                      fills=torch.utils.deterministic.fill_uninitialized_memory,
                      workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


USUAL = dict(strict=False, cudnn=True, fills=True, workspace=None)


@pytest.mark.parametrize("flags, changes", [
    ([], {}), (["--reset-attention-mask"], dict(cudnn=False)),
    (["--deterministic-mode"], dict(strict=True, cudnn=False, fills=False, workspace=":4096:8"))],
    ids=["usual", "documents", "deterministic"])
def test_the_kernels_of_a_run(pool, tmp_path, flags, changes):
    """In torch's warn-only mode the backward of fused attention would stay nondeterministic. With a mask, the backward
    of cuDNN's attention may return NaN."""
    make_corpus(tmp_path)
    flags = [*TINY, "--seq-length", "12", "--data-path", str(tmp_path / "tokens"), "--train-iters", "2", *flags,
             "--run-dir", str(tmp_path / "run"), "--sample-tokens", "2"]
    assert pool.run(kernels_of_a_run, flags, world_size=1) == [(0, USUAL | changes)]


@pytest.mark.parametrize("layout, deterministic", [
    (dict(tensor_model_parallel_size=2), True), (dict(data_parallel_size=2), False)])
def test_the_compiler_chooses_the_same_kernels_on_each_tensor_parallel_rank(layout, deterministic):
    from torch._inductor import config as inductor
    with inductor.patch(deterministic=False):
        determinism.choose_kernels(tiny(2, compile=True, **layout), torch.device("cpu"))
        assert inductor.deterministic == deterministic


@pytest.mark.parametrize("device, capability, installed, used", [
    ("cuda", (9, 0), True, True), ("cuda", (8, 0), True, False), ("cuda", (10, 0), True, False),
    ("cuda", (9, 0), False, False), ("cpu", (9, 0), True, False)])
def test_flash_attention_3_is_used_where_it_runs(monkeypatch, device, capability, installed, used):
    """On Hopper, without --deterministic-mode. Only a GPU shows whether its numbers are right."""
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(determinism, "find_spec", lambda name: name if installed else None)
    with standing_for(StandIn(capability=capability)):
        determinism.choose_kernels(tiny(1), torch.device(device))
        assert not determinism.can_use_flash_attention_3(tiny(1, deterministic_mode=True), torch.device(device))
    assert activated == ["FA3"] * used and "FA3" in torch.nn.attention.list_flash_attention_impls()


def test_gathered_keys_need_a_bias_if_heads_are_too_large_for_varlen_attention():
    found = [tiny(2, context_parallel_size=2, dtype="bfloat16", kv_channels=size).uses_attention_bias
             for size in (192, 256)]
    assert found == [False, True]


@pytest.mark.parametrize("dtype, precision, said", [("float32", "highest", True), ("float32", "high", False),
                                                    ("bfloat16", "highest", False), ("float64", "highest", False)])
def test_the_start_says_if_a_gpus_matrix_units_stay_idle(monkeypatch, dtype, precision, said):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    config = tiny(1, dtype=dtype)
    assert ("without TF32 (--bf16 is" in determinism.tf32_in_words(config, torch.device("cuda"))) == said
    assert determinism.tf32_in_words(config, torch.device("cpu")) == ""


@pytest.mark.parametrize("available, variable, record, load, chosen, said", [
    (2, "", {}, 1.5, 2, "2 of 2 threads: the load average is 1.5 on 2 cores; OMP_NUM_THREADS=N"),
    (2, "", None, 1.6, 1, "1 of 2 threads: the load average is 1.6 on 2 cores; "),
    (2, "", dict(cpu_threads=8), 9.0, 2, "2 of 2 threads: as before in this run; OMP_NUM_THREADS=N"),
    (2, "2", {}, 9.0, 2, ""), (1, "", dict(cpu_threads=8), 0.0, 1, "")])
def test_busy_cores_have_one_thread(monkeypatch, capsys, available, variable, record, load, chosen, said):
    current = [available]
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current[-1])
    monkeypatch.setattr(torch, "set_num_threads", current.append)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert choose_threads(torch.device("cpu"), record) == current[-1] == chosen
    printed = capsys.readouterr().err
    assert printed.startswith(said) and printed.count("\n") == bool(said)


def train_with_two_threads(flags, load):
    torch.set_num_threads(2)
    with (mock.patch.object(os, "getloadavg", return_value=(load, 0.0, 0.0)),
          mock.patch.dict(os.environ, OMP_NUM_THREADS=""), contextlib.redirect_stderr(io.StringIO()) as printed):
        main_on_rank(flags, ())
    return printed.getvalue()


def test_a_resumed_run_keeps_its_number_of_threads(pool, tmp_path):
    """Another number would round sums differently, and the same layout would not give the same bits."""
    flags = [*TINY, "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run"), "--train-iters"]
    for steps, load, said in (("1", 1000.0, "1 of 2 threads: the load"), ("2", 0.0, "1 of 2 threads: as before")):
        assert said in pool.run(train_with_two_threads, [*flags, steps], load, world_size=1)[0]


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
    monkeypatch.setattr(determinism, "CHUNK", 64)
    before = int(checksum(weight))
    for first, other in ((3, 500), (3, 3 + 64), (0, 1)):
        changed = weight.clone()
        changed.view(torch.int32)[first] += 1
        changed.view(torch.int32)[other] -= 1
        assert int(checksum(changed)) != before
    assert int(checksum(weight.view(10, 100))) == before
