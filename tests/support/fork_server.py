"""Start real processes in milliseconds: a server imports torch once, and each new process is a fork of it.

A test of exit codes, printed errors and time-outs needs real processes. Starting Python and importing torch takes
seconds for each rank. The server pays that once. It is a fork itself: of multiprocessing's server, whose other forks
are the workers of the pool (support/pool.py).

    the test                          server, with train.py imported     launcher          rank 0 ... rank n - 1
    fork_server.start(command, ...) -> forks a launcher            -->   forks ranks -->   runs the command's file
    Running: ranks that are alive   <- LOG.ranks                   <--   waits             as __main__
    Running.wait(): an exit code    <- LOG.codes                   <--   ends all if one fails

The launcher behaves like torchrun: when a rank exits with a code other than 0, the others get SIGTERM, and 30 seconds
later SIGKILL. One thing differs: rank 0 hosts the store in which the ranks meet, as under SLURM; under torchrun the
launcher does.
"""

import contextlib
import gc
import json
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NOTICED = 0.05      # seconds from the exit of a failed rank to SIGTERM for the others; torchrun polls every 0.1
STUBBORN = 30.0     # seconds from SIGTERM to SIGKILL
RESERVED = deque(maxlen=64)     # the sockets that reserve the ports of the last launches
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Ended:
    """The end of a command. code: of the first rank that failed, or 0. output: stdout and stderr of all ranks."""
    code: int
    output: str


def context_with_imports():
    """Return multiprocessing's context of forks of one server, which imports once what is slow to import.

    The server has no threads. It also imports the compiler, which the first optimizer step would import, and pytest,
    which the files of tests import.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch._inductor.config", "pytest", "train"])
    return context


class ForkServer:
    """The client side: call `launch` and `start` any number of times, then `close`.

    A launch is a process in `folder` for each (flags, environment) of `ranks`. command: a script's path relative to the
    repository (train.py), or a module (nanodomino.generate).
    """

    def __init__(self, device="cpu"):
        environment = environment_without_launcher() | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
        context = context_with_imports()
        self.connection, theirs = context.Pipe()
        self.server = context.Process(target=serve, args=(theirs, environment))
        self.server.start()
        theirs.close()                                      # so that the server's death closes the pipe

    def start(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, log: Path) -> "Running":
        """Start the ranks and return at once. log: gets their output."""
        running = Running(log)
        log.write_text("")
        running.places.write_text("")
        running.codes_file.unlink(missing_ok=True)
        self.connection.send((command, ranks, str(folder), str(log)))
        return running

    def launch(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, limit: float) -> Ended:
        """Run the ranks to their end. Raises AssertionError if they have not all ended within `limit` seconds."""
        running = self.start(command, ranks, folder, folder.with_name(f"{folder.name}.output"))
        try:
            return Ended(running.wait(limit), running.output())
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command} has not ended within {limit} s: {running.output()}") from None
        finally:
            running.close()

    def close(self):
        self.connection.close()
        self.server.join()


class Running:
    """The ranks of a launch, while they run and after their end."""

    def __init__(self, log: Path):
        self.log, self.places, self.codes_file = log, log.with_suffix(".ranks"), log.with_suffix(".codes")

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the ranks that are alive."""
        lines = [json.loads(line) for line in self.places.read_text().splitlines()]
        return {rank: pid for rank, pid in lines if is_alive(pid)}

    def codes(self) -> dict[int, int]:
        """Return {rank: exit code} in the order in which the ranks ended; {} while any is alive."""
        return dict(json.loads(self.codes_file.read_text())) if self.codes_file.exists() else {}

    def poll(self) -> int | None:
        """Return None while any rank is alive, then the exit code of the first one that failed, or 0."""
        codes = self.codes()
        return next(filter(None, codes.values()), 0) if codes else None

    def wait(self, seconds: float) -> int:
        """Return poll() once it is not None. Raises TimeoutExpired, like subprocess.Popen."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the launcher", seconds)
            time.sleep(0.01)
        return code

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self):
        """Kill the ranks that are still alive."""
        for pid in self.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether a Python process has this pid. Another program that got the same pid later does not count."""
    try:
        folder = Path(f"/proc/{pid}")
        state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" and b"python" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def environment_without_launcher() -> dict:
    """Return the environment of this process for one that is no rank yet. gloo may use the loopback interface."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"} | environment


def default_signals():
    """Handle signals as a process of a shell does, even if the tests were started with `nohup`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def launcher_environments(processes: int) -> list[dict]:
    """Return the environment variables that a launcher gives to each rank on this host."""
    from benchmarks.runner import reserve_port

    RESERVED.append(reserve_port())
    port = RESERVED[-1].getsockname()[1]
    return [dict(zip(LAUNCHER, map(str, (rank, processes, rank, processes, "127.0.0.1", port))))
            for rank in range(processes)]


# ---- the server side

def serve(connection, environment: dict):
    """Fork a launcher for each message until the tests close the pipe."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()                                             # garbage collection in a fork skips what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)           # so that no launcher stays as a zombie
    while True:
        try:
            launch = connection.recv()
        except EOFError:
            return
        if not os.fork():
            os.setsid()         # else the end of the tests' shell would send SIGHUP to all ranks while one is stopped
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_ranks(*launch)
            os._exit(0)


def run_ranks(command: str, ranks: list, folder: str, log: str):
    """Run the ranks to their end. Their pids and exit codes go to files beside the log."""
    running, alive, codes = Running(Path(log)), {}, {}
    signals, due = [signal.SIGTERM, signal.SIGKILL], math.inf
    for rank, (flags, environment) in enumerate(ranks):
        if not (pid := os.fork()):
            become(command, flags, environment, folder, log)
        alive[pid] = rank
        with open(running.places, "a") as file:
            print(json.dumps((rank, pid)), file=file)
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status and due == math.inf:
                due = time.monotonic() + NOTICED
        elif time.monotonic() > due and signals:
            for pid in alive:                               # children that were not waited for keep their pids
                os.kill(pid, signals[0])
            del signals[0]
            due = time.monotonic() + STUBBORN
        else:
            time.sleep(0.005)
    unfinished = Path(f"{log}.unfinished")
    unfinished.write_text(json.dumps([*codes.items()]))
    unfinished.rename(running.codes_file)


def become(command: str, flags: list[str], environment: dict, folder: str, log: str):
    """Turn this fork into `python COMMAND FLAGS` and exit with its code."""
    os.environ.update(environment)
    os.chdir(folder)
    default_signals()
    screen = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), screen, screen)):
        os.dup2(descriptor, stream)
    sys.argv, code = [command, *flags], 0
    try:
        if command.endswith(".py"):
            runpy.run_path(str(ROOT / command), run_name="__main__")
        else:
            # imported by train.py already
            sys.modules.pop(f"{command}.__main__", None)
            runpy.run_module(command, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)                                          # skips a second of tearing down torch
