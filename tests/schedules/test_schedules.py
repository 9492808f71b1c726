"""Schedules keep their promises, which can be read off their actions."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from support import ROOT
from support.harness import tiny

from nanodomino.model import meta_stage
from nanodomino.schedules import definitions
from nanodomino.schedules.definitions import SCHEDULES, Backward, Forward, InputBackward, Pair, WeightBackward
from nanodomino.schedules.simulation import (Placement, Timetable, bubble, busy_time, message_received, message_sent,
                                             peak_microbatches, picture, receives_to_post, simulate, stage_layers,
                                             step_time, timetable)

STAGES, MICROBATCHES = range(1, 9), range(1, 18)
EACH = pytest.mark.parametrize("name, chunks", [(name, chunks) for name, schedule in SCHEDULES.items() for chunks in (
    schedule.chunks if len(schedule.chunks) == 1 else (2, 3))], ids=str)


def tables(name, chunks):
    """Yield (stages, microbatches, Timetable), with m smaller than p and m not divisible by p among them."""
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            yield stages, microbatches, timetable(name, stages, microbatches, chunks)


def halves_of(row):
    return [half for action in row for half in action.halves]


# ---- their actions and messages

@EACH
def test_every_microbatch_runs_forward_once_and_then_backward_once_in_each_chunk(name, chunks):
    """F and then B, or F, I and then W. Evaluation runs the forwards in order."""
    for _, microbatches, table in tables(name, chunks):
        for row, forwards in zip(table.rows, table.forwards.rows):
            done = {}
            for half in halves_of(row):
                done.setdefault((half.microbatch, half.chunk), []).append(half.letter)
            assert done.keys() == {(i, chunk) for i in range(microbatches) for chunk in range(chunks)}
            assert all(letters in (["F", "B"], ["F", "I", "W"]) for letters in done.values())
            pairs = [action for action in row if isinstance(action, Pair)]
            assert all(pair.forward.microbatch > pair.backward.microbatch for pair in pairs)
            assert [*forwards] == [half for half in halves_of(row) if isinstance(half, Forward)]


@EACH
def test_each_virtual_stage_has_one_location_and_messages_follow_the_model(name, chunks):
    for stages in STAGES:
        placement = timetable(name, stages, 1, chunks).placement
        locations = [placement.location(virtual_stage) for virtual_stage in range(placement.last + 1)]
        assert sorted(locations) == [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
        assert [placement.virtual_stage(*location) for location in locations] == list(range(stages * chunks))
        for location, following in zip([None, *locations], [*locations, None]):
            if location:
                assert placement.target(location[0], Forward(0, location[1])) == following
            if following:
                assert placement.target(following[0], Backward(0, following[1])) == location


@EACH
def test_each_stage_posts_its_receives_in_the_order_of_the_sends(name, chunks):
    """NCCL matches the messages of two ranks by their order, and by nothing else."""
    for stages, microbatches in [(1, 3), (2, 1), (2, 5), (3, 4), (4, 3), (4, 9), (8, 5), (8, 17)]:
        table, sent, received = timetable(name, stages, microbatches, chunks), {}, {}
        for stage, row in enumerate(table.rows):
            receives = receives_to_post(table)[stage]
            for action, messages in zip(row, receives, strict=True):
                for message in messages:
                    received.setdefault((table.placement.source(stage, message)[0], stage), []).append(message)
                for half in action.halves:
                    target = message_sent(table.placement, stage, half)
                    if target and target[0] != stage:
                        sent.setdefault((stage, target[0]), []).append(target[1])
            needed = [message_received(half) for half in halves_of(row) if table.placement.source(stage, half)]
            from_others = [message for message in needed if table.placement.source(stage, message)[0] != stage]
            assert Counter(sum(receives, [])) == Counter(from_others)
        assert sent == received


@EACH
def test_no_schedule_splits_the_backward_of_the_models_first_chunk(name, chunks):
    """No stage waits for its input gradient, so a whole backward hides its all-reduces behind its weight gradients."""
    for stages, _, table in tables(name, chunks):
        if stages > 1:
            stage, chunk = table.placement.location(0)
            backwards = {half.kind for half in halves_of(table.rows[stage]) if half.chunk == chunk} - {"forward"}
            assert backwards == {"backward"}


@EACH
def test_on_a_stage_with_both_ends_the_heads_last_gradient_comes_before_the_embeddings(name, chunks):
    """The embedding reports the tied matrix as complete, so the head must not add to it any more."""
    for _, _, table in tables(name, chunks):
        first, last = table.placement.location(0), table.placement.location(table.placement.last)
        if first[0] == last[0]:
            chunks_in_order = [half.chunk for half in halves_of(table.rows[first[0]]) if half.letter in "BW"]
            ends = {chunk: index for index, chunk in enumerate(chunks_in_order)}
            assert ends[last[1]] <= ends[first[1]]


# ---- what they cost

HELD = {                                    # how many microbatches stage r holds at once, counted in each chunk
    "gpipe": lambda p, r, m, v: m, "1f1b": lambda p, r, m, v: min(m, p - r),
    "eager-1f1b": lambda p, r, m, v: min(m, 2 * (p - r) - 1),
    "paired": lambda p, r, m, v: min(m, 2 * (p - r)),
    "interleaved": lambda p, r, m, v: min(m * v, v * p + p - 2 * r - 1),
    "zb-h1": lambda p, r, m, v: min(m, p), "zb-v": lambda p, r, m, v: min(2 * m, m + r + 1, 2 * p)}


@EACH
def test_a_stage_holds_as_many_microbatches_as_the_formula_says(name, chunks):
    for stages, microbatches, table in tables(name, chunks):
        for stage, row in enumerate(table.rows):
            held, formula = peak_microbatches(row), HELD[name](stages, stage, microbatches, chunks)
            if name == "interleaved" and microbatches % stages:              # in a last round that is not full
                assert formula - stages < held <= formula
            else:
                assert held == formula


def idle(table, F, B, W):
    """Return the idle time of a step on equal stages."""
    by_kind = dict(forward=F, backward=B + W, input_backward=B, weight_backward=W, pair=F + B + W)
    rows = simulate(table, lambda stage, action: by_kind[action.kind])
    return step_time(rows) - busy_time(rows)


IDLE = {                                    # idle time of a step, if a chunk's passes take F, B and W
    **dict.fromkeys(("gpipe", "1f1b", "eager-1f1b", "paired"), lambda p, m, v, F, B, W: (p - 1) * (F + B + W)),
    "interleaved": lambda p, m, v, F, B, W: (p - 1) * (F + B + W) if m % p == 0 else None,
    "zb-h1": lambda p, m, v, F, B, W: (p - 1) * (F + max(B - W, 0)) + max(p - m, 0) * min(B, W),
    "zb-v": lambda p, m, v, F, B, W: max(p - 1, 2 * (2 * p - 1 - m)) * F if F == B == W else None}


@pytest.mark.parametrize("work", [(1, 1, 1), (2, 3, 2), (4, 3, 3), (2, 1, 2)],
                         ids=lambda work: "F{}-B{}-W{}".format(*work))
@EACH
def test_the_simulated_idle_time_follows_the_formula(name, chunks, work):
    """For F = B = W and for unequal passes. An interleaved chunk is 1/v of a stage, and its idle time likewise."""
    for stages in (1, 2, 4, 7):
        for microbatches in (1, 2, 3, 6, 8, 13, 17):
            found = idle(timetable(name, stages, microbatches, chunks), *work)
            formula = IDLE[name](stages, microbatches, chunks, *work)
            assert found == formula or formula is None
            assert found <= chunks * IDLE["1f1b"](stages, microbatches, 1, *work), "1F1B on these stages idles less"


@pytest.mark.parametrize("rows", [
    [[Backward(0), Forward(0)]] * 2,                       # a backward before its forward
    [[Forward(0), Backward(0)], [Backward(0), Forward(0)]],
    # stage 0 pairs the backward that needs stage 1 with the forward that stage 1 needs first
    [[Forward(0), Pair(Backward(0), Forward(1))], [Forward(0), Forward(1), Backward(0)]],
    [[Forward(0), Pair(Backward(0), Forward(1)), Backward(1)],          # pairs after the warm-up of 1F1B
     [Pair(Backward(0), Forward(0)), Pair(Backward(1), Forward(1))]],
    [[Forward(0), WeightBackward(0), InputBackward(0)]]], ids=range(5))
def test_a_schedule_that_cannot_be_executed_is_refused(rows):
    with pytest.raises(ValueError, match="waiting for each other"):
        simulate(Timetable(Placement(len(rows)), tuple(map(tuple, rows))))


@pytest.mark.parametrize("schedule, drawn", [
    (definitions.one_f_one_b, [("1f1b", 4, 6), ("eager-1f1b", 3, 6)]), (definitions.paired, [("paired", 3, 6)]),
    (definitions.zb_v, [("zb-v", 2, 4, 2)])])
def test_the_pictures_in_docstrings_are_the_printed_ones(schedule, drawn):
    lines = [line.strip() for line in schedule.__doc__.splitlines() if "|" in line]
    assert lines == [line.strip() for arguments in drawn for line in picture(*arguments).splitlines()[1:]]


def test_the_bubble_is_printed_relative_to_the_ideal_time_and_to_the_step():
    """Of all microbatches, although only eight are drawn."""
    for stages, microbatches, said in (
            (4, 4, "bubble 75% of the ideal time = 43% of the step; more microbatches shrink it"),
            (4, 16, "bubble 19% of the ideal time = 16% of the step; more microbatches shrink it"),
            (1, 4, "bubble 0% of the ideal time = 0% of the step")):
        headline = picture("1f1b", stages, microbatches).splitlines()[0]
        assert headline.partition(", ")[2] == said


@pytest.mark.parametrize("layers, stages, depths, expected", [
    (8, 2, 0, [4, 4]), (9, 4, 0, [3, 2, 2, 2]), (5, 3, 0, [2, 2, 1]), (8, 1, 1, [8]), (7, 2, 1, [4, 3]),
    (8, 4, 1, [3, 2, 2, 1]), (9, 3, 2, [4, 4, 1]), (4, 4, 3, [1, 1, 1, 1]), (5, 2, 4, [4, 1])])
def test_layers_are_spread_evenly_over_stages_and_none_is_lost(layers, stages, depths, expected):
    """The first stages hold one more, because the last stage also has the head. A depth of multi-token prediction
    counts as a layer of the last stage, but each stage keeps a layer of its own."""
    held = [stage_layers(layers, stage, stages, depths) for stage in range(stages)]
    assert list(map(len, held)) == expected
    assert [layer for of_stage in held for layer in of_stage] == list(range(layers))
    config = tiny(stages, num_layers=layers, pipeline_model_parallel_size=stages, mtp_num_layers=depths)
    assert [len(meta_stage(config, stage).layers) for stage in range(stages)] == expected


@pytest.mark.table
def test_the_table_of_schedules_in_the_docs_is_what_is_simulated():
    """Bubbles and microbatches held, for every schedule."""
    table = re.findall(r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|",
                       (ROOT / "docs/schedules.md").read_text(), re.MULTILINE)
    rows = [(re.findall("`([^`]+)`", names), rest) for names, *rest in table if re.match("`[a-z0-9]", names)]
    assert sorted(name for names, _ in rows for name in names) == sorted(SCHEDULES)
    for names, (bubbles_of_4, held_by_4, bubbles_of_8, held_by_8) in rows:
        for stages, bubbles, held in ((4, bubbles_of_4, held_by_4), (8, bubbles_of_8, held_by_8)):
            for name, stated in zip(names, held.split("; "), strict=True):
                schedule = SCHEDULES[name]
                tables = [timetable(schedule, stages, m, schedule.chunks[0]) for m in (8, 16, 64)]
                found = [100 * bubble(simulate(each)) for each in tables]
                assert [float(number) for number in bubbles.split(", ")] == pytest.approx(found, rel=0.05), name
                peak = max(peak_microbatches(row) for row in tables[-1].rows)
                assert float(stated) == peak / schedule.chunks[0], name


# ---- eager 1F1B

@pytest.mark.parametrize("look_ahead, seconds", [(0, 301), (1, 207), (2, 207)])
def test_further_warm_up_forwards_hide_slow_messages(look_ahead, seconds):
    """Without them it is 1F1B, in which every microbatch waits for two messages. More than enough only cost memory. A
    message from chunk to chunk of a stage takes no time."""
    table = timetable(replace(SCHEDULES["eager-1f1b"], settings=(("look_ahead", look_ahead),)), 4, 64)
    assert step_time(simulate(table, message=1)) == seconds
    assert step_time(simulate(table)) == step_time(simulate(timetable("1f1b", 4, 64)))
    assert step_time(simulate(timetable("zb-v", 1, 4, 2), message=1)) == step_time(simulate(timetable("zb-v", 1, 4, 2)))
    assert [peak_microbatches(row) for row in table.rows] == [(1 + look_ahead) * later + 1 for later in (3, 2, 1, 0)]
