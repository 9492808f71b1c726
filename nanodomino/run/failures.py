"""Starts a rank, and ends it: at a signal, after an error, or because another rank is dead or hangs.

**Signals.** The first stop signal asks for a checkpoint after the current step, the second ends the process at once.
After the last step everything is saved, so the first signal ends the process at once.

    SIGTERM    a scheduler or `kill`          SIGINT    Ctrl-C          SIGHUP    the terminal was closed

torchrun passes each of them on to its ranks, which do not belong to the terminal themselves.

**Errors.** A run can fail on one rank (an exception), lose a rank (kill -9, out of memory), or wait for a rank that
hangs. No rank waits forever, because the next collective raises at once if a peer is gone, and after --timeout seconds
if a peer hangs. torchrun kills all ranks as soon as one has failed. So the rank that knows the cause must print it
first, and ranks that have only lost a peer pause before they print:

    rank 2 raises ValueError         prints its traceback, exits          <- the message that counts
    rank 0, 1, 3 lose their peer     pause 3 seconds, killed by torchrun meanwhile
    all ranks find a UserError       local rank 0 prints it and exits; local rank r waits 5 + r seconds (at most 13)
    or an OSError                    and prints it only if it is still alive then

**GPUs.** gloo's collectives run on the host and raise. NCCL's run on the device. The host only enqueues them, and
continues until it needs a result or the queue is full:

    host      enqueue enqueue enqueue   .tolist() .......................      no exception, no signal handler, no end
    device    [ work ][ all-reduce with a dead peer .....................

If a GPU dies, NCCL does not notice it on the other GPUs of the same host. So the thread of a Watchdog checks the device
every POLL_INTERVAL seconds. torch's own watchdog remains the last resort (collective_timeout in comm/world.py).

    stop signal, then no progress      ends it after STOP_GRACE      torchrun signals the other ranks when one has died,
                                       seconds                       and kills them soon after
    no progress                        ends it after --timeout       a peer hangs, or its whole host is gone
"""

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nanodomino.comm.world import LaunchInfo, read_launch_environment
from nanodomino.errors import sentence_and_code, tolerate_lost_output
from nanodomino.mesh import Mesh

# What gloo, TCPStore and NCCL say when a peer is gone or does not answer. Shorter texts, such as "peer" and
# "timed out", would also match errors of this rank: "peer access is not supported", "the launch timed out".
PEER_ERROR = re.compile("(closed|reset) by peer|by remote peer|broken pipe|pair closure|connection refused|"
                        "connection was likely closed|remote process exited|communicator was aborted|"
                        "timed out (waiting|after|connecting)|(connection|operation) timed out|"
                        "(connect|operation|wait|socket) timeout|timeout waiting", re.IGNORECASE)
EXIT_LOCK = threading.RLock()      # held forever by the thread that ends the process
STOP_GRACE = 20.0                  # seconds without progress after a stop signal; torchrun kills after 30
POLL_INTERVAL = 0.5                # seconds


def run_rank(main, arguments: list[str]):
    """Call main(arguments, launch), which returns an exit code, and end this process with that code. Only rank 0 writes
    to standard output."""
    tolerate_lost_output()
    local_rank = os.environ.get("LOCAL_RANK", "")              # decides who prints, even if the others are invalid
    launch = LaunchInfo(local_rank=int(local_rank) if local_rank.isdecimal() else 0)
    try:
        launch = read_launch_environment()
        if launch.rank != 0:
            sys.stdout = open(os.devnull, "w")
        code = main(arguments, launch)
    except Exception as error:
        report_and_exit(launch, error)
    except KeyboardInterrupt:                                  # Ctrl-C before a StopSignal exists
        code = 128 + signal.SIGINT
    sys.exit(code)


# ---- signals

def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run. `nohup` starts a process with SIGHUP ignored, which then stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT] + [signal.SIGHUP] * (not ignored)


class StopSignal:
    """Records the first stop signal, in `number` and `received_at`; the second one ends the process, and so does the
    first one if `all_saved`. say(line): confirms the first signal at once, because the current step may take long.

    Python runs signal handlers only between two bytecode instructions, and a rank inside a collective executes none. So
    set_wakeup_fd makes Python write the signal's number into a pipe immediately, and a thread reads the pipe.
    """

    def __init__(self, say):
        self.say, self.number, self.received_at, self.all_saved = say, 0, 0.0, False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in stop_signals():
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.listen, args=(reader,), name="signals", daemon=True).start()

    def listen(self, reader: int):
        while number := os.read(reader, 1):
            self.handle(number[0])

    def handle(self, number: int):
        # A terminal or a scheduler may signal the ranks and torchrun, which then signals the ranks again. So signals
        # within two seconds count as one.
        if (self.all_saved or self.number) and time.monotonic() - self.received_at > 2.0:
            os._exit(128 + number)
        if not self.number:
            self.number, self.received_at = number, time.monotonic()
            again = "press Ctrl-C" if number == signal.SIGINT else f"send {signal.Signals(number).name}"
            self.say(f"stopping after this step with a checkpoint; {again} again to stop at once")


# ---- errors

def report_and_exit(launch: LaunchInfo, error: Exception):
    """Print the error and end this process with the exit code of sentence_and_code(), else 1. The module's docstring
    says which ranks wait before they print."""
    EXIT_LOCK.acquire()                                        # the main thread and the Watchdog can both get here
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():                          # there is no step to finish any more
            signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    details, code = "", 1
    where = f" in step {error.step}" if hasattr(error, "step") else ""
    if known := sentence_and_code(error):
        text, code = known
        if launch.local_rank > 0:
            time.sleep(min(5 + launch.local_rank, 13))
    elif caused_by_peer(error):
        time.sleep(0.2)
        # A SIGTERM from torchrun means that it already knows which rank failed first.
        if hasattr(error, "signals") and error.signals.number:
            os._exit(1)
        interface = not where and os.environ.get("GLOO_SOCKET_IFNAME")
        hint = f"; is GLOO_SOCKET_IFNAME={interface} the interface between the hosts?" if interface else ""
        lost = unresponsive_ranks(launch, getattr(error, "hosts", []))
        text = f"rank {launch.rank} lost its peers{where}{lost}: {error}{hint}"
        time.sleep(3)
    else:
        text = f"rank {launch.rank} failed{where}: {type(error).__name__}: {error}"
        details = "".join(traceback.format_exception(error))
    print(f"{details}{'error: ' if known else ''}{text}", file=sys.stderr, flush=True)
    write_torchrun_error_file(text)
    os._exit(code)


def caused_by_peer(error: Exception) -> bool:
    """Return whether the error only says that another rank has died or does not answer."""
    return isinstance(error, RuntimeError) and bool(PEER_ERROR.search(str(error)))


def write_torchrun_error_file(text: str):
    """Write a text that torchrun quotes as the root cause at the end of its own error report."""
    message = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
    with suppress(KeyError, OSError):                          # no torchrun, or a full disk; the text has been printed
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))


def unresponsive_ranks(launch: LaunchInfo, hosts) -> str:
    """Return text such as " (dead or hanging: rank 2, 3 on node7)"; "" if all ranks have reported; a text about
    MASTER_ADDR if torchrun's store does not answer. hosts: the host of each rank. A living rank that has lost a peer
    reports this to torchrun's store, then waits two seconds for the others' reports."""
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=2))
        prefix = f"nanodomino/lost_peer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store.set(f"{prefix}/{launch.rank}", "")
        time.sleep(2)
        ranks = [rank for rank in range(launch.world_size) if not store.check([f"{prefix}/{rank}"])]
    except (KeyError, RuntimeError):
        return f" (MASTER_ADDR {os.environ['MASTER_ADDR']} does not answer)" if "MASTER_ADDR" in os.environ else ""
    where = f" on {', '.join(sorted({hosts[rank] for rank in ranks}))}" if len(set(hosts)) > 1 else ""
    return f" (dead or hanging: rank {', '.join(map(str, ranks))}{where})" if ranks else ""


class Watchdog:
    """A context manager that watches a GPU until its block ends or `finished` is set. A CPU has no queue of work, so
    there is nothing to watch. hosts: the host of each rank.

    Progress means that the device has reached a recorded event. Training records one after each forward and each
    backward of a microbatch, because a whole step can be in the queue. An empty queue counts as progress too: such a
    device waits only for its own host. So a rank that is slow to read data does not blame its peers."""

    def __init__(self, launch: LaunchInfo, mesh: Mesh, timeout: float, hosts=()):
        self.launch, self.device, self.timeout = launch, mesh.device, timeout
        self.queue = torch.cuda.current_stream(mesh.device) if mesh.device.type == "cuda" else None
        self.events, self.last_progress = deque(), time.monotonic()
        self.context = {"hosts": hosts}                        # also step and signals; for report_and_exit()
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def __enter__(self):
        if self.queue is not None:
            self.thread.start()
        return self

    def __exit__(self, type_, error, traceback_):
        self.finished.set()
        if isinstance(error, Exception):
            error.__dict__.update(self.context)

    def mark(self, *_):
        """Enqueue an event, whose completion counts as progress. Ignores the arguments that on_action passes."""
        if self.queue is not None:
            self.events.append(self.queue.record_event())

    def watch(self):
        torch.cuda.set_device(self.device)           # a thread starts on GPU 0, where a query would allocate memory
        while not self.finished.wait(POLL_INTERVAL):
            if text := self.find_hang():
                error = RuntimeError(text)
                error.__dict__.update(self.context)
                report_and_exit(self.launch, error)

    def find_hang(self) -> str | None:
        """Return an error message if the device seems to wait for a lost peer, else None. Call this again and again."""
        now, signals = time.monotonic(), self.context.get("signals")
        while self.events and self.events[0].query():
            self.events.popleft()
            self.last_progress = now
        if self.queue.query():
            self.last_progress = now
        idle = now - self.last_progress
        stopping = now - max(self.last_progress, signals.received_at) if signals and signals.number else 0.0
        if idle > self.timeout or stopping > STOP_GRACE:
            return f"timed out waiting for the device, which has made no progress for {idle:.0f} seconds"
        return None
