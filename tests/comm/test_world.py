"""Hosts find each other without a setting for the network interface."""

import os
import socket
import subprocess
import sys

import pytest

from benchmarks.slow_network import address, slow_wire
from support import ROOT
from support.runs import TINY, make_corpus
from nanodomino.comm import world
from nanodomino.errors import UserError


def test_the_interface_towards_this_host_is_the_loopback():
    assert world.interface_of(world.address_towards("127.0.0.1")) in ("lo", "lo0")
    assert world.interface_of("192.0.2.77") is None


@pytest.mark.parametrize("master, before, after", [
    ("10.0.0.7", None, "eth1"), ("10.0.0.7", "ib0", "ib0"), ("localhost", None, "eth0"),
    ("nobody.invalid", None, None)],
    ids=["towards-the-master", "the-users-wins", "the-masters-own-name", "no-such-host"])
def test_the_interface_towards_the_master_is_chosen_unless_the_user_has_set_one(monkeypatch, master, before, after):
    def towards(host):
        if host == "nobody.invalid":
            raise socket.gaierror("no such name")
        return {"10.0.0.7": "10.0.0.9", "localhost": "127.0.1.1", world.UNUSED_ADDRESS: "172.16.0.3"}[host]

    monkeypatch.setattr(world, "address_towards", towards)
    monkeypatch.setattr(world, "interface_of", {"10.0.0.9": "eth1", "172.16.0.3": "eth0"}.get)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "unset")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME") if before is None else monkeypatch.setenv("GLOO_SOCKET_IFNAME", before)
    world.choose_interface(master)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == after


MEET = """
import os, torch
from nanodomino.comm.world import read_launch_environment, start_world
from nanodomino.mesh import make_mesh
start_world(read_launch_environment(os.environ), torch.device("cpu"), 150)
ranks = torch.ones(1) + int(os.environ["RANK"])
torch.distributed.all_reduce(ranks, group=make_mesh(1, 1, 2, torch.device("cpu"), 150).tp_group)
print("the sum is", int(ranks))
"""


def two_hosts(tmp_path, program=None, **environment):
    """Run two processes, each in a network namespace of its own whose host name resolves to 127.0.0.1. program: Python
    code to run; None: train.py. Returns [(output, exit code)]. Skips if namespaces may not be created."""
    flags = [*TINY, "--tp", "2", "--pp", "1", "--train-iters", "2", "--timeout", "15",
             "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run")]
    command = ["-c", program] if program else [str(ROOT / "train.py"), *flags]
    try:
        with slow_wire("1gbit", 2) as places:
            processes = []
            for rank, (prefix, _) in enumerate(places):
                of_rank = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
                of_rank |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                            "MASTER_ADDR": address(0), "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1",
                            "TORCH_CPP_LOG_LEVEL": "ERROR", **environment}
                processes.append(subprocess.Popen([*prefix, sys.executable, *command], env=of_rank, text=True, cwd=ROOT,
                                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            return [(process.communicate(timeout=180)[0], process.returncode) for process in processes]
    except UserError as error:
        pytest.skip(str(error))


def test_two_hosts_find_each_other_without_a_setting(tmp_path):
    """For the world and for a group of the mesh."""
    ended = two_hosts(tmp_path, MEET)
    assert all(code == 0 and "the sum is 3" in output for output, code in ended), ended


@pytest.mark.exhaustive
def test_hosts_that_cannot_reach_each_other_end_with_a_sentence(tmp_path):
    """The user's GLOO_SOCKET_IFNAME wins, even if it leads nowhere. gloo tries for 75 seconds."""
    ended = two_hosts(tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert all(code == 1 and "lost its peers" in output and "Traceback" not in output for output, code in ended), ended
    assert any("GLOO_SOCKET_IFNAME" in output for output, _ in ended), "the rank that waits for a connection"
