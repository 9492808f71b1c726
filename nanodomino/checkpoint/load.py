"""Fills a model and an optimizer of any layout from a checkpoint.

Each rank reads only the values that it owns, directly into its flat buffers. With ZeRO it owns 1/dp of the parameters
that it holds. Then the replicas all-gather the weights, exactly as after each step.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.checkpoint.safe_load import SafeReader
from nanodomino.checkpoint.shards import BucketRange, LocalBoxes, local_boxes
from nanodomino.errors import UserError, require
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer


def restore(folder: Path, model: GPT, optimizer: ZeroOptimizer, mesh: Mesh, weights_only=False) -> int:
    """Fill the model and the optimizer, and return the checkpoint's step. All ranks must call this together.
    weights_only: load no optimizer state and no counters, and return step 0. Raises UserError."""
    manifest = read_manifest(folder)
    if not weights_only:
        optimizer.updates, optimizer.skipped_in_a_row = manifest["adam_steps"], manifest["skipped_in_a_row"]
        optimizer.loss_scale.restore(manifest["loss_scale"])
    states = optimizer.state_names if optimizer.updates else ("weight",)
    own = [BucketRange(bucket, state, bucket.own_offset, optimizer.allocate_own_state(bucket, state))
           for bucket in optimizer.buckets for state in states]
    read_tensors(local_boxes(model, mesh, own), SafeReader(folder))
    optimizer.gather_weights()
    return 0 if weights_only else manifest["step"]


def load_weights(folder: Path, model: GPT, mesh: Mesh):
    """Fill a model of any layout, without an optimizer. Raises UserError."""
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight.{name}"] = LocalBoxes.of(weight, mesh)
        tensors[f"weight.{name}"].add(weight.detach().view(-1))
    read_tensors(tensors, SafeReader(folder))


def read_tensors(tensors: dict, reader: SafeReader, single_process=False):
    """Fill the tensors of {name: tensor} from a checkpoint. All ranks must call this together, or a single process that
    has no process group. Raises UserError: dcp.load's own error would print a traceback per rank."""
    known = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        require(name in known and known[name].size == tensor.size(),
                f"{reader.path} lacks {name} of shape {tuple(tensor.size())}; use another checkpoint")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                    # dcp warns that there is no process group
            dcp.load(tensors, storage_reader=reader, no_dist=single_process)
    except dcp.CheckpointException as error:                   # on all ranks, if a file has the right checksum but
        rank, (first, _) = next(iter(error.failures.items()))  # not the tensors that the index lists
        raise UserError(f"{reader.path} does not hold what its index says (rank {rank}: {type(first).__name__}: "
                        f"{str(first).splitlines()[0] if str(first) else ''}); use another checkpoint") from None


def read_full_tensor(name: str, shape, reader: SafeReader) -> torch.Tensor:
    """Read one full tensor, in its stored dtype, in a process without a process group. Raises UserError."""
    entry = reader.read_metadata().state_dict_metadata.get(name)
    tensor = torch.empty(shape, dtype=entry and entry.properties.dtype)
    read_tensors({name: tensor}, reader, single_process=True)
    return tensor
