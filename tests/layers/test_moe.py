"""The parts of an expert layer that other tests do not reach on a CPU."""

import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny, train_rank, weights_and_data

from nanodomino.domino import run_to_end
from nanodomino.options.experts import moe


def gradients(config):
    """Return the gradients of one microbatch on one process."""
    with fake_world(0, 1):
        _, model, _, stage = build(config)
        batch = random_data(config, 1).batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        losses, tape = run_to_end(stage.forward(batch))
        run_to_end(stage.backward(tape, torch.ones_like(losses)))
    return [weight.main_grad for weight in model.parameters()]


def test_the_grouped_kernel_is_called_as_torch_defines_it(monkeypatch):
    """It runs on CPUs too, in float32. Expert 0 gets no tokens, so one group is empty."""
    config = tiny(num_experts=4, disable_bias_linear=True, dtype="float32", swiglu=True, init_method_std=0.3)
    calls, plain = [], moe.Router.choose

    def choose(router, logits):
        experts = plain(router, logits)[0].clamp(min=1)
        return experts, experts.flatten().bincount(minlength=4)

    monkeypatch.setattr(moe.Router, "choose", choose)
    loop = gradients(config)
    monkeypatch.setattr(moe, "has_grouped_kernel", lambda x, weights: calls.append(len(x)) or True)
    kernel = gradients(config)
    assert len(calls) == 4 * config.num_layers                # twice forward, twice backward
    for one, other in zip(loop, kernel):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


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
    monkeypatch.setattr(moe.Router, "loss", None)
    with fake_world(0, 1):
        _, model, _, stage = build(config)
        batch = random_data(config, 1).batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        run_to_end(stage.forward(batch, training=False))
    assert not model.statistics.any()
