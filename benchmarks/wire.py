"""A slow wire within one machine: real processes, real packets, and a rate that one chooses.

On a machine of two cores the loopback carries several gigabytes a second, and there is nothing to hide. So each rank
gets a network namespace of its own, a host as far as the network knows, and Linux limits what leaves it:

    rank 0's namespace                    hub                    rank 1's namespace
      10.77.0.1  wire ==tbf==> port0 --- bridge --- port1 <==tbf== wire  10.77.0.2

A veth pair is a cable with two ends; the hub's bridge is the switch between the cables; tbf, a token bucket, lets a
rank send `rate` bits a second, so what it receives is limited by the others' buckets. Tokens gather while the wire is
idle, and BURST seconds of them (at least two of the largest packets) may leave at once.

Everything lies in namespaces named by this process's id, nothing in the machine's own network, and a namespace takes
its devices with it. They are removed at the end, however it comes; those of a process that was killed, at the next
start. Needs root, and iproute2's `ip` and `tc`.
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
INTERFACE = "wire"                         # the name of each rank's end
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 1e6, 100e9              # bits a second
BURST = 1e-3                               # seconds
LARGEST_PACKET = 65536                     # bytes: Linux cuts packets up as late as it can
QUEUE = 0.1                                # seconds that a packet may wait in the bucket before it is dropped


def parse_rate(text: str) -> int:
    """'500mbit' -> 500000000 bits a second. Raises UserError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(kbit|mbit|gbit)", text)
    rate = float(match[1]) * UNITS[match[2]] if match else 0.0
    require(SLOWEST <= rate <= FASTEST,
            f"--wire must be a rate from 1mbit to 100gbit, in kbit, mbit or gbit a second, but is '{text}'; "
            "try --wire 500mbit")
    return round(rate)


def namespaces(pid: int, world_size: int) -> list[str]:
    """The hub's, then each rank's."""
    return [f"{PREFIX}-{pid}-hub", *(f"{PREFIX}-{pid}-{rank}" for rank in range(world_size))]


def address(rank: int) -> str:
    return f"10.77.{(rank + 1) // 256}.{(rank + 1) % 256}"


def build(hub: str, ranks: list[str], rate: int) -> list[str]:
    """The commands that make the picture above. rate: bits a second."""
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
    """What the command prints. Raises UserError with its own words where it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    require(done.returncode == 0,
            f"--wire needs network namespaces, veth, bridge and tbf, but '{command}' says: "
            f"{' '.join(done.stderr.split()) or done.returncode}; a container needs --privileged for them, or leave "
            "--wire out")
    return done.stdout


def remove(goes):
    """Remove our namespaces whose process id is one that goes(pid)."""
    for line in run("ip netns list").splitlines():
        match = re.match(rf"{PREFIX}-(\d+)-\w+", line)
        if match and goes(int(match[1])):
            # another start may be removing the same one
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
    """Gives for each rank (command prefix, environment): how to start it in its namespace, and what tells torch of it.

    rate: as '500mbit', of each rank's sending. Raises UserError where it can't be.
    """
    bits = parse_rate(rate)
    require(shutil.which("ip") and shutil.which("tc"),
            "--wire needs the commands ip and tc, and they are not here; install iproute2, or leave --wire out")
    require(os.geteuid() == 0,
            "--wire makes network namespaces, which root alone may do; use sudo, or leave --wire out")
    hub, *ranks = namespaces(os.getpid(), world_size)
    names = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE,
             "TORCH_CPP_LOG_LEVEL": "ERROR"}                   # or c10d warns that nobody there knows host names
    # Python ends at these without cleaning up, unless somebody listens.
    previous = {number: signal.signal(number, lambda number, _: sys.exit(128 + number))
                for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        remove(is_dead)
        for command in build(hub, ranks, bits):
            run(command)
        yield [(["ip", "netns", "exec", name], names) for name in ranks]
    finally:
        # A second Ctrl-C must not stop the removal; the commands inherit that they ignore it.
        previous[signal.SIGINT] = signal.getsignal(signal.SIGINT)
        for number in previous:
            signal.signal(number, signal.SIG_IGN)
        remove(lambda pid: pid == os.getpid())
        for number, handler in previous.items():
            signal.signal(number, handler)
