"""Changes a planned configuration and computes the memory that it needs, for plan.py and plan_search.py."""

import dataclasses
import math

from nanodomino.analysis import expected_memory, sizes
from nanodomino.config.config import Config
from nanodomino.config.setting import flag_name
from nanodomino.errors import UserError
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES

# What tapes may keep on the GPU, from most to least.
RECOMPUTATION = [*({"recompute_granularity": name, "checkpoint_in_cpu": False} for name in GRANULARITIES),
                 {"recompute_granularity": "full", "checkpoint_in_cpu": True}]
LONG = 8192      # tokens


def changed(config: Config, changes: dict, gpus=None) -> Config | None:
    """Return the Config after the changes, on `gpus` GPUs (None: as many as now). dp follows from `gpus`.

    Returns None if the changes are impossible.
    """
    slices = min(config.slices, changes.get("micro_batch_size", config.micro_batch_size))
    try:
        other = dataclasses.replace(config, data_parallel_size=None, slices=slices, **changes)
        return other.resolve(gpus or config.world_size).with_vocabulary(config.vocab_size)
    except UserError:
        return None


def most_needed(config: Config, changes: dict, usable=math.inf, gpus=None) -> float:
    """Return the bytes that the fullest GPU needs after the changes.

    The result is infinity if a stage needs more than `usable`, or if changed() finds the changes impossible.
    """
    other = changed(config, changes, gpus)
    return math.inf if other is None else fullest_gpu_bytes(other, usable)


def fullest_gpu_bytes(config: Config, usable=math.inf) -> float:
    """Return the bytes that the fullest GPU needs, or infinity if a stage needs more than `usable`."""
    most = 0
    for stage in range(config.pp):
        most = max(most, sum(memory_terms(config, sizes.mesh_at(config, stage)).values()))
        if most > usable:                                      # the other stages would not change the answer
            return math.inf
    return most


def memory_terms(config: Config, mesh) -> dict[str, int]:
    """Return {name: bytes} of a rank for each of MEMORY_TERMS.

    On GPUs all terms but the communicators add up to expected_memory.peak_bytes.
    """
    return {**expected_memory.state_bytes(config, mesh), "activations": expected_memory.peak_tape_bytes(config, mesh),
            "messages": expected_memory.peak_message_bytes(config, mesh),
            "working": expected_memory.working_bytes(config, mesh),
            "communicators": expected_memory.communicator_bytes(config, mesh)}


def other_schedules(config: Config) -> list[list[dict]]:
    """Return for each schedule the changes that select it, such as {"schedule": "zb-v", "virtual_stages": 2}.

    A schedule has one entry for each number of chunks that divides the layers evenly or, if none does, one with its
    smallest number of chunks. The current setting is left out.
    """
    found = [[{key: value for key, value in change.items() if value != getattr(config, key)}
              for change in with_chunks(name, config)] for name in SCHEDULES]
    return [[change for change in changes if change] for changes in found]


def with_chunks(name: str, config: Config) -> list[dict]:
    """Return the settings that select this schedule, for each number of chunks that other_schedules() describes."""
    counts = [count for count in SCHEDULES[name].chunks if config.pp * count <= config.num_layers]
    even = [count for count in counts if config.num_layers % (config.pp * count) == 0]
    return [{"schedule": name, "virtual_stages": count} for count in even or counts[:1]]


def more_recomputation(config: Config) -> list[dict]:
    """Return the recomputation settings that shrink the tapes on the GPU, the smallest saving first."""
    now = {name: getattr(config, name) for name in RECOMPUTATION[0]}
    return [{name: value for name, value in option.items() if value != now[name]}
            for option in RECOMPUTATION[RECOMPUTATION.index(now) + 1:]]


def context_sizes(tokens: int, gpus: int) -> list[int]:
    """Return the context parallel sizes to try for samples of this many tokens, in rising order.

    Each rank keeps at least LONG tokens of a sample. Shorter samples fit without context parallelism, which would only
    add communication.
    """
    return [1, *(size for size in range(2, gpus + 1) if gpus % size == 0 and tokens // size >= LONG)]


def flags_text(changes: dict) -> str:
    return " ".join(flag_name(name) + ("" if value is True else f" {value}") for name, value in changes.items())
