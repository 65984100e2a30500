"""Where a command runs: its device, and the mesh of the ranks that torchrun has started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nearfield.cli import device_of


def num_ranks() -> int:
    """How many ranks run this command; 1 where nobody else does."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def chosen_device(name: str | None) -> torch.device:
    """The device that was named; under torchrun each rank's own GPU."""
    if num_ranks() > 1 and device_of(name).type == "cuda" and name in (None, "cuda"):
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device_of(name)


@contextmanager
def mesh_of_ranks(device: torch.device) -> Iterator[DeviceMesh | None]:
    """All ranks as a mesh of one dimension, each on its device; None where there is one rank alone."""
    if num_ranks() == 1:
        yield None
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_mine = not dist.is_initialized()
    if is_mine:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield init_device_mesh(device.type, (dist.get_world_size(),))
    finally:
        if is_mine:
            dist.destroy_process_group()
