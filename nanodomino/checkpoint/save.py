"""Saves checkpoints in the background. Each rank writes its share, and renaming the folder completes the checkpoint.

**Each rank writes its share.** Ranks that hold the same values share the work (range_to_save). So a share, the host
memory for it and the time that training waits for the copy all fall as 1/dp.

**In the background.** Training waits only for the copy to host memory. Then a thread on each rank writes the copy. The
thread has its own process group, so that its collectives can't mix with training's. It makes no CUDA calls: they would
wait for training's kernels, and on every rank they would allocate memory on GPU 0, the default device of a new thread.

    training    ... step 100 | copy | step 101 | step 102 | step 103 ...
    thread                          | write tensors, flush | manifest, flush | rename | delete old checkpoints

**Complete or absent.** Files are written to .step-00000100.unfinished and flushed to the disk. Then rank 0 renames this
folder to step-00000100. Renaming is atomic. So whenever a process is killed, each folder named step-... is complete.
"""

import dataclasses
import os
import threading
import weakref
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nanodomino.checkpoint.format import FORMAT, SUFFIX, local_boxes, step_of, write_boxes, write_manifest
from nanodomino.checkpoint.load import checkpoints_of, together
from nanodomino.comm.world import TIMEOUT
from nanodomino.errors import counted
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


def allocate_copies(optimizer: ZeroOptimizer, mesh: Mesh) -> dict:
    """Return {(bucket, state): zeros} in the host's memory for this rank's share, parts of one buffer. For a GPU, CUDA
    pins the buffer as it is: torch's allocator of pinned memory would round its size up to a power of two."""
    sizes, end = {}, 0
    for bucket in optimizer.buckets:
        first, last = range_to_save(bucket, mesh)
        for state in optimizer.states_of(bucket):
            begin = -(-end // 8) * 8                           # a multiple of each type's size
            end = begin + (last - first) * bucket.own_grad.dtype.itemsize
            sizes[bucket, state] = slice(begin, end)
    buffer = torch.zeros(end, dtype=torch.uint8)
    if mesh.device.type == "cuda" and end:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), end, 0))
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr())
    return {(bucket, state): buffer[place].view(bucket.own_grad.dtype) for (bucket, state), place in sizes.items()}


def copy_to_host(optimizer: ZeroOptimizer, mesh: Mesh, copies: dict):
    """Copy this rank's share to host memory, copies[bucket, state], which the first call allocates. Waits for the copy,
    because the writing thread makes no CUDA calls."""
    if not copies:
        copies.update(allocate_copies(optimizer, mesh))
    for bucket in optimizer.buckets:
        start, end = range_to_save(bucket, mesh)
        for state in optimizer.states_of(bucket):
            if (own := optimizer.own_state(bucket, state)) is not None:        # no moments before the first update
                copies[bucket, state].copy_(own[start - bucket.own_offset:][:end - start], non_blocking=True)
    if mesh.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def drift_warning(model: GPT, mesh: Mesh) -> str:
    """Return a warning that names parameters whose copies differ in a bit; "" if all copies are equal. All ranks must
    call this together, and get the same text.

    Every parameter has a copy on each replica (dp), an expert only on replicas that hold it. A parameter that is not
    sharded has a copy on each tensor-parallel rank too, a tied embedding one on the first and one on the last stage.
    With ZeRO, the copies over dp are equal by construction, because one owner updates each part and all-gathers it. All
    other copies stay equal only if kernels are deterministic, because each rank computes the gradient itself. No loss
    shows a difference."""
    own = {(name, *(mesh.axis(axis)[1] for axis in weight.spec.kind.shards)): torch.hash_tensor(weight.detach()).item()
           for name, weight in model.named_parameters()}       # {(name, shard): hash}
    everyone, found = [None] * dist.get_world_size(), defaultdict(set)
    dist.all_gather_object(everyone, own)
    for copy, value in (item for hashes in everyone for item in hashes.items()):
        found[copy].add(value)
    drifted = sorted({name for (name, *_), hashes in found.items() if len(hashes) > 1})
    return (f"copies of {counted(len(drifted), 'parameter')} have drifted apart ({', '.join(drifted[:3])}), so the "
            "ranks train slightly different models; a run resumed from this checkpoint has equal copies again; try "
            "--deterministic-mode or --no-compile") if drifted else ""


class Saver:
    """Writes the checkpoints of a run, one at a time, on a thread of each rank."""

    def __init__(self, run_dir: Path, mesh: Mesh, keep_last: int, timeout: int = TIMEOUT):
        self.run_dir, self.mesh, self.keep_last = run_dir, mesh, keep_last
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.thread, self.error = None, None
        self.copies = {}                   # allocated once, because the first use of new memory is slow

    def save(self, step: int, model: GPT, optimizer: ZeroOptimizer, config: Config):
        """Copy this rank's share to host memory and start writing it. Waits for the previous save first."""
        self.wait()
        copy_to_host(optimizer, self.mesh, self.copies)
        boxes = [box for (bucket, state), values in self.copies.items()
                 for box in local_boxes(model, bucket, state, range_to_save(bucket, self.mesh)[0], values)]
        manifest = dict(format=FORMAT, step=step, adam_steps=optimizer.updates,
                        skipped_in_a_row=optimizer.skipped_in_a_row, loss_scale=optimizer.loss_scale.state(),
                        config=dataclasses.asdict(config))
        self.thread = threading.Thread(target=self.write, args=(step, boxes, manifest))
        self.thread.start()

    def wait(self):
        """Wait until the last save has succeeded or failed."""
        if self.thread:
            self.thread.join()

    def failure(self) -> str | None:
        """Return the error message if a save has failed since the last call, else None."""
        error, self.error = self.error, None
        return error

    def write(self, step: int, boxes: list[tuple], manifest: dict):
        """Write this rank's boxes; rank 0 completes the checkpoint. Keep any rank's error for failure()."""
        parent, rank, digests = self.run_dir / "checkpoints", dist.get_rank(), [None] * dist.get_world_size()
        temporary, final = parent / f".step-{step:08d}.unfinished", parent / f"step-{step:08d}"
        file = f"rank-{rank:05d}{SUFFIX}"
        try:
            digest = together(lambda: write_boxes(temporary / file, boxes), self.group)
            dist.all_gather_object(digests, (file, digest), group=self.group)
            together(lambda: rank == 0 and self.complete(temporary, final, manifest, dict(digests)), self.group)
        except Exception as error:                             # for example, another rank has died
            self.error = f"the checkpoint of step {step} could not be written: {error}"
        if rank == 0:
            delete(temporary)                                  # after an error: otherwise a full disk would stay full

    def complete(self, temporary: Path, final: Path, manifest: dict, digests: dict[str, str]):
        """Write the manifest, rename the folder, then delete old checkpoints. If the latest steps were skipped, none is
        deleted, because the run may have to restart from an older one."""
        write_manifest(temporary, manifest, digests, "--run-dir must lie on a disk that all hosts share")
        if os.path.lexists(final):                             # the run went back and has reached this step again
            delete_checkpoint(final)
        temporary.rename(final)
        # Those of later steps are damaged: otherwise the run would have started from one of them.
        older = [folder for folder in checkpoints_of(self.run_dir) if step_of(folder) < step_of(final)]
        for folder in older[self.keep_last - 1:] if not manifest["skipped_in_a_row"] else ():
            delete_checkpoint(folder)


def delete_checkpoint(folder: Path):
    """Rename a checkpoint, then delete it, so that a half-deleted folder never looks like a checkpoint."""
    delete(folder.rename(folder.with_name(f".{folder.name}.discarded")))


def clear_leftovers(run_dir: Path):
    """Delete the hidden folders that killed processes left; otherwise a full disk would stay full."""
    for folder in (run_dir / "checkpoints").glob(".step-*.*"):
        delete(folder)
