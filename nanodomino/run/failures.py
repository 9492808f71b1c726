"""Starts a rank, and ends it: at a signal, after an error, or because another rank is dead or hangs.

**Signals.** The first SIGTERM (a scheduler), SIGINT (Ctrl-C) or SIGHUP (the terminal was closed) asks for a checkpoint
after the current step, the second ends the process at once. torchrun passes each of them on to its ranks.

**Errors.** No rank waits forever: the next collective raises at once if a peer is gone, and after --timeout seconds if
a peer hangs. torchrun kills all ranks as soon as one has failed. So the rank that knows the cause must print it first,
and ranks that have only lost a peer pause before they print:

    rank 2 raises ValueError         prints its traceback, exits          <- the message that counts
    rank 0, 1, 3 lose their peer     pause PAUSE seconds, killed by torchrun meanwhile
    all ranks find a UserError       local rank 0 prints it and exits; local rank r waits 5 + r seconds (at most 13)
    or an OSError                    and prints it only if it is still alive then

**GPUs.** gloo's collectives run on the host and raise. NCCL's run on the device. The host only enqueues them, and then
waits without end for a result that needs a dead or hanging peer. So a Watchdog ends such a rank, a little before
torch's own watchdog would, which names no rank.
"""

import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nanodomino.comm.world import LaunchInfo, read_launch_environment
from nanodomino.errors import UserError, run_command, sentence_and_code

# What gloo, TCPStore and NCCL say when a peer is gone or does not answer. Shorter texts, such as "peer" and
# "timed out", would also match errors of this rank: "peer access is not supported", "the launch timed out".
PEER_ERROR = re.compile("by (remote )?peer|broken pipe|pair closure|connectFullMesh|connection (refused|was likely)|"
                        "remote process exited|timed out (waiting|after|connecting)|wait timeout", re.IGNORECASE)
PAUSE, POLL_INTERVAL = 5.0, 0.5    # seconds


def run_rank(main, arguments: list[str]):
    """Call main(arguments, launch), which returns an exit code, and end this process with that code. Only rank 0 writes
    to standard output."""
    def on_this_rank():
        launch = read_launch_environment()
        if launch.rank != 0:
            sys.stdout = open(os.devnull, "w")
        try:
            return main(arguments, launch)
        except Exception as error:
            report_and_exit(launch, error)

    run_command(on_this_rank)


def report_and_exit(launch: LaunchInfo, error: Exception):
    """Print the error and end this process with its exit code. The module's docstring says which ranks wait before they
    print. A Watchdog has added itself to an error of training."""
    sys.stdout.flush()
    code, watchdog = 1, getattr(error, "watchdog", None)
    where = f" in step {watchdog.step}" if watchdog and watchdog.step else ""
    if isinstance(error, (UserError, OSError)):
        sentence, code = sentence_and_code(error)
        text = f"error: {sentence}"
        time.sleep(min(5 + launch.local_rank, 13) if launch.local_rank else 0)
    elif isinstance(error, RuntimeError) and PEER_ERROR.search(str(error)):
        time.sleep(0.2)
        if watchdog and watchdog.signal:                       # torchrun knows already which rank failed first
            os._exit(1)
        text = f"rank {launch.rank} lost its peers{where}{unresponsive_ranks(launch)}: {error}"
    else:
        text = f"rank {launch.rank} failed{where}: {type(error).__name__}: {error}"
        traceback.print_exception(error)
    print(text, file=sys.stderr, flush=True)
    with suppress(KeyError, OSError):                          # torchrun quotes this file at the end of its own report
        quoted = json.dumps({"message": text, "timestamp": int(time.time())})
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(quoted)
    os._exit(code)


def unresponsive_ranks(launch: LaunchInfo) -> str:
    """Return text such as " (dead or hanging: rank 2, 3)"; "" if all ranks have reported or torchrun's store does not
    answer. A living rank that has lost a peer reports this to the store, then waits for the others' reports."""
    silent = []
    with suppress(KeyError, RuntimeError):
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=PAUSE))
        store = dist.PrefixStore(f"lost a peer {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(str(launch.rank), "")
        time.sleep(PAUSE)
        silent = [str(rank) for rank in range(launch.world_size) if not store.check([str(rank)])]
    return f" (dead or hanging: rank {', '.join(silent)})" if silent else ""


class Watchdog:
    """A context manager whose thread ends this rank at a second stop signal and, on a GPU, in a hang.

    say(line): confirms the first signal at once, because the current step may take long. It is kept in `signal`. If
    there is nothing `to_save`, the first signal ends the process. Python runs signal handlers only between two bytecode
    instructions, and a rank inside a collective executes none. So set_wakeup_fd makes Python write the signal's number
    into a pipe immediately, which the thread reads.

    A rank hangs if for 90 % of `timeout` seconds its GPU has had work and its host has made no progress. A GPU without
    work waits only for its own host, so a rank that is slow to read data does not blame its peers."""

    def __init__(self, launch: LaunchInfo, device: torch.device, timeout: float):
        self.launch, self.device, self.timeout, self.say = launch, device, timeout, print
        self.signal = self.step = 0
        self.signalled_at, self.last_progress = 0.0, time.monotonic()
        self.to_save, self.watching = False, device.type == "cuda"

    def __enter__(self):
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:     # `nohup` starts a process with SIGHUP ignored
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, type_, error, traceback_):
        self.to_save = self.watching = False
        if isinstance(error, Exception):
            error.watchdog = self

    def mark(self, *_):
        """Note that the host makes progress. Ignores the arguments that on_action passes."""
        self.last_progress = time.monotonic()

    def watch(self, reader: int):
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)       # a thread starts on GPU 0, where a query would allocate memory
        while True:
            if select.select([reader], [], [], POLL_INTERVAL)[0]:
                self.handle(os.read(reader, 1)[0])
            if self.watching and torch.cuda.current_stream().query():
                self.mark()
            elif self.watching and time.monotonic() - self.last_progress > 0.9 * self.timeout:
                error = RuntimeError("timed out waiting for the device")
                error.watchdog = self
                report_and_exit(self.launch, error)

    def handle(self, number: int):
        # Both a terminal and torchrun may signal the ranks, so signals within two seconds count as one.
        if (self.signal or not self.to_save) and time.monotonic() - self.signalled_at > 2.0:
            os._exit(128 + (self.signal or number))
        if not self.signal:
            self.signal, self.signalled_at = number, time.monotonic()
            self.say("stopping after this step with a checkpoint; a second signal, after two seconds, stops at once")
