"""Hosts find each other without a setting for the network interface."""

import contextlib
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.slow_network import address, slow_wire
from support import ROOT
from nanodomino.comm import world
from nanodomino.errors import UserError


ADDRESSES = {"lo": "127.0.0.1", "eth0": "172.16.0.3", "eth1": "10.0.0.9"}
TOWARDS = {"10.0.0.7": "10.0.0.9", "localhost": "127.0.1.1", "192.0.2.1": "172.16.0.3"}


class FakeSocket(contextlib.nullcontext):
    """A UDP socket of a host with the interfaces ADDRESSES."""

    def connect(self, address):
        if address[0] not in TOWARDS:
            raise socket.gaierror("no such name")
        self.enter_result.address = TOWARDS[address[0]]

    def getsockname(self):
        return self.address, 1


@pytest.mark.parametrize("master, before, after", [
    ("10.0.0.7", None, "eth1"), ("10.0.0.7", "ib0", "ib0"), ("localhost", None, "eth0"),
    ("nobody.invalid", None, None)],
    ids=["towards-the-master", "the-users-wins", "the-masters-own-name", "no-such-host"])
def test_the_interface_towards_the_master_is_chosen_unless_the_user_has_set_one(monkeypatch, master, before, after):
    def ioctl(probe, request, name):
        return bytes(20) + socket.inet_aton(ADDRESSES[name.rstrip(b"\0").decode()]) + bytes(232)

    probe = FakeSocket()
    probe.enter_result = probe
    monkeypatch.setattr(world, "socket", SimpleNamespace(
        socket=lambda *_: probe, if_nameindex=lambda: [*enumerate(ADDRESSES)], AF_INET=2, SOCK_DGRAM=2,
        inet_ntoa=socket.inet_ntoa))
    monkeypatch.setattr("fcntl.ioctl", ioctl)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", before or "")
    if before is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    world.choose_interface(master)
    assert os.environ.pop("GLOO_SOCKET_IFNAME", None) == after


MEET = """
import os, torch
from nanodomino.comm.world import read_launch_environment, start_world
from nanodomino.mesh import make_mesh
start_world(read_launch_environment(os.environ), torch.device("cpu"), 150)
ranks = torch.ones(1) + int(os.environ["RANK"])
torch.distributed.all_reduce(ranks, group=make_mesh(1, 1, 2, torch.device("cpu"), 150).tp_group)
print("the sum is", int(ranks))
"""


def test_two_hosts_find_each_other_without_a_setting():
    """For the world and for a group of the mesh: two processes, each in a network namespace of its own whose host name
    resolves to 127.0.0.1."""
    try:
        with slow_wire("1gbit", 2) as places:
            processes = []
            for rank, (prefix, _) in enumerate(places):
                of_rank = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
                of_rank |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                            "MASTER_ADDR": address(0), "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1",
                            "TORCH_CPP_LOG_LEVEL": "ERROR"}
                processes.append(subprocess.Popen([*prefix, sys.executable, "-c", MEET], env=of_rank, text=True,
                                                  cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            ended = [(process.communicate(timeout=300)[0], process.returncode) for process in processes]
    except UserError as error:
        pytest.skip(str(error))
    assert all(code == 0 and "the sum is 3" in output for output, code in ended), ended
