"""GPT-2/3 and Llama as a chain of sublayers. Pipeline stages are consecutive layers of this chain.

A pre-norm transformer has one residual stream x [b, s, h]. Every sublayer reads x and adds its output y to it.
Attention and MLP alternate, so L layers are 2L sublayers. With tensor parallelism (parallel.py) each sublayer takes
three steps:

    residual + norm    the same on every rank          x' = x + dropout(y + bias)    y, bias: of the previous sublayer
                                                       h = norm(x')
    branch             two matmuls with local shards   partial = core(h W1^T) W2^T   core: attention, or gelu in an MLP
    all-reduce         communication                   y = sum of `partial` over the tp ranks

With f and g of parallel.py, the whole chain is:

    tokens -> embedding -> g                                       x
           -> norm -> f -> W1 -> attention -> W2 -> g  -> + x      layer 0, attention
           -> norm -> f -> W1 -> gelu      -> W2 -> g  -> + x      layer 0, MLP
           ...                                                     layers 1 to L - 1
           -> norm -> f -> head -> cross entropy

This file calls the sublayers one after another, with blocking all-reduces and plain autograd. That is the *definition*
of the model. domino.py runs the same sublayers in another order, and tests compare it with this definition.

Model families differ in norm, positions, activation, biases, and in whether the head is tied to the word embedding.
This file handles learned positions and the tied head. The files in layers/ implement the other choices. Options may
replace a layer's MLP, or add modules behind the head (settings/choices.py).

Sources: GPT-2; GPT-3 (2005.14165); Megatron-LM (1909.08053, section 3); Llama (2302.13971).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.layers.attention import Attention
from nanodomino.layers.cross_entropy import vocab_parallel_cross_entropy
from nanodomino.layers.dropout_and_positions import MasksAndPositions, seeded_generator
from nanodomino.layers.gradients import add_gradients, drop, wide_dtype
from nanodomino.layers.sublayers import Norm
from nanodomino.mesh import Mesh, meta_mesh
from nanodomino.optim.buckets import local_shard, parameter
from nanodomino.parallel import VocabParallelEmbedding, copy_to_tensor_parallel, gather_logits
from nanodomino.schedules.simulation import stage_layers


class Layer(nn.Module):
    """The two sublayers of a transformer layer: attention, then MLP. number: its place in the model, from 0."""

    def __init__(self, config, mesh: Mesh, number: int):
        super().__init__()
        self.number, site = number, config.layer_site(number)
        self.attention = Attention(config, mesh, f"{site}.attention", config.attention_window(number))
        self.mlp = config.mlp_class(number)(config, mesh, f"{site}.mlp")

    def forward(self, x, masks_and_positions):
        return self.mlp(self.attention(x, masks_and_positions), masks_and_positions)


class Embedding(nn.Module):
    """The word embedding, sharded by vocabulary, and the position embedding, of which every tp rank holds a copy. The
    latter is None without learned positions, and on a stage that uses the words only as the tied head or behind it."""

    def __init__(self, config, mesh: Mesh, pre_process: bool, post_process: bool):
        super().__init__()
        # used at both ends: by one stage, or by the first and the last stage, which then each hold a copy
        copied = config.words_at_end and not (pre_process and post_process)
        self.word_embeddings = VocabParallelEmbedding(config, mesh, addends=("embedding",) if copied else ())
        self.position_embeddings = None
        if pre_process and config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = parameter((config.max_position_embeddings, config.hidden_size), config,
                                                        mesh, std=config.init_method_std, update="decay")

    def add_positions(self, words, positions, mask):
        """Add the embeddings of positions [b, s], if they are learned, to words [b, s, h]. Then apply dropout."""
        if self.position_embeddings is not None:
            words = words + F.embedding(positions, self.position_embeddings.weight)
        return drop(words, mask)

    def add_position_gradients(self, gradient, positions):
        """Add the gradient of the position embedding, if there is one, to its main_grad. gradient [b, s, h]: the
        gradient of the sum in add_positions(), before dropout. The copies on the tp ranks must stay equal bit for bit,
        so this avoids index_add_: its order is random on GPUs."""
        if self.position_embeddings is not None:
            weight = self.position_embeddings.weight
            add_gradients([weight], [torch.ops.aten.embedding_dense_backward(
                gradient.to(wide_dtype(gradient)), positions, len(weight), -1, False)])


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive layers of a stage.

    pre_process: the chunk starts with the embedding and takes tokens. Other chunks take hidden states [b, s, h].
    post_process: the chunk ends with final norm and head and returns losses or logits. Other chunks return hidden
        states [b, s, h].
    parts: {site: modules} in the order of forward. Backward reports the modules of a part together, as soon as their
        gradients are complete, and zero.py counts the reports that it expects. A module that is used at several places,
        such as a tied matrix, is in several parts."""
    layers: list[Layer]
    pre_process: bool
    post_process: bool
    parts: dict[str, tuple[nn.Module, ...]]
    # the attention and MLP of each layer, in order
    sublayers = property(lambda self: [sublayer for layer in self.layers for sublayer in layer.children()])


class GPT(nn.Module):
    """One pipeline stage of a GPT; the whole model if pp = 1.

    Most schedules give a stage one chunk; some give it several. config.placement says which chunks of the model these
    are. pre_process is True if this stage holds the embedding, post_process if it holds the final norm and the head.
    Layers are numbered over the whole model (layers.7.attention.qkv.weight), so names don't depend on the layout.

    parallel_output: without labels, return only the logits of this rank's words; see forward().
    initialize: if False, the weights have no values until a checkpoint is loaded. Drawing 8e9 weights takes a minute.
    """

    def __init__(self, config, mesh: Mesh, parallel_output=True, initialize=True):
        super().__init__()
        self.config, self.mesh, self.parallel_output = config, mesh, parallel_output
        placement, tied, behind_head = config.placement, config.tied, config.behind_head
        virtual_stages = [placement.virtual_stage(mesh.pp_rank, chunk) for chunk in range(placement.chunks)]
        self.pre_process, self.post_process = 0 in virtual_stages, placement.last in virtual_stages
        if self.pre_process or (self.post_process and config.words_at_end):
            self.embedding = Embedding(config, mesh, self.pre_process, self.post_process)
        numbers = [stage_layers(config.num_layers, virtual_stage, placement.last + 1, behind_head.layers)
                   for virtual_stage in virtual_stages]
        self.layers = nn.ModuleDict({str(i): Layer(config, mesh, i) for i in sorted(i for own in numbers for i in own)})
        if self.post_process:
            for name, module in behind_head.modules(mesh, Layer).items():
                self.add_module(name, module)
            self.final_norm = Norm(config, mesh, config.hidden_size)
            if not tied:
                self.output_layer = VocabParallelEmbedding(config, mesh)
            # the list hides the module from torch, which would register a tied matrix under a second name
            self.head = [self.embedding.word_embeddings if tied else self.output_layer]
        self.chunks = [self.chunk([self.layers[str(i)] for i in own], place == 0, place == placement.last)
                       for own, place in zip(numbers, virtual_stages)]
        self.chunks_behind_head = behind_head.chunks(self) if self.post_process else []
        # what sublayers count, in one tensor for the whole model: zero.py sums it over the world
        sizes = config.statistics
        self.statistics = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=mesh.device)
        self.statistics_of = dict(zip(sizes, self.statistics.split(list(sizes.values()))))
        if initialize and mesh.device.type != "meta":
            self.initialize()

    def chunk(self, layers: list[Layer], pre_process: bool, post_process: bool, more_parts=()) -> Chunk:
        """Return a chunk of these layers. more_parts: the parts that an option runs before the layers."""
        parts = {"embedding": (self.embedding,)} if pre_process else dict(more_parts)
        parts |= {sublayer.site: (sublayer,) for layer in layers for sublayer in layer.children()}
        if post_process:
            parts["head"] = (self.final_norm, *self.head)
        return Chunk(layers, pre_process, post_process, parts)

    @torch.no_grad()
    def initialize(self):
        """Draw each whole parameter from a generator seeded by (seed, parameter name), and keep this rank's shard. So
        the initial model is the same on every layout: the shards of a matrix differ, and its replicas are equal."""
        for name, weight in self.named_parameters():
            if weight.spec.std is None:
                weight.fill_(weight.spec.value)
                continue
            whole = torch.empty(weight.spec.shape).normal_(
                0.0, weight.spec.std, generator=seeded_generator("cpu", self.config.seed, name))
            weight.copy_(local_shard(whole, weight))

    def masks_and_positions(self, sample_ids, positions, extras, keep=False, stream=None) -> MasksAndPositions:
        """Return the object that makes dropout masks, rotary positions and attention bias for some samples."""
        return MasksAndPositions(self.config, self.mesh, sample_ids, keep, stream, positions, extras)

    def forward(self, tokens, positions, labels=None, hidden=None, sample_ids=None, chunk=0, extras=None):
        """Run one chunk of the plain model, with blocking communication.

        tokens, positions, labels: [b, s]
        hidden: [b, s, h] from the previous chunk; None for the first chunk
        sample_ids: b numbers that seed the dropout masks; None turns dropout off
        extras: what options have added to the batch; see data.Batch

        Returns hidden states [b, s, h]. The last chunk returns the loss of each token [b, s]. Without labels, it
        returns logits: with parallel_output those of this rank's words [b, s, num_words], otherwise all [b, s, v]."""
        masks_and_positions = self.masks_and_positions(sample_ids, positions, extras)
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


# ---- models on torch's meta device, which allocates no memory: estimates and checkpoints need only names and shapes

@lru_cache(maxsize=1024)
def meta_stage(config, pp_rank=0) -> GPT:
    """Return the first tensor-parallel shard of a stage, with shapes but without values."""
    return GPT(config, meta_mesh(config.pp, config.dp, config.tp, pp_rank, **config.mesh_options))


def meta_model(config) -> GPT:
    """Return the whole model as one process holds it, with shapes but without values."""
    return meta_stage(config.on_one_rank())
