"""Few graphs are compiled: all layers share them, and none is compiled after the warm-up.

A recompilation within a step stops this GPU, and all ranks that wait for it, for seconds. A graph for each layer would
make the start of a deep model take minutes. The tests count what torch.compile captures, whichever backend compiles it.
"""

import dataclasses
from functools import partial

import pytest
import torch
from support.fake_world import fake_world
from support.harness import EXPERTS, FAMILIES, build, random_data, tiny

import train
from nanodomino.domino import Domino
from nanodomino.options.recompute import GRANULARITIES

# residual + norm: at the stage's start, after a sublayer; its backward: below the head, of a sublayer, at the start;
# cross entropy: forward, backward
# the norms and rotations of q and k: forward, backward; SwiGLU: forward, backward; a router: choice, weights, loss
GRAPHS, MORE_GRAPHS = 7, dict(gpt2=0, mixed=2, experts=3, llama=4, qwen2=4, qwen3=4)
FAMILIES = FAMILIES | dict(experts=EXPERTS)


def graphs(layers, micro_batch_size=4, **changes):
    """Count the graphs captured by the warm-up, a step, an evaluation and another step."""
    from torch._dynamo.utils import counters                   # takes seconds to import

    torch._dynamo.reset()
    counters.clear()
    config = tiny(2, tensor_model_parallel_size=2, num_layers=layers, slices=2, micro_batch_size=micro_batch_size,
                  global_batch_size=2 * micro_batch_size, dtype="bfloat16", **changes)
    data, found = random_data(config, 2), []
    with fake_world(0, 2):
        mesh, model, optimizer, _ = build(config, warm=False)
        compiler = partial(dataclasses.replace(config, compile=True).compiler, backend="eager")
        stage = Domino(model, config.slices, config.columns, compiler)
        for act in (lambda: train.warm_up(stage, optimizer, config, mesh),
                    lambda: train.train_step(1, stage, optimizer, data, config, mesh),
                    lambda: train.evaluate(stage, data, config, mesh),
                    lambda: train.train_step(2, stage, optimizer, data, config, mesh)):
            before = counters["stats"]["unique_graphs"]
            act()
            found.append(counters["stats"]["unique_graphs"] - before)
    torch._dynamo.reset()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_gradients_are_the_uncompiled_ones_and_recomputation_gives_the_same_bits(family):
    from torch._dynamo.utils import counters
    changes = FAMILIES[family] | dict(normalization="RMSNorm" if family in ("llama", "qwen2", "qwen3") else "LayerNorm")
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
    assert counters["stats"]["unique_graphs"] == GRAPHS + MORE_GRAPHS[family] and not counters["graph_break"]
    torch._dynamo.reset()
    largest = max(expected.norm() for expected in plain.values())
    for name, expected in plain.items():                       # the gradient of the bias of k's norm is 0
        found, *others = (each[name] for each in compiled)
        assert (found - expected).norm() <= 1e-9 * max(expected.norm(), 1e-9 * largest), name
        assert all(torch.equal(other, found) for other in others), name


@pytest.mark.parametrize("family, layers, changes, more", [
    ("gpt2", 6, {}, 0), *((family, 3, {}, 0) for family in ("llama", "experts")),
    *(pytest.param(family, 3, {}, 0, marks=pytest.mark.exhaustive) for family in ("qwen2", "qwen3", "mixed")),
    ("llama", 2, dict(reset_position_ids=True, reset_attention_mask=True), 0),
    ("gpt2", 2, dict(recompute_granularity="full"), 0),          # reuses the graph of the stage's first norm
    ("gpt2", 2, dict(hidden_dropout=0.1), 1),                    # evaluation has none
    # fp8: conversions of each shape of weights, activations and gradients, also transposed; tensorwise also transposes
    # of 8 bits
    ("gpt2", 2, dict(fp8_format="hybrid"), 20), ("gpt2", 4, dict(fp8_format="hybrid", fp8_recipe="rowwise"), 20)])
def test_the_warm_up_captures_the_same_few_graphs_at_any_depth(family, layers, changes, more):
    """From the 65th version of a function on, torch would no longer compile it."""
    assert graphs(layers, **changes, **FAMILIES[family]) == [GRAPHS + MORE_GRAPHS[family] + more, 0, 0, 0]


def test_each_shape_has_a_graph_that_knows_its_sizes():
    """torch's defaults would capture a second graph for any number of rows, and none from the ninth version on."""
    torch._dynamo.reset()
    captured = []

    def backend(graph, inputs):
        captured.append([tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in inputs])
        return graph.forward

    double = tiny(1, compile=True).compiler(lambda x: 2 * x, backend=backend)
    shapes = [(16 * rows, 32) for rows in range(2, 22)]
    for shape in shapes:
        double(torch.zeros(shape))
    torch._dynamo.reset()
    assert captured == [[shape] for shape in shapes]


@pytest.mark.exhaustive
def test_a_smaller_last_slice_adds_a_set():
    """5 samples are slices of 3 and 2. A graph that meets a second size is captured again."""
    made, *later = graphs(2, micro_batch_size=5)
    assert GRAPHS < made <= 2 * GRAPHS and later == [0, 0, 0]
