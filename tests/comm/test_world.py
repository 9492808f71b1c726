"""Which kernels a run chooses, and how processes on several hosts find each other."""

import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
from benchmarks.slow_network import slow_wire
from support import ROOT
from support.harness import tiny

from nanodomino.comm.device import choose_kernels
from nanodomino.comm.world import choose_interface
from nanodomino.errors import UserError


def kernels_of(config):
    """Return what torch may choose after choose_kernels()."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    choose_kernels(config, torch.device("cpu"))
    return dict(strict=torch.get_deterministic_debug_mode() == 2, cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
                fills=torch.utils.deterministic.fill_uninitialized_memory,
                workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


@pytest.mark.parametrize("settings, changes", [
    ({}, {}), (dict(reset_attention_mask=True), dict(cudnn=False)),
    (dict(deterministic_mode=True), dict(strict=True, cudnn=False, fills=False, workspace=":4096:8"))],
    ids=["usual", "documents", "deterministic"])
def test_the_kernels_of_a_run(pool, settings, changes):
    """In torch's warn-only mode the backward of fused attention would stay nondeterministic. With a mask, the backward
    of cuDNN's attention may return NaN."""
    usual = dict(strict=False, cudnn=True, fills=True, workspace=None)
    assert pool.run(kernels_of, tiny(1, **settings), world_size=1) == [usual | changes]


@pytest.mark.parametrize("layout, deterministic", [
    (dict(tensor_model_parallel_size=2), True), (dict(data_parallel_size=2), False)])
def test_the_compiler_chooses_the_same_kernels_on_each_tensor_parallel_rank(layout, deterministic):
    from torch._inductor import config as inductor
    with inductor.patch(deterministic=False):
        choose_kernels(tiny(2, compile=True, **layout), torch.device("cpu"))
        assert inductor.deterministic == deterministic


@pytest.mark.parametrize("settings, masks", [
    ({}, False), (dict(reset_attention_mask=True), True), (dict(window_size=3), True),
    (dict(context_parallel_size=2), True), (dict(context_parallel_size=2, cp_comm_type="a2a"), False)], ids=str)
def test_attention_that_may_have_a_bias_does_not_use_cudnn(monkeypatch, settings, masks):
    chosen = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    choose_kernels(tiny(2, **settings), torch.device("cpu"))
    assert chosen == [not masks]


# ---- several hosts

INTERFACES = {"lo": "127.0.0.1", "eth0": "172.16.0.3", "eth1": "10.0.0.9"}
SENDS_FROM = {"10.0.0.7": "10.0.0.9", "localhost": "127.0.1.1", "192.0.2.1": "172.16.0.3"}     # to reach an address


@pytest.mark.parametrize("master, before, after", [
    ("10.0.0.7", {}, "eth1"), ("10.0.0.7", dict(GLOO_SOCKET_IFNAME="ib0"), "ib0"), ("localhost", {}, "eth0"),
    ("nobody.invalid", {}, None)],
    ids=["towards-the-master", "the-users-wins", "the-masters-own-name", "no-such-host"])
def test_the_interface_towards_the_master_is_chosen_unless_the_user_has_set_one(monkeypatch, master, before, after):
    def connect(address):
        if address[0] not in SENDS_FROM:
            raise socket.gaierror("no such name")
        probe.getsockname.return_value = SENDS_FROM[address[0]], 1

    probe = mock.MagicMock(connect=connect)
    probe.__enter__.return_value = probe
    monkeypatch.setattr(socket, "socket", lambda *_: probe)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(INTERFACES)])
    monkeypatch.setattr("fcntl.ioctl", lambda probe, request, name: bytes(20) + socket.inet_aton(
        INTERFACES[name.rstrip(b"\0").decode()]) + bytes(16))
    monkeypatch.setattr(os, "environ", before)
    choose_interface(master)
    assert before.get("GLOO_SOCKET_IFNAME") == after


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
            for rank, (prefix, environment) in enumerate(places):
                environment = os.environ | environment | {
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                    "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1"}
                environment = {name: value for name, value in environment.items() if not name.endswith("IFNAME")}
                processes.append(subprocess.Popen([*prefix, sys.executable, "-c", MEET], env=environment, text=True,
                                                  cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            ended = [(process.communicate(timeout=300)[0], process.returncode) for process in processes]
    except UserError as error:
        pytest.skip(str(error))
    assert all(code == 0 and "the sum is 3" in output for output, code in ended), ended
