"""Submits the SLURM script of docs/running.md as it stands there, except for the sizes: two ranks per host, on CPUs."""

import re
import subprocess

import pytest
from support import ROOT
from support.runs import TINY, make_corpus, metric_points, saved_steps, wait_until

pytestmark = pytest.mark.exhaustive
SIZES = {"--gpus-per-node 8 ": "", "--cpus-per-task 64": "--cpus-per-task 1", "_node 8": "_node 2"}


def slurm(*words):
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()


@pytest.fixture
def submit(tmp_path):
    """Return a function that submits the script, given a run's folder, the number of steps and sbatch's options."""
    try:
        slurm("srun", "--immediate=20", "--nodes", 2, "bash", "-c", "getent hosts $SLURMD_NODENAME")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs a running SLURM with two idle nodes whose names resolve: {error}")
    script, = re.findall(r"```sh\n(#!.*?)```", (ROOT / "docs/running.md").read_text(), re.DOTALL)
    flags, jobs = f"{' '.join(TINY)} --tp 2 --log-interval 9 --data-path {make_corpus(tmp_path)}", []

    def submit(run_dir, steps, *options):
        new = {**SIZES, "--run-dir": f"{flags} --train-iters {steps} --run-dir", "runs/mine": str(run_dir)}
        (tmp_path / "train.sh").write_text(re.sub("|".join(new), lambda found: new[found[0]], script))
        jobs.extend(slurm("sbatch", "--parsable", "--output", f"{run_dir}.txt", *options, tmp_path / "train.sh"))
        return jobs[-1]

    yield submit
    slurm("scancel", *jobs)


def test_two_jobs_on_one_host_do_not_meet(submit, tmp_path):
    host, folders = slurm("sinfo", "-h", "--Node", "--format", "%N")[0], [tmp_path / "a", tmp_path / "b"]
    jobs = ",".join(submit(folder, 3, "--nodes", 1, "--nodelist", host) for folder in folders)
    wait_until(lambda: slurm("squeue", "-h", "--jobs", jobs, "--format", "%T") == ["RUNNING"] * 2)
    wait_until(lambda: all(saved_steps(folder) == [3] for folder in folders))
    assert metric_points(folders[0], "loss") == metric_points(folders[1], "loss")


def test_a_run_saves_at_its_time_limit_and_when_requeued_and_resumes_and_ends_if_a_host_dies(submit, tmp_path):
    """The last lines of a requeued job can be lost, because SLURM ends srun, too. Its folder shows what it saved."""
    run, output = tmp_path / "run", tmp_path / "run.txt"

    def has_resumed(times):
        return len(re.findall(r"resuming after step \d+ .*?\nstep ", output.read_text(), re.DOTALL)) == times

    def ends_with_a_checkpoint(job):
        wait_until(lambda: slurm("squeue", "-h", "--jobs", job, "--format", "%T") in ([], ["PENDING"]), 300, pause=1)
        assert saved_steps(run)[0] == metric_points(run, "loss")[-1][0]

    job = submit(run, 10**6, "--time", 3, "--signal", "TERM@60")
    wait_until(lambda: saved_steps(run), 300)
    ends_with_a_checkpoint(job)
    job = submit(run, 10**6)
    wait_until(lambda: has_resumed(1), 300, pause=1)
    slurm("scontrol", "requeue", job)
    ends_with_a_checkpoint(job)
    wait_until(lambda: has_resumed(2), 600, pause=1)
    slurm("bash", "-c", f"kill -9 $(grep -lzsx SLURM_NODEID=1 $(grep -lzsx SLURM_JOB_ID={job} /proc/[0-9]*/environ) | "
          "cut -d/ -f3)")
    wait_until(lambda: "dead or hanging: rank 2, 3" in output.read_text(), 300, pause=1)
