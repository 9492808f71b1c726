"""Eager 1F1B hides the time of messages between stages, for more memory."""

from dataclasses import replace

import pytest
from support.harness import check_against_reference, tiny

from nanodomino.schedules.definitions import SCHEDULES, eager_1f1b
from nanodomino.schedules.simulation import peak_microbatches, picture, simulate, step_time, timetable


def eager(look_ahead):
    return replace(SCHEDULES["eager-1f1b"], settings=(("look_ahead", look_ahead),))


@pytest.mark.parametrize("look_ahead, seconds", [(0, 301), (1, 207), (2, 207)])
def test_further_warm_up_forwards_hide_slow_messages(look_ahead, seconds):
    """Without them it is 1F1B, in which every microbatch waits for two messages. More than enough only cost memory."""
    table = timetable(eager(look_ahead), 4, 64)
    assert step_time(simulate(table, message=1)) == seconds
    assert step_time(simulate(table)) == step_time(simulate(timetable("1f1b", 4, 64)))
    assert [peak_microbatches(row) for row in table.rows] == [(1 + look_ahead) * later + 1 for later in (3, 2, 1, 0)]
    assert look_ahead or table.rows == timetable("1f1b", 4, 64).rows


def test_the_picture_in_the_docstring_is_the_printed_one():
    drawn = [line.split("  ")[2:] for line in eager_1f1b.__doc__.splitlines() if "|" in line]
    printed = picture(eager(1), 3, 6).splitlines()[1:]
    assert [" ".join(words).split("p = ")[0].split() for words in drawn] == [line.split() for line in printed]


@pytest.mark.parametrize("look_ahead", [1, 3])
def test_training_equals_one_plain_process(pool, look_ahead):
    check_against_reference(pool, tiny(4, pipeline_model_parallel_size=4, schedule="eager-1f1b", num_layers=5,
                                       look_ahead=look_ahead, slices=2, global_batch_size=24), 2)
