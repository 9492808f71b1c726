"""train.py --verbose: each message and collective of a step is a line."""

import contextlib
import io
import re

from support.runs import TINY, main_on_rank, make_corpus

LINE = re.compile(
    r" *\d+\.\d ms +(\d) ((?:[FBIW]\d+'* )?)(-->|<->) ([\w-]+ \w+)(, [\w.]+ [ab])?, \d+\.\d [kM]B")


def stderr_of_rank(flags):
    with contextlib.redirect_stderr(screen := io.StringIO()):
        assert main_on_rank(flags, ()).code == 0
    return screen.getvalue()


def test_each_message_and_collective_is_a_line(pool, tmp_path):
    """Two microbatches over two stages of one layer with two slices, tp 2."""
    flags = [*TINY, *("--tp 2 --pp 2 --global-batch-size 4 --micro-batch-size 2 --slices 2 --train-iters 1 "
                      "--eval-iters 0 --verbose").split(),
             "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run")]
    for rank, text in enumerate(pool.run(stderr_of_rank, flags, world_size=4)):
        lines = [LINE.fullmatch(line) for line in text.splitlines() if " ms " in line]
        assert all(lines) and {line[1] for line in lines} == {str(rank)}
        sent = [(line[2].strip(), line[4]) for line in lines if line[3] == "-->"]
        assert sent == ([("F0", "rank " + str(rank + 2)), ("F1", f"rank {rank + 2}")] if rank < 2 else
                        [("B0", f"rank {rank - 2}"), ("B1", f"rank {rank - 2}")])
        for action in ("F0", "B1"):
            summed = [line[5] for line in lines if line[2].strip() == action and line[4] == "all-reduce tp"]
            layer = f"layers.{rank // 2}"
            expected = [f", {layer}.{part} {slice}" for part in ("attention", "mlp") for slice in "ab"]
            assert set(expected) <= set(summed), (action, summed)
        # the optimizer's collectives come after the last backward and belong to no microbatch
        assert [(line[2], line[4]) for line in lines][-1] == ("", "all-reduce world")
