"""Nanodomino's model in plain torch.nn, written as nanoGPT would: the baseline of the benchmarks.

The model consists of `nn.Linear`, `nn.Embedding`, `nn.LayerNorm`, fused qkv, `scaled_dot_product_attention`, tanh GELU
and a head tied to the embedding. It uses autograd and fused AdamW, and has no dropout. It imports nothing from
nanodomino, but has the same parameter names and the same order of the fused qkv's rows, [head, (q, k, v), head_dim]. So
both models can start from the same weights (`load`). Equal losses then show that both do the same work.

Torch's own parallelism can be applied to it:

    tensor parallel   every matrix is a Linear that torch can shard. Attention infers the number of heads from its
                      input, so it also runs on a shard
    pipeline          Plain(config, layers=range(2, 4), pre_process=False, post_process=False) is a stage that maps
                      [b, s, h] to [b, s, h]. The first stage takes tokens, the last returns logits
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Norm and self-attention, without the residual addition: [b, s, h] -> [b, s, h]."""

    def __init__(self, config):
        super().__init__()
        h = config.hidden_size
        self.head_dim = h // config.num_attention_heads
        self.norm = nn.LayerNorm(h, eps=config.layernorm_epsilon)
        self.qkv = nn.Linear(h, 3 * h)
        self.dense = nn.Linear(h, h)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(context.transpose(1, 2).reshape(b, s, -1))


class Layer(nn.Module):
    """Attention and MLP with their residual additions: [b, s, h] -> [b, s, h]."""

    def __init__(self, config):
        super().__init__()
        h, ffn = config.hidden_size, config.ffn_hidden_size
        self.attention, self.mlp = Attention(config), nn.Sequential(OrderedDict(
            norm=nn.LayerNorm(h, eps=config.layernorm_epsilon), dense_h_to_4h=nn.Linear(h, ffn),
            gelu=nn.GELU(approximate="tanh"), dense_4h_to_h=nn.Linear(ffn, h)))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Embedding(nn.Module):
    """Token plus position embeddings: [b, s] -> [b, s, h]."""

    def __init__(self, config, with_positions):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if with_positions:
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens):
        return self.word_embeddings(tokens) + self.position_embeddings.weight[:tokens.size(1)]


class Plain(nn.Module):
    """The whole model or, if `layers` are given, one pipeline stage. config: a resolved nanodomino Config.

    pre_process: the stage embeds tokens; post_process: it applies the head."""

    def __init__(self, config, layers=None, pre_process=True, post_process=True):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        if pre_process or post_process:
            self.embedding = Embedding(config, with_positions=pre_process)
        self.layers = nn.ModuleDict({str(i): Layer(config)
                                     for i in (range(config.num_layers) if layers is None else layers)})
        if post_process:
            self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, x):
        """Map x to logits [b, s, v] or, without post_process, to hidden states [b, s, h].

        x: tokens [b, s] or, without pre_process, hidden states [b, s, h]."""
        if self.pre_process:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.post_process:
            x = F.linear(self.final_norm(x), self.embedding.word_embeddings.weight)
        return x

    def load(self, weights: dict):
        """Load unsharded weights of nanodomino by name, without the rows that pad the vocabulary, and return self."""
        own = self.state_dict()
        self.load_state_dict({name: weights[name][:len(tensor)] for name, tensor in own.items()})
        return self


def mean_loss(logits, labels):
    """Return the mean cross entropy of logits [b, s, v] and labels [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(model: nn.Module, config) -> torch.optim.AdamW:
    """Return AdamW as in nanoGPT: fused, with weight decay only on matrices."""
    groups = [dict(params=[weight for weight in model.parameters() if (weight.dim() >= 2) == is_matrix],
                   weight_decay=config.weight_decay * is_matrix) for is_matrix in (True, False)]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps,
                             fused=True)
