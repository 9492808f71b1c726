"""What does every rank do during a step? Draws the pictures in docs/, each from steps that it records.

    sudo python bench.py timeline --picture domino --wire 700mbit
    python bench.py timeline --picture schedules
    python bench.py timeline --picture zero

Each line of a table in PICTURES becomes a recording, all on one scale. After a step that warms up, --repeats steps are
recorded, and the quickest is drawn. Each rank has one core.
"""

from dataclasses import replace
from pathlib import Path

from benchmarks.runner import BENCH, Training, about, config_of, describe, join
from nanodomino.comm.trace import Trace
from nanodomino.files import write_file
from nanodomino.pictures.drawing import svg, timeline
from nanodomino.pictures.merged_trace import Recording, gather, table

SLOW = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, num_layers=2, hidden_size=512,
            seq_length=256, micro_batch_size=8, global_batch_size=8)
STAGES = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=2, num_layers=8, hidden_size=256,
              seq_length=128, micro_batch_size=4, global_batch_size=32)
REPLICAS = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, data_parallel_size=2, num_layers=4,
                hidden_size=256, seq_length=128, micro_batch_size=4, global_batch_size=16, bucket_size=400_000)

# {picture: {caption: settings}}, all on two ranks
PICTURES = {
    "domino": {f"{words} per microbatch": dict(SLOW, slices=count)
               for words, count in (("one slice", 1), ("two slices, a and b,", 2))},
    "schedules": {name: dict(STAGES, schedule=name)
                  for name in ("gpipe", "1f1b", "paired", "interleaved", "zb-h1", "zb-v")},
    "zero": {"ZeRO-1: gradients are reduced while the last backward still runs": dict(REPLICAS, zero_stage=1)}}


def add_flags(parser):
    parser.add_argument("--picture", choices=PICTURES, required=True, help="which steps to record")
    parser.add_argument("--output", type=Path, metavar="PICTURE.svg", help="the file (default: the picture in docs/)")
    parser.add_argument("--wire", metavar="RATE", help="rate of a slow link between the ranks, such as 700mbit; "
                                                       "needs root and iproute2 (default: the loopback)")


def processes(flags) -> int:
    flags.output = flags.output or BENCH.parent / "docs" / f"timeline-{flags.picture}.svg"
    return 2


def answer(flags, launch):
    configs = {caption: config_of(flags, 2, num_attention_heads=8, vocab_size=257, device="cpu", **settings)
               for caption, settings in PICTURES[flags.picture].items()}
    config, mesh = join(next(iter(configs.values())), launch, one_core=True)      # one layout for all of a picture
    recordings = [record(config.with_device(mesh.device), mesh, caption, flags.repeats)
                  for caption, config in configs.items()]
    if launch.rank > 0:
        return "", {}
    write_file(flags.output, svg(timeline, recordings).encode())
    return "\n".join([f"drawn in {flags.output}", describe(config), *(row for recording in recordings
                                          for row in (recording.caption, *table(recording)))]), about(config)


def record(config, mesh, caption: str, repeats: int) -> Recording | None:
    """Return the recording of the quickest step after the first. Returns None on other ranks than rank 0."""
    trace, recordings = Trace(mesh.device), []
    training = Training(config, mesh, trace=trace)
    for _ in range(repeats + 1):
        training.step()
        recordings.append(gather(trace, mesh))
    if recordings[0] is None:
        return None
    quickest = min(recordings[1:], key=lambda each: max(event.end for event in sum(each.ranks, [])))
    return replace(quickest, caption=caption)
