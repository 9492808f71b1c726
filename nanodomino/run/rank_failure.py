"""Ends all ranks soon after one of them fails, with one message that explains why.

A run can fail on one rank (an exception), lose a rank (kill -9, out of memory), or wait for a rank that hangs. No rank
waits forever: the next collective raises at once if a peer is gone, and after --timeout seconds if a peer hangs.
torchrun kills all ranks as soon as one has failed. So the rank that knows the cause must print it first, and ranks that
have only lost a peer pause before they print:

    rank 2 raises ValueError         prints its traceback, exits          <- the message that counts
    rank 0, 1, 3 lose their peer     pause 3 seconds, killed by torchrun meanwhile
    all ranks find a UserError       local rank 0 prints it and exits; local rank r waits 5 + r seconds (at most 13)
    or an OSError                    and prints it only if it is still alive then

This holds for gloo. watchdog.py makes it hold for NCCL, whose collectives do not raise.
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
from nanodomino.errors import sentence_and_code, tolerate_lost_output
from nanodomino.run.failures import stop_signals

# What gloo, TCPStore and NCCL say when a peer is gone or does not answer. Shorter texts, such as "peer" and
# "timed out", would also match errors of this rank: "peer access is not supported", "the launch timed out".
PEER_ERRORS = ("closed by peer", "reset by peer", "by remote peer", "broken pipe", "pair closure", "connection refused",
               "connection was likely closed", "remote process exited", "communicator was aborted",
               "timed out waiting", "timed out after", "timed out connecting", "connect timeout",
               "connection timed out", "operation timed out", "operation timeout", "wait timeout", "socket timeout",
               "timeout waiting")
EXIT_LOCK = threading.RLock()      # held forever by the thread that ends the process


def run_rank(main, arguments: list[str]):
    """Call main(arguments, launch), which returns an exit code, and end this process with that code.

    Only rank 0 writes to standard output.
    """
    tolerate_lost_output()
    # The local rank decides which rank prints an error, even if the rest of the launch environment is invalid.
    numbers = [os.environ.get(name, "") for name in ("LOCAL_RANK", "RANK")]
    launch = LaunchInfo(local_rank=int(next(filter(str.isdecimal, numbers), 0)))
    try:
        launch = read_launch_environment()
        if launch.rank != 0:
            sys.stdout = open(os.devnull, "w")
        code = main(arguments, launch)
    except SystemExit as end:                                  # --help
        code = end.code
    except Exception as error:
        report_and_exit(launch, error)
    except KeyboardInterrupt:                                  # Ctrl-C before a StopSignal exists
        code = 128 + signal.SIGINT
    sys.exit(code)


def report_and_exit(launch: LaunchInfo, error: Exception):
    """Print the error and end this process with the exit code of sentence_and_code(), else 1. The module's docstring
    says which ranks wait before they print."""
    EXIT_LOCK.acquire()                                        # the main thread and the watchdog can both get here
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():                          # there is no step to finish any more
            signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    if known := sentence_and_code(error):
        sentence, code = known
        if launch.local_rank > 0:
            time.sleep(min(5 + launch.local_rank, 13))
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        write_torchrun_error_file(sentence)
        os._exit(code)
    where = f" in step {error.step}" if hasattr(error, "step") else ""
    if caused_by_peer(error):
        time.sleep(0.2)
        # A SIGTERM from torchrun means that it already knows which rank failed first.
        if hasattr(error, "signals") and error.signals.number:
            os._exit(1)
        interface = not where and os.environ.get("GLOO_SOCKET_IFNAME")
        hint = f"; is GLOO_SOCKET_IFNAME={interface} the interface between the hosts?" if interface else ""
        lost = unresponsive_ranks(launch, getattr(error, "hosts", []))
        text, details = f"lost its peers{where}{lost}: {error}{hint}", ""
        time.sleep(3)
    else:
        text, details = f"failed{where}: {type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    print(f"{details}rank {launch.rank} {text}", file=sys.stderr, flush=True)
    write_torchrun_error_file(f"rank {launch.rank} {text}")
    os._exit(1)


def caused_by_peer(error: Exception) -> bool:
    """Return whether the error only says that another rank has died or does not answer."""
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in PEER_ERRORS)


def write_torchrun_error_file(text: str):
    """Write a text that torchrun quotes as the root cause at the end of its own error report."""
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": {"message": text, "extraInfo": {"timestamp": int(time.time())}}}, file)
    except (KeyError, OSError):
        pass                                                   # no torchrun, or a full disk; the text has been printed


def unresponsive_ranks(launch: LaunchInfo, hosts: list[str]) -> str:
    """Return text such as " (dead or hanging: rank 2, 3 on node7)"; "" if all ranks have reported; a text about
    MASTER_ADDR if torchrun's store does not answer. hosts: the host of each rank.

    A living rank that has lost a peer reports this to torchrun's store, then waits two seconds for the others' reports.
    """
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
