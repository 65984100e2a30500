"""A model without its pipeline: opened from a folder or by its name, and random arguments for one call of it."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearfield._checks import wrong_value
from nearfield.diffusers.models.spec import Pixels, all_specs, parameter_names, spec_of

_PARTS = ("", "transformer", "unet")
"""Where a folder has the model: in itself, or in the part of a pipeline."""
_TEXT = 512
"""Tokens of text, where the model's spec knows no number."""
_WIDTHS = ("joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cross_attention_dim")
"""Fields of a configuration that say how wide tokens of text are; a model has one of them."""


class Opened(NamedTuple):
    """A model, and whether its weights are random because the folder has none."""

    model: Any
    has_random_weights: bool


def open_model(name: str, device: torch.device, dtype: torch.dtype) -> Opened:
    """The transformer or UNet of a diffusers pipeline, or such a model alone. Nothing else of a pipeline is loaded.

    A folder that holds a `config.json` and no weights gives a model with random ones.

    Args:
        name: a folder, or a name on the Hub.

    Raises:
        ImportError: diffusers is not installed.
        OSError: there is no such model.
        ValueError: it is no model that `apply` knows, or its configuration or weights do not fit.
    """
    import diffusers

    part, config = _configuration(diffusers.UNet2DConditionModel.load_config, name)
    class_name = config.get("_class_name") if isinstance(config, Mapping) else None
    kind: Any = getattr(diffusers, str(class_name), None)
    known = [spec.model for spec in all_specs()]
    if not isinstance(kind, type) or not set(known) & {cls.__name__ for cls in kind.__mro__}:
        wrong_value("model", f"be, or have, one of {', '.join(known)}", class_name)
    try:
        return _opened(kind, config, name, part, device, dtype)
    except TypeError as error:
        wrong_value("model", f"have a configuration that {class_name} takes", error)


def _opened(
    kind: Any, config: Mapping[str, Any], name: str, part: str, device: torch.device, dtype: torch.dtype
) -> Opened:
    folder = Path(name, part)
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        with torch.device(device), _default_dtype(dtype):
            made: nn.Module = kind.from_config(config)
        return Opened(made.eval().requires_grad_(False), True)
    with warnings.catch_warnings():
        # The name that the oldest supported diffusers knows.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        loaded: nn.Module = kind.from_pretrained(name, subfolder=part or None, torch_dtype=dtype)
    missing = [name for name, parameter in loaded.named_parameters() if parameter.is_meta]
    if missing:
        wrong_value("model", "have all its weights", f"none for {len(missing)}, such as {missing[0]}")
    return Opened(loaded.to(device).eval().requires_grad_(False), False)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Weights are made in `dtype`: of weights that are converted afterwards diffusers complains."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _configuration(load: Callable[..., Any], name: str) -> tuple[str, Mapping[str, Any]]:
    """The part of a pipeline that is the model, and its configuration."""
    failed: OSError | None = None
    is_folder = Path(name).is_dir()
    for part in _PARTS:
        if is_folder and not Path(name, part, "config.json").is_file():
            continue
        try:
            return part, load(name, subfolder=part or None)
        except OSError as error:
            if is_folder:
                raise  # it cannot be read, and the error says why
            failed = error
    why = "it has no config.json" if is_folder else "no folder, and no config.json came from the Hub"
    raise OSError(f"{name!r} is no model of diffusers: {why}") from failed


def step_arguments(
    model: Any,
    pixels: tuple[int, int, int],
    text: int | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Random arguments for one call of a model, as its pipeline passes them for one image.

    Args:
        pixels: height, width and frames.
        text: tokens of text; by default what is usual for the model.
        device: where the model runs; by default where its weights are.

    Raises:
        NotImplementedError: the model needs an argument that is not known here.
    """
    spec = spec_of(model)
    if spec is None:
        wrong_value(
            "model", f"be one of {', '.join(spec.model for spec in all_specs())}", type(model).__name__
        )
    device = device or next(model.parameters()).device
    makers = _Arguments(model, Pixels(*pixels), spec.text or _TEXT if text is None else text, device)
    names = parameter_names(model)
    signature = inspect.signature(type(model).forward).parameters
    needed = [name for name in names if signature[name].default is inspect.Parameter.empty]
    known = makers.known(names)
    unknown = [name for name in needed if name not in known and signature[name].kind.name != "VAR_KEYWORD"]
    if unknown:
        raise NotImplementedError(
            f"{type(model).__name__} needs {', '.join(unknown)}, which only its pipeline knows"
        )
    found = {name: make() for name, make in known.items() if name in names}
    return {name: value for name, value in found.items() if value is not None}


class _Arguments:
    """Makes arguments by their names, which mean the same in all models."""

    def __init__(self, model: Any, pixels: Pixels, text: int, device: torch.device) -> None:
        spec: Any = spec_of(model)
        self.config, self.pixels, self.text = model.config, pixels, text
        # A UNet has no grid of its own: each of its transformers has one.
        self.grid = () if spec.region else tuple(spec.size(model, "", pixels))
        self.like: dict[str, Any] = {"device": device, "dtype": model.dtype}
        self.generator = torch.Generator(device).manual_seed(1)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, **self.like)

    def full(self, *shape: int, value: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, value, **(self.like if dtype is None else self.like | {"dtype": dtype}))

    def known(self, names: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
        """What makes each argument; None is what a model does not want."""
        config = self.config
        is_packed = bool({"img_ids", "img_shapes", "num_frames"} & set(names))
        sides = dict(zip(("num_frames", "height", "width"), self.grid, strict=False))
        return {
            "hidden_states": self._tokens if is_packed else self._latent,
            "sample": self._latent,
            "x": lambda: [self._latent()[0].unflatten(0, (-1, 1))],
            "encoder_hidden_states": lambda: self.random(1, self.text, self._width()),
            "encoder_hidden_states_image": self._image_features,
            "cap_feats": lambda: [self.random(self.text, config.cap_feat_dim)],
            "encoder_attention_mask": lambda: self.full(1, self.text),
            "encoder_hidden_states_mask": lambda: self.full(1, self.text, dtype=torch.bool),
            "pooled_projections": lambda: self.random(1, config.pooled_projection_dim),
            "timestep": lambda: self.full(1, value=500.0, dtype=torch.float32),
            "t": lambda: self.full(1, value=0.5),
            "guidance": lambda: self.full(1, value=3.5) if config.get("guidance_embeds", True) else None,
            "img_ids": self._image_ids,
            "txt_ids": lambda: self.full(self.text, self._ids_width(), value=0.0),
            "img_shapes": lambda: [[(1, *self.grid)]],
            "added_cond_kwargs": self._conditions,
            **{name: partial(int, side) for name, side in sides.items()},
        }

    def _tokens(self) -> Tensor:
        return self.random(1, math.prod(self.grid), self.config.in_channels)

    def _latent(self) -> Tensor:
        """What the model cuts into patches by itself."""
        if not self.grid:
            return self.random(1, self.config.in_channels, self.pixels.height // 8, self.pixels.width // 8)
        patch = self.config.get("patch_size", 2)
        patch = self.config.get("all_patch_size", [patch])[0] if isinstance(patch, int) else patch
        sides = (self.config.get("patch_size_t", 1), patch, patch) if isinstance(patch, int) else tuple(patch)
        latent = (side * part for side, part in zip(self.grid, sides[-len(self.grid) :], strict=True))
        return self.random(1, self.config.in_channels, *latent)

    def _width(self) -> int:
        return int(next(width for name in _WIDTHS if (width := self.config.get(name)) is not None))

    def _image_features(self) -> Tensor | None:
        """Of a first frame, where a model of videos reads one."""
        width = self.config.get("image_dim")
        return None if width is None else self.random(1, 257, width)

    def _image_ids(self) -> Tensor:
        """Row and column of every token, behind a number for the image."""
        rows, columns = torch.meshgrid(*(torch.arange(side) for side in self.grid), indexing="ij")
        ids = torch.zeros(rows.numel(), self._ids_width())
        ids[:, 1], ids[:, 2] = rows.flatten(), columns.flatten()
        return ids.to(**self.like)

    def _ids_width(self) -> int:
        return len(self.config.axes_dims_rope)

    def _conditions(self) -> dict[str, Tensor]:
        """Sizes and a pooled text, as a UNet or PixArt want them; each takes its own."""
        sizes = torch.tensor([[self.pixels.height, self.pixels.width]]).to(**self.like)
        given = {"resolution": sizes, "aspect_ratio": self.full(1, 1)}
        width = self.config.get("projection_class_embeddings_input_dim")
        if width is not None:
            pooled = width - 6 * self.config.addition_time_embed_dim
            given |= {"text_embeds": self.random(1, pooled), "time_ids": self.full(1, 6)}
        return given
