"""Does a real step launch the collectives of the dry run? Counted on every rank, compared exactly.

Runs one optimizer step of train.py on real processes with random tokens, and runs the same step dry. The table shows
for each process group and kind, such as all_reduce:

    calls     the number of collectives or messages
    bytes     the size of the whole tensor: what is all-reduced, a reduce-scatter's input, an all-gather's output
    sent      the bytes that this rank sends in a ring of the group's n ranks: 2 (n-1)/n of an all-reduced tensor,
              (n-1)/n of a tensor that is reduce-scattered or all-gathered, the whole tensor of a message. Of an
              all-to-all the same share as of an all-gather, if the experts are chosen equally often

More slices and columns make more calls but not more bytes. How many rows a rank receives depends on the tokens. So for
all-to-alls the calls are compared rank by rank, but the bytes in total over all ranks.

    python bench.py collectives --tp 2 --pp 2 --dp 2 --slices 2 --columns 2
"""

from collections import Counter

from benchmarks import measured
from benchmarks.runner import about, add_config_flags, bytes_text, describe, gathered, table
from benchmarks.measured import alike, processes, text_of  # noqa: F401, runner.main calls processes
from nanodomino.estimate.formulas import bytes_sent
from nanodomino.settings.config import Config

ROUNDS = False               # no --repeats: this question counts and does not time


def add_flags(parser):
    add_config_flags(parser, num_layers=4, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=250,
                     tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2,
                     micro_batch_size=2, global_batch_size=16)


def answer(flags, launch):
    config = measured.config_for(flags, launch)
    predicted, training = measured.dry_runs(config, launch), measured.build(config, launch)
    measured.first_update(*training, config)
    counted = gathered(measured.measure(*training, config).traffic)
    return report(config, predicted, counted) if launch.rank == 0 else ("", {})


def report(config: Config, predicted: list, counted: list[dict]):
    """Return (text, record). predicted: each rank's RankRun; counted: each rank's real traffic. Ranks with the same
    counts share the lines of the table."""
    expected = [run.traffic for run in predicted]
    fair_counted, fair_expected = comparable(counted), comparable(expected)
    rows, records = [], []
    for ranks in alike([[sorted(counts.items()) for counts in pair] for pair in zip(counted, expected)]):
        count, dry = counted[ranks[0]], expected[ranks[0]]
        for key in sorted(count.keys() | dry.keys()):
            (calls, size), (dry_calls, dry_size) = (counts.get(key, (0, 0)) for counts in (count, dry))
            members = len(predicted[ranks[0]].ranks_of[key[0]])
            sent, dry_sent = (bytes_sent(key[1], payload, members) for payload in (size, dry_size))
            equal = fair_counted[ranks[0]].get(key) == fair_expected[ranks[0]].get(key)
            rows.append([text_of(ranks), *key, members, calls, dry_calls, size, dry_size, bytes_text(sent),
                         "NO" if not equal else "yes" if size == dry_size else "in total"])
            records.append({"ranks": ranks, "group": key[0], "kind": key[1], "calls": calls, "bytes": size,
                            "wire_bytes": sent, "dry_calls": dry_calls, "dry_bytes": dry_size,
                            "dry_wire_bytes": dry_sent})
    exact = fair_counted == fair_expected
    text = "\n".join([
        describe(config), "one step, by rank:",
        table(["ranks", "group", "collective", "members", "calls", "dry run", "bytes", "dry run", "sent", "equal"],
              rows),
        "every count equals the dry run's" + ", if the bytes of all-to-alls are added up over all ranks" * any(
            row[-1] == "in total" for row in rows) if exact else "some counts do not equal the dry run's"])
    return text, {"exact": exact, **about(config), "rows": records}


def comparable(found: list[dict]) -> list[dict]:
    """Return each rank's {(group, kind): (calls, bytes)} with the bytes of all-to-alls in total over all ranks."""
    totals = Counter()
    for counts in found:
        totals.update({key: size for key, (_, size) in counts.items()})
    return [{key: (calls, totals[key] if key[1] == "all_to_all" else size) for key, (calls, size) in counts.items()}
            for counts in found]
