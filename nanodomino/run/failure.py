"""How a run begins and how it ends, well or badly.

Begin: everything that can be wrong is found before a process group forms, by every rank alike; then the run's folder
is found or made, with the newest intact checkpoint in it.

End: a run may be told to stop (SIGTERM, Ctrl-C), lose a rank (kill -9, out of memory), or wait for one that hangs.
Nobody waits for ever: a rank whose neighbour is gone gets an error from its next collective at once, one whose
neighbour is silent after --timeout seconds. torchrun ends all ranks as soon as one has ended, so the one that has
something to tell must speak first, and those that only lost a neighbour keep still for a moment.

That is what gloo does. What NCCL does instead, and who sees to it that the same holds there: watch.py.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

from nanodomino.comm.world import LaunchInfo, read_launch_environment
from nanodomino.config.terminal import tolerate_closed_output
from nanodomino.errors import UserError

# Words of errors that follow from another's end, in gloo's, the store's and NCCL's messages. None is shorter than it
# must be: "peer access is not supported", "the launch timed out" and NCCL's "invalid usage" are errors of one's own.
LONELY = ("closed by peer", "reset by peer", "by remote peer", "broken pipe", "pair closure", "connection refused",
          "connection was likely closed", "remote process exited", "communicator was aborted", "timed out waiting",
          "timed out after", "timed out connecting", "connect timeout", "connection timed out", "operation timed out",
          "operation timeout", "wait timeout", "socket timeout", "timeout waiting")
SPEAKING = threading.RLock()       # of the thread that ends the process; never given back


# ---- ends

def run_rank(main, arguments: list[str]):
    """What a launcher starts on every rank: main(arguments, launch), of which the screen shows rank 0's words alone.

    main returns the exit code.
    """
    tolerate_closed_output()
    # who speaks first, should the environment be refused: every rank of a half set one would believe to be rank 0
    numbers = [os.environ.get(name, "") for name in ("LOCAL_RANK", "RANK")]
    launch = LaunchInfo(local_rank=int(next(filter(str.isdecimal, numbers), 0)))
    try:
        launch = read_launch_environment()
        if launch.rank != 0:
            sys.stdout = open(os.devnull, "w")
        code = main(arguments, launch)
    except Exception as error:
        report_and_exit(launch, error)
    except KeyboardInterrupt:                                  # in training a StopSignal has taken it
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.exit(code)


def report_and_exit(launch: LaunchInfo, error: Exception):
    """End this process after an error; see the module's docstring for who speaks when."""
    SPEAKING.acquire()                                         # the main thread, and the one of watch.py, may come
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)          # there is no step left to finish first
    sys.stdout.flush()
    if isinstance(error, UserError):
        if launch.local_rank > 0:                               # the others have most likely found the same:
            time.sleep(min(5 + launch.local_rank, 13))          # the first one speaks, the next only if nobody has
        print(f"error: {error}", file=sys.stderr, flush=True)
        tell_torchrun(str(error))
        os._exit(2)
    where = f" in step {error.step}" if hasattr(error, "step") else ""
    if caused_by_peer(error):
        time.sleep(0.2)
        # torchrun is ending all: it knows who was the first
        if hasattr(error, "signals") and error.signals.number:
            os._exit(1)
        text, details = f"lost its neighbours{where}{silent_ranks(launch)}: {error}", ""
        time.sleep(3)                                          # another rank died: let that one be heard first
    else:
        text, details = f"failed{where}: {type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    print(f"{details}rank {launch.rank} {text}", file=sys.stderr, flush=True)
    tell_torchrun(f"rank {launch.rank} {text}")
    os._exit(1)


def caused_by_peer(error: Exception) -> bool:
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


def silent_ranks(launch: LaunchInfo) -> str:
    """Which ranks do not say within two seconds that they have lost their neighbours too: those that died or hang."""
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=2))
        round_ = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store.set(f"nanodomino/lonely/{round_}/{launch.rank}", "")
        time.sleep(2)
        silent = [rank for rank in range(launch.world_size) if not store.check([f"nanodomino/lonely/{round_}/{rank}"])]
    except (KeyError, RuntimeError):
        return ""
    return f" (dead or silent: rank {', '.join(map(str, silent))})" if silent else ""
