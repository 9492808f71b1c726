"""What a training step asks of a GPU, counted in a dry run by support/fake_cuda.py.

Four things are worth a budget, because each change that breaks one costs every user time or memory: gpt2's kernel
launches, its memory traffic, its peak memory, and what a layer of a large Llama adds. A budget lies about 3 % above the
count of the day it was set. Lower it when you save. The other tests count what must be exact.
"""

from functools import cache

import pytest
from support.fake_cuda import Counts, gpu_config, run_under

ALONE = dict(dtype="bfloat16", tensor_model_parallel_size=1, pipeline_model_parallel_size=1, data_parallel_size=1)
GPT2 = ALONE | dict(model="gpt2", micro_batch_size=16, global_batch_size=16, num_layers=2)   # one microbatch
EIGHT = dict(model="nano", dtype="bfloat16", tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
             data_parallel_size=2, micro_batch_size=4, slices=2, num_layers=2)     # 2 microbatches a replica
SMALL = ALONE | dict(slices=2, micro_batch_size=4, global_batch_size=8, num_layers=2)
HOST = SMALL | dict(model="nano", recompute_granularity="full")
GROUPED = SMALL | dict(model="nano-llama", kv_channels=16)
# of llama3-8b at tp 8, two slices of 4096 tokens
LLAMA = ALONE | dict(model="llama3-8b", tensor_model_parallel_size=8, micro_batch_size=2, slices=2, global_batch_size=2,
                     seq_length=4096, sequence_parallel=True, reset_attention_mask=True, reset_position_ids=True,
                     recompute_granularity="full", checkpoint_in_cpu=True)
CASES = {"gpt2": (0, GPT2), "first stage": (0, EIGHT), "last stage": (7, EIGHT),
         "uneven slices": (7, EIGHT | dict(slices=3, columns=2)),
         "sequence parallel": (7, EIGHT | dict(sequence_parallel=True, columns=2)),
         "fp16": (0, EIGHT | dict(pipeline_model_parallel_size=1, data_parallel_size=4, dtype="float16")),
         "fp8 tensorwise": (7, EIGHT | dict(fp8_format="hybrid")),
         "fp8 rowwise": (7, EIGHT | dict(fp8_format="hybrid", fp8_recipe="rowwise", columns=2, sequence_parallel=True)),
         "kept": (0, HOST), "on the host": (0, HOST | dict(checkpoint_in_cpu=True)),
         "grouped": (0, GROUPED), "documents": (0, GROUPED | dict(reset_attention_mask=True)),
         "shared samples": (1, GROUPED | dict(context_parallel_size=2)),
         "llama, 1 layer": (0, LLAMA | dict(num_layers=1)), "llama, 2 layers": (0, LLAMA | dict(num_layers=2))}

GB = 1e9
TRAFFIC = {"forward": 4.24 * GB, "cross entropy": 33.9 * GB, "backward": 8.54 * GB, "update": 2.76 * GB,
           "rest": 0.222 * GB}
OPERATIONS = {"forward": 38, "cross entropy": 143, "backward": 64, "update": 55, "rest": 17}
PEAK = 3.88 * GB
LOGITS = 16 * 1024 * 50264 * 2                                             # bytes
X = 4 * 128 * 96 * 2                                                       # bytes of a microbatch's x in nano
CROSS_ENTROPY_PEAK = 0.34 * LOGITS                                         # with an fp32 softmax it was 4
# of one layer: operations and bytes in forward and backward, and what its weights and tapes add to the peak
LAYER = (87, 1.25 * GB, 196, 3.51 * GB, 0.51 * GB)


@cache
def counted(case):
    """Return fake_cuda.Counts of a case, with the RankRun as `run`."""
    rank, settings = CASES[case]
    counts, counts.run = run_under(Counts, gpu_config(**settings), rank)
    return counts


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_once_a_step_and_copies_a_microbatch_at_once(case):
    """It waits for the four numbers of the whole world, of which it must know whether to update. A microbatch comes in
    one copy from pinned memory, for which the host does not wait. Nothing else mixes devices."""
    counts = counted(case)
    assert not counts.mixed and counts.waits == {"_to_copy": 1}                    # a tolist() by the host
    if case not in ("documents", "shared samples", "on the host", "llama, 1 layer", "llama, 2 layers"):
        assert counts.copies == {"from the host": counts.microbatches}


@pytest.mark.parametrize("case", ["gpt2", "first stage", "last stage", "uneven slices", "sequence parallel", "fp16"])
def test_16_bit_gradients_of_weights_are_added_where_they_stay(case):
    """One addmm into the fp32 gradient for each matrix and slice; no weight gradient is stored in 16 bits."""
    counts = counted(case)
    slices, matrices = CASES[case][1].get("slices", 1), 2 * counts.sublayers + (case != "first stage")
    assert counts.called["aten.addmm.dtype_out"] == matrices * slices * counts.microbatches
    assert not counts.narrow & counts.weight_shapes


@pytest.mark.parametrize("case", ["gpt2", "first stage", "last stage"])
def test_copies_of_a_parameter_are_added_to_in_one_order_on_every_rank(case):
    """index_add_ adds in no fixed order, so only word embeddings use it, whose shards differ between ranks."""
    counts = counted(case)
    slices = CASES[case][1].get("slices", 1) if case != "last stage" else 0
    assert counts.called.get("aten.index_add_.default", 0) == slices * counts.microbatches


@pytest.mark.parametrize("case", ["fp8 tensorwise", "fp8 rowwise"])
def test_fp8_multiplies_what_cuda_can(case):
    """Torch checks the operands as on a GPU: row-major times column-major, multiples of 16, shapes of scales. Each
    layer has four matrices, each in three matmuls. With columns and a sharded stream, the forward of a matrix is two
    matmuls, and so is its input gradient."""
    counts = counted(case)
    pieces = 2 * counts.microbatches
    matmuls = 4 * 3 if case == "fp8 tensorwise" else 4 * 3 + 4 * 2
    assert counts.called["aten._scaled_mm.default"] == matmuls * pieces * (counts.sublayers // 2)


def test_offload_frees_memory():
    """Each sublayer input x of 4 sublayers, two slices and each microbatch is copied out. All come back except the last
    sublayer's, which backward needs before they have left. At the peak the host holds x of all sublayers of the one
    microbatch that is alive, and only the last sublayer's and the residual stream are on the GPU."""
    kept, away = counted("kept"), counted("on the host")
    assert away.copies - kept.copies == {"to the host": 4 * 2 * away.microbatches,
                                         "from the host": 3 * 2 * away.microbatches}
    assert away.run.host - kept.run.host == 4 * X and kept.run.peak - away.run.peak >= 2 * X


def test_a_layer_of_a_llama_keeps_to_its_budget():
    """With documents, sequence parallelism, and full recomputation of two sublayers from inputs on the host, which each
    slice copies out and back."""
    one, two = counted("llama, 1 layer"), counted("llama, 2 layers")
    found = [getattr(two, what)[part] - getattr(one, what)[part] for part in ("forward", "backward")
             for what in ("operations", "moved")] + [two.run.peak - one.run.peak]
    assert all(cost <= budget for cost, budget in zip(found, LAYER, strict=True)), found
    assert two.copies - one.copies == {"from the host": 2 * 2, "to the host": 2 * 2}


def test_documents_need_no_bias_and_no_memory():
    """Each slice copies where its documents start. Attention by document then only adds its random numbers' state of
    two zeros in forward and in the kernel."""
    without, within = counted("grouped"), counted("documents")
    attentions = within.sublayers // 2 * 2 * within.microbatches
    assert within.copies - without.copies == {"from the host": 2 * within.microbatches}
    more = {name: within.called.get(name, 0) - without.called.get(name, 0)
            for name in within.called.keys() | without.called.keys()}
    assert {name: count for name, count in more.items() if count} == {
        "aten._scaled_dot_product_flash_attention.default": -attentions, "torch_attn._varlen_attn.default": attentions,
        "aten._scaled_dot_product_flash_attention_backward.default": -attentions,
        "torch_attn._varlen_attn_backward.default": attentions,
        "aten.zeros.default": 2 * attentions, "aten._to_copy.default": 2 * within.microbatches}
    assert within.run.peak <= without.run.peak


def test_with_context_parallelism_a_gpu_needs_no_bias_either():
    """It attends to the keys of all ranks by varlen_attn, also without documents. The starts of queries and of keys and
    the places of the keys come from the host once for each slice."""
    found = counted("shared samples")
    attentions = found.sublayers // 2 * 2 * found.microbatches
    assert {name: count for name, count in found.called.items() if "atten" in name or "attn" in name} == {
        "torch_attn._varlen_attn.default": attentions, "torch_attn._varlen_attn_backward.default": attentions}
    assert found.copies == {"from the host": (1 + 2 * 3) * found.microbatches}


def test_sequence_parallelism_uses_nccls_own_reduce_scatter_and_all_gather():
    """On the last stage: two reduce-scatters and three all-gathers for each sublayer, slice and column, one of each for
    the head, and ZeRO's own. The point-to-point messages that replace them on gloo must not appear."""
    found = counted("sequence parallel")
    pieces, sublayers = 2 * 2 * found.microbatches, found.sublayers
    assert found.called["c10d._reduce_scatter_base_.default"] == pieces * (2 * sublayers + 1) + found.buckets
    assert found.called["c10d._allgather_base_.default"] == pieces * (3 * sublayers + 1) + found.buckets
    assert not {name for name in found.called if name.startswith(("c10d.alltoall", "c10d.broadcast"))}


def test_traffic_operations_and_memory_of_gpt2():
    """Each operation is a kernel launch, which costs the host time. Beside the logits, cross entropy needs less memory
    than they do."""
    found = counted("gpt2")
    assert all(found.moved[part] <= budget for part, budget in TRAFFIC.items()), found.moved
    assert all(found.operations[part] <= budget for part, budget in OPERATIONS.items()), found.operations
    assert found.run.peak <= PEAK and found.most["cross entropy"] <= CROSS_ENTROPY_PEAK
