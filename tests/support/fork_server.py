"""Real processes that start in no time: one process has imported torch already, and each new one is a fork of it.

What a bad input does, a process must show: its exit code, what it prints, how long it takes. To start Python and import
torch costs seconds, times four for a launch of four. Here they are paid once:

    the test                               server, with train.py imported      rank 0 ... rank n - 1
    fork_server.launch(command, ranks) --> forks a process for each rank  -->  gets its environment, folder and screen;
                                           waits; ends all if one fails        runs the command's file as __main__
    Ended(code, seconds, output)       <-- who ended how, and when        <--  exits

It acts as torchrun does: soon after one rank has ended with another code than 0, the others get SIGTERM, and half a
minute later SIGKILL. Only the store in which the ranks meet is rank 0's own, as under a cluster's launcher; torchrun
would lend one. `fork_server.start` does the same without waiting: a launcher of its own watches the ranks, and may be
killed as torchrun may.
"""

import gc
import json
import math
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
NOTICED = 0.05      # seconds until the end of a rank is noticed; torchrun looks every 0.1
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Ended:
    """code: of the first rank that failed, or 0; seconds: until all had ended; late: they had to be killed;
    output: what all of them wrote on their screens."""
    code: int
    seconds: float
    late: bool
    output: str


class ForkServer:
    """The test's end. `launch` any number of times, then `close`."""

    def __init__(self):
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=environment)

    def launch(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, limit: float) -> Ended:
        """A process in `folder` for each (flags, environment) of `ranks`; after `limit` seconds they are killed.

        command: a script, its path from the repository (train.py), or a module (nanodomino.generate).
        """
        log = folder.with_name(f"{folder.name}.output")
        log.write_text("")
        job = dict(command=command, ranks=ranks, folder=str(folder), log=str(log), limit=limit)
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        assert answer, f"the server has ended, with exit code {self.server.wait()}: is train.py sound?"
        return Ended(**json.loads(answer), output=log.read_text(errors="replace"))

    def start(self, command: str, ranks: list[tuple[list[str], dict]], folder: Path, log: Path) -> "Running":
        """The same under a launcher that nobody waits for. log: what all of them write, and how each has ended."""
        places = log.with_suffix(".ranks")
        places.write_text("")
        self.server.stdin.write(json.dumps(dict(command=command, ranks=ranks, folder=str(folder), log=str(log),
                                                limit=math.inf, places=str(places))) + "\n")
        self.server.stdin.flush()
        return Running(json.loads(self.server.stdout.readline()), places)

    def close(self):
        self.server.stdin.close()
        self.server.wait()


class Running:
    """A launcher and its ranks, with the manners of a subprocess.Popen."""

    def __init__(self, pid: int, places: Path):
        self.pid, self.places = pid, places

    def ranks(self) -> dict[int, int]:
        """{rank: pid} of those that are alive."""
        lines = [json.loads(line) for line in self.places.read_text().splitlines()]
        return {rank: pid for rank, pid in lines if is_alive(pid)}

    def poll(self) -> int | None:
        """None while the launcher is alive, then the first code of a rank that was not 0; 0; or -9, if it was
        killed."""
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
    """A process of ours that has not ended; another one that has got its number does not count."""
    try:
        folder = Path(f"/proc/{pid}")
        state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" and b"fork_server.py" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def launcher_environments(processes: int) -> list[dict]:
    """What a launcher tells each of so many ranks on this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [dict(zip(LAUNCHER, map(str, (rank, processes, rank, processes, "127.0.0.1", port))))
            for rank in range(processes)]


# ---- the server's end

def serve():
    """What takes so long comes first: the program, and what torch's first optimizer step and checkpoint would
    import."""
    import torch._inductor.config
    import torch.distributed.checkpoint  # noqa: F401

    import train  # noqa: F401

    gc.freeze()                                             # a fork's collections look at its own objects only
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(launch_alone(**job) if "places" in job else launch_and_wait(**job)), flush=True)


def launch_alone(places: str, log: str, **job) -> int:
    """The pid of a process that does the rest. Its parent ends at once, so that nobody needs to wait for it."""
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
    """The fields of Ended, without the output. places: a file for the pids of the ranks."""
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
    for pid in processes:                                   # our own children, not yet waited for: they are still there
        os.kill(pid, number)


def become(command: str, flags: list[str], environment: dict, folder: str, log: str):
    """Be the process that `python COMMAND FLAGS` is, to its end."""
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
            # train.py has imported it; a new process would not have
            sys.modules.pop(f"{command}.__main__", None)
            runpy.run_module(command, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)                                          # to take all of torch apart would cost a second


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    serve()
