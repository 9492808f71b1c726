"""Does a rank need the memory that the dry run says? Measured on every rank while it trains.

    parameters, gradients,    bytes of the model, the flat buckets and the optimizer, with padding. They must be equal
    optimizer
    activations               peak bytes between two actions, such as the forward and the backward of a microbatch,
                              besides the state: what the tapes keep. With experts they depend on the tokens: a dry run
                              assumes that all experts are chosen equally often, and a rank with popular experts keeps
                              more
    host                      with --checkpoint-in-cpu on CUDA: peak bytes of pinned memory
    peak                      peak bytes of all tensors, also temporary ones; on CUDA torch's allocator counts them

    python bench.py memory --tp 2 --pp 2 --slices 2
"""

from benchmarks import measured
from benchmarks.measured import processes  # noqa: F401, called by runner.main
from benchmarks.runner import about, add_config_flags, describe, gathered, table
from nanodomino.estimate.rank import RankRun
from nanodomino.settings.config import Config


ROUNDS = False               # no --repeats: this question measures memory and does not time
STATE = ("parameters", "gradients", "optimizer")


def add_flags(parser):
    add_config_flags(parser, num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=250,
                     tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=1,
                     micro_batch_size=4, global_batch_size=16)


def answer(flags, launch):
    config = measured.config_for(flags, launch)
    predicted, training = measured.dry_runs(config, launch), measured.build(config, launch)
    measured.first_update(*training, config)
    found = gathered(memory_of(measured.measure(*training, config)))
    return report(config, [*map(memory_of, predicted)], found) if launch.rank == 0 else ("", {})


def memory_of(run: RankRun) -> dict[str, int]:
    """Return {name: bytes}."""
    return {**run.state, "activations": run.activations, **({"host": run.host} if run.host else {}), "peak": run.peak}


def errors_of(predicted: list[dict], found: list[dict]) -> dict[str, float]:
    """Return {name: the largest relative difference of a rank}."""
    return {name: max(abs(one[name] / dry[name] - 1) for one, dry in zip(found, predicted)) for name in found[0]}


def report(config: Config, predicted: list[dict], found: list[dict]):
    """Return (text, record). predicted, found: the result of memory_of() of each rank. Ranks with the same bytes share
    a line."""
    rows, errors = [], errors_of(predicted, found)
    for ranks in measured.alike(list(zip(found, predicted))):
        both = predicted[ranks[0]], found[ranks[0]]
        rows += [[measured.text_of(ranks), label, *one.values()] for label, one in zip(("dry run", "measured"), both)]
    exact = not any(errors[name] for name in STATE)
    text = "\n".join([
        describe(config), "bytes, by rank:",
        table(["ranks", "", *found[0]], rows),
        f"parameters, gradients and optimizer {'equal' if exact else 'DO NOT equal'} the dry run's; activations "
        f"differ by at most {max(errors['activations'], errors.get('host', 0.0)):.2%}, peaks by {errors['peak']:.2%}"])
    return text, {"exact": exact, "activations_error": errors["activations"],
                  "peak_error": errors["peak"], **about(config), "predicted": predicted, "measured": found}
