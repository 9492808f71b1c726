"""Saves checkpoints in the background. Each rank writes its share, and renaming the folder completes the checkpoint.

**Each rank writes its share.** Ranks that hold the same values share the work (range_to_save). So a share, the host
memory for it and the time that training waits for the copy all fall as 1/dp. With AdamW a share is 12/dp bytes for each
parameter that the rank holds: the fp32 master weight and two fp32 moments.

**In the background.** Training waits only for the copy to host memory. Then a thread on each rank writes the copy. The
thread has its own process group, so that its collectives can't mix with training's. It makes no CUDA calls: they would
wait for training's kernels, and on every rank they would allocate memory on GPU 0, the default device of a new thread.

    training    ... step 100 | copy | step 101 | step 102 | step 103 ...
    thread                          | write tensors, flush | manifest, flush | rename | delete old checkpoints

**Complete or absent.** The tensors are written to the folder .step-00000100.unfinished and flushed to the disk, then
the manifest. Then rank 0 renames the folder to step-00000100. Renaming is atomic. So whenever a process is killed, each
folder named step-... is complete.
"""

import dataclasses
import os
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nanodomino.checkpoint.format import (FORMAT, BucketRange, LocalBox, Share, flush_folder, local_boxes, step_of,
                                          write_boxes, write_manifest)
from nanodomino.checkpoint.load import checkpoints_of, is_intact
from nanodomino.comm.world import TIMEOUT
from nanodomino.files import delete
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.optim.buckets import Bucket
from nanodomino.settings.config import Config
from nanodomino.zero import ZeroOptimizer


def range_to_save(bucket: Bucket, mesh: Mesh) -> tuple[int, int]:
    """Return the range (start, end) of a bucket that this rank saves. The replicas share the work and, if the bucket is
    not cut over tp, also the tp ranks. Each replica saves the part that it owns with ZeRO. Only the first stage saves a
    tied embedding."""
    holders, index = mesh.axis(bucket.kind.replicas)
    if "tp" not in bucket.kind.shards:
        holders, index = holders * mesh.tp, index * mesh.tp + mesh.tp_rank
    size = len(bucket.weights) if mesh.pp_rank == 0 or "embedding" not in bucket.kind.addends else 0
    return size * index // holders, size * (index + 1) // holders


def allocate_host_copies(optimizer: ZeroOptimizer, mesh: Mesh) -> list[BucketRange]:
    """Allocate host memory for this rank's share of a checkpoint. copy_to_host() fills it at each save."""
    copies = []
    for bucket in optimizer.buckets:
        start, end = range_to_save(bucket, mesh)
        for state in optimizer.states_of(bucket):
            values = torch.empty(end - start, dtype=bucket.own_grad.dtype, pin_memory=bucket.own_grad.is_cuda)
            copies.append(BucketRange(bucket, state, start, values))
    return copies


def copy_to_host(optimizer: ZeroOptimizer, copies: list[BucketRange]):
    """Copy this rank's share to host memory. Waits for the copy, because the writing thread makes no CUDA calls."""
    for bucket, state, start, values in copies:
        own = optimizer.own_state(bucket, state)
        if own is None:                                        # no moments before the first update
            values.zero_()
        else:
            values.copy_(own[start - bucket.own_offset:][:len(values)], non_blocking=True)
    if optimizer.mesh.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


class Saver:
    """Writes the checkpoints of a run, one at a time, on a thread of each rank."""

    def __init__(self, run_dir: Path, mesh: Mesh, keep_last: int, timeout: int = TIMEOUT):
        self.run_dir, self.mesh, self.keep_last = run_dir, mesh, keep_last
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.thread, self.error = None, None
        self.intact = set()                # checkpoints that this process has written or verified
        self.copies = []                   # allocated once, because the first use of new memory is slow

    def save(self, step: int, model: GPT, optimizer: ZeroOptimizer, config: Config):
        """Copy this rank's share to host memory and start writing it. Waits for the previous save first."""
        self.wait()
        self.copies = self.copies or allocate_host_copies(optimizer, self.mesh)
        copy_to_host(optimizer, self.copies)
        boxes = local_boxes(model, self.copies)
        manifest = dict(format=FORMAT, step=step, adam_steps=optimizer.updates,
                        skipped_in_a_row=optimizer.skipped_in_a_row, loss_scale=optimizer.loss_scale.state(),
                        config=dataclasses.asdict(config))
        thread = threading.Thread(target=self.write_or_note_error, args=(step, boxes, manifest),
                                  name=f"checkpoint of step {step}")
        try:
            thread.start()
            self.thread = thread
        except RuntimeError:               # the system allows no further thread: training waits for this save
            self.write_or_note_error(step, boxes, manifest)

    def wait(self):
        """Wait until the last save has succeeded or failed."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def failure(self) -> str | None:
        """Return the error message if a save has failed since the last call, else None."""
        error, self.error = self.error, None
        return error

    # ---- on the thread

    def write_or_note_error(self, step: int, boxes: list[LocalBox], manifest: dict):
        """Call write(), and keep the text of its error for failure(). The exception itself would be lost."""
        error, failed = attempt(self.write, step, boxes, manifest)
        if error := error or failed:                           # failed: for example, another rank has died
            self.error = f"the checkpoint of step {step} could not be written: {error}"

    def write(self, step: int, boxes: list[LocalBox], manifest: dict) -> str | None:
        """Write and flush this rank's boxes; rank 0 completes the checkpoint. Return the first error of any rank, the
        same text on all ranks, or None."""
        parent, rank = self.run_dir / "checkpoints", dist.get_rank()
        temporary, final = parent / f".step-{step:08d}.unfinished", parent / f"step-{step:08d}"
        result = attempt(write_boxes, temporary / f"rank-{rank:05d}.bin", boxes)
        results, outcome = [None] * dist.get_world_size() if rank == 0 else None, [None]
        dist.gather_object(result, results, dst=0, group=self.group)
        if rank == 0:
            shares, errors = zip(*results)
            error = next(filter(None, errors), None)
            outcome = [error or attempt(self.complete, temporary, final, manifest, shares)[1]]
            delete(temporary)                                  # after an error: otherwise a full disk would stay full
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        return outcome[0]

    def complete(self, temporary: Path, final: Path, manifest: dict, shares: list[Share]):
        """Write the index and the manifest, rename the folder, and only then delete old checkpoints. Delete none if the
        latest steps were skipped, because the run may have to restart from an older one. A damaged checkpoint does not
        count as one of the last keep_last."""
        write_manifest(temporary, manifest, shares, "--run-dir must lie on a disk that all hosts share")
        if os.path.lexists(final):                             # the run went back and has reached this step again
            delete_checkpoint(final)
        temporary.rename(final)
        flush_folder(final.parent)
        if not manifest["skipped_in_a_row"]:
            kept, self.intact = 0, self.intact | {final}
            for folder in checkpoints_of(self.run_dir):
                if step_of(folder) > step_of(final):           # damaged: otherwise the run would have resumed from it
                    continue
                if kept == self.keep_last:
                    delete_checkpoint(folder)
                elif folder in self.intact or is_intact(folder):
                    kept, self.intact = kept + 1, self.intact | {folder}


def delete_checkpoint(folder: Path):
    """Rename a checkpoint, then delete it, so that a half-deleted folder never looks like a checkpoint."""
    delete(folder.rename(folder.with_name(f".{folder.name}.discarded")))


def clear_leftovers(run_dir: Path):
    """Delete the hidden folders that killed processes left; otherwise a full disk would stay full."""
    for suffix in ("unfinished", "discarded"):
        for folder in (run_dir / "checkpoints").glob(f".step-*.{suffix}"):
            delete(folder)


def attempt(function, *arguments) -> tuple:
    """Return (the function's result, None), or (None, the text of its error)."""
    try:
        return function(*arguments), None
    except BaseException as error:
        return None, f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
