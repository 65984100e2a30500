"""What is known about each model: a table. The code that uses it knows no model by name.

A new model is a new entry: where its attention layers are and in which order they run, where tokens enter and leave,
which arguments say how large the image is. Everything else follows.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from nearfield._checks import wrong_value
from nearfield.adapters.grids import GridReader
from nearfield.geometry import Geometry, Grid


class Located(NamedTuple):
    """The tokens of one call, in plain numbers.

    Args:
        images: the grids of all images, the one that is made first.
        text: tokens of the joint sequence that belong to no image.
        tail: those of them that follow the image even in layers that do not see the text (padding).
    """

    images: tuple[Grid, ...]
    text: int = 0
    tail: int = 0

    @property
    def num_image_tokens(self) -> int:
        return sum(math.prod(grid) for grid in self.images)

    def geometry(self, text_first: bool, sees_text: bool) -> Geometry:
        text = self.text if sees_text else self.tail
        return Geometry(self.images[0], text, text_first, references=self.images[1:])


class Arguments:
    """The arguments of a module's call, by name, however they were passed.

    Args:
        names: of the parameters of its `forward`, in order.
    """

    def __init__(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._names = names
        self.args, self.kwargs = list(args), dict(kwargs)

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        position = self._names.index(name)
        return self.args[position] if position < len(self.args) else default

    def set(self, name: str, value: Any) -> None:
        position = self._names.index(name)
        if name not in self.kwargs and position < len(self.args):
            self.args[position] = value
        else:
            self.kwargs[name] = value


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


Locate = Callable[[nn.Module, Arguments, GridReader], "Located | str"]
"""Finds the tokens of a call, or gives the reason why this call has to stay dense."""


@dataclass(frozen=True)
class Move:
    """Tokens that change their order at one place.

    Args:
        place: a module by its path in the region; "" is the region itself. In paths `*` is every child, `a|b` are two
            of them, and a number counts children, from the end if negative.
        what: an argument of the module, by name; or of its result: an index, or None for all of it.
        way: "enter" from raster order into the method's, or "leave" it.
        dim: the dimension of the tokens.
    """

    place: str
    what: str | int | None
    way: Literal["enter", "leave"] = "enter"
    dim: int = 1

    @property
    def is_argument(self) -> bool:
        return isinstance(self.what, str)


@dataclass(frozen=True)
class Spec:
    """The facts about one model class.

    Args:
        model: the name of the class.
        layers: attention modules whose tokens are those of the image, and perhaps text, in the order they run
            (patterns of paths in the region).
        moves: where tokens change their order.
        locate: how large the image is, and how long the text.
        processors: classes of attention processors that were tried.
        text_first: whether the text stands before the image in the joint sequence.
        image_only: those of `layers` that do not see the text.
        dense: the other attention modules, and why they stay as they are.
        region: the class of the modules that tokens enter and leave; the model itself if empty.
        regions: the parts of the model they are found in, in the order they run.
        sample: the argument whose first tensor has the batch and the device.
        conditioning: the argument of the model whose first tensor tells the calls of one step apart.
        refused: arguments that must be None, and why.
        attention_kwargs: the argument that is passed on to processors.
        size: the grid of a region for an image of so many pixels.
        text: tokens of text, where nothing else is known; 0 if no layer sees text.
        multiple: image and text are padded to multiples of it.
        takes_references: whether reference images may follow the image.
        can_split: whether image tokens may be split over ranks (nothing but attention mixes them; tried).
    """

    model: str
    layers: tuple[str, ...]
    moves: tuple[Move, ...]
    locate: Locate
    processors: tuple[str, ...]
    text_first: bool = True
    image_only: tuple[str, ...] = ()
    dense: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    region: str = ""
    regions: tuple[str, ...] = ()
    sample: str = "hidden_states"
    conditioning: str = "encoder_hidden_states"
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attention_kwargs: str = "joint_attention_kwargs"
    size: Callable[[nn.Module, str, int, int], Grid] = lambda model, region, height, width: (
        height // 16,
        width // 16,
    )
    text: int = 0
    multiple: int = 1
    takes_references: bool = False
    can_split: bool = False

    def padded(self, located: Located) -> Located:
        """Tokens without their padding, with it."""
        tail = -located.num_image_tokens % self.multiple
        return located._replace(text=tail + located.text + -located.text % self.multiple, tail=tail)


def find(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules at a path (see `Move.place`), by name. Children that are None are left out."""
    found = [("", module)]
    for piece in path.split(".") if path else []:
        found = [
            (f"{name}.{child}" if name else child, module)
            for name, parent in found
            for child, module in _children(parent, piece)
        ]
    return found


def _children(parent: nn.Module, piece: str) -> list[tuple[str, nn.Module]]:
    children = list(parent.named_children())
    if piece == "*":
        return children
    if piece.lstrip("-").isdigit() and children:
        return [children[int(piece)]]
    return [(name, child) for name, child in children if name in piece.split("|")]


# -- how large the image is ----------------------------------------------------------------------------------------


def _from_ids(module: nn.Module, arguments: Arguments, reader: GridReader) -> "Located | str":
    """Packed tokens: the grid is known from the values of `img_ids` alone."""
    text = arguments.get("encoder_hidden_states").shape[1]
    images = reader.read(arguments.get("img_ids"))
    return "`img_ids` describe no grid" if images is None else Located(images, text)


def _from_latent(module: nn.Module, arguments: Arguments, _: GridReader) -> Located:
    """A latent `[B, C, height, width]` that the model cuts into patches; its text is joined to the image."""
    return _patches(module, arguments)._replace(text=arguments.get("encoder_hidden_states").shape[1])


def _from_latent_alone(module: nn.Module, arguments: Arguments, _: GridReader) -> Located:
    """The same, but the text is read by cross-attention."""
    return _patches(module, arguments)


def _patches(module: Any, arguments: Arguments) -> Located:
    height, width = arguments.get("hidden_states").shape[-2:]
    patch = module.config.patch_size
    return Located(((height // patch, width // patch),))


def _from_feature_map(module: nn.Module, arguments: Arguments, _: GridReader) -> Located:
    """A feature map `[B, C, height, width]`, one token per pixel."""
    height, width = arguments.get("hidden_states").shape[-2:]
    return Located(((height, width),))


def _from_image_shapes(module: nn.Module, arguments: Arguments, _: GridReader) -> Located:
    """`img_shapes`: for each sample of the batch the (frames, height, width) of its images; all samples alike."""
    shapes = arguments.get("img_shapes")
    shapes = shapes[0] if isinstance(shapes, list) else shapes
    shapes = shapes if isinstance(shapes, list) else [shapes]
    images = tuple(_without_single_frame(tuple(shape)) for shape in shapes)
    return Located(images, arguments.get("encoder_hidden_states").shape[1])


def _from_list_of_latents(module: nn.Module, arguments: Arguments, _: GridReader) -> "Located | str":
    """A list of latents `[C, frames, height, width]`, and one of captions."""
    latents, captions = arguments.get("x"), arguments.get("cap_feats")
    if isinstance(latents[0], list):
        return "several images per sample"
    if any(latent.shape != latents[0].shape for latent in latents):
        return "images of different sizes in one batch"
    patch, frame_patch = arguments.get("patch_size", 2), arguments.get("f_patch_size", 1)
    frames, height, width = latents[0].shape[1:]
    grid = _without_single_frame((frames // frame_patch, height // patch, width // patch))
    return Located((grid,), max(len(caption) for caption in captions))


def _feature_map_size(model: Any, region: str, height: int, width: int) -> Grid:
    """A UNet works on every eighth pixel and halves its feature map, rounding up, after each block on its way down."""
    deepest = len(model.down_blocks) - 1
    way, _, rest = region.partition(".")
    block = int(rest.partition(".")[0]) if way != "mid_block" else 0
    halvings = {"down_blocks": block, "mid_block": deepest, "up_blocks": deepest - block}[way]
    return -(-(height // 8) // 2**halvings), -(-(width // 8) // 2**halvings)


def _without_single_frame(shape: Grid) -> Grid:
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


# -- the table -----------------------------------------------------------------------------------------------------

# Tokens leave at the output of `norm_out`, not of `proj_out` behind it: a LoRA may put another module in the place of
# a linear layer, but not of a norm.
_LEAVE = Move("norm_out", None, "leave")

CROSS_ATTENTION = "cross-attention: its keys are few"

SPECS = (
    Spec(
        "FluxTransformer2DModel",
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        moves=(
            Move("", "hidden_states"),
            Move("", "img_ids", dim=-2),
            Move("", "controlnet_block_samples"),
            Move("", "controlnet_single_block_samples"),
            _LEAVE,
        ),
        locate=_from_ids,
        takes_references=True,
        can_split=True,
        processors=("FluxAttnProcessor",),
        text=512,
    ),
    Spec(
        "Flux2Transformer2DModel",
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        moves=(Move("", "hidden_states"), Move("", "img_ids", dim=-2), _LEAVE),
        locate=_from_ids,
        takes_references=True,
        can_split=True,
        processors=("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"),
        refused={"kv_cache_mode": "Cached reference images have no place in the order of the tokens."},
        text=512,
    ),
    Spec(
        "SD3Transformer2DModel",
        layers=("transformer_blocks.*.attn|attn2",),
        moves=(Move("pos_embed", None), Move("", "block_controlnet_hidden_states"), _LEAVE),
        locate=_from_latent,
        processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
        text_first=False,
        image_only=("transformer_blocks.*.attn2",),
        text=333,
    ),
    Spec(
        "PixArtTransformer2DModel",
        layers=("transformer_blocks.*.attn1",),
        moves=(Move("pos_embed", None), _LEAVE),
        locate=_from_latent_alone,
        can_split=True,
        processors=("AttnProcessor2_0", "FusedAttnProcessor2_0"),
        dense={"transformer_blocks.*.attn2": CROSS_ATTENTION},
        refused={"attention_mask": "A mask of image tokens is in raster order."},
        attention_kwargs="cross_attention_kwargs",
    ),
    Spec(
        "QwenImageTransformer2DModel",
        layers=("transformer_blocks.*.attn",),
        moves=(
            Move("", "hidden_states"),
            Move("", "controlnet_block_samples"),
            Move("pos_embed", 0, dim=0),
            _LEAVE,
        ),
        locate=_from_image_shapes,
        takes_references=True,
        can_split=True,
        processors=("QwenDoubleStreamAttnProcessor2_0",),
        attention_kwargs="attention_kwargs",
        text=256,
    ),
    Spec(
        "ZImageTransformer2DModel",
        layers=("noise_refiner.*.attention", "layers.*.attention"),
        moves=(
            Move("noise_refiner.0", "x"),
            Move("noise_refiner.*", "freqs_cis"),
            Move("layers.*", "freqs_cis"),
            Move("", "controlnet_block_samples"),
            Move("all_final_layer.*", None, "leave"),
        ),
        locate=_from_list_of_latents,
        processors=("ZSingleStreamAttnProcessor",),
        text_first=False,
        image_only=("noise_refiner.*.attention",),
        dense={
            "context_refiner.*.attention": "reads text alone",
            "siglip_refiner.*.attention": "reads features of reference images alone",
        },
        sample="x",
        conditioning="cap_feats",
        text=128,
        multiple=32,
    ),
    Spec(
        "UNet2DConditionModel",
        layers=("transformer_blocks.*.attn1",),
        moves=(
            Move("transformer_blocks.0", "hidden_states"),
            Move("transformer_blocks.-1", None, "leave"),
        ),
        locate=_from_feature_map,
        processors=("AttnProcessor2_0", "FusedAttnProcessor2_0", "IPAdapterAttnProcessor2_0"),
        dense={"transformer_blocks.*.attn2": CROSS_ATTENTION},
        region="Transformer2DModel",
        regions=("down_blocks.*", "mid_block.*", "up_blocks.*"),
        refused={"attention_mask": "A mask of image tokens is in raster order."},
        attention_kwargs="cross_attention_kwargs",
        size=_feature_map_size,
    ),
)


def spec_of(model: nn.Module) -> Spec | None:
    names = {cls.__name__ for cls in type(model).__mro__}
    return next((spec for spec in SPECS if spec.model in names), None)


def first_tensor(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def check_arguments(spec: Spec, arguments: Arguments) -> None:
    """Refuses what would be read in the wrong order, or not at all."""
    for name, reason in spec.refused.items():
        if arguments.get(name) is not None:
            wrong_value(name, "be None under nearfield", type(arguments.get(name)).__name__, reason)
    unknown = sorted(set(arguments.get(spec.attention_kwargs) or {}) - {"scale"})
    if unknown:
        hint = "What processors are told about tokens would be in raster order."
        wrong_value(spec.attention_kwargs, "hold `scale` at most under nearfield", ", ".join(unknown), hint)


def check_count(spec: Spec, arguments: Arguments, located: Located) -> None:
    """Packed tokens must be as many as the grids hold."""
    packed = next(
        (move.what for move in spec.moves if move.place == "" and move.what == "hidden_states"), None
    )
    if packed is None:
        return
    got = first_tensor(arguments.get("hidden_states")).shape[1]
    if got != located.num_image_tokens:
        images = " + ".join("x".join(map(str, grid)) for grid in located.images)
        wrong_value("hidden_states", f"hold the {located.num_image_tokens} tokens of {images}", got)
