"""Schedules are data: what they promise can be read off the lists. And the runner keeps no activation longer than they
say."""

import gc
import re
import weakref
from collections import Counter

import pytest
from support import ROOT
from support.harness import build, random_data, tiny

import train
from nanodomino.model import stage_layers
from nanodomino.schedules import actions, definitions, simulation
from nanodomino.schedules.actions import Backward, Forward, Pair
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement import Placement, Timetable, message_received, message_sent, timetable
from nanodomino.schedules.simulation import bubble, busy_time, peak_microbatches, receives_to_post, simulate, step_time

STAGES, MICROBATCHES = range(1, 9), range(1, 18)
ALL = [(name, chunks) for name in SCHEDULES for chunks in (SCHEDULES[name].chunks if len(SCHEDULES[name].chunks) == 1
                                                           else (2, 3))]
EACH = pytest.mark.parametrize("name, chunks", ALL, ids=str)


def each_of(formulas):
    """Those that have one."""
    return pytest.mark.parametrize("name, chunks", [one for one in ALL if one[0] in formulas], ids=str)


def tables(name, chunks):
    """(stages, microbatches, Timetable), also with fewer microbatches than stages and with numbers that don't
    divide."""
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            yield stages, microbatches, timetable(name, stages, microbatches, chunks)


def halves_of(row):
    return [half for action in row for half in action.halves]


# ---- what is in them

@EACH
def test_every_microbatch_goes_through_each_chunk_forward_once_then_backward_once(name, chunks):
    """F, then B; or F, then I, then W."""
    for _, microbatches, table in tables(name, chunks):
        for row in table.rows:
            done = {}
            for half in halves_of(row):
                done.setdefault((half.microbatch, half.chunk), []).append(half.letter)
            assert done.keys() == {(i, chunk) for i in range(microbatches) for chunk in range(chunks)}
            assert all(letters in (["F", "B"], ["F", "I", "W"]) for letters in done.values())


@EACH
def test_a_pair_holds_two_microbatches_and_evaluation_the_forwards_in_their_order(name, chunks):
    for _, _, table in tables(name, chunks):
        for row, forwards in zip(table.rows, table.forwards.rows):
            pairs = [action for action in row if isinstance(action, Pair)]
            assert all(pair.forward.microbatch > pair.backward.microbatch for pair in pairs)
            assert [*forwards] == [half for half in halves_of(row) if isinstance(half, Forward)]


@EACH
def test_every_layer_is_on_one_stage_and_messages_go_to_neighbours_in_the_model(name, chunks):
    for stages in STAGES:
        placement = timetable(name, stages, 1, chunks).placement
        places = [placement.location(virtual_stage) for virtual_stage in range(placement.last + 1)]
        assert sorted(places) == [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
        assert [placement.virtual_stage(*place) for place in places] == list(range(stages * chunks))
        for place, following in zip([None, *places], [*places, None]):
            if place:
                assert placement.target(place[0], Forward(0, place[1])) == following
            if following:
                assert placement.target(following[0], Backward(0, following[1])) == place


def test_of_a_v_the_first_stage_holds_both_ends_of_the_model():
    placement = timetable("zb-v", 4, 1, 2).placement
    assert [placement.location(virtual_stage)[0] for virtual_stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert placement.neighbours == [(0, 1), (1, 2), (2, 3)]
    assert timetable("interleaved", 4, 1, 2).placement.neighbours == [(0, 1), (0, 3), (1, 2), (2, 3)]


@EACH
def test_sends_pair_with_receives_in_the_same_order(name, chunks):
    """What one stage sends to another is what that one asks it for, message by message: NCCL goes by their order."""
    for stages, microbatches in [(1, 3), (2, 1), (2, 5), (3, 4), (4, 3), (4, 9), (8, 5), (8, 17)]:
        table, sent, received = timetable(name, stages, microbatches, chunks), {}, {}
        for stage, row in enumerate(table.rows):
            asks = receives_to_post(table)[stage]
            for action, messages in zip(row, asks, strict=True):
                for message in messages:
                    received.setdefault((table.placement.source(stage, message)[0], stage), []).append(message)
                for half in action.halves:
                    given = message_sent(table.placement, stage, half)
                    if given and given[0] != stage:
                        sent.setdefault((stage, given[0]), []).append(given[1])
            wanted = [message_received(half) for half in halves_of(row) if table.placement.source(stage, half)]
            by_wire = [one for one in wanted if table.placement.source(stage, one)[0] != stage]
            assert Counter(sum(asks, [])) == Counter(by_wire)
        assert sent == received


@EACH
def test_where_both_ends_of_the_model_meet_the_heads_last_gradient_comes_before_the_embeddings(name, chunks):
    """There the tied matrix is called final with the embedding, to which the head adds no more by then."""
    for _, _, table in tables(name, chunks):
        first, last = table.placement.location(0), table.placement.location(table.placement.last)
        if first[0] == last[0]:
            makers = [half.chunk for half in halves_of(table.rows[first[0]]) if half.letter in "BW"]
            ends = {chunk: place for place, chunk in enumerate(makers)}
            assert ends[last[1]] <= ends[first[1]]


# ---- what they cost

ALIVE = {                                                                # chunks that stage r holds at once
    "gpipe": lambda p, r, m, v: m,
    "1f1b": lambda p, r, m, v: min(m, p - r),
    "paired": lambda p, r, m, v: min(m, 2 * (p - r)),
    "interleaved": lambda p, r, m, v: min(m * v, v * p + p - 2 * r - 1),
    "zb-h1": lambda p, r, m, v: min(m, p),
    "zb-v": lambda p, r, m, v: min(2 * m, m + r + 1, 2 * p)}


@each_of(ALIVE)
def test_so_many_chunks_are_alive_as_the_formula_says(name, chunks):
    for stages, microbatches, table in tables(name, chunks):
        for stage, row in enumerate(table.rows):
            alive, formula = peak_microbatches(row), ALIVE[name](stages, stage, microbatches, chunks)
            if name == "interleaved" and microbatches % stages:              # in its last round stages wait for nobody
                assert formula - stages < alive <= formula
            else:
                assert alive == formula
            assert peak_microbatches(row, lambda chunk: 10) == 10 * alive


def durations(forward, backward, weights):
    """Of each action of any stage."""
    by_kind = dict(forward=forward, backward=backward + weights, input_backward=backward, weight_backward=weights,
                   pair=forward + backward + weights)
    return lambda stage, action: by_kind[action.kind]


def idle(table, *work):
    rows = simulate(table, durations(*work))
    return step_time(rows) - busy_time(rows)


IDLE = {                                                                 # in a step, with F, B, W of a chunk
    "gpipe": lambda p, m, v, F, B, W: (p - 1) * (F + B + W),
    "1f1b": lambda p, m, v, F, B, W: (p - 1) * (F + B + W),
    "paired": lambda p, m, v, F, B, W: (p - 1) * (F + B + W),
    "interleaved": lambda p, m, v, F, B, W: (p - 1) * (F + B + W) if m % p == 0 else None,
    "zb-h1": lambda p, m, v, F, B, W: (p - 1) * (F + max(B - W, 0)) + max(p - m, 0) * min(B, W),
    "zb-v": lambda p, m, v, F, B, W: max(p - 1, 2 * (2 * p - 1 - m)) * F if F == B == W else None}


@pytest.mark.parametrize("work", [(1, 1, 1), (2, 3, 2), (4, 3, 3), (2, 1, 2)],
                         ids=lambda work: "F{}-B{}-W{}".format(*work))
@each_of(IDLE)
def test_the_simulated_idle_time_is_the_formulas(name, chunks, work):
    """Where F = B = W, and where they don't; with interleaved stages a chunk is a v-th of 1F1B's stage, and so is idle
    time."""
    for stages in (1, 2, 4, 7):
        for microbatches in (1, 2, 3, 6, 8, 13, 17):
            found = idle(timetable(name, stages, microbatches, chunks), *work)
            formula = IDLE[name](stages, microbatches, chunks, *work)
            assert found == formula or formula is None
            assert found <= chunks * IDLE["1f1b"](stages, microbatches, 1,
                                                  *work), "not worse than 1F1B on the same stages"


def test_a_pair_may_give_both_its_outputs_to_one_stage():
    """To two of its chunks: that stage asks for the gradient first, as it leaves first."""
    rows = ((Forward(0), Forward(0, 1), Pair(Backward(0, 1), Forward(1)), Forward(1, 1), Backward(0), Backward(1, 1),
             Backward(1)),
            (Forward(0), Forward(0, 1), Backward(0, 1), Backward(0), Forward(1), Forward(1, 1), Backward(1, 1),
             Backward(1)))
    assert list(map(str, sum(receives_to_post(Timetable(Placement(2, 2), rows))[1],
                             []))) == ["F0", "F0'", "B0", "F1", "F1'", "B1"]


def test_with_a_last_round_of_fewer_microbatches_an_interleaved_step_is_not_longer_than_with_a_full_one():
    for stages, microbatches, table in tables("interleaved", 3):
        full = timetable("interleaved", stages, -(-microbatches // stages) * stages, 3)
        assert step_time(simulate(table)) <= step_time(simulate(full))


def test_the_bubble_is_idle_time_as_a_part_of_the_ideal_time():
    for m in (4, 8, 20):
        assert bubble(simulate(timetable("1f1b", 4, m))) == bubble(simulate(timetable("gpipe", 4,
                                                                                      m))) == pytest.approx(3 / m)
        assert bubble(simulate(timetable("interleaved", 4, m, 3))) == pytest.approx(3 / (3 * m))
        assert bubble(simulate(timetable("zb-h1", 4, m))) == pytest.approx(3 / (3 * m))
    assert bubble(simulate(timetable("zb-v", 4, 8, 2))) == pytest.approx(3 / (2 * 3 * 8))


def with_warm_up(count, stages, microbatches):
    """Pairs after so many forwards on each stage."""
    rows = []
    for stage in range(stages):
        first = min(count(stages, stage), microbatches)
        rows.append((*map(Forward, range(first)),
                     *(Pair(Backward(i), Forward(first + i)) for i in range(microbatches - first)),
                     *map(Backward, range(microbatches - first, microbatches))))
    return Timetable(Placement(stages), tuple(rows))


def test_pairs_need_two_forwards_of_warm_up_for_each_stage_that_follows():
    """With 1F1B's p - r a stage's pair waits for one that waits for it: 51 units, not 33, of four stages and 8
    microbatches."""
    assert step_time(simulate(timetable("paired", 4, 8))) == step_time(simulate(timetable("1f1b", 4, 8))) == 33
    assert timetable("paired", 4, 8) == with_warm_up(lambda p, r: 2 * (p - r - 1) + 1, 4, 8)
    assert step_time(simulate(with_warm_up(lambda p, r: p - r, 4, 8))) == 51
    assert step_time(simulate(with_warm_up(lambda p, r: 2 * (p - r), 4,
                                           8))) == 33, "one more takes memory and gives nothing"


def test_in_1f1b_with_equal_stages_messages_delay_every_turn():
    """Two stages: the last forward that stage 0 has sent and the gradient that it waits for are one message each, and
    it holds nothing else to do. With GPipe only the messages that fill and drain the pipeline count."""
    def step(schedule, stages, m, message):
        return step_time(simulate(timetable(schedule, stages, m), message=message))

    for m in (1, 2, 4, 64):
        assert step("1f1b", 2, m, 0.5) - step("1f1b", 2, m, 0) == 0.5 * max(2, m)
        assert step("gpipe", 2, m, 0.5) - step("gpipe", 2, m, 0) == 0.5 * 2
    assert step("1f1b", 4, 64, 0.5) - step("1f1b", 4, 64, 0) > 0.5 * 64


def test_the_busiest_stage_sets_the_pace():
    rows = simulate(timetable("1f1b", 3, 8), lambda stage, action: 1 + stage)
    assert busy_time(rows) == 2 * 8 * 3 and step_time(rows) > busy_time(rows)
    assert bubble(rows) == step_time(rows) / busy_time(rows) - 1


def crossed_pairs():
    """Stage 0 pairs what it needs of stage 1 with what stage 1 needs first."""
    return [[Forward(0), Pair(Backward(0), Forward(1))], [Forward(0), Forward(1), Backward(0)]]


@pytest.mark.parametrize("rows", [
    [[Backward(0), Forward(0)]] * 2,                       # the gradient before the activation that leads to it
    [[Forward(0), Backward(0)], [Backward(0), Forward(0)]],
    crossed_pairs(), with_warm_up(lambda p, r: p - r - 1, 2, 4).rows,
    [[Forward(0), actions.WeightBackward(0), actions.InputBackward(0)]]], ids=range(5))
def test_a_schedule_that_cannot_be_executed_is_refused(rows):
    with pytest.raises(ValueError, match="waiting for each other"):
        simulate(Timetable(Placement(len(rows)), tuple(map(tuple, rows))))


@pytest.mark.parametrize("schedule, arguments", [
    (definitions.one_f_one_b, ("1f1b", 4, 6)), (definitions.paired, ("paired", 3, 6)),
    (definitions.zb_v, ("zb-v", 2, 4, 2))])
def test_docstrings_show_the_pictures_that_are_printed(schedule, arguments):
    lines = [line.strip() for line in schedule.__doc__.splitlines() if "|" in line]
    assert lines == [line.strip() for line in simulation.picture(*arguments).splitlines()[1:]]


@pytest.mark.parametrize("layers, stages", [(8, 2), (9, 4), (5, 3), (4, 4), (7, 1)])
def test_layers_are_spread_evenly_and_none_is_lost(layers, stages):
    """Also where layers do not divide by stages."""
    held = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [layer for one in held for layer in one] == list(range(layers))
    assert max(map(len, held)) - min(map(len, held)) <= 1


# ---- the runner

def alive_rank(config, data):
    """Runs one step and counts, when each forward begins, the tapes that still exist; and, when each bucket is reduced,
    how often each of its parameters has been called final."""
    mesh, _, optimizer, stage = build(config)
    tapes, most, final, at_reduce = [], 0, Counter(), []
    forward, on_gradients_ready = stage.forward, optimizer.on_gradients_ready

    def counting_forward(*arguments):
        nonlocal most
        gc.collect()
        most = max(most, 1 + sum(one() is not None for one in tapes))
        output, tape = yield from forward(*arguments)
        tapes.extend(weakref.ref(piece) for piece in tape)
        return output, tape

    def counting_final(modules):
        final.update(weight for module in modules for weight in module.parameters())
        on_gradients_ready(modules)

    stage.forward, optimizer.on_gradients_ready = counting_forward, counting_final
    optimizer.reduce = lambda bucket: at_reduce.append([final[weight] for weight in bucket.parameters])
    train.train_step(1, stage, optimizer, data, config, mesh)
    gc.collect()
    left = sum(one() is not None for one in tapes)
    return mesh.pp_rank, most, left, at_reduce, len(optimizer.buckets), len(final)


@pytest.fixture(scope="module", params=SCHEDULES)
def watched(request, pool):
    """(config, what alive_rank returned of each stage)."""
    config = tiny(4, pipeline_model_parallel_size=4, schedule=request.param, num_layers=8)
    return config, pool.run(alive_rank, config, random_data(config, 1), world_size=4)


def test_activations_are_freed_as_soon_as_they_are_done_with(watched):
    config, found = watched
    for pp_rank, most, left, *_ in found:
        assert most == peak_microbatches(config.timetable.rows[pp_rank])
        assert left == 0


def test_gradients_go_to_the_replicas_when_every_microbatch_has_added_its_own(watched):
    """Not with the input gradients, nor with a fixed microbatch, whichever comes last."""
    config, found = watched
    for *_, at_reduce, buckets, parameters in found:
        assert len(at_reduce) == buckets and sum(map(len, at_reduce)) == parameters
        assert {count for counts in at_reduce for count in counts} == {config.microbatches}


def big_message_rank(config, data):
    mesh, _, optimizer, stage = build(config)
    return train.train_step(1, stage, optimizer, data, config, mesh)


def test_messages_of_megabytes_do_not_deadlock(pool):
    """Gloo's send returns only once the other side has asked, so a blocking order would hang, at any size."""
    config = tiny(4, pipeline_model_parallel_size=4, num_layers=8, hidden_size=256, ffn_hidden_size=8, seq_length=512,
                  micro_batch_size=4, global_batch_size=16, dtype="float32", schedule="interleaved")
    losses = pool.run(big_message_rank, config, random_data(config, 1), world_size=4, timeout=60)
    assert len(set(losses)) == 1


def test_the_table_in_the_documents_is_what_the_schedules_give():
    """Bubbles and microbatches alive, of each schedule that is there."""
    table = re.findall(r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|",
                       (ROOT / "docs/schedules.md").read_text(), re.MULTILINE)
    rows = [(re.findall("`([^`]+)`", names), rest) for names, *rest in table if re.match("`[a-z0-9]", names)]
    assert sorted(name for names, _ in rows for name in names) == sorted(SCHEDULES)
    for names, (bubbles_of_4, alive_of_4, bubbles_of_8, alive_of_8) in rows:
        for stages, bubbles, alive in ((4, bubbles_of_4, alive_of_4), (8, bubbles_of_8, alive_of_8)):
            for name, said in zip(names, alive.split("; "), strict=True):
                chunks = SCHEDULES[name].chunks[0]
                found = [100 * bubble(simulate(timetable(name, stages, m, chunks))) for m in (8, 16, 64)]
                assert [float(one) for one in bubbles.split(", ")] == pytest.approx(found, rel=0.05), name
                most = max(peak_microbatches(row) for row in timetable(name, stages, 64, chunks).rows)
                assert float(said) == most / chunks, name
