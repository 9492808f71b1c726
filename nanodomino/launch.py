"""How a run begins and how it ends, well or badly.

Begin: everything that can be wrong is found before a process group forms, by every rank alike; then the run's folder
is found or made, with the newest sound checkpoint in it.

End: a run may be told to stop (SIGTERM, Ctrl-C), lose a rank (kill -9, out of memory), or wait for one that hangs.
Nobody waits for ever: a rank whose neighbour is gone gets an error from its next collective at once, one whose
neighbour is silent after --timeout seconds. torchrun ends all ranks as soon as one has ended, so the one that has
something to tell must speak first, and those that only lost a neighbour keep still for a moment.

That is what gloo does. What NCCL does instead, and who sees to it that the same holds there: watch.py.
"""

import fcntl
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from nanodomino.command import outlive_readers
from nanodomino.config import Config
from nanodomino.manifest import (SAVED, check_settings, checkpoints_of, clear_leftovers, find_checkpoint,
                                 newest_record, newest_sound, read_manifest)
from nanodomino.mesh import Place, find_place
from nanodomino.settings import UserError, require

# Words of errors that follow from another's end, in gloo's, the store's and NCCL's messages. None is shorter than it
# must be: "peer access is not supported", "the launch timed out" and NCCL's "invalid usage" are errors of one's own.
LONELY = ("closed by peer", "reset by peer", "by remote peer", "broken pipe", "pair closure", "connection refused",
          "connection was likely closed", "remote process exited", "communicator was aborted", "timed out waiting",
          "timed out after", "timed out connecting", "connect timeout", "connection timed out", "operation timed out",
          "operation timeout", "wait timeout", "socket timeout", "timeout waiting")
SPEAKING = threading.RLock()       # of the thread that ends the process; never given back


# ---- the run's folder

@dataclass(frozen=True)
class Run:
    """Where a run lives and what it starts from: a checkpoint or nothing, and of it perhaps the weights alone."""
    folder: Path
    checkpoint: Path | None
    weights_alone: bool = False


def find_run(config: Config, place: Place) -> Run:
    """Find or make the folder of this run. Raises UserError. Called by rank 0 alone."""
    run_dir = Path(config.run_dir or "runs")
    # before a folder is made for nothing; a run that has begun no longer needs what it was loaded from
    begun = place.restarted or (config.run_dir and os.path.exists(run_dir))
    loaded = None if begun else find_loaded(config)
    try:
        require(not run_dir.is_file(), f"--run-dir {run_dir} is a file; choose another name")
        if not begun:
            check_room(next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir()))
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.run_dir is None:
            run_dir = next_folder(run_dir, config.model, again=place.restarted,
                                  launch=os.environ.get("TORCHELASTIC_RUN_ID", ""))
        known = (run_dir / "config.json").exists()
        require(known or checkpoints_of(run_dir) or not (run_dir / "metrics.jsonl").exists(), f"--run-dir {run_dir} "
                "holds a metrics.jsonl but no config.json, so it is no run to go on with; choose another folder")
        # what a person sees must never end a run
        outlive_readers(OSError, f"training goes on, and {run_dir / 'metrics.jsonl'} tells of it")
        claim(run_dir)
        clear_leftovers(run_dir)
        check_room(run_dir)
        checkpoint = newest_sound(run_dir)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} can't be written to ({error.strerror}); choose another folder") from None
    if checkpoint:                                             # a run that has begun goes on with its own
        check_settings(read_manifest(checkpoint)["config"], checkpoint, config, "model", "optimizer", "run")
        return Run(run_dir, checkpoint)
    if known and (record := newest_record(run_dir)):           # killed before its first checkpoint, it may begin again
        check_settings(record, f"--run-dir {run_dir}", config, "model", "optimizer", "run")
    left = checkpoints_of(run_dir)
    require(not left and not (run_dir / SAVED).exists(),
            f"--run-dir {run_dir} has been saved before, but of the {len(left)} checkpoints that are in it now none is "
            "sound, and to begin again would cut its metrics.jsonl; bring one back, or move it all away to begin anew")
    return Run(run_dir, find_loaded(config) if begun else loaded, weights_alone=config.finetune)


def find_loaded(config: Config) -> Path | None:
    """The checkpoint that --load means, if it fits. Raises UserError."""
    if not config.load:
        return None
    checkpoint = find_checkpoint(Path(config.load))
    check_settings(read_manifest(checkpoint)["config"], checkpoint, config, "model",
                   *(() if config.finetune else ("optimizer",)))
    return checkpoint


def check_room(folder: Path):
    """Can files be made there, and filled? Better asked now than at the first write. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))


def check_shared(run_dir: Path):
    """All ranks will write there, so each looks for a file that rank 0 has just made, and makes one of its own. Raises
    UserError on all alike."""
    made = tempfile.NamedTemporaryFile(dir=run_dir, prefix=".shared-") if dist.get_rank() == 0 else None
    name, everyone, failure = [made and os.path.basename(made.name)], [None] * dist.get_world_size(), ""
    dist.broadcast_object_list(name, src=0)
    sees = os.path.exists(run_dir / name[0])
    try:
        if sees:
            check_room(run_dir)
    except OSError as error:
        failure = error.strerror
    dist.all_gather_object(everyone, (sees, failure))
    del made                                                   # and the file is gone
    blind = ", ".join(str(rank) for rank, (sees, _) in enumerate(everyone) if not sees)
    require(not blind, f"--run-dir {run_dir} is not the same folder on all hosts: what rank 0 writes there, rank "
            f"{blind} can't see; choose one on a disk that all hosts share")
    failed = ", ".join(f"{rank} ({failure})" for rank, (_, failure) in enumerate(everyone) if failure)
    require(not failed, f"--run-dir {run_dir} can't be written to by rank {failed}; choose a folder that all hosts may "
            "write to")


def claim(run_dir: Path, patience=5.0):
    """One run at a time in a folder: two would write over each other's files.

    The system lets go of the claim when this process ends, however it ends. A run whose torchrun was killed with -9 may
    still be alive, and a rank that is being restarted may need a moment to be gone.
    """
    # open as long as this process lives; a link would lead to another file
    descriptor = os.open(run_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            return
        except BlockingIOError:
            require(time.monotonic() < end,
                    f"--run-dir {run_dir} is in use by process {os.pread(descriptor, 20, 0).decode() or '?'}, which "
                    "is still training in it; end that one first, or choose another folder")
            time.sleep(0.2)
        except OSError:
            return                                             # a file system that knows no claims


def next_folder(parent: Path, name: str, again: bool, launch: str) -> Path:
    """Make parent/NAME-NUMBER with the first number that is free, also where other runs start at the same moment.

    again: torchrun has restarted this run, so the newest folder is meant that this launch has made, if it came so far;
    launch: torchrun's name for it, the same after a restart.
    """
    for folder in (sorted(parent.glob(f"{name}-[0-9]*"), key=lambda folder: (len(folder.name), folder.name),
                          reverse=True) if again else ()):
        if (folder / "launch.txt").exists() and (folder / "launch.txt").read_text() == launch:
            return folder
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        try:
            folder.mkdir()
            (folder / "launch.txt").write_text(launch)
            return folder
        except FileExistsError:
            pass


# ---- told to stop

class StopSignal:
    """SIGTERM and Ctrl-C: the first asks for a checkpoint after the step, a second one ends the process at once. `say`
    tells it, with a line, on this thread: a step may take long.

    Python runs a handler between two of its own instructions, and a rank that waits for a silent one runs none. So a
    thread listens, to which the C library's handler passes the signal's number through a pipe.
    """

    def __init__(self, say):
        self.say, self.number, self.moment = say, 0, 0.0
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.listen, args=(reader,), name="signals", daemon=True).start()

    def listen(self, reader: int):
        while number := os.read(reader, 1):
            self.handle(number[0])

    def handle(self, number: int):
        # A terminal sends Ctrl-C to torchrun too, which sends its own signal after it: the same wish.
        if self.number and time.monotonic() - self.moment > 2.0:
            os._exit(128 + number)
        if not self.number:
            self.number, self.moment = number, time.monotonic()
            self.say("stopping after this step, with a checkpoint; a second Ctrl-C ends at once")


# ---- ends

def start(main, arguments: list[str]):
    """What a launcher starts on every rank: main(arguments, place), of which the screen shows rank 0's words alone.

    main returns the exit code.
    """
    outlive_readers()
    # who speaks first, should the environment be refused: every rank of a half set one would believe to be rank 0
    numbers = [os.environ.get(name, "") for name in ("LOCAL_RANK", "RANK")]
    place = Place(local_rank=int(next(filter(str.isdecimal, numbers), 0)))
    try:
        place = find_place()
        if place.rank != 0:
            sys.stdout = open(os.devnull, "w")
        code = main(arguments, place)
    except Exception as error:
        fail(place, error)
    except KeyboardInterrupt:                                  # in training a StopSignal has taken it
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.exit(code)


def fail(place: Place, error: Exception):
    """End this process after an error; see the module's docstring for who speaks when."""
    SPEAKING.acquire()                                         # the main thread, and the one of watch.py, may come
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)          # there is no step left to finish first
    sys.stdout.flush()
    if isinstance(error, UserError):
        if place.local_rank > 0:                               # the others have most likely found the same:
            time.sleep(min(5 + place.local_rank, 13))          # the first one speaks, the next only if nobody has
        print(f"error: {error}", file=sys.stderr, flush=True)
        tell_torchrun(str(error))
        os._exit(2)
    where = f" in step {error.step}" if hasattr(error, "step") else ""
    if is_lonely(error):
        time.sleep(0.2)
        # torchrun is ending all: it knows who was the first
        if hasattr(error, "signals") and error.signals.number:
            os._exit(1)
        text, details = f"lost its neighbours{where}{silent_ranks(place)}: {error}", ""
        time.sleep(3)                                          # another rank died: let that one be heard first
    else:
        text, details = f"failed{where}: {type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    print(f"{details}rank {place.rank} {text}", file=sys.stderr, flush=True)
    tell_torchrun(f"rank {place.rank} {text}")
    os._exit(1)


def is_lonely(error: Exception) -> bool:
    """Whether it only says that another rank is gone."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LONELY)


def tell_torchrun(text: str):
    """torchrun says some thirty lines after ours, which would bury it. What stands in this file it quotes at their end,
    as the root cause."""
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": {"message": text, "extraInfo": {"timestamp": int(time.time())}}}, file)
    except (KeyError, OSError):
        pass                                                   # no torchrun, or a full disk: the text has been printed


def silent_ranks(place: Place) -> str:
    """Which ranks do not say within two seconds that they have lost their neighbours too: those that died or hang."""
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=2))
        round_ = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store.set(f"nanodomino/lonely/{round_}/{place.rank}", "")
        time.sleep(2)
        silent = [rank for rank in range(place.world_size) if not store.check([f"nanodomino/lonely/{round_}/{rank}"])]
    except (KeyError, RuntimeError):
        return ""
    return f" (dead or silent: rank {', '.join(map(str, silent))})" if silent else ""
