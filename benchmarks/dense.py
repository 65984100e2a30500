"""Dense attention as torch has it, and tensors to call it with: what sparse attention is compared with."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nearfield.cli.check import Inputs
from nearfield.cli.presets import Preset

_CUDA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Dense = dict[str, Callable[[Inputs], Tensor]]


def random_inputs(preset: Preset, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    query, key, value = (
        torch.randn(preset.shape, generator=generator, device=device, dtype=dtype) for _ in range(3)
    )
    return query, key, value


def dense_attention(device: torch.device) -> Dense:
    """The dense implementations a user has today, by name."""
    if device.type != "cuda":
        return {"sdpa": lambda inputs: scaled_dot_product_attention(*inputs)}

    def under(backend: SDPBackend) -> Callable[[Inputs], Tensor]:
        def dense(inputs: Inputs) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs)

        return dense

    return {name: under(backend) for name, backend in _CUDA_BACKENDS.items()}
