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
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from data.prepare import DEFAULT_CORPUS, check_unchanged, prepare_default_corpus
from nanodomino.checkpoint.format import step_of
from nanodomino.checkpoint.load import newest_intact_checkpoint, recorded_settings, restore
from nanodomino.checkpoint.save import Saver
from nanodomino.comm.device import choose_kernels, find_device
from nanodomino.comm.trace import Trace
from nanodomino.comm.world import LaunchInfo, from_rank_0, start_world
from nanodomino.corpus.prepared_folder import Corpus, load_corpus
from nanodomino.errors import NotFinite, UserError, counted, import_optional, require
from nanodomino.estimate.stages import require_memory
from nanodomino.files import read_json
from nanodomino.generate.generation import generate
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.model import GPT
from nanodomino.run.failures import Watchdog
from nanodomino.run.folder import open_run
from nanodomino.run.report import Report
from nanodomino.settings.config import Config
from nanodomino.settings.flags import Parser, add_flags, expand_home, flag_settings, names_affecting
from nanodomino.settings.records import check_record, remembered_settings, taken_over
from nanodomino.settings.rules import check_needs
from nanodomino.pictures.drawing import draw_timeline

PROMPT_TOKENS = 32       # length of the prompt, taken from the validation text, for the sample at the end


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
    requested = read_settings(Path(flags["config"])) | flags if "config" in flags else flags
    run = recorded_settings(Path(requested["run_dir"])) if requested.get("run_dir") else None
    remembered, loaded, given = {}, None, {name for name, value in requested.items() if value is not None}
    if run:
        remembered = remembered_settings(check_record(run, requested["run_dir"]))
        given |= {*(run.get("given") or ())} - requested.keys()
    elif requested.get("load") and (loaded := recorded_settings(Path(requested["load"]))):
        remembered = taken_over(check_record(loaded, requested["load"]), requested.get("finetune"))
        given |= remembered.keys()
        longer = (requested.get("seq_length") or 0) > remembered.get("max_position_embeddings", 0)
        if longer and requested.get("finetune") and remembered.get("position_embedding_type") != "learned_absolute":
            remembered.pop("max_position_embeddings", None)    # no weight depends on it
    remembered["trained_positions"] = (run or loaded or {}).get("trained_positions")
    given -= set(names_affecting(Config, "launch"))
    config = Config(**remembered | requested, given=tuple(sorted(given))).resolve(world_size)
    check_needs(config, flags)
    return config


def read_settings(path: Path) -> dict:
    """Return the settings in a JSON file. null restores a default, even if the run remembers another value. The program
    writes `given` into a run's config.json. In a file without it, a user has given all settings. Raises UserError."""
    record = {name: expand_home(value) for name, value in check_record(read_json(path), f"--config {path}").items()}
    unset = {setting.name: setting.default for setting in flag_settings(Config)
             if setting.name in record and record[setting.name] is None}
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
    """Holds what a run has besides model and optimizer. done: the number of finished steps; step: the latest to start.
    program: the module train.py, whose dataset_builder reads the data, and whose train_step is run dry to estimate
    memory."""

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
                "the same flags and data")
        self.run = run = from_rank_0(run)
        self.config = dataclasses.replace(config, sample_offset=run.sample_offset)
        self.starts_from_weights = run.weights_only            # of another run, without its optimizer state
        self.trace = Trace(device, recording=False)
        self.watchdog = Watchdog(launch, device, config.timeout)
        self.on_action = self.watchdog.mark
        self.done = self.step = 0
        self.loss, self.last_good = 0.0, -1    # of the latest step; the weights after step last_good had a finite loss
        self.stopped = self.stopped_by_signal = False

    def load(self, model, optimizer):
        """Load the checkpoint to start from, if there is one, and begin to report."""
        config, run = self.config, self.run
        if run.checkpoint:
            self.done = restore(run.checkpoint, model, optimizer, self.mesh, run.weights_only)
            self.last_good = (step_of(run.checkpoint) or 0) - optimizer.skipped_in_a_row - 1
        self.saver = Saver(run.folder, self.mesh, config.keep_last, config.timeout)
        self.report = Report(config, self.corpus, self.mesh, run.folder, self.done, dist.get_rank() == 0, run.news,
                             self.memory)

    def steps(self):
        """Yield the number of each step until the run ends or is asked to stop."""
        self.watchdog.say, self.watchdog.to_save, self.start_time = self.report.say, True, time.perf_counter()
        if self.mesh.device.type == "cuda":                    # a long garbage collection would let the GPU run dry
            gc.freeze()
        while self.done < self.config.train_iters and not self.stopped:
            if failure := self.saver.failure():
                self.report.say(f"warning: {failure}; training continues")
            self.step = self.watchdog.step = self.done + 1
            self.step_start = time.perf_counter()
            self.trace.recording = self.step in self.config.traced_steps
            yield self.step
        self.saver.wait()
        if failure := self.saver.failure():                    # fatal, since no later checkpoint follows
            raise UserError(f"{failure}; free some disk space and start again to resume from the last checkpoint")
        self.watchdog.to_save = False                          # everything is saved

    def stop_requested(self) -> bool:
        """Return whether this rank has received a signal to stop."""
        return self.watchdog.signal > 0

    def after_step(self, result, learning_rate: float, optimizer):
        """Report a finished step, draw its timeline, and decide whether to stop. Raises UserError if too many steps in
        a row were skipped. result: its StepResult."""
        config, step, self.trace.recording = self.config, self.step, False
        self.done, self.stopped_by_signal, self.loss = step, result.stop, result.loss
        self.last_good = min(self.last_good, step - 1) if result.skipped else step - 1
        self.stopped = result.stop or (config.exit_interval is not None and step % config.exit_interval == 0)
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
        config, loaded = self.config, None if self.step else self.run.checkpoint
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
        """Report the loss on a split, if the run has the split. evaluate(dataset, whole) scores the whole split or,
        during training, its first batches."""
        if split in self.datasets and self.config.eval_iters:
            whole = not 0 < self.done < self.config.train_iters
            loss, tokens, windows = evaluate(self.datasets[split], whole)
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
        self.report.draw_curve()

    def end_early(self) -> int:
        """Report a run that was asked to stop. Returns the exit code."""
        self.report.end(self.done, time.perf_counter() - self.start_time)
        self.report.say(f"stopped early after saving the checkpoint of step {self.done}; --run-dir {self.run.folder} "
                        "resumes from it")
        return 128 + (self.watchdog.signal or signal.SIGTERM) if self.stopped_by_signal else 0

    def end(self, model) -> int:
        """Report the end of the run and print a sample. Returns the exit code."""
        self.report.end(self.done, time.perf_counter() - self.start_time)
        self.watchdog.watching = False                         # the other replicas may wait long for the sample
        if not math.isfinite(self.loss):
            raise self.not_finite(f"the loss of step {self.done} is {self.loss}; ")
        if self.config.sample_tokens:
            dataset = self.datasets.get("valid", self.datasets["train"])
            write_sample(model, self.config, self.corpus, dataset, self.mesh)
        return 0


def write_sample(model, config: Config, corpus: Corpus, dataset, mesh: Mesh):
    """Let the first replica continue the first tokens of a split, and print the text. If an option spreads a replica's
    weights over several ranks of the dp group, these generate the same text. Raises NotFinite."""
    _, index = mesh.axis("dp")
    if index < max([1, *(mesh.axis(name)[0] for name in config.groups_that_generate_together)]):
        prompt = dataset.batch(0, 0, 0, 1, 1, 1, shuffle=False).tokens[0, :PROMPT_TOKENS].tolist()
        tokens = generate(model, mesh, prompt, config.sample_tokens, corpus.vocab_size, config.temperature,
                          config.top_k, config.seed, end_of_text=corpus.end_of_text)
        if index == 0:
            decode = corpus.tokenizer().decode
            print(f"---- a sample (temperature {config.temperature}, top-k {config.top_k}); the "
                  f"first {len(prompt)} tokens are the prompt\n"
                  f"{decode(prompt)}|{decode(tokens[len(prompt):])}\n----", flush=True)


def drift_warning(model: GPT, mesh: Mesh) -> str:
    """Return a warning that names parameters whose copies differ in a bit; "" if all copies are equal. All ranks must
    call this together, and get the same text.

    Every parameter has a copy on each replica (dp), an expert only on replicas that hold it. A parameter that is not
    sharded has a copy on each tensor-parallel rank too, a tied embedding one on the first and one on the last stage.
    With ZeRO, the copies over dp are equal by construction, because one owner updates each part and all-gathers it. All
    other copies apply equal gradients, which are equal only if kernels are deterministic. No loss shows a difference.
    """
    own = {(name, *(mesh.axis(axis)[1] for axis in weight.spec.kind.shards)): torch.hash_tensor(weight.detach()).item()
           for name, weight in model.named_parameters()}       # {(name, shard): hash}
    everyone, found = [None] * dist.get_world_size(), defaultdict(set)
    dist.all_gather_object(everyone, own)
    for copy, value in (item for hashes in everyone for item in hashes.items()):
        found[copy].add(value)
    drifted = sorted({name for (name, *_), hashes in found.items() if len(hashes) > 1})
    return (f"copies of {counted(len(drifted), 'parameter')} have drifted apart ({', '.join(drifted[:3])}), so the "
            "ranks train slightly different models; a run resumed from this checkpoint has equal copies again; try "
            "--deterministic-mode or --no-compile") if drifted else ""
