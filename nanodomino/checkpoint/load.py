import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp

from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.checkpoint.safe_load import CarefulReader
from nanodomino.checkpoint.shards import Pieces, named_pieces
from nanodomino.errors import UserError, require
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer


def restore(folder: Path, model: GPT, optimizer: ZeroOptimizer, mesh: Mesh, weights_alone=False) -> int:
    """Fill the model and the optimizer of any layout from a checkpoint; returns its step. Each rank reads what it owns,
    straight into its place; then the replicas gather the weights. All ranks call it together.
    weights_alone: a new optimizer at step 0, which has seen nothing yet."""
    manifest = read_manifest(folder)
    if not weights_alone:
        optimizer.updates, optimizer.skipped_in_a_row = manifest["adam_steps"], manifest["skipped_in_a_row"]
        optimizer.loss_scale.restore(manifest["loss_scale"])
    parts = optimizer.state_names if optimizer.updates else ("weight",)
    own = [(bucket, part, bucket.own_offset, optimizer.allocate_own_state(bucket, part))
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
