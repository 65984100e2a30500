"""FLUX.1's transformer with random weights, made where it runs, and inputs of its shapes. Needs diffusers."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nearfield.bench.model_cases import ModelCase, Size


class MissingDiffusers(ImportError):
    """A model was asked for and diffusers cannot be imported."""


class TooLarge(Exception):
    """The weights would not fit."""


def require_diffusers() -> Any:
    """The class of the model, or an error with the remedy."""
    try:
        from diffusers import FluxTransformer2DModel
    except (
        ImportError,
        RuntimeError,
    ) as error:  # diffusers turns what its lazy imports raise into RuntimeError
        raise MissingDiffusers(
            f"`diffusers` must be installed to build the model; got {error}. "
            "Install it with `pip install 'nearfield[diffusers]'`."
        ) from None
    return FluxTransformer2DModel


def build(case: ModelCase, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on `device`. Its shapes are laid out first, without memory, so nothing is initialised twice."""
    make = require_diffusers()
    with torch.device("meta"), _default_dtype(dtype):
        model: nn.Module = make(**case.config)
    _require_memory(model, device)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    randomise(model)
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made in `dtype`: converting them afterwards, diffusers warns."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights that keep the size of what flows through, so that the output stays finite; no biases.

    The norms of queries and keys (the only ones with weights) are two: logits then vary by about four, and a token
    reads a few others rather than the mean of all, as in a trained model. A mistake in attention shows in the output.
    """
    generator = None
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            generator = generator or torch.Generator(parameter.device).manual_seed(seed)
            parameter.data.normal_(std=1 / math.sqrt(parameter.shape[1]), generator=generator)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 2.0)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _require_memory(model: nn.Module, device: torch.device) -> None:
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    if free is not None and needed > free:
        raise TooLarge(f"{needed / 2**30:.1f} GiB of weights, where {free / 2**30:.1f} GiB are free")


def _free_memory() -> int | None:
    """Bytes of memory that are free; None where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_AVPHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
        "encoder_hidden_states": random(1, case.text, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.full((1,), 0.5, device=device, dtype=dtype),
        "guidance": torch.full((1,), 3.5, device=device, dtype=torch.float32),
        "img_ids": _image_ids(size.grid, device, dtype),
        "txt_ids": torch.zeros(case.text, 3, device=device, dtype=dtype),
    }


def _image_ids(grid: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Row and column of every token, `[tokens, 3]`."""
    rows, columns = (torch.arange(side, device=device, dtype=dtype) for side in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.cat([torch.zeros_like(places[:, :1]), places], dim=1)
