"""How much of tensor parallelism's communication does Domino hide?

A step is forward and backward of --microbatches on --tp ranks, without the optimizer. These alternatives run in turn,
with the same weights and tokens:

    blocking    the GPT of model.py, with autograd: waits for each collective right after launching it
    megatron    domino.py with one slice: forward waits for each all-reduce; in backward, weight gradients hide it
    domino      domino.py with --slices and --columns
    whole       domino without sequence parallelism; only if --sequence-parallel is given
    paired      domino with the schedule `paired`: one microbatch's backward and the next one's forward take turns;
                needs at least two microbatches
    compute     domino without its collectives; its results are wrong, but it computes as much
    wires       domino's collectives without the computation

On CUDA all alternatives but blocking are compiled, so compare domino with megatron there. On CPUs each rank has one
core, which also handles the rank's network traffic.

Three figures are printed for domino and for paired. A name stands for the seconds of that alternative, d for those of
domino or paired:

    hidden      1 - (d - compute) / wires: the share of the communication time that computation hides. If communication
                takes longer than computation, only compute / wires of it can be hidden
    bound       d / max(compute, wires), where 1 is perfect: the shorter of the two is hidden entirely
    speed-up    blocking / d and megatron / d

    python bench.py overlap                         over the loopback, or between GPUs
    sudo python bench.py overlap --wire 700mbit --microbatches 8          over a slow network (slow_network.py)
    python bench.py overlap --ideal-wire            one rank on a wire that costs no processor time (ideal_wire.py)
    python bench.py overlap --ideal-wire --ep 2 --num-experts 8           the all-to-alls of experts

On the ideal wire, one process plays one rank. For several bandwidths it prints step / max(work, wires). `work` is all
that the processor does, and `wires` is bytes sent / bandwidth. The alternatives are domino, paired and

    one slice            Megatron's tensor parallelism: forward waits for each collective
    columns              one slice, in which each matmul is cut into two columns
    interleaved, zb-v    domino with two chunks, as in these schedules; zb-v also splits backward in two
    floor                the smallest bound without pairs. The collectives of a forward can be hidden only by forwards,
                         and forward has half of the bytes (with sequence parallelism two fifths), but a third of the
                         work
"""

from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.ideal_wire import IdealStage, log_of, pipeline_step
from benchmarks.runner import (Figure, RandomTokens, Times, about, add_config_flags, bind_to, bytes_text, compare,
                               config_here, cores_of, describe, in_turn, join, ratios, require_same_work, table)
from nanodomino.comm.collectives import all_gather, reduce_scatter
from nanodomino.comm.trace import Trace
from nanodomino.comm.world import tune_host
from nanodomino.domino import Domino
from nanodomino.errors import require
from nanodomino.model import GPT
from nanodomino.overlap.slices import ReplicatedResidual, result_of
from nanodomino.zero import ZeroOptimizer

FLAGS = ("tensor_model_parallel_size", "slices", "columns", "sequence_parallel", "num_layers", "hidden_size",
         "ffn_hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "vocab_size", "dtype", "device",
         "num_experts", "expert_model_parallel_size", "moe_router_topk", "moe_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "context_parallel_size", "cp_comm_type", "tp_max_ctas")
RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0)             # wires / work


def add_flags(parser):
    add_config_flags(parser, FLAGS, tensor_model_parallel_size=None, slices=2, columns=1, num_layers=4, hidden_size=512,
                     num_attention_heads=8, seq_length=None, micro_batch_size=8, vocab_size=257)
    parser.add_argument("--wire", metavar="RATE", help="rate of a slow link between the ranks, such as 500mbit; "
                                                       "needs root and iproute2 (default: the loopback)")
    parser.add_argument("--ideal-wire", action="store_true",
                        help="run one rank on an ideal wire, whose collectives cost no processor time "
                             "(ideal_wire.py); needs no root and no second core")
    parser.add_argument("--microbatches", type=int, metavar="M",
                        help="microbatches per step (default 1; on the ideal wire 8)")


def processes(flags) -> int:
    ep, cp = flags.expert_model_parallel_size, flags.context_parallel_size
    tp = flags.tensor_model_parallel_size = flags.tensor_model_parallel_size or (1 if ep > 1 or cp > 1 else 2)
    require(max(tp, ep, cp) >= 2, f"--tp must be at least 2, but is {tp} (a single rank does not communicate); try 2")
    require(flags.ideal_wire or not flags.num_experts and cp == 1, "--num-experts and --cp need --ideal-wire; add it")
    require(not flags.ideal_wire or flags.wire is None, "--ideal-wire and --wire exclude each other; leave one out")
    if flags.ideal_wire or flags.wire:                         # one counts processor time; NCCL bypasses the other
        flags.device = "cpu"
    flags.microbatches = flags.microbatches if flags.microbatches is not None else 8 if flags.ideal_wire else 1
    flags.seq_length = flags.seq_length or (64 if flags.ideal_wire else 256)      # there one process runs everything
    flags.config = config_here(flags, tp * ep * cp, pipeline_model_parallel_size=1, data_parallel_size=ep,
                               global_batch_size=flags.micro_batch_size * flags.microbatches * ep,
                               tp_max_ctas=flags.tp_max_ctas,
                               disable_bias_linear=True if flags.num_experts else None)
    return 1 if flags.ideal_wire else tp


def answer(flags, launch):
    if flags.ideal_wire:
        return ideal_answer(flags, flags.config.with_device(torch.device("cpu")))
    config, mesh = join(flags.config, launch, one_core=True)
    batches = RandomTokens(config, mesh.device).batches(config)
    alternatives, collectives = prepare(config, mesh, batches)
    return report(flags, config, compare(alternatives, flags.repeats, mesh.device), collectives)


# ---- the alternatives

def prepare(config, mesh, batches):
    """Return the alternatives as {name: function that runs a step}, and domino's collectives, in launch order, such as
    ("all_reduce", 4096 bytes). Runs a step of each alternative. Raises UserError if their losses differ."""
    model = GPT(config, mesh)
    ZeroOptimizer(model, config, mesh)                         # gives each parameter its main_grad
    domino, whole, compute = (Domino(model, config.slices, config.columns, config.compiler) for _ in range(3))
    whole.ops.stream = ReplicatedResidual(mesh.tp_group)
    compute.ops.launch = lambda slice, site, flight: flight
    compute.ops.wait = lambda slice, site, flights: result_of(flights)
    steps = {"blocking": partial(autograd_step, model, batches),
             "megatron": partial(pipeline_step, Domino(model, 1, 1, config.compiler), batches),
             "domino": partial(pipeline_step, domino, batches),
             "whole": config.sequence_parallel and partial(pipeline_step, whole, batches),
             "paired": len(batches) > 1 and partial(pipeline_step, domino, batches, "paired")}
    steps = {name: step for name, step in steps.items() if step}
    require_same_work(config, "loss", {name: [step()] for name, step in steps.items()})

    trace = Trace(mesh.device)
    pipeline_step(Domino(model, config.slices, config.columns, trace=trace), batches)
    collectives = [(event.kind, event.args["bytes"]) for event in trace.take() if "bytes" in event.args]
    steps["compute"] = partial(pipeline_step, compute, batches)
    steps["wires"] = only_collectives(collectives, config, mesh)
    return steps, collectives


def autograd_step(model, batches) -> float:
    """Run a step with autograd, and return the mean loss."""
    means = []
    for batch in batches:
        means.append(model(batch.tokens, batch.positions, batch.labels).mean())
        means[-1].backward()
    return torch.stack(means).mean().item()


def only_collectives(collectives, config, mesh):
    """Return a function that runs the collectives of a step, on tensors of zeros and without computation. As many are
    in flight as there are slices and columns, but at least two."""
    group, largest, depth = mesh.tp_group, max(size for _, size in collectives), max(2, config.slices * config.columns)
    buffers = [torch.zeros(largest, dtype=torch.uint8, device=mesh.device) for _ in range(depth)]
    launch = {"all_reduce": lambda tensor: dist.all_reduce(tensor, group=group, async_op=True),
              "reduce_scatter": lambda tensor: reduce_scatter(tensor, group)[0],
              "all_gather": lambda tensor: all_gather(tensor, tensor.chunk(group.size())[group.rank()], group)}

    def run():
        works = []
        for i, (kind, size) in enumerate(collectives):
            if i >= depth:
                works[i - depth].wait()
            works.append(launch[kind](buffers[i % depth][:size].view(config.params_dtype)))
        for work in works[-depth:]:
            work.wait()
    return run


# ---- the report

def figures_of(times: dict[str, Times]) -> tuple[float, dict[str, Figure]]:
    """Return the share of the communication that computation could hide, and {name: Figure} for domino and paired."""
    compute, wires = times["compute"], times["wires"]
    hideable, figures = min(1.0, ratios(compute, wires).median), {}
    ideal = Times(tuple(map(max, compute.rounds, wires.rounds)))
    for name, prefix in (("domino", ""), ("paired", "paired_")):
        if name in times:
            hidden = tuple(1 - (step - computing) / sending for step, computing, sending
                           in zip(times[name].rounds, compute.rounds, wires.rounds))
            figures |= {f"{prefix}hidden": Figure(hidden, most=hideable, size=1.0),
                        f"{prefix}bound_ratio": ratios(times[name], ideal, least=1.0),
                        f"{prefix}speedup": ratios(times["blocking"], times[name]),
                        f"{prefix}megatron_ratio": ratios(times["megatron"], times[name])}
    return hideable, figures


def report(flags, config, times, collectives):
    """Return (text, record)."""
    hideable, figures = figures_of(times)
    sent = sum(size for _, size in collectives)
    wire = f"a link of {flags.wire}" if flags.wire else "the loopback" if config.device == "cpu" else "the GPUs' links"
    lines = [describe(config),
             f"forward and backward, {len(collectives)} collectives of {bytes_text(sent)} in total over {wire}",
             table(["", "median [min .. max]", "speed-up over blocking"],
                   [[name, time, ratios(times["blocking"], time)] for name, time in times.items()])]
    lines += [f"{name} hides {figures[prefix + 'hidden']:.0%} of the communication (1 - ({name} - compute) / wires); "
              f"at most {hideable:.0%} could be hidden; bound {figures[prefix + 'bound_ratio']} x max(compute, wires); "
              f"speed-up {figures[prefix + 'speedup']} over blocking, {figures[prefix + 'megatron_ratio']} over "
              "megatron" for name, prefix in (("domino", ""), ("paired", "paired_")) if name in times]
    if "whole" in times:
        figures["whole_ratio"] = ratios(times["domino"], times["whole"])
        lines.append(f"sequence parallelism: domino's time / whole's: {figures['whole_ratio']}")
    return "\n".join(lines), {**times, **figures, "hideable": hideable, "wire": flags.wire,
                              "collectives": len(collectives), "bytes": sent, **about(config)}


# ---- on the ideal wire

def floor(ratio: float, forward_work: float, forward_bytes: float) -> float:
    """Return the smallest bound of a step without pairs: (max(F's work, F's wires) + max(B's work, B's wires)) /
    max(work, wires). forward_work, forward_bytes: forward's shares of the step."""
    forward = max(forward_work, ratio * forward_bytes)
    return (forward + max(1 - forward_work, ratio * (1 - forward_bytes))) / max(1, ratio)


def ideal_answer(flags, config):
    """Measure one rank on the ideal wire, and return (text, record)."""
    bind_to(cores_of(0, 1)[:1])
    tune_host()
    stage = IdealStage(config)
    logs = in_turn(stage.alternatives(), flags.repeats, partial(log_of, stage.wire))
    forward, domino, one_slice = logs.pop("forward"), logs["domino"], logs["one slice"]
    bounds = {name: {ratio: Figure(tuple(log.bound(ratio) for log in rounds), least=1.0) for ratio in RATIOS}
              for name, rounds in logs.items()}
    shares = median(a.work / b.work for a, b in zip(forward, domino)), forward[0].sent / domino[0].sent
    split = Figure(tuple(a.work / b.work for a, b in zip(domino, one_slice)))
    floors = {ratio: floor(ratio, *shares) for ratio in RATIOS}
    text = "\n".join([
        f"one rank on an ideal wire: {describe(config)}; it sends {bytes_text(domino[0].sent)} per step",
        "step / max(work, wires): median of the rounds [min .. max]; 1 is perfect",
        table(["wires / work", *logs, "floor"],
              [[f"{ratio:g}", *(bounds[name][ratio] for name in logs), f"{floors[ratio]:.2f}"] for ratio in RATIOS]),
        f"domino works {split} x as long as one slice; forward is {shares[0]:.0%} of domino's work and sends "
        f"{shares[1]:.0%} of its bytes"])
    return text, {"wire": "ideal", "bytes": domino[0].sent, "forward_work": shares[0], "forward_bytes": shares[1],
                  "work_ratio": split.value, "floor": floors, **about(config), "bound_ratio": {
                      name: {ratio: figure.value for ratio, figure in of_name.items()}
                      for name, of_name in bounds.items()}}
