"""The reference model against torch's own transformer."""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from support.harness import random_data, tiny
from support.reference import ReferenceGPT, masked_loss, random_weights, train_reference

SMALL = dict(num_layers=2, num_attention_heads=4)
TIED, UNTIED = tiny(1, **SMALL), tiny(1, **SMALL, untie_embeddings_and_output_weights=True)


def torch_transformer(config, weights):
    """The same layers as torch's encoder, and the fused row of each of its in_proj rows [all q, all k, all v]."""
    layer = nn.TransformerEncoderLayer(
        config.hidden_size, config.num_attention_heads, config.ffn_hidden_size, dropout=0.0,
        activation=partial(F.gelu, approximate="tanh"), layer_norm_eps=1e-5, batch_first=True, norm_first=True)
    norm = nn.LayerNorm(config.hidden_size)
    encoder = nn.TransformerEncoder(layer, config.num_layers, norm, enable_nested_tensor=False).double()
    n, d = config.num_attention_heads, config.kv_channels
    # plain indices rather than the reference's own conversion: the fused row of (q/k/v, head, element)
    rows = torch.tensor([(head * 3 + part) * d + element for part in range(3) for head in range(n)
                         for element in range(d)])
    state = {}
    names = {"self_attn.out_proj.": "attention.dense.", "linear1.": "mlp.dense_h_to_4h.",
             "linear2.": "mlp.dense_4h_to_h.", "norm1.": "attention.norm.", "norm2.": "mlp.norm."}
    for layer, kind in itertools.product([f"layers.{i}." for i in range(config.num_layers)], ("weight", "bias")):
        state |= {layer + theirs + kind: weights[layer + ours + kind] for theirs, ours in names.items()}
        state[f"{layer}self_attn.in_proj_{kind}"] = weights[f"{layer}attention.qkv.{kind}"][rows]
    state["norm.weight"], state["norm.bias"] = weights["final_norm.weight"], weights["final_norm.bias"]
    encoder.load_state_dict(state)
    return encoder, rows


def test_random_weights_let_no_term_hide_and_depend_on_the_seed_alone():
    weights, again, other = random_weights(TIED, 1), random_weights(TIED, 1), random_weights(TIED, 2)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float64 and (tensor != 0).all() and (tensor != 1).all()
        assert torch.equal(tensor, again[name]) and not torch.equal(tensor, other[name])


def test_logits_and_gradients_equal_torchs_own_transformer():
    weights, data = random_weights(UNTIED), random_data(UNTIED, 1)
    tokens, labels, loss_mask = data.tokens[0], data.labels[0], data.loss_mask[0].double()
    encoder, rows = torch_transformer(UNTIED, weights)
    words, positions = weights["embedding.word_embeddings.weight"], weights["embedding.position_embeddings.weight"]
    hidden = (words[tokens] + positions).requires_grad_()
    causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
    encoded = encoder(hidden, mask=causal, is_causal=True)
    theirs = encoded @ weights["output_layer.weight"][: UNTIED.vocab_size].t()
    ours = ReferenceGPT(UNTIED).double().load_full(weights)(tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    masked_loss(theirs, labels, loss_mask).backward()
    gradients = train_reference(UNTIED, weights, [(tokens, labels, loss_mask)], [0.0])[0][0].gradients
    for i, layer in enumerate(encoder.layers):
        for name, parameter, cut in (("attention.qkv.weight", layer.self_attn.in_proj_weight, rows),
                                     ("attention.dense.bias", layer.self_attn.out_proj.bias, slice(None)),
                                     ("mlp.norm.weight", layer.norm2.weight, slice(None)),
                                     ("mlp.dense_h_to_4h.weight", layer.linear1.weight, slice(None))):
            torch.testing.assert_close(gradients[f"layers.{i}.{name}"][cut], parameter.grad, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(gradients["embedding.position_embeddings.weight"], hidden.grad.sum(0), rtol=1e-10,
                               atol=1e-14)
