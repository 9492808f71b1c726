"""torch's own parallel parts compute what nanodomino's compute: losses, gradients, norms, weights, to 1e-9 in float64.

test_layouts.py compares with a single process. Here the other side is parallel too, and written by other people:

    nanodomino                torch, on the plain model of reference.py
    Domino, 2 slices          DTensor: ColwiseParallel and RowwiseParallel on each pair of matrices
    pipeline.run              torch.distributed.pipelining: Schedule1F1B, ScheduleGPipe
    ZeroOptimizer, stage 1    DistributedDataParallel + ZeroRedundancyOptimizer; FSDP2's fully_shard

What the two share is the model's layout of names and the batch. Neither how to cut, nor when to talk, nor what to divide by:
each of torch's parts has a convention of its own for the last, and the comment that undoes it is here. Their imports stand in the
workers' functions: an older torch that lacks one fails that test alone.
"""

import pytest
import torch
import torch.nn.functional as F
from harness import difference, random_data, relative, sizes_of, tiny, train_rank, whole
from reference import ReferenceGPT, masked_loss, no_dropout, random_weights
from torch import nn

import train

TOLERANCE = 1e-9
STEPS = 3
NOT_COUNTED = -100                                              # the label that torch's cross entropy leaves out


def both_sides(pool, world_size, torchs_part, **options):
    """(config, nanodomino's outcomes, the other side's results), by rank, from the same weights and data."""
    config = tiny(world_size, **options)
    weights, data = random_weights(sizes_of(config), seed=3), random_data(config, STEPS)
    ours = pool.run(train_rank, config, weights, data, STEPS, world_size=world_size)
    theirs = pool.run(torchs_part, config, weights, data, world_size=world_size)
    return config, ours, theirs


def plain_model(config, weights):
    return ReferenceGPT(sizes_of(config)).double().load_full(weights)


def labels_that_count(data, step):
    """[global batch, s]; the loss mask, said with labels."""
    return data.labels[step].masked_fill(data.loss_mask[step] == 0, NOT_COUNTED)


def loss_sum(logits, labels):
    """Of the tokens that count; a sum, so that parts of a batch add up whatever their masks."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED, reduction="sum")


def full_tensor(tensor):
    """A DTensor put together, or the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- tensor parallel

def dtensor_gradients(config, weights, data):
    """In a worker: (loss, gradients by name) of the first global batch, the matrices of each sublayer being DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = plain_model(config, weights), init_device_mesh("cpu", (config.tp,))
    for attention, mlp in zip(model.attentions, model.mlps):
        # q, k, v stay DTensors: their heads are whole on a rank, and the attention need not know how many it has.
        columns = {name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")}
        parallelize_module(attention, mesh, {**columns, "dense": RowwiseParallel()})
        parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with implicit_replication():                                # of the causal mask, which is a plain tensor
        logits = model(data.tokens[0], torch.arange(config.seq_length))
        loss = masked_loss(logits, data.labels[0], data.loss_mask[0].double())
        loss.backward()
    return loss.item(), model.full(lambda weight: full_tensor(weight.grad))


@pytest.mark.parametrize("tp", [2, 4])
def test_domino_computes_what_dtensor_computes(pool, tp):
    config, ours, theirs = both_sides(pool, tp, dtensor_gradients, tensor_model_parallel_size=tp, slices=2, micro_batch_size=12)
    for loss, gradients in theirs:
        assert relative([ours[0].losses[0]], [loss]) < TOLERANCE
        assert difference(whole(ours, lambda outcome: outcome.gradients[0], tp), gradients) < TOLERANCE


# ---- pipeline

class Part(nn.Module):
    """One stage of the plain model: x in, x out; tokens into the first, logits out of the last. It holds all layers and uses its own."""

    def __init__(self, model, stage, stages):
        super().__init__()
        self.model, self.first, self.last = model, stage == 0, stage == stages - 1
        layers = len(model.mlps)
        self.own = range(layers * stage // stages, layers * (stage + 1) // stages)

    def forward(self, x):
        model = self.model
        if self.first:
            x = model.word_embeddings(x) + model.position_embeddings(torch.arange(x.size(1), device=x.device))
        for i in self.own:
            x = x + model.attentions[i](x, no_dropout)
            x = x + model.mlps[i](x, no_dropout)
        if self.last:
            head = model.word_embeddings.weight if model.head is None else model.head.weight
            x = F.linear(model.final_norm(x), head[:model.sizes.vocab_size])
        return x


def pipelined_gradients(config, weights, data):
    """In a worker: (losses of the microbatches, gradients by name) of the first global batch, zeros for what other stages use.

    scale_grads: torch would divide by the number of microbatches, on the assumption that each loss is a mean.
    """
    from torch.distributed import pipelining

    rank = torch.distributed.get_rank()
    part = Part(plain_model(config, weights), rank, config.pp)
    stage = pipelining.PipelineStage(part, rank, config.pp, torch.device("cpu"))
    kind = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}[config.schedule]
    schedule = kind(stage, config.microbatches, loss_fn=loss_sum, scale_grads=False)
    losses = []
    schedule.step(*([data.tokens[0]] if part.first else []), **(dict(target=labels_that_count(data, 0), losses=losses) if part.last else {}))
    return [loss.item() for loss in losses], part.model.full_gradients()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_pipeline_computes_what_torchs_pipelining_computes(pool, pp, schedule):
    """The tied matrix too: torch leaves its two halves on the first and the last stage, and the sum over stages joins them."""
    config, ours, theirs = both_sides(pool, pp, pipelined_gradients, pipeline_model_parallel_size=pp, schedule=schedule, num_layers=pp + 1)
    tokens = random_data(config, STEPS).loss_mask[0].sum().item()
    losses = theirs[-1][0]
    assert len(losses) == config.microbatches
    assert relative([ours[0].losses[0]], [sum(losses) / tokens]) < TOLERANCE
    gradients = {name: sum(of_stage[name] for _, of_stage in theirs) / tokens for name in theirs[0][1]}
    assert difference(whole(ours, lambda outcome: outcome.gradients[0], 1), gradients) < TOLERANCE


# ---- data parallel

def train_replicas(config, data, model, network, optimizer):
    """In a worker: STEPS steps on this replica's share of the batch -> (losses, norms, weights by name).

    Both DDP and FSDP2 divide the sum of the replicas' gradients by dp, as if each counted as many tokens. Ours is the mean over all
    tokens of the global batch, so the loss of a replica is its sum, times dp, divided by those tokens.
    """
    rank, rows = torch.distributed.get_rank(), config.global_batch_size // config.dp
    mine, losses, norms = slice(rank * rows, (rank + 1) * rows), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = network(data.tokens[step, mine], torch.arange(config.seq_length))
        loss = loss_sum(logits, labels_that_count(data, step)[mine]) * config.dp / data.loss_mask[step].sum()
        loss.backward()
        # Not clip_grad_norm_: torch 2.7 adds its 1e-6 to each FSDP2 rank's own norm, before these are joined to the whole one.
        norm = full_tensor(nn.utils.get_total_norm([weight.grad for weight in network.parameters()]))
        nn.utils.clip_grads_with_norm_(network.parameters(), config.clip_grad, norm)
        norms.append(norm.item())
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step + 1, config)
        optimizer.step()
        losses.append(loss.item() / config.dp)
    return losses, norms, model.full(full_tensor)


def adamw_groups(config, model):
    """Decay on matrices, none on biases and norms."""
    matrices, vectors = ([weight for weight in model.parameters() if (weight.dim() >= 2) == wide] for wide in (True, False))
    return [dict(params=matrices, weight_decay=config.weight_decay), dict(params=vectors, weight_decay=0.0)]


def train_with_ddp(config, weights, data):
    """In a worker: DistributedDataParallel, and an AdamW that ZeroRedundancyOptimizer deals out over the replicas by whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = plain_model(config, weights)
    optimizer = ZeroRedundancyOptimizer(adamw_groups(config, model), torch.optim.AdamW, lr=0.0,
                                        betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    return train_replicas(config, data, model, DistributedDataParallel(model), optimizer)


def train_with_fsdp2(config, weights, data):
    """In a worker: fully_shard cuts every parameter, gradient and moment by its rows, sublayer by sublayer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = plain_model(config, weights), init_device_mesh("cpu", (config.dp,))
    for module in (*model.attentions, *model.mlps, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(adamw_groups(config, model), lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    return train_replicas(config, data, model, model, optimizer)


@pytest.mark.parametrize("torchs_part", [train_with_ddp, train_with_fsdp2])
@pytest.mark.parametrize("dp", [2, 4])
def test_zero_trains_what_torchs_data_parallel_trains(pool, dp, torchs_part):
    """AdamW does not notice a factor on all gradients, but the norm before clipping does."""
    config, ours, theirs = both_sides(pool, dp, torchs_part, data_parallel_size=dp, zero_stage=1)
    losses = [sum(by_rank) for by_rank in zip(*(losses for losses, _, _ in theirs))]
    assert relative(ours[0].losses, losses) < TOLERANCE
    for _, norms, weights in theirs:
        assert min(norms) > config.clip_grad, "the clipping must bite"
        assert relative(ours[0].norms, norms) < TOLERANCE
        assert difference(whole(ours, lambda outcome: outcome.weights, 1), weights) < TOLERANCE
