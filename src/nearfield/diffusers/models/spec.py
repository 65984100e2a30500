"""What is asked about a class of models: one `Spec`, which makes the class known once it is defined."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from nearfield._checks import wrong_value
from nearfield.layout import Grid
from nearfield.methods import Kind
from nearfield.session import TokenLayout

CROSS_ATTENTION = "cross-attention: its keys are few"
TOKENS = "hidden_states"
ROTARY = "image_rotary_emb"
TEXT_PROJECTIONS = (
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_added_qkv",
    "attn.to_add_out",
)
"""Modules of joint attention that see text alone."""


def without_single_frame(grid: Grid) -> Grid:
    """A video of one frame is an image."""
    return grid[1:] if len(grid) == 3 and grid[0] == 1 else grid


class Pixels(NamedTuple):
    """The size of an image, or of a video."""

    height: int
    width: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.height}x{self.width} pixels" + (f", {self.frames} frames" if self.frames > 1 else "")


class Arguments:
    """The arguments of a module's call, by name, however they were passed.

    Args:
        names: of the parameters of its `forward`, in order.
    """

    def __init__(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._names = names
        self.args, self.kwargs = list(args), dict(kwargs)

    def has(self, name: str) -> bool:
        """Whether the module takes such an argument: releases of diffusers differ."""
        return name in self._names

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        position = self._names.index(name)
        return self.args[position] if position < len(self.args) else default

    def set(self, name: str, value: Any) -> None:
        if name not in self.kwargs and self._names.index(name) < len(self.args):
            self.args[self._names.index(name)] = value
        else:
            self.kwargs[name] = value

    def change(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change an argument, if it is given."""
        value = self.get(name)
        if value is not None:
            self.set(name, change(value))

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with now, as a hook returns it."""
        return tuple(self.args), self.kwargs


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def patches(arguments: Arguments, patch: Grid) -> Grid:
    """The grid of a latent `[B, C, ..., height, width]` that a model cuts into patches."""
    sides = arguments.get("hidden_states").shape[-len(patch) :]
    return without_single_frame(tuple(side // part for side, part in zip(sides, patch, strict=True)))


def num_text(arguments: Arguments) -> int:
    """Tokens of the text that is joined to the image."""
    length: int = arguments.get("encoder_hidden_states").shape[1]
    return length


def latent_frames(frames: int, factor: int) -> int:
    """Frames of a latent video: the first frame stands for itself, later ones are put together."""
    return (frames - 1) // factor + 1


Locate = Callable[[nn.Module, Arguments], "TokenLayout | str"]
"""Finds the tokens of a call, or gives the reason why this call has to stay dense."""


@dataclass(frozen=True)
class Move:
    """Tokens that change their order at one place.

    Args:
        place: a module by its path in the region, as `session.find` knows paths; "" is the region itself.
        what: an argument of the module, by name; or of its result: an index, or None for all of it.
        way: "enter" from raster order into the method's, or "leave" it.
        dim: the dimension of the tokens. Where it has a single entry, that serves all tokens, and nothing is moved.
        num_dims: where a tensor has tokens in some calls only: how many dimensions it has then.
    """

    place: str
    what: str | int | None
    way: Literal["enter", "leave"] = "enter"
    dim: int = 1
    num_dims: int | None = None


class Rows(NamedTuple):
    """Rotary rows of text and image, as attention has them: `[tokens, head_dim]`, each value twice."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def as_they_are(cls, rotary: Any) -> "Rows":
        return cls(*rotary)


@dataclass(frozen=True)
class MergedBlocks:
    """Blocks of one kind that can run on merged tokens: they add to their argument `hidden_states` what they compute.

    Args:
        path: where they are (a pattern as in `Move.place`).
        kind: joint blocks keep text and image apart, single ones join them, plain ones see no text but by
            cross-attention.
        result: the index of the image tokens in what they return; None if that is all of it.
        holds_text: whether text and image stand in one tensor.
        rows: makes `Rows` of the argument `image_rotary_emb`; None if there is none.
        per_token: arguments `[B, tokens]` that say something about each image token.
        text_parts: modules inside that see text alone.
        once_parts: modules inside that see neither: they work once per sample.
        parts: modules inside that are merged one by one where that is asked for (`placement="module"`); none: the block
            as a whole, but for its `norm`.
        norm: where `parts` is empty, the module whose result is merged instead of its input.
    """

    path: str
    kind: Kind
    result: int | None = None
    holds_text: bool = False
    rows: Callable[[Any], Rows] | None = None
    per_token: tuple[str, ...] = ()
    text_parts: tuple[str, ...] = ()
    once_parts: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    norm: str | None = None


@dataclass(frozen=True)
class ComfyModel:
    """The same model in ComfyUI, where the text comes before the image and reference images come after it.

    Args:
        title: what users call it.
        kind: the name of ComfyUI's class.
        layers: modules that each make one attention call over the image's tokens, in the order they run (patterns).
        image_only: those of them that do not see the text.
    """

    title: str
    kind: str
    layers: tuple[str, ...]
    image_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """Everything that is known about one class of models. `define` makes it known to `apply`.

    Args:
        model: the name of the class.
        name: a short one, which the tests and the support matrix use.
        layers: attention modules whose tokens are those of the image, and perhaps text, in the order they run
            (patterns of paths in the region).
        moves: where tokens change their order.
        processors: classes of attention processors that were tried.
        locate: how large the image is, and how long the text.
        ids: for models without `locate`, the argument with position ids, whose values say how large the images are.
        text_first: whether the text stands before the image in the joint sequence.
        image_only: those of `layers` that do not see the text.
        dense: the other attention modules, and why they stay as they are.
        region: the class of the modules that tokens enter and leave; the model itself if empty.
        regions: the parts of the model they are found in, in the order they run.
        sample: the argument whose first tensor has the batch and the device.
        conditioning: the argument of the model whose first tensor tells the calls of one step apart.
        refused: arguments that must be None, and why.
        attention_kwargs: the argument that is passed on to processors.
        rotary: the argument of processors with rotary rows (cos, sin), `[tokens, head_dim]` and each value twice, by
            which they turn queries and keys just before these are read; empty if there is none, or of another kind.
        size: the grid of a region for an image of a size in pixels.
        images: the grids that the tokens of such a grid are treated as: usually itself.
        is_video: whether it makes several frames.
        text: tokens of text, where nothing else is known; 0 if no layer sees text.
        multiple: image and text are padded to multiples of it.
        takes_references: whether reference images may follow the image.
        can_split: whether image tokens may be split over ranks (nothing but attention mixes them; tried).
        blocks: the blocks that can run on merged tokens.
        comfy: the model in ComfyUI; None if it is not known there.
    """

    model: str
    layers: tuple[str, ...]
    moves: tuple[Move, ...]
    processors: tuple[str, ...]
    locate: Locate | None = None
    ids: str = ""
    name: str = ""
    text_first: bool = True
    image_only: tuple[str, ...] = ()
    dense: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    region: str = ""
    regions: tuple[str, ...] = ()
    sample: str = "hidden_states"
    conditioning: str = "encoder_hidden_states"
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attention_kwargs: str = "joint_attention_kwargs"
    rotary: str = ""
    size: Callable[[Any, str, Pixels], Grid] = lambda model, region, pixels: (
        pixels.height // 16,
        pixels.width // 16,
    )
    images: Callable[[Any, Grid], tuple[Grid, ...]] = lambda model, grid: (without_single_frame(grid),)
    is_video: bool = False
    text: int = 0
    multiple: int = 1
    takes_references: bool = False
    can_split: bool = False
    blocks: tuple[MergedBlocks, ...] = ()
    comfy: ComfyModel | None = None

    def __post_init__(self) -> None:
        if self.locate is None and not self.ids:
            hint = "One of them says how large the image is."
            wrong_value("locate", f"be given for {self.model} where `ids` is not", None, hint)

    def like(self, model: str, **changes: Any) -> "Spec":
        """The spec of a near relative: another class, of which some facts differ."""
        return replace(self, model=model, **{"name": "", "comfy": None} | changes)

    def padded(self, layout: TokenLayout) -> TokenLayout:
        """A layout without padding, with it."""
        padding = -layout.num_image_tokens % self.multiple
        text = padding + layout.text + -layout.text % self.multiple
        return layout._replace(text=text, num_padding=padding)


SPECS: dict[str, Spec] = {}
"""All that are defined, by the class of the model."""


def define(spec: Spec) -> Spec:
    """Make a class of models known."""
    SPECS[spec.model] = spec
    return spec


def all_specs() -> list[Spec]:
    """Models of images, then of videos."""
    return sorted(SPECS.values(), key=lambda spec: spec.is_video)


def classes_where(condition: Callable[[Spec], object]) -> str:
    """The classes of models whose specs meet a condition, for a message."""
    return ", ".join(spec.model for spec in all_specs() if condition(spec))


def spec_of(model: nn.Module) -> Spec | None:
    """The spec of a model's class, or of the nearest class that it derives from."""
    names = (kind.__name__ for kind in type(model).__mro__)
    return next((SPECS[name] for name in names if name in SPECS), None)


# Tokens leave at the output of `norm_out`, not of `proj_out` behind it: a LoRA may replace a linear layer, no norm.
LEAVE = Move("norm_out", None, "leave")


def first_tensor(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def check_arguments(spec: Spec, arguments: Arguments) -> None:
    """Refuses what would be read in the wrong order, or not at all."""
    for name, reason in spec.refused.items():
        if arguments.get(name) is not None:
            wrong_value(name, "be None under nearfield", type(arguments.get(name)).__name__, reason)
    given = arguments.get(spec.attention_kwargs) if arguments.has(spec.attention_kwargs) else None
    unknown = sorted(set(given or {}) - {"scale"})
    if unknown:
        hint = "What processors are told about tokens would be in raster order."
        wrong_value(spec.attention_kwargs, "hold `scale` at most under nearfield", ", ".join(unknown), hint)


def check_count(spec: Spec, arguments: Arguments, layout: TokenLayout) -> None:
    """Packed tokens must be as many as the grids hold."""
    packed = next(
        (move.what for move in spec.moves if move.place == "" and move.what == "hidden_states"), None
    )
    if packed is None:
        return
    got = first_tensor(arguments.get("hidden_states")).shape[1]
    if got != layout.num_image_tokens:
        images = " + ".join("x".join(map(str, grid)) for grid in layout.images)
        wrong_value("hidden_states", f"hold the {layout.num_image_tokens} tokens of {images}", got)
