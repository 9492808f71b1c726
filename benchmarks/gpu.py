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

from benchmarks.gpu_checks import CHECKS
from benchmarks.gpu_kernels import Run
from benchmarks.runner import BENCH
from benchmarks.slow_network import exit_on_signals
from nanodomino.comm.world import start_world
from nanodomino.errors import counted, require
from nanodomino.files import make_folder, open_regular_file, read_file, write_file

ROUNDS = False               # no --repeats: a check gives --repeats to the questions that it asks
GRACE = 45                   # seconds from SIGTERM to SIGKILL; torchrun gives its ranks 30


def add_flags(parser):
    parser.add_argument("--quick", action="store_true", help="run small versions of the checks")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CHECKS, default=list(CHECKS),
                        help=f"run only these checks: {', '.join(CHECKS)}")
    parser.add_argument("--report", type=Path, metavar="DIR", default=Path("runs/gpu-report"),
                        help="folder of the report (default runs/gpu-report)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: run the checks that need no GPU (default cuda)")
    parser.add_argument("--run", choices=CHECKS, metavar="NAME",
                        help="run one check in this process, without a limit and a report")


def processes(flags) -> int:
    """Return 1, or with --run the largest number of processes that the check allows on these GPUs (on CPUs: two)."""
    gpus = torch.cuda.device_count()
    require(flags.device == "cpu" or gpus, "bench.py gpu needs a GPU that torch can see, and there is none; try "
            "--device cpu, which runs the checks that need none")
    choices = (1, *(CHECKS[flags.run].ranks if flags.run else ()))
    return max(ranks for ranks in choices if ranks <= (gpus if flags.device == "cuda" else 2))


def answer(flags, launch):
    if not flags.run:
        with exit_on_signals():
            return run_checks(flags)
    check, device = CHECKS[flags.run], torch.device(flags.device, launch.local_rank if flags.device == "cuda" else None)
    if flags.device == "cuda" and check.capability > torch.cuda.get_device_capability():     # occupies memory of a GPU
        reason = f"needs a GPU of compute capability {'.'.join(map(str, check.capability))} or higher"
        return reason, {"verdict": "skipped", "message": reason}
    if check.ranks:
        start_world(launch, device, timeout=120)
    run = Run(device, flags.quick, launch.world_size)
    check.function(run)
    return f"{flags.run} passed", {"verdict": "passed", "numbers": run.numbers}


def why_skipped(check, flags) -> str:
    """Return why a check does not run, or ''."""
    if flags.quick and not check.quick:
        return "--quick leaves it out"
    gpus = torch.cuda.device_count() if flags.device == "cuda" else 0
    if check.gpus > gpus and (gpus or check.needs_gpu):
        return f"needs {counted(check.gpus, 'GPU')}, and there {'is' if gpus == 1 else 'are'} {gpus}"
    return ""


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
            write_file(flags.report / "report.md", markdown(report).encode())
        print(f"[{number}/{len(flags.only)}] {name}: {found['verdict']} {again}after {found['seconds']:.0f} s"
              f"{' - ' * bool(found['message'])}{found['message']}", flush=True)
    verdicts = [report["checks"][name]["verdict"] for name in flags.only]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", "skipped", "failed")]
    failed = [name for name, verdict in zip(flags.only, verdicts) if verdict == "failed"]
    return f"{', '.join(counts)}; see {flags.report / 'report.md'}", {"failed": failed}


def run_check(name: str, flags) -> dict:
    """Run one check in a process of its own. Returns its entry of the report."""
    if reason := why_skipped(CHECKS[name], flags):
        return {"verdict": "skipped", "message": reason, "numbers": {}, "seconds": 0.0}
    command = [sys.executable, str(BENCH), "gpu", "--run", name, "--device", flags.device, *["--quick"] * flags.quick]
    log, start, limit = (flags.report / f"{name}.log").resolve(), time.monotonic(), CHECKS[name].limit
    with open_regular_file(log, "wb") as file:         # beside it NCCL's recorder writes what was in flight in a hang
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=BENCH.parent, start_new_session=True, env={
            **os.environ, "TORCH_FR_DUMP_TEMP_FILE": str(log.with_suffix(".in-flight-"))})
    code = end(process, limit)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    records = [json.loads(line) for line in lines if line.startswith('{"question": "gpu"')]
    reason = f"did not end within {limit} s" if code is None else (lines or [f"exit code {code}"])[-1]
    found = records[-1] if code == 0 and records else {"verdict": "failed", "message": reason, "numbers": {
        "end of the log": "\n" + "\n".join(lines[-40:])}}
    return {"message": "", "numbers": {}, **found, "seconds": time.monotonic() - start,
            "commit": subprocess.getoutput(f"git -C '{BENCH.parent}' describe --always --dirty --exclude='*'"),
            "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}


def end(process: subprocess.Popen, limit: float) -> int | None:
    """Wait for a process. Returns its exit code, or None if it exceeds `limit` seconds. In each case, and after Ctrl-C,
    what is left of its process group gets SIGTERM, and after GRACE seconds SIGKILL."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):                 # raised as soon as the group has no process left
            os.killpg(process.pid, signal.SIGTERM)
            for _ in range(int(10 * GRACE)):
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
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
