"""A diffusers transformer with random weights, made where it runs. Needs diffusers."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks import wan_model
from nearfield.cli.model_cases import ModelCase


class MissingDiffusers(ImportError):
    """A model was asked for and diffusers cannot be imported."""


class TooLarge(Exception):
    """The weights would not fit."""


def require_diffusers(name: str) -> Any:
    """The class of the model, or an error with the remedy."""
    try:
        import diffusers

        return getattr(diffusers, name)
    except (
        ImportError,
        RuntimeError,
    ) as error:  # diffusers turns what its lazy imports raise into RuntimeError
        raise MissingDiffusers(
            f"`diffusers` must be installed to build the model; got {error}. "
            "Install it with `pip install 'nearfield[diffusers]'`."
        ) from None


def build(case: ModelCase, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on `device`. Its shapes are laid out first, without memory, so nothing is initialised twice."""
    make = require_diffusers(case.architecture.class_name)
    with torch.device("meta"), _default_dtype(dtype):
        model: nn.Module = make(**case.config)
    _widen(model)
    _require_memory(model, device)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    if case.architecture.is_video:
        wan_model.make_tables(model, device)
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


def _widen(model: nn.Module) -> None:
    """Parts that diffusers leaves in float32 when it loads weights in half precision."""
    wide = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if wide & set(name.split(".")):
            parameter.data = parameter.data.float()


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights that keep the size of what flows through, so that the output stays finite; no biases.

    The norms of queries and keys are two: logits then vary by about four, and a token reads a few others rather than
    the mean of all, as in a trained model. A mistake in attention shows in the output.
    """
    generator = None
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            generator = generator or torch.Generator(parameter.device).manual_seed(seed)
            parameter.data.normal_(std=1 / math.sqrt(parameter[0].numel()), generator=generator)
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
