"""What can be tested without a GPU: which rank gets which device, what the warm-up does, what must not be used."""

import os

import pytest
import torch
import torch.nn.functional as F
from support.fake_cuda import show_gpus
from support.harness import build, random_data, tiny

import train
from nanodomino.comm.device import find_device
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError
from nanodomino.estimate.accounts import Accounts
from nanodomino.estimate.rank import groups_of
from nanodomino.layers.attention import fused_attention
from nanodomino.settings.config import Config
from nanodomino.zero import sum_of_squares


def place(local_rank, local_world_size):
    """Return the place of a process on the second of two equal hosts, where its rank is not its GPU's number."""
    return LaunchInfo(local_world_size + local_rank, 2 * local_world_size, local_rank, local_world_size, launched=True)


@pytest.mark.parametrize("gpus, shown, processes, local_rank, index", [
    (8, None, 8, 5, 5), (8, "0,1,2,3,4,5,6,7", 8, 5, 5), (1, None, 1, 0, 0), (1, "3", 1, 0, 0), (1, "3", 8, 5, 0)])
def test_each_process_takes_its_own_gpu_also_where_it_sees_no_other(monkeypatch, gpus, shown, processes, local_rank,
                                                                    index):
    """SLURM may show each task only its own GPU, which is then number 0."""
    show_gpus(monkeypatch, gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert find_device(Config(), place(local_rank, processes)) == torch.device("cuda", index)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ, "with one queue, matmuls wait for collectives"


@pytest.mark.parametrize("settings, where, sentence", [
    ({}, place(5, 8), "8 processes on this host need as many GPUs, and there are 1"),
    (dict(trace="1:2"), LaunchInfo(), "CUDA_DEVICE_MAX_CONNECTIONS is 1; unset")])
def test_too_few_gpus_and_a_trace_with_one_hardware_queue_are_refused(monkeypatch, settings, where, sentence):
    """With one queue, the stream that waits for a collective's end holds up all other streams."""
    show_gpus(monkeypatch, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(UserError, match=sentence):
        find_device(Config(**settings), where)
    assert find_device(Config(), LaunchInfo()).type == "cuda"


EIGHT = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, global_batch_size=12)


def first_loss(config, data, warm):
    """Return (the first step's loss, with or without a warm-up before it, whether the warm-up changed no number)."""
    mesh, model, optimizer, stage = build(config, warm=False)
    before = [bucket.weights.clone() for bucket in optimizer.buckets]
    if warm:
        train.warm_up(stage, optimizer, config, mesh)
    same = optimizer.updates == 0 and all(torch.equal(bucket.weights, weights) and not bucket.own_grad.any()
                                          for bucket, weights in zip(optimizer.buckets, before))
    return train.train_step(1, stage, optimizer, data, config, mesh).loss, same


@pytest.mark.parametrize("dtype, zero_stage", [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)])
def test_a_warm_up_changes_no_number(pool, dtype, zero_stage):
    """Also with dropout, whose masks are a function of the sample, and in 16 bits, where the weights are restored from
    the fp32 master weights."""
    config = tiny(8, **EIGHT, dtype=dtype, hidden_dropout=0.1, attention_dropout=0.1, zero_stage=zero_stage)
    data = random_data(config, 1)
    cold, warm = (pool.run(first_loss, config, data, warm) for warm in (False, True))
    assert warm == cold and all(same for _, same in warm)


def first_times_rank(config, data):
    """Return (the kinds of collectives and messages in the warm-up, the kinds in a step), each with its group."""
    mesh, _, optimizer, stage = build(config, warm=False)
    with Accounts(groups_of(mesh), host_counts=True) as accounts:
        train.warm_up(stage, optimizer, config, mesh)
        warm = set(accounts.traffic)
        accounts.restart()
        train.train_step(1, stage, optimizer, data, config, mesh)
    return warm, set(accounts.traffic)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_a_step_does_for_the_first_time_the_warm_up_has_done_before(pool, sequence_parallel):
    """A communicator's first collective and a kernel's first load wait for the whole device."""
    config = tiny(8, **EIGHT, sequence_parallel=sequence_parallel)
    for warm, step in pool.run(first_times_rank, config, random_data(config, 1)):
        assert step <= warm and len(step) > 3, step - warm


class OnCuda(torch.Tensor):
    """A tensor on the CPU that claims to be on a GPU."""
    is_cuda = True


@pytest.mark.parametrize("dtype, has_bias, flash, given", [
    (torch.bfloat16, False, 1, 2), (torch.float16, False, 1, 2), (torch.float16, False, 0, 6),
    (torch.float32, False, 1, 6), (torch.float64, False, 1, 6), (torch.bfloat16, True, 1, 6),
    (torch.float32, True, 1, 6)])
def test_grouped_heads_on_a_gpu_never_make_torch_write_out_all_scores(monkeypatch, dtype, has_bias, flash, given):
    """Only flash attention reads 2 key heads for 6 query heads, and it takes 16 bits and no bias. given: key heads."""
    def kernel(key, value, enable_gqa, **others):
        assert key.size(1) == value.size(1) == given and enable_gqa == (given == 2)
        return scaled(key=key, value=value, enable_gqa=enable_gqa, **others)

    scaled = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr("nanodomino.layers.attention.has_flash_attention", lambda device: flash)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 4, 8, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    bias = torch.zeros(1, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf) if has_bias else None
    on_gpu = [None if one is None else one.to(dtype).as_subclass(OnCuda) for one in (q, k, v, bias)]
    assert torch.allclose(fused_attention(*on_gpu).double(), scaled(q, k, v, is_causal=True, enable_gqa=True), atol=0.1)


def test_the_gradient_norm_of_a_large_model_takes_few_launches(monkeypatch):
    """gpt2-xl has 1.6 billion weights, 5,940 blocks of the size that suits a CPU."""
    blocks = []
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors: blocks.extend(tensors) or [torch.ones(())])
    sum_of_squares(torch.empty(1_557_611_200, device="meta").as_subclass(OnCuda))
    assert len(blocks) < 100 and sum(block.numel() for block in blocks) == 1_557_611_200


def test_no_backend_of_the_compiler_hands_memory_out_twice():
    """torch.compile's CUDA graphs reuse their memory pool at the next forward, while the previous microbatch still
    needs it."""
    choices = Config.__dataclass_fields__["compile_backend"].metadata["choices"]
    assert "cudagraphs" not in choices
