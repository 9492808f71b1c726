from functools import partial

import torch
import torch.nn.functional as F

from nanodomino.layers.autograd_segment import run_segment
from nanodomino.layers.main_grad import add_gradients
from nanodomino.layers.norms import Norm
from nanodomino.layers.positions import inverse_rotation, rotate
from nanodomino.layers.sublayer import Sublayer, drop
from nanodomino.parallel import ColumnParallelLinear, RowParallelLinear


class Attention(Sublayer):
    """Causal attention of this rank's heads."""
    attends = True

    def __init__(self, config, mesh, site: str):
        super().__init__(config, mesh, site)
        has_bias, width = not config.disable_bias_linear, config.num_attention_heads * config.kv_channels
        self.qkv = ColumnParallelLinear(config.hidden_size, config.qkv_size, config, mesh,
                                        has_bias or config.add_qkv_bias)
        self.dense = RowParallelLinear(width, config.hidden_size, config, mesh, has_bias)
        self.groups, self.head_dim = config.num_query_groups // mesh.tp, config.kv_channels
        self.group_size = config.num_attention_heads // config.num_query_groups
        self.q_layernorm, self.k_layernorm = (         # which see this rank's heads
            Norm(config, mesh, self.head_dim, partial_gradient=True) if config.qk_layernorm else None for _ in range(2))

    @property
    def column(self):
        return self.qkv

    @property
    def row(self):
        return self.dense

    def split(self, qkv):
        """qkv [b, s, ..] -> q [b, s, groups, heads of each, d], and k and v, which have one: [b, s, groups, 1, d]."""
        b, s, _ = qkv.shape
        return qkv.view(b, s, self.groups, -1, self.head_dim).split([self.group_size, 1, 1], dim=3)

    def attend(self, q, k, v, inputs):
        """q [b, heads, s, d], k and v [b, groups, s, d] -> [b, heads, s, d]."""
        if inputs.dropout_mask is None:
            return fused_attention(q, k, v, inputs.attention_bias)
        s = q.size(2)                                          # by hand, since SDPA draws its own mask
        k, v = repeat_kv(q, k, v)
        factor = self.head_dim ** -0.5                         # the products alone may be too large for fp16
        scores = torch.baddbmm(q.new_empty(()), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=factor)
        scores = scores.view(inputs.dropout_mask.shape)
        if inputs.attention_bias is None:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        else:
            scores = scores + inputs.attention_bias
        return drop(scores.softmax(dim=-1), inputs.dropout_mask) @ v

    def core(self, qkv, inputs):
        """qkv [b, s, ..] -> [b, s, heads d]."""
        q, k, v = self.split(qkv)
        q, k = (one if norm is None else norm(one) for one, norm in ((q, self.q_layernorm), (k, self.k_layernorm)))
        q, k = (one if inputs.rotary is None else rotate(one, inputs.rotary) for one in (q, k))
        return join_heads(self.attend(*map(heads_first, (q, k, v)), inputs))

    def core_forward(self, qkv, inputs, training):
        if not training:
            return self.core(qkv, inputs), None
        q, k, v = self.split(qkv)
        q, before_q = norm_and_rotate(q, self.q_layernorm, inputs.rotary)
        k, before_k = norm_and_rotate(k, self.k_layernorm, inputs.rotary)
        if before_q is None and inputs.rotary is not None:
            v = v.clone()                                      # q and k are new, so nothing else wants the rest of qkv
        heads = [heads_first(one) for one in (q, k, v)]
        if inputs.dropout_mask is not None:                            # else products keep copies of their own, beside qkv
            heads = [one.contiguous() for one in heads]
        context, segment = run_segment(partial(self.attend, inputs=inputs), *heads)
        return join_heads(context), (segment, inputs.rotary, before_q, before_k)

    def core_backward(self, gradient, kept):
        segment, rotary, before_q, before_k = kept
        b, s, _ = gradient.shape
        gradient = gradient.view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k, v = (one.transpose(1, 2).unflatten(2, (self.groups, -1)) for one in segment.backward(gradient))
        q = norm_and_rotate_backward(q, self.q_layernorm, rotary, before_q)
        k = norm_and_rotate_backward(k, self.k_layernorm, rotary, before_k)
        return torch.cat([q, k, v], dim=3).view(b, s, -1)


def fused_attention(q, k, v, bias):
    """softmax(q k^T / sqrt(d) + bias) v of q [b, heads, m, d], k and v [b, groups, s, d]. Without a bias it is causal,
    if m = s; else the m tokens are the last ones, and m = 1: it sees all.

    On CUDA what reads the keys of a group once is flash attention alone, for 16-bit numbers without a bias. For others
    torch would write all scores out, without a word, and keep them; so there each head gets keys and values of its own.
    """
    if q.is_cuda and (bias is not None or q.element_size() > 2):
        k, v = repeat_kv(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None and q.size(2) == k.size(2),
                                          enable_gqa=k.size(1) < q.size(1))


def repeat_kv(q, k, v):
    """Of k and v [b, groups, s, d] what each head of q wants [b, heads, s, d]."""
    times = q.size(1) // k.size(1)
    return (k, v) if times == 1 else (one.repeat_interleave(times, dim=1) for one in (k, v))


def heads_first(x):
    """[b, s, groups, heads of each, d] -> [b, heads, s, d]."""
    return x.flatten(2, 3).transpose(1, 2)


def join_heads(context):
    """[b, heads, s, d] -> [b, s, heads d]."""
    return context.transpose(1, 2).flatten(2)


def norm_and_rotate(x, norm, rotary):
    """q or k [b, s, groups, heads of each, d], as the scores want it: normed, turned. (That, what backward needs.)"""
    before = None
    if norm is not None:
        before, (x, *statistics) = x, norm.normalization.forward(x, *norm.weights, norm.epsilon)
        before = before, statistics
    return (x if rotary is None else rotate(x, rotary)), before


def norm_and_rotate_backward(gradient, norm, rotary, before):
    """The gradient of x from that of what norm_and_rotate() made of it; those of the norm's weights are added to theirs."""
    if rotary is not None:
        gradient = rotate(gradient, inverse_rotation(rotary))
    if norm is None:
        return gradient
    gradient, *gradients = norm.normalization.backward(gradient, *before, *norm.weights)
    add_gradients(norm.weights, gradients)
    return gradient
