"""Checkpoints that any layout can go on from, and that are either whole or not there.

    runs/nano-001/checkpoints/step-00000100/
        manifest.json        step, counts, settings, size and SHA-256 of every other file; written last
        .metadata            torch.distributed.checkpoint's index: which file holds which part of which tensor
        __0_0.distcp ...     what rank 0 held, ...

**Any layout.** A tensor is saved under a global name (layers.7.attention.qkv.weight, no rank, no stage), in rectangles:
each rank says where in the whole tensor those lie that it has (pieces.py), and torch.distributed.checkpoint reads
whatever another layout asks for. Of each parameter the weight (the fp32 master in 16-bit training) and the optimizer's
moments, two of AdamW's.

**Each rank its share.** What several ranks hold is dealt out over them; each copies and writes its share alone. Of a
bucket a replica saves the part that it owns in ZeRO-1 (without ZeRO-1 too: replicas are equal), and tp ranks that hold
copies deal out that part. A tied matrix is saved by the first stage. So what a rank keeps in host memory, copies while
training waits, and writes falls as 1/dp: with AdamW it is 12/dp bytes of each parameter that the rank holds. To go on,
a rank reads the part that it owns, and the replicas gather the weights, as after each step.

What else must be known to go on is a function of it: the data order, the dropout masks and the learning rate follow
from (seed, step). So a run that was stopped goes on with the same bits.

**Whole or not there.** Everything is written to a hidden folder and flushed to the disk, then the manifest, then the
folder is renamed, which is one indivisible act of the file system. Whatever is killed, at whatever moment: a folder
named step-... is whole. One that was damaged later is found out by its checksums, and the one before is taken.

**Behind training.** The share is copied to host memory (that is all that training waits for), and a thread on every
rank writes the copy, in a process group of its own, so that its talk does not mix with training's. The thread asks
nothing of a GPU: it would wait for training there, and take memory of GPU 0 for every rank of the host.

No pickle of a checkpoint is ever run: tensors are read with weights_only, the index by an unpickler that knows
torch.distributed.checkpoint's own record types and nothing else.

    python -m nanodomino.checkpoint verify DIR        checks every byte of a checkpoint, or of all those of a run
    python -m nanodomino.checkpoint export DIR OUT    writes one plain torch file of whole tensors, {name: tensor}
"""

import argparse
import dataclasses
import math
import os
import pickle
import sys
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from nanodomino.buckets import Bucket
from nanodomino.command import run
from nanodomino.config import DTYPES, Config, from_record
from nanodomino.manifest import (FORMAT, SAVED, checkpoints_of, clear_leftovers, discard, file_digests, find_checkpoint,
                                 flush_folder, manifest_text, read_manifest, require_plain_file, step_of, verify)
from nanodomino.mesh import TIMEOUT, Mesh
from nanodomino.model import GPT, whole_on_paper
from nanodomino.pieces import Pieces
from nanodomino.settings import UserError, require
from nanodomino.zero import ZeroOptimizer

# ---- tensors under global names

def named_pieces(model: GPT, mesh: Mesh, ranges) -> dict[str, Pieces]:
    """{'<part>.<global name>': what is there of it}; ranges: (bucket, part, begin, the numbers of it from there on)."""
    names = {weight: name for name, weight in model.named_parameters()}
    found = {}
    for bucket, part, begin, flat in ranges:
        for weight in bucket.parameters:
            first = bucket.offsets[weight]
            here = flat[max(first - begin, 0):max(first - begin + weight.numel(), 0)]
            if len(here):
                pieces = found.setdefault(f"{part}.{names[weight]}", Pieces.of(weight, mesh))
                pieces.add(here, max(begin - first, 0))
    return found


def to_save(bucket: Bucket, mesh: Mesh) -> tuple[int, int]:
    """Begin and end of what this rank saves of a bucket. It is dealt out over all ranks that hold the same: the
    replicas, each of which gets what it owns in ZeRO-1, and tp ranks where they are copies. A tied matrix is saved by
    the first stage."""
    holders, mine = mesh.dp, mesh.dp_rank
    if not bucket.kind.sharded:
        holders, mine = holders * mesh.tp, mine * mesh.tp + mesh.tp_rank
    size = len(bucket.weights) if mesh.is_first_stage or not bucket.kind.tied else 0
    return size * mine // holders, size * (mine + 1) // holders


def host_memory(optimizer: ZeroOptimizer, mesh: Mesh) -> list[tuple]:
    """(bucket, part, begin, flat numbers in host memory, unfilled) of all that this rank saves.

    In blocks whose lengths are powers of two: torch rounds pinned memory up to the next one, of a long block up to
    twice of what was asked for. A range that does not fit goes on in the next block.
    """
    wanted = [(bucket, part, *to_save(bucket, mesh)) for bucket in optimizer.buckets for part in optimizer.kept]
    total = sum(end - begin for *_, begin, end in wanted)
    like = optimizer.buckets[0].own_grad
    blocks = [torch.empty(1 << i, dtype=like.dtype, pin_memory=like.is_cuda)
              for i in range(total.bit_length()) if total >> i & 1]
    host, free = [], like[:0]
    for bucket, part, begin, end in wanted:
        while begin < end:
            free = free if len(free) else blocks.pop()
            flat, free = free[:end - begin], free[end - begin:]
            host.append((bucket, part, begin, flat))
            begin += len(flat)
    return host


def snapshot(optimizer: ZeroOptimizer, host: list[tuple]):
    """Copy what this rank saves into `host`. It is there when this returns: who writes it asks no GPU any more."""
    for bucket, part, begin, flat in host:
        own = optimizer.own(bucket, part)
        if own is None:                                  # before the first step there are no moments
            flat.zero_()
        else:
            flat.copy_(own[begin - bucket.own_begin:][:len(flat)], non_blocking=True)
    if optimizer.mesh.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def restore(folder: Path, model: GPT, optimizer: ZeroOptimizer, mesh: Mesh, weights_alone=False) -> int:
    """Fill the model and the optimizer of any layout from a checkpoint; returns its step. Each rank reads what it owns,
    straight into its place; then the replicas gather the weights. All ranks call it together.
    weights_alone: a new optimizer at step 0, which has seen nothing yet."""
    manifest = read_manifest(folder)
    if not weights_alone:
        optimizer.updates, optimizer.skipped_in_a_row = manifest["adam_steps"], manifest["skipped_in_a_row"]
        optimizer.loss_scale.restore(manifest["loss_scale"])
    parts = optimizer.kept if optimizer.updates else ("weight",)
    own = [(bucket, part, bucket.own_begin, optimizer.place_of(bucket, part))
           for bucket in optimizer.buckets for part in parts]
    read(named_pieces(model, mesh, own), folder)
    optimizer.gather_weights()
    return 0 if weights_alone else manifest["step"]


# ---- reading without running

def read(tensors: dict, folder: Path):
    """Fill the tensors from a checkpoint. Raises UserError; dcp.load would tell the same in a traceback per rank."""
    known = CarefulReader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        require(name in known and known[name].size == tensor.size(),
                f"{folder} lacks {name} of shape {tuple(tensor.size())}; use another checkpoint")
    try:
        dcp.load(tensors, storage_reader=CarefulReader(folder))
    except dcp.CheckpointException as error:                   # of any rank, told to all: files that fit their
        rank, (first, _) = next(iter(error.failures.items()))  # checksums, and not the index
        raise UserError(f"{folder} holds other tensors than its index says (rank {rank}: {type(first).__name__}: "
                        f"{str(first).splitlines()[0] if str(first) else ''}); use another checkpoint") from None


class CarefulReader(dcp.FileSystemReader):
    """torch's reader, with an index that is data and not a program
    (pickle.load would run what a stranger wrote into it)."""

    def read_metadata(self, *args, **kwargs):
        path = Path(self.path) / ".metadata"
        try:
            require_plain_file(path)
            with open(path, "rb") as file:
                metadata = CarefulUnpickler(file).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata
        except UserError:
            raise
        except Exception as error:                           # bytes that are no pickle can raise anything
            raise UserError(f"{path} is no index of tensors ({type(error).__name__}: {error}); use another "
                            "checkpoint") from None


class CarefulUnpickler(pickle._Unpickler):                     # in Python, whose operations can be looked at
    """Knows the record types that an index of tensors is made of; anything else is refused."""
    dispatch = dict(pickle._Unpickler.dispatch)

    records = {"torch.distributed.checkpoint.metadata": ("ChunkStorageMetadata", "Metadata", "MetadataIndex",
                                                         "StorageMeta", "TensorProperties",
                                                         "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
               "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
               "torch.serialization": ("_get_layout",),
               "torch": ("Size", *DTYPES),
               "pathlib": ("PosixPath",), "pathlib._local": ("PosixPath",)}

    def find_class(self, module, name):
        require(name in self.records.get(module, ()),
                f"the checkpoint's index refers to {module}.{name}, which no index of nanodomino's "
                "does; do not use this checkpoint")
        return super().find_class(module, name)

    def load_build(self):
        """Fill a record. A type is none: filled, it would be another one for this whole process."""
        require(not isinstance(self.stack[-2], type) and not callable(self.stack[-2]),
                "the checkpoint's index changes one of torch's own types; do not use this checkpoint")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


# ---- saving, behind training

class PlannerWithoutCopies(dcp.DefaultSavePlanner):
    def transform_object(self, item, piece):
        """The same memory as a storage of its own: torch's writer copies a view, and keeps all copies to the end."""
        return torch.from_numpy(piece.numpy())


class Saver:
    """Writes the checkpoints of a run, one at a time, each on a thread of its own on every rank.

    after: the step that the run goes on from. Checkpoints of later ones are damaged, or it would go on from those.
    """

    def __init__(self, run_dir: Path, mesh: Mesh, keep_last: int, timeout: int = TIMEOUT, after: float = math.inf):
        self.run_dir, self.mesh, self.keep_last = run_dir, mesh, keep_last
        # The threads talk here, not where training talks.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.thread, self.error = None, None
        self.damaged = {folder for folder in checkpoints_of(run_dir) if step_of(folder) > after}
        self.host = []                     # where the copies go; kept, for memory that is new is slow at first touch

    def save(self, step: int, model: GPT, optimizer: ZeroOptimizer, config: Config):
        """Copy what must be saved, then write it behind training.
        Waits for the checkpoint before, if that is still under way."""
        self.wait()
        self.host = self.host or host_memory(optimizer, self.mesh)
        snapshot(optimizer, self.host)
        tensors = named_pieces(model, self.mesh, self.host)
        manifest = dict(format=FORMAT, step=step, adam_steps=optimizer.updates,
                        skipped_in_a_row=optimizer.skipped_in_a_row, loss_scale=optimizer.loss_scale.state(),
                        config=dataclasses.asdict(config))
        self.thread = threading.Thread(target=self.write_or_note, args=(step, tensors, manifest),
                                       name=f"checkpoint of step {step}")
        self.thread.start()

    def wait(self):
        """Until the last save is done, well or badly."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def failure(self) -> str | None:
        """What went wrong in a save since the last call, if anything is known to have."""
        error, self.error = self.error, None
        return error

    def write_or_note(self, step, tensors, manifest):
        """On the thread: an error must not vanish with it."""
        try:
            self.write(step, tensors, manifest)
        except BaseException as error:
            reason = getattr(error, "failures", None) or {dist.get_rank(): error}
            rank, first = next(iter(reason.items()))
            first = first[0] if isinstance(first, tuple) else first
            self.error = (f"the checkpoint of step {step} could not be written: rank {rank}: "
                          f"{type(first).__name__}: {first}")

    def write(self, step, tensors, manifest):
        """All ranks: their tensors, flushed. Rank 0: the manifest, flushed, then the name that says it is whole."""
        parent = self.run_dir / "checkpoints"
        temporary, final = parent / f".step-{step:08d}.unfinished", parent / f"step-{step:08d}"
        if dist.get_rank() == 0:
            clear_leftovers(self.run_dir)
        dist.barrier(self.group)
        # Where there is CUDA, torch copies ahead through a stream of this thread's device, GPU 0 on every rank.
        writer = dcp.FileSystemWriter(temporary, sync_files=True, per_thread_copy_ahead=0)
        dcp.save(tensors, storage_writer=writer, planner=PlannerWithoutCopies(), process_group=self.group)
        self.together(lambda: self.seal(temporary, final, manifest))

    def together(self, act):
        """Rank 0 acts; if it fails, all do."""
        outcome = [None]
        if dist.get_rank() == 0:
            try:
                act()
            except BaseException as error:
                outcome[0] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[0] is not None:
            raise outcome[0]

    def seal(self, temporary: Path, final: Path, manifest: dict):
        """Manifest, rename, and only then away with old ones. A state after skipped steps takes no other's place, for
        it may be the other that they are to be repeated from."""
        complete(temporary, manifest, "--run-dir must lie on a disk that all hosts share")
        if final.exists():                                   # of a run that was set back behind this step
            discard(final)
        temporary.rename(final)
        flush_folder(final.parent)
        (self.run_dir / SAVED).touch()
        self.damaged.discard(final)
        if not manifest["skipped_in_a_row"]:
            there = [folder for folder in checkpoints_of(self.run_dir) if step_of(folder) <= step_of(final)]
            oldest = [folder for folder in there if folder not in self.damaged][:self.keep_last][-1]
            for old in there[there.index(oldest) + 1:]:
                discard(old)


def complete(folder: Path, manifest: dict, fix: str):
    """Write the last file of a checkpoint, its manifest, flushed. `fix`: what to do where files of the index lack."""
    manifest["files"] = file_digests(sorted(folder.iterdir()))
    needed = {place.relative_path for place in CarefulReader(folder).read_metadata().storage_data.values()}
    require(needed <= manifest["files"].keys(),
            f"{folder} lacks {', '.join(sorted(needed - manifest['files'].keys()))}; {fix}")
    with open(folder / "manifest.json", "w") as file:
        file.write(manifest_text(manifest))
        file.flush()
        os.fsync(file.fileno())
    flush_folder(folder)


# ---- using a checkpoint without training

def write_alone(tensors: dict, folder: Path):
    """Write tensors on one process, without a group, a file for each: torch's writer keeps what it has written until
    the file is done."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                      # that there is no process group: none is needed
        dcp.save(tensors, storage_writer=writer, planner=PlannerWithoutCopies(), no_dist=True)


def read_alone(tensors: dict, reader: CarefulReader):
    """Fill whole tensors on one process, without a group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def load_weights(folder: Path, model: GPT, mesh: Mesh):
    """Fill a model of any layout, without an optimizer."""
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight.{name}"] = Pieces.of(weight, mesh)
        tensors[f"weight.{name}"].add(weight.detach().view(-1))
    read(tensors, folder)


def export(folder: Path, out: Path):
    """Write one plain torch file of whole tensors, {global name: tensor}, beside OUT first, so that OUT is never half a
    file; torch.load(OUT, weights_only=True) reads it."""
    require(not (out.parent / "manifest.json").exists(),
            f"{out} would lie in a checkpoint, among the files that it is made of; choose another folder")
    manifest = verify(folder)
    records = CarefulReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(record.size, dtype=record.properties.dtype)
               for name, record in records.items() if name.startswith("weight.")}
    read_alone(tensors, CarefulReader(folder))
    whole = whole_on_paper(from_record(manifest["config"], folder))
    shapes = {name: weight.shape for name, weight in whole.named_parameters()}
    tensors = {name.removeprefix("weight."): tensor for name, tensor in tensors.items()}
    # several runs of rows are one matrix
    tensors = {name: tensor.view(shapes.get(name, tensor.shape)) for name, tensor in tensors.items()}
    target = beside = out                                    # /dev/stdout: nothing to replace
    if os.path.isfile(out) or not os.path.exists(out):
        target = Path(os.path.realpath(out))
        beside = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        with open(beside, "wb") as file:                     # given a name, torch.save says less clearly what is wrong
            torch.save(tensors, file)
        beside.rename(target)
    except (OSError, RuntimeError) as error:                 # on a full disk torch's error follows the system's
        said = error if isinstance(error, OSError) else error.__context__
        raise UserError(f"{out} can't be written ({getattr(said, 'strerror', error)}); choose another file") from None
    finally:
        if beside != target and os.path.exists(beside):
            beside.unlink()
    return tensors


# ---- the command line

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError("usage: python -m nanodomino.checkpoint verify DIR, or: "
                        "python -m nanodomino.checkpoint export DIR OUT")


def command_line() -> Parser:
    parser = Parser("python -m nanodomino.checkpoint", allow_abbrev=False,
                    description="Look at checkpoints, whatever layout wrote them, on one process without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify | export")
    for name, does, folder in [
            ("verify", "check every byte", "a checkpoint, or the folder of a run: all its checkpoints, newest first"),
            ("export", "write one plain torch file of whole tensors, {name: tensor}",
             "a checkpoint, or the folder of a run: its newest sound one")]:
        command = commands.add_parser(name, help=does, description=f"{does.capitalize()}.", allow_abbrev=False)
        command.add_argument("folder", metavar="DIR", type=Path, help=folder)
        if name == "export":
            command.add_argument("out", metavar="OUT", type=Path, help="the file to write; torch.load(OUT) reads it")
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    flags = command_line().parse_args(arguments)
    of_run = (flags.folder / "checkpoints").is_dir()
    if flags.command == "verify":
        return verify_all(checkpoints_of(flags.folder) if of_run else [flags.folder])
    try:
        folder = find_checkpoint(flags.folder) if of_run else flags.folder
        tensors = export(folder, flags.out)
    except OSError as error:
        raise UserError(str(error)) from None
    print(f"{flags.out}: {len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} numbers, of "
          f"{folder}")
    return 0


def verify_all(folders: list[Path]) -> int:
    """A line for each checkpoint; the exit code, 2 if one is damaged. Raises UserError if there is none."""
    require(folders, "this run has no checkpoint yet; give the folder of another one")
    code = 0
    for folder in folders:
        try:
            manifest = verify(folder)
            print(f"{folder} is sound: step {manifest['step']}, {len(manifest['files'])} files, "
                  f"{sum(file['size'] for file in manifest['files'].values()):,} bytes", flush=True)
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
    return code


if __name__ == "__main__":
    run(main, sys.argv[1:])
