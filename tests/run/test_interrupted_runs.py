"""A run that is stopped, killed, out of disk or damaged reports it; when resumed, it continues bit by bit.

Most tests run two or four forked ranks on a tiny corpus (support/fork_server.py); where torchrun itself matters, they
use torchrun. tests/random_kills.py kills at random moments for as long as one likes.
"""

import os
import shutil
import signal
import subprocess
import time

import pytest
from support.jobs import Job, ROOT, differences, fill_disk, make_corpus, needs_proc, wait_until
from support.train_in_pool import metric_points, saved_steps, train_in_pool

from nanodomino.checkpoint.find_checkpoints import checkpoints_of
from nanodomino.checkpoint.manifest import verify

pytestmark = needs_proc
LENGTH = ["--train-iters", 14, "--save-interval", 3]
END_TOGETHER = 30        # seconds from the death of one rank to the end of all

# What goes wrong is the first argument; RANK and the step decide where.
DRIVER = f"""
import errno, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
import train
from nanodomino.checkpoint import save
from nanodomino.run import watchdog

fault, rank, now = sys.argv.pop(1), int(os.environ["RANK"]), 0
train_step, loss_func, on_gradients_ready = train.train_step, train.loss_func, train.ZeroOptimizer.on_gradients_ready
write_boxes = save.write_boxes
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in fault else signal.SIG_DFL)
if "terminal" in fault:
    terminal, screen = os.openpty()
    os.dup2(screen, 1), os.dup2(screen, 2), os.close(screen)

def step(number, *others, **more):
    global now
    now = number
    if "slow" in fault:
        time.sleep(0.2)
    if "terminal" in fault and number == 3:                 # from now on each write to it fails
        os.close(terminal)
    result = train_step(number, *others, **more)
    if (fault, rank, number) == ("drift", 1, 5):            # one bit of one copy, after the step and before the save
        others[0].model.final_norm.weight.detach().view(torch.int32)[3] += 1
    return result

def poisoned_loss(mask, losses):
    total, tokens = loss_func(mask, losses)
    bad = rank == 3 and (fault == "loss" and now in (2, 4) or fault == "losses" and now > 3)
    return total * (float("nan") if bad else 1.0), tokens

def poisoned_gradients(optimizer, modules):
    if (fault, rank, now) == ("copy", 1, 3):         # both ranks hold a vector, rank 0 counts it; only the copy is bad
        for weight in (weight for module in modules for weight in module.parameters() if not weight.spec.kind.shards):
            weight.main_grad.view(-1)[0] = float("inf")
    return on_gradients_ready(optimizer, modules)

def full_disk(path, boxes):             # a save may still be written in a later step, so the folder's name tells
    saved = int(str(path).split("step-")[1][:8])
    if fault == "full" and rank == 1 and saved in (6, 9) or fault == "full at the end" and saved == 14:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write_boxes(path, boxes)

if "device" in fault:           # as on NCCL: a queue with work in it, and collectives that do not raise in time
    start_world, make_mesh = train.start_world, train.make_mesh
    train.start_world = lambda place, device, timeout: start_world(place, device, timeout + 600)
    train.make_mesh = (lambda pp, dp, tp, device, timeout, *more, **named:
                       make_mesh(pp, dp, tp, device, timeout + 600, *more, **named))
    class Busy(train.Watchdog):
        def __init__(self, *place):
            super().__init__(*place)
            self.queue = type("Queue", (), dict(query=lambda queue: False, record_event=lambda queue: Reached()))()
    class Reached:
        query = lambda mark: True
    train.Watchdog, torch.cuda.set_device, watchdog.STOP_GRACE = Busy, lambda device: None, 4.0

train.train_step, train.loss_func, train.ZeroOptimizer.on_gradients_ready = step, poisoned_loss, poisoned_gradients
save.write_boxes = full_disk
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

    def job(run_dir, *flags, fault=None, torchrun=False, **options):
        script = dict(script=tmp_path / "driver.py") if fault else {}
        jobs.append(Job(tmp_path, corpus, run_dir, *flags, word=fault, fork_server=None if torchrun else fork_server,
                        **script, **options))
        return jobs[-1]

    yield job
    for run in jobs:
        run.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory, corpus, fork_server):
    """alone(*flags) -> the folder of the same run without an interruption, made once for each set of flags."""
    made = {}

    def alone(*flags, **options):
        if flags not in made:
            folder = tmp_path_factory.mktemp("alone")
            run = Job(folder, corpus, "run", *LENGTH, *flags, fork_server=fork_server, **options)
            try:
                assert run.end() == 0, run.output()
            finally:
                run.close()
            made[flags] = run.run_dir
        return made[flags]

    return alone


def last_checkpoint(run) -> str:
    newest = checkpoints_of(run.run_dir)[0]
    verify(newest)
    return newest.name


# Told to stop

@pytest.mark.parametrize("number, whom, flags, processes", [
    (signal.SIGHUP, "a rank", [], 2), *(
        pytest.param(number, *case, marks=pytest.mark.exhaustive) for number, *case in (
            (signal.SIGTERM, "a rank", [], 2), (signal.SIGINT, "a rank", [], 2),
            (signal.SIGINT, "torchrun", ["--tp", 2, "--pp", 2], 4),
            (signal.SIGHUP, "torchrun", ["--tp", 2, "--pp", 2], 4)))], ids=str)
def test_a_stopped_run_saves_and_resumes_with_the_same_bits(job, alone, number, whom, flags, processes):
    """It stops after the step in which the signal arrives and saves this step, whatever the save interval. With SIGHUP
    the terminal is gone."""
    fault = "slow terminal" if (number, whom) == (signal.SIGHUP, "a rank") else "slow"
    first = job("run", *LENGTH, *flags, processes=processes, torchrun=whom == "torchrun", fault=fault)
    first.wait_for(lambda: first.steps() >= 4)
    before, ranks = first.steps(), first.ranks()
    os.kill(ranks[1] if whom == "a rank" else first.process.pid, number)
    assert first.end() != 0
    if whom == "a rank":
        assert f"exitcode  : {128 + number}" in first.output(), first.output()
    stopped_after = first.steps()
    assert before <= stopped_after <= before + 3 and last_checkpoint(first) == f"step-{stopped_after:08d}", (
        first.output())
    second = job("run", *LENGTH, *flags, processes=processes)
    assert second.end() == 0 and f"resuming after step {stopped_after} of 14" in second.output(), second.output()
    assert not differences(second.run_dir, alone(*flags, processes=processes))


@pytest.mark.exhaustive
def test_a_run_under_nohup_outlives_its_terminal(job, alone):
    run = job("run", *LENGTH, fault="slow nohup terminal")
    run.wait_for(lambda: run.steps() >= 3)
    for rank in run.ranks():
        run.send(rank, signal.SIGHUP)
    assert run.end() == 0 and not differences(run.run_dir, alone()), run.output()


def test_a_second_signal_ends_a_rank_that_waits_for_a_hanging_peer(job):
    """Inside a collective no Python signal handler runs, and the timeout may be ten minutes away."""
    run = job("run", "--train-iters", 100_000)
    run.wait_for(lambda: run.steps() >= 3)
    run.send(1, signal.SIGSTOP)
    time.sleep(1)
    waiting = run.send(0, signal.SIGTERM)
    time.sleep(2.5)
    assert run.ranks()[0] == waiting, "the first signal asks for a checkpoint"
    run.send(0, signal.SIGTERM)
    wait_until(lambda: 0 not in run.ranks())
    run.send(1, signal.SIGKILL)
    run.end()
    assert "exitcode  : 143" in run.output(), run.output()


@pytest.mark.exhaustive
def test_a_signal_ends_a_rank_whose_device_waits_for_a_dead_peer(job):
    """The current step never ends; torchrun waits half a minute before it kills, a scheduler perhaps hours."""
    run = job("run", "--train-iters", 100_000, fault="device")
    run.wait_for(lambda: run.steps() >= 3)
    run.send(1, signal.SIGSTOP)
    time.sleep(1)
    run.send(0, signal.SIGTERM)
    wait_until(lambda: 0 not in run.ranks())
    run.send(1, signal.SIGKILL)
    assert run.end() != 0 and "exitcode  : 1 " in run.output(), run.output()


# Killed

@pytest.mark.parametrize("flags, processes", [
    ([], 2), pytest.param(["--tp", 2, "--pp", 2], 4, marks=pytest.mark.exhaustive)], ids=["dp 2", "tp 2 pp 2"])
def test_a_rank_killed_during_a_save_costs_only_the_steps_since_the_last(job, alone, flags, processes):
    """And all ranks end soon."""
    first = job("run", *LENGTH, *flags, processes=processes)
    first.wait_for(lambda: first.steps() >= 4 and checkpoints_of(first.run_dir) and first.saving())
    moment = time.monotonic()
    first.send(processes - 1, signal.SIGKILL)
    assert first.end() != 0 and time.monotonic() - moment < END_TOGETHER and not first.ranks()
    assert "exitcode  : -9" in first.output(), first.output()
    saved, reached = int(last_checkpoint(first)[5:]), first.steps()
    assert reached - saved <= 6, "the last save may have been unfinished"
    second = job("run", *LENGTH, *flags, processes=processes)
    assert second.end() == 0 and f"resuming after step {saved} " in second.output(), second.output()
    assert not differences(second.run_dir, alone(*flags, processes=processes))
    assert not second.saving(), "what the killed one left is gone"


@pytest.mark.exhaustive
def test_a_restart_by_torchrun_returns_to_the_default_folder(job, alone, tmp_path):
    """To the folder that this launch made, not the newest one: another run may have started since."""
    run = job(None, *LENGTH, "--pp", 2, restarts=3, fault="slow", torchrun=True)
    run.wait_for(lambda: run.steps() >= 4)
    shutil.copytree(run.run_dir, tmp_path / "runs" / "nano-002", ignore=lambda *_: ["launch.txt", "checkpoints"])
    run.send(0, signal.SIGKILL)
    assert run.end() == 0 and "resuming after step " in run.output(), run.output()
    assert not differences(run.run_dir, alone("--pp", 2))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["nano-001", "nano-002"]


# Silent

@pytest.mark.parametrize("fault", [None, pytest.param("device", marks=pytest.mark.exhaustive)],
                         ids=["gloo", "as on a GPU"])
def test_a_rank_that_hangs_is_named_with_the_step(job, fault):
    """Every process group has --timeout: torch's default is half an hour, and a new group does not inherit the world's.
    On a GPU the host sits in a call that does not raise; there the watchdog acts."""
    run = job("run", "--train-iters", 100_000, "--timeout", 5, "--tp", 2, "--pp", 2, processes=4, fault=fault)
    run.wait_for(lambda: run.steps() >= 3)
    hanging = run.send(2, signal.SIGSTOP)
    steps = run.steps()
    run.wait_for(lambda: "lost its peers" in run.output())
    wait_until(lambda: set(run.ranks().values()) <= {hanging})
    run.send(2, signal.SIGKILL)                     # torchrun would do it, after 30 seconds
    assert run.end() != 0
    assert any(f"lost its peers in step {step} (dead or hanging: rank 2)" in run.output()
               for step in (steps + 1, steps + 2)), run.output()


@pytest.mark.exhaustive
def test_a_device_that_is_never_idle_is_not_taken_for_hanging(job):
    """Each forward and backward is progress, however long the run."""
    run = job("run", "--train-iters", 80, "--timeout", 6, "--eval-iters", 0, fault="slow device")
    assert run.end() == 0 and run.steps() == 80, run.output()


# Not finite

@pytest.mark.parametrize("fault, skipped, flags, processes", [
    ("loss", [2, 4], ["--tp", 2, "--pp", 2], 4), pytest.param("copy", [3], [], 2, marks=pytest.mark.exhaustive)])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(job, fault, skipped, flags, processes):
    """Otherwise the ranks would diverge. Also if the bad number is in a copy that the global norm does not count."""
    run = job("run", "--train-iters", 5, *flags, fault=fault, processes=processes)
    assert run.end() == 0, run.output()
    steps = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in steps if line["skipped"]] == skipped and len(steps) == 5
    assert all(line["loss"] is not None and line["loss"] < 6 for line in steps if not line["skipped"])
    assert last_checkpoint(run) == "step-00000005"


def test_the_last_good_checkpoint_outlives_any_number_of_skipped_steps(pool, tmp_path):
    """Step 2 is the last good one; three launches save skipped steps after it. Too many in a row end the run."""
    make_corpus(tmp_path)
    command = ("--run-dir", tmp_path / "run", "--train-iters", 20, "--save-interval", 1, "--keep-last", 1,
               "--max-skipped-steps", 6)
    for at_once in (4, 1, 1, 9):
        ended = train_in_pool(pool, tmp_path, *command, "--exit-interval", at_once, bad_steps=range(3, 20))
    assert ended.code is None and "6 steps in a row, up to step 8, had a loss or gradient that" in ended.error
    assert saved_steps(tmp_path / "run") == [7, 6, 5, 4, 3, 2]


@pytest.mark.parametrize("bad, last", [((1, 3, 5), None), ((2, 4, 5), 5)], ids=["here and there", "in a row"])
def test_consecutive_skipped_steps_are_counted_across_restarts(pool, tmp_path, bad, last):
    """Occasional skipped steps are no divergence. But a run that restarts every few steps must not continue forever
    without a good one: the count is part of the checkpoint."""
    make_corpus(tmp_path)
    run, ended = tmp_path / "run", None
    while ended is None or "stopped early" in ended.output:
        ended = train_in_pool(pool, tmp_path, "--run-dir", run, "--train-iters", 6, "--max-skipped-steps", 2,
                              "--exit-interval", 2, bad_steps=bad)
    assert [step for step, skipped in metric_points(run, "skipped") if skipped] == list(bad)
    if last:
        assert ended.code is None
        assert f"2 steps in a row, up to step {last}, had a loss or gradient that is not finite" in ended.error
    else:
        assert ended.code == 0 and saved_steps(run)[0] == 6


# Drifted apart

@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [["--tp", 2], ["--tp", 1, "--pp", 1]], ids=["tp 2", "dp 2"])
def test_a_copy_that_differs_in_one_bit_is_named_at_the_next_save(job, flags):
    """Over tp it stays different. Over dp the owner all-gathers the weight again in the next step. Training
    continues."""
    run = job("run", "--train-iters", 8, "--save-interval", 5, *flags, fault="drift")
    assert run.end() == 0 and last_checkpoint(run) == "step-00000008", run.output()
    said = [line for line in run.output().splitlines() if "drifted apart" in line]
    assert "(final_norm.weight differs between rank 0 and rank 1)" in said[0], run.output()
    assert len(said) == (2 if flags == ["--tp", 2] else 1), run.output()


# No room

def test_a_failed_save_is_a_warning_and_the_next_save_is_tried(job, alone):
    """One rank's disk is full: all ranks learn of it, training continues with the same bits, older checkpoints stay."""
    run = job("run", *LENGTH, fault="full")
    assert run.end() == 0, run.output()
    for step in (6, 9):
        says = f"warning: the checkpoint of step {step} could not be written: rank 1: OSError: [Errno 28] No space left"
        assert says in run.output(), run.output()
    kept = [folder.name for folder in checkpoints_of(run.run_dir)]
    assert kept == ["step-00000014", "step-00000012", "step-00000003"]
    assert not differences(run.run_dir, alone())
    assert not run.saving(), "an unfinished one would keep a full disk full"


@pytest.mark.exhaustive
def test_a_failed_last_save_is_an_error(job):
    """No later save can succeed, so the exit code tells; the previous checkpoint stays."""
    run = job("run", *LENGTH, fault="full at the end")
    assert run.end() != 0 and "the checkpoint of step 14 could not be written" in run.output(), run.output()
    assert last_checkpoint(run) == "step-00000012"


@pytest.mark.exhaustive
def test_a_full_disk_does_not_stop_training(job, alone, tmp_path):
    """metrics.jsonl is on it too; its lines are written when there is room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        run = job("disk/run", *LENGTH, fault="slow")
        run.wait_for(lambda: run.steps() >= 4 and checkpoints_of(run.run_dir) and not run.saving())
        fill_disk(disk / "ballast")
        run.wait_for(lambda: "could not be written" in run.output())
        (disk / "ballast").unlink()
        assert run.end() == 0, run.output()
        assert not differences(run.run_dir, alone())
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# Damage

@pytest.mark.exhaustive
def test_damaged_checkpoints_are_named_and_the_previous_one_is_used(job, alone, tmp_path):
    """A flipped byte, a truncated and a missing file: three warnings, and the fourth checkpoint is used."""
    run_dir = tmp_path / "run"
    shutil.copytree(alone("--keep-last", 4), run_dir)
    newest, second, third, good = checkpoints_of(run_dir)
    data = [sorted(folder.glob("*.bin"))[0] for folder in (newest, second, third)]
    content = bytearray(data[0].read_bytes())
    content[len(content) // 2] ^= 1
    data[0].write_bytes(content)
    data[1].write_bytes(data[1].read_bytes()[:-1])
    data[2].unlink()
    run = job("run", *LENGTH, "--keep-last", 4)
    assert run.end() == 0 and f"resuming after step {int(good.name[5:])} of 14" in run.output(), run.output()
    for path in data:
        assert any(line.startswith(f"warning: {path} ") for line in run.output().splitlines()), run.output()
    assert not differences(run_dir, alone("--keep-last", 4))
