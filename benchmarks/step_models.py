"""Real architectures with random weights, built where they will run, and what one denoising step of each is given."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearfield import Geometry, Ordering
from nearfield.cli import UsageError
from nearfield.diffusers import step_arguments

PIXELS_PER_TOKEN = 16
FRAMES_PER_TOKEN = 4
NAMED_SIZES = {"480p": (480, 832), "720p": (720, 1280)}
Arguments = dict[str, Any]


class TooLarge(NotImplementedError):
    """The weights would not fit."""


class Moving(NamedTuple):
    """What of a step is moved with the order of tokens: tensors that enter, each with its dimension of tokens, and the
    one that leaves."""

    entering: list[tuple[Tensor, int]]
    leaving: Tensor

    def by(self, ordering: Ordering) -> list[Tensor]:
        return [*(ordering.enter(tensor, dim) for tensor, dim in self.entering), ordering.leave(self.leaving)]


@dataclass(frozen=True)
class Size:
    """One image or video: pixels, frames, and the grid of tokens they make."""

    height: int
    width: int
    frames: int = 1

    @property
    def grid(self) -> tuple[int, ...]:
        sides = self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN
        return sides if self.frames == 1 else ((self.frames - 1) // FRAMES_PER_TOKEN + 1, *sides)

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    def __str__(self) -> str:
        sides = self.height, self.width
        if self.frames > 1:
            names = (name for name, pixels in NAMED_SIZES.items() if pixels == sides)
            return f"{next(names, f'{self.height}x{self.width}')}, {self.frames} frames"
        return str(self.height) if self.height == self.width else f"{self.height}x{self.width}"


def read_sides(text: str) -> tuple[int, int]:
    """`1024` or `768x1344`, in whole tokens, or a name: `480p`. Raises ValueError."""
    sides = [int(side) if side.isdecimal() and len(side) < 6 else 0 for side in str(text).lower().split("x")]
    if text in NAMED_SIZES:
        return NAMED_SIZES[text]
    if len(sides) > 2 or any(side < PIXELS_PER_TOKEN or side % PIXELS_PER_TOKEN for side in sides):
        rule = f"be pixels, or height x width, in multiples of {PIXELS_PER_TOKEN}"
        raise ValueError(f"`size` must {rule}; got {text!r}. Example: 768x1344")
    return sides[0], sides[-1]


@dataclass(frozen=True)
class Architecture:
    """What decides the shapes of a model.

    Args:
        class_name: in diffusers.
        fields, tiny_fields: arguments of that class; of a few narrow layers.
        layers, tiny_layers: the arguments that count blocks of each kind.
        joins_text: whether text stands in one sequence with the image; otherwise it is read by cross-attention.
        frames, tiny_frames: of a video; 1 for images.
        moving: what of a call's arguments moves with the order of tokens.
        prompt, tiny_prompt: tokens of text that a step is given.
    """

    class_name: str
    fields: Mapping[str, Any]
    tiny_fields: Mapping[str, Any]
    layers: Mapping[str, int]
    tiny_layers: Mapping[str, int]
    joins_text: bool
    moving: "Callable[[Built, Arguments, Size], Moving]"
    frames: int = 1
    tiny_frames: int = 1
    prompt: int = 512
    tiny_prompt: int = 32


class Built:
    """An architecture as it was asked for, with its model.

    Args:
        layers: blocks of each kind; None for those of the model.
        tiny: a few narrow layers instead of the real width.
    """

    def __init__(
        self, name: str, layers: tuple[int, ...] | None, tiny: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.architecture = known = architecture(name)
        self.name, self.tiny, self.device, self.dtype = name, tiny, device, dtype
        usual = known.tiny_layers if tiny else known.layers
        counts = tuple(usual.values()) if layers is None else layers
        if len(counts) != len(usual):
            raise ValueError(f"`layers` must be {len(usual)} numbers of blocks; got {list(counts)}.")
        self.blocks = counts
        fields = known.tiny_fields if tiny else known.fields
        self.config_given = dict(fields) | dict(zip(usual, counts, strict=True))
        self.prompt = known.tiny_prompt if tiny else known.prompt
        self.text = self.prompt if known.joins_text else 0
        self.model: Any = build(known.class_name, self.config_given, device, dtype)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def is_video(self) -> bool:
        return self.architecture.frames > 1

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def size(self, text: str) -> Size:
        return Size(
            *read_sides(text), self.architecture.tiny_frames if self.tiny else self.architecture.frames
        )

    def geometry(self, size: Size) -> Geometry:
        return Geometry(size.grid, text=self.text)

    def arguments(self, size: Size) -> Arguments:
        """Arguments of one call, as the pipeline passes them; guidance makes two such calls in a step."""
        pixels = size.height, size.width, size.frames
        return step_arguments(self.model, pixels, self.prompt, self.device)

    def moving(self, arguments: Arguments, size: Size) -> Moving:
        return self.architecture.moving(self, arguments, size)


# -- architectures -----------------------------------------------------------------------------------------------------


def _flux_moving(built: Built, arguments: Arguments, size: Size) -> Moving:
    """Latents and their places enter; hidden states leave, before the output."""
    latents, places = arguments["hidden_states"], arguments["img_ids"]
    width = built.config.num_attention_heads * built.config.attention_head_dim
    return Moving([(latents, 1), (places, 0)], latents.new_ones(1, size.tokens, width))


def _wan_moving(built: Built, arguments: Arguments, size: Size) -> Moving:
    """Hidden states and the rotary table enter; states that were normalised, in float32, leave."""
    latents, config = arguments["hidden_states"], built.config
    states = latents.new_ones(1, size.tokens, config.num_attention_heads * config.attention_head_dim)
    table = latents.new_ones(1, size.tokens, 1, config.attention_head_dim, dtype=torch.float32)
    return Moving([(states, 1), (table, 1), (table, 1)], states.float())


ARCHITECTURES = {
    "flux1": Architecture(
        "FluxTransformer2DModel",
        fields={"guidance_embeds": True},
        tiny_fields={
            "guidance_embeds": True,
            "in_channels": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "axes_dims_rope": (8, 12, 12),
        },
        layers={"num_layers": 19, "num_single_layers": 38},
        tiny_layers={"num_layers": 2, "num_single_layers": 3},
        joins_text=True,
        moving=_flux_moving,
    ),
    "wan21-1.3b": Architecture(
        "WanTransformer3DModel",
        fields={"num_attention_heads": 12, "ffn_dim": 8960},
        tiny_fields={"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 96, "text_dim": 32},
        layers={"num_layers": 30},
        tiny_layers={"num_layers": 2},
        joins_text=False,
        moving=_wan_moving,
        frames=81,
        tiny_frames=9,
    ),
}


def architecture(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise ValueError(f"`model` must be one of {', '.join(ARCHITECTURES)}; got {name!r}.")
    return ARCHITECTURES[name]


# -- random weights ----------------------------------------------------------------------------------------------------


def require_diffusers(name: str) -> Any:
    """The class of the model, or an error with the remedy."""
    try:
        import diffusers

        return getattr(diffusers, name)
    except (
        ImportError,
        RuntimeError,
    ) as error:  # diffusers turns what its lazy imports raise into RuntimeError
        raise UsageError(
            f"`diffusers` must be installed to build the model; got {error}. "
            "Install it with `pip install 'nearfield[diffusers]'`."
        ) from None


def build(class_name: str, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on `device`. Its shapes are laid out first, without memory, so nothing is initialised twice."""
    make = require_diffusers(class_name)
    with torch.device("meta"), _default_dtype(dtype):
        model: nn.Module = make(**config)
    _widen(model)
    _require_memory(model, device)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    _make_tables(model, device)
    randomise(model)
    return model


def _make_tables(model: Any, device: torch.device) -> None:
    """Wan's rotary table is no weight: a model that was laid out without memory has none."""
    if hasattr(model, "rope"):
        config = model.config
        rope: nn.Module = type(model.rope)(
            config.attention_head_dim, config.patch_size, config.rope_max_seq_len
        )
        model.rope = rope.to(device)


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
