"""Which of torch's kernels computes dense attention."""

from typing import Any, Literal

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

DenseKernel = Literal["auto", "flash", "cudnn", "efficient", "math"]

DENSE_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def called_with(dense_kernel: DenseKernel, module: nn.Module, *arguments: Any, **named: Any) -> Any:
    """A module's output; made to be compiled with it.

    The graph then asks for its kernel itself: one that is traced where a kernel is in use keeps that, and would be
    taken for others, too, from torch's caches as well.
    """
    if dense_kernel == "auto":
        return module(*arguments, **named)
    with sdpa_kernel(DENSE_KERNELS[dense_kernel]):
        return module(*arguments, **named)
