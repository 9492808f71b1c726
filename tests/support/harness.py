"""Train a tiny GPT on any layout in the pool's workers, and join the shards of all ranks to full tensors.

    on each rank   train_rank(config, weights, data, steps) -> Outcome: losses, norms, shards of gradients and weights
    in the test    full_tensors(outcomes, shards_of)        -> full tensors by name; replicas must agree bit for bit

The ranks run train.py's own train_step; only the data is replaced.
"""

import contextlib
import dataclasses
import io
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.reference import ReferenceGPT, dropout_masks, masked_loss, random_weights, train_reference

import train
from nanodomino.comm.collectives import all_gather
from nanodomino.comm.trace import NO_TRACE
from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.data import Batch
from nanodomino.domino import Domino
from nanodomino.generate.generation import write_sample
from nanodomino.mesh import make_mesh
from nanodomino.optim.buckets import local_shard
from nanodomino.run.report import Report
from nanodomino.settings.config import Config
from nanodomino.settings.flags import names_affecting
from nanodomino.zero import ZeroOptimizer


VOCABULARY = 29          # padded to 32, so that the last rank owns fewer words; padded to 64, it owns none

# Settings of published model families. With tp 4, each rank has one of the 4 query groups.
FAMILIES = dict(
    gpt2={},
    llama=dict(position_embedding_type="rope", swiglu=True, num_query_groups=4, disable_bias_linear=True,
               layernorm_epsilon=0.05),
    qwen2=dict(position_embedding_type="rope", swiglu=True, num_query_groups=4, disable_bias_linear=True,
               add_qkv_bias=True, kv_channels=4, rotary_percent=0.5, rotary_base=50.0),
    qwen3=dict(position_embedding_type="rope", swiglu=True, disable_bias_linear=True, qk_layernorm=True, kv_channels=6,
               use_rope_scaling=True, rope_scaling_factor=4.0, rotary_seq_len_interpolation_factor=2.0,
               ffn_hidden_size=24),
    mixed=dict(position_embedding_type="none", num_query_groups=4, qk_layernorm=True, kv_channels=4))
EXPERTS = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.3,
               moe_z_loss_coeff=0.01, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05)


def tiny(world_size=1, **changes) -> Config:
    """Return a resolved Config: 3 layers, hidden size 16, a global batch of 24 x 8 tokens, clipping that acts, and an
    evaluation of one global batch."""
    sizes = dict(num_layers=3, hidden_size=16, num_attention_heads=8, seq_length=8, make_vocab_size_divisible_by=32,
                 global_batch_size=24, micro_batch_size=3, dtype="float64", clip_grad=0.1, lr=1e-2,
                 lr_warmup_fraction=0.4, train_iters=5, eval_iters=1, tensor_model_parallel_size=1,
                 pipeline_model_parallel_size=1, bucket_size=2000)
    return Config(**{**sizes, **changes}).resolve(world_size).with_vocabulary(VOCABULARY)


def corpus_without_files(path, **tokens) -> Corpus:
    """Return a Corpus for a Report without a run: 999 tokens a split, or as given; a token is 2 bytes of text."""
    tokens = {"train": 999, "valid": 999, "test": 999} | tokens
    corpus = Corpus(path=path, tokenizer_name="byte", vocab_size=VOCABULARY, end_of_text=0, dtype=np.dtype("<u2"),
                    tokens=tokens, sha256={}, unigram_entropy=3.2, bigram_entropy=2.4, meta={})
    corpus.text_bytes = lambda split, count: 2 * count
    return corpus


def report_without_a_run(folder, config=None, device="cpu", memory="", **tokens) -> Report:
    """Return rank 0's Report for a run in this folder. tokens: see corpus_without_files()."""
    place = SimpleNamespace(device=torch.device(device), pp=1, picture=" ".join)
    return Report(config or tiny(1), corpus_without_files(folder, **tokens), place, folder, 0, True, (), memory)


@dataclass
class FixedData:
    """A dataset of given arrays [steps, global batch, s], with TokenDataset's interface."""
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor | None = None      # None: 0, 1, ..
    documents: torch.Tensor | None = None      # None: each row is one
    depth_masks: list[torch.Tensor] = ()       # a loss mask for each depth, which only the reference reads
    config: Config | None = None               # whose options extend a batch

    @property
    def windows(self):
        return self.tokens.size(0) * self.tokens.size(1)

    def batch(self, first_sample, microbatch, dp_rank, dp, micro_batch_size, global_batch_size, shuffle=True):
        step, first = first_sample // global_batch_size, dp_rank * (global_batch_size // dp)
        first += microbatch * micro_batch_size
        rows = slice(first, first + micro_batch_size)
        ids = [first_sample + first + row for row in range(micro_batch_size)]
        tokens, labels = self.tokens[step, rows], self.labels[step, rows]
        loss_mask, rows = self.loss_mask[step, rows].clone(), torch.cat([tokens, labels[:, -1:]], dim=1)
        batch = Batch.from_rows(rows, ids, None, device_here())
        batch.loss_mask = loss_mask.to(batch.tokens.device)
        return self.config.prepare_batch(batch, rows, END_OF_TEXT) if self.config else batch


END_OF_TEXT = 3          # where samples hold documents, about every fourth token


def count_documents(tokens):
    """Return (positions, documents) of tokens [..., s], counted in a plain loop."""
    positions, documents = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, position, document in zip(*(tensor.flatten(0, -2) for tensor in (tokens, positions, documents))):
        for i in range(1, len(row)):
            ended = bool(row[i - 1] == END_OF_TEXT)
            position[i], document[i] = 0 if ended else position[i - 1] + 1, document[i - 1] + ended
    return positions, documents


def count_depth_masks(tokens, loss_mask, depths, within_documents):
    """Return the loss masks of the depths for tokens [..., s + 1], in a plain loop: depth d predicts token i + d + 1 if
    there is one, if the main loss counts it, and, within_documents, unless a document ends at a token from i to i + d.
    """
    masks = [torch.zeros_like(loss_mask) for _ in range(depths)]
    for d, mask in enumerate(masks, 1):
        for row, counts, own in zip(*(tensor.flatten(0, -2) for tensor in (tokens, loss_mask, mask))):
            for i in range(len(own) - d):
                crosses = within_documents and any(row[j] == END_OF_TEXT for j in range(i, i + d + 1))
                own[i] = 0.0 if crosses else counts[i + d]
    return masks


def random_data(config: Config, steps: int, seed=7) -> FixedData:
    """Return random tokens. The fraction of tokens in the loss mask grows from none in some rows to all in others."""
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, config.global_batch_size, config.seq_length)
    tokens = torch.randint(0, config.vocab_size, (*shape[:2], config.seq_length + 1), generator=generator)
    order = torch.randperm(config.global_batch_size, generator=generator)
    share = torch.linspace(-0.2, 1.1, config.global_batch_size)[order]
    loss_mask = (torch.rand(shape, generator=generator) < share[:, None]).float()
    by_position, by_attention = config.reset_position_ids, config.reset_attention_mask
    if by_position or by_attention:
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.25, END_OF_TEXT, tokens)
    positions, documents = count_documents(tokens[..., :-1])
    depth_masks = count_depth_masks(tokens, loss_mask, config.mtp_num_layers,
                                    within_documents=by_position or by_attention)
    return FixedData(tokens[..., :-1], tokens[..., 1:], loss_mask, positions if by_position else None,
                     documents if by_attention else None, depth_masks, config)


@dataclass
class Outcome:
    """The results of one rank."""
    place: tuple                 # the indices on the axes pp, dp and tp of the mesh
    losses: list
    norms: list
    gradients: list              # of each step, of the mean loss, before clipping: {name: (tensor, shard_spec())}
    weights: dict                # {name: (tensor, shard_spec())}
    evaluation: float
    statistics: list = ()        # of each step: StepResult.statistics
    sample: str = ""             # what write_sample printed


def device_here() -> torch.device:
    """Return this rank's device: the GPU that the pool gave it under --on-device cuda, or else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def build(config: Config, weights=None, trace=NO_TRACE, warm=None):
    """Return (mesh, model, optimizer, stage) on this rank, built as in train.py. weights: full tensors by name, of
    which each rank takes its shard; None keeps the model's own initial weights. warm: whether to warm up; by default a
    pipeline does, whose stages must be connected before a step."""
    mesh = make_mesh(config.pp, config.dp, config.tp, device_here(), **config.mesh_options)
    model = train.model_builder(config, mesh)
    for name, weight in model.named_parameters() if weights else ():
        weight.detach().copy_(local_shard(weights[name], weight))
    optimizer = ZeroOptimizer(model, config, mesh, trace)
    stage = Domino(model, config.slices, config.columns, config.compiler, trace)
    if warm if warm is not None else config.pp > 1:
        train.warm_up(stage, optimizer, config, mesh)
    return mesh, model, optimizer, stage


def train_rank(config: Config, weights, data: FixedData, steps: int) -> Outcome:
    """Train for `steps` steps and evaluate on the same data. Runs in a worker of the pool."""
    return train_steps(build(config, weights), config, data, range(1, steps + 1))


def train_and_sample_rank(config: Config, weights, data: FixedData, steps: int) -> Outcome:
    """Do what train_rank does, then print a sample of token ids."""
    mesh, model, *_ = built = build(config, weights)
    outcome, screen = train_steps(built, config, data, range(1, steps + 1)), io.StringIO()
    corpus = SimpleNamespace(vocab_size=config.vocab_size, end_of_text=END_OF_TEXT,
                             tokenizer=lambda: SimpleNamespace(decode=str))
    with contextlib.redirect_stdout(screen):
        write_sample(model, corpus, data)
    return dataclasses.replace(outcome, sample=screen.getvalue())


def train_steps(built, config: Config, data: FixedData, steps: range) -> Outcome:
    """Train for the given steps, continuing from `built`, which is what build() returned."""
    mesh, model, optimizer, stage = built
    gradients, losses, norms, statistics = [], [], [], []
    sum_over_world = optimizer.sum_over_world

    def record_gradients(*arguments):        # runs between the reduction over replicas and the clipping
        sums = sum_over_world(*arguments)
        gradients.append(reduced_gradients(model, optimizer, tokens=sums[1]))
        return sums

    optimizer.sum_over_world = record_gradients
    for step in steps:
        result = train.train_step(step, stage, optimizer, data, config, mesh)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        statistics.append(result.statistics)
    evaluation, _, _ = train.evaluate(stage, data, config, mesh)
    shards = {name: (weight.detach().clone(), shard_spec(weight)) for name, weight in model.named_parameters()}
    place = mesh.pp_rank, mesh.axis("dp")[1], mesh.tp_rank
    return Outcome(place, losses, norms, gradients, shards, evaluation, statistics)


def reduced_gradients(model, optimizer, tokens) -> dict:
    """Return each parameter's gradient after the reduction over replicas, gathered from ZeRO's partitions. An expert
    bias is updated by the sign of its gradient, which has no loss scale."""
    gradients = {}
    for bucket in optimizer.buckets:
        whole, divisor = bucket.own_grad, tokens * (1 if bucket.kind.update == "sign" else optimizer.loss_scale.value)
        if bucket.partitions > 1:
            whole = torch.cat([bucket.own_grad] * bucket.partitions)
            all_gather(whole, bucket.own_grad, optimizer.mesh.groups[bucket.kind.replicas]).wait()
        for weight in bucket.parameters:
            gradients[weight] = bucket.view(weight, whole) / divisor
    return {name: (gradients[weight], shard_spec(weight)) for name, weight in model.named_parameters()}


def shard_spec(weight):
    """Return (shape, offset, size) of the box of the whole tensor that this rank holds."""
    return weight.spec.shape, weight.spec.offset, weight.spec.size


def full_tensors(outcomes: list[Outcome], shards_of) -> dict:
    """Join the shards of all ranks to full tensors by name. shards_of: outcome -> {name: (tensor, shard_spec())}.
    Raises AssertionError unless replicas, and copies on other stages and tp ranks, are equal bit for bit."""
    boxes, full, dims = {}, {}, {}
    for outcome in outcomes:
        for name, (tensor, box) in shards_of(outcome).items():
            here = boxes.setdefault((name, box), tensor)
            assert torch.equal(here, tensor), f"{name}: copies on {outcome.place} differ"
    for (name, (shape, offset, size)), tensor in boxes.items():
        whole = full.setdefault(name, torch.full(shape, math.nan, dtype=tensor.dtype))
        whole[tuple(slice(start, start + length) for start, length in zip(offset, size))] = tensor.view(size)
        dims[name] = tensor.dim()
    # SwiGLU's two matrices, which the whole tensor stacks in a dimension of its own, become one again
    return {name: whole if whole.dim() == dims[name] else whole.flatten(first := whole.dim() // 4, first + 1)
            for name, whole in full.items()}


def difference(ours: dict, theirs: dict) -> float:
    """Return the largest deviation over all tensors, each relative to the tensor's own largest entry."""
    assert ours.keys() == theirs.keys(), f"names that only one side has: {sorted(ours.keys() ^ theirs.keys())}"
    deviations = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
    nans = [name for name, deviation in deviations.items() if math.isnan(deviation)]
    assert not nans, f"not a number in {nans}"
    largest = {name: float(theirs[name].abs().max()) for name in theirs}
    # A bias that all keys share cancels in softmax: without positions, the key norm's bias has a gradient of rounding.
    return max(deviation / (largest[name] if largest[name] > 1e-14 else 1.0) for name, deviation in deviations.items())


def relative(ours: list, theirs: list) -> float:
    """Return the largest relative deviation between two lists of numbers."""
    assert len(ours) == len(theirs) and not any(map(math.isnan, ours + theirs))
    return max(abs(our - their) / abs(their) for our, their in zip(ours, theirs))


def weights_and_data(config: Config, steps: int, rigged=()):
    """Return what a training starts from: (full weights by name, FixedData of `steps` global batches). rigged: (end of
    a name, value) pairs; weights with such names get this value."""
    weights = random_weights(config, seed=3)
    for name, weight in weights.items():
        for end, value in rigged:
            if name.endswith(end):
                weight.copy_(torch.tensor(value))
    return weights, random_data(config, steps)


def masks_of(config: Config, step: int):
    """Return the dropout masks of a step, counted from 0, in the form that reference.py takes; None without dropout."""
    if not config.hidden_dropout and not config.attention_dropout:
        return None
    ids = range(step * config.global_batch_size, (step + 1) * config.global_batch_size)
    return dropout_masks(config.seed, ids, config.hidden_dropout, config.attention_dropout, device_here())


def train_plainly(config: Config, weights, data: FixedData, steps: int):
    """Train the reference model. Returns (a record of each step, final weights). In a worker of the pool, the dropout
    masks are drawn on its device: the same seed gives other random numbers on a GPU than on a CPU."""
    rates = [train.learning_rate(step, config) for step in range(1, steps + 1)]
    batches = [(data.tokens[i], data.labels[i], data.loss_mask[i].double(),
                None if data.positions is None else data.positions[i],
                None if data.documents is None else data.documents[i],
                *(mask[i].double() for mask in data.depth_masks)) for i in range(steps)]
    return train_reference(config, weights, batches, rates, [masks_of(config, step) for step in range(steps)])


_references = {}


def reference_for(pool, config: Config, steps: int, rigged=()):
    """Train the reference model on rank 0 of the pool, once for each model and data. Returns (initial weights, data, a
    record of each step, final weights)."""
    key = (steps, rigged, *(getattr(config, name) for name in names_affecting(
        Config, "model", "positions", "optimizer", "run", "losses")))
    if key not in _references:
        weights, data = weights_and_data(config, steps, rigged)
        _references[key] = (weights, data, *pool.run(train_plainly, config, weights, data, steps, world_size=1)[0])
    return _references[key]


def plain_evaluation(config: Config, weights, data: FixedData, count=1):
    """Return the mean loss over the tokens that count of the first `count` global batches, computed in one batch
    instead of as a mean of means."""
    model = ReferenceGPT(config).double().load_full(weights)
    tokens, labels, loss_mask, positions, documents = (
        None if tensor is None else tensor[:count].flatten(0, 1)
        for tensor in (data.tokens, data.labels, data.loss_mask, data.positions, data.documents))
    positions = torch.arange(config.seq_length) if positions is None else positions
    with torch.no_grad():
        return float(masked_loss(model(tokens, positions, documents=documents), labels, loss_mask.double()))


def plain_text(config: Config, weights, prompt: list[int], count: int, vocab_size: int,
               end_of_text=END_OF_TEXT) -> list[int]:
    """Return what generate() must return at temperature 0. The reference model computes the whole context again for
    each token. When the context is full, its later half stays."""
    model, longest, text = ReferenceGPT(config).double().load_full(weights), config.context_length, prompt
    window = prompt[-longest:]
    while len(text) < len(prompt) + count:
        window = window if len(window) <= longest else window[-(longest // 2):]
        positions, documents = count_documents(tokens := torch.tensor([window]))
        with torch.no_grad():
            logits = model(tokens, positions if config.reset_position_ids else torch.arange(len(window)),
                           documents=documents if config.reset_attention_mask else None)
        token = int(logits[0, -1, :vocab_size].argmax())
        if token == end_of_text:
            break
        text, window = text + [token], window + [token]
    return text


def check_against_reference(pool, config: Config, steps: int, rigged=(), tolerance=1e-9):
    """Train on the pool's ranks and compare losses, norms, gradients, weights, evaluation and a sampled text with the
    reference's. The first replica prints the text. Returns the reference's record of each step.
    """
    weights, data, records, final = reference_for(pool, config, steps, rigged)
    config, prompt = dataclasses.replace(config, sample_tokens=3, temperature=0.0), data.tokens[0, 0].tolist()
    outcomes = pool.run(train_and_sample_rank, config, weights, data, steps, world_size=config.world_size)

    assert all(record.gradient_norm > 0.11 for record in records), "the clipping must bite"
    for outcome in outcomes:                                    # every rank reports the whole batch, not its own share
        assert ((outcome.losses, outcome.norms, outcome.statistics)
                == (outcomes[0].losses, outcomes[0].norms, outcomes[0].statistics))
    assert relative(outcomes[0].losses, [record.loss for record in records]) < tolerance
    assert relative(outcomes[0].norms, [record.gradient_norm for record in records]) < tolerance
    for step, record in enumerate(records):
        gradients = full_tensors(outcomes, lambda outcome: outcome.gradients[step])
        assert difference(gradients, record.gradients) < tolerance, f"gradients of step {step + 1}"
        assert outcomes[0].statistics[step] == pytest.approx(record.statistics, rel=tolerance, abs=0.0)
    assert difference(full_tensors(outcomes, lambda outcome: outcome.weights), final) < tolerance
    assert relative([outcomes[0].evaluation], [plain_evaluation(config, final, data)]) < tolerance
    text = plain_text(config, final, prompt, config.sample_tokens, config.vocab_size)
    for outcome in outcomes:
        assert outcome.sample.splitlines()[1:-1] == [f"{prompt}|{text[len(prompt):]}"] * (outcome.place[1] == 0)
    return records
