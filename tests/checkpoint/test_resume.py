"""Any layout resumes from the checkpoint of any other, and the same layout with the same bits."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from support.checkpoints import (DP2, EXPERTS, LAYOUTS, LLAMA, ONE_RANK, TP2, TP2_PP2_DP2, UNEVEN, config_for,
                                 train_from)
from support.harness import build, difference, full_tensors, reference_for, relative, weights_and_data
from support.reference import full_shapes

from nanodomino.checkpoint.format import local_boxes, slices
from nanodomino.checkpoint.load import checkpoints_of, load_weights, together
from nanodomino.checkpoint.save import copy_to_host, range_to_save
from nanodomino.errors import UserError


STATES = ("weight", "exp_avg", "exp_avg_sq")


def resume_from_each(config, data, folders):
    return [train_from(config, None, data, 1, 2, load=folder) for folder in folders]


DEPTHS = dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.5)
CP2, A2A = dict(context_parallel_size=2), dict(context_parallel_size=2, cp_comm_type="a2a")
# {name: (a family of models, its layouts with settings of their own)}
RINGS = {
    "six": ({}, [(layout, {}) for layout in LAYOUTS[::2]]),
    # from an expert on each of four ranks to tensor parallelism, to both, to stages; moments have four dimensions
    "experts": (EXPERTS, [((1, 1, 4, 1, 1, "1f1b"), dict(expert_model_parallel_size=4)), (TP2, {}),
                          ((2, 1, 2, 2, 0, "1f1b"), dict(expert_model_parallel_size=2)),
                          ((1, 2, 2, 1, 2, "zb-v"), dict(expert_model_parallel_size=2))]),
    # from one process to the last of two stages, to tensor parallelism, to the first stage of zb-v. The checkpoint
    # holds the word embedding once, although two stages hold copies.
    **{name: (DEPTHS | dict(untie_embeddings_and_output_weights=untied), [
        (layout, {}) for layout in (ONE_RANK, (1, 2, 2, 1, 1, "1f1b"), TP2, (1, 2, 1, 1, 0, "zb-v"))])
       for name, untied in (("depths", False), ("depths-untied", True))},
    "llama": (LLAMA, [*((layout, {}) for layout in LAYOUTS[2::4]), (ONE_RANK, CP2), (DP2, A2A),
                      ((2, 1, 1, 2, 0, "1f1b"), CP2)])}
SELDOM = "depths", "all", "all-llama"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.exhaustive if name in SELDOM else [])
                                  for name in (*RINGS, "all", "all-llama")])
def test_any_layout_resumes_from_any_other(pool, tmp_path, name):
    """A step on one layout and the next on another equal the reference model. The data order, the learning rate,
    Adam's count and an expert bias must continue. Each layout resumes from the previous one, or from four of twelve."""
    family, layouts = RINGS.get(name) or (LLAMA if "llama" in name else {}, [(layout, {}) for layout in LAYOUTS])
    configs = [config_for(*layout, **UNEVEN | family, **options) for layout, options in layouts]
    weights, data, records, final = reference_for(pool, configs[0], 2)
    folders = []
    for i, config in enumerate(configs):
        pool.run(train_from, config, weights, data, 0, 1, None, str(tmp_path / str(i)), world_size=config.world_size)
        folders += map(str, checkpoints_of(tmp_path / str(i)))
    for i, config in enumerate(configs):
        chosen = folders[i % 3::3] if name not in RINGS else [folders[i - 1]]
        results = pool.run(resume_from_each, config, data, chosen, world_size=config.world_size,
                           timeout=120 * len(chosen))
        for outcomes in zip(*results, strict=True):
            assert relative(outcomes[0].losses, [records[1].loss]) < 1e-9
            assert relative(outcomes[0].norms, [records[1].gradient_norm]) < 1e-9
            assert difference(full_tensors(outcomes, lambda outcome: outcome.weights), final) < 1e-9


def assert_same_bits(pool, folder, config, weights, data):
    """Check that three steps in a row equal two steps, a checkpoint, and one more. Returns the losses of rank 0."""
    size = config.world_size
    straight = pool.run(train_from, config, weights, data, 0, 3, world_size=size)
    pool.run(train_from, config, weights, data, 0, 2, None, str(folder), world_size=size)
    resumed = pool.run(train_from, config, None, data, 2, 3, str(checkpoints_of(folder)[0]), world_size=size)
    for expected, found in zip(straight, resumed):
        assert expected.losses[2:] == found.losses and expected.norms[2:] == found.norms
        assert all(map(math.isfinite, found.norms))
        assert all(torch.equal(expected.weights[name][0], found.weights[name][0]) for name in found.weights)
    return straight[0].losses


@pytest.mark.parametrize("dtype", ["bfloat16", *[
    pytest.param(dtype, marks=pytest.mark.exhaustive) for dtype in ("float32", "float16", "float64")]])
def test_the_same_layout_resumes_with_the_same_bits(pool, tmp_path, dtype):
    """Moments, master weights, AdamW's count and dropout are as if the run had never stopped."""
    config = config_for(*TP2_PP2_DP2, dtype=dtype, initial_loss_scale=256.0, hidden_dropout=0.1,
                        attention_dropout=0.1)
    weights, data = weights_and_data(config_for(*ONE_RANK), 4)
    assert_same_bits(pool, tmp_path, config, weights, data)


def test_skipped_steps_do_not_count_as_adam_steps_after_a_resume(pool, tmp_path):
    """Adam's bias correction depends on the number of updates. Counting steps instead would change the run a little and
    break nothing. Both steps before the checkpoint are skipped, so it has no moments."""
    weights, data = weights_and_data(config_for(*ONE_RANK), 4)
    data = dataclasses.replace(data, loss_mask=data.loss_mask.clone())
    data.loss_mask[:2] = math.nan
    losses = assert_same_bits(pool, tmp_path, config_for(*DP2), weights, data)
    assert list(map(math.isnan, losses)) == [True, True, False], "or no step was skipped"


# ---- which boxes a rank saves and reads

def boxes_on_rank(config):
    """([(name, box)] of the boxes that this rank saves, bytes that it copies, bytes of all states that it holds)."""
    mesh, model, optimizer, _ = build(config)
    copy_to_host(optimizer, mesh, copies := {})
    boxes = [(name, box) for (bucket, state), values in copies.items()
             for name, box, _ in local_boxes(model, bucket, state, range_to_save(bucket, mesh)[0], values)]
    held = sum(len(bucket.weights) for bucket in optimizer.buckets
               if mesh.pp_rank == 0 or "embedding" not in bucket.kind.addends)
    return boxes, sum(values.nbytes for values in copies.values()), len(STATES) * 8 * held


@pytest.mark.parametrize("tp, pp, dp, zero_stage", [
    (1, 1, 1, 1), (1, 1, 4, 1), (1, 1, 4, 0), (2, 1, 2, 1), (2, 1, 2, 0), (1, 2, 2, 1), (2, 2, 2, 1), (4, 2, 1, 0)])
def test_ranks_divide_the_work_and_save_each_element_once(pool, tp, pp, dp, zero_stage):
    """Each rank copies 1/dp of what it holds, and 1/tp of what all tp ranks hold."""
    config = config_for(tp, pp, dp, 1, zero_stage, "1f1b", **UNEVEN)
    times = {f"{state}.{name}": torch.zeros(shape) for state in STATES
             for name, shape in full_shapes(config).items()}
    for saves, copied, held in pool.run(boxes_on_rank, config, world_size=config.world_size):
        for name, box in saves:
            times[name][slices(box, (0,) * len(box.size))] += 1
        assert 0.5 * held / dp < copied <= held / dp + 3 * 8 * 50
    assert all((count == 1).all() for count in times.values())


def load_with_a_bad_disk(config, folder):
    """The message of together() if rank 1 can't read any file."""
    def fail(path):
        raise OSError(5, "Input/output error", str(path))

    mesh, model, _, _ = build(config)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.tp_rank == 1:
            patch.setattr("nanodomino.checkpoint.format.open_regular_file", fail)
        with pytest.raises(UserError) as caught:
            together(lambda: load_weights(Path(folder), model))
    return str(caught.value)


def test_if_one_rank_cannot_read_its_part_all_ranks_say_so(pool, saved):
    """Otherwise the other ranks would wait for it in the next collective."""
    first, second = pool.run(load_with_a_bad_disk, config_for(*TP2), str(checkpoints_of(saved[0])[0]), world_size=2)
    assert first == second and "is damaged or can't be read (Input/output error)" in first
