"""Few graphs are compiled: all layers share them, and none is compiled after the warm-up.

A recompilation within a step stops this GPU, and all ranks that wait for it, for seconds. A graph for each layer would
make the start of a deep model take minutes. The tests count what torch.compile captures, whichever backend compiles it.
"""

import dataclasses
from functools import partial

import pytest
import torch
from support.fake_world import fake_world
from support.harness import FAMILIES, build, random_data, tiny

import train
from nanodomino.domino import Domino
from nanodomino.layers.activations import swiglu, swiglu_backward
from nanodomino.layers.cross_entropy import max_and_sum_exp_of_rows, scaled_exp_of_rows
from nanodomino.overlap.recompute import GRANULARITIES

# residual + norm: at the stage's start, after a sublayer; its backward: below the head, of a sublayer, at the start;
# cross entropy: forward, backward
GRAPHS = 7
# the norms and rotations of q and k: forward, backward; SwiGLU: forward, backward
FAMILY_GRAPHS = {"gpt2": GRAPHS, "mixed": GRAPHS + 2, "llama": GRAPHS + 4, "qwen2": GRAPHS + 4, "qwen3": GRAPHS + 4}


def graphs(layers, micro_batch_size=4, one_differs=False, **changes):
    """Count the graphs captured by the warm-up, a step, an evaluation and another step.

    one_differs: give one norm a weight of another type than the other norms.
    """
    from torch._dynamo.utils import counters                   # takes seconds to import

    torch._dynamo.reset()
    counters.clear()
    config = tiny(2, tensor_model_parallel_size=2, num_layers=layers, slices=2, micro_batch_size=micro_batch_size,
                  global_batch_size=2 * micro_batch_size, dtype="bfloat16", **changes)
    data, found = random_data(config, 2), []
    with fake_world(0, 2):
        mesh, model, optimizer, _ = build(config)
        stage = Domino(model, config.slices, config.columns, compiled=partial(torch.compile, backend="eager"))
        if one_differs:
            step = stage.sublayers[model.chunks[0]][1]
            weight, bias = step.norm_weights
            step.norm_weights = weight.detach(), bias
            step.norm_weights[0].main_grad = weight.main_grad
        for act in (lambda: train.warm_up(stage, optimizer, config, mesh),
                    lambda: train.train_step(1, stage, optimizer, data, config, mesh),
                    lambda: train.evaluate(stage, data, config, mesh),
                    lambda: train.train_step(2, stage, optimizer, data, config, mesh)):
            before = counters["stats"]["unique_graphs"]
            act()
            found.append(counters["stats"]["unique_graphs"] - before)
    torch._dynamo.reset()
    return found


def moved_bytes(monkeypatch, function, *inputs):
    """Return the bytes that the kernels of the compiled function read and write, as the compiler counts them."""
    from torch._inductor import config as inductor             # takes a second, which collecting the tests can save
    from torch._inductor.scheduler import Scheduler
    moved, codegen = [], Scheduler.codegen

    def counting(scheduler):
        moved.extend(node.get_read_write_buffers_sizes() for node in scheduler.nodes)
        return codegen(scheduler)

    monkeypatch.setattr(Scheduler, "codegen", counting)
    torch._dynamo.reset()
    with torch.no_grad(), inductor.patch(force_disable_caches=True):
        torch.compile(function)(*inputs)
    torch._dynamo.reset()
    return sum(moved)


@pytest.mark.exhaustive
def test_compiled_cross_entropy_reads_the_logits_twice_and_writes_them_once(monkeypatch):
    """gpt2's, of 16 x 1024 tokens in 16 bit, by the compiler's own count of what its kernels move: 12 GB at most, of 46
    that fp32 softmaxes once moved. Here the kernels are for a CPU; what is in one kernel the compiler decides alike for
    all."""
    rows, words = 128, 50264
    logits = torch.zeros(rows, words, dtype=torch.bfloat16)
    moved = (moved_bytes(monkeypatch, max_and_sum_exp_of_rows, logits)
             + moved_bytes(monkeypatch, scaled_exp_of_rows, logits, *torch.ones(2, rows)))
    assert 2.9 * logits.nbytes < moved < 3.1 * logits.nbytes
    assert moved * 16 * 1024 / rows < 12e9


@pytest.mark.exhaustive
def test_compiled_swiglu_reads_and_writes_each_number_once(monkeypatch):
    c = torch.zeros(256, 1, 512, dtype=torch.bfloat16)
    assert moved_bytes(monkeypatch, swiglu, c) == 1.5 * c.nbytes
    assert moved_bytes(monkeypatch, swiglu_backward, c[..., 256:], c) == 2.5 * c.nbytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_gradients_are_the_uncompiled_ones_and_recomputation_gives_the_same_bits(family):
    from torch._dynamo.utils import counters
    changes = FAMILIES[family] | dict(normalization="LayerNorm" if family in ("gpt2", "mixed") else "RMSNorm")
    config = tiny(2, tensor_model_parallel_size=2, slices=2, micro_batch_size=4, global_batch_size=8, num_layers=2,
                  reset_position_ids=True, reset_attention_mask=True, **changes)
    data = random_data(config, 1)

    def gradients(config):
        with fake_world(0, 2):
            mesh, model, optimizer, stage = build(config)
            train.train_step(1, stage, optimizer, data, config, mesh)
            return {name: weight.main_grad.clone() for name, weight in model.named_parameters()}

    torch._dynamo.reset()
    counters.clear()
    plain, *compiled = (gradients(dataclasses.replace(config, compile=compile, recompute_granularity=one))
                        for compile, one in ((False, "none"), *((True, one) for one in GRANULARITIES)))
    assert counters["stats"]["unique_graphs"] == FAMILY_GRAPHS[family] and not counters["graph_break"]
    torch._dynamo.reset()
    largest = max(expected.norm() for expected in plain.values())
    for name, expected in plain.items():                       # the gradient of the bias of k's norm is 0
        found, *others = (each[name] for each in compiled)
        assert (found - expected).norm() <= 1e-9 * max(expected.norm(), 1e-9 * largest), name
        assert all(torch.equal(other, found) for other in others), name


@pytest.mark.parametrize("family, layers", [("gpt2", 2), ("gpt2", 6), *((family, 3) for family in FAMILIES)])
def test_a_model_of_any_depth_has_the_same_few_graphs(family, layers):
    assert graphs(layers, **FAMILIES[family]) == [FAMILY_GRAPHS[family], 0, 0, 0]


def test_the_warm_up_captures_the_graphs_of_samples_with_documents():
    documents = dict(reset_position_ids=True, reset_attention_mask=True)
    assert graphs(2, **documents, **FAMILIES["llama"]) == [FAMILY_GRAPHS["llama"], 0, 0, 0]


def test_a_recomputed_norm_reuses_the_graph_of_the_stages_first_norm():
    assert graphs(2, recompute_granularity="full") == [GRAPHS, 0, 0, 0]


def test_the_warm_up_captures_the_graph_of_evaluation_which_has_no_dropout():
    made, *later = graphs(2, hidden_dropout=0.1)
    assert made == GRAPHS + 1 and later == [0, 0, 0]


@pytest.mark.exhaustive
def test_a_smaller_last_slice_adds_a_set_for_any_size():
    """5 samples are slices of 3 and 2. A graph that meets a second size is captured again, for any size."""
    made, *later = graphs(2, micro_batch_size=5)
    assert GRAPHS < made <= 2 * GRAPHS and later == [0, 0, 0]


@pytest.mark.parametrize("layers, recipe, conversions", [
    (2, "tensorwise", 6), (4, "rowwise", 10), pytest.param(4, "tensorwise", 6, marks=pytest.mark.exhaustive),
    pytest.param(2, "rowwise", 10, marks=pytest.mark.exhaustive)])
def test_fp8_has_the_same_few_graphs_at_any_depth(layers, recipe, conversions):
    """Conversions of activations and of gradients, for one size, for any and for a square; by row also by column. From
    the ninth version of a function on, torch would no longer compile it. Weights are converted without compilation."""
    assert graphs(layers, fp8_format="hybrid", fp8_recipe=recipe) == [GRAPHS + conversions, 0, 0, 0]


def test_a_layer_that_differs_adds_a_graph():
    """Otherwise the tests above could not fail."""
    assert graphs(2, one_differs=True)[0] > GRAPHS
