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
from nanodomino.functions import ACTIVATIONS, NORMALIZATIONS
from nanodomino.gradients import add_gradients
from nanodomino.mesh import Mesh, mesh_on_paper
from nanodomino.parallel import (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                                 copy_to_tensor_parallel, gather_logits, local_part, parameter,
                                 vocab_parallel_cross_entropy, wide)
from nanodomino.positions import attention_bias, rotate, rotation, turn_back
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
    All [b, s, h]; bias and mask may be None."""
    branch = drop(y if bias is None else y + bias, mask)
    return x + branch if branch is y else branch.add_(x)


class Norm(nn.Module):
    """Of config.normalization's kind, over `size` numbers; its parameters are whole on every rank."""

    def __init__(self, config: Config, mesh: Mesh, size: int):
        super().__init__()
        self.kind = NORMALIZATIONS[config.normalization]
        self.weight = parameter((size,), config, mesh, value=1.0)
        self.bias = parameter((size,), config, mesh) if self.kind.has_bias else None
        self.epsilon = config.layernorm_epsilon

    @property
    def weights(self):
        """weight and bias [h]; no bias: None."""
        return self.weight, self.bias

    def forward(self, x):
        return self.kind.function(x, self.weight, self.bias, self.epsilon)


class Sublayer(nn.Module):
    """norm, column-parallel linear, core, row-parallel linear, add. The subclass has `column`, `row` and the core:

    core(c, around) -> activation                                     the definition
    core_forward(c, around, training) -> (activation, kept)           what training runs; kept: what backward needs
    core_backward(gradient, kept) -> gradient of c; those of parameters of its own are added

    around: what Surroundings.core() says of it.
    """

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__()
        self.norm = Norm(config, mesh, config.hidden_size)
        self.site = site                                       # names this sublayer's dropout masks

    def forward(self, x, surroundings):
        """x [b, s, h] -> [b, s, h]: the definition."""
        y = self.row(self.core(self.column(self.norm(x)), surroundings.core(self, x)))
        return close_residual(x, y, self.row.bias, surroundings.hidden(self.site + ".hidden", x))


class Attention(Sublayer):
    """Causal attention of this rank's heads, a group of which shares keys and values (2305.13245)."""

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__(config, mesh, site)
        has_bias, width = not config.disable_bias_linear, config.num_attention_heads * config.kv_channels
        self.qkv = ColumnParallelLinear(config.hidden_size, config.qkv_size, config, mesh,
                                        has_bias or config.add_qkv_bias)
        self.dense = RowParallelLinear(width, config.hidden_size, config, mesh, has_bias)
        self.groups, self.head_dim = config.num_query_groups // mesh.tp, config.kv_channels
        self.group_size = config.num_attention_heads // config.num_query_groups
        self.q_layernorm, self.k_layernorm = (Norm(config, mesh, self.head_dim) if config.qk_layernorm else None
                                              for _ in range(2))
        for norm in (self.q_layernorm, self.k_layernorm):
            for weight in norm.parameters() if norm else ():
                weight.of_part = mesh.tp > 1                   # it sees this rank's heads

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

    def attend(self, q, k, v, around):
        """q [b, heads, s, d], k and v [b, groups, s, d] -> [b, heads, s, d]."""
        shared = self.group_size > 1
        if around.mask is None:
            return F.scaled_dot_product_attention(q, k, v, around.bias, is_causal=around.bias is None,
                                                  enable_gqa=shared)
        s = q.size(2)                                          # by hand, since SDPA draws its own mask
        k, v = (one.repeat_interleave(self.group_size, dim=1) if shared else one for one in (k, v))
        factor = self.head_dim ** -0.5                         # the products alone may be too large for fp16
        scores = torch.baddbmm(q.new_empty(()), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=factor)
        scores = scores.view(around.mask.shape)
        if around.bias is None:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        else:
            scores = scores + around.bias
        return drop(scores.softmax(dim=-1), around.mask) @ v

    def core(self, qkv, around):
        """qkv [b, s, ..] -> [b, s, heads d]."""
        q, k, v = self.split(qkv)
        q, k = (one if norm is None else norm(one) for one, norm in ((q, self.q_layernorm), (k, self.k_layernorm)))
        q, k = (one if around.turn is None else rotate(one, around.turn) for one in (q, k))
        return join_heads(self.attend(*map(by_head, (q, k, v)), around))

    def core_forward(self, qkv, around, training):
        if not training:
            return self.core(qkv, around), None
        q, k, v = self.split(qkv)
        q, before_q = prepare(q, self.q_layernorm, around.turn)
        k, before_k = prepare(k, self.k_layernorm, around.turn)
        if before_q is None and around.turn is not None:
            v = v.clone()                                      # q and k are new, so nothing else wants the rest of qkv
        heads = [by_head(one) for one in (q, k, v)]
        if around.mask is not None:                            # else products keep copies of their own, beside qkv
            heads = [one.contiguous() for one in heads]
        context, segment = run_segment(partial(self.attend, around=around), *heads)
        return join_heads(context), (segment, around.turn, before_q, before_k)

    def core_backward(self, gradient, kept):
        segment, turn, before_q, before_k = kept
        b, s, _ = gradient.shape
        gradient = gradient.view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k, v = (one.transpose(1, 2).unflatten(2, (self.groups, -1)) for one in segment.backward(gradient))
        q = prepare_backward(q, self.q_layernorm, turn, before_q)
        k = prepare_backward(k, self.k_layernorm, turn, before_k)
        return torch.cat([q, k, v], dim=3).view(b, s, -1)


def by_head(x):
    """[b, s, groups, heads of each, d] -> [b, heads, s, d]."""
    return x.flatten(2, 3).transpose(1, 2)


def join_heads(context):
    """[b, heads, s, d] -> [b, s, heads d]."""
    return context.transpose(1, 2).flatten(2)


def prepare(x, norm, turn):
    """q or k [b, s, groups, heads of each, d], as the scores want it: normed, turned. (That, what backward needs.)"""
    before = None
    if norm is not None:
        before, (x, *statistics) = x, norm.kind.forward(x, *norm.weights, norm.epsilon)
        before = before, statistics
    return (x if turn is None else rotate(x, turn)), before


def prepare_backward(gradient, norm, turn, before):
    """The gradient of x from that of what prepare() made of it; those of the norm's weights are added to theirs."""
    if turn is not None:
        gradient = rotate(gradient, turn_back(turn))
    if norm is None:
        return gradient
    gradient, *gradients = norm.kind.backward(gradient, *before, *norm.weights)
    add_gradients(norm.weights, gradients)
    return gradient


class MLP(Sublayer):
    """h -> ffn -> h with config.activation between, on this rank's part of the ffn features."""

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__(config, mesh, site)
        self.activation, has_bias = ACTIVATIONS[config.activation], not config.disable_bias_linear
        runs = self.activation.inputs
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, runs * config.ffn_hidden_size, config, mesh,
                                                  has_bias, runs)
        self.dense_4h_to_h = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, config, mesh, has_bias)

    @property
    def column(self):
        return self.dense_h_to_4h

    @property
    def row(self):
        return self.dense_4h_to_h

    def core(self, c, around):
        """[b, s, inputs x ffn/t] -> [b, s, ffn/t]."""
        return self.activation.function(c)

    def core_forward(self, c, around, training):
        return self.activation.function(c), c

    def core_backward(self, gradient, c):
        return self.activation.backward(gradient, c)


class Layer(nn.Module):
    """A transformer layer: attention, then MLP."""

    def __init__(self, config: Config, mesh: Mesh, site: str):
        super().__init__()
        self.attention = Attention(config, mesh, site + ".attention")
        self.mlp = MLP(config, mesh, site + ".mlp")

    def forward(self, x, surroundings):
        return self.mlp(self.attention(x, surroundings), surroundings)


class Embedding(nn.Module):
    """Word embedding, cut by vocabulary, and learned positions, if there are, whole on every rank."""

    def __init__(self, config: Config, mesh: Mesh, pre_process: bool):
        super().__init__()
        self.word_embeddings, self.position_embeddings = VocabParallelEmbedding(config, mesh), None
        if pre_process and config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = parameter(
                (config.max_position_embeddings, config.hidden_size), config, mesh, std=config.init_method_std)

    def add_positions(self, words, positions, mask):
        """words [b, s, h] + the vectors of positions [b, s], if there are, with dropout."""
        if self.position_embeddings is not None:
            words = words + F.embedding(positions, self.position_embeddings.weight)
        return drop(words, mask)

    def add_position_gradients(self, gradient, positions):
        """Of what came out of add_positions, before its dropout [b, s, h]. Not by index_add_, which on GPUs adds in any
        order: tp ranks have copies of these, and must add alike."""
        if self.position_embeddings is not None:
            weight = self.position_embeddings.weight
            add_gradients([weight], [torch.ops.aten.embedding_dense_backward(
                gradient.to(wide(gradient)), positions, len(weight), -1, False)])


@dataclass(frozen=True)
class Around:
    """What an attention is told beside its input; each may be None."""
    mask: torch.Tensor | None            # dropout of the probabilities [b, heads, s, s]
    turn: tuple | None                   # (cos, sin) of rotary positions
    bias: torch.Tensor | None            # [b, 1, s, s], added to the scores; None: everything before


class Surroundings:
    """What sublayers are told of a slice's samples beside the stream: dropout's masks, positions, documents.

    Masks are a pure function of (seed, sample, site), on one type of device: the layout never shows, not even in
    dropout.

    A mask is drawn for the whole sample and all heads, from a generator seeded by the sample's number in the run (its
    place in the data order) and the name of the site. So tensor-parallel ranks agree where the stream is replicated,
    hold different heads' masks where it is sharded, and any slicing or resuming repeats the same bits.
    Without sample_ids (evaluation) there are none. keep: those of the stream, of which backward asks for each again.
    stream: how it lies on the ranks (stream.py); None: whole. positions, documents [b, s]: see positions.py; None: a
    sample is one document, from place 0 on.
    """

    def __init__(self, config: Config, mesh: Mesh, sample_ids=None, keep=False, stream=None, positions=None,
                 documents=None):
        self.config, self.mesh, self.sample_ids, self.keep, self.kept = config, mesh, sample_ids, keep, {}
        self.stream, self.positions, self.documents = stream or Whole(mesh.tp_group), positions, documents
        self.places = None                                     # (turn, bias): one for all sublayers

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

    def core(self, sublayer: Sublayer, x) -> Around | None:
        """For an attention, of this rank's heads; for an MLP None. x: [b, s, ..], of all s tokens."""
        if not isinstance(sublayer, Attention):
            return None
        heads, s = self.config.num_attention_heads, x.size(1)
        mask = self.draw(sublayer.site + ".core", (heads, s, s), self.config.attention_dropout, x)
        if mask is not None:                                   # a view would keep all heads' masks in memory
            mask = mask.chunk(self.mesh.tp, dim=1)[self.mesh.tp_rank].clone()
        if self.places is None:
            self.places = (rotation(self.config, self.positions, s, x.device),
                           None if self.documents is None else attention_bias(self.documents, x.dtype))
        return Around(mask, *self.places)


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
            self.embedding = Embedding(config, mesh, self.pre_process)
        runs = [stage_layers(config.num_layers, virtual_stage, placement.last + 1) for virtual_stage in held]
        self.layers = nn.ModuleDict({str(i): Layer(config, mesh, f"layers.{i}")
                                     for i in sorted(layer for run in runs for layer in run)})
        self.chunks = [Chunk([self.layers[str(i)] for i in run], virtual_stage == 0, virtual_stage == placement.last)
                       for run, virtual_stage in zip(runs, held)]
        if self.post_process:
            self.final_norm = Norm(config, mesh, config.hidden_size)
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
            weight.copy_(local_part(whole, weight, self.mesh))

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The word embedding's matrix, where two stages, the model's first and last, each hold a copy of it."""
        shared = self.config.tied and self.pre_process != self.post_process
        return self.embedding.word_embeddings.weight if shared else None

    def forward(self, tokens, positions, labels=None, hidden=None, sample_ids=None, chunk=0, documents=None):
        """The plain model, with blocking wires: one of its chunks.

        tokens, positions, labels: [b, s]; hidden: [b, s, h] from the layers before (None for the first);
        sample_ids: b numbers that seed dropout, None to evaluate; documents [b, s]: see positions.py.
        Returns hidden states [b, s, h]; at the model's end the loss of each token [b, s], or without labels the logits:
        [b, s, valid] of this rank's words with parallel_output, else [b, s, v] on every rank.
        """
        surroundings = Surroundings(self.config, self.mesh, sample_ids, positions=positions, documents=documents)
        x, chunk = hidden, self.chunks[chunk]
        if chunk.pre_process:
            words = self.embedding.word_embeddings(tokens)
            x = self.embedding.add_positions(words, positions, surroundings.hidden("embedding", words))
        for layer in chunk.layers:
            x = layer(x, surroundings)
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
    """Training FLOPs of a token: 6 N + 12 L n d s, N without positions, attention not halved for causality
    (PaLM, 2204.02311, appendix B; nanoGPT). n d is h, where heads are not of another size; SwiGLU's third matrix, and
    keys and values that heads share, are in N."""
    learned = config.position_embedding_type == "learned_absolute"
    parameters = parameter_count(config) - learned * config.max_position_embeddings * config.hidden_size
    return 6 * parameters + 12 * config.num_layers * config.num_attention_heads * config.kv_channels * config.seq_length
