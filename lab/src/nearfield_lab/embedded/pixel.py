"""A diffusion transformer on pixels: every pixel is a token, there is no autoencoder and there are no patches.

The DiT-S of the LLSA paper: 12 layers of 6 heads of 64, rotary positions along both sides, normalised queries and keys,
modulation by the noise level that starts at zero. Pixels are brought along a curve once, at the entrance, and their
rotary rows with them. Attention is full, or by a method that can be trained.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

from nearfield._checks import check_int, check_tensor, shape_of, wrong_value
from nearfield.layout import Geometry, Ordering
from nearfield.methods import Method, Projections, method_class
from nearfield.methods import fields as method_fields
from nearfield_lab.embedded.dense_kernels import DenseKernel, called_with
from nearfield_lab.embedded.model import Packing, put_weights, read_weights, stored_config, write_weights
from nearfield_lab.embedded.sampler import drawn, precision
from nearfield_lab.storage import BadFile

FULL = "full"
CHANNELS = 3
KIND, COMMAND = "pixel", "nearfield train pixel"

_PLAIN_SIDE = 64  # images up to this side need no more noise than their own size
_FREQUENCIES = 256  # channels that say the noise level
_THETA = 10_000.0


@dataclass(frozen=True)
class PixelConfig:
    """What a model file says about its model.

    Args:
        layers, heads, head_dim: of the transformer.
        attention: "full", or the name of a method.
        fields: of that method.
        span: positions run from 0 to this along the longer side, whatever its pixels, so that a model keeps its sense
            of place when it goes on at another size.
        size: pixels per side it was trained at last.
    """

    layers: int = 12
    heads: int = 6
    head_dim: int = 64
    attention: str = FULL
    fields: Mapping[str, Any] = field(default_factory=dict)
    span: int = 64
    size: int = 64

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "span", "size"):
            check_int(name, getattr(self, name), at_least=1)
        check_int("head_dim", self.head_dim, at_least=4)
        if self.head_dim % 4:
            wrong_value("head_dim", "be a multiple of 4: half for rows, half for columns", self.head_dim)
        if self.attention == FULL and self.fields:
            wrong_value("fields", "be empty where attention is full", dict(self.fields))
        self.method()

    @classmethod
    def of(cls, method: Method | None, **sizes: Any) -> "PixelConfig":
        """With a method, or full attention; all of the method's fields are kept."""
        if method is None:
            return cls(**sizes)
        return cls(
            attention=method_fields.name_of(method),
            fields=method_fields.as_document(method)["fields"],
            **sizes,
        )

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    def method(self) -> Method | None:
        """Who reads whom; None for full attention."""
        if self.attention == FULL:
            return None
        # As JSON returns it: tuples are lists there.
        plain = {name: tuple(x) if isinstance(x, list) else x for name, x in self.fields.items()}
        method: Method = method_class(self.attention)(**plain)
        return method


class Place(NamedTuple):
    """What depends on an image's size: the order of its pixels, their rotary rows in it, and what each layer reads.

    Args:
        cosine, sine: `[pixels, head_dim]`; a sine has the sign with which the other half enters.
        readers: for each layer, None where attention is full.
    """

    ordering: Ordering
    cosine: Tensor
    sine: Tensor
    readers: tuple[Any, ...]


class PixelTransformer(nn.Module):
    """Images and a noise level to velocities. `compiled_body` makes `body` faster."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        self.config = config
        self.body = Body(config)
        self._places: dict[tuple[int, int, torch.device], Place] = {}

    def forward(self, images: Tensor, level: Tensor, body: Any = None) -> Tensor:
        """The velocity (noise minus image) of `[B, 3, height, width]` at levels `[B]` in [0, 1].

        Args:
            body: what to call instead of `self.body`: the same, compiled.
        """
        check_tensor("images", images, dims=4, hint="Expected [batch, 3, height, width].")
        if images.shape[1] != CHANNELS:
            wrong_value("images", f"have {CHANNELS} channels", shape_of(images))
        height, width = images.shape[2:]
        place = self.place(height, width, images.device)
        tokens = place.ordering.enter(images.flatten(2).transpose(1, 2))
        body = self.body if body is None else body
        velocity = body(tokens, level, place.cosine, place.sine, place.readers)
        moved: Tensor = place.ordering.leave(velocity).transpose(1, 2).unflatten(2, (height, width))
        return moved

    def place(self, height: int, width: int, device: torch.device) -> Place:
        """Made once for a size and a device."""
        key = height, width, device
        if key not in self._places:
            with torch.inference_mode(False):  # else it could not serve a training step later
                self._places[key] = _place(self.config, Geometry((height, width)), device)
        return self._places[key]


class Body(nn.Module):
    """The layers, on pixels that already stand in their order."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        self.entrance = nn.Linear(CHANNELS, config.dim)
        self.level = nn.Sequential(
            nn.Linear(_FREQUENCIES, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim)
        )
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.modulation = nn.Linear(config.dim, 2 * config.dim)
        self.exit = nn.Linear(config.dim, CHANNELS)
        self.apply(_start)
        # Layers add nothing and the output is zero at first.
        for name, parameter in self.named_parameters():
            if "modulation." in name or name.startswith("exit.") or _is_extra(name):
                nn.init.zeros_(parameter)

    def forward(
        self,
        tokens: Tensor,
        level: Tensor,
        cosine: Tensor,
        sine: Tensor,
        readers: tuple[Any, ...],
        call: Callable[..., Tensor] | None = None,
        leave: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Velocities `[B, pixels, 3]`.

        Args:
            call: what to call layers through: `call(layer, x, ...)`.
            leave: what to call instead of `self.leave`.
        """
        known = silu(self.level(_frequencies(level)))
        x = self.entrance(tokens)
        for layer, reader in zip(self.layers, readers, strict=True):
            arguments = x, known, cosine, sine, reader
            x = layer(*arguments) if call is None else call(layer, *arguments)
        return self.leave(x, known) if leave is None else leave(x, known)

    def leave(self, x: Tensor, known: Tensor) -> Tensor:
        """Velocities of what the layers have made."""
        shift, scale = self.modulation(known)[:, None].chunk(2, -1)
        velocity: Tensor = self.exit(_modulated(x, shift, scale))
        return velocity


def compiled_body(body: Body, dense_kernel: DenseKernel = "auto") -> Callable[..., Tensor]:
    """`body` with its layers compiled. They are alike, so that one graph serves all: a twelfth of the time to compile.
    What follows them is another graph.

    Args:
        dense_kernel: the name of torch's kernel for full attention.
    """
    compiled = partial(torch.compile, fullgraph=True)
    return partial(body, call=partial(compiled(called_with), dense_kernel), leave=compiled(body.leave))


class Layer(nn.Module):
    """Attention and a feed-forward network, each scaled, shifted and gated by the noise level."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        dim = config.dim
        self.attention = SelfAttention(config)
        self.network = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, known: Tensor, cosine: Tensor, sine: Tensor, reader: Any) -> Tensor:
        parts = self.modulation(known)[:, None].chunk(6, -1)
        x = x + parts[2] * self.attention(_modulated(x, parts[0], parts[1]), cosine, sine, reader)
        changed: Tensor = x + parts[5] * self.network(_modulated(x, parts[3], parts[4]))
        return changed


class SelfAttention(Projections):
    """Projections, norms and rotation around full attention or a method's, with the parameters a method asks for."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__(config.dim, config.heads, bias=True)
        self.impl = "auto"
        self.query_norm, self.key_norm = (nn.RMSNorm(config.head_dim, eps=1e-6) for _ in range(2))
        method = config.method()
        self.extra = None if method is None else method.module(config.dim, config.heads)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, reader: Any) -> Tensor:
        query, key, value = self.heads_of(x)
        query = _rotated(self.query_norm(query), cosine, sine).to(value.dtype)
        key = _rotated(self.key_norm(key), cosine, sine).to(value.dtype)
        if reader is None:
            out = scaled_dot_product_attention(query, key, value)
        else:
            extra = {} if self.extra is None else self.extra(x)
            out = reader.attend(query, key, value, impl=self.impl, **extra).out
        return self.joined(out)


def _place(config: PixelConfig, geometry: Geometry, device: torch.device) -> Place:
    method = config.method()
    order = torch.arange(geometry.num_tokens)
    ordering = Ordering(order) if method is None else method.ordering(geometry)
    angles = ordering.enter(_angles(geometry.grid, config), dim=0)
    tables = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], dim=-1)
    cosine, sine = (table.float().to(device) for table in tables)
    readers = [
        None
        if method is None or method.dense_layer_reason(layer, config.layers) is not None
        else method.layer(geometry, layer, heads=config.heads, device=device)
        for layer in range(config.layers)
    ]
    return Place(ordering.to(device), cosine, sine, tuple(readers))


def _angles(grid: tuple[int, ...], config: PixelConfig) -> Tensor:
    """By how much the pairs of channels of each pixel turn, `[pixels, head_dim / 2]`: half by its row, half by its
    column."""
    pairs = config.head_dim // 4
    frequencies = _THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    scale = config.span / max(grid)
    sides = [((torch.arange(side) + 0.5) * scale - 0.5)[:, None] * frequencies for side in grid]
    rows, columns = sides[0][:, None], sides[1][None]
    return torch.cat(torch.broadcast_tensors(rows, columns), dim=-1).flatten(0, 1)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    # Halves that are computed apart and joined would be a slow kernel when compiled, and change the order in memory.
    other: Tensor = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cosine + other * sine


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _frequencies(level: Tensor) -> Tensor:
    """A noise level as waves of many lengths, `[B, 256]`."""
    half = _FREQUENCIES // 2
    wide = torch.promote_types(level.dtype, torch.float32)
    waves = torch.exp(torch.arange(half, device=level.device, dtype=wide) * (-math.log(_THETA) / half))
    angles = 1000 * level.to(wide)[:, None] * waves
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(level.dtype)


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


# -- from noise to pictures ----------------------------------------------------------------------------------------


def noise_scale(height: int, width: int) -> float:
    """How strong the noise is: neighbours in a large image are more alike, so that it takes more to hide them."""
    return max(1.0, math.sqrt(height * width) / _PLAIN_SIDE)


def noise(indices: range, sides: tuple[int, int], seed: int) -> Tensor:
    """Noise for pictures by their numbers, as strong as their size asks."""
    return noise_scale(*sides) * drawn(indices, (CHANNELS, *sides), seed)


@torch.no_grad()
def sample(
    model: PixelTransformer,
    indices: range,
    *,
    size: int | tuple[int, int] | None = None,
    steps: int = 20,
    seed: int = 0,
    body: Any = None,
) -> Tensor:
    """Pictures of a seed by their numbers, `[num, height, width, 3]` uint8 on the CPU: Euler steps of equal size.

    Args:
        size: pixels per side, or (height, width); by default what the model was trained at.
        body: what to call instead of the model's: the same, compiled.
    """
    check_int("steps", steps, at_least=1)
    size = model.config.size if size is None else size
    sides = (size, size) if isinstance(size, int) else size
    device = next(model.parameters()).device
    images = noise(indices, sides, seed).to(device)
    with precision(device):
        for step in range(steps):
            level = torch.full((len(images),), 1 - step / steps, device=device)
            images = images - model(images, level, body).float() / steps
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


# -- files ---------------------------------------------------------------------------------------------------------


def save_pixel_model(
    path: Path, model: PixelTransformer, facts: Mapping[str, Any] | None = None, packing: Packing = "bf16"
) -> None:
    """Write a model with its configuration and further `facts`."""
    write_weights(path, KIND, model, facts, packing)


def load_pixel_model(
    path: Path, config: PixelConfig | None = None
) -> tuple[PixelTransformer, dict[str, Any]]:
    """The model in float32 on the CPU, and all facts of its file.

    Args:
        config: another configuration for the same weights: another size, another attention. What that attention learns
            in addition starts at zero.
    """
    weights, facts = read_weights(path, KIND, COMMAND)
    stored = stored_config(path, PixelConfig, facts)
    if config is None:
        config = stored
    for name in ("layers", "heads", "head_dim", "span"):
        if getattr(config, name) != getattr(stored, name):
            raise BadFile(f"{path} has {name} = {getattr(stored, name)}, not {getattr(config, name)}")
    model = PixelTransformer(config)
    fresh = {
        name: value for name, value in model.state_dict().items() if _is_extra(name) and name not in weights
    }
    if stored.attention != config.attention and any(map(_is_extra, weights)):
        raise BadFile(
            f"{path} was trained with attention {stored.attention!r}, "
            f"whose own weights {config.attention!r} has no place for"
        )
    put_weights(path, model, weights | fresh)
    return model, facts


def _is_extra(name: str) -> bool:
    """Whether a parameter belongs to the method."""
    return ".attention.extra." in name
