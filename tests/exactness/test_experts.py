"""Training with experts gives the same losses, gradients and weights on every layout."""

import pytest
from support.harness import difference, full_tensors, random_data, relative, tiny, train_rank

TOLERANCE = 1e-9
EXPERTS = dict(num_experts=4, disable_bias_linear=True, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.01,
               moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05, init_method_std=0.3, num_layers=4,
               moe_layer_freq=2)


def case(tp, pp, dp, ep, **options):
    return pytest.param(tp * pp * dp, dict(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp,
        expert_model_parallel_size=ep, **options), id=f"{tp}x{pp}x{dp} ep {ep} " + " ".join(map(str, options.values())))


@pytest.mark.parametrize("world_size, options", [
    case(1, 1, 2, 2), case(1, 1, 4, 2, zero_stage=2, slices=2), case(1, 1, 4, 4, zero_stage=0, slices=3),
    case(2, 1, 2, 2, slices=2, sequence_parallel=True), case(2, 1, 1, 1, slices=2),
    case(1, 2, 2, 2, schedule="zb-v", slices=2, moe_layer_freq=1),
    case(2, 2, 2, 2, slices=2, recompute_granularity="full"),
    case(1, 2, 2, 2, schedule="paired", recompute_granularity="selective")])
def test_the_layout_never_shows(pool, world_size, options):
    alone = tiny(**EXPERTS | {name: value for name, value in options.items() if name == "moe_layer_freq"})
    config = tiny(world_size, **EXPERTS | options)
    data = random_data(alone, 3)
    (one,) = pool.run(train_rank, alone, None, data, 3, world_size=1)
    outcomes = pool.run(train_rank, config, None, data, 3, world_size=world_size)
    assert relative(outcomes[0].losses, one.losses) < TOLERANCE
    assert relative(outcomes[0].norms, one.norms) < TOLERANCE
    for step in range(3):
        assert difference(full_tensors(outcomes, lambda outcome: outcome.gradients[step]),
                          full_tensors([one], lambda outcome: outcome.gradients[step])) < TOLERANCE
    assert difference(full_tensors(outcomes, lambda outcome: outcome.weights),
                      full_tensors([one], lambda outcome: outcome.weights)) < TOLERANCE
    assert relative([outcomes[0].evaluation], [one.evaluation]) < TOLERANCE
