"""Pre-train a GPT over tensor x pipeline x data parallel processes. The whole story, from top to bottom.

    python train.py                                    one process
    torchrun --nproc_per_node 8 train.py               eight: tp 2 x pp 2 x dp 2 by default
    torchrun --nproc_per_node 8 train.py --model gpt2 --tp 1 --pp 1 --bf16     on a node of GPUs

Where what happens:

    config.py    flags -> Config               domino.py    a stage forward and backward, slices beside slices
    data.py      tokens -> batches             pipeline.py  which microbatch when
    mesh.py      who is where                  zero.py      gradients -> new weights
    model.py     the GPT, on parallel.py

The names of the functions are those that a reader of Megatron-LM's or DeepSpeed-Domino's training loop looks for.
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
from nanodomino.analysis.step_time import estimate, require_memory
from nanodomino.checkpoint.load import restore
from nanodomino.checkpoint.save import Saver
from nanodomino.comm.trace import Trace
from nanodomino.comm.world import LaunchInfo, find_device, start_world
from nanodomino.config.config import Config
from nanodomino.config.presets import LR_DECAY_STYLES
from nanodomino.corpus.folder import Corpus, load_corpus
from nanodomino.data import Batch, Ends, TokenDataset, sample_ids_of
from nanodomino.domino import Domino, run_alone
from nanodomino.errors import UserError, require
from nanodomino.generate.sampling import generate
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.model import GPT
from nanodomino.run.check_copies import drifted_copies, make_compiler_deterministic
from nanodomino.run.command_line import from_command_line
from nanodomino.run.failure import run_rank
from nanodomino.run.folder import Run, check_shared_folder, open_run
from nanodomino.run.report import Report
from nanodomino.run.signals import StopSignal
from nanodomino.run.tensorboard import check_package
from nanodomino.run.watchdog import Watchdog, connection_timeout
from nanodomino.schedules.placement import Timetable
from nanodomino.timeline.draw import draw_timeline
from nanodomino.zero import StepResult, ZeroOptimizer

PROMPT_TOKENS = 32       # of the validation text, from which the sample at the end goes on


# ---- what Megatron-LM's user writes: the model, the data, a forward step, a loss

def model_builder(config: Config, mesh: Mesh) -> GPT:
    """This process's stage of the model, and of it this process's shards."""
    return GPT(config, mesh)


def dataset_builder(config: Config, corpus: Corpus, device) -> dict[str, TokenDataset]:
    """train, valid and test; the last two only if they hold a window.
    Raises UserError if there is nothing to train on."""
    splits = [split for split in ("train", "valid", "test")
              if split == "train" or corpus.tokens[split] > config.seq_length]
    ends = Ends(corpus.end_of_text, config.eod_mask_loss, config.reset_position_ids, config.reset_attention_mask)
    return {split: TokenDataset(corpus, split, config.seq_length, config.seed, ends, device) for split in splits}


def get_batch(dataset: TokenDataset, config: Config, mesh: Mesh, step: int, shuffle: bool, microbatch: int, chunk: int):
    """A microbatch of this replica: the same on all its tensor-parallel ranks, and at both ends of the model; between
    them too, where attention asks what the documents are."""
    place = (step, microbatch, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
    at_an_end = config.placement.virtual_stage(mesh.pp_rank, chunk) in (0, config.placement.last)
    if at_an_end or config.uses_document_boundaries:
        return dataset.batch(*place, shuffle=shuffle)
    return Batch(None, None, None, None, sample_ids_of(*place))


def forward_step(batch, stage: Domino, hidden, chunk: int, training: bool):
    """Generator: one microbatch through a chunk of this stage -> (output, tape, loss function of the output)."""
    output, tape = yield from stage.forward(batch, hidden, training, chunk)
    return output, tape, partial(loss_func, batch.loss_mask)


def loss_func(loss_mask, losses):
    """losses [b, s] of the tokens -> their sum where loss_mask is 1, and how many those are.

    Sums, not means: microbatches and replicas may count different numbers of tokens,
    and a mean of means would be wrong.
    """
    return (losses * loss_mask).sum(), loss_mask.sum()


# ---- the training

def train_step(step: int, stage: Domino, optimizer: ZeroOptimizer, dataset: TokenDataset, config: Config, mesh: Mesh,
               stop=lambda: False, on_action=None) -> StepResult:
    """One optimizer step (numbered from 1) on a global batch. stop: whether this rank has been told to stop after it,
    asked at its end; on_action: see pipeline.run."""
    with stage.trace.span("step", step=step):
        optimizer.zero_grad()
        totals = run_schedule(config.timetable, step - 1, stage, dataset, config, mesh,
                              on_gradients_ready=optimizer.on_gradients_ready, on_action=on_action,
                              loss_scale=optimizer.loss_scale.value)
        return optimizer.step(learning_rate(step, config), totals, stop())


def evaluate(stage: Domino, dataset: TokenDataset, config: Config, mesh: Mesh, on_action=None) -> float:
    """Mean loss over the first eval_iters global batches of a split, every token counted once."""
    sums, table = torch.zeros(2, dtype=torch.float64, device=mesh.device), config.timetable.forwards
    for step in range(min(config.eval_iters, math.ceil(dataset.windows / config.global_batch_size))):
        totals = run_schedule(table, step, stage, dataset, config, mesh, shuffle=False, on_action=on_action)
        sums += torch.stack([totals.loss_sum, totals.tokens])
    # each token once: tensor-parallel ranks have the same losses
    if not (stage.model.post_process and mesh.tp_rank == 0):
        sums.zero_()
    dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()


def warm_up(stage: Domino, optimizer: ZeroOptimizer, config: Config, mesh: Mesh):
    """Before the first real message: the stages meet, a microbatch of nothing goes forward and backward through each of
    them, every sum of a step is made once. Then kernels are compiled and loaded, memory is sized and communicators
    stand: on a GPU each of these waits for the whole device, so also for a message whose sender may wait for us."""
    pipeline.connect(mesh, config.placement)
    rows = torch.zeros(config.micro_batch_size, config.seq_length + 1, dtype=torch.int64, device=mesh.device)
    nothing = Batch.of_rows(rows, [0] * len(rows), counted=0)
    for number, chunk in enumerate(stage.model.chunks):
        hidden = None if chunk.pre_process else torch.zeros(config.hidden_shape, dtype=config.params_dtype,
                                                                device=mesh.device)
        run_alone(stage.forward(nothing, hidden, training=False, chunk=number))
        output, tape = run_alone(stage.forward(nothing, hidden, chunk=number))
        run_alone(stage.backward(tape, torch.zeros_like(output), optimizer.on_gradients_ready))
    optimizer.warm_up()


def run_schedule(table: Timetable, step: int, stage: Domino, dataset: TokenDataset, config: Config, mesh: Mesh,
                 shuffle=True, on_gradients_ready=None, on_action=None, loss_scale=1.0):
    """Run a schedule over the microbatches of global batch number `step`."""
    return pipeline.run(table, stage, mesh, partial(get_batch, dataset, config, mesh, step, shuffle), forward_step,
                        config.hidden_shape, config.params_dtype, on_gradients_ready, stage.trace, on_action,
                        loss_scale)


def learning_rate(step: int, config: Config) -> float:
    """Of step 1 .. train_iters: a linear climb over the warm-up, then from lr down to min_lr at the last step."""
    warmup = int(config.lr_warmup_fraction * config.train_iters)
    if step <= warmup:
        return config.lr * step / warmup
    done = (step - warmup) / max(config.train_iters - warmup, 1)
    return config.min_lr + (config.lr - config.min_lr) * LR_DECAY_STYLES[config.lr_decay_style](done)


def pretrain(config: Config, corpus: Corpus, datasets: dict[str, TokenDataset], mesh: Mesh, run: Run,
             watch: Watchdog) -> int:
    """Build or load, train, validate, save, test, and let the model write something. Returns the exit code."""
    def on_action(done: int, count: int):
        watch.mark()
        report.action(done, count)

    model = model_builder(config, mesh)
    trace = Trace(mesh.device, recording=False)
    optimizer = ZeroOptimizer(model, config, mesh, trace)
    stage = Domino(model, config.slices, config.columns, config.active_compile_backend, trace)
    done = restore(run.checkpoint, model, optimizer, mesh, run.weights_only) if run.checkpoint else 0
    saver = Saver(run.folder, mesh, config.keep_last, config.timeout, resumed_from=done)
    report = Report(config, corpus, mesh, run.folder, done, speaks=dist.get_rank() == 0)
    if run.weights_only:
        report.say(f"from the weights of {run.checkpoint}, and nothing else of it")
    if done < config.train_iters:
        report.estimate(*estimate(config, mesh))
        warm_up(stage, optimizer, config, mesh)
    signals, stop, begin = StopSignal(report.say), False, time.perf_counter()

    step, traced = done, config.traced_steps
    if traced and traced[-1] <= done:
        report.say(f"nothing is left to trace: this run has done {done} steps, and --trace is {config.trace}")
    try:
        while done < config.train_iters and not stop:
            step, step_begin = done + 1, time.perf_counter()
            watch.about.update(step=step, signals=signals)
            trace.recording = step in traced
            result = train_step(step, stage, optimizer, datasets["train"], config, mesh,
                                stop=lambda: signals.number > 0, on_action=on_action)
            done, trace.recording = step, False
            stop = result.stop or (config.exit_interval is not None and step % config.exit_interval == 0)
            report.step(step, result, learning_rate(step, config), time.perf_counter() - step_begin)
            if step in traced and (step == traced[-1] or stop):
                report.say(draw_timeline(trace, mesh, run.folder / f"trace-{step:08d}"))
            if optimizer.skipped_in_a_row >= config.max_skipped_steps:
                # the last good checkpoint, should it still be on its way
                saver.wait()
                report.draw_curve()
                raise UserError(f"{optimizer.skipped_in_a_row} steps in a row, up to step {step}, had a loss or "
                                f"gradient that is not finite; {optimizer.loss_scale.advice()}start from an earlier "
                                f"checkpoint, or anew, with a smaller --lr than {config.lr}")
            if ("valid" in datasets and config.eval_iters
                    and (step % config.eval_interval == 0 or step == config.train_iters)):
                report.losses(step, "valid", evaluate(stage, datasets["valid"], config, mesh, watch.mark))
            if step % config.save_interval == 0 or step == config.train_iters or stop:
                if text := drifted_copies(model, optimizer, mesh):
                    report.say(f"warning: {text}")
                saver.save(step, model, optimizer, config)
                report.draw_curve()
            if failure := saver.failure():
                report.say(f"warning: {failure}; training goes on")
    except Exception as error:
        error.step, error.signals = step, signals              # for whoever reports it
        raise

    saver.wait()
    if failure := saver.failure():
        # at the end there is no later one that could still go well
        raise UserError(f"{failure}; make room, and start again: the run goes on from its last checkpoint, if it has "
                        "one")
    if stop and done < config.train_iters:
        report.end(done, time.perf_counter() - begin)
        report.say(f"stopped as told, the checkpoint of step {done} is saved; --run-dir {run.folder} goes on from it")
        return 128 + (signals.number or signal.SIGTERM) if result.stop else 0
    if "test" in datasets and config.eval_iters:
        report.losses(done, "test", evaluate(stage, datasets["test"], config, mesh, watch.mark))
    report.end(done, time.perf_counter() - begin)
    watch.over.set()                                           # the others may wait long for whoever writes the sample
    if config.sample_tokens:
        write_sample(model, config, corpus, datasets.get("valid", datasets["train"]), mesh)
    return 0


def write_sample(model: GPT, config: Config, corpus: Corpus, dataset: TokenDataset, mesh: Mesh):
    """Let the first replica go on from the first words of a split."""
    if mesh.dp_rank == 0:
        prompt = dataset.batch(0, 0, 0, 1, 1, 1, shuffle=False).tokens[0, :PROMPT_TOKENS].tolist()
        tokens = generate(model, mesh, prompt, config.sample_tokens, corpus.vocab_size, config.temperature,
                          config.top_k, config.seed, end_of_text=corpus.end_of_text)
        text = corpus.tokenizer()
        print(f"---- a sample (temperature {config.temperature}, top-k {config.top_k}); the first {len(prompt)} "
              f"tokens are the prompt\n"
              f"{text.decode(prompt)}|{text.decode(tokens[len(prompt):])}\n----", flush=True)


# ---- from the command line to the first collective

def find_corpus(config: Config, launch: LaunchInfo) -> Corpus:
    """The prepared folder; the default one is made on first use by one process of each host while the others wait."""
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
    """Everything that can be wrong is found before a process group forms, by every rank alike.
    Returns the exit code."""
    config = from_command_line(arguments, launch.world_size)
    device = find_device(config, launch)
    corpus = find_corpus(config, launch)
    config = dataclasses.replace(config.with_vocabulary(corpus.vocab_size).with_device(device),
                                 data_path=str(corpus.path.resolve()), data_sha256=corpus.sha256["train"])
    datasets = dataset_builder(config, corpus, device)
    if config.sample_tokens:
        corpus.tokenizer()                                     # the sample at the end needs it: if it fails, then now
    require_memory(config, device, launch.local_world_size)
    check_package(config)
    found = open_run(config, launch) if launch.rank == 0 else None

    if config.deterministic_mode:                              # before anything is computed or summed
        torch.use_deterministic_algorithms(True, warn_only=True)
    if config.compile and config.tp > 1:                       # each for itself, and all must compute alike
        make_compiler_deterministic()
    with connection_timeout(launch, config.timeout):
        start_world(launch, device, config.timeout)
        mesh = make_mesh(config.pp, config.dp, config.tp, device, config.timeout)
    check_agreement(config)
    found = tell_all(found)
    check_shared_folder(found.folder)
    with Watchdog(launch, mesh, config.timeout) as watch:
        code = pretrain(config, corpus, datasets, mesh, found, watch)
        dist.barrier()                                         # nobody hangs up while another still talks
    dist.destroy_process_group()
    return code


def tell_all(value):
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def check_agreement(config: Config):
    """All ranks must mean the same run: on several hosts flags, or the standard library's version, may differ, and
    where files lie, which is no matter. Raises UserError."""
    mine = dataclasses.asdict(dataclasses.replace(config, data_path=None, run_dir=None, load=None, config=None,
                                                  tensorboard_dir=None))
    theirs = tell_all(mine)
    different = [name for name in mine if mine[name] != theirs[name]]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, different)
    for rank, names in enumerate(everyone):
        require(not names,
                f"rank {rank} was started with another {', '.join(names)} than rank 0; give all hosts the same "
                "flags and data")


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
