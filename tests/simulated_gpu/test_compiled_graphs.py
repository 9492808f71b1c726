"""Few graphs are compiled: all layers share them, and none is compiled after the warm-up.

A recompilation within a step stops this GPU, and all ranks that wait for it, for seconds. A graph for each layer would
make the start of a deep model take minutes. The tests count what torch.compile captures, whichever backend compiles it.
"""

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny

import train
from nanodomino.domino import Domino
from nanodomino.layers.cross_entropy import max_and_sum_exp_of_rows, scaled_exp_of_rows

# residual + norm: at the stage's start, after a sublayer; its backward: below the head, of a sublayer, at the start;
# cross entropy: forward, backward
GRAPHS = 7


def graphs(layers, micro_batch_size=4, one_differs=False, dropout=0.0, recompute_granularity="none"):
    """Count the graphs captured by the warm-up, a step, an evaluation and another step.

    one_differs: give one norm a weight of another type than the other norms.
    """
    from torch._dynamo.utils import counters                   # takes seconds to import

    torch._dynamo.reset()
    counters.clear()
    config = tiny(2, tensor_model_parallel_size=2, num_layers=layers, slices=2, micro_batch_size=micro_batch_size,
                  global_batch_size=2 * micro_batch_size, dtype="bfloat16", hidden_dropout=dropout,
                  recompute_granularity=recompute_granularity)
    data, found = random_data(config, 2), []
    with fake_world(0, 2):
        mesh, model, optimizer, _ = build(config)
        stage = Domino(model, config.slices, config.columns, compile_backend="eager")
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


@pytest.mark.exhaustive
def test_compiled_cross_entropy_reads_the_logits_twice_and_writes_them_once(monkeypatch):
    """gpt2's, of 16 x 1024 tokens in 16 bit, by the compiler's own count of what its kernels move: 12 GB at most, of 46
    that fp32 softmaxes once moved. Here the kernels are for a CPU; what is in one kernel the compiler decides alike for
    all."""
    from torch._inductor import config as inductor             # takes a second, which collecting the tests can save
    from torch._inductor.scheduler import Scheduler
    rows, words = 128, 50264
    logits = torch.zeros(rows, words, dtype=torch.bfloat16)
    moved, codegen = [], Scheduler.codegen

    def counting(scheduler):
        moved.extend(node.get_read_write_buffers_sizes() for node in scheduler.nodes)
        return codegen(scheduler)

    monkeypatch.setattr(Scheduler, "codegen", counting)
    with torch.no_grad(), inductor.patch(force_disable_caches=True):
        for function, inputs in ((max_and_sum_exp_of_rows, (logits,)),
                                 (scaled_exp_of_rows, (logits, *torch.ones(2, rows)))):
            torch._dynamo.reset()
            torch.compile(function)(*inputs)
    torch._dynamo.reset()
    assert 2.9 * logits.nbytes < sum(moved) < 3.1 * logits.nbytes
    assert sum(moved) * 16 * 1024 / rows < 12e9


@pytest.mark.parametrize("layers", [2, 6])
def test_a_model_of_any_depth_has_the_same_few_graphs(layers):
    assert graphs(layers) == [GRAPHS, 0, 0, 0]


def test_a_recomputed_norm_reuses_the_graph_of_the_stages_first_norm():
    assert graphs(2, recompute_granularity="full") == [GRAPHS, 0, 0, 0]


def test_the_warm_up_captures_the_graph_of_evaluation_which_has_no_dropout():
    made, *later = graphs(2, dropout=0.1)
    assert made == GRAPHS + 1 and later == [0, 0, 0]


@pytest.mark.exhaustive
def test_a_smaller_last_slice_adds_a_set_for_any_size():
    """5 samples are slices of 3 and 2. A graph that meets a second size is captured again, for any size."""
    made, *later = graphs(2, micro_batch_size=5)
    assert GRAPHS < made <= 2 * GRAPHS and later == [0, 0, 0]


def test_a_layer_that_differs_adds_a_graph():
    """Otherwise the tests above could not fail."""
    assert graphs(2, one_differs=True)[0] > GRAPHS
