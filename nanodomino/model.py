"""GPT-2/3, and Llama's kin, as a chain of sublayers, cut where the wires are.

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

Which norm, positions, core and biases it has is what families of models differ in: the sublayers' business
(sublayers.py), and nobody's who schedules them.

Sources: GPT-2; GPT-3 (2005.14165); Megatron-LM (1909.08053, section 3); sublayer scaling of the initial weights as in
GPT-2.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.layers.attention import Attention
from nanodomino.layers.cross_entropy import vocab_parallel_cross_entropy
from nanodomino.layers.main_grad import add_gradients, wide
from nanodomino.layers.masks_and_positions import MasksAndPositions, drop, seeded_generator
from nanodomino.layers.mlp import MLP
from nanodomino.layers.norms import Norm
from nanodomino.layers.sublayer import Sublayer
from nanodomino.mesh import Mesh, meta_mesh
from nanodomino.parallel import VocabParallelEmbedding, copy_to_tensor_parallel, gather_logits, local_shard, parameter


def stage_layers(num_layers: int, stage: int, stages: int) -> range:
    """The layers of a pipeline stage, as even as they go: the first num_layers % stages stages hold one more."""
    each, extra = divmod(num_layers, stages)
    first = stage * each + min(stage, extra)
    return range(first, first + each + (stage < extra))


class Layer(nn.Module):
    """A transformer layer: attention, then MLP."""

    def __init__(self, config, mesh: Mesh, site: str):
        super().__init__()
        self.attention = Attention(config, mesh, site + ".attention")
        self.mlp = MLP(config, mesh, site + ".mlp")

    def forward(self, x, masks_and_positions):
        return self.mlp(self.attention(x, masks_and_positions), masks_and_positions)


class Embedding(nn.Module):
    """Word embedding, cut by vocabulary, and learned positions, if there are, whole on every rank."""

    def __init__(self, config, mesh: Mesh, pre_process: bool):
        super().__init__()
        self.word_embeddings, self.position_embeddings = VocabParallelEmbedding(config, mesh), None
        if pre_process and config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = parameter(
                (config.max_position_embeddings, config.hidden_size), config, mesh, std=config.init_method_std)

    def add_positions(self, words, positions, mask):
        """words [b, s, h] + the vectors of positions [b, s], if there are, with dropout."""
        if self.position_embeddings is None:
            return drop(words.clone(), mask)                   # of the whole sum's memory a part may be ours: let it go
        return drop(words + F.embedding(positions, self.position_embeddings.weight), mask)

    def add_position_gradients(self, gradient, positions):
        """Of what came out of add_positions, before its dropout [b, s, h]. Not by index_add_, which on GPUs adds in any
        order: tp ranks have copies of these, and must add alike."""
        if self.position_embeddings is not None:
            weight = self.position_embeddings.weight
            add_gradients([weight], [torch.ops.aten.embedding_dense_backward(
                gradient.to(wide(gradient)), positions, len(weight), -1, False)])


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

    def __init__(self, config, mesh: Mesh, parallel_output=True):
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
            if weight.init_std is None:
                weight.fill_(weight.init_value)
                continue
            whole = torch.empty(weight.full_shape).normal_(
                0.0, weight.init_std, generator=seeded_generator("cpu", self.config.seed, name))
            weight.copy_(local_shard(whole, weight, self.mesh))

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
        masks_and_positions = MasksAndPositions(self.config, self.mesh, sample_ids, positions=positions, documents=documents)
        x, chunk = hidden, self.chunks[chunk]
        if chunk.pre_process:
            words = self.embedding.word_embeddings(tokens)
            x = self.embedding.add_positions(words, positions, masks_and_positions.hidden_dropout_mask("embedding", words))
        for layer in chunk.layers:
            x = layer(x, masks_and_positions)
        if not chunk.post_process:
            return x
        (vocabulary,) = self.head
        h = copy_to_tensor_parallel(self.final_norm(x), self.mesh.tp_group)
        logits = F.linear(h, vocabulary.logits_weight())
        if labels is not None:
            return vocab_parallel_cross_entropy(logits, labels, vocabulary)
        logits = logits[..., :vocabulary.num_words]
        return logits if self.parallel_output else gather_logits(logits, vocabulary, self.config.vocab_size)


@lru_cache(maxsize=64)
def meta_stage(config, pp_rank=0, tp_rank=0) -> GPT:
    """A stage of the model as one of its ranks would hold it, without memory: what a formula needs of shapes and kinds
    it asks here, so that what a layer has is said in one place."""
    return GPT(config, meta_mesh(config.pp, config.dp, config.tp, pp_rank, tp_rank=tp_rank))


def meta_model(config) -> GPT:
    """All of the model, as one process would hold it, without memory."""
    return meta_stage(dataclasses.replace(config, tensor_model_parallel_size=1, pipeline_model_parallel_size=1))


def parameter_count(config) -> int:
    """Parameters of the whole model, a tied matrix once, without the vocabulary's padding."""
    whole = meta_model(config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    matrices = sum(isinstance(module, VocabParallelEmbedding) for module in whole.modules())
    return sum(weight.numel() for weight in whole.parameters()) - matrices * padding


def flops_per_token(config) -> float:
    """Training FLOPs of a token: 6 N + 12 L n d s, N without positions, attention not halved for causality
    (PaLM, 2204.02311, appendix B; nanoGPT). n d is h, where heads are not of another size; SwiGLU's third matrix, and
    keys and values that heads share, are in N."""
    learned = config.position_embedding_type == "learned_absolute"
    parameters = parameter_count(config) - learned * config.max_position_embeddings * config.hidden_size
    return 6 * parameters + 12 * config.num_layers * config.num_attention_heads * config.kv_channels * config.seq_length
