"""GPT-2/3 as a chain of sublayers, cut where the wires are.

A pre-norm transformer is one residual stream x that each sublayer reads and adds to; attention and MLP alternate, 2L
of them. Written around the wires (reduce), every sublayer is the same three steps:

    bridge    replicated, element-wise     x' = x + dropout(y + bias);   h = norm(x')
    partial   sharded, matrix products     y_partial = core(h W1^T) W2^T
    reduce    the wires                    y = sum over tp ranks of y_partial

    tokens -> embed -> g -> | norm -> f -> W1 -> attention -> W2 -> g -> +
                            | norm -> f -> W1 -> gelu -> W2 -> g -> + | ... | norm -> f -> head

Here the pieces are called in a row, with the blocking f and g of parallel.py and plain autograd: that is the
*definition* of the model, and what every faster schedule is tested against. domino.py calls the very same pieces in
another order. A pipeline stage is a run of layers, or several: its chunks.

Shapes: b samples, s tokens, h hidden, n heads, d = h/n, t tensor-parallel ranks. The fused qkv matrix is stored head by
head, [n, (q, k, v), d], so that a contiguous cut of its rows is a set of whole heads.

Sources: GPT-2; GPT-3 (2005.14165); Megatron-LM (1909.08053, section 3); sublayer scaling of the initial weights as in
GPT-2.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.config import Config
from nanodomino.functions import NORMALIZATIONS, gelu, gelu_backward
from nanodomino.mesh import Mesh, mesh_on_paper
from nanodomino.parallel import (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                                 copy_to_tensor_parallel, gather_logits, parameter, vocab_parallel_cross_entropy)
from nanodomino.stream import Whole
from nanodomino.tape import run_segment


def stage_layers(num_layers: int, stage: int, stages: int) -> range:
    """The layers of a pipeline stage, as even as they go: the first num_layers % stages stages hold one more."""
    each, extra = divmod(num_layers, stages)
    first = stage * each + min(stage, extra)
    return range(first, first + each + (stage < extra))


def drop(x, mask):
    """x * mask; the mask may be of a wider type, since 1/(1 - p) is not a 16-bit number. No mask: x."""
    return x if mask is None else (x * mask).to(x.dtype)


def close_residual(x, y, bias, mask):
    """x + dropout(y + bias): what a sublayer adds, once the sum over ranks is there.
    All [b, s, h]; mask may be None."""
    return drop(y + bias, mask).add_(x)


class Norm(nn.Module):
    """What opens a sublayer, of config.normalization's kind; its parameters are whole on every rank."""

    def __init__(self, config: Config, mesh: Mesh):
        super().__init__()
        self.kind = NORMALIZATIONS[config.normalization]
        self.weight = parameter((config.hidden_size,), config, mesh, value=1.0)
        self.bias = parameter((config.hidden_size,), config, mesh) if self.kind.has_bias else None
        self.epsilon = config.layernorm_epsilon

    @property
    def weights(self):
        """weight and bias [h]; no bias: None."""
        return self.weight, self.bias

    def forward(self, x):
        return self.kind.function(x, self.weight, self.bias, self.epsilon)


class Sublayer(nn.Module):
    """norm, column-parallel linear, core, row-parallel linear, add. The subclass has `column`, `row` and the core:

    core(c, mask) -> activation                                       the definition
    core_forward(c, mask, training) -> (activation, kept)             what training runs; kept: what backward needs
    core_backward(gradient, kept) -> gradient of c
    """

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__()
        self.norm = Norm(config, mesh)
        self.site = site                                       # names this sublayer's dropout masks

    def forward(self, x, masks):
        """x [b, s, h] -> [b, s, h]: the definition. masks: of the core and of the residual, see Dropout.sublayer."""
        core_mask, hidden_mask = masks
        y = self.row(self.core(self.column(self.norm(x)), core_mask))
        return close_residual(x, y, self.row.bias, hidden_mask)


class Attention(Sublayer):
    """Causal multi-head attention on this rank's n/t heads."""

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__(config, mesh, site)
        self.qkv = ColumnParallelLinear(config.hidden_size, 3 * config.hidden_size, config, mesh)
        self.dense = RowParallelLinear(config.hidden_size, config.hidden_size, config, mesh)
        self.heads, self.head_dim = config.num_attention_heads // mesh.tp, config.head_dim

    @property
    def column(self):
        return self.qkv

    @property
    def row(self):
        return self.dense

    def split_heads(self, qkv):
        """qkv [b, s, 3h/t] -> q, k, v, each [b, n/t, s, d]."""
        b, s, _ = qkv.shape
        return qkv.view(b, s, self.heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)

    def join_heads(self, context):
        """[b, n/t, s, d] -> [b, s, h/t]."""
        return context.transpose(1, 2).flatten(2)

    def attend(self, q, k, v, mask):
        """All [b, n/t, s, d]. mask: dropout of the probabilities [b, n/t, s, s] or None."""
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        s = q.size(2)                                          # by hand, since SDPA draws its own mask
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        factor = self.head_dim ** -0.5                         # the products alone may be too large for fp16
        scores = torch.baddbmm(q.new_empty(()), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=factor)
        return drop(scores.view(mask.shape).masked_fill(future, -torch.inf).softmax(dim=-1), mask) @ v

    def core(self, qkv, mask):
        """qkv [b, s, 3h/t] -> [b, s, h/t]."""
        return self.join_heads(self.attend(*self.split_heads(qkv), mask))

    def core_forward(self, qkv, mask, training):
        if not training:
            return self.core(qkv, mask), None
        heads = self.split_heads(qkv)
        if mask is not None:                                   # else products keep copies of their own, beside qkv
            heads = [one.contiguous() for one in heads]
        context, segment = run_segment(partial(self.attend, mask=mask), *heads)
        return self.join_heads(context), segment

    def core_backward(self, gradient, segment):
        b, s, _ = gradient.shape
        gradients = segment.backward(gradient.view(b, s, self.heads, self.head_dim).transpose(1, 2))
        return torch.stack([one.transpose(1, 2) for one in gradients], dim=3).view(b, s, -1)


class MLP(Sublayer):
    """h -> 4h -> h with GELU, on this rank's 4h/t features."""

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__(config, mesh, site)
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, config.ffn_hidden_size, config, mesh)
        self.dense_4h_to_h = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, config, mesh)

    @property
    def column(self):
        return self.dense_h_to_4h

    @property
    def row(self):
        return self.dense_4h_to_h

    def core(self, x, mask):
        """[b, s, 4h/t] -> [b, s, 4h/t]."""
        return gelu(x)

    def core_forward(self, x, mask, training):
        return gelu(x), x

    def core_backward(self, gradient, x):
        return gelu_backward(gradient, x)


class Layer(nn.Module):
    """A transformer layer: attention, then MLP."""

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__()
        self.attention = Attention(config, mesh, site + ".attention")
        self.mlp = MLP(config, mesh, site + ".mlp")

    def forward(self, x, attention_masks, mlp_masks):
        return self.mlp(self.attention(x, attention_masks), mlp_masks)


class Embedding(nn.Module):
    """Word embedding, cut by vocabulary, and learned positions, whole on every rank."""

    def __init__(self, config: Config, mesh: Mesh, with_positions: bool):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config, mesh)
        if with_positions:
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = parameter(
                (config.max_position_embeddings, config.hidden_size), config, mesh, std=config.init_method_std)

    def add_positions(self, words, positions, mask):
        """words [b, s, h] + the vectors of positions [b, s], with dropout."""
        return drop(words + F.embedding(positions, self.position_embeddings.weight), mask)


class Dropout:
    """Masks as a pure function of (seed, sample, site), on one type of device:
    the layout never shows, not even in dropout.

    A mask is drawn for the whole sample and all heads, from a generator seeded by the sample's number in the run (its
    place in the data order) and the name of the site. So tensor-parallel ranks agree where the stream is replicated,
    hold different heads' masks where it is sharded, and any slicing or resuming repeats the same bits.
    Without sample_ids (evaluation) there are none. keep: those of the stream, of which backward asks for each again.
    stream: how it lies on the ranks (stream.py); None: whole.
    """

    def __init__(self, config: Config, mesh: Mesh, sample_ids=None, keep=False, stream=None):
        self.config, self.mesh, self.sample_ids, self.keep, self.kept = config, mesh, sample_ids, keep, {}
        self.stream = stream or Whole(mesh.tp_group)

    def draw(self, site, shape, probability, like):
        """Masks [b, *shape], scaled by 1/(1 - probability); None where nothing is dropped."""
        if self.sample_ids is None or probability == 0.0:
            return None
        wide = torch.promote_types(like.dtype, torch.float32)
        masks = torch.empty(len(self.sample_ids), *shape, device=like.device, dtype=wide)
        for mask, sample in zip(masks, self.sample_ids):
            mask.bernoulli_(1.0 - probability, generator=seeded_generator(like.device, self.config.seed, sample, site))
        return masks.div_(1.0 - probability)

    def hidden(self, site, x):
        """For a residual stream, of whose rows this rank has x [b, s, h]."""
        if site in self.kept:
            return self.kept.pop(site)
        mask = self.draw(site, (x.size(1) * self.stream.parts, x.size(2)), self.config.hidden_dropout, x)
        mask = mask if mask is None else self.stream.own(mask)
        if self.keep:
            self.kept[site] = mask
        return mask

    def core(self, sublayer: Sublayer, x):
        """For the attention probabilities of this rank's heads [b, n/t, s, s]; of an MLP None. x: [b, s, ..]."""
        heads, s = self.config.num_attention_heads, x.size(1)
        whole = (self.draw(sublayer.site + ".core", (heads, s, s), self.config.attention_dropout, x)
                 if isinstance(sublayer, Attention) else None)
        # a view would keep all heads' masks in memory
        return None if whole is None else whole.chunk(self.mesh.tp, dim=1)[self.mesh.tp_rank].clone()

    def sublayer(self, sublayer: Sublayer, x):
        """(core, hidden): inside, and for what is added."""
        return self.core(sublayer, x), self.hidden(sublayer.site + ".hidden", x)


def seeded_generator(device, *key) -> torch.Generator:
    """A generator whose stream depends on the key alone: the same on every rank, layout and run."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A run of layers, without a gap. pre_process: it takes tokens, and embeds them; post_process: it gives losses or
    logits, by final norm and head. Else hidden states [b, s, h]."""
    layers: list[Layer]
    pre_process: bool
    post_process: bool

    @property
    def sublayers(self) -> list[Sublayer]:
        """Attention and MLP of each layer in turn."""
        return [sublayer for layer in self.layers for sublayer in (layer.attention, layer.mlp)]


class GPT(nn.Module):
    """One pipeline stage of a GPT; with pp = 1, all of it.

    Its chunks are usually one; config.placement says which of the model's they are. pre_process: one of them owns the
    embedding, post_process: one owns final norm and head. Parameters have global names (layers.7.attention.qkv.weight),
    the same on every layout.
    """

    def __init__(self, config: Config, mesh: Mesh, parallel_output=True):
        super().__init__()
        self.config, self.mesh, self.parallel_output = config, mesh, parallel_output
        placement, tied = config.placement, config.tied
        held = [placement.virtual_stage(mesh.pp_rank, chunk) for chunk in range(placement.chunks)]
        self.pre_process, self.post_process = 0 in held, placement.last in held
        if self.pre_process or (self.post_process and tied):   # a last stage holds a copy of the tied matrix
            self.embedding = Embedding(config, mesh, with_positions=self.pre_process)
        runs = [stage_layers(config.num_layers, virtual_stage, placement.last + 1) for virtual_stage in held]
        self.layers = nn.ModuleDict({str(i): Layer(config, mesh, f"layers.{i}")
                                     for i in sorted(layer for run in runs for layer in run)})
        self.chunks = [Chunk([self.layers[str(i)] for i in run], virtual_stage == 0, virtual_stage == placement.last)
                       for run, virtual_stage in zip(runs, held)]
        if self.post_process:
            self.final_norm = Norm(config, mesh)
            if not tied:
                self.output_layer = VocabParallelEmbedding(config, mesh)
            # in a list: not a second owner
            self.head = [self.embedding.word_embeddings if tied else self.output_layer]
        if mesh.device.type != "meta":                         # where there is nothing to draw into
            self.initialize()

    @torch.no_grad()
    def initialize(self):
        """Draw each parameter whole, from a generator seeded by (seed, its global name), and keep this rank's part.

        So the initial weights are the same on every layout, shards of one matrix differ, and replicas agree.
        """
        for name, weight in self.named_parameters():
            if weight.std is None:
                weight.fill_(weight.value)
                continue
            whole = torch.empty(weight.full_shape).normal_(
                0.0, weight.std, generator=seeded_generator("cpu", self.config.seed, name))
            weight.copy_(self.local_part(whole, weight))

    def local_part(self, whole, weight):
        """This rank's shard of a whole tensor, cut as `weight` is."""
        return whole if weight.shard_dim is None else whole.chunk(self.mesh.tp, dim=weight.shard_dim)[self.mesh.tp_rank]

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The word embedding's matrix, where two stages, the model's first and last, each hold a copy of it."""
        shared = self.config.tied and self.pre_process != self.post_process
        return self.embedding.word_embeddings.weight if shared else None

    def forward(self, tokens, positions, labels=None, hidden=None, sample_ids=None, chunk=0):
        """The plain model, with blocking wires: one of its chunks.

        tokens, positions, labels: [b, s]; hidden: [b, s, h] from the layers before (None for the first);
        sample_ids: b numbers that seed dropout, None to evaluate.
        Returns hidden states [b, s, h]; at the model's end the loss of each token [b, s], or without labels the logits:
        [b, s, valid] of this rank's words with parallel_output, else [b, s, v] on every rank.
        """
        masks, chunk = Dropout(self.config, self.mesh, sample_ids), self.chunks[chunk]
        x = hidden
        if chunk.pre_process:
            words = self.embedding.word_embeddings(tokens)
            x = self.embedding.add_positions(words, positions, masks.hidden("embedding", words))
        for layer in chunk.layers:
            x = layer(x, masks.sublayer(layer.attention, x), masks.sublayer(layer.mlp, x))
        if not chunk.post_process:
            return x
        (vocabulary,) = self.head
        h = copy_to_tensor_parallel(self.final_norm(x), self.mesh.tp_group)
        logits = F.linear(h, vocabulary.logits_weight())
        if labels is not None:
            return vocab_parallel_cross_entropy(logits, labels, vocabulary)
        logits = logits[..., :vocabulary.valid]
        return logits if self.parallel_output else gather_logits(logits, vocabulary, self.config.vocab_size)


@lru_cache(maxsize=64)
def on_paper(config: Config, pp_rank=0, tp_rank=0) -> GPT:
    """A stage of the model as one of its ranks would hold it, without memory: what a formula needs of shapes and kinds
    it asks here, so that what a layer has is said in one place."""
    return GPT(config, mesh_on_paper(config.pp, config.dp, config.tp, pp_rank, tp_rank=tp_rank))


def parameter_count(config: Config) -> int:
    """Parameters of the whole model, a tied matrix once, without the vocabulary's padding."""
    whole = on_paper(dataclasses.replace(config, tensor_model_parallel_size=1, pipeline_model_parallel_size=1))
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    matrices = sum(isinstance(module, VocabParallelEmbedding) for module in whole.modules())
    return sum(weight.numel() for weight in whole.parameters()) - matrices * padding


def flops_per_token(config: Config) -> float:
    """Training FLOPs of a token: 6 N + 12 L h s, N without positions, attention not halved for causality
    (PaLM, 2204.02311, appendix B; nanoGPT)."""
    parameters = parameter_count(config) - config.max_position_embeddings * config.hidden_size
    return 6 * parameters + 12 * config.num_layers * config.hidden_size * config.seq_length
