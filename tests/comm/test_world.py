"""Which kernels a run chooses, and how processes on several hosts find each other."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from benchmarks.slow_network import slow_wire
from support import ROOT
from support.harness import tiny
from support.runs import TINY, main_on_rank, make_corpus

from nanodomino.comm.device import choose_kernels
from nanodomino.comm.world import LaunchInfo, start_world
from nanodomino.errors import UserError


def kernels_of_a_run(flags):
    """Return (exit code, torch's choices) after a run of train.py."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    code = main_on_rank(flags, ()).code
    return code, dict(strict=torch.get_deterministic_debug_mode() == 2, cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
                      fills=torch.utils.deterministic.fill_uninitialized_memory,
                      workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


@pytest.mark.parametrize("flags, changes", [
    ([], {}), (["--reset-attention-mask"], dict(cudnn=False)),
    (["--deterministic-mode"], dict(strict=True, cudnn=False, fills=False, workspace=":4096:8"))],
    ids=["usual", "documents", "deterministic"])
def test_the_kernels_of_a_run(pool, tmp_path, flags, changes):
    """In torch's warn-only mode the backward of fused attention would stay nondeterministic. With a mask, the backward
    of cuDNN's attention may return NaN."""
    flags = [*TINY, "--data-path", str(make_corpus(tmp_path)), "--train-iters", "2", "--eval-iters", "0", *flags,
             "--run-dir", str(tmp_path / "run")]
    usual = dict(strict=False, cudnn=True, fills=True, workspace=None)
    assert pool.run(kernels_of_a_run, flags, world_size=1) == [(0, usual | changes)]


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

@pytest.mark.parametrize("hosts, error, says", [
    (2, "Gloo connectFullMesh failed with Connect timeout", "on each host to the network interface that leads to the"),
    (1, "Gloo connectFullMesh failed with Connect timeout", "^Gloo connectFullMesh failed with Connect timeout$"),
    (2, "Connection closed by peer", "^Connection closed by peer$")])
def test_hosts_that_announce_an_address_of_their_own_are_told_to_name_the_interface(monkeypatch, hosts, error, says):
    """gloo announces the address of the host's own name, which may be 127.0.0.1. On one host a rank has died."""
    def fail(*_, **__):
        raise RuntimeError(error)

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(UserError if hosts == 2 and "Mesh" in error else RuntimeError, match=says):
        start_world(LaunchInfo(0, 2, 0, 2 // hosts), torch.device("cpu"))


MEET = """
import os, torch
from nanodomino.comm.world import read_launch_environment, start_world
from nanodomino.mesh import make_mesh
start_world(read_launch_environment(os.environ), torch.device("cpu"), 150)
ranks = torch.ones(1) + int(os.environ["RANK"])
torch.distributed.all_reduce(ranks, group=make_mesh(1, 1, 2, torch.device("cpu"), 150).tp_group)
print("the sum is", int(ranks))
"""


def test_two_hosts_with_a_named_interface_meet():
    """For the world and for a group of the mesh: two processes, each in a network namespace of its own whose host name
    resolves to 127.0.0.1."""
    try:
        with slow_wire("1gbit", 2) as places:
            processes = []
            for rank, (prefix, environment) in enumerate(places):
                environment = os.environ | environment | {
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                    "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen([*prefix, sys.executable, "-c", MEET], env=environment, text=True,
                                                  cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            ended = [(process.communicate(timeout=300)[0], process.returncode) for process in processes]
    except UserError as error:
        pytest.skip(str(error))
    assert all(code == 0 and "the sum is 3" in output for output, code in ended), ended
