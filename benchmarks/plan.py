"""Would this model fit on those GPUs, and how fast would it be? Runs training steps dry; trains nothing.

    memory       what a GPU of each stage needs (estimate/stages.py, checked by `bench.py memory`)
    step time    computed from data sheets and assumptions (estimate/formulas.py). The assumptions are printed; those
                 that are numbers stand at the top of plan.py. "tp exposed" is the time that a GPU waits for the
                 collectives of tp, and "host exposed" for copies to and from the host

`--search` looks for the ten fastest layouts that fit and prints the command of the fastest (plan_search.py):

    python bench.py plan --search --model llama3-8b --gpus 8 --gpu H100

If the model does not fit, the plan names its largest terms. A preset gets the vocabulary of its published weights.

    python bench.py plan --model gpt3-13b --gpus 64 --tp 8 --pp 4 --gpu A100

`--published` predicts the runs of three papers and prints their measurements beside the predictions (published.py).
"""

import train
from benchmarks import plan_search, published
from benchmarks.runner import about, add_config_flags, bytes_text, config_of, describe, seconds_text, table
from nanodomino.errors import require
from nanodomino.estimate.formulas import (CHANNELS, CONNECTION_BYTES, CONTEXT_BYTES, FP8_SPEEDUP, GPUS, PEAK_FLOPS,
                                          WITHOUT_FP8, Machine, active_parameter_count, mfu, parameter_count,
                                          state_bytes_per_parameter)
from nanodomino.estimate.stages import Stage, step_seconds
from nanodomino.settings.config import Config
from nanodomino.settings.flags import check_range, flag_name
from nanodomino.settings.presets import DTYPES, PUBLISHED_VOCABULARIES

RESERVE = 0.05               # share of the memory left free for fragmentation
MATMUL_EFFICIENCY = 0.7      # share of the peak FLOP/s that the largest tiles of a matmul reach
LINK_EFFICIENCY = 0.8        # share of the data-sheet rates that links and GPU memory reach
LATENCY = 15e-6              # seconds that each collective takes in addition to sending its bytes
OVERLAP_SLOWDOWN = 0.18      # share of a GPU that a collective in flight takes: 24 of an H100's 132 multiprocessors
ROUNDS = False               # no --repeats: a plan is computed
MEMORY_TERMS = ("parameters", "gradients", "optimizer", "activations", "working", "CUDA and NCCL")


def add_flags(parser):
    add_config_flags(parser, model="gpt3-13b", dtype="bfloat16")
    parser.add_argument("--gpus", type=int, default=64, help="number of GPUs, one per process (default 64)")
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="model of the GPUs (default H100)")
    parser.add_argument("--gpus-per-host", type=int, default=8,
                        help="GPUs per host, joined by NVLink or PCIe (default 8)")
    parser.add_argument("--network", type=float, default=400.0,
                        help="Gbit/s between a GPU and other hosts, each way (default 400: InfiniBand NDR)")
    parser.add_argument("--search", action="store_true",
                        help="search for the ten fastest layouts that fit; flags of the layout that are given are kept")
    parser.add_argument("--published", action="store_true", help="predict published runs instead, without another flag")


def processes(flags) -> int:
    for name, least in (("gpus", 1), ("gpus_per_host", 1), ("network", 0.001)):
        check_range(flag_name(name), getattr(flags, name), at_least=least, at_most=10**6, type=type(least))
    require(not flags.published or flags.given == ["published"],
            "--published has no use for other flags; leave them out")
    if flags.vocab_size is None:
        flags.vocab_size = PUBLISHED_VOCABULARIES.get(flags.model, PUBLISHED_VOCABULARIES["gpt2"])
    flags.device = "cuda"
    if not flags.search:
        config_of(flags, flags.gpus)
    require(not (getattr(flags, "fp8_format", None) and flags.gpu in WITHOUT_FP8),
            f"--fp8-format needs a GPU with fp8, but --gpu {flags.gpu} has none; try --gpu H100")
    require(DTYPES[flags.dtype].itemsize == 2,
            f"--gpu {flags.gpu} needs --dtype bfloat16 or float16, because only its 16-bit FLOP/s are known, but "
            f"--dtype is {flags.dtype}; try --dtype bfloat16")
    return 1


def answer(flags, launch):
    if flags.published:
        return published.answer(machine_of)
    machine = machine_of(flags.gpu, flags.network, flags.gpus_per_host)
    usable = GPUS[flags.gpu].memory * (1 - RESERVE)
    return (plan_search.answer if flags.search else plan)(flags, machine, usable)


def machine_of(name: str, network=400.0, per_host=8) -> Machine:
    """Return the rates that a GPU reaches: those of its data sheet times the efficiencies.

    network: Gbit/s to other hosts; per_host: GPUs per host."""
    gpu = GPUS[name]
    return Machine(matmul_rate=PEAK_FLOPS[name] * MATMUL_EFFICIENCY, intra_host_rate=gpu.link_rate * LINK_EFFICIENCY,
                   inter_host_rate=network / 8 * 1e9 * LINK_EFFICIENCY, latency=LATENCY, ranks_per_host=per_host,
                   memory_rate=gpu.memory_rate * LINK_EFFICIENCY, host_copy_rate=gpu.host_rate * LINK_EFFICIENCY,
                   overlap_slowdown=OVERLAP_SLOWDOWN, peak=PEAK_FLOPS[name], multiprocessors=gpu.multiprocessors)


def plan(flags, machine: Machine, usable: float):
    """Return (text, record). usable: bytes of a GPU's memory."""
    config = config_of(flags, flags.gpus)
    found = memory_of_stages(config)
    needs = [{name: one[name] for name in MEMORY_TERMS} for one in found]
    fits = all(sum(need.values()) <= usable for need in needs)
    parts = step_seconds(train, config, machine)
    seconds, tokens = sum(parts.values()), config.global_batch_size * config.seq_length
    used = mfu(config, seconds, machine.peak)
    text = "\n".join([
        f"{config.model}: {parameter_count(config):,} parameters, {config.dtype}, on {config.world_size} x {flags.gpu}",
        *([f"{config.num_experts} experts in a layer, assumed to be chosen equally often: a token uses "
           f"{active_parameter_count(config):,} parameters"] if config.num_experts else []),
        describe(config), "",
        table(["memory of a GPU", *MEMORY_TERMS, "total", ""],
              [[f"stage {stage}", *map(bytes_text, need.values()), bytes_text(sum(need.values())),
                "fits" if sum(need.values()) <= usable else "TOO MUCH"] for stage, need in enumerate(needs)]),
        f"usable {bytes_text(usable)}; model state {state_bytes_per_parameter(config):.2f} bytes per parameter",
        *([f"host memory for each GPU of stage 0: {bytes_text(found[0]['host'])}"] if found[0]["host"] else []),
        *([] if fits else [why_not(needs, usable)]), "",
        table(["a step", "", ""],
              [[name, seconds_text(part), f"{part / seconds:.1%}"]
               for name, part in [*parts.items(), ("total", seconds)] if part]),
        f"{tokens / seconds:,.0f} tokens/s; MFU {used:.1%} (6 N + 12 L n d s FLOPs per token, relative to "
        f"{machine.peak / 1e12:g} TFLOP/s per GPU)", "", assumptions(flags)])
    return text, {"parameters": parameter_count(config), "active_parameters": active_parameter_count(config),
                  "gpu": flags.gpu, "gpus": config.world_size, **about(config), "fits": fits, "usable_bytes": usable,
                  "memory": needs, "host_memory": [one["host"] for one in found],
                  "parts_s": parts, "step_s": seconds, "mfu": used, "tokens_per_second": tokens / seconds}


def memory_of_stages(config: Config) -> list[dict]:
    """Return for a rank of each stage {one of MEMORY_TERMS, or "host": bytes}."""
    return [Stage(train, config, stage).memory() for stage in range(config.pp)]


def assumptions(flags) -> str:
    """Return the lines that state the plan's assumptions."""
    gpu = GPUS[flags.gpu]
    memory, rate, link, context, ring = map(bytes_text, (
        gpu.memory, gpu.memory_rate, gpu.link_rate, CONTEXT_BYTES, CONNECTION_BYTES))
    return f"""\
assumptions:
  {flags.gpu}: {memory} of memory, read and written at {rate}/s; {RESERVE:.0%} stay free
  the largest tiles of a matmul reach {MATMUL_EFFICIENCY:.0%} of {PEAK_FLOPS[flags.gpu] / 1e12:g} TFLOP/s in 16 bits,
  in fp8 {FP8_SPEEDUP:g} times as much; other tiles, incomplete waves and attention reach less
  compiled element-wise work reads and writes each tensor once per fused operation
  hosts of {flags.gpus_per_host} GPUs (--gpus-per-host) joined by {gpu.link}, {link}/s each way
  {flags.network:g} Gbit/s from a GPU to other hosts (--network); links and GPU memory reach {LINK_EFFICIENCY:.0%}
  each collective takes {LATENCY * 1e6:g} us in addition to sending its bytes
  while a collective is in flight, it takes {OVERLAP_SLOWDOWN:.0%} of the GPU
  a CUDA context takes {context}, a ring of NCCL {ring} for each of up to {CHANNELS} channels"""


def why_not(needs: list[dict], usable: float) -> str:
    """Say by how much the fullest GPU exceeds its memory, and name its two largest terms. needs: bytes of each stage;
    usable: bytes of memory."""
    worst = max(range(len(needs)), key=lambda stage: sum(needs[stage].values()))
    need, total = needs[worst], sum(needs[worst].values())
    largest = " and ".join(f"{name} {bytes_text(need[name])}" for name in sorted(need, key=need.get, reverse=True)[:2])
    return (f"does not fit: stage {worst} needs {bytes_text(total)}, {bytes_text(total - usable)} too much; the "
            f"largest terms are {largest}; `bench.py plan --search` finds layouts that fit")
