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


TOLERANCE = 1e-9         # largest relative error of any number, in float64
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
    config: Config | None = None               # whose options extend a batch
    missing: int = 0                           # how many windows the last batch of an evaluation lacks

    @property
    def windows(self):
        return self.tokens.size(0) * self.tokens.size(1) - self.missing

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


def places_of(config, tokens):
    """Return the (positions, documents) of tokens that the reference model takes; None where the config resets none."""
    positions, documents = count_documents(tokens)
    return positions if config.reset_position_ids else None, documents if config.reset_attention_mask else None


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
    if config.reset_position_ids or config.reset_attention_mask:
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.25, END_OF_TEXT, tokens)
    return FixedData(tokens[..., :-1], tokens[..., 1:], loss_mask, config)


@dataclass
class Outcome:
    """The results of one rank, or of a whole training: then tensors are full, and without their shard_spec()."""
    place: tuple | None          # the indices on the axes pp, dp and tp of the mesh; None: the whole training
    losses: list
    norms: list
    gradients: list              # of each step, of the mean loss, before clipping: {name: (tensor, shard_spec())}
    weights: dict                # {name: (tensor, shard_spec())}
    evaluation: float
    statistics: list = ()        # of each step: StepResult.statistics
    sample: str = ""             # what write_sample printed
    apart: frozenset = frozenset()       # names of what must be equal on several ranks and is not


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


def full_tensors(outcomes: list[Outcome], shards_of, apart: set | None = None) -> dict:
    """Join the shards of all ranks to full tensors by name. shards_of: outcome -> {name: (tensor, shard_spec())}.

    Replicas, and copies on other stages and tp ranks, must be equal bit for bit: the names of those that differ are
    added to `apart`; without it, this raises AssertionError.
    """
    boxes, full, dims = {}, {}, {}
    for outcome in outcomes:
        for name, (tensor, box) in shards_of(outcome).items():
            if not torch.equal(boxes.setdefault((name, box), tensor), tensor):
                assert apart is not None, f"{name}: copies on {outcome.place} differ"
                apart.add(name)
    for (name, (shape, offset, size)), tensor in boxes.items():
        whole = full.setdefault(name, torch.full(shape, math.nan, dtype=tensor.dtype))
        whole[tuple(slice(start, start + length) for start, length in zip(offset, size))] = tensor.view(size)
        dims[name] = tensor.dim()
    # SwiGLU's two matrices, which the whole tensor stacks in a dimension of its own, become one again
    return {name: whole if whole.dim() == dims[name] else whole.flatten(first := whole.dim() // 4, first + 1)
            for name, whole in full.items()}


# ---- comparison

def error_of(ours, theirs) -> float:
    """Return the largest deviation of a number or tensor, relative to the largest entry of `theirs`. Equal infinities
    agree. NaN is infinitely wrong."""
    ours, theirs = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
    largest = float(theirs.abs().max())
    # A bias that all keys share cancels in softmax: without positions, the key norm's bias has a gradient of rounding.
    error = float((ours - theirs).abs().masked_fill(ours == theirs, 0.0).max()) / (largest if largest > 1e-14 else 1.0)
    return math.inf if math.isnan(error) else error


def worst(ours: dict, theirs: dict) -> tuple[float, str]:
    """Return (the largest error_of() all tensors, the tensor's name); a tensor that one side lacks is infinitely
    wrong."""
    return max((error_of(ours[name], theirs[name]) if name in ours and name in theirs else math.inf, name)
               for name in ours.keys() | theirs.keys())


def difference(ours: dict, theirs: dict) -> float:
    """Return the largest deviation over all tensors, each relative to the tensor's own largest entry."""
    error, name = worst(ours, theirs)
    assert error < math.inf, f"{name} is missing or not a number"
    return error


def relative(ours: list, theirs: list) -> float:
    """Return the largest relative deviation between two lists of numbers."""
    return max(error_of(our, their) for our, their in zip(ours, theirs, strict=True))


def join_ranks(outcomes: list[Outcome]) -> Outcome:
    """Join the results of all ranks. Numbers are rank 0's; `apart` names those that another rank disputes."""
    first, apart, of_gradients = outcomes[0], set(), set()
    gradients = [full_tensors(outcomes, lambda outcome: outcome.gradients[step], of_gradients)
                 for step in range(len(first.gradients))]
    weights = full_tensors(outcomes, lambda outcome: outcome.weights, apart)
    apart |= {f"gradient of {name}" for name in of_gradients}
    apart |= {what for what in ("losses", "norms", "evaluation", "statistics")
              if len({repr(getattr(outcome, what)) for outcome in outcomes}) > 1}
    return dataclasses.replace(first, place=None, gradients=gradients, weights=weights, apart=frozenset(apart))


def judge(right: Outcome, found: Outcome):
    """Raise AssertionError for the first result that differs by more than rounding."""
    apart = sorted(found.apart - right.apart)
    assert not apart, f"ranks that must agree do not: {', '.join(apart)}"
    for what in ("losses", "norms"):
        for step, (ours, theirs) in enumerate(zip(getattr(found, what), getattr(right, what), strict=True), start=1):
            skipped = not math.isfinite(ours) and not math.isfinite(theirs)
            assert skipped or error_of(ours, theirs) < TOLERANCE, f"{what}, step {step}: {ours}, not {theirs}"
    for step, (ours, theirs) in enumerate(zip(found.gradients, right.gradients, strict=True), start=1):
        error, name = worst(ours, theirs)
        assert error < TOLERANCE, f"gradient of {name} in step {step} is off by {error:.1e}"
    for ours, theirs in zip(found.statistics, right.statistics, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=0.0), "the statistics of experts or depths"
    error, name = worst(found.weights, right.weights)
    assert error < TOLERANCE, f"weight {name} is off by {error:.1e}"
    assert error_of(found.evaluation, right.evaluation) < TOLERANCE, (
        f"evaluation: {found.evaluation:.5f}, not {right.evaluation:.5f}")


# ---- the plain model

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
    batches = [(tokens, labels, mask, *places_of(config, tokens), *count_depth_masks(
        torch.cat([tokens, labels[:, -1:]], dim=1), mask, config.mtp_num_layers,
        within_documents=config.reset_position_ids or config.reset_attention_mask))
        for tokens, labels, mask, _ in zip(data.tokens, data.labels, data.loss_mask.double(), range(steps))]
    return train_reference(config, weights, batches, rates, [masks_of(config, step) for step in range(steps)])


_references = {}


def reference_for(pool, config: Config, steps: int, given=(), draw=weights_and_data):
    """Train the reference model on rank 0 of the pool, from draw(config, steps, given), once for each model and data.
    Returns (initial weights, data, a record of each step, final weights)."""
    key = (draw, steps, given, *(getattr(config, name) for name in names_affecting(
        Config, "model", "positions", "optimizer", "run", "losses")))
    if key not in _references:
        weights, data = draw(config, steps, given)
        _references[key] = (weights, data, *pool.run(train_plainly, config, weights, data, steps, world_size=1)[0])
    return _references[key]


def results_of_records(config: Config, data: FixedData, records, final) -> Outcome:
    """Return the results of reference_for(), with an evaluation of the final weights."""
    return Outcome(None, [record.loss for record in records], [record.gradient_norm for record in records],
                   [record.gradients for record in records], final,
                   plain_evaluation(config, final, data, min(config.eval_iters, len(records))),
                   [record.statistics for record in records])


def plain_evaluation(config: Config, weights, data: FixedData, count):
    """Return the mean loss over the tokens that count of the first `count` global batches, computed in one batch
    instead of as a mean of means."""
    model = ReferenceGPT(config).double().load_full(weights)
    tokens, labels, loss_mask = (tensor[:count].flatten(0, 1) for tensor in (data.tokens, data.labels, data.loss_mask))
    with torch.no_grad():
        return float(masked_loss(model(tokens, *places_of(config, tokens)), labels, loss_mask.double()))


def plain_text(config: Config, weights, prompt: list[int], count: int, vocab_size: int,
               end_of_text=END_OF_TEXT) -> list[int]:
    """Return what generate() must return at temperature 0. The reference model computes the whole context again for
    each token. When the context is full, its later half stays."""
    model, longest, text = ReferenceGPT(config).double().load_full(weights), config.context_length, prompt
    window = prompt[-longest:]
    while len(text) < len(prompt) + count:
        window = window if len(window) <= longest else window[-(longest // 2):]
        tokens = torch.tensor([window])
        with torch.no_grad():
            logits = model(tokens, *places_of(config, tokens))
        token = int(logits[0, -1, :vocab_size].argmax())
        if token == end_of_text:
            break
        text, window = text + [token], window + [token]
    return text


def check_against_reference(pool, config: Config, steps: int, rigged=()):
    """Train on the pool's ranks and compare losses, norms, gradients, weights, evaluation and a sampled text with the
    reference's. The first replica prints the text. Returns the reference's record of each step.
    """
    weights, data, records, final = reference_for(pool, config, steps, rigged)
    config, prompt = dataclasses.replace(config, sample_tokens=3, temperature=0.0), data.tokens[0, 0].tolist()
    outcomes = pool.run(train_and_sample_rank, config, weights, data, steps, world_size=config.world_size)

    assert all(record.gradient_norm > 0.11 for record in records), "the clipping must bite"
    judge(results_of_records(config, data, records, final), join_ranks(outcomes))
    text = plain_text(config, final, prompt, config.sample_tokens, config.vocab_size)
    for outcome in outcomes:
        assert outcome.sample.splitlines()[1:-1] == [f"{prompt}|{text[len(prompt):]}"] * (outcome.place[1] == 0)
    return records
