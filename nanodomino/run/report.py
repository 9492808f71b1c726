"""Prints the progress of a run and stores it in the run's folder. Only rank 0 does so.

    start     the model, the rank grid and the schedule on the terminal; config.json
    step      a tqdm bar, a line every --log-interval steps; one JSON object per step in metrics.jsonl
    losses    validation and test loss, next to the unigram and bigram entropy of the text, which a model must beat;
              perplexity = exp(loss), bits per byte of the scored text, and how many tokens of the split were scored
    curve     loss.svg, drawn at each checkpoint and at the end; with --tensorboard-dir also TensorBoard's curves

MFU is model FLOPs utilization: tokens per second x FLOPs per token / peak FLOP/s of all devices (flops_per_token in
estimate/formulas.py).
"""

import dataclasses
import itertools
import json
import math
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.errors import counted
from nanodomino.estimate.formulas import (active_parameter_count, find_peak_flops, flops_per_token, parameter_count,
                                          peak_memory)
from nanodomino.files import open_regular_file, write_file
from nanodomino.mesh import Mesh
from nanodomino.pictures.drawing import loss_curve, svg
from nanodomino.run.determinism import tf32_in_words
from nanodomino.schedules import simulation
from nanodomino.schedules.simulation import stage_layers
from nanodomino.settings.config import Config

FEW_EPOCHS = 4           # up to 4 epochs, repeated text is almost as good as new text (2305.16264)


class Report:
    """Prints and stores the progress of a run, if `enabled`, as on rank 0. Otherwise no method does anything.
    first_step: the number of steps done before this launch. news: see Run."""

    def __init__(self, config: Config, corpus: Corpus, mesh: Mesh, run_dir: Path, first_step: int, enabled: bool,
                 news=()):
        self.config, self.corpus, self.mesh, self.run_dir, self.enabled = config, corpus, mesh, run_dir, enabled
        self.peak_flops = find_peak_flops(config, mesh.device)
        self.tokens_per_step = config.global_batch_size * config.seq_length
        self.entropies = f"(unigram {corpus.unigram_entropy:.2f}, bigram {corpus.bigram_entropy:.2f})"
        self.first_step, self.metrics, self.tensorboard = first_step, None, None
        if enabled:
            if first_step < config.train_iters or not (run_dir / "config.json").exists():
                settings = json.dumps(dataclasses.asdict(config), indent=2) + "\n"           # stored for later launches
                write_file(run_dir / "config.json", settings.encode())
            outdated = ("test_loss",)
            if first_step >= config.train_iters:               # the run only scores its weights again, or not even that
                outdated = ("test_loss", "valid_loss") if config.eval_iters else ()
            remove_outdated(path := run_dir / "metrics.jsonl", first_step, outdated)
            self.metrics = MetricsFile(path, self.say)
            if config.tensorboard_dir:                         # needs the package tensorboard
                from torch.utils.tensorboard import SummaryWriter

                # event files can only be extended; purge_step hides the points of older files that are redone
                self.tensorboard = SummaryWriter(config.tensorboard_dir, purge_step=first_step + 1)
            self.describe(news)
        self.bar = tqdm(total=config.train_iters, initial=first_step, desc="train", unit="step", dynamic_ncols=True,
                        disable=None if enabled else True)
        if enabled and self.metrics.empty:
            self.record(step=first_step, unigram_entropy=corpus.unigram_entropy, bigram_entropy=corpus.bigram_entropy,
                        tokenizer=corpus.tokenizer_name)

    def describe(self, news):
        """Print the model, the batch, the rank grid, the schedule, and what a checkpoint brings or finds changed."""
        config, mesh, first_step = self.config, self.mesh, self.first_step
        count, active = parameter_count(config), active_parameter_count(config)
        print(f"nanodomino: model {config.model}, {count:,} parameters{f' ({active:,} active)' * (active < count)}, "
              f"{config.dtype} on {mesh.device.type}; {self.corpus.tokens['train']:,} training tokens from "
              f"{self.corpus.path}")
        print(f"global batch {config.global_batch_size} x {config.seq_length} tokens = "
              f"{counted(config.microbatches, 'microbatch')} of {config.micro_batch_size} on "
              f"{'each of ' * (config.dp > 1)}{counted(config.dp, 'replica')}; slices {config.slices}, "
              f"columns {config.columns}, ZeRO stage {config.zero_stage}"
              + config.in_words + tf32_in_words(config, mesh.device))
        print(what_hides_what(config))
        for split in ("valid", "test"):
            if config.eval_iters and self.corpus.tokens[split] <= config.seq_length:
                print(f"the {split} split holds no sample of {config.seq_length} tokens, so it will have no loss; "
                      "prepare more text, or a larger split with data/prepare.py --split")
        print(mesh.picture([describe_stage(config, stage) for stage in range(mesh.pp)]))
        print(simulation.picture(config.schedule_with_settings, mesh.pp, config.microbatches, config.virtual_stages),
              flush=True)
        state = f"resuming after step {first_step} of {config.train_iters}" * (first_step > 0)
        if config.train_iters == 0:
            state = "evaluating without training, because --train-iters is 0"
        elif first_step >= config.train_iters:
            state = (f"this run has already done {counted(first_step, 'step')}, and --train-iters is "
                     f"{config.train_iters}; raise --train-iters to continue, or start a new run from these weights "
                     "with --load FOLDER --finetune")
        if state or news:
            print("; ".join(filter(None, (state, *news))), flush=True)

    def estimate(self, memory: str):
        """Say how many epochs the run trains and how much memory it needs. Warn of many epochs. memory: in words."""
        steps, windows = self.config.train_iters, max(self.corpus.tokens["train"] - 1, 1) // self.config.seq_length
        epochs = self.config.consumed_train_samples(steps) / max(windows, 1)
        digits = ".0f" if epochs >= 10 else ".2g"
        self.say(f"{counted(steps, 'step')} = {epochs:{digits}} epochs of this text; {memory}")
        if epochs > FEW_EPOCHS:
            enough = max(FEW_EPOCHS * windows // self.config.global_batch_size, 1)
            fewer = f"--train-iters {enough}, " * (enough > self.first_step)
            self.say(f"warning: after about {FEW_EPOCHS} epochs a model gains little from the same text and begins to "
                     f"memorize it; try {fewer}a smaller --global-batch-size or more text")

    def say(self, line: str):
        """Print a line above the bar."""
        if self.enabled:
            self.bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def record(self, **values):
        """Append a line to metrics.jsonl. JSON has no infinity and no NaN, so they become null."""
        values = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in values.items()}
        if self.metrics:
            self.metrics.add(values)
        try:
            if self.tensorboard:
                for name, value in values.items():
                    if name != "step" and isinstance(value, (int, float)):
                        self.tensorboard.add_scalar(name, value, values["step"])
                self.tensorboard.flush()
        except Exception as error:                             # such as a full disk, which must not end training
            self.tensorboard = None
            self.say(f"warning: --tensorboard-dir can't be written ({error}); training continues")

    def step(self, step: int, result, learning_rate: float, seconds: float):
        """Report a finished step. result: its StepResult; seconds: the time it took."""
        speed = self.tokens_per_step / seconds
        mfu = speed * flops_per_token(self.config) / self.peak_flops if self.peak_flops else None
        shown = step % self.config.log_interval == 0 or step == self.first_step + 1
        counts, words = self.config.step_report(result)
        self.record(step=step, loss=result.loss, grad_norm=result.grad_norm, lr=learning_rate,
                    tokens=self.config.consumed_train_samples(step) * self.config.seq_length,
                    step_ms=seconds * 1000, tokens_per_second=speed, mfu=mfu, skipped=result.skipped,
                    loss_scale=result.loss_scale,
                    **{name: value for name, value in counts.items() if shown or not isinstance(value, dict)})
        self.bar.set_postfix(loss=f"{result.loss:.3f}", tokens_per_second=f"{speed:,.0f}", refresh=False)
        self.bar.update()
        loss_scale = f" | loss scale {result.loss_scale:g}" if self.config.dtype == "float16" else ""
        if result.skipped:
            what = "the gradient norm" if math.isfinite(result.loss) else "the loss"
            self.say(f"step {step:5d} | skipped, because {what} is not finite | loss {result.loss:.4f} | "
                     f"grad norm {result.grad_norm:.3f}{loss_scale}")
        elif shown:
            self.say(f"step {step:5d} | loss {result.loss:.4f} {self.entropies} | grad norm {result.grad_norm:.3f} | "
                     f"lr {learning_rate:.2e} | {seconds * 1000:.0f} ms | {speed:,.0f} tokens/s | "
                     f"mfu {'n/a' if mfu is None else f'{mfu:.1%}'}{loss_scale}{words}")

    def losses(self, step: int, split: str, loss: float, tokens: int, windows: int):
        """Report the mean loss, perplexity and bits per byte of the `tokens` labels that count in the first `windows`
        windows of a split, "valid" or "test"."""
        perplexity = math.exp(min(loss, 700.0))
        size = self.corpus.text_bytes(split, windows * self.config.seq_length) if self.enabled else None
        bits_per_byte = loss / math.log(2) * tokens / size if size else None
        self.record(step=step, **{f"{split}_loss": loss, f"{split}_perplexity": perplexity,
                                  f"{split}_bits_per_byte": bits_per_byte, f"{split}_tokens": tokens})
        self.say(f"step {step:5d} | {split} loss {loss:.4f} {self.entropies} | perplexity {perplexity:.2f}"
                 + (f" | {bits_per_byte:.4f} bits per byte" if bits_per_byte is not None else "")
                 + f" | {tokens:,} of {counted(self.corpus.tokens[split], 'token', ',')}")

    def draw_curve(self):
        """Draw loss.svg again, if matplotlib is installed. Never raises: a failure must not end training."""
        if self.metrics and find_spec("matplotlib"):
            try:
                write_file(self.run_dir / "loss.svg", svg(loss_curve, [self.run_dir]).encode())
            except Exception as error:
                self.say(f"warning: loss.svg can't be drawn: {error}; training continues")

    def end(self, step: int, seconds: float):
        self.bar.close()
        self.draw_curve()
        if not find_spec("matplotlib"):
            self.say("the loss curve is not drawn, because matplotlib is not installed; after pip install matplotlib, "
                     f"python -m nanodomino.pictures {self.run_dir} draws it")
        lost = [name for name in ("config.json", "metrics.jsonl", "checkpoints") if not (self.run_dir / name).exists()]
        self.say(f"{step} of {max(step, self.config.train_iters)} steps done, {seconds:.1f} s, peak memory of rank 0 "
                 f"{peak_memory(self.mesh.device) / 2**20:,.0f} MiB, everything in {self.run_dir}"
                 + f", except {' and '.join(lost)}, which another program has deleted or moved" * bool(lost))


def describe_stage(config: Config, stage: int) -> str:
    """Return what a pipeline stage holds, chunk by chunk: 'embedding, layers 0 to 3; layers 8 to 11'."""
    placement, chunks, behind_head = config.placement, [], config.behind_head
    for virtual_stage in (placement.virtual_stage(stage, chunk) for chunk in range(placement.chunks)):
        layers = stage_layers(config.num_layers, virtual_stage, placement.last + 1, behind_head.layers)
        chunks.append(("embedding, " if virtual_stage == 0 else "")
                      + (f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
                      + (f", head{behind_head.in_words and ', '}{behind_head.in_words}"
                         if virtual_stage == placement.last else ""))
    return "; ".join(chunks)


def what_hides_what(config: Config) -> str:
    """Return, in a sentence, which work runs while a collective within a layer is in flight."""
    reduce = "gather and reduce" if config.sequence_shards > 1 else "all-reduce"
    sent = " and ".join([reduce] * (config.tp > 1) + [*dict.fromkeys(config.sent_by_branches)])
    if not sent:
        return "overlap: without tensor parallelism a layer sends nothing, so there is nothing to hide"
    halves = [action.halves for row in config.timetable.rows for action in row]
    only = f" (only the {reduce})" * (sent != reduce)
    hidden_by = [work for applies, work in (
        (config.slices == 2, "the other slice's compute"), (config.slices > 2, "the other slices' compute"),
        (any(len(half) > 1 for half in halves), "another microbatch's compute"),
        (config.columns > 1 and config.tp > 1, f"the matmul of the next columns{only}")) if applies]
    weight_gradients = all(half.kind != "weight_backward" for group in halves for half in group)
    begin = f"overlap: each {'slice' if config.slices > 1 else 'layer'}'s {sent} is hidden by "
    if not hidden_by:
        return (begin + "nothing in forward" + " and by weight gradients in backward" * weight_gradients
                + "; try" + " --micro-batch-size 2" * (config.micro_batch_size == 1) + " --slices 2"
                + ", or --columns 2" * (config.tp > 1))
    return begin + " and ".join(hidden_by) + ", in backward also by weight gradients" * weight_gradients


# ---- metrics.jsonl

class MetricsFile:
    """Appends lines to metrics.jsonl; while the disk is full, they wait in memory. say(line): prints a warning."""

    def __init__(self, path: Path, say):
        self.say, self.unwritten = say, b""
        self.file = open_regular_file(path, "ab", 0)
        self.empty = not os.fstat(self.file.fileno()).st_size

    def add(self, values: dict):
        """Append a line, or keep it for the next call if that fails."""
        first, self.unwritten = not self.unwritten, self.unwritten + json.dumps(values).encode() + b"\n"
        try:
            while self.unwritten:                              # write() can store a part and return its size
                self.unwritten = self.unwritten[self.file.write(self.unwritten):]
        except OSError as error:
            if first:
                self.say(f"warning: metrics.jsonl can't be written: {error}; training continues")


def remove_outdated(path: Path, first_step: int, outdated=("test_loss",), say=print):
    """Leave only the lines in metrics.jsonl that a run with `first_step` steps done continues. A killed run may have
    written lines of steps after its last checkpoint, and half a line at the end. outdated: the losses of step
    `first_step` that the run will score again. A run that starts over keeps its old file under another name."""
    with open_regular_file(path, "a+b") as file:               # makes the file if there is none
        file.seek(0)
        lines = file.readlines()
    if not first_step and len(lines) > 1:                      # else it was killed before its first step
        copy = next(name for number in itertools.count(1)
                    if not os.path.lexists(name := path.with_name(f"metrics-{number:03d}.jsonl")))
        path.rename(copy)
        say(f"this run starts over from step 0; the metrics of its previous start are in {copy}")
    current = []
    for line in lines:
        if first_step and current_values(line, first_step, outdated):
            current.append(line)
    if len(current) < len(lines):
        write_file(path, current)


def current_values(line: bytes, first_step: int, outdated=()) -> dict | None:
    """Return the values of a complete line of a step up to first_step; None for other lines and for outdated losses."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        values = json.loads(line, parse_int=float)             # an int of 400 digits would not become a float later
        if line.endswith(b"\n") and values["step"] <= first_step:
            return None if values["step"] == first_step and values.keys() & {*outdated} else values
    return None
