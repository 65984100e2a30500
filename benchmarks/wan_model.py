"""What one denoising step of Wan 2.1's transformer is given, and what of it moves with the order of tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.moving import Moving
from nearfield.cli.model_cases import ModelCase, Size


def make_tables(model: Any, device: torch.device) -> None:
    """The rotary table is not a weight: a model that was laid out without memory has none."""
    config = model.config
    rope: nn.Module = type(model.rope)(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
    model.rope = rope.to(device)


def inputs(
    case: ModelCase, model: Any, size: Size, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Arguments of one call, as the pipeline passes them: guidance makes two such calls in a step."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    config = model.config
    sides = [side * part for side, part in zip(size.grid, config.patch_size, strict=True)]
    return {
        "hidden_states": random(1, config.in_channels, *sides),
        "timestep": torch.full((1,), 500, device=device),
        "encoder_hidden_states": random(1, case.prompt, config.text_dim),
    }


def moving(model: Any, arguments: dict[str, Tensor], size: Size) -> Moving:
    """Hidden states and the rotary table enter; states that were normalised, in float32, leave."""
    latents, config = arguments["hidden_states"], model.config
    states = latents.new_ones(1, size.tokens, config.num_attention_heads * config.attention_head_dim)
    table = latents.new_ones(1, size.tokens, 1, config.attention_head_dim, dtype=torch.float32)
    return Moving([(states, 1), (table, 1), (table, 1)], states.float())
