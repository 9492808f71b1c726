"""Predicts published runs and compares the predictions with the papers' measurements: `bench.py plan --published`.

    2104.04473, table 1    GPT with 1.7 to 1008 billion parameters on up to 3072 A100. Measured: FLOP/s per GPU. A step
                           has 96 B s l h^2 (1 + s/6h + V/16lh) FLOPs with recomputation, formula (3)
    2205.05198, table 5    one replica of four such models. Measured: seconds of a step that recomputes whole layers,
                           and of a step that recomputes only attention and uses sequence parallelism
    2409.15241             Domino on H100. Measured: its largest speed-up over Megatron-LM ("x speed": two slices over
                           blocking communication), and the share of communication in Megatron-LM's step ("% wires")

The step time comes from dry runs (estimate/stages.py) of this program as these runs trained, with the assumptions of
`bench.py plan` and

    2,048 tokens per sample; no torch.compile, as Megatron-LM's kernels are separate; the optimizer is not sharded
    before 2409.15241 attention stores its scores, because of dropout
    a card of 200 Gbit/s per A100; an all-reduce over H100 hosts uses eight cards of 400 Gbit/s
    recomputing layers repeats their all-reduces, which block, but not the head, as in formula (3)
    weight gradients hide backward's all-reduces, except in 2409.15241, where a wait follows each launch
"""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial

import train
from benchmarks.runner import table
from nanodomino.estimate.accounts import Launch, Operation, Wait
from nanodomino.estimate.formulas import Machine
from nanodomino.estimate.rank import RankRun, clock_of
from nanodomino.estimate.stages import Stage, small_run, step_seconds
from nanodomino.settings.config import Config

SEQ_LENGTH = 2048


@dataclass(frozen=True)
class Run:
    """A published run: its model, its layout, and the figure that was measured."""
    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    virtual_stages: int
    figure: str                  # what was measured: a key of FIGURES
    published: float             # its value
    recomputed: str = "layers"   # what is recomputed before each backward: layers, attention, nothing
    gpu: str = "A100"
    network: float = 200.0       # Gbit/s from a GPU to other hosts
    vocab_size: int = 51200

    @property
    def config(self) -> Config:
        """The run's Config, with one slice and an unsharded optimizer as in Megatron-LM."""
        given = {name: value for name, value in vars(self).items() if name in Config.__dataclass_fields__}
        config = Config(**given, seq_length=SEQ_LENGTH, dtype="bfloat16", device="cuda", compile=False, slices=1,
                        columns=1, zero_stage=0, sequence_parallel=self.recomputed == "attention",
                        recompute_granularity="selective" if self.recomputed == "attention" else "none")
        return config.resolve(self.gpus).with_vocabulary(self.vocab_size)


# From a copy, github.com/SotaroKaneda/MLCarbon; micro batches and chunks from Megatron-LM's
# examples/sc21/run_table_1.sh.
TABLE_1 = [Run(*sizes, "TFLOP/s", published) for *sizes, published in (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 16, 512, 1, 137), ("3.6B", 30, 3072, 32, 2, 1, 64, 16, 512, 1, 138),
    ("7.5B", 36, 4096, 32, 4, 1, 128, 16, 512, 1, 142), ("18.4B", 40, 6144, 48, 8, 1, 256, 8, 1024, 1, 135),
    ("39.1B", 48, 8192, 64, 8, 2, 512, 4, 1536, 1, 138), ("76.1B", 60, 10240, 80, 8, 4, 1024, 2, 1792, 3, 140),
    ("145.6B", 80, 12288, 96, 8, 8, 1536, 2, 2304, 2, 148), ("310.1B", 96, 16384, 128, 8, 16, 1920, 1, 2160, 2, 155),
    ("529.6B", 105, 20480, 128, 8, 35, 2520, 1, 2520, 3, 163),
    ("1008.0B", 128, 25600, 160, 8, 64, 3072, 1, 3072, 1, 163))]

# From github.com/calculon-ai/calculon; layers, widths, heads, samples, vocabulary and network cards were not looked up.
TABLE_5 = [Run(*sizes, "s", published, recomputed) for *sizes, both in (
    ("22B", 48, 6144, 64, 8, 1, 8, 4, 4, 1, (1.42, 1.10)), ("175B", 96, 12288, 96, 8, 8, 64, 1, 64, 3, (18.13, 13.75)),
    ("530B", 105, 20480, 128, 8, 35, 280, 1, 280, 3, (49.05, 37.83)),
    ("1T", 128, 25600, 160, 8, 64, 512, 1, 512, 1, (94.42, 71.49)))
    for recomputed, published in zip(("layers", "attention"), both)]

# The abstract says up to 1.3 x, for no model in particular; 43 % of 13B's step comes from DeepSpeed's
# blogs/deepspeed-domino. 32 GPUs can't share its 40 heads, so the prediction has 32 wider heads with the same FLOPs.
OF_H100 = dict(recomputed="nothing", gpu="H100", network=8 * 400.0, vocab_size=50257)
DOMINO = [Run(*sizes, figure, published, **OF_H100) for *sizes, figure, published in (
    ("2.7B", 32, 2560, 32, 8, 1, 8, 8, 8, 1, "x speed", 1.3), ("6.7B", 32, 4096, 32, 8, 1, 8, 8, 8, 1, "x speed", 1.3),
    ("13B", 40, 5120, 40, 8, 1, 8, 8, 8, 1, "x speed", 1.3), ("13B", 40, 5120, 32, 32, 1, 32, 8, 8, 1, "% wires", 43))]
RUNS = {"2104.04473": TABLE_1, "2205.05198": TABLE_5, "2409.15241": DOMINO}

# Bytes of each score (a head's pair of tokens) in 16 bit, without flash attention. In forward a matmul writes 2,
# softmax reads and writes 4, dropout 4 and a mask of 1, the next matmul reads 2. In backward a matmul writes 2, dropout
# reads and writes 5, softmax 6, and three matmuls read 6.
SCORES = {"attention": 13, "attention backward": 19}


# ---- seconds

def seconds(run: Run, machine: Machine, blocks=False, slices=1) -> float:
    """Predict the seconds of a step. blocks: the GPU waits for each tp collective right after its launch."""
    return sum(step_seconds(train, dataclasses.replace(run.config, slices=slices), machine, partial(
        MegatronStage, recomputed=run.recomputed, blocks=blocks)).values())


class MegatronStage(Stage):
    """A stage as Megatron-LM ran it. recomputed, blocks: see seconds()."""

    def __init__(self, program, config: Config, stage: int, quick: bool, recomputed: str, blocks: bool):
        super().__init__(program, config, stage, quick)
        whole_layers = [small_run(program, config, depth, 0, 1) for depth in (1, 2)] if recomputed == "layers" else []
        *self.sides, self.recomputed_runs = ([as_megatron(run, recomputed != "nothing", blocks) for run in runs]
                                             for runs in (*self.sides, whole_layers))

    def seconds(self, machine: Machine) -> tuple[dict, dict]:
        actions, after = super().seconds(machine)
        for (kind, chunk), in actions if self.recomputed_runs else ():
            if kind == "backward":                             # repeats the forward of the layers, but not of the head
                repeated = self.linear(lambda run, forward=(("forward", chunk),): clock_of(run, machine).actions[
                    forward], self.recomputed_runs, chunk, heads=0.0)
                actions[(kind, chunk),] = Counter(actions[(kind, chunk),]) + Counter(repeated)
        return actions, after


@cache
def as_megatron(run: RankRun, stores_scores: bool, blocks: bool) -> RankRun:
    """Return the run with other events.

    stores_scores: replace fused attention by matmuls that write and read the scores
    blocks: wait for each tp collective right after its launch"""
    events = []
    for event in run.events:
        if stores_scores and getattr(event, "kind", None) in SCORES:
            (size,), count = event.shape, 2 if event.kind == "attention" else 4          # of matmuls
            scores = event.flops / size / (2 if count == 2 else 5)     # a causal kernel has counted half of them
            heads = round(scores / SEQ_LENGTH ** 2)
            events += [Operation("matmul", 0, 2 * scores * size, (heads, SEQ_LENGTH, SEQ_LENGTH, size), 2)] * count
            events += [Operation("memory", round(SCORES[event.kind] * scores))]
        else:
            events.append(event)
        if blocks and isinstance(event, Launch) and event.group == "tp":
            events.append(Wait(event.number))
    return dataclasses.replace(run, events=events)


# ---- figures

def teraflops(run: Run, machine: Machine) -> float:
    """Predict the TFLOP/s per GPU. The FLOPs of a step are formula (3) of 2104.04473, in which a backward counts as two
    forwards. So the layers, which are recomputed, count as four forwards, the head as three."""
    config, h = run.config, run.hidden_size
    flops = 96 * config.global_batch_size * SEQ_LENGTH * config.num_layers * h ** 2 * (
        1 + SEQ_LENGTH / (6 * h) + config.padded_vocab_size / (16 * config.num_layers * h))
    return flops / seconds(run, machine) / run.gpus / 1e12


def gain(run: Run, machine: Machine) -> float:
    """Predict the speed-up of Domino with two slices over blocking communication."""
    return seconds(run, machine, blocks=True) / seconds(run, machine, slices=2)


def wires(run: Run, machine: Machine) -> float:
    """Predict the percentage of a step that communication takes if nothing hides it."""
    free = dataclasses.replace(machine, intra_host_rate=math.inf, inter_host_rate=math.inf, latency=0.0)
    return 100 * (1 - seconds(run, free, blocks=True) / seconds(run, machine, blocks=True))


FIGURES = {"TFLOP/s": teraflops, "s": seconds, "x speed": gain, "% wires": wires}


# ---- the answer

def answer(machine_of):
    """Return (text, record). machine_of: a function (name of a GPU, Gbit/s to other hosts) -> Machine."""
    rows, record = [], []
    for paper, runs in RUNS.items():
        for run in runs:
            config, predicted = run.config, FIGURES[run.figure](run, machine_of(run.gpu, run.network))
            rows.append([f"{paper}: {run.name}", config.tp, config.pp, config.dp, run.gpus, run.recomputed,
                         f"{run.published:g} {run.figure}", f"{predicted:.3g}", f"{predicted / run.published:.2f}"])
            record.append({"paper": paper, **dataclasses.asdict(run), "predicted": predicted,
                           "ratio": predicted / run.published})
    text = table(["", "tp", "pp", "dp", "GPUs", "recomputed", "published", "plan", "ratio"], rows)
    return f"{text}\n\n{__doc__}", {"published": True, "rows": record}
