"""Train a tiny GPT on any layout in the pool's workers, and put what the ranks hold together again.

    worker   train(config, weights, data, steps) -> Outcome: this rank's losses, norms, shards of every gradient and
    weight
    session  whole(outcomes, ...)                -> full tensors by name; replicas and copies must agree, bit for bit

The ranks run train.py's own train_step, with only the data replaced.
"""

import math
from dataclasses import dataclass

import torch
from support.reference import Sizes, random_weights, train_reference

import train
from nanodomino.comm.collectives import all_gather
from nanodomino.comm.trace import NO_TRACE
from nanodomino.config.config import Config
from nanodomino.config.setting import names_affecting
from nanodomino.data import Batch
from nanodomino.domino import Domino
from nanodomino.mesh import make_mesh
from nanodomino.parallel import local_shard
from nanodomino.zero import ZeroOptimizer

VOCABULARY = 29          # padded to 32: the last rank owns fewer words than the others; padded to 64, none

# Choices of a model, as families make them; at 8 heads and tp 4 a rank has one of 4 groups.
FAMILIES = dict(
    gpt2={},
    llama=dict(position_embedding_type="rope", swiglu=True, num_query_groups=4, disable_bias_linear=True),
    qwen2=dict(position_embedding_type="rope", swiglu=True, num_query_groups=4, disable_bias_linear=True,
               add_qkv_bias=True, kv_channels=4, rotary_percent=0.5, rotary_base=50.0),
    qwen3=dict(position_embedding_type="rope", swiglu=True, disable_bias_linear=True, qk_layernorm=True, kv_channels=6,
               use_rope_scaling=True, rope_scaling_factor=4.0, rotary_seq_len_interpolation_factor=2.0,
               ffn_hidden_size=24),
    mixed=dict(position_embedding_type="none", num_query_groups=4, qk_layernorm=True, kv_channels=4))


def tiny(world_size=1, **changes) -> Config:
    """A resolved Config: 3 layers, 16 wide, global batch 24 x 8 tokens, clipping that bites, everything else as
    given."""
    sizes = dict(num_layers=3, hidden_size=16, num_attention_heads=8, seq_length=8, make_vocab_size_divisible_by=32,
                 global_batch_size=24, micro_batch_size=3, dtype="float64", clip_grad=0.1, lr=1e-2,
                 lr_warmup_fraction=0.4,
                 train_iters=5, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, bucket_size=2000)
    return Config(**{**sizes, **changes}).resolve(world_size).with_vocabulary(VOCABULARY)


def sizes_of(config: Config) -> Sizes:
    """The same model, as the reference names it."""
    return Sizes(num_layers=config.num_layers, hidden_size=config.hidden_size,
                 num_attention_heads=config.num_attention_heads,
                 ffn_hidden_size=config.ffn_hidden_size, vocab_size=config.vocab_size,
                 padded_vocab_size=config.padded_vocab_size,
                 max_positions=config.max_position_embeddings, tied=config.tied, normalization=config.normalization,
                 num_query_groups=config.num_query_groups, head_dim=config.kv_channels, swiglu=config.swiglu,
                 bias=not config.disable_bias_linear, qkv_bias=not config.disable_bias_linear or config.add_qkv_bias,
                 qk_norm=config.qk_layernorm, positions=config.position_embedding_type,
                 rotary_percent=config.rotary_percent,
                 rotary_base=config.rotary_base, rope_scaling=config.rope_scaling_factor if config.use_rope_scaling
                 else 0.0, interpolation=config.rotary_seq_len_interpolation_factor)


@dataclass
class FixedData:
    """A dataset of given arrays: steps x [global batch, s]. Stands in for TokenDataset."""
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor | None = None      # None: 0, 1, ..
    documents: torch.Tensor | None = None      # None: each row is one

    @property
    def windows(self):
        return self.tokens.size(0) * self.tokens.size(1)

    def batch(self, step, microbatch, dp_rank, dp, micro_batch_size, global_batch_size, shuffle=True):
        first = dp_rank * (global_batch_size // dp) + microbatch * micro_batch_size
        rows = slice(first, first + micro_batch_size)
        ids = [step * global_batch_size + first + row for row in range(micro_batch_size)]
        positions = torch.arange(self.tokens.size(-1)).expand(micro_batch_size, -1)
        if self.positions is not None:
            positions = self.positions[step, rows]
        return Batch(self.tokens[step, rows], self.labels[step, rows], self.loss_mask[step, rows], positions, ids,
                     None if self.documents is None else self.documents[step, rows], self.positions is None)


END_OF_TEXT = 3          # where documents count: about one token in four


def counted_documents(tokens):
    """(positions, documents) of tokens [.., s], counted one by one."""
    positions, documents = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, place, document in zip(*(one.flatten(0, -2) for one in (tokens, positions, documents))):
        for i in range(1, len(row)):
            ended = bool(row[i - 1] == END_OF_TEXT)
            place[i], document[i] = 0 if ended else place[i - 1] + 1, document[i - 1] + ended
    return positions, documents


def random_data(config: Config, steps: int, seed=7) -> FixedData:
    """Random tokens; the share of tokens that count differs from row to row, from none of them to all."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, config.global_batch_size, config.seq_length)
    tokens = torch.randint(0, config.vocab_size, (*shape[:2], config.seq_length + 1), generator=generator)
    share = torch.linspace(-0.2, 1.1, config.global_batch_size)[torch.randperm(config.global_batch_size,
                                                                               generator=generator)]
    loss_mask = (torch.rand(shape, generator=generator) < share[:, None]).float()
    if config.reset_position_ids or config.reset_attention_mask:
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.25, END_OF_TEXT, tokens)
    positions, documents = counted_documents(tokens[..., :-1])
    return FixedData(tokens[..., :-1], tokens[..., 1:], loss_mask, positions if config.reset_position_ids else None,
                     documents if config.reset_attention_mask else None)


@dataclass
class Outcome:
    """What one rank saw. gradients: of each step, before clipping, for the mean loss; shards are (tensor, shard_dim) by
    name."""
    place: tuple                 # pp_rank, dp_rank, tp_rank
    losses: list
    norms: list
    gradients: list
    weights: dict
    evaluation: float


def build(config: Config, weights=None, trace=NO_TRACE):
    """(mesh, model, optimizer, stage) on this rank, filled with full weights by name (or as drawn, without any)."""
    mesh = make_mesh(config.pp, config.dp, config.tp, torch.device("cpu"))
    model = train.model_builder(config, mesh)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weights is not None:
                weight.copy_(local_shard(weights[name], weight, mesh))
    optimizer = ZeroOptimizer(model, config, mesh, trace)
    return mesh, model, optimizer, Domino(model, config.slices, config.columns, config.active_compile_backend, trace)


def train_rank(config: Config, weights, data: FixedData, steps: int) -> Outcome:
    """Runs in a worker: `steps` steps of train.py's train_step, then an evaluation on the same data."""
    return train_steps(build(config, weights), config, data, range(1, steps + 1))


def train_steps(built, config: Config, data: FixedData, steps: range) -> Outcome:
    """The same for some steps of a run, of what build() gave."""
    mesh, model, optimizer, stage = built
    gradients, losses, norms = [], [], []
    sum_over_world = optimizer.sum_over_world

    def look(*arguments):                                       # between the reduce over replicas and the clipping
        sums = sum_over_world(*arguments)
        gradients.append(reduced_gradients(model, optimizer, divisor=sums[1] * optimizer.loss_scale.value))
        return sums

    optimizer.sum_over_world = look
    for step in steps:
        result = train.train_step(step, stage, optimizer, data, config, mesh)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    evaluation = train.evaluate(stage, data, config, mesh)
    shards = {name: (weight.detach().clone(), cut_of(weight)) for name, weight in model.named_parameters()}
    return Outcome((mesh.pp_rank, mesh.dp_rank, mesh.tp_rank), losses, norms, gradients, shards, evaluation)


def reduced_gradients(model, optimizer, divisor) -> dict:
    """Each parameter's gradient after the reduce over replicas, gathered from the parts that ZeRO left it in."""
    gradients = {}
    for bucket in optimizer.buckets:
        whole = bucket.own_grad
        if optimizer.partitions > 1:
            whole = torch.cat([bucket.own_grad] * optimizer.partitions)
            all_gather(whole, optimizer.mesh.dp_group).wait()
        for weight in bucket.parameters:
            gradients[weight] = bucket.view(weight, whole) / divisor
    return {name: (gradients[weight], cut_of(weight)) for name, weight in model.named_parameters()}


def cut_of(weight):
    """How a shard is cut: None, or (dimension, runs along it of which each rank has a part)."""
    return None if weight.shard_dim is None else (weight.shard_dim, weight.partition_stride)


def whole(outcomes: list[Outcome], shards_of, tp: int) -> dict:
    """Full tensors by name from every rank's shards. Replicas, and copies on other stages, must be equal bit for
    bit."""
    parts, full = {}, {}
    for outcome in outcomes:
        for name, (tensor, cut) in shards_of(outcome).items():
            here = parts.setdefault((name, cut), {}).setdefault(outcome.place[2], tensor)
            assert torch.equal(here, tensor), f"{name}: replicas on {outcome.place} differ"
    for (name, cut), by_tp_rank in parts.items():
        if cut is None:
            assert all(torch.equal(by_tp_rank[0], tensor)
                       for tensor in by_tp_rank.values()), f"{name}: copies over tp differ"
            full[name] = by_tp_rank[0]
        else:
            full[name] = joined_runs([by_tp_rank[rank] for rank in range(tp)], *cut)
    return full


def joined_runs(shards, dim, runs):
    """The whole of which each rank has a part of each run."""
    return torch.cat([shard.chunk(runs, dim)[run] for run in range(runs) for shard in shards], dim)


def difference(ours: dict, theirs: dict) -> float:
    """The largest deviation over all tensors, each relative to its own largest entry."""
    assert ours.keys() == theirs.keys(), f"names that only one side has: {sorted(ours.keys() ^ theirs.keys())}"
    deviations = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
    nans = [name for name, deviation in deviations.items() if math.isnan(deviation)]
    assert not nans, f"not a number in {nans}"
    largest = {name: float(theirs[name].abs().max()) for name in theirs}
    # nothing but rounding is that of keys' norm biases without positions: softmax does not see what all keys have more
    return max(deviation / (largest[name] if largest[name] > 1e-14 else 1.0) for name, deviation in deviations.items())


def relative(ours: list, theirs: list) -> float:
    """The largest relative deviation between two lists of numbers."""
    assert len(ours) == len(theirs) and not any(map(math.isnan, ours + theirs))
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs))


_references = {}


def reference_for(config: Config, steps: int):
    """(weights to start from, data, records of the steps, final weights) of the plain model; computed once per
    model."""
    sizes = sizes_of(config)
    key = (sizes, steps,
           *(getattr(config, name) for name in names_affecting(Config, "model", "optimizer", "run", "losses")))
    betas = {"adamw": (config.adam_beta1, config.adam_beta2),
             "lion": (config.lion_beta1, config.lion_beta2)}[config.optimizer]
    if key not in _references:
        weights, data = random_weights(sizes, seed=3), random_data(config, steps)
        rates = [train.learning_rate(step, config) for step in range(1, steps + 1)]
        batches = [(data.tokens[i], data.labels[i], data.loss_mask[i].double(), data.positions[i]
                    if data.positions is not None else None,
                    data.documents[i] if data.documents is not None else None) for i in range(steps)]
        records, final = train_reference(sizes, weights, batches, rates, config.weight_decay, config.clip_grad,
                                         betas, config.adam_eps, optimizer_name=config.optimizer)
        _references[key] = (weights, data, records, final)
    return _references[key]
