"""The model: initial weights, logits, cross entropy, presets, parameter and FLOP counts."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.harness import Outcome, build, full_tensors, shard_spec, tiny, weights_and_data
from support.reference import ReferenceGPT, masked_loss

from nanodomino.estimate.formulas import flops_per_token, parameter_count
from nanodomino.layers import cross_entropy
from nanodomino.model import Embedding, meta_stage
from nanodomino.settings.config import Config
from nanodomino.settings.presets import PUBLISHED_VOCABULARIES


def drawn_rank(config):
    mesh, model, _, _ = build(config)
    shards = {name: (weight.detach().clone(), shard_spec(weight)) for name, weight in model.named_parameters()}
    return Outcome((mesh.pp_rank, mesh.dp_rank, mesh.tp_rank), [], [], [], shards, 0.0)


def drawn(pool, tp=1, pp=1, dp=1, **options):
    """Return the initial weights, joined and by rank."""
    config = tiny(tp * pp * dp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, init_method_std=0.02,
                  dtype="float32", **options)
    outcomes = pool.run(drawn_rank, config, world_size=config.world_size)
    return full_tensors(outcomes, lambda outcome: outcome.weights), outcomes


def test_initial_weights_do_not_depend_on_the_layout_and_shards_of_one_matrix_are_different(pool):
    """Replicas start with equal bits (full_tensors() checks that), and so does every layout. If the ranks drew their
    shards from the same seed, the shards would be equal and stay equal."""
    alone, _ = drawn(pool)
    for layout in ((2, 2, 2), (4, 1, 1)):
        weights, outcomes = drawn(pool, *layout)
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[name], alone[name]) for name in alone)
    matrices = [name for name, (tensor, (shape, _, size)) in outcomes[0].weights.items() if size != shape
                and tensor.dim() == 2]
    assert len(matrices) == 1 + 4 * 3
    for name in matrices:
        shards = [outcome.weights[name][0] for outcome in outcomes]
        assert not any(torch.equal(shards[i], shards[j]) for i in range(4) for j in range(i)), name


def test_initial_weights_follow_gpt2(pool):
    """Each matrix is drawn by itself, also the position embedding; GPT-2 divides row-parallel ones by sqrt(2 L) = 2."""
    weights, _ = drawn(pool, hidden_size=64, num_layers=2, num_attention_heads=4,
                       untie_embeddings_and_output_weights=True)
    assert len({weight[0, 0].item() for weight in weights.values() if weight.dim() == 2}) == 3 + 2 * 4
    for name, weight in weights.items():
        if weight.dim() == 2:
            std = 0.02 / 4 ** 0.5 if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")) else 0.02
            assert weight.std() == pytest.approx(std, rel=0.1) and abs(weight.mean()) < 0.1 * std, name
        else:
            assert weight.eq(1 if name.endswith("norm.weight") else 0).all(), name
    experts = tiny(1, num_experts=2, disable_bias_linear=True, num_layers=8, moe_shared_expert_intermediate_size=8)
    assert {weight.spec.std for name, weight in meta_stage(experts).named_parameters() if "4h_to_h" in name} == {
        experts.init_method_std / 4}, "an expert's second matrix is drawn like a row-parallel one"


def logits_rank(config, weights, data, parallel_output):
    """Return the logits of this rank's words or of all words. Of all words, also the gradients of a loss."""
    _, model, _, _ = build(config, weights)
    model.parallel_output, gradients = parallel_output, {}
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    logits = model(batch.tokens, batch.positions)
    if not parallel_output:
        masked_loss(logits, batch.labels, batch.loss_mask.double()).backward()
        gradients = {name: (weight.grad, shard_spec(weight)) for name, weight in model.named_parameters()}
    return Outcome((0, 0, model.mesh.tp_rank), [logits.detach()], [], [], gradients, 0.0)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_logits_are_the_reference_models_gathered_or_sharded(pool, tp):
    """Padding rows have no logits, and gathered logits pass gradients back to each shard."""
    config = tiny(tp, tensor_model_parallel_size=tp)
    weights, data = weights_and_data(config, 1)
    reference = ReferenceGPT(config).double().load_full(weights)
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    expected = reference(batch.tokens, batch.positions)
    gathered = pool.run(logits_rank, config, weights, data, False, world_size=tp)
    sharded = pool.run(logits_rank, config, weights, data, True, world_size=tp)
    assert all(torch.allclose(outcome.losses[0], expected, rtol=0, atol=1e-12) for outcome in gathered)
    assert torch.allclose(torch.cat([outcome.losses[0] for outcome in sharded], dim=-1), expected, rtol=0, atol=1e-12)
    masked_loss(expected, batch.labels, batch.loss_mask.double()).backward()
    gradients = full_tensors(gathered, lambda outcome: outcome.weights)
    for name, gradient in reference.full_gradients().items():
        assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-11), name


def test_the_gradients_of_a_position_are_summed_in_fp32():
    """A sum of ones in bfloat16 stops at 256."""
    weight = torch.nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(2, 4)
    stand_in = SimpleNamespace(position_embeddings=SimpleNamespace(weight=weight))
    Embedding.add_position_gradients(stand_in, torch.ones(300, 2, 4).bfloat16(), torch.arange(2).expand(300, 2))
    assert weight.main_grad.unique().tolist() == [300.0]


class OneRank:
    """Stands in for a VocabParallelEmbedding with all 19 words of a vocabulary and 24 logits."""
    num_words, num_logits = 19, 24

    class group:
        size = staticmethod(lambda: 1)

    @staticmethod
    def local_rows(labels):
        return labels, torch.ones_like(labels, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, scale", [(1, 4), (2, 4), (1000, 4), (2, 300)])
def test_cross_entropy_in_blocks_rounds_each_gradient_by_itself(monkeypatch, dtype, rows, scale):
    """For any number of rows per chunk, for logits of 300, whose exp overflows, and where the model is so sure of the
    label that its probability rounds to 1 in 16 bits: then softmax - 1 would be 0. Padding would dominate the softmax
    if it counted. The caller's logits are not overwritten."""
    monkeypatch.setitem(cross_entropy.BLOCK_BYTES, "cpu", rows * 4 * OneRank.num_logits)
    logits = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(6)) * scale
    labels = torch.tensor([[3, 18, 0, 7, 7]])
    logits[0, 4, 7] = logits[0, 4].max() + 9.0                      # p = 0.9995
    logits[..., 19:] = 1e4
    logits = logits.to(dtype).requires_grad_()
    before = logits.detach().clone()
    plain = cross_entropy.vocab_parallel_cross_entropy(logits, labels, OneRank)
    plain.sum().backward()
    exact = logits.detach()[..., :19].double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none")
    expected.sum().backward()
    assert torch.equal(logits.detach(), before)
    largest, sum_exp = cross_entropy.local_max_and_sum_exp(before, OneRank)
    sums = cross_entropy.partial_loss_sums(before, labels, largest, sum_exp, largest, OneRank)
    loss, ones = cross_entropy.loss_from_sums(sums), torch.ones(1, 5)
    ours = cross_entropy.cross_entropy_gradient(before, labels, loss, largest, sums, ones, OneRank)
    allowed = {torch.float32: 1e-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for found, gradient in ((plain, logits.grad), (loss, ours)):
        assert found.dtype == torch.float32 and torch.allclose(found.double().flatten(), expected, rtol=1e-5, atol=1e-6)
        assert not gradient[..., 19:].any()
        assert ((gradient[..., :19].double() - exact.grad).abs() <= allowed * exact.grad.abs() + 1e-7).all()


@pytest.mark.table
def test_a_rank_of_padding_does_not_raise_the_largest_logit_of_all_ranks():
    """Otherwise exp(logit - largest) would be 0 for each word if all logits are below -100."""
    largest, sum_exp = cross_entropy.local_max_and_sum_exp(torch.zeros(1, 5, 0), SimpleNamespace(num_words=0))
    assert (largest.max(), sum_exp.max()) == (-torch.inf, 0.0)


# Published counts; tied embeddings count once. GPT-3's paper rounds. Where there is a config.json, also its epsilon,
# rope base and scaling, and its heads, which no count reveals.
PUBLISHED = {
    "nano": (0.93e6,), "gpt3-2.7b": (2650e6,), "gpt3-6.7b": (6660e6,), "gpt3-13b": (12850e6,), "gpt2": (124_439_808,),
    "gpt2-medium": (354_823_168,), "gpt2-large": (774_030_080,), "gpt2-xl": (1_557_611_200,),
    "llama2-7b": (6_738_415_616, 1e-5, 1e4, None, (32, 32, 128)),
    "llama2-13b": (13_015_864_320, 1e-5, 1e4, None, (40, 40, 128)),
    "llama3-8b": (8_030_261_248, 1e-5, 5e5, None, (32, 8, 128)),
    "llama3.2-1b": (1_235_814_400, 1e-5, 5e5, 32.0, (32, 8, 64)),
    "qwen2.5-0.5b": (494_032_768, 1e-6, 1e6, None, (14, 2, 64)),
    "qwen3-0.6b": (596_049_920, 1e-6, 1e6, None, (16, 8, 128)),
    "smollm2-135m": (134_515_008, 1e-5, 1e5, None, (9, 3, 64)),
    "mixtral-8x7b": (46_702_792_704, 1e-5, 1e6, None, (32, 8, 128)),
    "qwen3-30b-a3b": (30_532_122_624, 1e-6, 1e6, None, (32, 4, 128))}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_model(name):
    (parameters, *others), config = PUBLISHED[name], Config(model=name).resolve(1)
    config = config.with_vocabulary(PUBLISHED_VOCABULARIES.get(name, 257))
    error = 0.0 if isinstance(parameters, int) else 0.01
    assert parameter_count(config) == pytest.approx(parameters, rel=error, abs=error)
    assert not others or others == [
        config.layernorm_epsilon, config.rotary_base, config.rope_scaling_factor if config.use_rope_scaling else None,
        (config.num_attention_heads, config.num_query_groups, config.kv_channels)]


def test_a_flag_overrides_the_preset():
    config = Config(model="nano-llama", swiglu=False, normalization="LayerNorm").resolve(1).with_vocabulary(257)
    names = dict(meta_stage(config).named_parameters())
    assert names["layers.0.mlp.dense_h_to_4h.weight"].shape == (384, 96) and "final_norm.bias" in names


def test_neither_of_two_untied_matrices_counts_the_rows_that_pad_it():
    tied, untied = (parameter_count(tiny(1, untie_embeddings_and_output_weights=untied)) for untied in (False, True))
    assert untied - tied == 29 * 16


def test_flops_are_counted_as_nanogpt_counts_them():
    config = Config(model="gpt2").resolve(1).with_vocabulary(50257)
    assert flops_per_token(config) == 6 * (parameter_count(config) - 1024 * 768) + 12 * 12 * 12 * 64 * 1024
