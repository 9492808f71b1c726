"""Causal self-attention, cut over t tensor-parallel ranks by heads (Megatron-LM, 1909.08053, section 3).

    h [b, s, h] -> Wqkv -> q, k, v of this rank's heads -> softmax(q k^T / sqrt(d) + bias) v -> Wdense -> y [b, s, h]
                (column-parallel)                                                          (row-parallel)

Query heads come in groups. The heads of a group share one key head and one value head (GQA, 2305.13245). If every group
has one head, this is the usual multi-head attention. The rows of Wqkv are stored group by group, so that cutting them
into t contiguous parts gives each rank whole groups:

    [ q q k v | q q k v | q q k v | q q k v ]      4 groups of 2 query heads; every letter is d rows
      rank 0              rank 1                   (all q, then all k, then all v would give rank 0 only queries)

Then q and k may each be normalized (qk_layernorm) and rotated by their positions (positions.py).

Without attention dropout, torch's fused kernel never writes the [s, s] probabilities to memory. With dropout they are
computed explicitly, because the fused kernel would draw its own mask, and that mask would depend on the layout.

Training calls core_forward and core_backward. In these, autograd differentiates only attend() (autograd_segment.py).
The backward of the norms and rotations is written by hand.
"""

from functools import partial

import torch
import torch.nn.functional as F

from nanodomino.layers.autograd_segment import run_segment
from nanodomino.layers.dropout_and_positions import drop
from nanodomino.layers.main_grad import add_gradients
from nanodomino.layers.norms import Norm
from nanodomino.layers.positions import inverse_rotation, rotate
from nanodomino.layers.sublayer import Sublayer
from nanodomino.layers.varlen import varlen_attention
from nanodomino.parallel import ColumnParallelLinear, RowParallelLinear


class Attention(Sublayer):
    """Attention over this rank's heads: `groups` groups of `group_size` query heads, each of size `head_dim`."""
    attends = True

    def __init__(self, config, mesh, site: str):
        super().__init__(config, mesh, site)
        has_bias, width = not config.disable_bias_linear, config.num_attention_heads * config.kv_channels
        self.qkv = ColumnParallelLinear(config.hidden_size, config.qkv_size, config, mesh,
                                        has_bias or config.add_qkv_bias)
        self.dense = RowParallelLinear(width, config.hidden_size, config, mesh, has_bias)
        self.groups, self.head_dim = config.num_query_groups // mesh.tp, config.kv_channels
        self.group_size = config.num_attention_heads // config.num_query_groups
        # addends: all heads share one weight [d], and each rank computes the gradient from its own heads only
        self.q_layernorm, self.k_layernorm = (
            Norm(config, mesh, self.head_dim, addends=("tp",)) if config.qk_layernorm else None for _ in range(2))

    column = property(lambda self: self.qkv)
    row = property(lambda self: self.dense)

    def split(self, qkv):
        """Split qkv [b, s, ..] into q [b, s, groups, group_size, d], k and v [b, s, groups, 1, d]."""
        b, s, _ = qkv.shape
        return qkv.view(b, s, self.groups, -1, self.head_dim).split([self.group_size, 1, 1], dim=3)

    def attend(self, q, k, v, inputs):
        """Return the attention output [b, heads, s, d] for q [b, heads, s, d], k and v [b, groups, s, d]."""
        if inputs.documents is not None:
            return varlen_attention(q, k, v, inputs.documents)
        if inputs.dropout_mask is None:
            return fused_attention(q, k, v, inputs.attention_bias)
        s = q.size(2)
        k, v = repeat_kv(q, k, v)
        scale = self.head_dim ** -0.5          # applied inside the matmul, because unscaled scores may overflow fp16
        scores = torch.baddbmm(q.new_empty(()), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale)
        scores = scores.view(inputs.dropout_mask.shape)
        if inputs.attention_bias is None:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        else:
            scores = scores + inputs.attention_bias
        return drop(scores.softmax(dim=-1), inputs.dropout_mask) @ v

    def core(self, qkv, inputs):
        """Turn qkv [b, s, ..] into [b, s, heads d]. Autograd can differentiate this definition."""
        q, k, v = self.split(qkv)
        q, k = (x if norm is None else norm(x) for x, norm in ((q, self.q_layernorm), (k, self.k_layernorm)))
        q, k = (x if inputs.rotary is None else rotate(x, inputs.rotary) for x in (q, k))
        q, k, v = map(heads_first, (q, k, v))
        if inputs.extend_cache is not None:
            k, v = inputs.extend_cache(k, v)
        return join_heads(self.attend(q, k, v, inputs))

    def core_forward(self, qkv, inputs, training):
        if not training:
            return self.core(qkv, inputs), None
        q, k, v = self.split(qkv)
        q, saved_q = norm_and_rotate(q, self.q_layernorm, inputs.rotary)
        k, saved_k = norm_and_rotate(k, self.k_layernorm, inputs.rotary)
        if saved_q is None and inputs.rotary is not None:
            v = v.clone()                      # q and k are new tensors, but v is a view, which would keep all of qkv
        heads = [heads_first(x) for x in (q, k, v)]
        if inputs.dropout_mask is not None:    # or the matmuls would save contiguous copies in addition to qkv
            heads = [x.contiguous() for x in heads]
        context, segment = run_segment(partial(self.attend, inputs=inputs), *heads)
        return join_heads(context), (segment, inputs.rotary, saved_q, saved_k)

    def core_backward(self, gradient, saved):
        segment, rotary, saved_q, saved_k = saved
        b, s, _ = gradient.shape
        gradient = gradient.view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k, v = (x.transpose(1, 2).unflatten(2, (self.groups, -1)) for x in segment.backward(gradient))
        q = norm_and_rotate_backward(q, self.q_layernorm, rotary, saved_q)
        k = norm_and_rotate_backward(k, self.k_layernorm, rotary, saved_k)
        return torch.cat([q, k, v], dim=3).view(b, s, -1)


def fused_attention(q, k, v, bias):
    """Return softmax(q k^T / sqrt(d) + bias) v [b, heads, m, d] for q [b, heads, m, d], k and v [b, groups, s, d].

    Without a bias, attention is causal if m = s. In generation m is 1: the only query is the last token, which attends
    to all s tokens.
    """
    return F.scaled_dot_product_attention(**fused_arguments(q, k, v, bias))


def fused_arguments(q, k, v, bias) -> dict:
    """Return the arguments of torch's scaled_dot_product_attention for fused_attention()'s arguments.

    On CUDA, only flash attention and cuDNN's attention handle groups without repeating k and v. They need 16-bit
    inputs, and flash attention takes no bias. In other cases torch would silently use a kernel that stores all scores,
    so k and v are repeated here first.
    """
    if q.is_cuda and (bias is not None or q.element_size() > 2):
        k, v = repeat_kv(q, k, v)
    return dict(query=q, key=k, value=v, attn_mask=bias, is_causal=bias is None and q.size(2) == k.size(2),
                enable_gqa=k.size(1) < q.size(1))


def repeat_kv(q, k, v):
    """Repeat k and v [b, groups, s, d] so that every head of q has its own: [b, heads, s, d]."""
    times = q.size(1) // k.size(1)
    return (k, v) if times == 1 else (x.repeat_interleave(times, dim=1) for x in (k, v))


def heads_first(x):
    """Reshape [b, s, groups, heads per group, d] -> [b, heads, s, d]."""
    return x.flatten(2, 3).transpose(1, 2)


def join_heads(context):
    """Reshape [b, heads, s, d] -> [b, s, heads d]."""
    return context.transpose(1, 2).flatten(2)


def norm_and_rotate(x, norm, rotary):
    """Apply norm and rotary positions (each may be None) to q or k [b, s, groups, heads per group, d].

    Returns (the result, what norm_and_rotate_backward() needs).
    """
    saved = None
    if norm is not None:
        normed, *statistics = norm.normalization.forward(x, *norm.weights, norm.epsilon)
        x, saved = normed, (x, statistics)
    return (x if rotary is None else rotate(x, rotary)), saved


def norm_and_rotate_backward(gradient, norm, rotary, saved):
    """Return the gradient of norm_and_rotate()'s x, and add the gradients of the norm's weights to main_grad."""
    if rotary is not None:
        gradient = rotate(gradient, inverse_rotation(rotary))
    if norm is None:
        return gradient
    gradient, *weight_gradients = norm.normalization.backward(gradient, *saved, *norm.weights)
    add_gradients(norm.weights, weight_gradients)
    return gradient
