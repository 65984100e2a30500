"""Why models may be slow on a machine, told from its facts, each with the remedy."""

import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from nearfield.cli import machine

_HOPPER = 9


def dense_backend(query: Tensor, key: Tensor, value: Tensor) -> str:
    """What torch would choose for dense attention: flash_attention, cudnn_attention, math ..."""
    return SDPBackend(torch._fused_sdp_choice(query, key, value)).name.lower()


def has_nvidia_gpu() -> bool:
    """Whether the driver sees a GPU, be torch able to use it or not."""
    return shutil.which("nvidia-smi") is not None and bool(machine.output("nvidia-smi", "-L"))


def reasons(facts: dict[str, Any], devices: dict[str, Any], has_gpu: bool) -> list[str]:
    """Sentences for people; none where nothing is known to be slow.

    Args:
        facts: as `machine.facts` gives them.
        devices: as `doctor.examine` does.
        has_gpu: whether the driver sees a GPU.
    """
    found = list(_of_gpus(facts, devices) if facts["gpus"] else _without_gpu(facts, has_gpu))
    cores, threads, load = facts["cpu"]["cores"], facts["cpu"]["threads"], facts["load"]
    if 2 * threads < cores:
        found.append(f"torch uses {threads} threads of {cores} cores: look at OMP_NUM_THREADS.")
    if load is not None and load > 1.5 * cores:
        found.append(f"The machine is busy, a load of {load:g} on {cores} cores: times say little.")
    return found


def _without_gpu(facts: dict[str, Any], has_gpu: bool) -> Iterator[str]:
    cuda = facts["versions"]["cuda"]
    if not has_gpu:
        yield "There is no GPU: everything runs on the CPU, which is for small sizes and a first look."
    elif cuda is None:
        yield "There is a GPU, but this torch was built without CUDA: install a build for CUDA."
    else:
        yield f"There is a GPU that torch, built for CUDA {cuda}, cannot use: the driver may be too old for it."


def _of_gpus(facts: dict[str, Any], devices: dict[str, Any]) -> Iterator[str]:
    if facts["versions"]["triton"] is None:
        yield "Triton is not installed, so there are no kernels: `pip install 'nearfield[triton]'`."
    for index, gpu in enumerate(facts["gpus"]):
        device = f"cuda:{index}"
        about, is_hopper = devices[device], int(gpu["capability"].split(".")[0]) == _HOPPER
        impl, others = about["forward"]["impl"], about["forward"]["others"]
        if is_hopper and impl != "gluon" and "gluon" in others:
            yield f"{device}: the kernel for Hopper does not run ({others['gluon']}); the plain ones are slower."
        if is_hopper and about["dense"] == "flash_attention":
            yield (
                f"{device}: torch's dense attention is FlashAttention-2, and cuDNN's was twice as fast on an H200. What"
                " stays dense gains from `torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)`."
            )
        if about["dense"] == "math":
            yield f"{device}: torch's dense attention is not fused here; what stays dense is slow, and takes memory."
    yield "In float32 kernels do without tensor cores: load models with `torch_dtype=torch.bfloat16`."
