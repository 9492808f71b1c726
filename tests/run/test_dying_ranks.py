"""A rank that dies or raises ends all others within seconds, and only its own message is printed.

test_interrupted_runs.py checks what such a run has saved.
"""

import signal
import time

import pytest
import torch.distributed as dist
from support.jobs import Job, ROOT, TINY, make_corpus, needs_proc
from support.fork_server import launcher_environments

from nanodomino.comm.world import LaunchInfo
from nanodomino.run.rank_failure import caused_by_peer, unresponsive_ranks

END_TOGETHER = 60        # seconds from the start until all have ended; it takes 4, if the machine has no other work

# What goes wrong, on rank 2, is the first argument.
DRIVER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import train

fault, rank, train_step, start_world = sys.argv.pop(1), int(os.environ["RANK"]), train.train_step, train.start_world

def dies(place, device, timeout):
    if (fault, rank) == ("dies before the group forms", 2):
        os.kill(os.getpid(), signal.SIGKILL)
    start_world(place, device, timeout)

def step(number, *others, **more):
    if (fault, number, rank) == ("dies in a step", 3, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    if (fault, number, rank) == ("raises", 3, 2):
        raise ValueError("rank 2 has had enough")
    return train_step(number, *others, **more)

train.train_step, train.start_world = step, dies
train.run_rank(train.main, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("dying"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def only_rank_2_is_blamed(output: str):
    """Its message follows its traceback, on a line of its own."""
    words = "rank 2 failed in step 3: ValueError: rank 2 has had enough"
    assert f"\n{words}\n" in output.split("Traceback (most recent call last)")[1], output
    assert output.count("failed in step") == output.count(words) and "peer" not in output, output


@pytest.mark.parametrize("fault", ["dies in a step", "raises", pytest.param("dies before the group forms",
                                                                             marks=pytest.mark.exhaustive)])
def test_a_failing_rank_ends_the_others_and_is_reported_alone(fork_server, folder, corpus, fault):
    """Killed, as the kernel does when memory runs out, or by an exception. The other ranks only see a closed
    connection: they must not blame each other, nor bury the message of the rank that failed."""
    (folder / "run").mkdir()
    flags = [fault, *TINY, "--data-path", str(corpus), "--train-iters", "1000000", "--eval-interval", "1000000"]
    ended = fork_server.launch(str(folder / "driver.py"), [(flags, place) for place in launcher_environments(4)],
                         folder / "run", END_TOGETHER)
    assert not ended.late and ended.code == (1 if fault == "raises" else -signal.SIGKILL), ended
    if fault == "raises":
        only_rank_2_is_blamed(ended.output)
    else:
        assert not any(word in ended.output for word in ("failed", "lost", "error: ")), ended.output


ANOTHERS_END = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:41234",
    "Read error [127.0.0.1]:2134: Connection reset by peer", "writev [127.0.0.1]:8871: Broken pipe",
    "Timed out waiting 10000ms for recv operation to complete", "Application timeout caused pair closure",
    "Gloo connectFullMesh failed with Connect timeout [none]",
    "timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:52011",
    "wait timeout after 300000ms, keys: /default_pg/0//cuda//timeout_dump",
    "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "NCCL error: remote process exited or there was a network error",
    "ncclInternalError: Internal check failed. Net : Connection closed by remote peer user<50260>",
    "ncclSystemError: socketStartConnect: Connect to 10.0.0.2<45231> failed : Connection refused",
    "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=112)",
    "NCCL communicator was aborted on rank 1.",
    "timed out waiting for the device, which has made no progress for 600 seconds"]
OWN_ERROR = [
    "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
    "ncclSystemError: Error while creating shared memory segment /dev/shm/nccl-qXv9Ng: No space left on device (28)",
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "CUDA out of memory. Tried to allocate 20.00 MiB.",
    "CUDA error: peer access is not supported between these two devices",
    "CUDA error: the launch timed out and was terminated", "CUDA error: an illegal memory access was encountered"]


def test_errors_caused_by_a_peer_are_told_from_own_errors():
    """In the words of gloo, TCPStore, NCCL and CUDA. A rank's own error must be printed with its traceback."""
    assert [text for text in ANOTHERS_END if not caused_by_peer(RuntimeError(text))] == []
    assert [text for text in OWN_ERROR if caused_by_peer(RuntimeError(text))] == []
    assert not caused_by_peer(ValueError(ANOTHERS_END[0])), "only what torch raises"


def test_a_rank_is_called_dead_if_it_reports_nothing_since_the_last_restart(monkeypatch):
    """torchrun's store outlives a restart, and so does what the ranks reported before it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr("nanodomino.run.rank_failure.time.sleep", lambda seconds: None)
    said = []
    for restarts, rank in ((0, 0), (0, 1), (1, 0)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        said.append(unresponsive_ranks(LaunchInfo(rank=rank, world_size=2)))
    assert said == [" (dead or hanging: rank 1)", "", " (dead or hanging: rank 1)"]


@pytest.mark.exhaustive
@needs_proc
def test_torchrun_names_the_rank_that_raised(folder, corpus):
    """The last thing on the terminal is torchrun's report."""
    job = Job(folder, corpus, "run", "--train-iters", 1_000_000, "--eval-interval", 1_000_000, processes=4,
              script=folder / "driver.py", word="raises")
    try:
        assert job.end() != 0 and not job.ranks() and job.steps() == 2, job.output()
        assert time.time() - (job.run_dir / "metrics.jsonl").stat().st_mtime < 15, job.output()
        only_rank_2_is_blamed(job.output())
        cause = job.output().split("Root Cause")[-1]
        assert "(local_rank: 2)" in cause and "exitcode  : 1" in cause, job.output()
        assert "rank 2 failed in step 3: ValueError: rank 2 has had enough" in cause.splitlines()[-2], "the last words"
    finally:
        job.close()
