"""Commands that torchrun has started on several ranks at once: the mesh they form."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def num_ranks() -> int:
    """How many ranks run this command; 1 where nobody else does."""
    import torch.distributed as dist

    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def local_rank() -> int:
    """The number of this rank on its machine: which GPU is its own."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def mesh_of_ranks(device: "torch.device") -> Iterator["DeviceMesh | None"]:
    """All ranks as a mesh of one dimension, each on its device; None where there is but one rank."""
    if num_ranks() == 1:
        yield None
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

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
