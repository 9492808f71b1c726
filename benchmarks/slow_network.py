"""Builds a slow network within one machine, with real packets and a chosen rate.

The loopback of a machine carries several gigabytes per second, so there is hardly any communication to hide. Therefore
each rank gets its own network namespace, which acts as a host, and Linux limits the rate at which it sends:

    rank 0's namespace                    hub                    rank 1's namespace
      10.77.0.1  wire ==tbf==> port0 --- bridge --- port1 <==tbf== wire  10.77.0.2

A veth pair is a cable with two ends: `wire` in the rank's namespace and a port in the hub's. The bridge is the switch.
tbf, a token bucket filter, limits what a rank sends to `rate` bits per second. What a rank receives is limited by the
senders' filters. Tokens collect while a link is idle, so after a pause BURST seconds of data (at least 128 KiB) leave
at once.

All devices are in namespaces whose names contain this process's id. The machine's own network stays unchanged. Deleting
a namespace deletes its devices. The namespaces are deleted at the end, also after an error. If this process is killed,
the next start deletes them. This needs root, and the commands `ip` and `tc` of iproute2.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

from nanodomino.errors import require

PREFIX = "nanodomino"
INTERFACE = "wire"                         # the name of the network interface in each rank's namespace
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 1e6, 100e9              # bits per second
BURST = 1e-3                               # seconds at the full rate
LARGEST_PACKET = 65536                     # bytes: Linux splits data into smaller packets only after the filter
QUEUE = 0.1                                # seconds that a packet may wait before it is dropped


@contextmanager
def exit_on_signals():
    """Make SIGTERM and SIGHUP raise SystemExit inside the block, so that its `finally` clauses run, as after Ctrl-C."""
    previous = {number: signal.signal(number, lambda number, _: sys.exit(128 + number))
                for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def parse_rate(text: str) -> int:
    """Convert '500mbit' to 500000000 bits per second. Raises UserError if it is not such a rate."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(kbit|mbit|gbit)", text)
    rate = float(match[1]) * UNITS[match[2]] if match else 0.0
    require(SLOWEST <= rate <= FASTEST,
            f"--wire must be a rate from 1mbit to 100gbit, in kbit, mbit or gbit per second, but is '{text}'; "
            "try --wire 500mbit")
    return round(rate)


def namespaces(pid: int, world_size: int) -> list[str]:
    """Return the names of the namespaces: first the hub's, then each rank's."""
    return [f"{PREFIX}-{pid}-hub", *(f"{PREFIX}-{pid}-{rank}" for rank in range(world_size))]


def address(rank: int) -> str:
    """Return the IP address of a rank, such as 10.77.0.1 for rank 0."""
    return f"10.77.{(rank + 1) // 256}.{(rank + 1) % 256}"


def build(hub: str, ranks: list[str], rate: int) -> list[str]:
    """Return the commands that build the network drawn above. hub, ranks: namespaces(); rate: bits per second."""
    burst = max(2 * LARGEST_PACKET, round(BURST * rate / 8))
    commands = [f"ip netns add {hub}",
                f"ip -n {hub} link add bridge type bridge",
                f"ip -n {hub} link set bridge up"]
    for rank, name in enumerate(ranks):
        commands += [f"ip netns add {name}",
                     f"ip -n {hub} link add port{rank} type veth peer name {INTERFACE} netns {name}",
                     f"ip -n {hub} link set port{rank} master bridge up",
                     f"ip -n {name} address add {address(rank)}/16 dev {INTERFACE}",
                     f"ip -n {name} link set lo up",
                     f"ip -n {name} link set {INTERFACE} up",
                     f"tc -n {name} qdisc add dev {INTERFACE} root tbf rate {rate}bit burst {burst} "
                     f"limit {burst + round(QUEUE * rate / 8)}"]
    return commands


def run(command: str) -> str:
    """Run a command and return its output. Raises UserError with its error message if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    require(done.returncode == 0,
            f"--wire needs network namespaces, veth, bridge and tbf, but '{command}' failed: "
            f"{' '.join(done.stderr.split()) or done.returncode}; run a container with --privileged, or leave "
            "--wire out")
    return done.stdout


def remove(is_obsolete):
    """Delete the namespaces of each process for which is_obsolete(process id) is true."""
    for line in run("ip netns list").splitlines():
        match = re.match(rf"{PREFIX}-(\d+)-\w+", line)
        if match and is_obsolete(int(match[1])):
            # Its error is ignored: another process may be deleting the same namespace.
            subprocess.run(["ip", "netns", "delete", match[0]], stderr=subprocess.DEVNULL)


def is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


@contextmanager
def slow_wire(rate: str, world_size: int):
    """Build the network, and delete it when the context ends.

    Yields one (command prefix, environment variables) per rank. A process started with both runs in the rank's
    namespace. rate: how fast each rank can send, such as '500mbit'. Raises UserError if the network can't be built.
    """
    bits = parse_rate(rate)
    require(shutil.which("ip") and shutil.which("tc"),
            "--wire needs the commands ip and tc; install iproute2, or leave --wire out")
    require(os.geteuid() == 0,
            "--wire needs root, because it makes network namespaces; use sudo, or leave --wire out")
    hub, *ranks = namespaces(os.getpid(), world_size)
    environment = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE,
                   "TORCH_CPP_LOG_LEVEL": "ERROR"}             # silences c10d's warning about unknown host names
    with exit_on_signals():
        try:
            remove(is_dead)
            for command in build(hub, ranks, bits):
                run(command)
            yield [(["ip", "netns", "exec", name], environment) for name in ranks]
        finally:
            remove(lambda pid: pid == os.getpid())
