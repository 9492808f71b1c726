"""Answers in one place which kind of device a piece of code runs for: "cpu" or "cuda".

Tensors on torch's meta device have shapes but no numbers. dry_run/ trains on them, and says with `standing_for` which
kind of device they stand for. So a machine without GPUs can run the code paths of a GPU.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StandIn:
    """Describes the device that meta tensors stand for."""
    kind: str = "cpu"
    streams: object = None                   # has Stream, stream and current_stream, like torch.cuda
    capability: tuple[int, int] = (9, 0)     # the compute capability: an H100's


STAND_IN = ContextVar("the device that meta tensors stand for", default=StandIn())      # noqa: B039, it is frozen


@contextmanager
def standing_for(stand_in: StandIn):
    """Let meta tensors stand for the device that stand_in describes."""
    token = STAND_IN.set(stand_in)
    try:
        yield
    finally:
        STAND_IN.reset(token)


def kind_of(device: torch.device) -> str:
    """Return "cpu" or "cuda"."""
    return STAND_IN.get().kind if device.type == "meta" else device.type


def on_gpu(tensor) -> bool:
    """Return whether a tensor is in a GPU's memory, or stands for one that is."""
    return tensor.is_cuda or tensor.is_meta and STAND_IN.get().kind == "cuda"


def streams_of(device: torch.device):
    """Return torch.cuda, or what replaces its streams on the meta device."""
    return STAND_IN.get().streams if device.type == "meta" else torch.cuda


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or of the StandIn for meta tensors and on machines without GPUs."""
    stands_in = device.type == "meta" or not torch.cuda.is_available()
    return STAND_IN.get().capability if stands_in else torch.cuda.get_device_capability(device)


def has_flash_attention(device: torch.device) -> bool:
    """Return whether torch's flash attention runs on this device: on GPUs from Ampere on."""
    return (kind_of(device) == "cuda" and capability_of(device) >= (8, 0)
            and (device.type == "meta" or torch.backends.cuda.is_flash_attention_available()))
