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

import dataclasses
import math
import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from nanodomino.checkpoint.manifest import (FORMAT, SAVED, checkpoints_of, clear_leftovers, discard, file_digests,
                                            flush_folder, manifest_text, step_of)
from nanodomino.checkpoint.safe_load import CarefulReader
from nanodomino.checkpoint.shards import named_pieces, to_save
from nanodomino.comm.world import TIMEOUT
from nanodomino.config.config import Config
from nanodomino.errors import require
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer


def host_memory(optimizer: ZeroOptimizer, mesh: Mesh) -> list[tuple]:
    """(bucket, part, begin, flat numbers in host memory, unfilled) of all that this rank saves.

    In blocks whose lengths are powers of two: torch rounds pinned memory up to the next one, of a long block up to
    twice of what was asked for. A range that does not fit goes on in the next block.
    """
    wanted = [(bucket, part, *to_save(bucket, mesh)) for bucket in optimizer.buckets for part in optimizer.state_names]
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
        own = optimizer.own_state(bucket, part)
        if own is None:                                  # before the first step there are no moments
            flat.zero_()
        else:
            flat.copy_(own[begin - bucket.own_offset:][:len(flat)], non_blocking=True)
    if optimizer.mesh.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


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
