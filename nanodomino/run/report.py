"""What a person sees of a run, and what its folder keeps of it. Only rank 0 has a screen and a folder.

    start     the model, the rank grid, the schedule; config.json
    step      a tqdm bar, a line every log_interval; an object in metrics.jsonl
    losses    of validation and test, beside two yardsticks of the text: its unigram and bigram entropy
    board     the same as metrics.jsonl for TensorBoard, if it is asked for (board.py)
    curve     loss.svg, of what metrics.jsonl holds by then

MFU is model FLOPs utilisation (PaLM, appendix B): the FLOPs that the model needs for the tokens of a second, as a part
of what the devices could do in one, with 6 N + 12 L h s FLOPs a token.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path

from tqdm import tqdm

from nanodomino.analysis.hardware import find_peak_flops, peak_memory
from nanodomino.analysis.sizes import flops_per_token, parameter_count
from nanodomino.checkpoint.folders import recorded_settings
from nanodomino.config.config import Config
from nanodomino.config.setting import names_affecting
from nanodomino.corpus.folder import Corpus
from nanodomino.mesh import Mesh
from nanodomino.model import stage_layers
from nanodomino.overlap import recompute, sequence_parallel
from nanodomino.plot.curves import Curve, picture
from nanodomino.plot.svg import write
from nanodomino.run.tensorboard import TensorBoardWriter
from nanodomino.schedules import simulation

PATIENCE = 1.0           # seconds without a sign of life
LONG = 5.0               # seconds of a step that are worth a warning
FEW = 16                 # samples whose mean loss is a guess


class Report:
    """The screen and metrics.jsonl of a run that goes on after `first_step` steps;
    on other ranks than 0 it keeps silent."""

    def __init__(self, config: Config, corpus: Corpus, mesh: Mesh, run_dir: Path, first_step: int, speaks: bool):
        self.config, self.corpus, self.mesh, self.run_dir, self.speaks = config, corpus, mesh, run_dir, speaks
        self.peak_flops = find_peak_flops(config, mesh.device)
        self.tokens_per_step = config.global_batch_size * config.seq_length
        self.yardsticks = f"(unigram {corpus.unigram_entropy:.2f}, bigram {corpus.bigram_entropy:.2f})"
        self.metrics, self.unwritten, self.warned, self.board = None, b"", False, None
        self.moved = time.monotonic()                          # when the bar did
        if speaks:
            self.changes = changed_settings(run_dir, config) if first_step else []
            if first_step < config.train_iters or not (run_dir / "config.json").exists():
                write_config(run_dir, config)
            self.metrics = open_metrics(run_dir / "metrics.jsonl", first_step)
            self.curve = Curve(run_dir / "metrics.jsonl")
            if config.tensorboard_dir:
                self.board = TensorBoardWriter(Path(config.tensorboard_dir), run_dir / "metrics.jsonl", first_step, self.say)
            self.describe(first_step)
        self.bar = tqdm(total=config.train_iters, initial=first_step, desc="train", unit="step", dynamic_ncols=True,
                        disable=None if speaks else True)
        if speaks and not self.metrics.tell():
            self.record(step=first_step, unigram_entropy=corpus.unigram_entropy, bigram_entropy=corpus.bigram_entropy)

    def describe(self, first_step: int):
        """The model, the rank grid and the schedule, before the first step."""
        config, mesh = self.config, self.mesh
        print(f"nanodomino: model {config.model}, {parameter_count(config):,} parameters, {config.dtype} on "
              f"{mesh.device.type}; {self.corpus.tokens['train']:,} training tokens from {self.corpus.path}")
        print(f"global batch {config.global_batch_size} x {config.seq_length} tokens = {config.microbatches} "
              f"microbatch{'es' * (config.microbatches > 1)} of {config.micro_batch_size} on each of {config.dp} "
              f"replicas; slices {config.slices}, columns {config.columns}, ZeRO stage {config.zero_stage}"
              + sequence_parallel.in_words(config) + recompute.in_words(config))
        for split in ("valid", "test"):
            samples = max(self.corpus.tokens[split] - 1, 0) // config.seq_length
            if config.eval_iters and samples < FEW:
                print(f"the {split} split holds {samples} samples of {config.seq_length} tokens: "
                      + ("its loss will say little" if samples else "there will be no loss of it")
                      + "; prepare more text, or give it more with data/prepare.py --split")
        print(mesh.picture([describe_stage(config, stage) for stage in range(mesh.pp)]))
        print(simulation.picture(config.schedule, mesh.pp, config.microbatches, config.virtual_stages), flush=True)
        if first_step >= config.train_iters:
            print(f"this run has done {first_step} steps, and --train-iters is {config.train_iters}: nothing is left; "
                  "raise it to go on, or begin anew from these weights with --load FOLDER --finetune", flush=True)
        elif first_step:
            print(f"going on after step {first_step} of {config.train_iters}"
                  + "".join(f"; {change}" for change in self.changes), flush=True)

    def estimate(self, seconds: float, size: int):
        """Of a step and of the fullest rank, as step_time.py reckons: said where the first step will be waited for."""
        if seconds > LONG:
            self.say(f"a step will take about {seconds:.0f} s, and the fullest rank about {size / 1e9:.1f} GB of "
                     "memory (reckoned, within a factor of two or so)")

    def say(self, line: str):
        """A line on the screen, above the bar."""
        if self.speaks:
            self.bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def record(self, **values):
        """A line of metrics.jsonl. JSON knows no infinity and no NaN: null."""
        if self.metrics:
            values = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                      for name, value in values.items()}
            self.unwritten += json.dumps(values).encode() + b"\n"
            try:
                self.unwritten = self.unwritten[self.metrics.write(self.unwritten):]
                self.warned = False
            except OSError as error:
                # a full disk: training is worth more, and there may be room later
                if not self.warned:
                    self.say(f"warning: metrics.jsonl can't be written: {error}; training goes on")
                self.warned = True
        if self.board:
            self.board.read_on()

    def action(self, done: int, count: int):
        """A forward or backward of a microbatch is done: the bar moves within a step that takes long."""
        now = time.monotonic()
        if self.speaks and now - self.moved > PATIENCE:
            self.moved = now
            self.bar.set_postfix_str(f"in this step {done} of {count} forwards and backwards")

    def step(self, step: int, result, learning_rate: float, seconds: float):
        """result: a StepResult."""
        speed = self.tokens_per_step / seconds
        mfu = speed * flops_per_token(self.config) / self.peak_flops if self.peak_flops else None
        self.record(step=step, loss=result.loss, grad_norm=result.grad_norm, lr=learning_rate,
                    tokens=step * self.tokens_per_step, step_ms=seconds * 1000, tokens_per_second=speed,
                    mfu=mfu, skipped=result.skipped, loss_scale=result.loss_scale)
        self.bar.set_postfix(loss=f"{result.loss:.3f}", tokens_per_second=f"{speed:,.0f}", refresh=False)
        self.bar.update()
        self.moved = time.monotonic()
        scaled = f" | loss scale {result.loss_scale:g}" if self.config.dtype == "float16" else ""
        if result.skipped:
            self.say(f"step {step:5d} | skipped: loss {result.loss} or gradient norm {result.grad_norm} is not finite"
                     f"{scaled}")
        elif step % self.config.log_interval == 0 or step == 1:
            self.say(f"step {step:5d} | loss {result.loss:.4f} {self.yardsticks} | grad norm {result.grad_norm:.3f} | "
                     f"lr {learning_rate:.2e} | {seconds * 1000:.0f} ms | {speed:,.0f} tokens/s | "
                     f"mfu {'n/a' if mfu is None else f'{mfu:.1%}'}{scaled}")

    def losses(self, step: int, split: str, loss: float):
        """Of a validation or test."""
        self.record(step=step, **{f"{split}_loss": loss})
        perplexity = math.exp(min(loss, 700.0))
        self.say(f"step {step:5d} | {split} loss {loss:.4f} {self.yardsticks} | perplexity {perplexity:.2f}")
        self.draw_curve()

    def draw_curve(self):
        """loss.svg anew. Training is worth more than its picture, so nothing that goes wrong here may end it."""
        if self.metrics:
            try:
                if self.curve.read_on():
                    write(self.run_dir / "loss.svg", picture([self.curve]))
            except Exception as error:
                self.say(f"warning: loss.svg can't be drawn: {error}; training goes on")

    def end(self, step: int, seconds: float):
        self.bar.close()
        self.say(f"{step} of {max(step, self.config.train_iters)} steps done, {seconds:.1f} s, peak memory of rank 0 "
                 f"{peak_memory(self.mesh.device) / 2**20:,.0f} MiB, everything in {self.run_dir}")


def describe_stage(config: Config, stage: int) -> str:
    """What a stage holds, chunk by chunk, such as 'embedding, layers 0 to 3; layers 8 to 11'."""
    placement, held = config.placement, []
    for virtual_stage in (placement.virtual_stage(stage, chunk) for chunk in range(placement.chunks)):
        layers = stage_layers(config.num_layers, virtual_stage, placement.last + 1)
        held.append(("embedding, " if virtual_stage == 0 else "")
                    + (f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
                    + (", head" if virtual_stage == placement.last else ""))
    return "; ".join(held)


def changed_settings(run_dir: Path, config: Config) -> list[str]:
    """How a run goes on otherwise than when it was last started, such as 'lr 0.004, before 0.001'."""
    before = recorded_settings(run_dir) or {}
    return [f"{name} {getattr(config, name)}, before {before[name]}"
            for name in names_affecting(Config, "optimizer", "run", "losses", "nothing")
            if name in before and before[name] != getattr(config, name)]


def write_config(run_dir: Path, config: Config):
    """config.json, whole at any moment: a later start takes its settings from it."""
    beside = run_dir / ".config.json"
    beside.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    beside.rename(run_dir / "config.json")


def open_metrics(path: Path, first_step: int, say=print):
    """metrics.jsonl to append to, cut back to the steps that count: a run that was killed may have gone on after its
    last checkpoint, and its last line may be half a line. Cut, not written anew: a kill in between would cost the lines
    that count. A line that can't be read, with lines after it that count, stays and is named. Unbuffered."""
    lines = path.read_bytes().splitlines(keepends=True) if first_step and path.exists() else []
    kept, end, unread, bad = 0, 0, [], []
    for number, line in enumerate(lines, 1):
        end += len(line)
        try:
            values = json.loads(line)
            if values["step"] > first_step or "test_loss" in values or not line.endswith(b"\n"):
                break
            kept, bad, unread = end, bad + unread, []
        except (ValueError, KeyError, TypeError, RecursionError):
            unread.append(str(number))
    if bad:
        say(f"warning: {path} can't be read in line {', '.join(bad)}, which is left as it is")
    metrics = open(path, "ab", buffering=0)
    metrics.truncate(kept)
    metrics.seek(kept)
    return metrics
