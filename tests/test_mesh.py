"""Starting a process, and the process groups of the mesh."""

import itertools
import os
import platform
import subprocess
import sys
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.runs import TINY, main_on_rank, make_corpus
from torch.distributed.distributed_c10d import _world

from nanodomino import mesh
from nanodomino.comm.world import LaunchInfo, start_world, tune_host
from nanodomino.errors import UserError
from nanodomino.mesh import make_mesh, meta_mesh
from nanodomino.settings.config import Config


FAULTS = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)       # no huge pages, so that every fault is one small page
from nanodomino.comm.world import tune_host
if sys.argv[1] == "kept":
    tune_host()
def step():
    tensors = [torch.ones(10_000_000) for _ in range(4)]
for _ in range(10):                  # until the heap stops growing
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 160e6)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is about glibc")
def test_freed_memory_serves_the_next_step():
    """Without tune_host() the kernel takes 160 MB back after every step and clears them again."""
    share = {way: float(subprocess.run([sys.executable, "-c", FAULTS, way], cwd=ROOT,
                                       capture_output=True, text=True, check=True).stdout) for way in ("kept", "left")}
    assert share["kept"] < 0.01
    assert share["left"] > 0.5, "tune_host() would be unnecessary"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch processes")
def test_a_rank_is_a_batch_process(monkeypatch):
    monkeypatch.setattr("nanodomino.comm.world.ctypes.CDLL", lambda name: None)       # leaves malloc as it is
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    tune_host()
    assert os.sched_getscheduler(0) == os.SCHED_BATCH
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_IDLE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *policy: pytest.fail("the user has chosen another policy"))
    tune_host()


# ---- process groups

def new_group_calls(monkeypatch, pp, dp, tp):
    """Return, for each rank of a grid of GPUs, make_mesh's calls of dist.new_group as a list of (ranks, options)."""
    calls = [[] for _ in range(pp * dp * tp)]
    monkeypatch.setattr(mesh, "nccl_options", lambda timeout, blocks: dict(backend="nccl", thread_blocks=blocks))
    monkeypatch.setattr(dist, "get_world_size", lambda: len(calls))
    for rank in range(len(calls)):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, **options: calls[rank].append((ranks, options)))
        make_mesh(pp, dp, tp, torch.device("cuda", 0), thread_blocks=Config(tp_max_ctas=7).thread_blocks)
    return calls


GRIDS = [(2, 2, 2), (1, 8, 1), (1, 1, 8), (3, 1, 2), (4, 2, 1), (8, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize("pp, dp, tp", GRIDS)
def test_an_axis_costs_one_split_in_which_every_rank_takes_part(monkeypatch, pp, dp, tp):
    """NCCL splits a communicator in one call of all its ranks. An axis of size 1 needs no split, and no GPU memory."""
    calls = new_group_calls(monkeypatch, pp, dp, tp)
    assert all(options.pop("use_local_synchronization") for of_rank in calls
               for _, options in of_rank), "other ranks create other groups"
    axes = [*zip(*calls)]
    assert len(axes) == (4 if pp > 1 else 3) and all(len(of_rank) == len(axes) for of_rank in calls)
    for size, most, axis in zip((tp, dp, pp, pp), (7, 16, 16, None), axes):
        rows = {tuple(ranks) for ranks, _ in axis}
        assert sorted(rank for row in rows for rank in row) == list(range(pp * dp * tp)), "each rank is in one row"
        assert all(rank in ranks for rank, (ranks, _) in enumerate(axis)), "each rank creates the group it belongs to"
        assert {options["backend"] for _, options in axis} == {"gloo" if size == 1 else "nccl"}
        assert {options.get("thread_blocks") for _, options in axis} == {most if size > 1 else None}


def test_no_collective_or_message_waits_for_a_matmul_that_was_launched_after_it(monkeypatch):
    options = lambda is_high_priority_stream: SimpleNamespace(  # noqa: E731
        urgent=is_high_priority_stream, config=SimpleNamespace(max_ctas=None))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    for given in ({}, dict(thread_blocks=4)):
        made = mesh.nccl_options(timedelta(seconds=9), **given)
        assert made["backend"] == "nccl" and made["pg_options"].urgent
        assert made["pg_options"]._timeout == timedelta(seconds=9)
        assert made["pg_options"].config.max_ctas == given.get("thread_blocks")


def test_nccl_starts_collectives_in_the_order_of_their_launches_unless_the_user_forbids_it(monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.append(
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]))
    for given in ({}, {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}):
        with mock.patch.dict(os.environ, given):
            start_world(LaunchInfo(), torch.device("cuda", 0))
    assert found == ["1", "0"]


def test_the_picture_has_every_rank_in_its_column():
    """Numbers of one and of two digits have the same width, but ten ranks have numbers of one digit."""
    _, *lines = meta_mesh(3, 2, 2).picture(["first", "middle", "last"]).splitlines()
    assert lines == ["  stage 0   [ 0  1]  [ 2  3]   first", "  stage 1   [ 4  5]  [ 6  7]   middle",
                     "  stage 2   [ 8  9]  [10 11]   last"]
    assert meta_mesh(1, 5, 2).picture(["all"]).splitlines()[1] == "  stage 0   [0 1]  [2 3]  [4 5]  [6 7]  [8 9]   all"
    head, line = meta_mesh(1, 2, 1, inner_axes=dict(cp=2)).picture(["all"]).splitlines()
    assert head.endswith("every 2 columns of brackets a replica") and line == "  stage 0   [0]  [1]  [2]  [3]   all"
    assert meta_mesh(1, 2, 1).picture(["all"]).splitlines()[0].endswith("every column of brackets a replica")


@pytest.mark.parametrize("cp, ep", [(1, 1), (2, 2)])
def test_coordinates_and_ranks_follow_the_formula(cp, ep):
    """Three stages, two replicas, with and without an inner axis: wrong formulas agree on cubes and on cp 1."""
    options = Config(context_parallel_size=cp, expert_model_parallel_size=ep, num_experts=2 * ep).mesh_options
    for rank, (p, d, c, t) in enumerate(itertools.product(range(3), range(2), range(cp), range(2))):
        mesh = meta_mesh(3, 2, 2, p, d, t, **options, **({"cp": c} if cp > 1 else {}))
        assert (mesh.rank, mesh.pp_rank, mesh.dp_rank, mesh.tp_rank) == (rank, p, d, t) == (mesh.rank_of(), p, d, t)
        assert mesh.axis("tp") == (2, t) and mesh.axis("pp") == (3, p) and mesh.axis("dp") == (2 * cp, d * cp + c)
        assert mesh.axis("cp") == (cp, c) and mesh.axis("ep") == (ep, (d * cp + c) % ep) and mesh.axis("?") == (1, 0)
        assert mesh.rows["dp"] == [(p * 2 * cp + i) * 2 + t for i in range(2 * cp)]
        assert [mesh.rank_of(pp=i) for i in range(3)] == mesh.rows["pp"] == [
            ((i * 2 + d) * cp + c) * 2 + t for i in range(3)]
        assert mesh.axis("embedding") == ((1, 0) if p == 1 else (2, p // 2)) and (mesh.pp_rank == 0) == (p == 0)
        assert mesh.rank_of(dp=0, tp=1) == (p * 2 * cp + c) * 2 + 1, "a coordinate of 0 is a coordinate"


def test_a_world_that_is_a_divisor_of_the_grid_or_a_multiple_is_refused(monkeypatch):
    for world_size in (4, 16):
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        with pytest.raises(UserError, match=f"world size {world_size} must equal pp x dp x tp = 2 x 2 x 2 = 8"):
            make_mesh(2, 2, 2, torch.device("cpu"))


def group_rank(*sizes, **options):
    """Return, for two meshes created in one world, which ranks each group of a rank holds, as a sum of 2^rank."""
    sums = []
    for _ in range(2):
        made = make_mesh(*sizes, torch.device("cpu"), **options)
        for name, group in made.groups.items():
            total = torch.tensor(float(2 ** dist.get_rank()))
            dist.all_reduce(total, group=group)
            sums.append((name, int(total)))
    assert made.rank_of() == dist.get_rank() and made.axis("dp") == (made.dp * made.sizes.get("cp", 1),
                                                                     made.rows["dp"].index(dist.get_rank()))
    assert sums[:len(made.groups)] == sums[len(made.groups):]
    return dict(sums)


def test_groups_are_made_of_the_right_ranks_also_a_second_time(pool):
    """Middle stages have an embedding group too: if they created fewer groups, names of later groups would differ."""
    for rank, found in enumerate(pool.run(group_rank, 4, 1, 2)):
        assert found == dict(tp=3 << (rank & 6), dp=1 << rank, pp=0b1010101 << (rank & 1), embedding=(
            0b1000001 if rank < 2 or rank > 5 else 0b10100) << (rank & 1))
    # ranks that share a sample are neighbours in the dp group, and neighbours in the dp group share experts
    options = Config(context_parallel_size=2, expert_model_parallel_size=2).mesh_options
    for rank, found in enumerate(pool.run(partial(group_rank, **options), 1, 2, 2)):
        neighbours = 5 << (rank & 5)
        assert found == dict(tp=3 << (rank & 6), cp=neighbours, dp=0b1010101 << (rank & 1), pp=1 << rank,
                             ep=neighbours, ep_counts=neighbours, expert_dp=0b10001 << (rank & 3))


def timeouts_rank(flags):
    """Run train.py; return how it ended and the timeouts (seconds) of all its groups, the checkpoints' included."""
    waits, destroy = [], dist.destroy_process_group
    with pytest.MonkeyPatch.context() as patch:
        def look_and_destroy():
            waits.extend(group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                         for group in _world.pg_map)
            destroy()

        patch.setattr(dist, "destroy_process_group", look_and_destroy)
        return main_on_rank(flags, bad_steps=()), waits


def test_every_group_of_a_run_has_its_timeout(pool, tmp_path):
    """A new group does not inherit the world's timeout: with torch's default, others would wait half an hour for a rank
    that hangs while it saves."""
    flags = [*TINY, "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run"), "--tp", "1", "--pp",
             "2", "--train-iters", "1", "--timeout", "77"]
    for ended, waits in pool.run(timeouts_rank, flags, world_size=2):
        assert ended.code == 0 and waits == [77.0] * 6, "the world's, tp, dp, pp, the tied matrix's, the checkpoints'"


def test_the_world_has_its_timeout_before_the_first_collective(monkeypatch):
    asked = {}
    monkeypatch.setattr("nanodomino.comm.world.tune_host", lambda: None)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, timeout=None: asked.update(meet=timeout)
                        or iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout=None, **more: asked.update(world=timeout))
    start_world(LaunchInfo(launched=True), torch.device("cpu"), 77)
    assert asked == dict(meet=timedelta(seconds=77), world=timedelta(seconds=77))
