"""Checkpoints: any layout goes on from any other, the same layout with the same bits, and damage is always found."""

import dataclasses
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import tempfile
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.harness import (Outcome, build, difference, full_tensors, reference_for, relative, shard_spec, sizes_of,
                             tiny)
from support.reference import full_shapes

import train
from nanodomino.checkpoint.export import export
from nanodomino.checkpoint.folders import checkpoints_of, newest_intact_checkpoint
from nanodomino.checkpoint.load import load_weights, restore
from nanodomino.checkpoint.manifest import FORMAT, file_digest, manifest_text, read_manifest, verify
from nanodomino.checkpoint.safe_load import SafeReader
from nanodomino.checkpoint.save import Saver, allocate_host_copies
from nanodomino.checkpoint.shards import boxes_of_range, local_boxes
from nanodomino.config.records import check_settings
from nanodomino.errors import UserError
from nanodomino.generate.sampling import generate

# tp, pp, dp, slices, zero stage, schedule
LAYOUTS = [(1, 1, 1, 1, 1, "1f1b"), (2, 1, 1, 2, 1, "1f1b"), (1, 2, 1, 1, 0, "zb-v"), (1, 1, 2, 1, 2, "1f1b"),
           (1, 1, 2, 1, 0, "1f1b"), (4, 1, 1, 3, 1, "1f1b"),
           (2, 2, 1, 2, 1, "interleaved"), (2, 1, 2, 1, 1, "1f1b"), (1, 4, 1, 1, 1, "1f1b"), (1, 2, 2, 1, 1, "gpipe"),
           (1, 1, 4, 1, 2, "1f1b"), (2, 2, 2, 2, 1, "1f1b")]


# two runs of rows in a matrix, and in its bias; groups of heads; norms of q and k
LLAMA = dict(swiglu=True, position_embedding_type="rope", num_query_groups=4, kv_channels=4, qk_layernorm=True)
UNEVEN = dict(hidden_size=24, ffn_hidden_size=52, bucket_size=700)        # parts begin and end within rows


def config_for(tp, pp, dp, slices, zero_stage, schedule, **more):
    return tiny(tp * pp * dp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, slices=slices,
                zero_stage=zero_stage, schedule=schedule, num_layers=4, micro_batch_size=6, **more)


def train_from(config, weights, data, first, last, load=None, save_to=None):
    """Steps first + 1 .. last on this rank, from full weights or a checkpoint; saves at the end if told where to."""
    mesh, model, optimizer, stage = build(config, weights)
    if load:
        assert restore(Path(load), model, optimizer, mesh) == first
    results = [train.train_step(step, stage, optimizer, data, config, mesh) for step in range(first + 1, last + 1)]
    if save_to:
        saver = Saver(Path(save_to), mesh, keep_last=3)
        saver.save(last, model, optimizer, config)
        saver.wait()
        assert saver.failure() is None
    shards = {name: (weight.detach().clone(), shard_spec(weight)) for name, weight in model.named_parameters()}
    return Outcome((mesh.pp_rank, mesh.dp_rank, mesh.tp_rank), [result.loss for result in results],
                   [result.grad_norm for result in results], [], shards, 0.0)


def go_on_from_all(config, data, folders):
    return [train_from(config, None, data, 2, 3, load=folder) for folder in folders]


@pytest.mark.parametrize("pairs, family", [("some", {}), ("some", LLAMA),
                                           *[pytest.param("all", one, marks=pytest.mark.exhaustive)
                                             for one in ({}, LLAMA)]],
                         ids=["some", "some-llama", "all", "all-llama"])
def test_any_layout_goes_on_from_any_other(pool, tmp_path, pairs, family):
    """Twelve layouts, all with all, or six in a ring: two steps on one, the third on the other, against the plain
    model, so that neither the data's order nor the rate nor Adam's count begins anew."""
    configs = [config_for(*layout, **UNEVEN | family) for layout in (LAYOUTS if pairs == "all" else LAYOUTS[::2])]
    weights, data, records, final = reference_for(configs[0], 3)
    folders = []
    for i, config in enumerate(configs):
        pool.run(train_from, config, weights, data, 0, 2, None, str(tmp_path / str(i)), world_size=config.world_size)
        (folder,) = checkpoints_of(tmp_path / str(i))
        folders.append(str(folder))
    for number, config in enumerate(configs):
        chosen = folders if pairs == "all" else [folders[number - 1]]
        results = pool.run(go_on_from_all, config, data, chosen, world_size=config.world_size)
        for i in range(len(chosen)):
            outcomes = [of_rank[i] for of_rank in results]
            assert relative(outcomes[0].losses, [records[2].loss]) < 1e-9
            assert relative(outcomes[0].norms, [records[2].gradient_norm]) < 1e-9
            assert difference(full_tensors(outcomes, lambda outcome: outcome.weights, config.tp), final) < 1e-9


@pytest.mark.parametrize("dtype, optimizer",
                         [("bfloat16", "lion"), *[pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
    ("float32", "adamw"), ("bfloat16", "adamw"), ("float16", "adamw"), ("float64", "adamw"))]])
def test_the_same_layout_goes_on_with_the_same_bits(pool, tmp_path, dtype, optimizer):
    """Moments, master weights, AdamW's count, dropout: as if never stopped."""
    config = config_for(*LAYOUTS[-1], dtype=dtype, optimizer=optimizer, initial_loss_scale=256.0, hidden_dropout=0.1,
                        attention_dropout=0.1)
    weights, data, _, _ = reference_for(config_for(*LAYOUTS[0]), 4)
    straight = pool.run(train_from, config, weights, data, 0, 4)
    pool.run(train_from, config, weights, data, 0, 2, None, str(tmp_path))
    resumed = pool.run(train_from, config, None, data, 2, 4, str(checkpoints_of(tmp_path)[0]))
    for one, other in zip(straight, resumed):
        assert one.losses[2:] == other.losses and one.norms[2:] == other.norms and all(map(math.isfinite, one.norms))
        assert all(torch.equal(one.weights[name][0], other.weights[name][0]) for name in one.weights)


def test_a_skipped_step_is_none_of_adams_also_after_a_resume(pool, tmp_path):
    """It corrects its moments for the number of its updates. Counted by the run's steps instead, the rest is a little
    other, and nothing breaks."""
    config = config_for(*LAYOUTS[3])
    weights, data, _, _ = reference_for(config_for(*LAYOUTS[0]), 4)
    data = dataclasses.replace(data, loss_mask=data.loss_mask.clone())
    data.loss_mask[0] = math.nan
    straight = pool.run(train_from, config, weights, data, 0, 4, world_size=2)
    pool.run(train_from, config, weights, data, 0, 2, None, str(tmp_path), world_size=2)
    resumed = pool.run(train_from, config, None, data, 2, 4, str(checkpoints_of(tmp_path)[0]), world_size=2)
    assert [math.isnan(loss) for loss in straight[0].losses] == [True, False, False, False], "or this shows nothing"
    for one, other in zip(straight, resumed):
        assert one.losses[2:] == other.losses and one.norms[2:] == other.norms
        assert all(torch.equal(one.weights[name][0], other.weights[name][0]) for name in one.weights)


# ---- what a rank copies, writes and reads

@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (1, 5), (5, 1), (4, 3), (3, 7), (2, 1, 3), (2, 3, 2), (2, 3, 4)],
                         ids=str)
def test_rectangles_are_a_range_of_a_flat_tensor_number_by_number(shape):
    """Every range of it: in order, none left out, none twice, at most three of a matrix, one of a vector, five of three
    dimensions."""
    numbers = torch.arange(torch.Size(shape).numel())
    for begin, end in product(range(len(numbers) + 1), repeat=2):
        found = boxes_of_range(begin, end, shape) if begin <= end else []
        inside = [numbers.view(shape)[tuple(slice(first, first + size) for first, size in zip(*one))] for one in found]
        assert [piece.shape for piece in inside] == [sizes for _, sizes in found]
        assert torch.cat([numbers[:0], *(piece.flatten() for piece in inside)]).tolist() == list(range(begin, end))
        assert len(found) <= 2 * len(shape) - 1 and all(piece.numel() for piece in inside)


def shares(config):
    """Of this rank: {name: [(where, shape)]} that it saves and that it reads, bytes that it copies, and the blocks of
    memory they lie in."""
    mesh, model, optimizer, _ = build(config)
    host = allocate_host_copies(optimizer, mesh)
    own = [(bucket, "weight", bucket.own_offset, bucket.master) for bucket in optimizer.buckets]
    saves, reads = ({name: [(where, tuple(piece.shape)) for where, piece in one.boxes.items()]
                     for name, one in local_boxes(model, mesh, ranges).items()}
                    for ranges in (host, own))
    blocks = {flat.untyped_storage().data_ptr(): flat.untyped_storage().nbytes() for *_, flat in host}
    held = sum(len(bucket.weights) for bucket in optimizer.buckets if mesh.is_first_stage or not bucket.kind.tied)
    return saves, reads, sum(flat.nbytes for *_, flat in host), sorted(blocks.values()), 3 * 8 * held


@pytest.mark.parametrize("tp, pp, dp, zero_stage", [(1, 1, 1, 1), (1, 1, 4, 1), (1, 1, 4, 0), (2, 1, 2, 1),
                                                    (2, 1, 2, 0), (1, 2, 2, 1), (2, 2, 2, 1), (4, 2, 1, 0)])
def test_what_several_ranks_hold_is_dealt_out_so_that_all_is_saved_once(pool, tp, pp, dp, zero_stage):
    """Each copies 1/dp of what it holds, and of what tp ranks hold alike 1/tp of that; in blocks that pinning does not
    round up."""
    config = config_for(tp, pp, dp, 1, zero_stage, "1f1b", **UNEVEN)
    found = pool.run(shares, config, world_size=config.world_size)
    times = {f"{part}.{name}": torch.zeros(shape) for part in ("weight", "exp_avg", "exp_avg_sq")
             for name, shape in full_shapes(sizes_of(config)).items()}
    for saves, _, copied, blocks, held in found:
        for name, pieces in saves.items():
            for where, shape in pieces:
                times[name][tuple(slice(first, first + size) for first, size in zip(where, shape))] += 1
        assert sum(blocks) == copied <= held / dp + 3 * 8 * 50 and copied > 0.5 * held / dp
        assert all(size & (size - 1) == 0 for size in blocks)
    assert all((count == 1).all() for count in times.values())


def test_parts_of_these_tests_begin_and_end_within_rows(pool):
    """Or no test of them would see a wrong first, middle or last rectangle."""
    config = config_for(1, 1, 4, 1, 1, "1f1b", **UNEVEN)
    columns = {name: shape[-1] for name, shape in full_shapes(sizes_of(config)).items() if len(shape) == 2}
    found = pool.run(shares, config, world_size=4)
    for pieces_of in (lambda of_rank: of_rank[0], lambda of_rank: of_rank[1]):
        kinds = {tuple("rows" if shape[1] == columns[name] else "part"
                       for _, shape in pieces_of(of_rank)[f"weight.{name}"])
                 for of_rank in found for name in columns if f"weight.{name}" in pieces_of(of_rank)}
        assert {("part", "rows", "part"), ("part", "rows"), ("rows", "part"), ("rows",)} <= kinds


def save_once(config, folder):
    mesh, model, optimizer, _ = build(config)
    saver = Saver(Path(folder), mesh, keep_last=1)
    saver.save(1, model, optimizer, config)
    saver.wait()
    return saver.failure()


@pytest.mark.parametrize("tp, dp, zero_stage", [(1, 4, 1), (1, 4, 0), (2, 2, 1)])
def test_each_rank_writes_its_share_of_the_bytes(pool, tmp_path, tp, dp, zero_stage):
    sizes = {}
    for name, layout in (("alone", (1, 1, 1, 1, 1)), ("together", (tp, 1, dp, 1, zero_stage))):
        config = config_for(*layout, "1f1b", hidden_size=128)
        assert set(pool.run(save_once, config, str(tmp_path / name), world_size=config.world_size)) == {None}
        sizes[name] = [path.stat().st_size for path in checkpoints_of(tmp_path / name)[0].glob("*.distcp")]
    assert len(sizes["together"]) == 4 and max(sizes["together"]) < 1.1 / 4 * sizes["alone"][0]


def memory_written(config, folder):
    """[(address, bytes)] of the memory that torch writes from, and of the pieces of the host memory, both in order."""
    mesh, model, optimizer, _ = build(config)
    saver, save, written = Saver(Path(folder), mesh, keep_last=1), torch.save, []

    def watched(piece, *others, **more):
        written.append((piece.untyped_storage().data_ptr(), piece.untyped_storage().nbytes()))
        return save(piece, *others, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", watched)
        saver.save(1, model, optimizer, config)
        saver.wait()
    pieces = [piece for one in local_boxes(model, mesh, saver.copies).values() for piece in one.boxes.values()]
    return sorted(written), sorted((piece.data_ptr(), piece.nbytes) for piece in pieces)


def test_what_is_written_is_not_copied_once_more(pool, tmp_path):
    """torch's writer would, and keep all the copies until the last one is written."""
    for written, pieces in pool.run(memory_written, config_for(*LAYOUTS[7]), str(tmp_path), world_size=4):
        assert written == pieces and pieces


def save_with_gpus(config, folder):
    """A save on a machine that says it has GPUs; what was called of torch.cuda, and by which thread."""
    mesh, model, optimizer, _ = build(config)
    saver, training, called = Saver(Path(folder), mesh, keep_last=1), threading.current_thread(), []

    def watched(name, original):
        def call(*arguments, **more):
            if threading.current_thread() is not training:
                called.append(name)
                raise AssertionError(f"{name} was called by the thread that writes")
            return original(*arguments, **more)
        return call

    with pytest.MonkeyPatch.context() as patch:
        owned = [(owner, name) for owner in (torch.cuda, torch.accelerator) for name in vars(owner)
                 if callable(getattr(owner, name))]
        for owner, name in [*owned, *((torch.Tensor, name) for name in ("is_pinned", "pin_memory", "cuda"))]:
            patch.setattr(owner, name, watched(f"{owner.__name__}.{name}", getattr(owner, name)))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        saver.save(1, model, optimizer, config)
        saver.wait()
    return called, saver.failure()


def test_the_thread_that_writes_asks_nothing_of_a_gpu(pool, tmp_path):
    """It would wait for training's work there, and every rank would take memory of GPU 0. (torch's writer asks whether
    there is one.)"""
    assert pool.run(save_with_gpus, config_for(*LAYOUTS[7]), str(tmp_path), world_size=4) == [([], None)] * 4
    verify(checkpoints_of(tmp_path)[0])


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """(run folder with checkpoints of steps 2 and 3, full weights of step 3, config); saved by tp 2 x pp 2 x dp 2."""
    run_dir = tmp_path_factory.mktemp("saved")
    config = config_for(*LAYOUTS[-1])
    weights, data, _, _ = reference_for(config, 4)
    pool.run(train_from, config, weights, data, 0, 2, None, str(run_dir))
    outcomes = pool.run(train_from, config, None, data, 2, 3, str(checkpoints_of(run_dir)[0]), str(run_dir))
    return run_dir, full_tensors(outcomes, lambda outcome: outcome.weights, config.tp), config


def test_names_say_nothing_of_ranks_and_a_tied_matrix_is_saved_once(saved):
    """First and last stage both hold it, and would write it twice."""
    run_dir, _, config = saved
    names = SafeReader(checkpoints_of(run_dir)[0]).read_metadata().state_dict_metadata
    assert {name: tuple(record.size) for name, record in names.items()} == {
        f"{part}.{name}": tuple(shape) for part in ("weight", "exp_avg", "exp_avg_sq")
        for name, shape in full_shapes(sizes_of(config)).items()}


def test_export_writes_the_whole_tensors(saved, tmp_path):
    run_dir, weights, _ = saved
    export(checkpoints_of(run_dir)[0], tmp_path / "out.pt")
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert exported.keys() == weights.keys() and all(torch.equal(exported[name], weights[name]) for name in weights)


def test_export_writes_two_runs_of_rows_as_the_matrix_that_they_are(pool, tmp_path):
    """A SwiGLU's, which two tensor-parallel ranks have saved."""
    config = config_for(*LAYOUTS[1], **LLAMA)
    weights, data, _, _ = reference_for(config, 1)
    pool.run(train_from, config, weights, data, 0, 0, None, str(tmp_path), world_size=2)
    export(checkpoints_of(tmp_path)[0], tmp_path / "out.pt")
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert exported.keys() == weights.keys() and all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.parametrize("large", [0, 100_000])
def test_an_export_that_the_disk_has_no_room_for_leaves_the_file_that_was_there_or_none(saved, tmp_path, monkeypatch,
                                                                                        large):
    """Half a file would be found out by whoever reads it, on another machine perhaps. (The limit of a file's size
    stands in for a full disk; at tensors larger than a buffer torch has an error of its own.) Where there is room, a
    link stays a
    link."""
    folder, old, limit = checkpoints_of(saved[0])[0], tmp_path / "old.pt", resource.getrlimit(resource.RLIMIT_FSIZE)
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda tensors, file: save({"large": torch.ones(large)} if large else tensors,
                                                                  file))
    old.write_text("of the week before")
    (tmp_path / "link.pt").symlink_to("old.pt")
    try:
        for name in ("old.pt", "new.pt", "link.pt"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
            with pytest.raises(UserError, match=rf"{name} can't be written \(File too large\); choose another file"):
                export(folder, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert old.read_text() == "of the week before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.pt", "old.pt"]
    export(folder, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert len(torch.load(old, weights_only=True)) == (1 if large else len(saved[1]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.pt", "old.pt"]


def test_a_hundred_flipped_bytes_are_found(saved, tmp_path):
    """Anywhere in any file, the manifest and the index too."""
    run_dir, _, _ = saved
    folder = Path(shutil.copytree(checkpoints_of(run_dir)[0], tmp_path / "step-00000003"))
    verify(folder)
    generator, found = random.Random(0), 0
    files = sorted(folder.iterdir())
    for _ in range(100):
        path = generator.choice(files)
        sound = path.read_bytes()
        place = generator.randrange(len(sound))
        path.write_bytes(sound[:place] + bytes([sound[place] ^ (1 << generator.randrange(8))]) + sound[place + 1:])
        with pytest.raises(UserError, match=path.name):
            verify(folder)
        found += 1
        path.write_bytes(sound)
    assert found == 100


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "no manifest", "empty manifest"])
def test_the_checkpoint_before_a_damaged_one_is_used_and_the_damage_named(saved, tmp_path, damage):
    """A checkpoint that is not whole is never taken for one."""
    run_dir = Path(shutil.copytree(saved[0], tmp_path / "run"))
    newest, before = checkpoints_of(run_dir)
    path = newest / "__0_0.distcp"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flipped":
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        (newest / "manifest.json").write_text("")
    said = []
    assert newest_intact_checkpoint(run_dir, said.append) == before
    assert len(said) == 1 and newest.name in said[0]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("instead, reason", [("folder", "Is a directory"), ("link", "No such file or directory"),
                                             ("secret", "Permission denied"), ("bad disk", "Input/output error")])
def test_a_file_that_cannot_be_read_is_named_with_the_reason_and_the_checkpoint_before_used(
        saved, tmp_path, monkeypatch, name, instead, reason):
    """(Root may read any file, and its disk is in order, so the last two are played.)"""
    run_dir = Path(shutil.copytree(saved[0], tmp_path / "run"))
    newest, before = checkpoints_of(run_dir)
    path, real = newest / name, open

    def play(file, *others, **more):
        if file != path:
            return real(file, *others, **more)
        if instead == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return BadDisk(path, "r")

    class BadDisk(io.FileIO):
        def read(self, *_):
            raise OSError(5, "Input/output error")

    if instead in ("folder", "link"):
        path.unlink()
        path.mkdir() if instead == "folder" else path.symlink_to("nowhere")
    else:
        monkeypatch.setattr("builtins.open", play)
        monkeypatch.setattr(io, "open", play)
    said = []
    assert newest_intact_checkpoint(run_dir, said.append) == before
    if path.is_file() or name == "manifest.json":
        assert len(said) == 1 and name in said[0] and "can't be read" in said[0] and reason in said[0], said
    else:
        assert said == [f"warning: {path} is a folder, a device or a broken link, not a file; use another checkpoint; "
                        f"trying the previous checkpoint"]


def test_a_folder_that_was_being_written_is_no_checkpoint(saved, tmp_path):
    """Only the rename makes it one."""
    run_dir = Path(shutil.copytree(saved[0], tmp_path / "run"))
    newest = checkpoints_of(run_dir)[0]
    newest.rename(newest.with_name(".step-00000004.unfinished"))
    assert [folder.name for folder in checkpoints_of(run_dir)] == ["step-00000002"]


WITNESS = Path(tempfile.gettempdir()) / f"nanodomino-{os.getpid()}-was-here"


class Evil:
    def __reduce__(self):
        return (Path.touch, (WITNESS,))


@pytest.mark.parametrize("index", [pickle.dumps(Evil()), b"cos\nsystem\n(S'true'\ntR."], ids=["method", "os.system"])
def test_no_program_in_a_checkpoint_is_run(saved, tmp_path, index):
    """An index with a correct checksum, but with a call in it."""
    folder = Path(shutil.copytree(checkpoints_of(saved[0])[0], tmp_path / "step-00000003"))
    (folder / ".metadata").write_bytes(index)
    manifest = read_manifest(folder)
    manifest["files"][".metadata"] = file_digest(folder / ".metadata")
    (folder / "manifest.json").write_text(manifest_text(manifest))
    verify(folder)
    with pytest.raises(UserError, match="index refers to"):
        SafeReader(folder).read_metadata()
    assert not WITNESS.exists()


def test_a_change_that_cannot_be_honoured_is_refused_with_both_values(saved):
    folder = checkpoints_of(saved[0])[0]
    record = read_manifest(folder)["config"]
    check_settings(record, folder, config_for(*LAYOUTS[3]), "model")
    with pytest.raises(UserError, match="ffn-hidden-size 64, but this run has 32; give the same again"):
        check_settings(record, folder, config_for(*LAYOUTS[0], ffn_hidden_size=32), "model")


def save_often(config, folder, fail_at):
    """Steps 1 to 5, each saved; the disk is full at step `fail_at`, on rank 1 only."""
    mesh, model, optimizer, stage = build(config)
    saver = Saver(Path(folder), mesh, keep_last=2)
    write, failures = dcp.FileSystemWriter.write_data, []

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in range(1, 6):
        saver.wait()
        if step == fail_at and torch.distributed.get_rank() == 1:
            dcp.FileSystemWriter.write_data = full
        saver.save(step, model, optimizer, config)
        saver.wait()
        dcp.FileSystemWriter.write_data = write
        failures.append(saver.failure())
    return failures


def test_old_checkpoints_go_only_when_the_new_one_is_whole_and_a_full_disk_is_reported(pool, tmp_path):
    failures = pool.run(save_often, config_for(*LAYOUTS[6]), str(tmp_path), 5, world_size=4)
    assert [folder.name for folder in checkpoints_of(tmp_path)] == ["step-00000004", "step-00000003"]
    for of_rank in failures:
        assert of_rank[:4] == [None] * 4 and "rank 1" in of_rank[4] and "No space left on device" in of_rank[4]
    for folder in checkpoints_of(tmp_path):
        verify(folder)


class Disk:
    """One with so many bytes free, for what is opened below a folder: the last write() stores what still fits, as a
    real disk does, and only the next one is an error."""

    def __init__(self, folder, free):
        self.folder, self.free, self.open = str(folder), free, io.open

    def open_there(self, path, mode="r", buffering=-1, *others, **more):
        if not str(path).startswith(self.folder) or "r" in mode:
            return self.open(path, mode, buffering, *others, **more)
        disk = self

        class File(io.FileIO):
            def write(self, data):
                fits = memoryview(data).cast("B")[:disk.free]
                if len(data) and not len(fits):
                    raise OSError(28, "No space left on device")
                disk.free -= len(fits)
                return super().write(fits)

        file = File(path, mode.strip("bt"))
        buffered = file if buffering == 0 else io.BufferedWriter(file)
        return buffered if "b" in mode else io.TextIOWrapper(buffered)


def save_on_full_disks(config, folder):
    """[(bytes that were free, the failure, the newest sound checkpoint then, all that have a name)] of saves of step 2
    beside one of step 1; the last one has room to the byte."""
    folder = Path(folder)
    mesh, model, optimizer, _ = build(config)
    saver, told = Saver(folder, mesh, keep_last=1), []

    def save(step, free):
        disk = Disk(folder, free)
        with pytest.MonkeyPatch.context() as patch:
            for module in ("builtins", "io"):
                patch.setattr(f"{module}.open", disk.open_there)
            saver.save(step, model, optimizer, config)
            saver.wait()
        return saver.failure()

    assert save(1, 10**9) is None
    sizes = [(folder / "checkpoints" / "step-00000001" / name).stat().st_size
             for name in ("__0_0.distcp", ".metadata", "manifest.json")]
    for free in (0, 1, sizes[0] // 2, sizes[0] - 1, sizes[0], sizes[0] + sizes[1] - 1, sum(sizes[:2]),
                 sum(sizes) - sizes[2] // 2, sum(sizes) - 1, sum(sizes)):
        failure = save(2, free)
        told.append((free, failure, newest_intact_checkpoint(folder), checkpoints_of(folder)))
    return told


def test_a_disk_with_room_for_a_part_of_a_checkpoint_keeps_the_one_before_and_no_half_one(pool, tmp_path):
    """Whether it becomes full in the tensors, the index or the manifest, in the middle or at the last byte."""
    ((*full, enough),) = pool.run(save_on_full_disks, config_for(*LAYOUTS[0]), str(tmp_path), world_size=1)
    before, after = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    for free, failure, newest, named in full:
        assert failure and "No space left on device" in failure, f"{free} bytes free"
        assert (newest, named) == (before, [before]), f"{free} bytes free"
    assert enough[1:] == (None, after, [after])


def watched_save(config, folder):
    """Of one save what held when the checkpoint got its name, and after."""
    mesh, model, optimizer, _ = build(config)
    saver, flushed, told = Saver(Path(folder), mesh, keep_last=1), {}, {}
    rename, fsync = os.rename, os.fsync

    def state(path):
        """(inode, size, time of the last change to what is in it)"""
        there = os.stat(path)
        return there.st_ino, there.st_size, there.st_mtime_ns

    def watched_fsync(descriptor):
        fsync(descriptor)
        inode, *rest = state(descriptor)
        flushed[inode] = rest

    def watched_rename(old, new, *others, **more):
        old, new = Path(old), Path(new)
        if new.name == "step-00000001":
            told["step"] = verify(old)["step"]
            told["files"] = {path.name: state(path) for path in old.iterdir()}
            told["flushed"] = all(flushed.get(inode) == rest for inode, *rest in map(state, [old, *old.iterdir()]))
            flushed.clear()
        rename(old, new, *others, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "rename", watched_rename)
        saver.save(1, model, optimizer, config)
        saver.wait()
    final = Path(folder) / "checkpoints" / "step-00000001"
    told["unchanged"] = final.is_dir() and told.pop("files", None) == {path.name: state(path)
                                                                       for path in final.iterdir()}
    told["name flushed"] = os.stat(final.parent).st_ino in flushed
    return told | dict(failure=saver.failure())


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk_and_nothing_is_written_after(pool, tmp_path):
    """The manifest above all: a kill or a power cut between the two would leave a name without it, or it without its
    bytes."""
    (told,) = pool.run(watched_save, config_for(*LAYOUTS[0]), str(tmp_path), world_size=1)
    assert told == {"step": 1, "flushed": True, "unchanged": True, "name flushed": True, "failure": None}


def forged(folder, step):
    """A sound checkpoint without a tensor, which says that it is of this step."""
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    files = {".metadata": file_digest(folder / ".metadata")}
    (folder / "manifest.json").write_text(manifest_text(dict(format=FORMAT, step=step, adam_steps=step, config={},
                                                             files=files)))
    return folder


@pytest.mark.parametrize("name, value", [("value", 0.0), ("value", -1.0), ("value", math.nan), ("value", math.inf),
                                         ("value", 10**400), ("value", "8"),
                                         ("good_steps", -1), ("good_steps", 1.5), ("good_steps", True),
                                         ("patience", None), ("more", 1)])
def test_a_manifest_says_a_loss_scale_that_can_be(tmp_path, name, value):
    """Older ones, and those of other types than fp16, say none."""
    content, right = read_manifest(forged(tmp_path / "step-00000003", 3)), dict(value=8.0, good_steps=3, patience=1)
    assert content["loss_scale"] is None
    for scale in (right, right | {name: value}):
        (tmp_path / "step-00000003" / "manifest.json").write_text(manifest_text(content | dict(loss_scale=scale)))
        if scale == right:
            assert verify(tmp_path / "step-00000003")["loss_scale"] == right
    with pytest.raises(UserError,
                       match="must give value, good_steps and patience of a loss scale, but has .*; use another "
                             "checkpoint"):
        verify(tmp_path / "step-00000003")


@pytest.mark.parametrize("name", ["step", "adam_steps", "skipped_in_a_row"])
def test_a_manifest_says_counts_that_can_be(tmp_path, name):
    """Older ones know nothing of skipped steps, which then begin at 0."""
    folder = forged(tmp_path / "step-00000003", 3)
    assert (verify(folder)["step"], verify(folder)["skipped_in_a_row"]) == (3, 0)
    for count, words in ((-1, "must be from 0 to"), (10**30, "must be from 0 to"), (True, "must be from 0 to"),
                         ("two", f"lacks {name}"), (1.5, f"lacks {name}")):
        manifest = read_manifest(forged(tmp_path / f"{count}" / "step-00000003", 3))
        (folder / "manifest.json").write_text(manifest_text(manifest | {name: count}))
        with pytest.raises(UserError, match=words):
            verify(folder)


def test_only_the_names_that_we_give_are_looked_for(tmp_path):
    """Newest is the largest number, of however many digits; a copy under another name is its owner's."""
    names = ["step-00000007", "step-99999999", "step-100000000"]
    for step, name in [(7, names[0]), (99_999_999, names[1]), (100_000_000, names[2]), (7, "step-best"),
                       (7, "step-00000007-best"), (7, "step-00000007.bak"),
                       (7, "step-0000000007"), (7, "step-7"), (7, "step-00000007\n"), (7, "step-0000000\u0667")]:
        forged(tmp_path / "checkpoints" / name, step)
    assert [folder.name for folder in checkpoints_of(tmp_path)] == names[::-1]
    assert newest_intact_checkpoint(tmp_path).name == "step-100000000"


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(tmp_path):
    """Its weights would be taken for those of a later step; under a name of its owner's it may be loaded."""
    forged(tmp_path / "checkpoints" / "step-00000009", 5)
    before, said = forged(tmp_path / "checkpoints" / "step-00000004", 4), []
    assert newest_intact_checkpoint(tmp_path, said.append) == before
    assert "holds the checkpoint of step 5, but its name says another step" in said[0]
    assert verify(forged(tmp_path / "step-00000009-mine", 5))["step"] == 5


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    """Its run would begin anew. (Root may look into any, so the test says no itself.)"""
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    forged(tmp_path / "checkpoints" / "step-00000009", 9)
    monkeypatch.setattr(Path, "iterdir", refused)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match="checkpoints can't be read .Permission denied.; fix that"):
        newest_intact_checkpoint(tmp_path)


def test_what_a_user_has_put_beside_the_checkpoints_is_never_deleted(pool, tmp_path):
    for name in ("step-00000001-best", "step-00000000.bak", "step-best"):
        forged(tmp_path / "checkpoints" / name, 1)
    pool.run(save_often, config_for(*LAYOUTS[0]), str(tmp_path), 0, world_size=1)
    assert {folder.name for folder in (tmp_path / "checkpoints").iterdir()} == {
        "step-00000001-best", "step-00000000.bak", "step-best", "step-00000004", "step-00000005"}


def save_after(config, folder, after, steps, keep_last):
    """Checkpoints of these (step, how many were skipped) by a run that goes on after step `after`."""
    mesh, model, optimizer, _ = build(config)
    saver = Saver(Path(folder), mesh, keep_last, resumed_from=after)
    for step, skipped in steps:
        optimizer.skipped_in_a_row = skipped
        saver.save(step, model, optimizer, config)
        saver.wait()
        assert saver.failure() is None


@pytest.mark.parametrize("after, steps, keep_last, kept", [
    (10, [(25, 0)], 2, [25, 20, 15, 10]), (10, [(25, 0), (30, 0)], 2, [30, 25]), (10, [(12, 0)], 1, [20, 15, 12]),
    (10, [(12, 0)], 3, [20, 15, 12, 10, 5]),
    (5, [(10, 0), (15, 0), (20, 0)], 2, [20, 15]), (10, [(15, 0), (25, 0)], 3, [25, 20, 15, 10])], ids=str)
def test_a_damaged_checkpoint_does_not_count_as_kept(pool, tmp_path, after, steps, keep_last, kept):
    """5 to 20 are there, and the run has gone back behind the damaged ones of them: a second damage must not cost
    all."""
    for step in (5, 10, 15, 20):
        forged(tmp_path / "checkpoints" / f"step-{step:08d}", step)
    pool.run(save_after, config_for(*LAYOUTS[0]), str(tmp_path), after, steps, keep_last, world_size=1)
    assert [int(folder.name[5:]) for folder in checkpoints_of(tmp_path)] == kept


def test_what_is_saved_after_skipped_steps_pushes_nothing_out(pool, tmp_path):
    """A run that has diverged skips step after step; the last good state is what it is to be repeated from."""
    diverged = [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]
    for steps, kept in (diverged, [5, 4, 3, 2, 1]), ([*diverged, (6, 0)], [6, 5]):
        folder = tmp_path / str(len(steps))
        pool.run(save_after, config_for(*LAYOUTS[0]), str(folder), 0, steps, 2, world_size=1)
        assert [int(one.name[5:]) for one in checkpoints_of(folder)] == kept


def save_twice(config, folder):
    mesh, model, optimizer, _ = build(config)
    saver = Saver(Path(folder), mesh, keep_last=2)
    for _ in range(2):
        saver.save(1, model, optimizer, config)
        saver.wait()
    return saver.failure()


def test_a_step_that_is_saved_again_takes_the_place_of_the_old_one(pool, tmp_path):
    """A run that was set back behind a damaged checkpoint comes to that step once more."""
    assert pool.run(save_twice, config_for(*LAYOUTS[1]), str(tmp_path), world_size=2) == [None, None]
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    verify(checkpoints_of(tmp_path)[0])


def written_from(config, folder, tokens, use_cache):
    mesh, model, _, _ = build(config)
    load_weights(Path(folder), model, mesh)
    return generate(model, mesh, tokens, 20, config.vocab_size, 1.0, 0, 5, use_cache)


def test_what_a_checkpoint_writes_depends_on_neither_layout_nor_cache(pool, saved):
    """Twenty tokens over a window of eight: the cache is filled, grows, and is begun anew."""
    folder = str(checkpoints_of(saved[0])[0])
    texts = [pool.run(written_from, config_for(*layout), folder, [3, 1, 4], cache,
                      world_size=layout[0] * layout[1] * layout[2])[0]
             for layout in (LAYOUTS[0], LAYOUTS[5], LAYOUTS[6]) for cache in (True, False)]
    assert texts == [texts[0]] * 6 and len(texts[0]) == 23 and len(set(texts[0])) > 5


def load_in_16_bit(config, folder):
    mesh, model, _, _ = build(config)
    load_weights(Path(folder), model, mesh)
    return {name: (weight.detach().clone(), shard_spec(weight)) for name, weight in model.named_parameters()}


def test_weights_without_an_optimizer_are_rounded_to_the_models_own_type(pool, saved):
    config = config_for(*LAYOUTS[1], dtype="bfloat16")
    shards = pool.run(load_in_16_bit, config, str(checkpoints_of(saved[0])[0]), world_size=2)
    outcomes = [Outcome((0, 0, rank), [], [], [], of_rank, 0.0) for rank, of_rank in enumerate(shards)]
    loaded = full_tensors(outcomes, lambda outcome: outcome.weights, 2)
    assert all(torch.equal(loaded[name], weight.bfloat16()) for name, weight in saved[1].items())


def test_the_manifest_says_what_was_saved(saved):
    manifest = json.loads((checkpoints_of(saved[0])[0] / "manifest.json").read_text())
    assert manifest["step"] == manifest["adam_steps"] == 3 and manifest["skipped_in_a_row"] == 0
    assert manifest["config"]["hidden_size"] == 16
