"""The parts of an expert layer that other tests do not reach on a CPU."""

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny, train_rank, weights_and_data
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanodomino.comm.trace import Trace
from nanodomino.comm.device import StandIn, standing_for
from nanodomino.domino import run_to_end
from nanodomino.options import experts


def microbatch(config, training=True):
    """Run one microbatch on one process. Return the model's counts and its weights."""
    with fake_world(0, 1):
        _, model, _, stage = build(config)
        batch = random_data(config, 1).batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        losses, tape = run_to_end(stage.forward(batch, training=training))
        if training:
            run_to_end(stage.backward(tape, torch.ones_like(losses)))
    return model.statistics, model.parameters()


def test_the_grouped_kernel_is_called_as_torch_defines_it(monkeypatch):
    """It runs on CPUs too, in float32. Expert 0 gets no tokens, so one group is empty."""
    config = tiny(num_experts=4, disable_bias_linear=True, dtype="float32", swiglu=True, init_method_std=0.3)
    calls, plain = [], experts.Router.choose

    def choose(router, logits):
        experts = plain(router, logits)[0].clamp(min=1)
        return experts, experts.flatten().bincount(minlength=4), experts.flatten().argsort(stable=True)

    monkeypatch.setattr(experts.Router, "choose", choose)
    _, loop = microbatch(config)
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda x, weights: calls.append(len(x)) or True)
    _, kernel = microbatch(config)
    assert len(calls) == 4 * config.num_layers                # twice forward, twice backward
    for one, other in zip(loop, kernel):
        torch.testing.assert_close(one.main_grad, other.main_grad, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_small_steps_of_the_expert_bias_add_up_and_decide(pool):
    """All scores are 0.5, so the biases decide alone. bfloat16 has no number between 1 and 1.0078."""
    config = tiny(2, num_experts=2, disable_bias_linear=True, moe_router_topk=1, moe_router_score_function="sigmoid",
                  moe_router_enable_expert_bias=True, moe_router_bias_update_rate=1e-3, dtype="bfloat16", lr=1e-9)
    weights, data = weights_and_data(config, 4, rigged=(("router.weight", 0.0), ("expert_bias", (1.005, 1.0))))
    tokens = config.global_batch_size * config.seq_length
    for outcome in pool.run(train_rank, config, weights, data, 4, world_size=2):
        assert [counts[:2] for counts in outcome.statistics] == [(tokens, 0)] * 3 + [(0, tokens)]
        biases = [bias for name, (bias, _) in outcome.weights.items() if name.endswith("expert_bias")]
        for bias in biases:
            torch.testing.assert_close(bias, torch.tensor([1.003, 1.002]))
        assert len(biases) == config.num_layers


def test_an_evaluation_computes_no_routing_losses(monkeypatch):
    config = tiny(num_experts=4, disable_bias_linear=True)
    monkeypatch.setattr(experts.Router, "loss", None)
    counts, _ = microbatch(config, training=False)
    assert not counts.any()


def test_the_rows_are_gathered_before_the_host_waits_for_their_numbers(monkeypatch):
    """Otherwise a GPU would have nothing to do until the host has launched the dispatch."""
    calls, config = [], tiny(num_experts=4, disable_bias_linear=True)
    rows = config.micro_batch_size * config.seq_length * config.moe_router_topk

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            calls.append((function._opname, getattr(result, "shape", None)))
            return result

    read = experts.Dispatch.read
    monkeypatch.setattr(experts.Dispatch, "read", lambda *given: calls.append("the host waits") or read(*given))
    with Calls():
        microbatch(config)
    assert ("index", (rows, config.hidden_size)) in calls[:calls.index("the host waits")]


@pytest.mark.parametrize("capability, found", [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_only_gpus_with_a_grouped_kernel_use_it(capability, found):
    """Elsewhere torch's grouped_mm makes the host wait for the GPU."""
    x, weights = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 16), (2, 8, 16)))
    with standing_for(StandIn("cuda", capability=capability)):
        assert experts.has_grouped_kernel(x, weights) == found


def test_the_experts_hide_the_sum_of_choices_of_ranks_that_share_samples():
    config, trace = tiny(2, num_experts=4, disable_bias_linear=True, context_parallel_size=2, num_layers=1), Trace()
    with fake_world(0, 2):
        mesh, _, optimizer, stage = build(config, trace=trace)
        train.train_step(1, stage, optimizer, random_data(config, 1), config, mesh)
    kinds = [event.kind for event in trace.events if event.args.get("site") == "layers.0.mlp"
             and event.args.get("group") in (None, "cp")]
    launched = kinds.index("all_reduce")
    assert kinds[launched:kinds.index("wait", launched)].count("matmul") == 2
