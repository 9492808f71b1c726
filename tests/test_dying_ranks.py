"""No rank outlives another: one that dies or raises takes the others with it within seconds, and whoever looks at the
screen sees which one it was, and why. test_faults.py has what such a run has saved by then.
"""

import signal
import time

import pytest
from faults import ROOT, TINY, Job, make_corpus
from forks import launcher_environments
from test_bad_input import needs_proc

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
train.start(train.main, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("dying"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def only_rank_2_is_blamed(output: str):
    """After its traceback, in a line of its own."""
    words = "rank 2 failed in step 3: ValueError: rank 2 has had enough"
    assert f"\n{words}\n" in output.split("Traceback (most recent call last)")[1], output
    assert output.count("failed in step") == output.count(words) and "peer" not in output, output


@pytest.mark.parametrize("fault", ["dies in a step", "dies before the group forms", "raises"])
def test_a_rank_takes_the_others_with_it_and_is_heard_alone(forks, folder, corpus, fault):
    """Killed, as the kernel does when memory runs out, or by an error. The others, who wait for it in a collective or a
    rendezvous of ten minutes, only see a closed connection: they must not blame each other, nor bury its words."""
    (folder / "run").mkdir()
    flags = [fault, *TINY, "--data-path", str(corpus), "--train-iters", "1000000", "--eval-interval", "1000000"]
    ended = forks.launch(str(folder / "driver.py"), [(flags, place) for place in launcher_environments(4)],
                         folder / "run", END_TOGETHER)
    assert not ended.late and ended.code == (1 if fault == "raises" else -signal.SIGKILL), ended
    if fault == "raises":
        only_rank_2_is_blamed(ended.output)
    else:
        assert not any(word in ended.output for word in ("failed", "lost", "error: ")), ended.output


@needs_proc
def test_torchrun_names_the_rank_that_raised(folder, corpus):
    """The same under the real launcher, whose report is the last thing on the screen."""
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
