"""Schedules are data: what they promise can be read off the lists. And the runner keeps no activation longer than they say."""

import gc
import weakref

import pytest
from harness import build, random_data, tiny

import train
from nanodomino import schedules
from nanodomino.mesh import mesh_on_paper
from nanodomino.model import stage_layers
from nanodomino.pipeline import Mail
from nanodomino.schedules import SCHEDULES, Backward, Forward, bubble, busy_time, gpipe, most_alive, one_f_one_b, play, step_time

SIZES = [(stages, microbatches) for stages in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 4, 7, 16)]


@pytest.mark.parametrize("stages, microbatches", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_goes_forward_once_then_backward_once(name, stages, microbatches):
    """Also with fewer microbatches than stages."""
    for stage in range(stages):
        actions = SCHEDULES[name](stage, stages, microbatches)
        assert sorted(map(str, actions)) == sorted([f"F{i}" for i in range(microbatches)] + [f"B{i}" for i in range(microbatches)])
        assert all(actions.index(Forward(i)) < actions.index(Backward(i)) for i in range(microbatches))


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_1f1b_holds_at_most_p_minus_r_activations_and_gpipe_all(stages, microbatches):
    for stage in range(stages):
        assert most_alive(one_f_one_b(stage, stages, microbatches)) == min(microbatches, stages - stage)
        assert most_alive(gpipe(stage, stages, microbatches)) == microbatches


@pytest.mark.parametrize("stages, microbatches", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_p_minus_1_over_m(name, stages, microbatches):
    assert bubble(play(SCHEDULES[name], stages, microbatches)) == pytest.approx((stages - 1) / microbatches)


def test_in_1f1b_with_equal_stages_messages_delay_every_turn():
    """Two stages: the last forward that stage 0 has sent and the gradient that it waits for are one message each, and
    it holds nothing else to do. With GPipe only the messages that fill and drain the pipeline count."""
    def step(schedule, stages, m, message):
        return step_time(play(SCHEDULES[schedule], stages, m, message=message))

    for m in (1, 2, 4, 64):
        assert step("1f1b", 2, m, 0.5) - step("1f1b", 2, m, 0) == 0.5 * max(2, m)
        assert step("gpipe", 2, m, 0.5) - step("gpipe", 2, m, 0) == 0.5 * 2
    assert step("1f1b", 4, 64, 0.5) - step("1f1b", 4, 64, 0) > 0.5 * 64


def test_the_busiest_stage_sets_the_pace():
    rows = play(SCHEDULES["1f1b"], 3, 8, lambda stage, action: 1 + stage)
    assert busy_time(rows) == 2 * 8 * 3 and step_time(rows) > busy_time(rows)
    assert bubble(rows) == step_time(rows) / busy_time(rows) - 1


def test_a_schedule_that_cannot_be_executed_is_refused():
    """Stage 1 wants the gradient of a microbatch before it gives the activation that leads to it."""
    with pytest.raises(ValueError, match="waiting for each other"):
        play(lambda stage, stages, m: [Backward(0), Forward(0)], 2, 1)


@pytest.mark.parametrize("stages, microbatches", SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_sends_pair_with_receives_in_the_same_order(name, stages, microbatches):
    """What one stage sends to another is what that one receives, message by message, in each direction."""
    sent, received = {}, {}
    for stage in range(stages):
        mail = Mail(mesh_on_paper(stages, 1, 1, stage), [], None, None)
        for action in SCHEDULES[name](stage, stages, microbatches):
            if mail.target(action) is not None:
                sent.setdefault((stage, mail.target(action)), []).append(action)
            if mail.source(action) is not None:
                received.setdefault((mail.source(action), stage), []).append(action)
    assert sent == received
    assert len(sent) == 2 * (stages - 1)


def test_the_picture_of_1f1b():
    assert schedules.picture("1f1b", 2, 3).splitlines()[1:] == [
        "  stage 0 |F0 F1       B0 B0 F2 B1 B1    B2 B2",
        "  stage 1 |   F0 B0 B0 F1 B1 B1 F2 B2 B2"]


@pytest.mark.parametrize("layers, stages", [(8, 2), (9, 4), (5, 3), (4, 4), (7, 1)])
def test_layers_are_spread_evenly_and_none_is_lost(layers, stages):
    """Also where layers do not divide by stages."""
    held = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [layer for one in held for layer in one] == list(range(layers))
    assert max(map(len, held)) - min(map(len, held)) <= 1


def alive_rank(config, data):
    """Runs one step and counts, after each action, the tapes that still exist; and the messages under way."""
    mesh, _, optimizer, stage = build(config)
    tapes, most, final_calls = [], 0, []
    forward, backward = stage.forward, stage.backward

    def counting_forward(*arguments):
        nonlocal most
        output, tape = forward(*arguments)
        tapes.extend(weakref.ref(piece) for piece in tape)
        gc.collect()
        most = max(most, sum(one() is not None for one in tapes))
        return output, tape

    def watching_backward(tape, gradient, on_final):
        final_calls.append(on_final is not None)
        return backward(tape, gradient, on_final)

    stage.forward, stage.backward = counting_forward, watching_backward
    train.train_step(1, stage, optimizer, data, config, mesh)
    gc.collect()
    return mesh.pp_rank, most, sum(one() is not None for one in tapes), final_calls


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_are_freed_as_soon_as_they_are_done_with(pool, schedule):
    config = tiny(4, pipeline_model_parallel_size=4, schedule=schedule, num_layers=4)
    for pp_rank, most, left, _ in pool.run(alive_rank, config, random_data(config, 1), world_size=4):
        assert most == most_alive(SCHEDULES[schedule](pp_rank, 4, config.microbatches))
        assert left == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_go_to_the_replicas_with_the_last_backward_of_each_stage(pool, schedule):
    """Not with the last forward, and not with a fixed microbatch: which one comes last depends on the schedule."""
    config = tiny(4, pipeline_model_parallel_size=4, schedule=schedule, num_layers=4)
    for _, _, _, final_calls in pool.run(alive_rank, config, random_data(config, 1), world_size=4):
        assert final_calls == [False] * (config.microbatches - 1) + [True]


def big_message_rank(config, data):
    mesh, _, optimizer, stage = build(config)
    return train.train_step(1, stage, optimizer, data, config, mesh)


def test_messages_of_megabytes_do_not_deadlock(pool):
    """Gloo's send returns only once the other side has asked, so a blocking order would hang, at any size."""
    config = tiny(4, pipeline_model_parallel_size=4, num_layers=4, hidden_size=256, seq_length=512, micro_batch_size=4, dtype="float32")
    losses = pool.run(big_message_rank, config, random_data(config, 1), world_size=4, timeout=60)
    assert len(set(losses)) == 1
