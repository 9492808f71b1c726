"""What plan says of runs that others made and published, beside what they measured: `bench.py plan --published`.

    2104.04473, table 1    GPT of 1.7 to 1008 billion parameters on up to 3072 A100: FLOP/s that a GPU reaches. What is
                           computed again counts: 96 B s l h^2 (1 + s/6h + V/16lh) a step, formula (3)
    2205.05198, table 5    four of such sizes, one replica of each: seconds of a step in which a whole layer is computed
                           again, and in which only attention is, with sequence parallelism
    2409.15241             Domino on H100: its largest gain over Megatron-LM, and the wires' part of Megatron-LM's step

The time is that of step_time.py, with what these runs do and this program does not: before a microbatch's backward the
layers' forward again, or attention's alone; and in Megatron-LM's part of 2409.15241 sums that nothing covers.

A ratio far from 1 shows which assumption does not hold. The largest is that products reach the same part of the peak
at every width: 45 % would fit the 1.7B of table 1, of width 2304, and 71 % the 1T of table 5, of width 25600. Smaller
products than assumed are likely what is wrong too where 32 GPUs share a width of 5120; but little is told of that run.
"""

import dataclasses
import math
from dataclasses import dataclass

from benchmarks.common import table
from nanodomino.analysis import expected_traffic, sizes, step_time
from nanodomino.analysis.step_time import Cost, Machine, action_seconds
from nanodomino.config.config import Config
from nanodomino.schedules import simulation

SEQ_LENGTH = 2048


@dataclass(frozen=True)
class Run:
    """A published one. again: what is computed a second time before backward."""
    name: str
    num_layers: int
    hidden_size: int
    heads: int
    tp: int
    pp: int
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    virtual_stages: int
    figure: str                  # a key of FIGURES
    published: float
    again: str = "layers"        # layers, attention, nothing
    gpu: str = "A100"
    network: float = 200.0       # Gbit/s that a GPU has to other hosts
    vocab_size: int = 51200

    @property
    def config(self) -> Config:
        """One slice, and the whole optimizer on each replica, as Megatron-LM had it."""
        return Config(num_layers=self.num_layers, hidden_size=self.hidden_size, num_attention_heads=self.heads,
                      seq_length=SEQ_LENGTH, vocab_size=self.vocab_size, dtype="bfloat16", device="cuda", slices=1,
                      zero_stage=0, micro_batch_size=self.micro_batch_size, global_batch_size=self.global_batch_size,
                      tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=self.pp,
                      virtual_stages=self.virtual_stages).resolve(self.gpus)


TABLE_1 = [Run(*sizes, "TFLOP/s", published) for *sizes, published in (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 16, 512, 1, 137), ("3.6B", 30, 3072, 32, 2, 1, 64, 16, 512, 1, 138),
    ("7.5B", 36, 4096, 32, 4, 1, 128, 16, 512, 1, 142), ("18.4B", 40, 6144, 48, 8, 1, 256, 8, 1024, 1, 135),
    ("39.1B", 48, 8192, 64, 8, 2, 512, 4, 1536, 1, 138), ("76.1B", 60, 10240, 80, 8, 4, 1024, 2, 1792, 3, 140),
    ("145.6B", 80, 12288, 96, 8, 8, 1536, 2, 2304, 2, 148), ("310.1B", 96, 16384, 128, 8, 16, 1920, 1, 2160, 2, 155),
    ("529.6B", 105, 20480, 128, 8, 35, 2520, 1, 2520, 3, 163),
    ("1008.0B", 128, 25600, 160, 8, 64, 3072, 1, 3072, 1, 163))]

TABLE_5 = [Run(*sizes, "s", published, again) for *sizes, both in (
    ("22B", 48, 6144, 64, 8, 1, 8, 4, 4, 1, (1.42, 1.10)), ("175B", 96, 12288, 96, 8, 8, 64, 1, 64, 3, (18.13, 13.75)),
    ("530B", 105, 20480, 128, 8, 35, 280, 1, 280, 3, (49.05, 37.83)),
    ("1T", 128, 25600, 160, 8, 64, 512, 1, 512, 1, (94.42, 71.49)))
    for again, published in zip(("layers", "attention"), both)]

# Its eight cards of 400 Gbit/s are together what a host sends to others, when a sum is over all of its GPUs.
OF_H100 = dict(again="nothing", gpu="H100", network=8 * 400.0, vocab_size=50257)
DOMINO = [Run(*sizes, figure, published, **OF_H100) for *sizes, figure, published in (
    ("2.7B", 32, 2560, 32, 8, 1, 8, 8, 8, 1, "x speed", 1.3), ("6.7B", 32, 4096, 32, 8, 1, 8, 8, 8, 1, "x speed", 1.3),
    ("13B", 40, 5120, 40, 8, 1, 8, 8, 8, 1, "x speed", 1.3), ("13B", 40, 5120, 32, 32, 1, 32, 8, 8, 1, "% wires", 43))]
RUNS = {"2104.04473": TABLE_1, "2205.05198": TABLE_5, "2409.15241": DOMINO}


# ---- seconds

def seconds(config: Config, machine: Machine, costs=step_time.action_costs) -> float:
    """Of a step, as the sum of step_time.step_seconds; with other costs of the actions, if these are given."""
    stages = [sizes.mesh_at(config, stage) for stage in range(config.pp)]
    (real,) = step_time.simulate_schedule(config, machine, [costs(config, machine, at) for at in stages], messages=(True,))
    once = max(step_time.exposed_data_parallel_seconds(config, machine, at, row) for at, row in zip(stages, real))
    return (simulation.step_time(real) + once
            + max(step_time.optimizer_memory_traffic(config, at) for at in stages) / machine.memory_rate)


def before_backward(config: Config, machine: Machine, at, seconds_of) -> dict:
    """The costs of actions where the backward of a chunk begins with seconds_of(chunk) of other work."""
    found = step_time.action_costs(config, machine, at)
    for number, chunk in enumerate(sizes.stage_model(config, at).chunks):
        cost = found["backward", number]
        found["backward", number] = dataclasses.replace(cost, compute=cost.compute + seconds_of(chunk))
    return found


def layers_again(config: Config, machine: Machine, at) -> dict:
    """With a forward of the layers, and their sums."""
    def seconds_of(chunk):
        dense, _, attention = (count / machine.matmul_rate for count in step_time.forward_flops(config, at, chunk))
        sums = [one for one in expected_traffic.tensor_parallel_traffic(config, at, [chunk]) if one.why == "layers forward"]
        wires = step_time.communication_seconds(config, machine, at, sums) / config.microbatches
        return action_seconds(config, Cost(dense + attention, wires))

    return before_backward(config, machine, at, seconds_of)


def attention_again(config: Config, machine: Machine, at) -> dict:
    """With attention's own products, which have no sums."""
    return before_backward(config, machine, at,
                           lambda chunk: step_time.forward_flops(config, at, chunk)[2] / machine.matmul_rate)


def blocking(config: Config, machine: Machine, at) -> dict:
    """The costs of actions where every sum is waited for."""
    return {what: Cost(cost.compute + cost.independent, cost.communication)
            for what, cost in step_time.action_costs(config, machine, at).items()}


AGAIN = {"layers": layers_again, "attention": attention_again, "nothing": step_time.action_costs}


# ---- figures

def teraflops(run: Run, machine: Machine) -> float:
    """That a GPU reaches; what is computed again counts."""
    return formula_3(run.config) / step(run, machine) / run.gpus / 1e12


def formula_3(config: Config) -> float:
    """FLOPs of a step: of the layers four forwards, of the head three (2104.04473, section 5.1)."""
    layers, h, words = config.num_layers, config.hidden_size, config.padded_vocab_size
    return 96 * config.global_batch_size * SEQ_LENGTH * layers * h ** 2 * (
        1 + SEQ_LENGTH / (6 * h) + words / (16 * layers * h))


def step(run: Run, machine: Machine) -> float:
    return seconds(run.config, machine, AGAIN[run.again])


def gain(run: Run, machine: Machine) -> float:
    """Of two slices over sums that are waited for."""
    config = run.config
    return seconds(config, machine, blocking) / seconds(dataclasses.replace(config, slices=2), machine)


def wires(run: Run, machine: Machine) -> float:
    """Percent of a step whose sums are waited for, by which it would be shorter if they took no time."""
    free = dataclasses.replace(machine, intra_host_rate=math.inf, inter_host_rate=math.inf, latency=0.0)
    return 100 * (1 - seconds(run.config, free, blocking) / seconds(run.config, machine, blocking))


FIGURES = {"TFLOP/s": teraflops, "s": step, "x speed": gain, "% wires": wires}


# ---- the answer

def answer(machine_of, flags):
    """(text, record). machine_of(name of a GPU, Gbit/s to other hosts) -> Machine"""
    rows, record = [], []
    for paper, runs in RUNS.items():
        for run in runs:
            config, said = run.config, FIGURES[run.figure](run, machine_of(run.gpu, run.network))
            chunks = f" x {config.virtual_stages}" if config.virtual_stages > 1 else ""
            rows.append([f"{paper}: {run.name}", run.num_layers, run.hidden_size, run.heads, config.tp, config.pp,
                         config.dp, run.gpus, f"{run.micro_batch_size} of {run.global_batch_size}",
                         config.schedule + chunks, run.again, f"{run.published:g} {run.figure}", f"{said:.3g}",
                         f"{said / run.published:.2f}"])
            record.append({"paper": paper, **dataclasses.asdict(run), "predicted": said, "ratio": said / run.published})
    head = ["", "layers", "hidden", "heads", "tp", "pp", "dp", "GPUs", "batch", "schedule", "again", "published",
            "plan", "ratio"]
    text = "\n".join([table(head, rows), "", *assumptions(flags)])
    return text, {"question": "plan", "published": True, "rows": record}


def assumptions(flags) -> list[str]:
    """Lines that say what was taken for granted, and where the figures are from."""
    products, reached, latency = flags.product_efficiency, flags.wire_efficiency, flags.latency
    return [
        "again: what is computed a second time before backward; batch: micro of global; x speed: of two slices over",
        "sums that are waited for; % wires: by how much a step whose sums are waited for would be shorter without them",
        "assumed:",
        f"  samples of {SEQ_LENGTH} tokens, {TABLE_1[0].vocab_size:,} words (2409.15241: {DOMINO[0].vocab_size:,})",
        f"  16-bit products reach {products:.0%} of the peak, 312 TFLOP/s of an A100 and 989 of an H100, with",
        "  attention and element-wise work, whatever their size (--product-efficiency)",
        "  hosts of 8 GPUs, joined by NVLink of 300 (A100) and 450 GB/s (H100) each way; each A100 has a card of",
        "  200 Gbit/s to other hosts; a sum over all GPUs of H100 hosts has their eight cards of 400 Gbit/s together",
        f"  rings, messages and the optimizer reach {reached:.0%} of these rates (--wire-efficiency), and a collective",
        f"  takes {latency:g} us besides (--latency)",
        "  layers again: with their sums, which nothing covers, without the head, as formula (3) of 2104.04473 counts;",
        "  attention again: without sums. Of sequence parallelism: as many bytes on the wires, and no other gain",
        "  as in this program, but for 2409.15241: weight gradients cover backward's sums; gradients are summed in",
        "  fp32 behind the last microbatch's backward; a message goes whole, from each GPU of a stage. Each replica",
        "  has the whole optimizer. Nothing for dropout, data, the start of kernels, ranks that wait for a slower one",
        "from where:",
        "  2104.04473, table 1: as in a copy of it (github.com/SotaroKaneda/MLCarbon). Micro batches and chunks, which",
        "  it does not tell, are of Megatron-LM's examples/sc21/run_table_1.sh. It ran float16, as fast as bfloat16",
        "  2205.05198, table 5: seconds and layouts as in github.com/calculon-ai/calculon, which is held against it",
        "  too; not looked up: layers, widths, heads, samples, words, and the cards of the A100 hosts of both papers.",
        "  Layers and widths give the parameters that it names",
        "  2409.15241: up to 1.3 x in its abstract, up to 43 % of 13B's step on 8, 16 and 32 GPUs in DeepSpeed's",
        "  blogs/deepspeed-domino, compared with 32. Of which size and batch 1.3 is, neither tells: it is held against",
        "  three sizes on one host, with the batch of the authors' example. 32 GPUs can't share 13B's 40 heads: 32",
        "  wider ones, of the same work, are taken"]
