"""Would this model fit on those GPUs, and how fast would it be? Evaluates the formulas; trains nothing.

    memory           what a GPU of each stage needs (analysis/expected_memory.py, checked by `bench.py memory`)
    communication    what a GPU sends in a step, by process group (analysis/expected_traffic.py, checked by
                     `bench.py comm`)
    step time        computed from data sheets and assumptions (analysis/step_time.py). The assumptions are printed, and
                     flags change most of them. "exposed" is the time that a GPU waits for communication or copies

`--search` looks for the ten fastest layouts that fit and prints the command of the fastest (plan_search.py):

    python bench.py plan --search --model llama3-8b --gpus 8 --gpu H100

If the model does not fit, the plan shows the largest terms and the changes that would make it fit, each with its step
time. If the model fits and another schedule is faster, the plan names it. A preset gets the vocabulary of its published
weights.

    python bench.py plan --model gpt3-13b --gpus 64 --tp 8 --pp 4 --gpu A100

`--gpu here` plans for this machine and checks the plan. It measures the rates of matmuls, communication and memory,
predicts a step, trains, and prints the predicted and the measured time:

    python bench.py plan --gpu here --gpus 2 --tp 2 --pp 1 --model nano --hidden-size 256 --dtype float32

`--published` predicts the runs of three papers and prints their measurements beside the predictions (published.py).
"""

import dataclasses
import itertools
import operator
import statistics
import time
from dataclasses import dataclass
from functools import partial

import train
from benchmarks import comm, memory, plan_search, published
from benchmarks.common import (RandomTokens, Times, add_config_flags, bytes_text, config_here, config_of, describe,
                               gathered, layout_of, ratio_text, ratios, seconds_text, table)
from benchmarks.plan_changes import (changed, context_sizes, flags_text, memory_terms, more_recomputation, most_needed,
                                     other_schedules)
from nanodomino.analysis import expected_memory, expected_traffic, sizes, step_time
from nanodomino.analysis.hardware import FP8_SPEEDUP, PEAK_FLOPS, WITHOUT_FP8
from nanodomino.analysis.sizes import active_parameter_count, parameter_count
from nanodomino.analysis.step_time import Machine, slowest, synchronize_ranks
from nanodomino.config.config import Config
from nanodomino.config.presets import DTYPES, PUBLISHED_VOCABULARIES
from nanodomino.config.setting import flag_name
from nanodomino.errors import counted, require


@dataclass(frozen=True)
class Gpu:
    """Figures from a GPU's data sheet."""
    memory: float                # bytes
    memory_rate: float           # bytes/s
    link: str                    # the link to the other GPUs of the host: NVLink or PCIe
    link_rate: float             # bytes/s over it, each way
    host_rate: float             # bytes/s to the host over PCIe, each way


# GPUs with bfloat16. NVLink each way is half of the data sheet's figure; PCIe x16 is 32 GB/s each way in generation 4,
# 64 GB/s in generation 5.
GPUS = {"A100": Gpu(80e9, 2.039e12, "NVLink", 300e9, 32e9),
        "H100": Gpu(80e9, 3.35e12, "NVLink", 450e9, 64e9), "H100 PCIe": Gpu(80e9, 2.0e12, "PCIe", 64e9, 64e9),
        "H200": Gpu(141e9, 4.8e12, "NVLink", 450e9, 64e9), "B200": Gpu(180e9, 8e12, "NVLink", 900e9, 64e9),
        "A10": Gpu(24e9, 0.6e12, "PCIe", 32e9, 32e9), "L40S": Gpu(48e9, 0.864e12, "PCIe", 32e9, 32e9),
        "RTX 4090": Gpu(24e9, 1.008e12, "PCIe", 32e9, 32e9)}

GPT2_VOCABULARY = PUBLISHED_VOCABULARIES["gpt2"]
# The parts of step_time.step_seconds() as they are printed.
PARTS = {"products": "matmuls", "element-wise": "element-wise work", "again": "recomputation",
         "host copies": "exposed host copies", "tp wires": "exposed tp, cp, ep communication",
         "bubble": "pipeline bubble", "pp wires": "exposed pp messages", "dp wires": "exposed dp communication"}
MEMORY_TERMS = ("parameters", "gradients", "optimizer", "activations", "messages", "working", "communicators")


def add_flags(parser):
    add_config_flags(parser, model="gpt3-13b", dtype="bfloat16")
    parser.add_argument("--gpus", type=int, default=64, help="number of GPUs, one per process (default 64)")
    parser.add_argument("--gpu", choices=(*GPUS, "here"), default="H100",
                        help="model of the GPUs, or `here` for this machine (default H100)")
    parser.add_argument("--gpus-per-host", type=int, default=8,
                        help="GPUs per host, joined by NVLink or PCIe (default 8)")
    parser.add_argument("--network", type=float, default=400.0,
                        help="Gbit/s between a GPU and other hosts, each way (default 400: InfiniBand NDR)")
    parser.add_argument("--product-efficiency", type=float, default=0.7,
                        help="share of the peak FLOP/s that matmuls and attention reach (default 0.7)")
    parser.add_argument("--wire-efficiency", type=float, default=0.8,
                        help="share of the data-sheet rates that links and GPU memory reach (default 0.8)")
    parser.add_argument("--latency", type=float, default=15.0,
                        help="microseconds that each collective takes in addition to sending its bytes (default 15)")
    parser.add_argument("--overlap-slowdown", type=float, default=0.18,
                        help="share of a GPU that a collective in flight takes from compute (default 0.18: NCCL's 24 "
                             "channels take 24 of an H100's 132 multiprocessors)")
    parser.add_argument("--reserve", type=float, default=0.05,
                        help="share of the memory left free for CUDA and fragmentation (default 0.05)")
    parser.add_argument("--search", action="store_true",
                        help="search for the ten fastest layouts that fit; flags of the layout that are given are kept")
    parser.add_argument("--published", action="store_true",
                        help="predict published runs instead; uses only --product-efficiency, --wire-efficiency, "
                             "--overlap-slowdown and --latency")


def processes(flags) -> int:
    for name, least, most in (("gpus", 1, 10**6), ("gpus_per_host", 1, 10**6), ("network", 0.001, 10**6),
                              ("product_efficiency", 0.01, 1), ("wire_efficiency", 0.01, 1), ("latency", 0, 10**6),
                              ("overlap_slowdown", 0, 0.9), ("reserve", 0, 0.9)):
        value = getattr(flags, name)
        require(least <= value <= most, f"{flag_name(name)} must be from {least} to {most}, but is {value}")
    others = set(flags.given) - {"published", "product_efficiency", "wire_efficiency", "overlap_slowdown", "latency"}
    require(not (flags.published and others),
            f"--published has no use for {', '.join(map(flag_name, sorted(others)))}; leave that out")
    if flags.vocab_size is None:
        flags.vocab_size = PUBLISHED_VOCABULARIES.get(flags.model, GPT2_VOCABULARY)
    measures_here = flags.gpu == "here"
    flags.device = flags.device if measures_here else "cuda"
    require(not (flags.search and measures_here), f"--search needs a --gpu of {', '.join(GPUS)}, but it is `here`")
    if not flags.search:
        (config_here if measures_here else config_of)(flags, flags.gpus)
    require(not (flags.fp8_format and flags.gpu in WITHOUT_FP8), f"--fp8-format needs a GPU with fp8, which --gpu "
            f"{flags.gpu} has not; try --gpu H100")
    require(flags.gpu == "here" or DTYPES[flags.dtype].itemsize == 2,
            f"--gpu {flags.gpu} needs --dtype bfloat16 or float16, because only its 16-bit FLOP/s are known, but "
            f"--dtype is {flags.dtype}; try --dtype bfloat16")
    return flags.gpus if measures_here else 1


def answer(flags, launch):
    if flags.published:
        return published.answer(partial(machine_of, flags, per_host=8), flags)
    if flags.search:
        return plan_search.answer(flags, machine_of(flags, flags.gpu, flags.network, flags.gpus_per_host),
                                  GPUS[flags.gpu].memory * (1 - flags.reserve), PEAK_FLOPS[flags.gpu])
    config = config_of(flags, flags.gpus)
    if flags.gpu != "here":
        return plan(dataclasses.replace(config, device="cuda"), flags)
    config, *parts = comm.build(config, launch)
    return here_text(config, run_here(config, *parts, flags.repeats))


# ---- for GPUs from data sheets

def machine_of(flags, name: str, network: float, per_host: int) -> Machine:
    """Return the rates that a GPU reaches: those of its data sheet times the efficiencies in `flags`.

    network: Gbit/s to other hosts; per_host: GPUs per host.
    """
    gpu, efficiency = GPUS[name], flags.wire_efficiency
    return Machine(matmul_rate=PEAK_FLOPS[name] * flags.product_efficiency, intra_host_rate=gpu.link_rate * efficiency,
                   inter_host_rate=network / 8 * 1e9 * efficiency, latency=flags.latency * 1e-6,
                   ranks_per_host=per_host, memory_rate=gpu.memory_rate * efficiency,
                   host_copy_rate=gpu.host_rate * efficiency, elementwise_rate=gpu.memory_rate * efficiency,
                   overlap_slowdown=flags.overlap_slowdown)


def plan(config: Config, flags):
    """Return (text, record) of the plan for flags.gpu, one of GPUS."""
    gpu, peak = GPUS[flags.gpu], PEAK_FLOPS[flags.gpu]
    machine = machine_of(flags, flags.gpu, flags.network, flags.gpus_per_host)
    stages, usable = [sizes.mesh_at(config, stage) for stage in range(config.pp)], gpu.memory * (1 - flags.reserve)
    needs = [memory_terms(config, mesh) for mesh in stages]
    fits = all(sum(need.values()) <= usable for need in needs)
    parts = step_time.step_seconds(config, machine)
    seconds, tokens = sum(parts.values()), config.global_batch_size * config.seq_length
    used = step_time.mfu(config, seconds, peak)
    ideal = sum(parts.get(name, 0.0) for name in ("products", "element-wise", "again", "host copies", "tp wires"))
    bubble = parts["bubble"] / ideal
    text = "\n".join([
        f"{config.model}: {parameter_count(config):,} parameters, {config.dtype}, on {config.world_size} x {flags.gpu}",
        *experts_text(config),
        describe(config), "",
        table(["memory of a GPU", *MEMORY_TERMS, "total", ""],
              [[f"stage {stage}", *map(bytes_text, need.values()), bytes_text(sum(need.values())),
                "fits" if sum(need.values()) <= usable else "TOO MUCH"] for stage, need in enumerate(needs)]),
        f"usable {bytes_text(usable)}; model state {expected_memory.state_bytes_per_parameter(config):.2f} bytes per "
        f"parameter; stage 0 keeps the activations of up to "
        f"{counted(expected_memory.microbatches_in_flight(config, stages[0]), 'microbatch', '.3g')}",
        *([f"host memory for each GPU of stage 0: {bytes_text(expected_memory.peak_host_bytes(config, stages[0]))}"]
          if expected_memory.offloads_to_host(config) else []),
        *([] if fits else [why_not(config, needs, usable), what_helps(config, machine, flags, usable)]), "",
        table(["communication of a GPU in a step", "collective", "ranks", "calls", "bytes", "sent", "time"],
              communication_rows(config, machine)), "",
        table(["a step", "", ""], [[PARTS.get(name, name), seconds_text(part), f"{part / seconds:.1%}"]
                                   for name, part in [*parts.items(), ("total", seconds)]]),
        *more_columns(config, machine, seconds), *(faster_schedule(config, machine, seconds, usable) if fits else ()),
        f"the bubble is {bubble:.1%} of the ideal time, which is the sum of the lines above the bubble, and "
        f"{parts['bubble'] / seconds:.1%} of the step; it would be (p - 1)/m of the ideal time in 1F1B if stages are "
        "equal, so more microbatches shrink it",
        f"{tokens / seconds:,.0f} tokens/s; MFU {used:.1%} (6 N + 12 L h s FLOPs per token, relative to "
        f"{peak / 1e12:g} TFLOP/s per GPU)", "", *assumptions(flags, gpu)])
    return text, {"question": "plan", "model": config.model, "parameters": parameter_count(config),
                  "active_parameters": active_parameter_count(config), "gpu": flags.gpu, "gpus": config.world_size,
                  **layout_of(config), "microbatches": config.microbatches, "fits": fits, "usable_bytes": usable,
                  "memory": needs,
                  "host_memory": [expected_memory.peak_host_bytes(config, mesh) for mesh in stages],
                  "communication": [[dataclasses.asdict(traffic)
                                     for traffic in expected_traffic.step_traffic(config, mesh)] for mesh in stages],
                  "bubble": bubble, "parts_s": parts, "step_s": seconds, "mfu": used,
                  "tokens_per_second": tokens / seconds}


def experts_text(config: Config) -> list[str]:
    """Return a list with a line about the experts; empty without experts."""
    if not config.num_experts:
        return []
    state = expected_memory.state_bytes_per_parameter(config, "expert_dp")
    return [f"{config.num_experts} experts in a layer, assumed to be chosen equally often: a token uses "
            f"{active_parameter_count(config):,} parameters; model state {state:.2f} bytes per expert's parameter"]


def more_columns(config: Config, machine: Machine, seconds: float) -> list[str]:
    """Return a list with a line that proposes --columns; empty for several slices, or if columns gain less than 1 %."""
    found = {columns: sum(step_time.step_seconds(dataclasses.replace(config, columns=columns), machine).values())
             for columns in (2, 4, 8) if columns > config.columns and min(config.slices, config.micro_batch_size) == 1}
    best = min(found, key=found.get, default=None)
    if best is None or found[best] > 0.99 * seconds:
        return []
    return [f"--columns {best} would hide more tp communication, also with --micro-batch-size "
            f"{config.micro_batch_size}: {seconds_text(found[best])} per step"]


def faster_schedule(config: Config, machine: Machine, seconds: float, usable: float) -> list[str]:
    """Return a list with a line that proposes the fastest schedule that fits; empty if that gains less than 1 %."""
    times = [(sum(step_time.step_seconds(dataclasses.replace(config, **changes), machine).values()), changes)
             for changes in itertools.chain(*other_schedules(config))]
    fitting = (f"{flags_text(changes)} would take {seconds_text(other)} per step"
               for other, changes in sorted(times, key=lambda timed: timed[0])
               if other < 0.99 * seconds and most_needed(config, changes, usable) <= usable)
    return list(itertools.islice(fitting, 1))


def communication_rows(config: Config, machine: Machine) -> list[list]:
    """Return a row for each process group and purpose, from the stage that spends most time on it."""
    longest = {}
    for stage in range(config.pp):
        mesh = sizes.mesh_at(config, stage)
        for traffic in expected_traffic.step_traffic(config, mesh):
            key, ranks = (traffic.group, traffic.why), len(set(sizes.group_ranks(mesh, traffic.group)))
            seconds = step_time.communication_seconds(config, machine, mesh, [traffic])
            if traffic.kind != "receive" and seconds >= longest.get(key, (0.0,))[0]:
                sent = expected_traffic.bytes_sent(traffic.kind, traffic.bytes, ranks)
                longest[key] = seconds, [f"{traffic.group}: {traffic.why}", traffic.kind, ranks, traffic.calls,
                                         bytes_text(traffic.bytes), bytes_text(sent), seconds_text(seconds)]
    return [row for _, row in longest.values()]


def assumptions(flags, gpu: Gpu) -> list[str]:
    """Return the lines that state the plan's assumptions."""
    channels, connection = expected_memory.CHANNELS, expected_memory.CONNECTION_BYTES
    return ["assumptions:",
            f"  {flags.gpu}: {bytes_text(gpu.memory)} of memory, of which {flags.reserve:.0%} stays free (--reserve), "
            f"read and written at {bytes_text(gpu.memory_rate)}/s",
            f"  matmuls and attention reach {flags.product_efficiency:.0%} of the 16-bit peak of "
            f"{PEAK_FLOPS[flags.gpu] / 1e12:g} TFLOP/s, whatever their size (--product-efficiency), and in fp8 "
            f"{FP8_SPEEDUP:g} times as much; element-wise work reads and writes each tensor once per fused operation, "
            "at the memory's rate",
            f"  hosts of {flags.gpus_per_host} GPUs (--gpus-per-host) joined by {gpu.link}, "
            f"{bytes_text(gpu.link_rate)}/s each way; {flags.network:g} Gbit/s from a GPU to other hosts (--network)",
            f"  links and GPU memory reach {flags.wire_efficiency:.0%} of these rates (--wire-efficiency); each "
            f"collective takes {flags.latency:g} us in addition to sending its bytes (--latency)",
            "  all-reduces and all-to-alls overlap other slices and weight gradients, and while one is in flight, it "
            f"takes {flags.overlap_slowdown:.0%} of the GPU (--overlap-slowdown); gradient reduction overlaps the last "
            "microbatch's backward",
            f"  an NCCL ring allocates {bytes_text(channels * connection)}, {channels} channels of "
            f"{bytes_text(connection)}; trees and in-network reduction would need more",
            "  messages, working memory and communicators are estimates; the rest of the memory is exact"]


# ---- if it does not fit

def why_not(config: Config, needs: list[dict], usable: float) -> str:
    """Return a line that says by how much the fullest GPU exceeds its memory, and which two terms are largest.

    needs: memory_terms() of each stage; usable: bytes of memory.
    """
    worst = max(range(config.pp), key=lambda stage: sum(needs[stage].values()))
    need, alive = needs[worst], expected_memory.microbatches_in_flight(config, sizes.mesh_at(config, worst))
    total = sum(need.values())
    details = {"activations": f" (of up to {counted(alive, 'microbatch', '.3g')})"}
    largest = [f"{name} {bytes_text(need[name])}{details.get(name, '')}"
               for name in sorted(need, key=need.get, reverse=True)[:2]]
    return (f"does not fit: stage {worst} needs {bytes_text(total)}, {bytes_text(total - usable)} too much; the "
            f"largest terms are {' and '.join(largest)}")


def what_helps(config: Config, machine: Machine, flags, usable: float) -> str:
    """Return a line that names what would make the model fit.

    It tries single changes, then pairs of changes, then more GPUs, then other GPUs, and stops at the first of these
    that has an answer.
    """
    found = []

    def costs(most, *how):
        seconds = sum(step_time.step_seconds(changed(config, *how), machine).values())
        return f"({bytes_text(most)}, {seconds_text(seconds)} per step)"

    for count in (1, 2):
        for changes in itertools.combinations(remedies(config), count) if not found else ():
            merged = {name: value for change in changes for name, value in change.items()}
            if len(merged) == sum(map(len, changes)) and (most := most_needed(config, merged, usable)) <= usable:
                found.append(f"{flags_text(merged)} {costs(most, merged)}")
    for gpus in (config.world_size * factor for factor in (2, 4, 8, 16) if not found):
        if (most := most_needed(config, {}, usable, gpus)) <= usable:
            found.append(f"--gpus {gpus} {costs(most, {}, gpus)}")
    if not found:
        most = most_needed(config, {})
        found = [f"--gpu '{name}'" for name, gpu in GPUS.items() if gpu.memory * (1 - flags.reserve) >= most]
    return (f"would fit with {', or '.join(found)}" if found
            else "it would not fit with any two changes, with up to 16 times as many replicas, or on another GPU; "
                 "raise --gpus together with --tp and --pp")


def remedies(config: Config) -> list[dict]:
    """Return the single changes that reduce a GPU's memory, such as {"zero_stage": 2}."""
    found = [{"zero_stage": stage} for stage in (1, 2) if stage > config.zero_stage and config.dp * config.cp > 1]
    found += [change for changes in other_schedules(config) for change in changes[:1] if config.pp > 1]
    found += [{"expert_model_parallel_size": factor * config.ep} for factor in (2, 4, 8) if config.num_experts]
    found += [{"sequence_parallel": True}] * (config.tp > 1 and not config.sequence_parallel)
    found += more_recomputation(config)
    found += [{name: 0.0} for name in ("attention_dropout", "hidden_dropout") if getattr(config, name)]
    found += [{"micro_batch_size": size} for size in sorted({config.micro_batch_size // 2, 1}, reverse=True)
              if 0 < size < config.micro_batch_size]
    found += [{name: factor * getattr(config, name)} for factor in (2, 4)
              for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")]
    return found + [{"context_parallel_size": size} for size in context_sizes(config.seq_length, config.world_size)
                    if size > config.cp]


# ---- for this machine

def run_here(config: Config, mesh, optimizer, stage, repeats: int) -> dict:
    """Predict and measure a step, `repeats` times in turn, and return the record. Every rank must call it.

    Each prediction measures the machine's rates right before the step, so both see the same load.
    """
    dataset = RandomTokens(config, mesh.device)
    held = memory.measure(config, mesh, optimizer, stage, dataset)
    with comm.CollectiveCounter(mesh) as listener:
        train.train_step(3, stage, optimizer, dataset, config, mesh)
    machines, predicted, measured = [], [], []
    for step in range(4, 4 + repeats):
        machines.append(step_time.measure_machine(config, mesh))
        predicted.append(sum(step_time.step_seconds(config, machines[-1]).values()))
        synchronize_ranks(mesh.device)
        start = time.perf_counter()
        train.train_step(step, stage, optimizer, dataset, config, mesh)
        measured.append(slowest(time.perf_counter() - start))
    everyone = gathered((held, listener.counts))
    expected = [memory.predict(config, mesh) for mesh in sizes.all_meshes(config)]
    memory_errors = {name: max(abs(found[name] / formula[name] - 1) for (found, _), formula in zip(everyone, expected))
                     for name in held}
    return {"question": "plan", "gpu": "here", "gpus": config.world_size, "tp": config.tp, "pp": config.pp,
            "dp": config.dp, "cp": config.cp, "ep": config.ep, "slices": config.slices,
            "machine": {name: statistics.median(getattr(machine, rate) for machine in machines) for name, rate in
                        (("products", "matmul_rate"), ("near", "intra_host_rate"), ("memory", "memory_rate"))},
            "predicted_s": predicted, "measured_s": measured,
            "measured_over_predicted": statistics.median(map(operator.truediv, measured, predicted)),
            "memory_errors": memory_errors,
            "comm_exact": comm.comparable([counts for _, counts in everyone]) == comm.comparable(
                comm.predict(config))}


def here_text(config: Config, found: dict):
    """Return (text, record). The record is `found`, the result of run_here(), unchanged."""
    machine, predicted, measured = (found["machine"], Times(tuple(found["predicted_s"])),
                                    Times(tuple(found["measured_s"])))
    return "\n".join([
        f"tp {config.tp}, pp {config.pp}, dp {config.dp}, slices {config.slices}, {config.dtype} on {config.device}",
        f"each process, while all are busy: matmuls {machine['products'] / 1e9:.3g} GFLOP/s, communication "
        f"{bytes_text(machine['near'])}/s, memory {bytes_text(machine['memory'])}/s",
        table(["a step", "median [min .. max]"],
              [["predicted", predicted], ["measured", measured],
               ["measured / predicted", ratio_text(ratios(measured, predicted))]]),
        f"collectives and bytes {'equal' if found['comm_exact'] else 'DO NOT equal'} their formulas; memory differs by "
        + ", ".join(f"{error:.1%} ({name})" for name, error in found["memory_errors"].items())]), found
