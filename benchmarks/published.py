"""Predicts published runs and compares the predictions with the papers' measurements: `bench.py plan --published`.

    2104.04473, table 1    GPT with 1.7 to 1008 billion parameters on up to 3072 A100. Measured: FLOP/s per GPU. A step
                           has 96 B s l h^2 (1 + s/6h + V/16lh) FLOPs with recomputation, formula (3)
    2205.05198, table 5    one replica of four such models. Measured: seconds of a step that recomputes whole layers,
                           and of a step that recomputes only attention and uses sequence parallelism
    2409.15241             Domino on H100. Measured: its largest speed-up over Megatron-LM, and the share of
                           communication in Megatron-LM's step

The step time comes from analysis/step_time.py, but with the costs of what these runs did. Megatron-LM's kernels read
and write more than fused ones do. In the first two papers attention also stores its scores, and each microbatch repeats
the forward of whole layers, or only of attention, before its backward. In 2409.15241 nothing hides Megatron-LM's
all-reduces.

A ratio far from 1 points to a wrong assumption. The largest is that of the share of communication at tp 32. There each
rank has 160 of 5120 columns. Such narrow matmuls probably reach less than the assumed share of the peak, so the real
step is longer and communication a smaller share of it.
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
    """A published run: its model, its layout, and the figure that was measured."""
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
    figure: str                  # what was measured: a key of FIGURES
    published: float             # its value
    again: str = "layers"        # what is recomputed before each backward: layers, attention, nothing
    gpu: str = "A100"
    network: float = 200.0       # Gbit/s from a GPU to other hosts
    vocab_size: int = 51200

    @property
    def config(self) -> Config:
        """The run's Config, with one slice and an unsharded optimizer as in Megatron-LM."""
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

# An all-reduce over all GPUs of several hosts uses the eight 400 Gbit/s network cards of each host at once.
OF_H100 = dict(again="nothing", gpu="H100", network=8 * 400.0, vocab_size=50257)
DOMINO = [Run(*sizes, figure, published, **OF_H100) for *sizes, figure, published in (
    ("2.7B", 32, 2560, 32, 8, 1, 8, 8, 8, 1, "x speed", 1.3), ("6.7B", 32, 4096, 32, 8, 1, 8, 8, 8, 1, "x speed", 1.3),
    ("13B", 40, 5120, 40, 8, 1, 8, 8, 8, 1, "x speed", 1.3), ("13B", 40, 5120, 32, 32, 1, 32, 8, 8, 1, "% wires", 43))]
RUNS = {"2104.04473": TABLE_1, "2205.05198": TABLE_5, "2409.15241": DOMINO}


# What Megatron-LM's separate kernels read and write besides step_time.elementwise_bytes(), in a layer's forward and
# backward. RESIDUAL: activations X. Forward stores a dropout mask of X/2 and reads x' again for the norm, in both
# sublayers: 3 X. In backward the norm reads its input and gradient a second time for its weight gradient, dropout reads
# and writes the gradient and reads the mask, and the two gradients of the residual are added: 13 X.
# SCORES: bytes of each score (a head's pair of tokens) in 16 bit, without flash attention. In forward a matmul writes
# 2, softmax reads and writes 4, dropout 4 and a mask of 1, the next matmul reads 2. In backward a matmul writes 2,
# dropout reads and writes 5, softmax 6, and three matmuls read 6.
RESIDUAL, SCORES = (3, 13), (13, 19)


# ---- seconds

def seconds(config: Config, machine: Machine, costs=step_time.action_costs) -> float:
    """Return the seconds of a step: the sum of step_time.step_seconds(), but with other costs of actions.

    costs: the function to use in place of step_time.action_costs().
    """
    stages = [sizes.mesh_at(config, stage) for stage in range(config.pp)]
    of_stages = [costs(config, machine, mesh) for mesh in stages]
    (real,) = step_time.simulate_schedule(config, machine, of_stages, messages=(True,))
    once = max(step_time.exposed_data_parallel_seconds(config, machine, mesh, row) for mesh, row in zip(stages, real))
    return (simulation.step_time(real) + once
            + max(step_time.optimizer_memory_traffic(config, mesh) for mesh in stages) / machine.memory_rate)


def megatron(config: Config, machine: Machine, mesh, scores=(0, 0), before_backward=None) -> dict:
    """Return action_costs() with the additional element-wise work of Megatron-LM's kernels.

    scores: bytes of each score in forward and backward; (0, 0) with flash attention
    before_backward(chunk, residual, scores): returns the seconds of what a chunk's backward repeats first; residual,
        scores: the seconds of its additional work in forward
    """
    found = step_time.action_costs(config, machine, mesh)
    pairs = config.micro_batch_size * config.num_attention_heads / config.tp * config.seq_length ** 2
    for number, chunk in enumerate(sizes.stage_chunks(config, mesh)):
        (forward, backward), (forward_scores, backward_scores) = (
            [len(chunk.layers) * unit * times / machine.elementwise_rate for times in count]
            for unit, count in ((sizes.residual_bytes(config), RESIDUAL), (pairs, scores)))
        again = before_backward(chunk, forward, forward_scores) if before_backward else 0.0
        for kind, more in (("forward", forward + forward_scores), ("backward", backward + backward_scores + again)):
            cost = found[kind, number]
            found[kind, number] = dataclasses.replace(cost, compute=cost.compute + more)
    return found


def layers_again(config: Config, machine: Machine, mesh) -> dict:
    """Return megatron() where each backward first repeats the layers' forward with its all-reduces."""
    def seconds_of(chunk, residual, scores):
        dense, _, attention = (count / machine.matmul_rate for count in step_time.forward_flops(config, mesh, chunk))
        layers = dataclasses.replace(chunk, post_process=False)
        moved = step_time.elementwise_bytes(config, mesh, layers)[0] / machine.elementwise_rate
        traffic = [collective for collective in expected_traffic.tensor_parallel_traffic(config, mesh, [chunk])
                   if collective.why == "layers forward"]
        communication = step_time.communication_seconds(config, machine, mesh, traffic) / config.microbatches
        return action_seconds(config, Cost(dense + attention + moved + residual + scores, communication))

    return megatron(config, machine, mesh, SCORES, seconds_of)


def attention_again(config: Config, machine: Machine, mesh) -> dict:
    """Return megatron() where each backward first repeats attention's own matmuls. They need no communication."""
    return megatron(config, machine, mesh, SCORES, lambda chunk, residual, scores:
                    step_time.forward_flops(config, mesh, chunk)[2] / machine.matmul_rate + scores)


def blocking(config: Config, machine: Machine, mesh) -> dict:
    """Return megatron() without overlap: the work that could overlap communication runs before or after it."""
    return {what: Cost(cost.compute + cost.independent, cost.communication)
            for what, cost in megatron(config, machine, mesh).items()}


AGAIN = {"layers": layers_again, "attention": attention_again, "nothing": megatron}


# ---- figures

def teraflops(run: Run, machine: Machine) -> float:
    """Predict the TFLOP/s per GPU. Recomputed FLOPs count too, as in the paper."""
    return formula_3(run.config) / step(run, machine) / run.gpus / 1e12


def formula_3(config: Config) -> float:
    """Return the FLOPs of a step with recomputation (2104.04473, section 5.1).

    A backward counts as two forwards. So the layers, which are recomputed, count as four forwards, the head as three.
    """
    layers, h, words = config.num_layers, config.hidden_size, config.padded_vocab_size
    return 96 * config.global_batch_size * SEQ_LENGTH * layers * h ** 2 * (
        1 + SEQ_LENGTH / (6 * h) + words / (16 * layers * h))


def step(run: Run, machine: Machine) -> float:
    """Predict the seconds of a step."""
    return seconds(run.config, machine, AGAIN[run.again])


def gain(run: Run, machine: Machine) -> float:
    """Predict the speed-up of Domino with two slices over blocking communication."""
    config = run.config
    return seconds(config, machine, blocking) / seconds(dataclasses.replace(config, slices=2), machine, megatron)


def wires(run: Run, machine: Machine) -> float:
    """Predict the percentage of a step that communication takes if nothing hides it."""
    free = dataclasses.replace(machine, intra_host_rate=math.inf, inter_host_rate=math.inf, latency=0.0)
    return 100 * (1 - seconds(run.config, free, blocking) / seconds(run.config, machine, blocking))


FIGURES = {"TFLOP/s": teraflops, "s": step, "x speed": gain, "% wires": wires}


# ---- the answer

def answer(machine_of, flags):
    """Return (text, record). machine_of: a function (name of a GPU, Gbit/s to other hosts) -> Machine."""
    rows, record = [], []
    for paper, runs in RUNS.items():
        for run in runs:
            config, predicted = run.config, FIGURES[run.figure](run, machine_of(run.gpu, run.network))
            chunks = f" x {config.virtual_stages}" if config.virtual_stages > 1 else ""
            rows.append([f"{paper}: {run.name}", run.num_layers, run.hidden_size, run.heads, config.tp, config.pp,
                         config.dp, run.gpus, f"{run.micro_batch_size} of {run.global_batch_size}",
                         config.schedule + chunks, run.again, f"{run.published:g} {run.figure}",
                         f"{predicted:.3g}", f"{predicted / run.published:.2f}"])
            record.append({"paper": paper, **dataclasses.asdict(run), "predicted": predicted,
                           "ratio": predicted / run.published})
    head = ["", "layers", "hidden", "heads", "tp", "pp", "dp", "GPUs", "batch", "schedule", "recomputed", "published",
            "plan", "ratio"]
    text = "\n".join([table(head, rows), "", *assumptions(flags)])
    return text, {"question": "plan", "published": True, "rows": record}


def assumptions(flags) -> list[str]:
    """Return the lines that explain the columns, the assumptions and the sources of the figures."""
    return f"""\
columns:
  batch: micro batch of global batch; recomputed: what is repeated before each backward; ratio: plan / published
  x speed: two slices compared with blocking communication; % wires: the share of blocking communication in a step
assumptions:
  {SEQ_LENGTH} tokens per sample, vocabulary {TABLE_1[0].vocab_size:,} (2409.15241: {DOMINO[0].vocab_size:,})
  16-bit matmuls reach {flags.product_efficiency:.0%} of the peak, 312 TFLOP/s of an A100 and 989 of an H100, whatever
  their size (--product-efficiency). Element-wise work is counted in bytes, as Megatron-LM's kernels read and write
  them; before 2409.15241 attention stores its scores
  hosts of 8 GPUs, joined by NVLink of 300 (A100) and 450 GB/s (H100) each way; each A100 has a card of 200 Gbit/s to
  other hosts; an all-reduce over whole H100 hosts uses all eight cards of 400 Gbit/s
  links and GPU memory reach {flags.wire_efficiency:.0%} of these rates (--wire-efficiency), and each collective takes
  {flags.latency:g} us in addition to sending its bytes (--latency)
  recomputing layers repeats their all-reduces, which block, but not the head, as in formula (3) of 2104.04473;
  recomputing attention needs no communication. Sequence parallelism is counted as the all-reduces that it replaces.
  Weight gradients hide backward's all-reduces, except in 2409.15241. An all-reduce in flight takes
  {flags.overlap_slowdown:.0%} of the GPU (--overlap-slowdown). Gradients are reduced in fp32 during the last
  microbatch's backward; each GPU of a stage sends whole messages; the optimizer is not sharded.
  Nothing is added for dropout, data, kernel launches and slower ranks
sources:
  2104.04473, table 1: the figures come from a copy (github.com/SotaroKaneda/MLCarbon). The table omits micro batches
  and chunks; they come from Megatron-LM's examples/sc21/run_table_1.sh. It ran float16, as fast as bfloat16
  2205.05198, table 5: seconds and layouts come from github.com/calculon-ai/calculon, which is validated against it;
  not looked up: layers, widths, heads, samples, vocabulary, and the network cards of both papers' A100 hosts. Layers
  and widths give the parameter counts that the paper names
  2409.15241: its abstract says up to 1.3 x, but not for which model and batch. So 1.3 x is compared with three models
  on one host, with the batch of the authors' example. DeepSpeed's blogs/deepspeed-domino says that communication takes
  up to 43 % of 13B's step on 8, 16 and 32 GPUs, which is compared with 32 GPUs. 32 GPUs can't share the 40 heads of
  13B, so the prediction has 32 wider heads with the same FLOPs""".splitlines()
