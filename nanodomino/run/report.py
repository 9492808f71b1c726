"""Prints the progress of a run and stores it in the run's folder. Only rank 0 does so.

    start     the model, the rank grid and the schedule on the terminal; config.json
    step      a tqdm bar, a line every --log-interval steps; one JSON object per step in metrics.jsonl
    losses    validation and test loss, next to the unigram and bigram entropy of the text, which a model must beat;
              perplexity = exp(loss), bits per byte of the scored text, and how many tokens of the split were scored
    curve     loss.svg, drawn at the end, and at checkpoints at least ten seconds apart; TensorBoard's, with a flag

MFU is model FLOPs utilization: tokens per second x FLOPs per token / peak FLOP/s of all devices.
"""

import dataclasses
import json
import math
import sys
import time
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
from nanodomino.schedules.simulation import describe_stage, picture
from nanodomino.settings.config import Config


class Report:
    """Prints and stores the progress of a run, if `enabled`, as on rank 0. Otherwise no method does anything.
    first_step: the number of steps done before this launch. news: see Run. memory: how much is needed, in words."""

    def __init__(self, config: Config, corpus: Corpus, mesh: Mesh, run_dir: Path, first_step: int, enabled: bool,
                 news=(), memory=""):
        self.config, self.corpus, self.mesh, self.run_dir, self.enabled = config, corpus, mesh, run_dir, enabled
        self.peak_flops = find_peak_flops(config, mesh.device)
        self.entropies = f"(unigram {corpus.unigram_entropy:.2f}, bigram {corpus.bigram_entropy:.2f})"
        self.first_step, self.tokens_per_step = first_step, config.global_batch_size * config.seq_length
        self.drawn_at, self.warnings, self.metrics, self.tensorboard = time.monotonic(), set(), None, None
        if enabled:
            finished = first_step >= config.train_iters
            if not finished or not (run_dir / "config.json").exists():
                write_file(run_dir / "config.json", json.dumps(dataclasses.asdict(config), indent=2).encode() + b"\n")
            rescored = {"test_loss", *["valid_loss"] * finished} if config.eval_iters else set()
            self.metrics = continue_metrics(run_dir / "metrics.jsonl", first_step, rescored)
            if config.tensorboard_dir:                         # needs the package tensorboard
                from torch.utils.tensorboard import SummaryWriter

                # event files can only be extended; purge_step hides the points of older files that are redone
                self.tensorboard = SummaryWriter(config.tensorboard_dir, purge_step=first_step + 1)
            self.describe(news, memory)
        self.bar = tqdm(total=config.train_iters, initial=first_step, desc="train", unit="step", dynamic_ncols=True,
                        disable=None if enabled else True)
        if enabled and not self.metrics.tell():
            self.record(step=first_step, unigram_entropy=corpus.unigram_entropy, bigram_entropy=corpus.bigram_entropy,
                        tokenizer=corpus.tokenizer_name)

    def describe(self, news, memory: str):
        """Print the model, the batch, the rank grid, the schedule, and what a checkpoint brings or finds changed."""
        config, mesh, done, steps = self.config, self.mesh, self.first_step, self.config.train_iters
        count, active, tokens = parameter_count(config), active_parameter_count(config), self.corpus.tokens
        lines = [
            f"nanodomino: model {config.model}, {count:,} parameters{f' ({active:,} active)' * (active < count)}, "
            f"{config.dtype} on {mesh.device.type}; {tokens['train']:,} training tokens from {self.corpus.path}",
            f"global batch {config.global_batch_size} x {config.seq_length} tokens = "
            f"{counted(config.microbatches, 'microbatch')} of {config.micro_batch_size} on "
            f"{'each of ' * (config.dp > 1)}{counted(config.dp, 'replica')}; slices {config.slices}, columns "
            f"{config.columns}, ZeRO stage {config.zero_stage}{config.in_words}",
            what_hides_what(config),
            *(f"the {split} split holds no sample of {config.seq_length} tokens, so it will have no loss"
              for split in ("valid", "test") if config.eval_iters and tokens[split] <= config.seq_length),
            mesh.picture([describe_stage(config, stage) for stage in range(mesh.pp)]),
            picture(config.schedule_with_settings, mesh.pp, config.microbatches, config.virtual_stages)]
        state = f"resuming after step {done} of {steps}" * (done > 0)
        if steps == 0:
            state = "evaluating without training, because --train-iters is 0"
        elif done >= steps:
            state = (f"this run has already done {counted(done, 'step')}, and --train-iters is {steps}; raise it to "
                     "continue, or start a new run from these weights with --load FOLDER --finetune")
        lines.append("; ".join(filter(None, (state, *news))))
        if done < steps:
            epochs = config.consumed_train_samples(steps) / ((tokens["train"] - 1) // config.seq_length)
            lines.append(f"{counted(steps, 'step')} = {format(epochs, '.0f' if epochs >= 10 else '.2g')} epochs of "
                         f"this text{' (more than 4 teach little: arXiv 2305.16264)' * (epochs > 4)}; {memory}")
        print("\n".join(filter(None, lines)), flush=True)

    def say(self, line: str):
        """Print a line above the bar."""
        if self.enabled:
            self.bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def attempt(self, name: str, write, *arguments):
        """Call write(*arguments). A failure, such as a full disk, is one warning and does not end training."""
        try:
            write(*arguments)
        except Exception as error:
            warning = f"warning: {name} can't be written ({error}); training continues"
            if warning not in self.warnings:
                self.say(warning)
            self.warnings.add(warning)

    def record(self, **values):
        """Append a line to metrics.jsonl. JSON has no infinity and no NaN, so they become null."""
        values = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in values.items()}
        if self.metrics:
            self.attempt("metrics.jsonl", self.metrics.write, json.dumps(values).encode() + b"\n")
        if self.tensorboard:
            for name in [name for name, value in values.items() if isinstance(value, (int, float)) and name != "step"]:
                self.attempt("--tensorboard-dir", self.tensorboard.add_scalar, name, values[name], values["step"])
            self.attempt("--tensorboard-dir", self.tensorboard.flush)

    def step(self, step: int, result, learning_rate: float, seconds: float):
        """Report a finished step. result: its StepResult; seconds: the time it took."""
        speed = self.tokens_per_step / seconds
        mfu = speed * flops_per_token(self.config) / self.peak_flops if self.peak_flops else None
        shown = step % self.config.log_interval == 0 or step == self.first_step + 1
        counts, words = self.config.step_report(result)
        self.record(step=step, loss=result.loss, grad_norm=result.grad_norm, lr=learning_rate,
                    tokens=self.config.consumed_train_samples(step) * self.config.seq_length, step_ms=seconds * 1000,
                    tokens_per_second=speed, mfu=mfu, skipped=result.skipped, loss_scale=result.loss_scale,
                    **{name: value for name, value in counts.items() if shown or not isinstance(value, dict)})
        self.bar.set_postfix(loss=f"{result.loss:.3f}", tokens_per_second=f"{speed:,.0f}", refresh=False)
        self.bar.update()
        if shown or result.skipped:
            bad = "the gradient norm" if math.isfinite(result.loss) else "the loss"
            self.say(f"step {step:5d} | {f'skipped, because {bad} is not finite | ' * result.skipped}"
                     f"loss {result.loss:.4f} {self.entropies} | grad norm {result.grad_norm:.3f} | "
                     f"lr {learning_rate:.2e} | {seconds * 1000:.0f} ms | {speed:,.0f} tokens/s | "
                     f"mfu {'n/a' if mfu is None else f'{mfu:.1%}'}"
                     f"{f' | loss scale {result.loss_scale:g}' * (self.config.dtype == 'float16')}{words}")

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

    def draw_curve(self, pause=0.0):
        """Draw loss.svg again, if matplotlib is installed and the last drawing is at least `pause` seconds old."""
        if self.enabled and time.monotonic() - self.drawn_at >= pause and find_spec("matplotlib"):
            self.drawn_at = time.monotonic()
            self.attempt("loss.svg", lambda: write_file(self.run_dir / "loss.svg",
                                                        svg(loss_curve, [self.run_dir]).encode()))

    def end(self, step: int, seconds: float):
        self.bar.close()
        self.draw_curve()
        if not find_spec("matplotlib"):
            self.say("the loss curve is not drawn, because matplotlib is not installed; after pip install matplotlib, "
                     f"python -m nanodomino.pictures {self.run_dir} draws it")
        self.say(f"{step} of {max(step, self.config.train_iters)} steps done, {seconds:.1f} s, peak memory of rank 0 "
                 f"{peak_memory(self.mesh.device) / 2**20:,.0f} MiB, everything in {self.run_dir}")


def what_hides_what(config: Config) -> str:
    """Return, in a sentence, which work runs while a collective within a layer is in flight."""
    if config.tp == 1 and not config.sent_by_branches:
        return "overlap: without tensor parallelism a layer sends nothing, so there is nothing to hide"
    groups = [action.halves for row in config.timetable.rows for action in row]
    hidden_by = (["the compute of another slice"] * (config.slices > 1)
                 + ["the compute of another microbatch"] * any(len(halves) > 1 for halves in groups)
                 + ["the matmul of the next columns (only the reduce)"] * (config.columns > 1 and config.tp > 1))
    split = any(half.kind == "weight_backward" for halves in groups for half in halves)
    return (f"overlap: a layer's communication is hidden by {' and '.join(hidden_by) or 'nothing in forward'}"
            + ", in backward weight gradients help" * (not split) + "; try --slices 2" * (not hidden_by))


def continue_metrics(path: Path, first_step: int, rescored: set):
    """Open metrics.jsonl to append lines. Keep the lines that a run with `first_step` steps done continues. A killed
    run may have written lines of later steps, and half a line at the end. rescored: the losses of step `first_step`
    that the run will score again."""
    kept = []
    with suppress(FileNotFoundError), open_regular_file(path) as file:
        for line in file if first_step else ():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                values = json.loads(line)
                if values["step"] <= first_step - bool(values.keys() & rescored) and line.endswith(b"\n"):
                    kept.append(line)
    write_file(path, b"".join(kept))
    return open_regular_file(path, "ab", buffering=0)
