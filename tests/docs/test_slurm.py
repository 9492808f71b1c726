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
    def wait_for(*texts):
        wait_until(lambda: re.search(".*".join(texts), (tmp_path / "run.txt").read_text(), re.DOTALL), 300, pause=1)

    (tmp_path / "run.txt").touch()
    submit(tmp_path / "run", 10**6, "--time", 3, "--signal", "TERM@60")
    wait_for(saved := "stopped early after saving")
    job = submit(tmp_path / "run", 10**6)
    wait_for(saved, again := "resuming after step .*\nstep ")
    slurm("scontrol", "requeue", job)
    wait_for(saved, again, saved, again)
    slurm("bash", "-c", f"kill -9 $(grep -lzsx SLURM_NODEID=1 $(grep -lzsx SLURM_JOB_ID={job} /proc/[0-9]*/environ) | "
          "cut -d/ -f3)")
    wait_for(saved, again, saved, again, "dead or hanging: rank 2, 3")
