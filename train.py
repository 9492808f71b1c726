"""Pre-train a GPT with tensor, pipeline and data parallelism: the whole story, from top to bottom.

    python train.py                                    one process
    torchrun --nproc_per_node 8 train.py               eight processes, by default tp 2 x pp 2 x dp 2
    torchrun --nproc_per_node 8 train.py --model gpt2 --tp 1 --pp 1 --bf16     on a node of GPUs

The files of nanodomino/ that it calls, in the order in which a step needs them:

    config/      command line -> Config            domino.py     forward and backward of one stage, slice by slice
    mesh.py      rank -> its place in the grid     pipeline.py   which microbatch when, and the messages between stages
    data.py      (seed, step) -> batches           zero.py       gradients -> updated weights
    model.py     the GPT, on parallel.py           checkpoint/   save and resume

Most functions have the names that a reader of Megatron-LM expects.
"""

import dataclasses
import math
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from data.prepare import DEFAULT_CORPUS, prepare_default_corpus
from nanodomino import pipeline
from nanodomino.checkpoint.find_checkpoints import recorded_settings, with_checkpoint
from nanodomino.checkpoint.load import restore
from nanodomino.checkpoint.save import Saver
from nanodomino.comm.trace import Trace, VerboseTrace
from nanodomino.comm.world import LaunchInfo, find_device, start_world
from nanodomino.config.config import Config
from nanodomino.config.presets import LR_DECAY_STYLES
from nanodomino.corpus.prepared_folder import Corpus, load_corpus
from nanodomino.data import Batch, EndOfText, TokenDataset, sample_ids_of
from nanodomino.domino import Domino, run_to_end
from nanodomino.errors import UserError, counted, require
from nanodomino.generate.generation import generate
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.model import GPT
from nanodomino.run.agreement import check_agreement, from_rank_0
from nanodomino.run.check_copies import drift_warning
from nanodomino.run.command_line import from_command_line
from nanodomino.run.estimates import Estimate, estimated_seconds, require_memory, with_two_slices
from nanodomino.run.kernels import choose_kernels
from nanodomino.run.rank_failure import run_rank
from nanodomino.run.report import Report, expected_quality
from nanodomino.run.run_folder import Run, open_run
from nanodomino.run.signals import StopSignal
from nanodomino.run.tensorboard import check_package
from nanodomino.run.threads import choose_threads
from nanodomino.run.watchdog import Watchdog
from nanodomino.schedules.placement_and_messages import Timetable
from nanodomino.timeline.draw import draw_timeline
from nanodomino.zero import StepResult, ZeroOptimizer

PROGRAM = sys.modules[__name__]      # this file, for the dry run of a step before the run
PROMPT_TOKENS = 32       # length of the prompt, taken from the validation text, for the sample at the end


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
    end_of_text = EndOfText.of(corpus.end_of_text, config)
    return {split: TokenDataset(corpus, split, config.seq_length, config.seed, end_of_text, device,
                                config.mtp_num_layers) for split in splits}


def get_batch(dataset: TokenDataset, config: Config, mesh: Mesh, step: int, shuffle: bool, microbatch: int, chunk: int):
    """Return this replica's microbatch of global batch `step`, the same on all of its tensor-parallel ranks.

    The chunk with the embedding and the chunk with the head read the tokens. A chunk between them needs only the sample
    ids, which seed its dropout masks. If positions or attention depend on where documents end, or if ranks share
    samples, all chunks read the tokens.
    """
    where = (step, microbatch, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
    at_an_end = config.placement.virtual_stage(mesh.pp_rank, chunk) in (0, config.placement.last)
    if at_an_end or config.uses_document_boundaries or config.cp > 1:
        return dataset.batch(*where, shuffle=shuffle).at_own_places(mesh)
    return Batch(None, None, None, None, sample_ids_of(*where))


def forward_step(batch, stage: Domino, hidden, chunk: int, training: bool):
    """Run a microbatch through a chunk: a generator that returns (output, tape, loss function).

    tape: what backward needs. The loss function turns the output of the last chunk into (sum of losses, tokens).
    """
    output, tape = yield from stage.forward(batch, hidden, training, chunk)
    return output, tape, partial(loss_func, batch.loss_mask)


def loss_func(loss_mask, losses):
    """Return the sum of the losses [b, s] of the tokens where loss_mask [b, s] is 1, and the number of these tokens.

    We return a sum because microbatches and replicas may count different numbers of tokens. So the mean of their means
    would be wrong.
    """
    return (losses * loss_mask).sum(), loss_mask.sum()


# ---- training

def train_step(step: int, stage: Domino, optimizer: ZeroOptimizer, dataset: TokenDataset, config: Config, mesh: Mesh,
               stop=lambda: False, on_action=None) -> StepResult:
    """Train on one global batch and update the weights. Steps count from 1, global batches from 0.

    stop(): returns whether this rank has received a signal to stop; called at the end of the step. The result's `stop`
    says whether any rank has received one. on_action: see pipeline.run.
    """
    with stage.trace.span("step", step=step):
        optimizer.zero_grad()
        totals = run_schedule(config.timetable, step - 1, stage, dataset, config, mesh,
                              on_gradients_ready=optimizer.on_gradients_ready, on_action=on_action,
                              loss_scale=optimizer.loss_scale.value)
        return optimizer.step(learning_rate(step, config), totals, stop())


def evaluate(stage: Domino, dataset: TokenDataset, config: Config, mesh: Mesh, on_action=None) -> float:
    """Return the mean loss per token over the first eval_iters global batches of a split."""
    sums, table = torch.zeros(2, dtype=torch.float64, device=mesh.device), config.timetable.forwards
    for step in range(min(config.eval_iters, math.ceil(dataset.windows / config.global_batch_size))):
        totals = run_schedule(table, step, stage, dataset, config, mesh, shuffle=False, on_action=on_action)
        sums += torch.stack([totals.loss_sum, totals.tokens])
    # all tensor-parallel ranks have the same losses: count each token once
    if not (stage.model.post_process and mesh.tp_rank == 0):
        sums.zero_()
    dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()


def run_schedule(table: Timetable, step: int, stage: Domino, dataset: TokenDataset, config: Config, mesh: Mesh,
                 shuffle=True, on_gradients_ready=None, on_action=None, loss_scale=1.0):
    """Run a schedule over the microbatches of global batch `step`, counted from 0. Returns pipeline.Totals."""
    stage.ops.loss_scale = loss_scale                          # for the losses of a router
    return pipeline.run(table, stage, mesh, partial(get_batch, dataset, config, mesh, step, shuffle), forward_step,
                        config.residual_shape, config.params_dtype, on_gradients_ready, stage.trace, on_action,
                        loss_scale)


def learning_rate(step: int, config: Config) -> float:
    """Return the learning rate of a step, 1 to train_iters. The rate rises linearly to lr, then decays to min_lr at the
    last step. With the decay style `constant` it stays at lr."""
    warmup = int(config.lr_warmup_fraction * config.train_iters)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(config.train_iters - warmup, 1)
    return config.min_lr + (config.lr - config.min_lr) * LR_DECAY_STYLES[config.lr_decay_style](progress)


def warm_up(stage: Domino, optimizer: ZeroOptimizer, config: Config, mesh: Mesh):
    """Connect the stages, run one dummy microbatch through each chunk, and run every collective of a step once.

    This loads kernels, allocates memory and creates communicators, each of which waits until the whole GPU is idle. In
    the first step that could be a deadlock: the GPU may be busy receiving a message whose sender waits for this rank.
    The weights do not change.
    """
    pipeline.connect(mesh, config.placement)
    rows = torch.zeros(config.micro_batch_size, config.seq_length + 1, dtype=torch.int64)
    batch = Batch.from_rows(rows, [0] * len(rows), 0, EndOfText.of(-1, config), mesh.device,
                            config.mtp_num_layers).at_own_places(mesh)
    for number, chunk in enumerate(stage.model.chunks):
        hidden = None if chunk.pre_process else torch.zeros(config.residual_shape, dtype=config.params_dtype,
                                                            device=mesh.device)
        run_to_end(stage.forward(batch, hidden, training=False, chunk=number))
        output, tape = run_to_end(stage.forward(batch, hidden, chunk=number))
        run_to_end(stage.backward(tape, torch.zeros_like(output), optimizer.on_gradients_ready))
    optimizer.warm_up()


def pretrain(config: Config, corpus: Corpus, datasets: dict[str, TokenDataset], mesh: Mesh, run: Run,
             watchdog: Watchdog, estimate: Estimate | None) -> int:
    """Build or load the model, train, validate, save, test and print a sample. Returns the exit code.

    estimate: the Estimate of the run's memory and time; None except on rank 0.

    With train_iters 0 it only validates and tests. A run that starts from --load --finetune validates before step 1.
    """
    def report_loss(split: str):
        if split in datasets and config.eval_iters:
            report.losses(done, split, evaluate(stage, datasets[split], config, mesh, watchdog.mark))

    model = model_builder(config, mesh, initialize=not run.checkpoint)
    trace = (VerboseTrace if config.verbose else Trace)(mesh.device, recording=False)
    optimizer = ZeroOptimizer(model, config, mesh, trace)
    stage = Domino(model, config.slices, config.columns, config.compiler, trace)
    checkpoint, done = None, 0
    if run.checkpoint:
        checkpoint, done = with_checkpoint(run.source, partial(restore, model=model, optimizer=optimizer, mesh=mesh,
                                                               weights_only=run.weights_only), run.checkpoint)
    saver = Saver(run.folder, mesh, config.keep_last, config.timeout)
    report = Report(config, corpus, mesh, run.folder, done, enabled=dist.get_rank() == 0)
    if run.weights_only:
        why = "" if "lr" in config.given else ", a tenth of the preset's: --lr sets another"
        report.say(f"starting from the weights in {checkpoint}, without its optimizer state and step, with the peak "
                   f"learning rate {config.lr:g}{why}")
    if done < config.train_iters:
        report.estimate(estimate, estimated_seconds(estimate, config, mesh))
    warm_up(stage, optimizer, config, mesh)
    step, traced = done, config.traced_steps
    if traced and traced[-1] <= done:
        report.say(f"nothing is left to trace: this run has done {counted(done, 'step')}, and --trace is "
                   f"{config.trace}")
    signals, stop, start_time = StopSignal(report.say), False, time.perf_counter()

    try:
        if run.weights_only or config.train_iters == 0:        # a baseline for fine-tuning, or an evaluation alone
            report_loss("valid")
        while done < config.train_iters and not stop:
            step, step_start = done + 1, time.perf_counter()
            watchdog.context.update(step=step, signals=signals)
            trace.recording = step in traced
            result = train_step(step, stage, optimizer, datasets["train"], config, mesh,
                                stop=lambda: signals.number > 0, on_action=watchdog.mark)
            done, trace.recording = step, False
            last = step == config.train_iters
            stop = result.stop or (config.exit_interval is not None and step % config.exit_interval == 0)
            report.step(step, result, learning_rate(step, config), time.perf_counter() - step_start)
            if step in traced and (step == traced[-1] or stop):
                report.say(draw_timeline(trace, mesh, run.folder / f"trace-{step:08d}"))
            if optimizer.skipped_in_a_row >= config.max_skipped_steps:
                saver.wait()                                   # for a checkpoint still being written
                report.draw_curve()
                raise UserError(f"{counted(optimizer.skipped_in_a_row, 'step')} in a row, up to step {step}, had a "
                                f"loss or gradient that is not finite; {optimizer.loss_scale.advice()}start from an "
                                f"earlier checkpoint, or from scratch, with a smaller --lr than {config.lr}")
            if step % config.eval_interval == 0 or last:
                report_loss("valid")
            if step % config.save_interval == 0 or last or stop:
                if warning := drift_warning(model, optimizer, mesh):
                    report.say(f"warning: {warning}")
                saver.save(step, model, optimizer, config)
                report.draw_curve()
            if failure := saver.failure():
                report.say(f"warning: {failure}; training continues")
        saver.wait()
        if failure := saver.failure():                         # fatal, since no later checkpoint follows
            raise UserError(f"{failure}; free some disk space and start again to resume from the last checkpoint")
    except Exception as error:
        error.step, error.signals = step, signals              # for the failure report
        raise

    if stop and done < config.train_iters:
        report.end(done, time.perf_counter() - start_time)
        report.say(f"stopped early after saving the checkpoint of step {done}; --run-dir {run.folder} resumes from it")
        return 128 + (signals.number or signal.SIGTERM) if result.stop else 0
    report_loss("test")
    report.end(done, time.perf_counter() - start_time)
    watchdog.finished.set()                                    # the other replicas may wait long for the sample
    if config.sample_tokens:
        write_sample(model, config, corpus, datasets.get("valid", datasets["train"]), mesh)
    return 0


def write_sample(model: GPT, config: Config, corpus: Corpus, dataset: TokenDataset, mesh: Mesh):
    """Let the first replica continue the first tokens of a split, and print the text. The ranks that hold its other
    experts generate the same text. Here every rank computes whole samples, even with context parallelism."""
    _, index = mesh.axis("dp")
    if index < mesh.ep:
        prompt = dataset.batch(0, 0, 0, 1, 1, 1, shuffle=False).tokens[0, :PROMPT_TOKENS].tolist()
        tokens = generate(model, mesh, prompt, config.sample_tokens, corpus.vocab_size, config.temperature,
                          config.top_k, config.seed, end_of_text=corpus.end_of_text)
        if index > 0:
            return
        tokenizer = corpus.tokenizer()
        print(f"---- a sample (temperature {config.temperature}, top-k {config.top_k}){expected_quality(config)}; the "
              f"first {len(prompt)} tokens are the prompt\n"
              f"{tokenizer.decode(prompt)}|{tokenizer.decode(tokens[len(prompt):])}\n----", flush=True)


# ---- from the command line to the first collective

def find_corpus(config: Config, launch: LaunchInfo) -> Corpus:
    """Load the prepared data. If the default data is missing, the first process of each host prepares it first."""
    folder = Path(config.data_path or DEFAULT_CORPUS)
    if config.data_path is None and not folder.exists():
        if launch.local_rank == 0:
            prepare_default_corpus(folder)
        waited = 0.0
        while not folder.exists():
            require(waited < 600, f"{folder} was not prepared within 10 minutes; run python data/prepare.py first")
            time.sleep(0.2)
            waited += 0.2
    return load_corpus(folder)


def main(arguments: list[str], launch: LaunchInfo) -> int:
    """Check settings, data and device, then start the process groups and train.

    Checks that need no other rank come first, so that most mistakes end the run before any rank communicates. Returns
    the exit code. Raises UserError.
    """
    config = from_command_line(arguments, launch.world_size)
    device = find_device(config, launch)
    corpus = find_corpus(config, launch)
    config = dataclasses.replace(config.with_vocabulary(corpus.vocab_size).with_device(device),
                                 data_path=str(corpus.path.resolve()), data_sha256=corpus.sha256["train"])
    config = with_two_slices(PROGRAM, config, device, launch.local_world_size)
    datasets = dataset_builder(config, corpus, device)
    if config.sample_tokens:
        corpus.tokenizer()                                     # a failure should show now, not at the end
    check_package(config)
    run = estimate = None
    if launch.rank == 0:
        estimate = require_memory(PROGRAM, config, device, launch.local_world_size)
        run = open_run(config, launch)
        if run.checkpoint:
            corpus.check_tokenizer_of(run.checkpoint)

    choose_kernels(config)
    start_world(launch, device, config.timeout)
    mesh = make_mesh(config.pp, config.dp, config.tp, device, config.timeout, config.ep, config.cp)
    check_agreement(config)
    run = from_rank_0(run)
    config = dataclasses.replace(config, cpu_threads=choose_threads(
        config, device, from_rank_0(recorded_settings(run.folder)), quiet=launch.rank > 0))
    with Watchdog(launch, mesh, config.timeout) as watchdog:
        code = pretrain(config, corpus, datasets, mesh, run, watchdog, estimate)
        dist.barrier()                                         # so that none disconnects while another communicates
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
