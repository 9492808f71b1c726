"""Causal self-attention, cut over t tensor-parallel ranks by heads (Megatron-LM, 1909.08053, section 3).

    h [b, s, h] -> Wqkv -> q, k, v of this rank's heads -> softmax(q k^T / sqrt(d) + bias) v -> Wdense -> y [b, s, h]
                (column-parallel)                                                          (row-parallel)

Query heads come in groups. The heads of a group share one key head and one value head (GQA, 2305.13245). If every group
has one head, this is the usual multi-head attention. The rows of Wqkv are stored group by group, so that cutting them
into t contiguous parts gives each rank whole groups:

    [ q q k v | q q k v | q q k v | q q k v ]      4 groups of 2 query heads; every letter is d rows
      rank 0              rank 1                   (all q, then all k, then all v would give rank 0 only queries)

Then q and k may be normalized (qk_layernorm) and rotated by their positions. attention_mask.py explains the rotation,
and which keys a query sees. Without attention dropout, torch's fused kernel never writes the [s, s] probabilities to
memory. With dropout they are computed explicitly, because the fused kernel's mask would depend on the layout. In
training, autograd differentiates only attend() (gradients.py).
"""

from functools import partial

import torch
import torch.nn.functional as F

from nanodomino.comm.device import has_flash_attention, on_gpu
from nanodomino.layers.attention_mask import Runs, rotate
from nanodomino.layers.gradients import add_gradients, drop, run_segment
from nanodomino.layers.sublayers import Norm, Sublayer
from nanodomino.parallel import ColumnParallelLinear, RowParallelLinear


class Attention(Sublayer):
    """Attention over this rank's heads: `groups` groups of `group_size` query heads, each of size `head_dim`."""
    attends = True

    def __init__(self, config, mesh, site: str, window: int | None):
        super().__init__(config, mesh, site)
        self.window = window                                   # how many tokens before itself a token sees; None: all
        has_bias, width = not config.disable_bias_linear, config.num_attention_heads * config.kv_channels
        self.groups, self.head_dim = config.num_query_groups // mesh.tp, config.kv_channels
        self.group_size, self.rope = config.num_attention_heads // config.num_query_groups, config.rope
        self.qkv = ColumnParallelLinear(
            config.hidden_size, config.qkv_size, config, mesh, has_bias or config.add_qkv_bias,
            parts=(self.group_size * self.head_dim, self.head_dim, self.head_dim))
        self.dense = RowParallelLinear(width, config.hidden_size, config, mesh, has_bias)
        # addends: all heads share one weight [d], and each rank computes the gradient from its own heads only
        self.q_layernorm, self.k_layernorm = (
            Norm(config, mesh, self.head_dim, addends=("tp",)) if config.qk_layernorm else None for _ in range(2))

    column = property(lambda self: self.qkv)
    row = property(lambda self: self.dense)

    @property
    def norm_weights(self):
        """Return (weight, bias) of q's norm and of k's norm; two empty tuples without norms."""
        return [() if norm is None else norm.weights for norm in (self.q_layernorm, self.k_layernorm)]

    def split(self, qkv):
        """Split qkv [b, s, ..] into q [b, s, groups, group_size, d], k and v [b, s, groups, 1, d]."""
        b, s, _ = qkv.shape
        return qkv.view(b, s, self.groups, -1, self.head_dim).split([self.group_size, 1, 1], dim=3)

    def attend(self, q, k, v, inputs):
        """Return the attention output [b, heads, s, d] for q [b, heads, s, d], k and v [b, groups, s, d]."""
        if inputs.runs is not None:
            return varlen_attention(q, k, v, inputs.runs)
        if inputs.dropout_mask is None:
            return fused_attention(q, k, v, inputs.bias)
        k, v = repeat_kv(q, k, v)
        scale = self.head_dim ** -0.5          # applied inside the matmul, because unscaled scores may overflow fp16
        scores = torch.baddbmm(q.new_empty(()), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale)
        bias = torch.full_like(scores[0], -torch.inf).triu(1) if inputs.bias is None else inputs.bias
        scores = scores.view(inputs.dropout_mask.shape) + bias
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

    def kernels(self, compiled):
        norm = self.q_layernorm
        normalization, epsilon = (norm.normalization, norm.epsilon) if norm else (None, None)
        functions = (lambda *inputs: norm_and_rotate(*inputs, epsilon, normalization),
                     lambda *inputs: norm_and_rotate_backward(*inputs, normalization))
        return map(compiled, functions) if norm or self.rope else functions        # else nothing can be fused

    def core_forward(self, kernel, qkv, inputs, training):
        """Compute attention over this rank's heads. Return (its output, what core_backward needs)."""
        if not training:
            return self.core(qkv, inputs), None
        *heads, saved = self.prepare(kernel, qkv, inputs)
        context, segment = self.attend_forward(*heads, inputs)
        return context, (segment, saved)

    def core_backward(self, kernel, gradient, saved):
        """Turn the gradient of attention's output into the gradient of qkv."""
        segment, saved = saved
        return self.prepare_backward(kernel, *self.attend_backward(segment, gradient), saved)

    def prepare(self, kernel, qkv, inputs):
        """Return q, k, v [b, s, groups, .., d], normalized and rotated, and what prepare_backward needs."""
        q, k, v = self.split(qkv)
        before_norms = (q, k) if self.q_layernorm else None
        q, k, v, *statistics = kernel(q, k, v, inputs.rotary, *self.norm_weights)
        return q, k, v, (inputs.rotary, before_norms, statistics)

    def attend_forward(self, q, k, v, inputs):
        """Return the attention output [b, s, heads d] for q, k, v [b, s, groups, .., d], and a Segment."""
        heads = [heads_first(x) for x in (q, k, v)]
        if inputs.dropout_mask is not None:    # or the matmuls would save contiguous copies in addition to qkv
            heads = [x.contiguous() for x in heads]
        context, segment = run_segment(partial(self.attend, inputs=inputs), *heads)
        return join_heads(context), segment

    def attend_backward(self, segment, gradient):
        """Turn the gradient of attend_forward's output into the gradients of q, k and v [b, s, groups, .., d]."""
        b, s, _ = gradient.shape
        q, k, v = segment.backward(gradient.view(b, s, -1, self.head_dim).transpose(1, 2))
        return (x.transpose(1, 2).unflatten(2, (k.size(1), -1)) for x in (q, k, v))

    def prepare_backward(self, kernel, q, k, v, saved):
        """Turn the gradients of q, k and v into the gradient of qkv. Add the norms' gradients to main_grad."""
        gradient, *norm_gradients = kernel(q, k, v, *saved, *self.norm_weights)
        for weights, gradients in zip(self.norm_weights, norm_gradients):
            add_gradients(weights, gradients)
        return gradient


def fused_attention(q, k, v, bias):
    """Return softmax(q k^T / sqrt(d) + bias) v [b, heads, m, d] for q [b, heads, m, d], k and v [b, groups, s, d].
    Without a bias, attention is causal if m = s. In generation m is 1: the last token attends to all s tokens. On CUDA,
    only flash attention and cuDNN's attention handle groups without repeating k and v. They need 16 bits and a GPU from
    Ampere on. Flash attention takes no bias. Else torch would use a kernel that stores scores, so we repeat k and v."""
    if on_gpu(q) and (bias is not None or q.element_size() > 2 or not has_flash_attention(q.device)):
        k, v = repeat_kv(q, k, v)
    return F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=bias, is_causal=bias is None and q.size(2) == k.size(2),
        enable_gqa=k.size(1) < q.size(1))


def varlen_attention(q, k, v, runs: Runs):
    """Return the attention output [b, heads, m, d] for q [b, heads, m, d] and the runs' k and v [b, groups, s, d]."""
    from torch.nn.attention.varlen import varlen_attn          # imported here, because this import takes a second

    b, grouped = q.size(0), k.size(1) < q.size(1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))         # [b m, heads, d], without a copy
    before = -1 if runs.window is None else runs.window
    context = varlen_attn(q, k, v, runs.starts, runs.key_starts, runs.longest, runs.longest_keys,
                          window_size=(before, 0), enable_gqa=grouped)     # 0: no key after the query
    return context.unflatten(0, (b, -1)).transpose(1, 2)


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


def norm_and_rotate(q, k, v, rotary, q_weights, k_weights, epsilon, normalization):
    """Normalize and rotate q [b, s, groups, group_size, d] and k [b, s, groups, 1, d]. Return (q, k, v, the statistics
    of q's norm, the same of k's). rotary, normalization: None if the model does not rotate or normalize q and k.
    q_weights, k_weights: (weight, bias) of the norms."""
    q_statistics = k_statistics = ()
    if normalization is not None:
        q, *q_statistics = normalization.forward(q, *q_weights, epsilon)
        k, *k_statistics = normalization.forward(k, *k_weights, epsilon)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
        if normalization is None:
            v = v.clone()                      # q and k are new tensors, but v is a view, which would keep all of qkv
    return q, k, v, q_statistics, k_statistics


def norm_and_rotate_backward(q, k, v, rotary, before_norms, statistics, q_weights, k_weights, normalization):
    """Turn the gradients of q, k and v [b, s, groups, .., d] into (the gradient of qkv [b, s, ..], the gradients of q's
    norm weights, the same of k's). before_norms: q and k before the norms; statistics: of both norms."""
    q_gradients = k_gradients = ()
    if rotary is not None:
        cos, sin = rotary
        q, k = (rotate(x, (cos, -sin)) for x in (q, k))        # the opposite rotation is the backward of a rotation
    if normalization is not None:
        q, *q_gradients = normalization.backward(q, before_norms[0], statistics[0], *q_weights)
        k, *k_gradients = normalization.backward(k, before_norms[1], statistics[1], *k_weights)
    return torch.cat([q, k, v], dim=3).flatten(2), q_gradients, k_gradients
