"""Saves checkpoints in the background. Each rank writes its share, and renaming the folder completes the checkpoint.

**Each rank writes its share.** Ranks that hold the same values share the work (shards.range_to_save). So the bytes that
a rank writes, the host memory for them and the time that training waits for the copy all fall as 1/dp. With AdamW a
share is 12/dp bytes for each parameter that the rank holds: the fp32 master weight and two fp32 moments.

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
import math
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from nanodomino.checkpoint import pinned_memory
from nanodomino.checkpoint.find_checkpoints import SAVED_MARKER, checkpoints_of, clear_leftovers, delete_checkpoint
from nanodomino.checkpoint.manifest import FORMAT, flush_folder, step_of, write_manifest
from nanodomino.checkpoint.shards import BucketRange, local_boxes, range_to_save
from nanodomino.comm.world import TIMEOUT
from nanodomino.config.config import Config
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer


def allocate_host_copies(optimizer: ZeroOptimizer, mesh: Mesh) -> list[BucketRange]:
    """Allocate host memory for this rank's share of a checkpoint. copy_to_host() fills it at each save."""
    ranges = [(bucket, state, *range_to_save(bucket, mesh))
              for bucket in optimizer.buckets for state in optimizer.state_names]
    like, copies = optimizer.buckets[0].own_grad, []
    memory = pinned_memory.allocate([end - start for *_, start, end in ranges], like.dtype, like.is_cuda)
    for (bucket, state, start, _), tensors in zip(ranges, memory):
        for values in tensors:
            copies.append(BucketRange(bucket, state, start, values))
            start += len(values)
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


class NoCopyPlanner(dcp.DefaultSavePlanner):
    """Makes torch's writer write views without copying them first."""

    def transform_object(self, item, box):
        """Return a tensor with the same memory, but its own storage, so that the writer does not see a view: it would
        copy each view, and keep all copies to the end."""
        return torch.from_numpy(box.numpy())


class Saver:
    """Writes the checkpoints of a run, one at a time, on a thread of each rank.

    resumed_from: the step from which this run resumed. Checkpoints of later steps must be damaged, because otherwise
    the run would have resumed from one of them.
    """

    def __init__(self, run_dir: Path, mesh: Mesh, keep_last: int, timeout: int = TIMEOUT,
                 resumed_from: float = math.inf):
        self.run_dir, self.mesh, self.keep_last = run_dir, mesh, keep_last
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.thread, self.error = None, None
        self.damaged = {folder for folder in checkpoints_of(run_dir) if step_of(folder) > resumed_from}
        self.copies = []                   # allocated once, because the first use of new memory is slow

    def save(self, step: int, model: GPT, optimizer: ZeroOptimizer, config: Config):
        """Copy this rank's share to host memory and start writing it. Waits for the previous save first."""
        self.wait()
        self.copies = self.copies or allocate_host_copies(optimizer, self.mesh)
        copy_to_host(optimizer, self.copies)
        tensors = local_boxes(model, self.mesh, self.copies)
        manifest = dict(format=FORMAT, step=step, adam_steps=optimizer.updates,
                        skipped_in_a_row=optimizer.skipped_in_a_row, loss_scale=optimizer.loss_scale.state(),
                        config=dataclasses.asdict(config))
        self.thread = threading.Thread(target=self.write_or_note_error, args=(step, tensors, manifest),
                                       name=f"checkpoint of step {step}")
        self.thread.start()

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

    def write_or_note_error(self, step, tensors, manifest):
        """Call write(); if it raises, keep the error's text for failure(). The exception itself would be lost."""
        try:
            self.write(step, tensors, manifest)
        except BaseException as error:
            failures = getattr(error, "failures", None) or {dist.get_rank(): error}
            rank, first = next(iter(failures.items()))
            first = first[0] if isinstance(first, tuple) else first
            self.error = (f"the checkpoint of step {step} could not be written: rank {rank}: "
                          f"{type(first).__name__}: {first}")

    def write(self, step, tensors, manifest):
        """Write and flush this rank's tensors; rank 0 completes the checkpoint."""
        parent = self.run_dir / "checkpoints"
        temporary, final = parent / f".step-{step:08d}.unfinished", parent / f"step-{step:08d}"
        if dist.get_rank() == 0:
            clear_leftovers(self.run_dir)
        dist.barrier(self.group)
        # per_thread_copy_ahead > 0 would use a CUDA stream of the thread's device, which is GPU 0 on every rank.
        writer = dcp.FileSystemWriter(temporary, sync_files=True, per_thread_copy_ahead=0)
        dcp.save(tensors, storage_writer=writer, planner=NoCopyPlanner(), process_group=self.group)
        self.run_on_rank_0(lambda: self.complete(temporary, final, manifest))

    def run_on_rank_0(self, action):
        """Call `action` on rank 0; if it raises there, raise the same error on all ranks."""
        outcome = [None]
        if dist.get_rank() == 0:
            try:
                action()
            except BaseException as error:
                outcome[0] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[0] is not None:
            raise outcome[0]

    def complete(self, temporary: Path, final: Path, manifest: dict):
        """Write the manifest, rename the folder, and only then delete old checkpoints.

        If the latest steps were skipped, the run may have diverged and may have to restart from an older checkpoint. So
        no checkpoint is deleted then."""
        write_manifest(temporary, manifest, "--run-dir must lie on a disk that all hosts share")
        if final.exists():                                     # the run went back and has reached this step again
            delete_checkpoint(final)
        temporary.rename(final)
        flush_folder(final.parent)
        (self.run_dir / SAVED_MARKER).touch()
        self.damaged.discard(final)
        if not manifest["skipped_in_a_row"]:
            older = [folder for folder in checkpoints_of(self.run_dir) if step_of(folder) <= step_of(final)]
            oldest_kept = [folder for folder in older if folder not in self.damaged][:self.keep_last][-1]
            for folder in older[older.index(oldest_kept) + 1:]:
                delete_checkpoint(folder)


def write_single_process(tensors: dict, folder: Path):
    """Write {name: tensor} in a process without a process group. Each tensor gets its own file, because torch's writer
    keeps the tensors of a file in memory until the file is complete."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                        # dcp warns that there is no process group
        dcp.save(tensors, storage_writer=writer, planner=NoCopyPlanner(), no_dist=True)
