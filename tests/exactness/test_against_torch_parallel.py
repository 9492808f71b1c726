"""torch's own parallel parts compute what nanodomino computes: losses, gradients, norms, weights, to 1e-9 in float64.

test_layouts.py compares with a single process. Here the other side is parallel too, and written by other people:

    nanodomino                torch, around the plain model of benchmarks/plain_model.py
    Domino, two slices        DTensor: ColwiseParallel and RowwiseParallel; SequenceParallel around them
    pipeline.run              torch.distributed.pipelining: 1F1B, GPipe, Interleaved1F1B, InterleavedZeroBubble and
                              ZBVZeroBubble
    ZeroOptimizer, stage 1    DistributedDataParallel with ZeroRedundancyOptimizer; fully_shard (FSDP2)
    ZeroOptimizer, stage 2    fully_shard with reshard_after_forward=False, a backward for each microbatch

The two sides share the starting weights, the batches and the learning rates. Where to cut, when to talk and what to
divide by each decides alone; where torch divides by something else than the tokens that count, a comment says how that
is undone.

What newer torch versions brought is imported in the workers' functions, so that an older one fails only that test.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.harness import difference, full_tensors, relative, tiny, train_rank, weights_and_data
from torch import nn

import train
from benchmarks.plain_model import Plain, adamw
from nanodomino.schedules.definitions import SCHEDULES

TOLERANCE = 1e-9
STEPS = 3
NOT_COUNTED = -100                                              # the label that torch's cross entropy leaves out
WORDS = "embedding.word_embeddings.weight"


def both_sides(pool, world_size, torchs_part, **options):
    """Return (config, data, nanodomino's Outcomes by rank, torchs_part(config, weights, data) by rank)."""
    config = tiny(world_size, **{"global_batch_size": 12} | options)
    weights, data = weights_and_data(config, STEPS)
    ours = pool.run(train_rank, config, weights, data, STEPS, world_size=world_size)
    theirs = pool.run(torchs_part, config, weights, data, world_size=world_size)
    return config, data, ours, theirs


def joined(config, ours, shards_of):
    """Return full_tensors(ours, shards_of), without the rows that pad the vocabulary: torch's side has no padding."""
    tensors = full_tensors(ours, shards_of)
    return tensors | {WORDS: tensors[WORDS][:config.vocab_size]}


def labels_that_count(data, step):
    """Return labels [global batch, s] in which, as in torch, a special label marks the tokens that do not count."""
    return data.labels[step].masked_fill(data.loss_mask[step] == 0, NOT_COUNTED)


def loss_sum(logits, labels):
    """Return the sum of the losses, so that microbatches add up however many of their tokens count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED, reduction="sum")


def full_tensor(tensor):
    """Return the full tensor of a DTensor; return any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- tensor parallel

def dtensor_step(config, weights, data):
    """Return (loss, gradients by name) of the first global batch on this rank. DTensor shards the matrices of every
    sublayer and, with sequence parallelism, each sample by tokens around them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel,
                                                   SequenceParallel, parallelize_module)

    model, mesh = Plain(config).double().load(weights), init_device_mesh("cpu", (config.tp,))
    first, last, norms, ends = {}, {}, {}, {}
    if config.sequence_parallel:
        first, last = dict(input_layouts=Shard(1)), dict(output_layouts=Shard(1), use_local_output=False)
        norms = {"attention.norm": SequenceParallel(), "mlp.norm": SequenceParallel()}
        ends = {"layers.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
                "final_norm": SequenceParallel()}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, norms | {
            "attention.qkv": ColwiseParallel(**first), "attention.dense": RowwiseParallel(**last),
            "mlp.dense_h_to_4h": ColwiseParallel(**first), "mlp.dense_4h_to_h": RowwiseParallel(**last)})
        for matrix, cut in [(layer.attention.qkv, 0), (layer.attention.dense, 1)]:
            assert matrix.weight.to_local().size(cut) * config.tp == matrix.weight.size(cut)
    parallelize_module(model, mesh, ends)
    x = model.embedding(data.tokens[0])
    for layer in model.layers.values():
        x = layer(x)
        assert not config.sequence_parallel or x.to_local().size(1) * config.tp == config.seq_length
    logits = F.linear(full_tensor(model.final_norm(x)), model.embedding.word_embeddings.weight)
    loss = loss_sum(logits, labels_that_count(data, 0)) / data.loss_mask[0].sum()
    loss.backward()
    return loss.item(), {name: full_tensor(weight.grad) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_domino_computes_what_dtensor_computes(pool, tp, sequence_parallel):
    """Compares shards, heads, biases and sums. Every rank owns words: 16 + 13 of them, or 8 + 8 + 8 + 5. With sequence
    parallelism DTensor shards each sample by tokens, and sums the gradients of norms and biases where it chooses."""
    config, _, ours, theirs = both_sides(pool, tp, dtensor_step, tensor_model_parallel_size=tp, slices=2,
                                         micro_batch_size=6, sequence_parallel=sequence_parallel)
    gradients = joined(config, ours, lambda outcome: outcome.gradients[0])
    for loss, torchs_gradients in theirs:
        assert relative(ours[0].losses[:1], [loss]) < TOLERANCE
        assert difference(gradients, torchs_gradients) < TOLERANCE


# ---- pipeline

TORCHS = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B",
          # with one chunk it is zb-h1
          "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}


def pipelined_step(config, weights, data):
    """Return (the loss sum of each microbatch, {name: gradient of the losses' sum} of this rank's layers) of the first
    global batch.

    torch takes each loss for a mean and divides the gradients by the number of microbatches, unless scale_grads says
    no.
    """
    from torch.distributed import pipelining

    placement, parts = config.placement, {}
    for chunk in range(placement.chunks):
        place, stages = placement.virtual_stage(dist.get_rank(), chunk), placement.last + 1
        layers = range(config.num_layers * place // stages, config.num_layers * (place + 1) // stages)
        parts[place] = Plain(config, layers, place == 0, place == placement.last).double().load(weights)
    stages = [pipelining.PipelineStage(part, place, placement.last + 1, torch.device("cpu"))
              for place, part in parts.items()]
    of_one = config.schedule in ("1f1b", "gpipe")
    schedule = getattr(pipelining, TORCHS[config.schedule])(
        stages[0] if of_one else stages, config.microbatches, loss_sum, scale_grads=False)
    losses, gradients = [], {}
    schedule.step(*[data.tokens[0]] * (0 in parts), losses=losses,
                  target=labels_that_count(data, 0) if placement.last in parts else None)
    for name, weight in (named for part in parts.values() for named in part.named_parameters()):
        gradients[name] = gradients.get(name, 0) + weight.grad
    return [loss.item() for loss in losses], gradients


@pytest.mark.parametrize("schedule, pp", [*((schedule, 2) for schedule in TORCHS), *(
    pytest.param(schedule, 4, marks=pytest.mark.exhaustive) for schedule in TORCHS)])
def test_the_pipeline_computes_what_torchs_pipelining_computes(pool, schedule, pp):
    """torch leaves one gradient of the tied matrix on the first stage and another on the last; the test adds them."""
    if schedule != "gpipe" and torch.__version__ < "2.8":
        pytest.skip("this torch's pipelines lose messages on gloo (pytorch issue 132644)")
    chunks = SCHEDULES[schedule].chunks[0]
    config, data, ours, theirs = both_sides(pool, pp, pipelined_step, pipeline_model_parallel_size=pp,
                                            schedule=schedule, num_layers=pp * chunks + 1)
    (losses,), tokens = [losses for losses, _ in theirs if losses], data.loss_mask[0].sum().item()
    assert len(losses) == config.microbatches
    assert relative(ours[0].losses[:1], [sum(losses) / tokens]) < TOLERANCE
    torchs_gradients = {name: sum(gradients.get(name, 0) for _, gradients in theirs) / tokens
                        for name in set().union(*(gradients for _, gradients in theirs))}
    assert difference(joined(config, ours, lambda outcome: outcome.gradients[0]), torchs_gradients) < TOLERANCE


# ---- data parallel

def train_replica(config, data, model, network, optimizer, microbatches=1):
    """Train for STEPS steps on this replica's rows. Return (its part of each loss, norms, weights by name).

    DDP and FSDP2 divide the sum of the replicas' gradients by dp. Times dp, over the tokens that count on all replicas:
    then what comes out is the gradient of the mean over the global batch, though no two replicas count equally many.
    """
    rows = torch.arange(config.global_batch_size).chunk(config.dp)[dist.get_rank()]
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for some in rows.chunk(microbatches):
            logits = network(data.tokens[step, some])
            loss = loss_sum(logits, labels_that_count(data, step)[some]) / data.loss_mask[step].sum()
            (loss * config.dp).backward()
            losses[-1] += loss.item()
        # clip_grad_norm_ in two halves, since on DTensors some versions add its 1e-6 on every rank (pytorch issue
        # 149768).
        norm = full_tensor(nn.utils.get_total_norm([weight.grad for weight in network.parameters()]))
        nn.utils.clip_grads_with_norm_(network.parameters(), config.clip_grad, norm)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step + 1, config)
        optimizer.step()
        norms.append(norm.item())
    return losses, norms, {name: full_tensor(weight) for name, weight in model.named_parameters()}


def train_with_ddp(config, weights, data):
    """Train with all-reduced gradients and ZeroRedundancyOptimizer, which gives each replica whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Plain(config).double().load(weights)
    optimizer = ZeroRedundancyOptimizer(adamw(model, config).param_groups, torch.optim.AdamW)
    assert 0 < sum(len(group["params"]) for group in optimizer.optim.param_groups) < len(list(model.parameters()))
    return train_replica(config, data, model, nn.parallel.DistributedDataParallel(model), optimizer)


def train_with_fsdp2(config, weights, data, reshard=True):
    """Train with weights, gradients and moments sharded by rows; each sublayer gathers its weights when it runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Plain(config).double().load(weights), init_device_mesh("cpu", (config.dp,))
    for module in (*(part for layer in model.layers.values() for part in (layer.attention, layer.mlp)), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    assert all(weight.to_local().numel() < weight.numel() for weight in model.parameters())
    return train_replica(config, data, model, model, adamw(model, config), 1 if reshard else config.microbatches)


# weights stay gathered from forward to backward; each microbatch's gradients are reduce-scattered
train_with_zero_2_of_fsdp2 = partial(train_with_fsdp2, reshard=False)


@pytest.mark.parametrize("torchs_part, zero_stage, dp", [
    (part, zero_stage, dp) if dp == 2 else pytest.param(part, zero_stage, dp, marks=pytest.mark.exhaustive)
    for part, zero_stage in ((train_with_ddp, 1), (train_with_fsdp2, 1), (train_with_zero_2_of_fsdp2, 2))
    for dp in (2, 4)])
def test_zero_trains_what_torchs_data_parallel_trains(pool, torchs_part, zero_stage, dp):
    """AdamW would not notice a factor on all gradients; the norm before clipping does."""
    config, _, ours, theirs = both_sides(pool, dp, torchs_part, data_parallel_size=dp, zero_stage=zero_stage,
                                         global_batch_size=6 * dp)
    assert config.microbatches > 1
    assert relative(ours[0].losses, [sum(parts) for parts in zip(*(losses for losses, _, _ in theirs))]) < TOLERANCE
    weights = joined(config, ours, lambda outcome: outcome.weights)
    for _, norms, torchs_weights in theirs:
        assert min(norms) > config.clip_grad, "the clipping must bite"
        assert relative(ours[0].norms, norms) < TOLERANCE
        assert difference(weights, torchs_weights) < TOLERANCE
