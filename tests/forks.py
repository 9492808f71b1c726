"""Real processes that start in no time: one process has imported torch already, and each new one is a fork of it.

What a bad input does, a process must show: its exit code, what it prints, how long it takes. To start Python and import
torch costs seconds, times four for a launch of four. Here they are paid once:

    the test                                 server: has imported train.py      rank 0 ... rank n - 1
    forks.launch(command, ranks)     --->    fork one for each rank      -->    an environment, folder and screen of its
                                             wait; end all if one fails         own; the command's file, as __main__
    Ended(code, seconds, output)     <---    who ended how, and when     <--    exits

It acts as torchrun does: soon after one rank has ended with another code than 0, the others get SIGTERM. Only the store
in which the ranks meet is rank 0's own, as under a cluster's launcher; torchrun would lend one.
"""

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

ROOT = Path(__file__).resolve().parent.parent
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


class Forks:
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

    def close(self):
        self.server.stdin.close()
        self.server.wait()


def launcher_environments(processes: int) -> list[dict]:
    """What a launcher tells each of so many ranks on this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [dict(zip(LAUNCHER, map(str, (rank, processes, rank, processes, "127.0.0.1", port))))
            for rank in range(processes)]


# ---- the server's end

def serve():
    import train  # noqa: F401  this is what takes so long

    for line in sys.stdin:
        print(json.dumps(launch_and_wait(**json.loads(line))), flush=True)


def launch_and_wait(command: str, ranks: list, folder: str, log: str, limit: float) -> dict:
    """The fields of Ended, without the output."""
    begin, alive, code, late = time.monotonic(), set(), 0, False
    end_others, end_all = math.inf, begin + limit
    for flags, environment in ranks:
        if not (pid := os.fork()):
            become(command, flags, environment, folder, log)
        alive.add(pid)
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            alive.remove(pid)
            if status and not code:
                code, end_others = os.waitstatus_to_exitcode(status), time.monotonic() + NOTICED
        elif time.monotonic() > end_others:
            end_others = math.inf
            send(alive, signal.SIGTERM)
        elif time.monotonic() > end_all:
            end_all, late = math.inf, True
            send(alive, signal.SIGKILL)
        else:
            time.sleep(0.005)
    return dict(code=code, seconds=time.monotonic() - begin, late=late)


def send(processes: set[int], number: int):
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
            sys.modules.pop(command, None)                  # train.py has imported it; a new process would not have
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
