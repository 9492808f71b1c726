"""Start real processes in milliseconds: multiprocessing's fork server imports torch once, and each process is its fork.

A test of exit codes, printed errors and time-outs needs real processes. Starting Python and importing torch takes
seconds for each rank. The fork server pays that once, also for the workers of the pool (support/pool.py).

    the test                                       rank 0 ... rank n - 1
    fork_server.start(command, ...)         -->    runs the command's file as __main__
    Running.ranks(): the ranks alive
    Running.poll(), wait(): an exit code    -->    SIGTERM if another rank has failed

Running behaves like torchrun: when a rank exits with a code other than 0, the others get SIGTERM, and 30 seconds later
SIGKILL. Two things differ: it acts while the test polls or waits, and rank 0 hosts the store in which the ranks meet,
as under SLURM; under torchrun the launcher does.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

NOTICED = 0.05      # seconds from the exit of a failed rank to SIGTERM for the others; torchrun polls every 0.1
STUBBORN = 30.0     # seconds from SIGTERM to SIGKILL
RESERVED = deque(maxlen=64)     # the sockets that reserve the ports of the last launches
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Without an interface gloo resolves the host's own name, which fails on some machines.
LOOPBACK = ("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


@dataclass
class Ended:
    """The end of a command. code: of the first rank that failed, or 0. output: stdout and stderr of all ranks."""
    code: int
    output: str


def context_with_imports():
    """Return multiprocessing's context of forks of one server, which imports once what is slow to import.

    The server has no threads. It also imports the compiler, which the first optimizer step would import, matplotlib's
    modules, if they are installed, and pytest, which the files of tests import.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch._inductor.config", "matplotlib.backends.backend_svg",
                                     "matplotlib.style", "pytest", "train"])
    return context


class ForkServer:
    """Call `launch` and `start` any number of times, then `close`.

    A launch is a process in `folder` for each (flags, environment) of `ranks`. command: a script's path relative to the
    repository (train.py), or a module (nanodomino.generate).
    """

    def __init__(self, device="cpu"):
        self.flags = ["--device", "cuda", "--deterministic-mode", "--no-compile"] * (device == "cuda")    # of train.py
        self.environment = environment_without_launcher() | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
        self.launches = []

    def start(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, log: Path) -> "Running":
        """Start the ranks and return at once. log: gets their output."""
        log.write_text("")
        self.launches.append(Running(log))
        for flags, environment in ranks:
            process = context_with_imports().Process(target=become, daemon=True, args=(
                command, flags, self.environment | environment, folder, log))
            process.start()
            self.launches[-1].processes.append(process)
        return self.launches[-1]

    def launch(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, limit: float) -> Ended:
        """Run the ranks to their end. Raises AssertionError if this takes more than `limit` seconds."""
        running = self.start(command, ranks, folder, folder.with_name(f"{folder.name}.output"))
        try:
            return Ended(running.wait(limit), running.output())
        finally:
            running.kill()

    def close(self):
        for running in self.launches:
            running.kill()


class Running:
    """The ranks of a launch, while they run and after their end. poll, wait and kill are those of subprocess.Popen."""

    def __init__(self, log: Path):
        self.log, self.processes = log, []
        self.ended = {}                                     # {rank: exit code} in the order in which the ranks ended
        self.failed_at, self.endings = None, [(NOTICED, "terminate"), (STUBBORN, "kill")]

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the ranks that are alive."""
        self.poll()
        return {rank: process.pid for rank, process in enumerate(self.processes) if rank not in self.ended}

    def codes(self) -> dict[int, int]:
        """Return {rank: exit code} of the ranks that have ended, the first one first."""
        self.poll()
        return self.ended

    def poll(self) -> int | None:
        """Return None while any rank is alive, then the exit code of the first one that failed, or 0. End the other
        ranks if one has failed."""
        for rank, process in enumerate(self.processes):
            if process.exitcode is not None:
                self.ended.setdefault(rank, process.exitcode)
        failed = next(filter(None, self.ended.values()), 0)
        if len(self.ended) == len(self.processes):
            return failed
        if failed and self.endings:
            self.failed_at = self.failed_at or time.monotonic()
            if time.monotonic() > self.failed_at + self.endings[0][0]:
                _, end = self.endings.pop(0)
                for process in self.processes:
                    getattr(process, end)()
        return None

    def wait(self, seconds: float) -> int:
        """Return poll() once it is not None."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"the ranks have not ended within {seconds} s: {self.output()}"
            time.sleep(0.01)
        return code

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self):
        for process in self.processes:
            process.kill()


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
    return dict([LOOPBACK]) | {name: value for name, value in os.environ.items() if name not in LAUNCHER}


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


# ---- in a rank

def become(command: str, flags: list[str], environment: dict, folder: Path, log: Path):
    """Turn this process into `python COMMAND FLAGS` and exit with its code."""
    import torch

    os.setsid()         # else the end of the tests' shell would send SIGHUP to all ranks while one is stopped
    default_signals()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    gc.freeze()                                             # garbage collection skips what is imported
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
