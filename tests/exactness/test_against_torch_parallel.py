"""torch's own parallel parts compute what nanodomino computes: losses, gradients, norms, weights, to 1e-9 in float64.

test_layouts.py compares with a single process. Here the other side is parallel too, and written by other people:

    nanodomino                torch, around the plain model of support/reference.py
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

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.harness import difference, full_tensors, relative, sizes_of, tiny, train_rank, weights_and_data
from support.reference import ReferenceGPT, build_optimizer, no_dropout
from torch import nn

import train
from benchmarks.plain_model import Plain
from nanodomino.schedules.definitions import SCHEDULES

TOLERANCE = 1e-9
STEPS = 3
NOT_COUNTED = -100                                              # the label that torch's cross entropy leaves out


def both_sides(pool, world_size, torchs_part, **options):
    """Return (config, data, nanodomino's Outcomes by rank, torchs_part(config, weights, data) by rank)."""
    config = tiny(world_size, **{"global_batch_size": 12} | options)
    weights, data = weights_and_data(config, STEPS)
    ours = pool.run(train_rank, config, weights, data, STEPS, world_size=world_size)
    theirs = pool.run(torchs_part, config, weights, data, world_size=world_size)
    return config, data, ours, theirs


def plain_model(config, weights):
    return ReferenceGPT(sizes_of(config)).double().load_full(weights)


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
    sublayer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = plain_model(config, weights), init_device_mesh("cpu", (config.tp,))
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        # As DTensors q, k and v still count all heads, and the attention between them and `dense` runs as it is
        # written.
        heads = {name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")}
        parallelize_module(attention, mesh, {**heads, "dense": RowwiseParallel()})
        parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for matrix, cut in [(attention.q, 0), (attention.dense, 1), (mlp.up, 0), (mlp.down, 1)]:
            assert matrix.weight.to_local().size(cut) * config.tp == matrix.weight.size(cut)
    with implicit_replication():                                # of the causal mask, which is no DTensor
        logits = model(data.tokens[0], torch.arange(config.seq_length))
        loss = loss_sum(logits, labels_that_count(data, 0)) / data.loss_mask[0].sum()
        loss.backward()
    return loss.item(), model.full(lambda weight: full_tensor(weight.grad))


def sequence_parallel_step(config, weights, data):
    """The same with sequence parallelism, around benchmarks/plain_model.py, whose names and qkv order are ours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel,
                                                   SequenceParallel, parallelize_module)

    model, mesh = Plain(config).double().load(weights), init_device_mesh("cpu", (config.tp,))
    before, behind = dict(input_layouts=Shard(1)), dict(output_layouts=Shard(1), use_local_output=False)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {
            "attention.norm": SequenceParallel(), "attention.qkv": ColwiseParallel(**before),
            "attention.dense": RowwiseParallel(**behind),
            "mlp.norm": SequenceParallel(), "mlp.dense_h_to_4h": ColwiseParallel(**before),
            "mlp.dense_4h_to_h": RowwiseParallel(**behind)})
    parallelize_module(model, mesh,
                       {"layers.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
                                     "final_norm": SequenceParallel()})
    x = model.embedding(data.tokens[0])
    for layer in model.layers.values():
        x = layer(x)
        assert x.to_local().size(1) * config.tp == config.seq_length
    logits = F.linear(model.final_norm(x).full_tensor(), model.embedding.word_embeddings.weight)
    loss = loss_sum(logits, labels_that_count(data, 0)) / data.loss_mask[0].sum()
    loss.backward()
    return loss.item(), {name: full_tensor(weight.grad) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("torchs_part", [dtensor_step, sequence_parallel_step])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_domino_computes_what_dtensor_computes(pool, tp, torchs_part):
    """Compares shards, heads, biases and sums. Every rank owns words: 16 + 13 of them, or 8 + 8 + 8 + 5. With sequence
    parallelism DTensor shards each sample by tokens, and sums the gradients of norms and biases where it chooses."""
    config, _, ours, theirs = both_sides(pool, tp, torchs_part, tensor_model_parallel_size=tp, slices=2,
                                         micro_batch_size=6, sequence_parallel=torchs_part is sequence_parallel_step)
    gradients = full_tensors(ours, lambda outcome: outcome.gradients[0])
    name = "embedding.word_embeddings.weight"
    for loss, torchs_gradients in theirs:
        gradients[name] = gradients[name][:len(torchs_gradients[name])]        # torch may have no padding
        assert relative(ours[0].losses[:1], [loss]) < TOLERANCE
        assert difference(gradients, torchs_gradients) < TOLERANCE


# ---- pipeline

class Part(nn.Module):
    """One stage of the plain model: [b, s] tokens or [b, s, h] in, [b, s, h] or logits out. It holds all layers and
    runs only its own."""

    def __init__(self, model, stage, stages):
        super().__init__()
        self.model, self.first, self.last = model, stage == 0, stage == stages - 1
        layers = len(model.layers)
        self.own = range(layers * stage // stages, layers * (stage + 1) // stages)     # stage_layers() cuts elsewhere

    def forward(self, x):
        model = self.model
        if self.first:
            x = model.embedding.word_embeddings(x) + model.embedding.position_embeddings(torch.arange(x.size(1)))
        for i in self.own:
            x = model.layers[i](x, no_dropout, torch.arange(x.size(1)).expand(x.shape[:2]), None)
        if self.last:
            x = F.linear(model.final_norm(x), model.embedding.word_embeddings.weight[:model.sizes.vocab_size])
        return x


TORCHS = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B",
          # with one chunk it is zb-h1
          "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}


def pipelined_step(config, weights, data):
    """In a worker: (each microbatch's loss sum, gradients of these by name) of the first global batch; 0 for what
    others use.

    torch takes each loss for a mean and divides the gradients by the number of microbatches, unless scale_grads says
    no.
    """
    from torch.distributed import pipelining

    placement = config.placement
    held = [placement.virtual_stage(dist.get_rank(), chunk) for chunk in range(placement.chunks)]
    parts = [Part(plain_model(config, weights), one, placement.last + 1) for one in held]
    stages = [pipelining.PipelineStage(part, one, placement.last + 1, torch.device("cpu"))
              for part, one in zip(parts, held)]
    of_one = config.schedule in ("1f1b", "gpipe")
    schedule = getattr(pipelining, TORCHS[config.schedule])(stages[0] if of_one else stages, config.microbatches,
                                                            loss_sum,
                                                             scale_grads=False)
    losses, inputs = [], [data.tokens[0]] if parts[0].first else []
    schedule.step(*inputs, target=labels_that_count(data, 0) if parts[-1].last else None, losses=losses)
    gradients = [part.model.full_gradients() for part in parts]
    return [loss.item() for loss in losses], {name: sum(one[name] for one in gradients) for name in gradients[0]}


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
    torchs_gradients = {name: sum(gradients[name] for _, gradients in theirs) / tokens for name in theirs[0][1]}
    assert difference(full_tensors(ours, lambda outcome: outcome.gradients[0]), torchs_gradients) < TOLERANCE


# ---- data parallel

def train_replica(config, data, model, network, optimizer, microbatches=1):
    """In a worker: STEPS steps on this replica's rows -> (its part of each loss, norms, weights by name).

    DDP and FSDP2 divide the sum of the replicas' gradients by dp. Times dp, over the tokens that count on all replicas:
    then what comes out is the gradient of the mean over the global batch, though no two replicas count equally many.
    """
    rows = torch.arange(config.global_batch_size).chunk(config.dp)[dist.get_rank()]
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for some in rows.chunk(microbatches):
            logits = network(data.tokens[step, some], torch.arange(config.seq_length))
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
    return losses, norms, model.full(full_tensor)


def adamw(config, model):
    return build_optimizer(model, config.weight_decay, (config.adam_beta1, config.adam_beta2), config.adam_eps)


def train_with_ddp(config, weights, data):
    """Train with all-reduced gradients and ZeroRedundancyOptimizer, which gives each replica whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = plain_model(config, weights)
    optimizer = ZeroRedundancyOptimizer(adamw(config, model).param_groups, torch.optim.AdamW)
    assert 0 < sum(len(group["params"]) for group in optimizer.optim.param_groups) < len(list(model.parameters()))
    return train_replica(config, data, model, nn.parallel.DistributedDataParallel(model), optimizer)


def train_with_fsdp2(config, weights, data, reshard=True, microbatches=1):
    """Train with weights, gradients and moments sharded by rows; each sublayer gathers its weights when it runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = plain_model(config, weights), init_device_mesh("cpu", (config.dp,))
    for module in (*(part for layer in model.layers for part in (layer.attention, layer.mlp)), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    assert all(weight.to_local().size(0) * config.dp == weight.size(0) for weight in model.parameters())
    return train_replica(config, data, model, model, adamw(config, model), microbatches)


def train_with_zero_2_of_fsdp2(config, weights, data):
    """Train with weights that stay gathered from forward to backward; each microbatch's gradients are
    reduce-scattered."""
    return train_with_fsdp2(config, weights, data, reshard=False, microbatches=config.microbatches)


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
    weights = full_tensors(ours, lambda outcome: outcome.weights)
    for _, norms, torchs_weights in theirs:
        assert min(norms) > config.clip_grad, "the clipping must bite"
        assert relative(ours[0].norms, norms) < TOLERANCE
        assert difference(weights, torchs_weights) < TOLERANCE
