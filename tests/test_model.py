"""The model: initial weights, logits, cross entropy, dropout masks, parameter and FLOP counts."""

import pytest
import torch
import torch.nn.functional as F
from support.harness import Outcome, build, full_tensors, shard_spec, sizes_of, tiny, weights_and_data
from support.reference import ReferenceGPT, dropout_masks

from nanodomino.analysis.formulas import flops_per_token, parameter_count
from nanodomino.config.config import Config
from nanodomino.config.presets import PRESETS, PUBLISHED_VOCABULARIES
from nanodomino.layers.dropout_and_positions import MasksAndPositions


def drawn_rank(config):
    mesh, model, _, _ = build(config)
    shards = {name: (weight.detach().clone(), shard_spec(weight)) for name, weight in model.named_parameters()}
    return Outcome((mesh.pp_rank, mesh.dp_rank, mesh.tp_rank), [], [], [], shards, 0.0)


def drawn(pool, **layout):
    world_size = layout.get("tensor_model_parallel_size", 1) * layout.get("pipeline_model_parallel_size",
                                                                          1) * layout.pop("dp", 1)
    config = tiny(world_size, init_method_std=0.02, dtype="float32", **layout)
    outcomes = pool.run(drawn_rank, config, world_size=world_size)
    return full_tensors(outcomes, lambda outcome: outcome.weights), outcomes


def test_initial_weights_do_not_depend_on_the_layout(pool):
    """Replicas start with equal bits (full_tensors() checks that), and so does every layout."""
    alone, _ = drawn(pool)
    for layout in (dict(tensor_model_parallel_size=4),
                   dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2, dp=2)):
        weights, _ = drawn(pool, **layout)
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weights[name], alone[name]) for name in alone)


def test_shards_of_one_matrix_are_different(pool):
    """If the ranks drew their shards from the same seed, the shards would be equal and stay equal."""
    _, outcomes = drawn(pool, tensor_model_parallel_size=4)
    matrices = [name for name, (tensor, (shape, _, size)) in outcomes[0].weights.items() if size != shape
                and tensor.dim() == 2]
    assert len(matrices) == 1 + 4 * 3
    for name in matrices:
        shards = [outcome.weights[name][0] for outcome in outcomes]
        assert not any(torch.equal(shards[i], shards[j]) for i in range(4) for j in range(i)), name


def test_initial_weights_follow_gpt2(pool):
    """Every matrix is drawn, also the position embedding; GPT-2 divides row-parallel ones by sqrt(2 L) = sqrt(4)."""
    weights, _ = drawn(pool, hidden_size=64, num_layers=2, num_attention_heads=4,
                       untie_embeddings_and_output_weights=True)
    assert sum(weight.dim() == 2 for weight in weights.values()) == 3 + 2 * 4
    for name, weight in weights.items():
        if weight.dim() == 2:
            std = 0.02 / 4 ** 0.5 if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")) else 0.02
            assert weight.std() == pytest.approx(std, rel=0.1) and abs(weight.mean()) < 0.1 * std, name
        else:
            assert weight.eq(1 if name.endswith("norm.weight") else 0).all(), name


def logits_rank(config, weights, data, parallel_output):
    _, model, _, _ = build(config, weights)
    model.parallel_output = parallel_output
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    logits = model(batch.tokens, batch.positions)
    loss = (F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
            * batch.loss_mask.flatten()).sum() if not parallel_output else None
    if loss is not None:
        loss.backward()
    gradients = {} if loss is None else {name: (weight.grad, shard_spec(weight))
                                         for name, weight in model.named_parameters()}
    return Outcome((0, 0, model.mesh.tp_rank), [logits.detach()], [], [], gradients, 0.0)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_logits_are_the_reference_models_gathered_or_sharded(pool, tp):
    """Padding rows have no logits, and gathered logits pass gradients back to each shard."""
    config = tiny(tp, tensor_model_parallel_size=tp)
    weights, data = weights_and_data(config, 1)
    reference = ReferenceGPT(sizes_of(config)).double().load_full(weights)
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    expected = reference(batch.tokens, batch.positions)
    gathered = pool.run(logits_rank, config, weights, data, False, world_size=tp)
    sharded = pool.run(logits_rank, config, weights, data, True, world_size=tp)
    assert all(torch.allclose(outcome.losses[0], expected, rtol=0, atol=1e-12) for outcome in gathered)
    assert torch.allclose(torch.cat([outcome.losses[0] for outcome in sharded], dim=-1), expected, rtol=0, atol=1e-12)
    losses = F.cross_entropy(expected.flatten(0, 1), batch.labels.flatten(),
                             reduction="none") * batch.loss_mask.flatten()
    losses.sum().backward()
    gradients = full_tensors(gathered, lambda outcome: outcome.weights)
    for name, gradient in reference.full_gradients().items():
        assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-11), name


def huge_logits_rank(config, scale):
    from nanodomino.layers.cross_entropy import vocab_parallel_cross_entropy
    _, model, _, _ = build(config)
    (vocabulary,) = model.head
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, config.vocab_size, generator=generator) * scale
    labels = torch.randint(0, config.vocab_size, (2, 3), generator=generator)
    words = logits[..., vocabulary.first_row:vocabulary.first_row + vocabulary.num_words]
    # padding logits that would dominate the softmax if they counted
    local = F.pad(words, (0, vocabulary.num_logits - vocabulary.num_words), value=1e4).requires_grad_()
    before = local.detach().clone()
    loss = vocab_parallel_cross_entropy(local, labels, vocabulary)
    loss.sum().backward()
    assert torch.equal(local.detach(), before), "the logits were overwritten"
    full = logits.requires_grad_()
    expected = F.cross_entropy(full.flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    expected.sum().backward()
    gradient = full.grad[..., vocabulary.first_row:vocabulary.first_row + vocabulary.num_words]
    assert not local.grad[..., vocabulary.num_words:].any()
    return loss.detach(), expected.detach(), local.grad[..., :vocabulary.num_words], gradient


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_vocab_parallel_cross_entropy_in_float32(pool, scale):
    """At scale 300 exp overflows unless the maximum over all ranks is subtracted. Logits are not overwritten."""
    config = tiny(4, tensor_model_parallel_size=4, dtype="float32")
    for loss, expected, gradient, expected_gradient in pool.run(huge_logits_rank, config, scale, world_size=4):
        assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


class OneRank:
    """Stands in for a VocabParallelEmbedding with all 19 words of a vocabulary and 24 logits."""
    num_words, num_logits = 19, 24

    class group:
        size = staticmethod(lambda: 1)

    @staticmethod
    def local_rows(labels):
        return labels, torch.ones_like(labels, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_cross_entropy_in_chunks_rounds_each_gradient_by_itself(monkeypatch, dtype, rows):
    """For any number of rows per chunk, and where the model is so sure of the label that its probability rounds to 1 in
    16 bits: then softmax - 1 would be 0."""
    from nanodomino.layers import cross_entropy
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", rows * 4 * OneRank.num_logits)
    logits = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(6)) * 4
    labels = torch.tensor([[3, 18, 0, 7, 7]])
    logits[0, 4, 7] = logits[0, 4].max() + 9.0                      # p = 0.9995
    logits = logits.to(dtype).requires_grad_()
    loss = cross_entropy.vocab_parallel_cross_entropy(logits, labels, OneRank)
    loss.sum().backward()
    exact = logits.detach()[..., :19].double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none")
    expected.sum().backward()
    assert loss.dtype == torch.float32 and torch.allclose(loss.double().flatten(), expected, rtol=1e-5, atol=1e-6)
    assert not logits.grad[..., 19:].any()
    allowed = {torch.float32: 1e-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert ((logits.grad[..., :19].double() - exact.grad).abs() <= allowed * exact.grad.abs() + 1e-7).all()


class FakeMesh:
    def __init__(self, tp, tp_rank):
        self.tp, self.tp_rank = tp, tp_rank


class FakeAttention:
    attends = True
    site = "layers.0.attention"


def masks_of(masks, x):
    """Return an attention's masks: of the probabilities of this rank's heads, and of the residual stream."""
    return (masks.attention_inputs(FakeAttention(), x).dropout_mask,
            masks.hidden_dropout_mask("layers.0.attention.hidden", x))


def test_dropout_masks_agree_where_replicated_and_differ_where_sharded():
    """Every rank holds a copy of the residual stream and must drop the same numbers; heads differ from rank to rank."""
    config = tiny(2, tensor_model_parallel_size=2, hidden_dropout=0.5, attention_dropout=0.5, seed=5)
    x = torch.zeros(2, config.seq_length, config.hidden_size)
    ranks = [MasksAndPositions(config, FakeMesh(2, rank), [10, 11]) for rank in (0, 1)]
    (core0, hidden0), (core1, hidden1) = (masks_of(masks, x) for masks in ranks)
    assert torch.equal(hidden0, hidden1)
    assert not torch.equal(core0, core1)                        # masks of different heads
    assert not torch.equal(hidden0[0], hidden0[1])              # masks of different samples
    assert set(hidden0.unique().tolist()) == {0.0, 2.0}         # scaled by 1 / (1 - p)
    again = masks_of(MasksAndPositions(config, FakeMesh(2, 0), [11]), x[:1])
    # slicing the batch changes no mask
    assert torch.equal(again[0][0], core0[1]) and torch.equal(again[1][0], hidden0[1])
    expected = dropout_masks(config.seed, [10, 11], hidden=0.5, attention=0.5)
    assert torch.equal(hidden0, expected("layers.0.attention.hidden", hidden0.shape).float())
    heads = expected("layers.0.attention.core", (2, config.num_attention_heads, *core0.shape[2:]))
    assert torch.equal(torch.cat([core0, core1], dim=1), heads.float())
    assert masks_of(MasksAndPositions(config, FakeMesh(2, 0), None), x) == (None, None)             # evaluation


@pytest.mark.parametrize("name, millions", [("nano", 0.93), ("gpt2", 124), ("gpt2-medium", 355), ("gpt2-large", 774),
                                            ("gpt2-xl", 1558),
                                            ("gpt3-2.7b", 2650), ("gpt3-6.7b", 6660), ("gpt3-13b", 12850),
                                            ("llama2-7b", 6738), ("llama2-13b", 13016), ("llama3-8b", 8030),
                                            ("llama3.2-1b", 1236), ("qwen2.5-0.5b", 494), ("qwen3-0.6b", 596),
                                            ("smollm2-135m", 134.5)])
def test_presets_have_the_published_sizes(name, millions):
    config = Config(model=name).resolve(1).with_vocabulary(PUBLISHED_VOCABULARIES.get(name, 257))
    assert parameter_count(config) / 1e6 == pytest.approx(millions, rel=0.01)
    assert set(PRESETS[name]) >= {"num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr"}


@pytest.mark.parametrize("name, epsilon, base, scaling, heads", [
    ("llama2-7b", 1e-5, 1e4, None, (32, 32, 128)), ("llama2-13b", 1e-5, 1e4, None, (40, 40, 128)),
    ("llama3-8b", 1e-5, 5e5, None, (32, 8, 128)), ("llama3.2-1b", 1e-5, 5e5, 32.0, (32, 8, 64)),
    ("qwen2.5-0.5b", 1e-6, 1e6, None, (14, 2, 64)), ("qwen3-0.6b", 1e-6, 1e6, None, (16, 8, 128)),
    ("smollm2-135m", 1e-5, 1e5, None, (9, 3, 64)), ("mixtral-8x7b", 1e-5, 1e6, None, (32, 8, 128)),
    ("qwen3-30b-a3b", 1e-6, 1e6, None, (32, 4, 128))])
def test_presets_have_the_published_norms_positions_and_heads(name, epsilon, base, scaling, heads):
    """The numbers of the published config.json files that no parameter count reveals."""
    config = Config(model=name).resolve(1)
    assert (config.layernorm_epsilon, config.rotary_base) == (epsilon, base)
    assert (config.rope_scaling_factor if config.use_rope_scaling else None) == scaling
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == heads


def test_parameters_are_counted_as_they_are_made(pool):
    for untied in (False, True):
        config = tiny(1, untie_embeddings_and_output_weights=untied)
        (outcome,) = pool.run(drawn_rank, config, world_size=1)
        padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size * (2 if untied else 1)
        assert sum(tensor.numel() for tensor, _ in outcome.weights.values()) == parameter_count(config) + padding


def test_flops_are_counted_as_nanogpt_counts_them():
    config = Config(model="gpt2").resolve(1).with_vocabulary(50257)
    assert flops_per_token(config) == 6 * (parameter_count(config) - 1024 * 768) + 12 * 12 * 12 * 64 * 1024
