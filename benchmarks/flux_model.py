"""What one denoising step of FLUX.1's transformer is given, and what of it moves with the order of tokens."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.moving import Moving
from nearfield.cli.model_cases import ModelCase, Size


def inputs(
    case: ModelCase, model: Any, size: Size, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Arguments of one denoising step, as the pipeline passes them."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    config = model.config
    return {
        "hidden_states": random(1, size.tokens, config.in_channels),
        "encoder_hidden_states": random(1, case.prompt, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.full((1,), 0.5, device=device, dtype=dtype),
        "guidance": torch.full((1,), 3.5, device=device, dtype=torch.float32),
        "img_ids": _image_ids(size.grid, device, dtype),
        "txt_ids": torch.zeros(case.prompt, 3, device=device, dtype=dtype),
    }


def moving(model: Any, arguments: dict[str, Tensor], size: Size) -> Moving:
    """Latents and their places enter; hidden states leave, before the output."""
    latents, places = arguments["hidden_states"], arguments["img_ids"]
    width = model.config.num_attention_heads * model.config.attention_head_dim
    return Moving([(latents, 1), (places, 0)], latents.new_ones(1, size.tokens, width))


def _image_ids(grid: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Row and column of every token, `[tokens, 3]`."""
    rows, columns = (torch.arange(side, device=device, dtype=dtype) for side in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.cat([torch.zeros_like(places[:, :1]), places], dim=1)
