"""Every setting of the model, the layout and the training has an effect: a flag that is accepted does something.

Other tests show that an effect is right; this table shows that no setting gets lost between its flag and the code. Each
row changes one setting. What a rank then computes, communicates or decides must change too.
"""

from collections import Counter
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace

import pytest
from support.fake_world import fake_world
from support.harness import build, random_data, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanodomino.comm.trace import Trace
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_settings

ALONE = dict(num_layers=1, global_batch_size=4, micro_batch_size=4, lr_warmup_fraction=0.2)
EIGHT = dict(num_layers=2, global_batch_size=16, micro_batch_size=4, tensor_model_parallel_size=2,
             pipeline_model_parallel_size=2)
ROPE = dict(position_embedding_type="rope")
EXPERTS = dict(num_experts=4, disable_bias_linear=True, num_layers=2)
BIAS = EXPERTS | dict(moe_router_enable_expert_bias=True)
FP16, FP32 = dict(dtype="float16", initial_loss_scale=2.0**10), dict(dtype="float32")
FP8 = FP32 | dict(fp8_format="e4m3")
WSD = dict(lr_decay_style="WSD", lr_decay_iters=4, lr_wsd_decay_iters=3)
OVERFLOW = dict(dtype="float16", initial_loss_scale=2.0**100, hysteresis=1)        # in every step

# {setting: (another value than in the base, what the base needs so that the setting can have an effect)}
MODEL_AND_TRAINING = dict(
    model=("nano-llama", {}), num_layers=(2, {}), hidden_size=(32, {}), ffn_hidden_size=(24, {}),
    num_attention_heads=(4, {}), num_query_groups=(4, {}), kv_channels=(4, {}), seq_length=(12, {}),
    max_position_embeddings=(12, {}), position_embedding_type=("rope", {}),
    rotary_percent=(0.5, ROPE | dict(kv_channels=4)), rotary_base=(50.0, ROPE | dict(kv_channels=4)),
    use_rope_scaling=(True, ROPE | dict(kv_channels=32)),
    rope_scaling_factor=(3.0, ROPE | dict(kv_channels=32, use_rope_scaling=True)),
    rotary_seq_len_interpolation_factor=(2.0, ROPE), vocab_size=(30, {}), make_vocab_size_divisible_by=(64, {}),
    untie_embeddings_and_output_weights=(True, {}), normalization=("RMSNorm", {}), layernorm_epsilon=(0.01, {}),
    swiglu=(True, {}), disable_bias_linear=(True, {}), add_qkv_bias=(True, dict(disable_bias_linear=True)),
    qk_layernorm=(True, {}), num_experts=(4, dict(disable_bias_linear=True)), moe_layer_freq=(2, EXPERTS),
    moe_router_topk=(3, EXPERTS), moe_ffn_hidden_size=(24, EXPERTS),
    moe_shared_expert_intermediate_size=(24, EXPERTS), moe_router_score_function=("sigmoid", EXPERTS),
    moe_router_pre_softmax=(True, EXPERTS), moe_router_topk_scaling_factor=(2.0, EXPERTS),
    moe_router_enable_expert_bias=(True, EXPERTS), moe_router_bias_update_rate=(0.5, BIAS),
    moe_aux_loss_coeff=(0.1, EXPERTS), moe_z_loss_coeff=(0.1, EXPERTS), mtp_num_layers=(1, {}),
    mtp_loss_scaling_factor=(0.5, dict(mtp_num_layers=1)), hidden_dropout=(0.5, {}),
    attention_dropout=(0.5, {}), window_size=(2, {}), full_attention_layers=(1, dict(window_size=2, num_layers=2)),
    init_method_std=(0.1, {}), train_iters=(9, {}), global_batch_size=(8, {}), optimizer=("muon", {}), lr=(0.02, {}),
    min_lr=(0.0, {}), lr_decay_style=("linear", {}), lr_decay_iters=(2, {}), lr_wsd_decay_iters=(1, WSD),
    lr_wsd_decay_style=("linear", WSD), lr_warmup_fraction=(0.0, {}), weight_decay=(0.0, {}), clip_grad=(0.0, {}),
    adam_beta1=(0.0, {}), adam_beta2=(0.0, {}), adam_eps=(0.1, {}), muon_momentum=(0.0, dict(optimizer="muon")),
    dtype=("float32", {}), fp8_format=("hybrid", FP32), fp8_recipe=("rowwise", FP8), fp8_wgrad=(False, FP8),
    first_last_layers_bf16=(True, FP8 | dict(num_layers=3)),
    loss_scale=(4.0, FP16), initial_loss_scale=(4.0, FP16), min_loss_scale=(2.0**100, OVERFLOW),
    loss_scale_window=(1, FP16), hysteresis=(2, OVERFLOW), fp16_lm_cross_entropy=(True, FP16), seed=(0, {}))
LAYOUT = dict(
    tensor_model_parallel_size=(1, {}), pipeline_model_parallel_size=(1, {}), context_parallel_size=(2, {}),
    data_parallel_size=(8, dict(tensor_model_parallel_size=None, pipeline_model_parallel_size=None,
                                micro_batch_size=2)), cp_comm_type=("a2a", dict(context_parallel_size=2)),
    expert_model_parallel_size=(2, dict(num_experts=4, disable_bias_linear=True)),
    micro_batch_size=(2, {}), slices=(1, {}), columns=(2, {}), schedule=("gpipe", dict(global_batch_size=32)),
    look_ahead=(2, dict(schedule="eager-1f1b", global_batch_size=48)),
    virtual_stages=(3, dict(schedule="interleaved", num_layers=6)), sequence_parallel=(True, {}),
    recompute_granularity=("full", {}), zero_stage=(0, {}), bucket_size=(100, {}))
# checkpoint_in_cpu needs a GPU: options/test_recompute.py
ELSEWHERE = {"checkpoint_in_cpu"}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@lru_cache
def what_it_does(config) -> tuple:
    """Train on rank 0: two steps if it is alone, else one step, in which the other ranks are missing. Returns
    (operations if it is not alone, events, loss scales, losses and norms, weights)."""
    trace, results, scales, steps = Trace(), [], [], 2 if config.world_size == 1 else 1
    with fake_world(0, config.world_size):
        mesh, model, optimizer, stage = build(config, trace=trace)
        with Operations() if config.world_size > 1 else nullcontext(SimpleNamespace(counts={})) as operations:
            for step in range(1, steps + 1):
                scales.append(optimizer.loss_scale.value)
                result = train.train_step(step, stage, optimizer, random_data(config, steps), config, mesh)
                results += map(str, (result.loss, result.grad_norm))       # NaN does not equal itself
    events = [(event.kind, sorted(event.args.items())) for event in trace.events]
    return (operations.counts, events, scales, results,
            [(name, weight.dtype, weight.tolist()) for name, weight in model.named_parameters()])


@pytest.mark.table
def test_the_tables_below_hold_every_setting():
    fields = {field.name for field in flag_settings(Config, "The model", "The layout", "The training")}
    rows = {*MODEL_AND_TRAINING, *LAYOUT, *ELSEWHERE}
    assert not fields - rows, f"add a row for {sorted(fields - rows)} to MODEL_AND_TRAINING or LAYOUT"
    assert not rows - fields, f"remove the rows of {sorted(rows - fields)}"


@pytest.mark.parametrize("name", [*MODEL_AND_TRAINING, *LAYOUT])
def test_a_setting_reaches_its_effect(name):
    value, needs = (MODEL_AND_TRAINING | LAYOUT)[name]
    world_size, sizes = (8, EIGHT) if name in LAYOUT else (1, ALONE)
    base, changed = (tiny(world_size, **sizes | needs | change) for change in ({}, {name: value}))
    assert what_it_does(base) != what_it_does(changed)
