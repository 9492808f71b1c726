"""Find the network interface through which the other hosts can reach this one.

gloo sends the other ranks an address to connect to. By default this is the address of the host's own name. On many
systems that is 127.0.0.1, so each host tells the others to connect to themselves, and healthy ranks look dead.

The kernel knows better: it can tell from which local address it would send to MASTER_ADDR. We look up the interface
that has this address, and pass its name to gloo in GLOO_SOCKET_IFNAME, unless the user has set that variable.
"""

import os
import socket
import struct

SIOCGIFADDR = 0x8915             # from linux/sockios.h: get an interface's address
UNUSED_ADDRESS = "192.0.2.1"     # no host has it (RFC 5737), so the kernel picks the route to other networks


def address_towards(host: str) -> str:
    """Return the local address from which this host would send to `host`. Connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address, for example "eth0", or None."""
    import fcntl                                               # not on Windows, where errors.py says so

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:                                    # the interface has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def choose_interface(master_addr: str):
    """Set GLOO_SOCKET_IFNAME to the interface towards the other hosts, if there is one. A user's own value stays."""
    try:
        address = address_towards(master_addr)
        if address.startswith("127."):                         # this host is MASTER_ADDR itself
            address = address_towards(UNUSED_ADDRESS)
        if name := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    except OSError:                                            # unknown host or no route: gloo will report it
        pass
