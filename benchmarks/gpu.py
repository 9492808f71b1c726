"""Does everything work on this machine's GPUs? Runs checks in the order in which they matter, and writes a report.

    python bench.py gpu                               all checks, on all GPUs
    python bench.py gpu --quick --device cpu          small versions of the checks that need no GPU

Each check is a process of its own with a time limit. Its output is in NAME.log in the folder of --report, its result in
report.json and report.md. A check that has passed there is skipped the next time. The exit code is 1 if a check failed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.gpu_checks import CHECKS, ranks_here
from benchmarks.gpu_kernels import Run
from benchmarks.runner import BENCH
from benchmarks.slow_network import exit_on_signals
from nanodomino.comm.device import choose_kernels, find_device
from nanodomino.comm.world import LaunchInfo, start_world
from nanodomino.files import make_folder, open_regular_file, read_file, write_file
from nanodomino.settings.config import Config


ROUNDS = False               # no --repeats: a check gives --repeats to the questions that it asks
GRACE = 45                   # seconds from SIGTERM to SIGKILL; torchrun gives its ranks 30


def add_flags(parser):
    parser.add_argument("--quick", action="store_true", help="run small versions of the checks")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CHECKS, default=list(CHECKS),
                        help=f"run only these checks: {', '.join(CHECKS)}")
    parser.add_argument("--report", type=Path, metavar="DIR", default=Path("runs/gpu-report"),
                        help="folder of the report (default runs/gpu-report)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: run what needs no GPU")
    parser.add_argument("--run", choices=CHECKS, metavar="NAME", help="run one check, without a limit and a report")


def processes(flags) -> int:
    """Return 1, or with --run the largest number of processes that the check allows on these GPUs (on CPUs: two)."""
    find_device(Config(device=flags.device), LaunchInfo())     # says why torch can't use a GPU
    return ranks_here(flags.device == "cuda", CHECKS[flags.run].ranks or 1) if flags.run else 1


def answer(flags, launch):
    if not flags.run:
        with exit_on_signals():
            return run_checks(flags)
    check, device = CHECKS[flags.run], torch.device(flags.device, launch.local_rank if flags.device == "cuda" else None)
    choose_kernels(Config(), device)                   # a check that trains chooses them again for its own settings
    if check.ranks:
        start_world(launch, device, timeout=300)
    run = Run(device, flags.quick, launch.world_size)
    reason = check.function(run, *check.arguments)
    verdict, slow = "skipped" if reason else "passed", f"below the floor: {', '.join(run.slow)}" if run.slow else ""
    return f"{flags.run} {verdict}", {"verdict": verdict, "message": reason or slow, "numbers": run.numbers}


def run_checks(flags):
    """Run the checks one after the other, each in its process. Returns (text, record)."""
    make_folder(flags.report)
    path, about = flags.report / "report.json", {"device": flags.device, "quick": flags.quick}
    report = json.loads(read_file(path)) if path.exists() else {}
    report = report if about.items() <= report.items() else {**about, "checks": {}}
    for number, name in enumerate(flags.only, 1):
        found, again = report["checks"].get(name, {}), "before, "
        if found.get("verdict") != "passed":
            found, again = run_check(name, flags), ""
            report["checks"][name] = found
            write_file(path, json.dumps(report, indent=1).encode())
            write_file(path.with_suffix(".md"), markdown(report).encode())
        print(f"[{number}/{len(flags.only)}] {name}: {found['verdict']} {again}after {found['seconds']:.0f} s"
              f"{' - ' * bool(found['message'])}{found['message']}", flush=True)
    names = {verdict: [name for name in flags.only if report["checks"][name]["verdict"] == verdict]
             for verdict in ("passed", "skipped", "failed")}
    counts = ", ".join(f"{len(found)} {verdict}" for verdict, found in names.items())
    return f"{counts}; see {path.with_suffix('.md')}", {"failed": names["failed"]}


def run_check(name: str, flags) -> dict:
    """Run one check in a process of its own. Returns its entry of the report."""
    check, gpus = CHECKS[name], torch.cuda.device_count() if flags.device == "cuda" else 2
    if check.gpus > gpus or flags.quick and not check.quick:
        return {"verdict": "skipped", "numbers": {}, "seconds": 0.0, "message":
                f"needs {check.gpus} GPUs" if check.gpus > gpus else "--quick leaves it out"}
    command = [sys.executable, str(BENCH), "gpu", "--run", name, "--device", flags.device, *["--quick"] * flags.quick]
    log, start, limit = (flags.report / f"{name}.log").resolve(), time.monotonic(), check.limit
    with open_regular_file(log, "wb") as file:         # beside it NCCL's recorder writes what was in flight in a hang
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=BENCH.parent, start_new_session=True, env={
            **os.environ, "TORCH_FR_DUMP_TEMP_FILE": str(log.with_suffix(".in-flight-"))})
    code = end(process, limit)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    records = [json.loads(line) for line in lines if line.startswith('{"question": "gpu"')]
    errors = [line for line in lines if line.startswith("error: ")] + lines[-1:] + [f"exit code {code}"]
    reason = f"did not end within {limit} s" if code is None else errors[0]
    found = records[-1] if code == 0 and records else {"verdict": "failed", "message": reason, "numbers": {
        "end of the log": "\n" + "\n".join(lines[-40:])}}
    commit = subprocess.getoutput(f"git -C '{BENCH.parent}' describe --always --dirty --exclude='*'")
    return {**found, "seconds": time.monotonic() - start, "commit": commit, "time": time.strftime("%Y-%m-%d %H:%M")}


def end(process: subprocess.Popen, limit: float) -> int | None:
    """Return a process's exit code, or None after `limit` seconds. Ends its group, after GRACE seconds by SIGKILL."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):                 # raised if the group has no process left
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def markdown(report: dict) -> str:
    """Return report.md: a table of verdicts, then the numbers of each check."""
    details, table = [], [
        f"# nanodomino: `python bench.py gpu --device {report['device']}{' --quick' * report['quick']}`", "",
        "| part | check | verdict | seconds | it proves | |", "|---|---|---|---|---|---|"]
    for name, found in report["checks"].items():
        check = CHECKS[name]
        table.append(f"| {check.part} | {name} | {found['verdict']} | {found['seconds']:.0f} | "
                     f"{check.function.__doc__.split('. ')[0]} | {found['message']} |")
        if found["numbers"]:
            details += ["", f"## {name} ({found['commit']}, {found['time']})", "", "```",
                        *[f"{key}: {value}" for key, value in found["numbers"].items()], "```"]
    return "\n".join(table + details) + "\n"
