"""GPT-2/3 and Llama as a chain of sublayers, cut between any two layers into pipeline stages.

A pre-norm transformer is one residual stream x [b, s, h] that every sublayer reads and adds to. Attention and MLP
alternate, 2L sublayers in all. With tensor parallelism (parallel.py) each sublayer is the same three steps:

    residual + norm    the same on every rank, per token   x' = x + dropout(y + bias);   h = norm(x')
    inside             on this rank's shard, two matmuls   partial y = core(h W1^T) W2^T
    all-reduce         communication                       y = sum of the partial y over tp ranks

    tokens -> embedding -> g -> | norm -> f -> W1 -> attention -> W2 -> g -> +
                                | norm -> f -> W1 -> gelu -> W2 -> g -> + | ... | norm -> f -> head

This file calls the sublayers one after another, with the blocking f and g of parallel.py and plain autograd. That is
the *definition* of the model, which every faster schedule is tested against. domino.py runs the same sublayers in
another order.

Model families differ in norm, positions, activation and biases. The files in layers/ implement these choices. The only
one that this file knows is whether there are learned positions, which Embedding adds.

Sources: GPT-2; GPT-3 (2005.14165); Megatron-LM (1909.08053, section 3); Llama (2302.13971).
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.layers.attention import Attention
from nanodomino.layers.cross_entropy import vocab_parallel_cross_entropy
from nanodomino.layers.dropout_and_positions import MasksAndPositions, drop, seeded_generator
from nanodomino.layers.main_grad import add_gradients, wide_dtype
from nanodomino.layers.mlp import MLP
from nanodomino.layers.norms import Norm
from nanodomino.layers.sublayer import Sublayer
from nanodomino.mesh import Mesh, meta_mesh
from nanodomino.parallel import VocabParallelEmbedding, copy_to_tensor_parallel, gather_logits, local_shard, parameter


class Layer(nn.Module):
    """A transformer layer: attention, then MLP."""

    def __init__(self, config, mesh: Mesh, site: str):
        super().__init__()
        self.attention = Attention(config, mesh, site + ".attention")
        self.mlp = MLP(config, mesh, site + ".mlp")

    def forward(self, x, masks_and_positions):
        return self.mlp(self.attention(x, masks_and_positions), masks_and_positions)


class Embedding(nn.Module):
    """The word embedding, cut by vocabulary, and learned positions (if any), whole on every rank."""

    def __init__(self, config, mesh: Mesh, pre_process: bool):
        super().__init__()
        self.word_embeddings, self.position_embeddings = VocabParallelEmbedding(config, mesh), None
        if pre_process and config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = parameter(
                (config.max_position_embeddings, config.hidden_size), config, mesh, std=config.init_method_std)

    def add_positions(self, words, positions, mask):
        """Add the embeddings of positions [b, s] (if any) to words [b, s, h], then drop."""
        if self.position_embeddings is None:
            return drop(words.clone(), mask)        # clone: a shard may be a view that keeps the whole stream in memory
        return drop(words + F.embedding(positions, self.position_embeddings.weight), mask)

    def add_position_gradients(self, gradient, positions):
        """Add to the position embeddings' main_grad. gradient [b, s, h]: of the sum in add_positions(), before dropout.

        index_add_ would not do: on GPUs it adds in any order, but the copies on all tp ranks must get the same bits.
        """
        if self.position_embeddings is not None:
            weight = self.position_embeddings.weight
            add_gradients([weight], [torch.ops.aten.embedding_dense_backward(
                gradient.to(wide_dtype(gradient)), positions, len(weight), -1, False)])


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive layers of a stage.

    pre_process: the chunk starts with the embedding and takes tokens; otherwise it takes hidden states [b, s, h].
    post_process: it ends with final norm and head and returns losses or logits; otherwise hidden states [b, s, h].
    """
    layers: list[Layer]
    pre_process: bool
    post_process: bool

    @property
    def sublayers(self) -> list[Sublayer]:
        """Return attention and MLP of each layer, in order."""
        return [sublayer for layer in self.layers for sublayer in (layer.attention, layer.mlp)]


def stage_layers(num_layers: int, stage: int, stages: int) -> range:
    """Return the layers of a pipeline stage. The first num_layers % stages stages hold one more than the others."""
    each, extra = divmod(num_layers, stages)
    first = stage * each + min(stage, extra)
    return range(first, first + each + (stage < extra))


class GPT(nn.Module):
    """One pipeline stage of a GPT; the whole model if pp = 1.

    Most schedules give a stage one chunk, some give it several; config.placement says where in the model they lie.
    pre_process, post_process: this stage holds the embedding, or final norm and head.
    Parameter names are global (layers.7.attention.qkv.weight), so they don't depend on the layout.
    """

    def __init__(self, config, mesh: Mesh, parallel_output=True):
        super().__init__()
        self.config, self.mesh, self.parallel_output = config, mesh, parallel_output
        placement, tied = config.placement, config.tied
        virtual_stages = [placement.virtual_stage(mesh.pp_rank, chunk) for chunk in range(placement.chunks)]
        self.pre_process, self.post_process = 0 in virtual_stages, placement.last in virtual_stages
        if self.pre_process or (self.post_process and tied):   # the last stage holds a copy of a tied matrix
            self.embedding = Embedding(config, mesh, self.pre_process)
        numbers = [stage_layers(config.num_layers, stage, placement.last + 1) for stage in virtual_stages]
        self.layers = nn.ModuleDict({str(i): Layer(config, mesh, f"layers.{i}")
                                     for i in sorted(i for chunk in numbers for i in chunk)})
        self.chunks = [Chunk([self.layers[str(i)] for i in chunk], stage == 0, stage == placement.last)
                       for chunk, stage in zip(numbers, virtual_stages)]
        if self.post_process:
            self.final_norm = Norm(config, mesh, config.hidden_size)
            if not tied:
                self.output_layer = VocabParallelEmbedding(config, mesh)
            # in a list, or torch would register a tied matrix under a second name
            self.head = [self.embedding.word_embeddings if tied else self.output_layer]
        if mesh.device.type != "meta":
            self.initialize()

    @torch.no_grad()
    def initialize(self):
        """Draw each parameter whole, from a generator seeded by (seed, global name), and keep this rank's shard.

        So initial weights are the same on every layout: the shards of a matrix differ, and replicas agree.
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
        """This stage's copy of the tied word embedding, if the first and the last stage each hold one; else None."""
        shared = self.config.tied and self.pre_process != self.post_process
        return self.embedding.word_embeddings.weight if shared else None

    def forward(self, tokens, positions, labels=None, hidden=None, sample_ids=None, chunk=0, documents=None):
        """Run one chunk of the plain model, with blocking communication.

        tokens, positions, labels: [b, s]
        hidden: [b, s, h] from the previous chunk; None for the first
        sample_ids: b numbers that seed dropout; None to evaluate
        documents: [b, s], see layers/positions.py
        Returns hidden states [b, s, h]. The last chunk returns the loss of each token [b, s] or, without labels, the
        logits: [b, s, num_words] of this rank's words with parallel_output, else [b, s, v] on every rank.
        """
        masks_and_positions = MasksAndPositions(self.config, self.mesh, sample_ids, positions=positions,
                                                documents=documents)
        x, chunk = hidden, self.chunks[chunk]
        if chunk.pre_process:
            words = self.embedding.word_embeddings(tokens)
            mask = masks_and_positions.hidden_dropout_mask("embedding", words)
            x = self.embedding.add_positions(words, positions, mask)
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


# ---- models without memory, on torch's meta device: estimates and checkpoints ask them for names and shapes

@lru_cache(maxsize=64)
def meta_stage(config, pp_rank=0, tp_rank=0) -> GPT:
    """Return the stage that the rank at these coordinates would hold."""
    return GPT(config, meta_mesh(config.pp, config.dp, config.tp, pp_rank, tp_rank=tp_rank))


def meta_model(config) -> GPT:
    """Return the whole model, as one process would hold it."""
    return meta_stage(dataclasses.replace(config, tensor_model_parallel_size=1, pipeline_model_parallel_size=1))
