"""Does everything around the training loop: what comes before the first step, and what happens between two steps.

open_session() turns a command line into a Session. Checks that need no other rank come first, so that most mistakes end
the run before any rank communicates. Each setting comes from the first of these sources that has it:

    flags  >  --config FILE  >  config.json of the resumed run  >  what --load takes over  >  defaults

So `train.py --run-dir runs/mine` alone resumes a run as it was. Some settings must not change when a run is resumed
(EFFECTS in settings/flags.py). folder.py checks them, once it has found the checkpoint.
"""

import argparse
import dataclasses
import gc
import math
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from data.prepare import DEFAULT_CORPUS, check_unchanged, prepare_default_corpus
from nanodomino.checkpoint.format import step_of
from nanodomino.checkpoint.load import newest_intact_checkpoint, recorded_settings, restore
from nanodomino.checkpoint.save import Saver, drift_warning
from nanodomino.comm.device import choose_kernels, find_device
from nanodomino.comm.trace import Trace
from nanodomino.comm.world import LaunchInfo, from_rank_0, start_world
from nanodomino.corpus.prepared_folder import Corpus, load_corpus
from nanodomino.errors import NotFinite, UserError, counted, import_optional, require
from nanodomino.estimate.stages import require_memory
from nanodomino.files import read_json
from nanodomino.generate.generation import write_sample
from nanodomino.mesh import make_mesh
from nanodomino.run.failures import Watchdog
from nanodomino.run.folder import open_run
from nanodomino.run.report import Report
from nanodomino.settings.config import Config
from nanodomino.settings.flags import Parser, add_flags, expand_home, flag_settings, names_affecting
from nanodomino.settings.records import check_record, remembered_settings, taken_over
from nanodomino.settings.rules import check_needs
from nanodomino.pictures.drawing import draw_timeline


def command_line_parser() -> Parser:
    """Return the parser of train.py, whose result lacks flags that are not given."""
    parser = Parser("python train.py", description="Pre-train a GPT over tensor x pipeline x data parallel processes.",
                    usage="train.py [flags], alone or under torchrun", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    add_flags(parser, flag_settings(Config))
    return parser


def from_command_line(arguments: list[str], world_size: int) -> Config:
    """Return the resolved Config of a command line. Raises UserError."""
    flags = vars(command_line_parser().parse_args(arguments))
    requested = (read_settings(Path(flags["config"])) if "config" in flags else {}) | flags
    records = {name: recorded_settings(Path(requested[name])) for name in ("run_dir", "load") if requested.get(name)}
    source = next(filter(records.get, records), None)          # a run's own settings are newer than what it has loaded
    record = check_record(records[source], requested[source]) if source else {}
    resumed, finetune = source == "run_dir", requested.get("finetune")
    remembered = remembered_settings(record) if resumed else taken_over(record, finetune)
    given = {name for name, value in requested.items() if value is not None}
    given |= {*((record.get("given") or ()) if resumed else remembered)} - requested.keys()
    longer = (requested.get("seq_length") or 0) > remembered.get("max_position_embeddings", 0)
    if longer and finetune and not resumed and remembered.get("position_embedding_type") != "learned_absolute":
        remembered.pop("max_position_embeddings", None)        # no weight depends on it
    remembered["trained_positions"] = record.get("trained_positions")
    given -= set(names_affecting(Config, "launch"))
    config = Config(**remembered | requested, given=tuple(sorted(given))).resolve(world_size)
    check_needs(config, flags)
    return config


def read_settings(path: Path) -> dict:
    """Return the settings in a JSON file. null restores a default, even if the run remembers another value. The program
    writes `given` into a run's config.json. In a file without it, a user has given all settings. Raises UserError."""
    record = {name: expand_home(value) for name, value in check_record(read_json(path), f"--config {path}").items()}
    unset = {setting.name: setting.default for setting in flag_settings(Config) if record.get(setting.name, 0) is None}
    return unset | (remembered_settings(record) if "given" in record else
                    {name: value for name, value in record.items() if value is not None})


def find_corpus(config: Config, launch: LaunchInfo) -> Corpus:
    """Load the prepared data. If the default data is missing, the first process of each host prepares it first."""
    folder = Path(config.data_path or DEFAULT_CORPUS)
    while not (config.data_path or folder.exists()):           # if it fails, torchrun ends the processes that wait
        if launch.local_rank == 0:
            prepare_default_corpus(folder)
        time.sleep(0.2)
    return load_corpus(folder)


@contextmanager
def open_session(arguments: list[str], launch: LaunchInfo, program):
    """Yield a Session, and leave the process groups after it. Raises UserError. program: see Session."""
    session = Session(arguments, launch, program)
    with session.watchdog:
        yield session
        dist.barrier()                                         # so that none disconnects while another communicates
    dist.destroy_process_group()


class Session:
    """Holds what a run has besides model and optimizer. done: the number of finished steps. program: the module
    train.py, whose dataset_builder reads the data, and whose train_step is run dry to estimate memory."""

    def __init__(self, arguments: list[str], launch: LaunchInfo, program):
        config = from_command_line(arguments, launch.world_size)
        device = find_device(config, launch)
        self.corpus = corpus = find_corpus(config, launch)
        if launch.local_rank == 0:                             # one process of each host, since this may read all data
            check_unchanged(corpus)
        config = dataclasses.replace(config.with_vocabulary(corpus.vocab_size).with_device(device),
                                     data_path=str(corpus.path.resolve()), data_sha256=corpus.sha256["train"])
        self.datasets = program.dataset_builder(config, corpus, device)
        if config.sample_tokens:
            corpus.tokenizer()                                 # a failure should show now, not at the end
        if config.tensorboard_dir:
            import_optional("tensorboard", "--tensorboard-dir")
        run, self.memory = None, ""                            # memory: how much the run needs, in words
        if launch.rank == 0:
            self.memory = require_memory(program, config, device, launch.local_world_size)
            run = open_run(config)
            if run.checkpoint:
                corpus.check_tokenizer_of(run.checkpoint)

        choose_kernels(config, device)
        start_world(launch, device, config.timeout)
        self.mesh = make_mesh(config.pp, config.dp, config.tp, device, config.timeout, **config.mesh_options,
                              thread_blocks=config.thread_blocks)
        same = dataclasses.replace(config, data_path=None, run_dir=None, load=None, config=None, tensorboard_dir=None)
        require(same == from_rank_0(same), f"rank {launch.rank} has other settings or data than rank 0; give all hosts "
                "the same flags and data; if one host can't compile, give all of them --no-compile")
        self.run = run = from_rank_0(run)
        self.config = dataclasses.replace(config, sample_offset=run.sample_offset)
        self.trace = Trace(device, recording=False)
        self.watchdog = Watchdog(launch, device, config.timeout)
        self.on_action = self.watchdog.mark
        self.stop_requested = lambda: self.watchdog.signal > 0         # whether this rank has received a signal
        self.done, self.loss, self.last_good = 0, 0.0, -1      # the weights after step last_good had a finite loss
        self.stopped = self.stopped_by_signal = False

    def load(self, model, optimizer):
        """Load the checkpoint to start from, if there is one, and begin to report."""
        run = self.run
        if run.checkpoint:
            self.done = restore(run.checkpoint, model, optimizer, self.mesh, run.weights_only)
            self.last_good = (step_of(run.checkpoint) or 0) - optimizer.skipped_in_a_row - 1
        self.saver = Saver(run.folder, self.mesh, self.config.keep_last, self.config.timeout)
        self.report = Report(self.config, self.corpus, self.mesh, run.folder, self.done, dist.get_rank() == 0, run.news,
                             self.memory)

    def steps(self):
        """Yield the number of each step until the run ends or is asked to stop."""
        self.watchdog.say, self.watchdog.to_save, self.start_time = self.report.say, True, time.perf_counter()
        if self.mesh.device.type == "cuda":                    # a long garbage collection would let the GPU run dry
            gc.freeze()
        while self.done < self.config.train_iters and not self.stopped:
            if failure := self.saver.failure():
                self.report.say(f"warning: {failure}; training continues")
            self.watchdog.step, self.step_start = self.done + 1, time.perf_counter()
            self.trace.recording = self.watchdog.step in self.config.traced_steps
            yield self.watchdog.step
        self.saver.wait()
        if failure := self.saver.failure():                    # fatal, since no later checkpoint follows
            raise UserError(f"{failure}; free some disk space and start again, from the last checkpoint if any")
        self.watchdog.to_save = False                          # everything is saved

    def after_step(self, result, learning_rate: float, optimizer):
        """Report a finished step, draw its timeline, and decide whether to stop. Raises UserError if too many steps in
        a row were skipped. result: its StepResult."""
        config, step, self.trace.recording = self.config, self.watchdog.step, False
        self.done, self.stopped_by_signal, self.loss = step, result.stop, result.loss
        self.last_good = min(self.last_good, step - 1) if result.skipped else step - 1
        self.stopped = result.stop or step < config.train_iters and step % (config.exit_interval or math.inf) == 0
        self.report.step(step, result, learning_rate, time.perf_counter() - self.step_start)
        if step in config.traced_steps and (step == config.traced_steps[-1] or self.stopped):
            self.report.say(draw_timeline(self.trace, self.mesh, self.run.folder / f"trace-{step:08d}"))
        if optimizer.skipped_in_a_row >= config.max_skipped_steps:
            raise self.not_finite(f"{counted(optimizer.skipped_in_a_row, 'step')} in a row, up to step {step}, had a "
                                  f"loss or gradient that is not finite; {optimizer.loss_scale.advice()}")

    def not_finite(self, problem: str) -> NotFinite:
        """Return an error with the command that goes on from the last good checkpoint, whose weights are finite and
        gave a finite loss, of this run or, before its first step, of the loaded one. All ranks call this together."""
        self.saver.wait()                                      # a checkpoint may still be being written
        self.report.draw_curve()
        self.watchdog.watching = False                         # rank 0 may read large checkpoints for long
        config, loaded = self.config, None if self.watchdog.step else self.run.checkpoint
        folder = loaded.absolute().parent.parent if loaded else self.run.folder
        good = from_rank_0(dist.get_rank() == 0 and newest_intact_checkpoint(folder, print, self.last_good))
        lr = min(config.lr / 10, config.preset["lr"])
        return NotFinite(problem + (
            f"go on from the last good checkpoint with train.py --load {good} --train-iters {config.train_iters} --lr "
            f"{lr:g}" if good else f"start again with a smaller --lr than {config.lr:g}"))

    def time_to(self, interval: int) -> bool:
        """Return whether the finished step is the last one or a multiple of `interval`."""
        return self.done % interval == 0 or self.done == self.config.train_iters

    def report_loss(self, split: str, evaluate):
        """Report the loss on a split, if there is one. evaluate(dataset, whole) scores it all, or its first batches."""
        if split in self.datasets and self.config.eval_iters:
            whole = not 0 < self.done < self.config.train_iters
            self.report.bar.set_description(f"score {split}")
            loss, tokens, windows = evaluate(self.datasets[split], whole)
            self.report.bar.set_description("train", refresh=False)
            self.report.losses(self.done, split, loss, tokens, windows)
            if whole and not math.isfinite(loss):
                raise self.not_finite(f"the {split} loss of step {self.done} is {loss}; ")

    def save(self, model, optimizer):
        """Start to save a checkpoint, but not of weights that are not finite: the run resumes from its newest one.
        Warn if copies of a parameter have drifted apart. Raises NotFinite."""
        ends = torch.stack([end for weight in model.parameters() for end in weight.detach().aminmax()])
        dist.all_reduce(bad := ends.isfinite().logical_not().sum())      # an int64 on all ranks, whatever their dtypes
        if bad > 0:
            raise self.not_finite(f"the weights after step {self.done} are not finite and were not saved; ")
        if warning := drift_warning(model, self.mesh):
            self.report.say(f"warning: {warning}")
        self.saver.save(self.done, model, optimizer, self.config)
        self.report.draw_curve(pause=10.0)

    def end(self, model) -> int:
        """Report the end of the run and, unless the run was asked to stop, print a sample. Returns the exit code."""
        self.report.end(self.done, time.perf_counter() - self.start_time)
        if self.stopped:
            self.report.say(f"stopped early after saving the checkpoint of step {self.done}; --run-dir "
                            f"{self.run.folder} resumes from it")
            return 128 + (self.watchdog.signal or signal.SIGTERM) if self.stopped_by_signal else 0
        self.watchdog.watching = False                         # the other replicas may wait long for the sample
        if not math.isfinite(self.loss):
            raise self.not_finite(f"the loss of step {self.done} is {self.loss}; ")
        if self.config.sample_tokens:
            write_sample(model, self.corpus, self.datasets.get("valid", self.datasets["train"]))
        return 0
