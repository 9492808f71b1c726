"""A run that is stopped, killed, hanging or out of disk ends in time and says why; resumed, it continues bit by bit.

Runs that need no signal run in the pool, the others in forked ranks or, where torchrun itself matters, under torchrun.
"""

import contextlib
import errno
import os
import re
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.harness import build, random_data, tiny
from support.runs import (TINY, Job, differences, main_on_rank, make_corpus, metric_points, needs_proc, saved_steps,
                          train_in_pool, wait_until)

import train
from nanodomino.checkpoint import save
from nanodomino.checkpoint.load import checkpoints_of
from nanodomino.checkpoint.format import verify
from nanodomino.checkpoint.save import drift_warning
from nanodomino.comm.world import LaunchInfo
from nanodomino.run.failures import PEER_ERROR, unresponsive_ranks

LENGTH = ["--train-iters", 14, "--save-interval", 3]
LONG = ["--train-iters", 1_000_000, "--eval-interval", 1_000_000]

# What goes wrong is the first argument; RANK and the step decide where.
DRIVER = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
import train
from nanodomino.run import session

fault, rank, train_step = sys.argv.pop(1), int(os.environ["RANK"]), train.train_step
if "torchrun" in fault:                                     # under the fork server, the test knows the pids
    with open(os.environ["PLACES"], "a") as file:
        print(json.dumps((rank, os.getpid())), file=file)
if "terminal" in fault:
    terminal, screen = os.openpty()
    os.dup2(screen, 1), os.dup2(screen, 2), os.close(screen)

def step(number, *others, **more):
    if "slow" in fault:
        time.sleep(0.5)
    while "waits" in fault and (number, rank) == (5, 1) and not others[5]():        # until a signal asks it to stop
        time.sleep(0.01)
    if "terminal" in fault and number == 3:                 # from now on each write to it fails
        os.close(terminal)
    if "raises" in fault and (number, rank) == (3, 2):
        raise ValueError("rank 2 has had enough")
    return train_step(number, *others, **more)

if "device" in fault:           # as on NCCL: a queue with work in it, and collectives that do not raise in time
    start_world, make_mesh = session.start_world, session.make_mesh
    session.start_world = lambda place, device, timeout: start_world(place, device, timeout + 600)
    session.make_mesh = (lambda pp, dp, tp, device, timeout, *more, **named:
                       make_mesh(pp, dp, tp, device, timeout + 600, *more, **named))
    class Busy(session.Watchdog):
        def __init__(self, launch, device, timeout):
            super().__init__(launch, torch.device("cuda"), timeout)
    session.Watchdog, torch.cuda.set_device = Busy, lambda device: None
    torch.cuda.current_stream = lambda: type("Queue", (), dict(query=lambda queue: False))()

train.train_step = step
train.run_rank(train.main, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def job(tmp_path, corpus, fork_server):
    """job(run_dir, *flags, ...): a launch in tmp_path; its processes are killed after the test."""
    jobs = []
    (tmp_path / "driver.py").write_text(DRIVER)

    def job(run_dir, *flags, fault="", **options):
        server = None if "torchrun" in fault else fork_server
        jobs.append(Job(tmp_path, corpus, run_dir, *flags, word=fault or "none", script=tmp_path / "driver.py",
                        fork_server=server, **options))
        return jobs[-1]

    yield job
    for run in jobs:
        run.close()


def last_step(run) -> int:
    """Return the step of the newest checkpoint, which must be intact."""
    verify(checkpoints_of(run.run_dir)[0])
    return saved_steps(run.run_dir)[0]


# ---- told to stop

@needs_proc
def test_a_stopped_run_saves_and_resumes_with_the_same_bits(job):
    """It stops after the step in which the signal arrives and saves this step, whatever the save interval. Here the
    terminal is closed, so that the run can't print either."""
    alone, first = job("alone", *LENGTH), job("run", *LENGTH, fault="waits terminal")
    first.wait_for(lambda: first.steps() >= 4)
    first.send(1, signal.SIGHUP)
    assert first.end() != 0 and first.codes()[1] == 128 + signal.SIGHUP, first.output()
    assert last_step(first) == first.steps() <= 5, first.output()
    stopped_after, second = last_step(first), job("run", *LENGTH)
    assert second.end() == 0 and f"resuming after step {stopped_after} of 14" in second.output(), second.output()
    assert alone.end() == 0 and not differences(second.run_dir, alone.run_dir)


@needs_proc
@pytest.mark.exhaustive
def test_under_torchrun_a_restart_resumes_and_ctrl_c_saves(job):
    flags = [*LENGTH, "--tp", 2, "--pp", 2]
    run, alone = job("run", *flags, restarts=3, fault="slow torchrun", processes=4), job("alone", *flags, processes=4)
    run.wait_for(lambda: run.steps() >= 4)
    run.send(0, signal.SIGKILL)
    run.wait_for(lambda: "resuming after step " in run.output())
    run.wait_for(lambda: run.steps() >= 6)
    run.process.send_signal(signal.SIGINT)
    assert run.end() != 0 and last_step(run) == run.steps() < 14, run.output()
    assert job("run", *flags, processes=4).end() == 0
    assert alone.end() == 0 and not differences(run.run_dir, alone.run_dir)


@needs_proc
def test_a_second_signal_ends_a_rank_that_waits_for_a_hanging_peer(job):
    """Inside a collective no Python signal handler runs, and the timeout may be ten minutes away."""
    run = job("run", *LONG)
    run.wait_for(lambda: run.steps() >= 3)
    run.send(1, signal.SIGSTOP)
    time.sleep(1)
    waiting = run.send(0, signal.SIGTERM)
    run.wait_for(lambda: "stopping after this step with a checkpoint" in run.output())
    assert run.ranks()[0] == waiting, "the first signal asks for a checkpoint"
    while 0 in run.ranks():                         # signals within two seconds count as one
        with contextlib.suppress(KeyError):         # it ends just now
            run.send(0, signal.SIGTERM)
        time.sleep(1)
    run.send(1, signal.SIGKILL)
    run.end()
    assert run.codes()[0] == 128 + signal.SIGTERM, run.output()


# ---- killed

@needs_proc
@pytest.mark.parametrize("flags, processes", [
    ([], 2), pytest.param(["--tp", 2, "--pp", 2], 4, marks=pytest.mark.exhaustive)], ids=["dp 2", "tp 2 pp 2"])
def test_a_rank_killed_during_a_save_costs_only_the_steps_since_the_last(job, flags, processes):
    """The other ranks only see a closed connection. They end soon, and print nothing: they must not blame each other,
    nor bury the message of a rank that failed."""
    alone, first = (job(folder, *LENGTH, *flags, processes=processes) for folder in ("alone", "run"))
    first.wait_for(lambda: first.steps() >= 4 and checkpoints_of(first.run_dir))
    wait_until(lambda: first.saving() or not first.ranks(), pause=0.001)             # a save may take milliseconds
    first.send(processes - 1, signal.SIGKILL)
    assert first.end() == -signal.SIGKILL and not first.ranks()
    assert not any(word in first.output() for word in ("failed", "lost", "error: ")), first.output()
    saved = last_step(first)
    assert first.steps() - saved <= 6, "the last save may have been unfinished"
    second = job("run", *LENGTH, *flags, processes=processes)
    assert second.end() == 0 and f"resuming after step {saved} " in second.output(), second.output()
    assert alone.end() == 0 and not differences(second.run_dir, alone.run_dir)
    assert not second.saving(), "what the killed one left is gone"


# ---- failing

@needs_proc
@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_a_failing_rank_ends_the_others_and_is_reported_alone(job, launcher):
    """Its message follows its traceback, on a line of its own. torchrun's report quotes it, as the last thing on the
    terminal."""
    words = "rank 2 failed in step 3: ValueError: rank 2 has had enough"
    run = job("run", *LONG, processes=4, fault=f"raises {launcher}")
    wait_until(lambda: run.steps() == 2)
    assert run.end() == 1 and not run.ranks() and run.steps() == 2, run.output()
    assert f"\n{words}\n" in run.output().split("Traceback (most recent call last)")[1], run.output()
    assert run.output().count("failed in step") == run.output().count(words) and "peer" not in run.output()
    if launcher == "torchrun":
        cause = run.output().split("Root Cause")[-1]
        assert "(local_rank: 2)" in cause and "exitcode  : 1" in cause and words in cause.splitlines()[-2], cause


@needs_proc
@pytest.mark.parametrize("fault", ["", pytest.param("device", marks=pytest.mark.exhaustive)],
                         ids=["gloo", "as on a GPU"])
def test_a_rank_that_hangs_is_named_with_the_step(job, fault):
    """Every process group has --timeout: torch's default is half an hour, and a new group does not inherit the world's.
    On a GPU the host sits in a call that does not raise; there the watchdog acts."""
    run = job("run", *LONG, "--timeout", 15, "--tp", 2, "--pp", 2, processes=4, fault=fault)
    run.wait_for(lambda: run.steps() >= 3)
    hanging = run.send(2, signal.SIGSTOP)
    steps = run.steps()
    run.wait_for(lambda: "lost its peers" in run.output())
    wait_until(lambda: set(run.ranks().values()) <= {hanging})
    run.send(2, signal.SIGKILL)                     # torchrun would do it, after 30 seconds
    assert run.end() != 0
    assert any(f"lost its peers in step {step} (dead or hanging: rank 2)" in run.output()
               for step in (steps + 1, steps + 2)), run.output()


@pytest.mark.parametrize("lost, text", [
    (True, "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:41234"),
    (True, "writev [127.0.0.1]:8871: Broken pipe"), (True, "Timed out waiting 10000ms for recv operation to complete"),
    (True, "Application timeout caused pair closure"), (True, "timed out waiting for the device"),
    (True, "SO_ERROR: Connection refused, remote=[10.0.0.2]:52011"), (True, "Gloo connectFullMesh failed"),
    (True, "wait timeout after 300000ms, keys: /default_pg/0//cuda//timeout_dump"),
    (True, "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    (True, "NCCL error: remote process exited or there was a network error"),
    (False, "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"),
    (False, "CUDA error: peer access is not supported between these two devices"),
    (False, "CUDA error: the launch timed out and was terminated")])
def test_errors_caused_by_a_peer_are_told_from_own_errors(lost, text):
    """In the words of gloo, TCPStore, NCCL and CUDA. A rank's own error must be printed with its traceback."""
    assert bool(PEER_ERROR.search(text)) == lost


def test_a_rank_is_called_dead_if_it_reports_nothing_since_the_last_restart(monkeypatch):
    """torchrun's store outlives a restart, and so does what the ranks reported before it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("nanodomino.run.failures.time.sleep", lambda seconds: None)
    said = []
    for restarts, rank, port in ((0, 0, store.port), (0, 1, store.port), (1, 0, store.port), (1, 0, 1)):
        if port == 1:                                    # where nobody answers
            monkeypatch.setattr("nanodomino.run.failures.PAUSE", 0.1)
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        said.append(unresponsive_ranks(LaunchInfo(rank=rank, world_size=2)))
    assert said == [" (dead or hanging: rank 1)", "", " (dead or hanging: rank 1)", ""]


# ---- not finite

def test_steps_that_are_not_finite_on_some_ranks_are_skipped_by_all_and_end_a_run_in_a_row(pool, tmp_path):
    """Otherwise the ranks would diverge: the losses of ranks 2 and 3 alone are NaN. Of the saved weights, those of step
    2 were the last whose loss is known to be finite. test_resume.py shows that a checkpoint holds the count, so a run
    that restarts every few steps does not continue forever without a good one."""
    make_corpus(tmp_path)
    run = tmp_path / "run"
    ended = train_in_pool(pool, tmp_path, "--run-dir", run, "--train-iters", 8, "--max-skipped-steps", 2, "--tp", 2,
                          "--pp", 2, "--save-interval", 2, world_size=4, bad_steps=(1, 3, 5, 6))
    assert [step for step, skipped in metric_points(run, "skipped") if skipped] == [1, 3, 5, 6]
    assert all(loss < 6 for step, loss in metric_points(run, "loss") if step in (2, 4))
    assert "error: 2 steps in a row, up to step 6, had a loss or gradient that is not finite" in ended.output
    assert ended.code == 1 and f"train.py --load {run}/checkpoints/step-00000002 --train-iters 8 --lr " in ended.output


@pytest.mark.parametrize("world_size, flags, problem, saved", [
    (1, "--train-iters 5", "the valid loss of step 5 is nan", [5, 4, 2]),
    (2, "--train-iters 6 --eval-iters 0 --tp 1 --save-interval 1", "the loss of step 6 is nan", [6, 5, 4, 3]),
    (2, "--train-iters 5 --eval-iters 0 --tp 2 --fp16", "the weights after step 5 are not finite", [4, 2])],
    ids=["evaluation", "last step", "weights"])
def test_a_run_that_diverges_at_its_end_says_how_to_go_on(pool, tmp_path, world_size, flags, problem, saved):
    """On all ranks alike, with exit code 1. The command that it prints works. Weights in fp16 become infinite."""
    make_corpus(tmp_path)
    run, flags = tmp_path / "run", ["--run-dir", tmp_path / "run", "--save-interval", 2, *flags.split()]
    assert train_in_pool(pool, tmp_path, *flags, "--train-iters", 4, "--sample-tokens", 0,
                         world_size=world_size).code == 0
    ended = train_in_pool(pool, tmp_path, *flags, "--lr", 1e30, world_size=world_size)
    (said,) = re.findall(rf"error: {problem}.*; go on from the last good checkpoint with train.py (.*)", ended.output)
    assert ended.code == 1 and said == f"--load {run}/checkpoints/step-00000004 --train-iters {flags[5]} --lr 0.004"
    assert saved_steps(run) == saved
    again = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "new", *said.split(), world_size=world_size)
    assert again.code == 0 and saved_steps(tmp_path / "new")[0] == int(flags[5]), again


def test_a_stage_with_fp32_parameters_beside_16_bits_saves_with_the_others(pool, tmp_path):
    """A router's bias is in fp32, and only the second stage has one: the check for finite weights must not notice."""
    make_corpus(tmp_path)
    flags = ("--pp 2 --tp 1 --num-layers 2 --num-experts 4 --moe-layer-freq 2 --disable-bias-linear --train-iters 1 "
             "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --bf16 --eval-iters 0 "
             "--sample-tokens 0").split()
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", *flags, world_size=2)
    assert ended.code == 0 and saved_steps(tmp_path / "run") == [1], ended


# ---- drifted apart, or out of disk

BOX = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=12)
EXPERTS = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2, num_experts=4, num_layers=2,
               disable_bias_linear=True, moe_router_enable_expert_bias=True)


def nudged_rank(config, data, nudges):
    """Return the warnings before and after each (rank, name, place) of `nudges` changes the last bit of an element."""
    mesh, model, optimizer, stage = build(config)
    train.train_step(1, stage, optimizer, data, config, mesh)
    before = drift_warning(model, mesh)
    for rank, name, place in nudges:
        if rank == dist.get_rank():
            numbers = dict(model.named_parameters())[name].detach().view(-1)
            numbers.view({4: torch.int32, 2: torch.int16}[numbers.element_size()])[place] ^= 1
    return before, drift_warning(model, mesh)


@pytest.mark.parametrize("options, nudges", [
    # a copy over dp, over tp, and of a tied embedding
    (BOX, [(7, "embedding.word_embeddings.weight", 9), (1, "layers.0.attention.norm.weight", 0),
           (2, "layers.0.mlp.dense_h_to_4h.weight", 5)]),
    # with four replicas and ep 2, an expert has a copy two replicas away
    (EXPERTS, [(4, "layers.0.mlp.experts.dense_h_to_4h", 5), (5, "layers.1.mlp.router.expert_bias", 2)])],
    ids=["dense", "experts"])
def test_copies_that_differ_in_a_bit_are_named(pool, options, nudges):
    """Each is compared only with its own copies."""
    config = tiny(8, **options, dtype="bfloat16")
    results = pool.run(nudged_rank, config, random_data(config, 1), nudges)
    assert len(set(results)) == 1 and results[0][0] == ""
    assert f"have drifted apart ({', '.join(name for _, name, _ in nudges)}), so" in results[0][1], results[0][1]


def main_with_faults(flags):
    """Run train.py on this rank. In step 6 rank 1 drifts apart: one bit of one copy, after the step and before the
    save. Its disk is full at step 9, and all ranks' at the last step."""
    rank, train_step, write_boxes = dist.get_rank(), train.train_step, save.write_boxes

    def step(number, stage, *others, **more):
        result = train_step(number, stage, *others, **more)
        if (rank, number) == (1, 6):
            stage.model.final_norm.weight.detach().view(torch.int32)[3] += 1
        return result

    def full_disk(path, boxes):         # a save may still be written in a later step, so the folder's name tells
        saved = int(str(path).split("step-")[1][:8])
        if (rank, saved) == (1, 9) or saved == 14:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_boxes(path, boxes)

    with mock.patch.object(train, "train_step", step), mock.patch.object(save, "write_boxes", full_disk):
        return main_on_rank(flags)


def test_a_copy_that_differs_in_one_bit_is_named_at_the_next_save(pool, tmp_path):
    """Over tp it stays different. Over dp the owner all-gathers the weight again in the next step. Training continues.

    So it does after a failed save: all ranks learn of it, older checkpoints stay, and the next save is tried. After
    the last save no later one can succeed, so the exit code tells.
    """
    flags = [*TINY, *map(str, LENGTH), "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run")]
    ended, _ = pool.run(main_with_faults, [*flags, "--tp", "2"], world_size=2)
    said = [line for line in ended.output.splitlines() if "drifted apart" in line]
    assert "1 parameter have drifted apart (final_norm.weight)" in said[0] and len(said) == 4, ended.output
    assert "the checkpoint of step 9 could not be written: rank 1: OSError: [Errno 28] No space left" in ended.output
    assert ended.code == 2 and "error: the checkpoint of step 14 could not be written" in ended.output, ended.output
    assert saved_steps(tmp_path / "run") == [12, 6, 3]
    assert not list((tmp_path / "run" / "checkpoints").glob(".step-*")), "an unfinished one would keep a full disk full"
