"""Builds a slow network within one machine, with real packets and a chosen rate.

The loopback of a machine carries several gigabytes per second, so there is hardly any communication to hide. Therefore
each rank gets its own network namespace, which acts as a host, and Linux limits the rate at which it sends:

    rank 0's namespace                    hub                    rank 1's namespace
      10.77.0.1  wire ==tbf==> port0 --- bridge --- port1 <==tbf== wire  10.77.0.2

A veth pair is a cable with two ends: `wire` in the rank's namespace and a port in the hub's. The bridge is the switch.
tbf, a token bucket filter, limits what a rank sends to `rate` bits per second. What a rank receives is limited by the
senders' filters. Tokens collect while a link is idle, so after a pause BURST seconds of data (at least 128 KiB) leave
at once.

A namespace lives as long as a process in it, and its devices with it. Each one is kept by a process that ends together
with this one, so nothing is left even if this process is killed. This needs root, iproute2's `ip` and `tc`, and
`unshare` and `nsenter` of util-linux, which every Linux has.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager

from nanodomino.errors import require

INTERFACE = "wire"                         # the name of the network interface in each rank's namespace
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
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
    require(1e6 <= rate <= 100e9,
            f"--wire must be a rate from 1mbit to 100gbit, in kbit, mbit or gbit per second, but is '{text}'; "
            "try --wire 500mbit")
    return round(rate)


@contextmanager
def namespace():
    """Make a network namespace, and yield the id of the process that keeps it: `cat`, until its input is closed."""
    with subprocess.Popen(["unshare", "--net", "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as keeper:
        started = keeper.stdout.readline()                     # a new session gets no Ctrl-C
        require(started, failed("unshare --net", [] if started else keeper.stderr))
        yield keeper.pid


def inside(keeper: int) -> list[str]:
    """Return the words that start a command in the namespace of this process."""
    return ["nsenter", f"--net=/proc/{keeper}/ns/net"]


def failed(command: str, errors) -> str:
    return (f"--wire needs network namespaces, veth, bridge and tbf, but '{command}' failed: "
            f"{' '.join(' '.join(errors).split())}; run a container with --privileged, or leave --wire out")


def build(hub: int, ranks: list[int], rate: int):
    """Build the network drawn above. hub, ranks: the processes of the namespaces; rate: bits per second."""
    burst = max(2 * LARGEST_PACKET, round(BURST * rate / 8))
    commands = [(hub, "ip link add bridge type bridge"), (hub, "ip link set bridge up")]
    for rank, keeper in enumerate(ranks):
        commands += [(hub, f"ip link add port{rank} type veth peer name {INTERFACE} netns {keeper}"),
                     (hub, f"ip link set port{rank} master bridge up"),
                     (keeper, f"ip address add 10.77.0.{rank + 1}/16 dev {INTERFACE}"), (keeper, "ip link set lo up"),
                     (keeper, f"ip link set {INTERFACE} up"),
                     (keeper, f"tc qdisc add dev {INTERFACE} root tbf rate {rate}bit burst {burst} "
                              f"limit {burst + round(QUEUE * rate / 8)}")]
    for keeper, command in commands:
        done = subprocess.run([*inside(keeper), *command.split()], capture_output=True, text=True)
        require(done.returncode == 0, failed(command, [done.stderr]))


@contextmanager
def slow_wire(rate: str, world_size: int):
    """Build the network, which ends with the context.

    Yields one (command prefix, environment variables) per rank. A process started with both runs in the rank's
    namespace. rate: how fast each rank can send, such as '500mbit'. Raises UserError if the network can't be built."""
    bits = parse_rate(rate)
    require(shutil.which("ip") and shutil.which("tc"),
            "--wire needs the commands ip and tc; install iproute2, or leave --wire out")
    require(os.geteuid() == 0, "--wire needs root, because it makes network namespaces; use sudo, or leave --wire out")
    environment = {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE,
                   "TORCH_CPP_LOG_LEVEL": "ERROR"}             # silences c10d's warning about unknown host names
    with ExitStack() as stack:
        hub, *ranks = [stack.enter_context(namespace()) for _ in range(world_size + 1)]
        build(hub, ranks, bits)
        yield [(inside(keeper), environment) for keeper in ranks]
