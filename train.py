"""Pre-train a GPT with tensor, pipeline and data parallelism: the whole story, from top to bottom.

    python train.py                                    one process
    torchrun --nproc_per_node 8 train.py               eight processes, by default tp 2 x pp 2 x dp 2
    torchrun --nproc_per_node 8 train.py --model gpt2 --tp 1 --pp 1 --bf16     on a node of GPUs

The files of nanodomino/ that it calls, in the order in which a step needs them:

    settings/    command line -> Config            domino.py     forward and backward of one stage, slice by slice
    mesh.py      rank -> its place in the grid     pipeline.py   which microbatch when, and the messages between stages
    data.py      (seed, sample) -> batches         zero.py       gradients -> updated weights
    model.py     the GPT, on parallel.py           run/          what stands around a training: reports, checkpoints

Most functions have the names that a reader of Megatron-LM expects.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))       # `python -I` and PYTHONSAFEPATH leave it out

from nanodomino import pipeline
from nanodomino.comm.world import LaunchInfo
from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.data import Batch, TokenDataset, sample_ids_of
from nanodomino.domino import Domino, run_to_end
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.optim.optimizers import learning_rate
from nanodomino.run.failures import run_rank
from nanodomino.run.session import Session, open_session
from nanodomino.schedules.simulation import Timetable
from nanodomino.settings.config import Config
from nanodomino.zero import StepResult, ZeroOptimizer


# ---- what users of Megatron-LM write themselves: the model, the data, a forward step, the loss

def model_builder(config: Config, mesh: Mesh, initialize=True) -> GPT:
    """Build the part of the model that this rank holds: its stage's layers, and of each matrix only its shard."""
    return GPT(config, mesh, initialize=initialize)


def dataset_builder(config: Config, corpus: Corpus, device) -> dict[str, TokenDataset]:
    """Return {split: dataset} for train, valid and test. A valid or test split without a whole sample is left out.

    Raises UserError if train holds no whole sample.
    """
    splits = [split for split in ("train", "valid", "test")
              if split == "train" or corpus.tokens[split] > config.seq_length]
    prepare = partial(config.prepare_batch, end_of_text=corpus.end_of_text)
    return {split: TokenDataset(corpus, split, config.seq_length, config.seed, device, prepare) for split in splits}


def get_batch(dataset: TokenDataset, config: Config, mesh: Mesh, first_sample: int, shuffle: bool, microbatch: int,
              chunk: int):
    """Return this replica's microbatch, the same on all its tensor-parallel ranks. first_sample: the global batch's.

    The chunk with the embedding and the chunk with the head read the tokens. A chunk between them needs only the sample
    ids, which seed its dropout masks, unless an option makes all chunks read the tokens.
    """
    where = (first_sample, microbatch, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
    at_an_end = config.placement.virtual_stage(mesh.pp_rank, chunk) in (0, config.placement.last)
    if at_an_end or config.all_chunks_read_tokens:
        return config.own_part(dataset.batch(*where, shuffle=shuffle), mesh)
    return Batch(None, None, None, None, sample_ids_of(*where))


def forward_step(batch, domino: Domino, hidden, chunk: int, training: bool):
    """Run a microbatch through a chunk: a generator that returns (output, tape, loss function).

    tape: what backward needs. The loss function turns the output of the last chunk into (sum of losses, tokens).
    """
    output, tape = yield from domino.forward(batch, hidden, training, chunk)
    return output, tape, partial(loss_func, batch.loss_mask)


def loss_func(loss_mask, losses):
    """Return the sum of the losses [b, s] of the tokens where loss_mask [b, s] is 1, and the number of these tokens.

    We return a sum because microbatches and replicas may count different numbers of tokens. So the mean of their means
    would be wrong.
    """
    return (losses * loss_mask).sum(), loss_mask.sum()


# ---- training

def train_step(step: int, domino: Domino, optimizer: ZeroOptimizer, dataset: TokenDataset, config: Config, mesh: Mesh,
               stop=lambda: False, on_action=None) -> StepResult:
    """Train on one global batch and update the weights. Steps count from 1, samples from 0.

    stop(): returns whether this rank has received a signal to stop; called at the end of the step. The result's `stop`
    says whether any rank has received one. on_action: see pipeline.run.
    """
    with domino.trace.span("step", step=step):
        optimizer.zero_grad()
        totals = run_schedule(config.timetable, config.consumed_train_samples(step - 1), domino, dataset, config, mesh,
                              on_gradients_ready=optimizer.on_gradients_ready, on_action=on_action,
                              loss_scale=optimizer.loss_scale.value)
        return optimizer.step(learning_rate(step, config), totals, stop())


def evaluate(domino: Domino, dataset: TokenDataset, config: Config, mesh: Mesh, whole=False, on_action=None):
    """Return the mean loss per token over the first eval_iters global batches of a split, or over the whole split, the
    number of tokens that counted, and the number of windows."""
    sums, table = torch.zeros(2, dtype=torch.float64, device=mesh.device), config.timetable.forwards
    firsts = range(0, dataset.windows, config.global_batch_size)[:None if whole else config.eval_iters]
    for first_sample in firsts:
        totals = run_schedule(table, first_sample, domino, dataset, config, mesh, shuffle=False, on_action=on_action)
        sums += torch.stack([totals.loss_sum, totals.tokens])
    # all tensor-parallel ranks have the same losses: count each token once
    if not (domino.model.post_process and mesh.tp_rank == 0):
        sums.zero_()
    dist.all_reduce(sums)
    loss_sum, tokens = sums.tolist()
    return loss_sum / max(tokens, 1), int(tokens), min(dataset.windows, len(firsts) * config.global_batch_size)


def run_schedule(table: Timetable, first_sample: int, domino: Domino, dataset: TokenDataset, config: Config,
                 mesh: Mesh, shuffle=True, on_gradients_ready=None, on_action=None, loss_scale=1.0):
    """Run a schedule over the microbatches of a global batch; see get_batch(). Returns pipeline.Totals."""
    return pipeline.run(table, domino, mesh, partial(get_batch, dataset, config, mesh, first_sample, shuffle),
                        forward_step, config.residual_shape, config.params_dtype, on_gradients_ready, domino.trace,
                        on_action, loss_scale)


def warm_up(domino: Domino, optimizer: ZeroOptimizer, config: Config, mesh: Mesh):
    """Connect the stages, run one dummy microbatch through each chunk, and run every collective of a step once.

    This loads kernels, allocates memory and creates communicators, each of which waits until the whole GPU is idle. In
    the first step that could be a deadlock: the GPU may be busy receiving a message whose sender waits for this rank.
    The weights do not change.
    """
    pipeline.connect(mesh, config.placement)
    rows = torch.zeros(config.micro_batch_size, config.seq_length + 1, dtype=torch.int64)
    batch = config.own_part(Batch.from_rows(rows, [0] * len(rows), 0, mesh.device,
                                            partial(config.prepare_batch, end_of_text=-1)), mesh)
    for number, chunk in enumerate(domino.model.chunks):
        hidden = None if chunk.pre_process else torch.zeros(config.residual_shape, dtype=config.params_dtype,
                                                            device=mesh.device)
        run_to_end(domino.forward(batch, hidden, training=False, chunk=number))
        output, tape = run_to_end(domino.forward(batch, hidden, chunk=number))
        run_to_end(domino.backward(tape, torch.zeros_like(output), optimizer.on_gradients_ready))
    optimizer.warm_up()


def pretrain(session: Session) -> int:
    """Build or load the model, train, validate, save, test and print a sample. Returns the exit code.

    With train_iters 0 it only validates and tests. A run that starts from --load --finetune validates before step 1.
    The last validation scores the whole split. This may take long, so the last checkpoint is saved before it.
    """
    config, mesh, datasets = session.config, session.mesh, session.datasets
    model = model_builder(config, mesh, initialize=not session.run.checkpoint)
    optimizer = ZeroOptimizer(model, config, mesh, session.trace)
    domino = Domino(model, config.slices, config.columns, config.compiler, session.trace)
    session.load(model, optimizer)
    warm_up(domino, optimizer, config, mesh)

    def loss_on(dataset, whole):
        return evaluate(domino, dataset, config, mesh, whole, session.on_action)

    if session.run.weights_only and config.train_iters > 0:        # fine-tuning's baseline
        session.report_loss("valid", loss_on)
    for step in session.steps():
        result = train_step(step, domino, optimizer, datasets["train"], config, mesh, session.stop_requested,
                            session.on_action)
        session.after_step(result, learning_rate(step, config), optimizer)
        if session.time_to(config.eval_interval) and step < config.train_iters:
            session.report_loss("valid", loss_on)
        if session.time_to(config.save_interval) or session.stopped:
            session.save(model, optimizer)
    for split in () if session.stopped else ("valid", "test"):
        session.report_loss(split, loss_on)
    return session.end(model)


def main(arguments: list[str], launch: LaunchInfo) -> int:
    """Train as the command line says. Returns the exit code. Raises UserError."""
    with open_session(arguments, launch, program=sys.modules[__name__]) as session:
        return pretrain(session)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
