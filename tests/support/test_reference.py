"""The reference model against torch's own transformer, finite differences and formulas computed by hand."""

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.reference import ReferenceGPT, Sizes, masked_loss, random_weights, split_qkv, train_reference

SIZES = Sizes()
UNTIED = Sizes(tied=False)
EXPERTS = Sizes(num_experts=4, expert_width=12, shared_width=8, swiglu=True, bias=False, qkv_bias=False)


def random_batch(sizes, batch_size=3, seed=0):
    """Return tokens, labels and a loss_mask that leaves each row a different number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch_size, sizes.max_positions
    tokens, labels = (torch.randint(sizes.vocab_size, shape, generator=generator) for _ in range(2))
    loss_mask = (torch.arange(shape[1]) > torch.arange(batch_size)[:, None]).double()
    return tokens, labels, loss_mask


def loaded(sizes, weights=None):
    return ReferenceGPT(sizes).double().load_full(weights or random_weights(sizes))


def loss_of(sizes, weights, batch):
    tokens, labels, loss_mask = batch
    return masked_loss(loaded(sizes, weights)(tokens, torch.arange(tokens.shape[1])), labels, loss_mask).item()


def gradients_of(sizes, weights, batch):
    return train_reference(sizes, weights, [batch], [0.0])[0][0].gradients


def torch_transformer(sizes, weights):
    """The same layers as torch's encoder, and the fused row of each of its in_proj rows [all q, all k, all v]."""
    layer = nn.TransformerEncoderLayer(
        sizes.hidden_size, sizes.num_attention_heads, sizes.ffn_hidden_size, dropout=0.0,
        activation=partial(F.gelu, approximate="tanh"), layer_norm_eps=1e-5, batch_first=True, norm_first=True)
    norm = nn.LayerNorm(sizes.hidden_size)
    encoder = nn.TransformerEncoder(layer, sizes.num_layers, norm, enable_nested_tensor=False).double()
    n, d = sizes.num_attention_heads, sizes.head_dim
    # plain indices rather than the reference's own conversion: the fused row of (q/k/v, head, element)
    rows = torch.tensor([(head * 3 + part) * d + element for part in range(3) for head in range(n)
                         for element in range(d)])
    state = {}
    names = {"self_attn.out_proj.": "attention.dense.", "linear1.": "mlp.dense_h_to_4h.",
             "linear2.": "mlp.dense_4h_to_h.", "norm1.": "attention.norm.", "norm2.": "mlp.norm."}
    for layer, kind in itertools.product([f"layers.{i}." for i in range(sizes.num_layers)], ("weight", "bias")):
        state |= {layer + theirs + kind: weights[layer + ours + kind] for theirs, ours in names.items()}
        state[f"{layer}self_attn.in_proj_{kind}"] = weights[f"{layer}attention.qkv.{kind}"][rows]
    state["norm.weight"], state["norm.bias"] = weights["final_norm.weight"], weights["final_norm.bias"]
    encoder.load_state_dict(state)
    return encoder, rows


# ---- conversion between the two layouts of q, k and v

def test_fused_rows_run_head_then_part_then_element():
    fused = torch.arange(24)  # 4 heads of 2
    q, k, v = split_qkv(fused, 4, 2)
    assert q.tolist() == [0, 1, 6, 7, 12, 13, 18, 19]
    assert k.tolist() == [2, 3, 8, 9, 14, 15, 20, 21]
    assert v.tolist() == [4, 5, 10, 11, 16, 17, 22, 23]


@pytest.mark.parametrize("sizes", [SIZES, UNTIED], ids=["tied", "untied"])
def test_weights_go_in_and_come_out_unchanged(sizes):
    weights = random_weights(sizes)
    returned = loaded(sizes, weights).full_weights()
    assert returned.keys() == weights.keys()
    assert all(torch.equal(returned[name], weights[name]) for name in weights)
    assert ("output_layer.weight" in weights) != sizes.tied


def test_a_missing_name_and_a_wrong_shape_are_refused():
    weights = random_weights(SIZES)
    with pytest.raises(ValueError, match="final_norm.bias"):
        loaded(SIZES, {name: weights[name] for name in weights if name != "final_norm.bias"})
    with pytest.raises(ValueError, match="final_norm.bias"):
        loaded(SIZES, weights | {"final_norm.bias": torch.zeros(1)})


def test_random_weights_let_no_term_hide_and_depend_on_the_seed_alone():
    weights, again, other = random_weights(SIZES, 1), random_weights(SIZES, 1), random_weights(SIZES, 2)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float64 and (tensor != 0).all() and (tensor != 1).all()
        assert torch.equal(tensor, again[name]) and not torch.equal(tensor, other[name])


# ---- forward and gradients

def test_logits_and_gradients_equal_torchs_own_transformer():
    weights, (tokens, labels, loss_mask) = random_weights(UNTIED), random_batch(UNTIED)
    encoder, rows = torch_transformer(UNTIED, weights)
    words, positions = weights["embedding.word_embeddings.weight"], weights["embedding.position_embeddings.weight"]
    hidden = (words[tokens] + positions).requires_grad_()
    causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
    encoded = encoder(hidden, mask=causal, is_causal=True)
    theirs = encoded @ weights["output_layer.weight"][: UNTIED.vocab_size].t()
    ours = loaded(UNTIED, weights)(tokens, torch.arange(tokens.shape[1]))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    masked_loss(theirs, labels, loss_mask).backward()
    gradients = gradients_of(UNTIED, weights, (tokens, labels, loss_mask))
    for i, layer in enumerate(encoder.layers):
        for name, parameter, cut in (("attention.qkv.weight", layer.self_attn.in_proj_weight, rows),
                                     ("attention.dense.bias", layer.self_attn.out_proj.bias, slice(None)),
                                     ("mlp.norm.weight", layer.norm2.weight, slice(None)),
                                     ("mlp.dense_h_to_4h.weight", layer.linear1.weight, slice(None))):
            torch.testing.assert_close(gradients[f"layers.{i}.{name}"][cut], parameter.grad, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(gradients["embedding.position_embeddings.weight"], hidden.grad.sum(0), rtol=1e-10,
                               atol=1e-14)


@pytest.mark.parametrize("sizes", [
    SIZES, UNTIED, EXPERTS, dataclasses.replace(EXPERTS, score_function="sigmoid", scaling=2.0, topk=3),
    dataclasses.replace(EXPERTS, pre_softmax=True, swiglu=False, topk=1)],
    ids=["tied", "untied", "experts", "sigmoid", "pre-softmax"])
def test_gradients_equal_finite_differences_in_every_tensor(sizes):
    weights, batch, step = random_weights(sizes), random_batch(sizes), 1e-5
    gradients = gradients_of(sizes, weights, batch)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in weights.items():
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        up, down = (loss_of(sizes, weights | {name: tensor + sign * step * direction}, batch) for sign in (1, -1))
        expected = (gradients[name] * direction).sum().item()
        assert (up - down) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-9), name


def test_padded_rows_neither_count_nor_learn():
    weights, batch = random_weights(SIZES), random_batch(SIZES)
    words = "embedding.word_embeddings.weight"
    louder = weights[words].clone()
    louder[SIZES.vocab_size :] += 100.0
    assert loaded(SIZES)(*batch[:1], torch.arange(8)).shape[-1] == SIZES.vocab_size
    assert loss_of(SIZES, weights | {words: louder}, batch) == loss_of(SIZES, weights, batch)
    assert (gradients_of(SIZES, weights, batch)[words][SIZES.vocab_size :] == 0).all()


# ---- dropout masks

def test_masks_multiply_where_they_should():
    weights, tokens, positions = random_weights(UNTIED), random_batch(UNTIED)[0], torch.arange(8)
    model = loaded(UNTIED, weights)
    plain = model(tokens, positions)
    assert torch.equal(model(tokens, positions, lambda site, shape: torch.ones(shape).double()), plain)

    kept = 2.0 * (torch.arange(3 * 8 * 16) % 3 > 0).double().reshape(3, 8, 16)

    def embedding_only(site, shape):  # both branches of both layers dropped, and a third of the embedding
        return kept if site == "embedding" else torch.zeros(shape).double() if site.endswith("hidden") else None

    x = weights["embedding.word_embeddings.weight"][tokens] + weights["embedding.position_embeddings.weight"]
    normed = F.layer_norm(kept * x, (16,), weights["final_norm.weight"], weights["final_norm.bias"])
    logits = normed @ weights["output_layer.weight"][:29].t()
    torch.testing.assert_close(model(tokens, positions, embedding_only), logits, rtol=1e-12, atol=1e-12)

    def no_attention(site, shape):  # all probabilities dropped: the values don't matter, the dense bias stays
        return torch.zeros(shape).double() if site.endswith("core") else None

    fused = {f"layers.{i}.attention.qkv.bias": torch.ones(48).double() for i in range(2)}
    without_core = model(tokens, positions, no_attention)
    assert torch.equal(loaded(UNTIED, weights | fused)(tokens, positions, no_attention), without_core)
    assert not torch.allclose(without_core, plain)


# ---- training

def test_masked_tokens_have_no_label_and_the_mean_is_over_the_rest():
    weights, (tokens, labels, loss_mask) = random_weights(SIZES), random_batch(SIZES)
    log_probabilities = loaded(SIZES, weights)(tokens, torch.arange(8)).log_softmax(dim=-1)
    losses = [-log_probabilities[b, s, labels[b, s]].item() for b, s in loss_mask.nonzero().tolist()]
    assert loss_of(SIZES, weights, (tokens, labels, loss_mask)) == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    relabelled = torch.where(loss_mask.bool(), labels, (labels + 1) % SIZES.vocab_size)
    assert loss_of(SIZES, weights, (tokens, relabelled, loss_mask)) == loss_of(SIZES, weights,
                                                                               (tokens, labels, loss_mask))


def adamw_by_hand(weights, gradients, rates, weight_decay, scales, beta1, beta2, eps):
    """AdamW as in algorithm 2 of Loshchilov & Hutter (1711.05101), for each tensor of the dict."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for step, rate in enumerate(rates, start=1):
        for name, w in weights.items():
            g = scales[step - 1] * gradients[step - 1][name]
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            update = (first[name] / (1 - beta1**step)) / ((second[name] / (1 - beta2**step)).sqrt() + eps)
            decay = weight_decay if w.dim() >= 2 else 0.0
            weights[name] = w - rate * (update + decay * w)
    return weights


@pytest.mark.parametrize("clip_grad", [0.3, 1e6, 0.0], ids=["clipped", "not reached", "off"])
def test_training_follows_adamw_with_clipping_and_decay_on_matrices_only(clip_grad):
    weights, rates = random_weights(SIZES), [1e-2, 5e-3, 2e-3]
    batches = [random_batch(SIZES, seed=seed) for seed in range(3)]
    records, final = train_reference(
        SIZES, weights, batches, rates, weight_decay=0.1, clip_grad=clip_grad, betas=(0.9, 0.95), eps=1e-8
    )
    for record in records:  # the tied matrix is in the dict once, so it counts once
        norm = math.sqrt(sum((gradient**2).sum().item() for gradient in record.gradients.values()))
        assert record.gradient_norm == pytest.approx(norm, rel=1e-12)
        assert norm > 0.3  # otherwise "clipped" would not clip
    scales = [min(1.0, (clip_grad or math.inf) / (record.gradient_norm + 1e-6)) for record in records]
    gradients = [record.gradients for record in records]
    expected = adamw_by_hand(weights, gradients, rates, 0.1, scales, 0.9, 0.95, 1e-8)
    for name in final:
        torch.testing.assert_close(final[name], expected[name], rtol=1e-10, atol=1e-12, msg=name)
