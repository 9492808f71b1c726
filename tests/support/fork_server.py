"""Start real processes in milliseconds: a server imports torch once, and each new process is a fork of it.

A test of exit codes, printed errors and time-outs needs real processes. Starting Python and importing torch takes
seconds for each rank. The server pays that once. It is a fork itself: of multiprocessing's server, whose other forks
are the workers of the pool (support/pool.py).

    the test                               server, with train.py imported      rank 0 ... rank n - 1
    fork_server.launch(command, ranks) --> forks a process for each rank  -->  sets its environment, folder and output;
                                           waits; ends all if one fails        runs the command's file as __main__
    Ended(code, seconds, output)       <-- exit code, time, output        <--  exits

It behaves like torchrun: when a rank exits with a code other than 0, the others get SIGTERM, and 30 seconds later
SIGKILL. One thing differs: rank 0 hosts the store in which the ranks meet, as under SLURM; under torchrun the launcher
does. `fork_server.start` does not wait: a launcher process of its own watches the ranks, and a test may kill it as it
may kill torchrun.
"""

import gc
import json
import math
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STUBBORN = 30.0     # seconds from SIGTERM to SIGKILL
NOTICED = 0.05      # seconds from the exit of a failed rank to SIGTERM for the others; torchrun polls every 0.1
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Ended:
    """The end of a launch.

    code: exit code of the first rank that failed, or 0. seconds: until all ranks had ended. late: whether ranks had to
    be killed. output: stdout and stderr of all ranks.
    """
    code: int
    seconds: float
    late: bool
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
    """The client side: call `launch` and `start` any number of times, then `close`."""

    def __init__(self):
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        environment["CUDA_VISIBLE_DEVICES"] = ""
        context = context_with_imports()
        self.connection, theirs = context.Pipe()
        self.server = context.Process(target=serve, args=(theirs, environment))
        self.server.start()
        theirs.close()                                      # so that the server's death closes the pipe

    def ask(self, **job):
        """Send a job to the server and return its answer."""
        self.connection.send(job)
        try:
            return self.connection.recv()
        except EOFError:
            self.server.join()
            raise AssertionError(f"the server has ended, with exit code {self.server.exitcode}") from None

    def launch(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, limit: float) -> Ended:
        """Run a process in `folder` for each (flags, environment) of `ranks`, and kill them after `limit` seconds.

        command: a script's path relative to the repository (train.py), or a module (nanodomino.generate).
        """
        log = folder.with_name(f"{folder.name}.output")
        log.write_text("")
        answer = self.ask(command=command, ranks=ranks, folder=str(folder), log=str(log), limit=limit)
        return Ended(**answer, output=log.read_text(errors="replace"))

    def start(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, log: Path) -> "Running":
        """Start the ranks under a launcher process and return at once. log: gets their output and exit codes."""
        places = log.with_suffix(".ranks")
        places.write_text("")
        pid = self.ask(command=command, ranks=ranks, folder=str(folder), log=str(log), limit=math.inf,
                       places=str(places))
        return Running(pid, places)

    def close(self):
        self.connection.close()
        self.server.join()


class Running:
    """A launcher and its ranks, with the interface of subprocess.Popen."""

    def __init__(self, pid: int, places: Path):
        self.pid, self.places = pid, places

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the ranks that are alive."""
        lines = [json.loads(line) for line in self.places.read_text().splitlines()]
        return {rank: pid for rank, pid in lines if is_alive(pid)}

    def poll(self) -> int | None:
        """Return None while the launcher is alive, then the first nonzero exit code of a rank, or 0.

        Returns -9 if the launcher itself was killed.
        """
        if is_alive(self.pid):
            return None
        code = self.places.with_suffix(".code")
        return int(code.read_text()) if code.exists() else -signal.SIGKILL

    def wait(self, seconds=None) -> int:
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the launcher", seconds)
            time.sleep(0.01)
        return code


def is_alive(pid: int) -> bool:
    """Whether a process of the fork server is alive; another process that got the same pid does not count."""
    try:
        folder = Path(f"/proc/{pid}")
        state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" and b"forkserver" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def launcher_environments(processes: int) -> list[dict]:
    """Return the environment variables that a launcher gives to each rank on this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [dict(zip(LAUNCHER, map(str, (rank, processes, rank, processes, "127.0.0.1", port))))
            for rank in range(processes)]


# ---- the server side

def serve(connection, environment: dict):
    """Serve one launch for each message until the tests close the pipe."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()                                             # garbage collection in a fork skips what is imported
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(launch_alone(**job) if "places" in job else launch_and_wait(**job))


def launch_alone(places: str, log: str, **job) -> int:
    """Fork a launcher and return its pid. A double fork: its parent exits at once, so that it leaves no zombie."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        if not os.fork():
            os.write(writer, str(os.getpid()).encode())
            os.close(writer)
            ended = launch_and_wait(**job, log=log, places=places)
            Path(places).with_suffix(".code").write_text(str(ended["code"]))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as pid:
        return int(pid.read())


def launch_and_wait(command: str, ranks: list, folder: str, log: str, limit: float, places: str | None = None) -> dict:
    """Run the ranks to their end and return Ended's fields except output. places: a file for the ranks' pids."""
    begin, alive, code, late = time.monotonic(), {}, 0, False
    end_others, end_all = math.inf, begin + limit
    for rank, (flags, environment) in enumerate(ranks):
        if not (pid := os.fork()):
            become(command, flags, environment, folder, log)
        alive[pid] = rank
        if places:
            with open(places, "a") as file:
                print(json.dumps((rank, pid)), file=file)
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = alive.pop(pid)
            if status and places:
                with open(log, "a") as file:
                    print(f"rank {rank} has ended, exitcode  : {os.waitstatus_to_exitcode(status)} (pid: {pid})",
                          file=file)
            if status and not code:
                code, end_others = os.waitstatus_to_exitcode(status), time.monotonic() + NOTICED
        elif time.monotonic() > end_others:
            end_others, end_all = math.inf, min(end_all, time.monotonic() + STUBBORN)
            send(alive, signal.SIGTERM)
        elif time.monotonic() > end_all:
            end_all, late = math.inf, True
            send(alive, signal.SIGKILL)
        else:
            time.sleep(0.005)
    return dict(code=code, seconds=time.monotonic() - begin, late=late)


def send(processes, number: int):
    for pid in processes:                                   # children that were not waited for keep their pids
        os.kill(pid, number)


def become(command: str, flags: list[str], environment: dict, folder: str, log: str):
    """Turn this fork into `python COMMAND FLAGS` and exit with its code."""
    os.environ.update(environment)
    os.chdir(folder)
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
