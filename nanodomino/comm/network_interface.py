"""Which of this host's network interfaces leads to the other hosts?

gloo tells the others at which address it can be reached. Left alone it takes the one that the host's own name stands
for, and that is 127.0.0.1 on many systems: each host then asks the others to connect to themselves, and healthy ranks
look as if they were dead. The kernel knows better: asked for a way to MASTER_ADDR, it says from which address it would
send. GLOO_SOCKET_IFNAME, where somebody has set it, wins.
"""

import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915             # of linux/sockios.h
ELSEWHERE = "192.0.2.1"          # an address that nobody has (RFC 5737): the way to it is the way out


def address_towards(host: str) -> str:
    """From which of its addresses this host would send there. Nothing is sent: UDP has no handshake."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:                                    # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def choose_interface(master_addr: str):
    """Have gloo use the interface towards the other hosts, if one is found and nobody has chosen one."""
    try:
        address = address_towards(master_addr)
        if address.startswith("127."):                         # the host that the name stands for, asked by itself
            address = address_towards(ELSEWHERE)
        if name := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    except OSError:                                            # no such name, no way out: gloo's own words will tell
        pass
