"""The inputs of attention layers: captured from any model that `apply` knows, and kept as one file for each layer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearfield import Attended, Geometry, LayerAttention, Method, apply
from nearfield.methods import Moment, full_layer
from nearfield_lab.storage import BadFile, read_tensors, require_finite, write_tensors

_CHUNK = 256


@dataclass(frozen=True, eq=False)
class Sample:
    """What the attention of one layer was given in one step: some heads of one picture, in raster order.

    Args:
        geometry: where text and images stand.
        query, key, value: `[heads, N, D]`.
        scale: by what products of queries and keys are multiplied.
    """

    name: str
    geometry: Geometry
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @classmethod
    def of(cls, name: str, geometry: Geometry, tensors: Iterable[Tensor], scale: float) -> "Sample":
        query, key, value = tensors
        return cls(name, geometry, query, key, value, scale)

    @cached_property
    def dense(self) -> tuple[Tensor, Tensor]:
        """What dense attention gives, `[heads, N, D]`, and the log of the sum of its weights, `[heads, N]`."""
        parts = []
        for query in self.query.split(_CHUNK, 1):
            scores = self.scale * query @ self.key.mT
            parts.append((scores.softmax(-1) @ self.value, scores.logsumexp(-1)))
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(sums, 1)

    @property
    def image(self) -> slice:
        """The places of image tokens."""
        return slice(self.geometry.image_spans[0][0], self.geometry.image_spans[-1][1])

    def in_order(self, order: Tensor) -> "Sample":
        """The same with image tokens in another order; `order[i]` is the image token that comes to place `i`."""
        places = torch.arange(self.geometry.num_tokens)
        places[self.image] = self.image.start + order.cpu()
        return replace(self, **{name: getattr(self, name)[:, places] for name in ("query", "key", "value")})

    def to(self, device: torch.device | str) -> "Sample":
        """The same on a device, in float32."""
        moved = {name: getattr(self, name).to(device, torch.float32) for name in ("query", "key", "value")}
        return replace(self, **moved)

    def write(self, path: Path) -> None:
        tensors = {name: getattr(self, name).clone() for name in ("query", "key", "value")}
        write_tensors(path, tensors, {"geometry": asdict(self.geometry), "scale": self.scale})

    @classmethod
    def read(cls, path: Path) -> "Sample":
        tensors, facts = read_tensors(path, fields={"geometry": dict, "scale": float})
        try:
            geometry = Geometry(**facts["geometry"])
            scale = float(facts["scale"])
            found = cls(path.stem, geometry, **tensors, scale=scale)
        except (TypeError, ValueError, OverflowError) as error:
            raise BadFile(f"{path} must hold one captured layer: {error}") from None
        require_finite(path, {**tensors, "scale": torch.tensor(scale, dtype=torch.float64)})
        sizes = {(tensor.shape[:2], tensor.is_floating_point()) for tensor in tensors.values()}
        is_whole = sizes == {((*found.key.shape[:1], geometry.num_tokens), True)}
        if not is_whole or found.query.shape != found.key.shape or found.value.dim() != 3:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise BadFile(f"{path} must hold numbers [heads, {geometry.num_tokens}, channels]; got {shapes}")
        return found


def read_samples(folder: Path) -> Iterator[Sample]:
    """The samples of a folder, in the order of their names. Raises FileNotFoundError where there are none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no captured activations. `nearfield capture` writes them.")
    return map(Sample.read, paths)


def latent_sample(latent: Tensor, name: str = "latent", patch: int = 2) -> Sample:
    """The tokens of a latent, each its own query, key and value: what real images or videos are like, without a model.

    A token is a patch, each channel with mean 0 and standard deviation 1 over the latent; logits are products of tokens
    over the root of their length.

    Args:
        latent: `[C, height, width]` or `[C, frames, height, width]`.
        patch: latent pixels per side of a token.
    """
    if latent.dim() not in (3, 4) or any(side % patch for side in latent.shape[-2:]):
        raise ValueError(
            f"`latent` must have 3 or 4 sides, the last two multiples of {patch}; got {list(latent.shape)}."
        )
    channels = latent.float().flatten(1)
    normal = ((channels - channels.mean(1, keepdim=True)) / channels.std(1, keepdim=True)).view_as(latent)
    cells = normal.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # ..., h, patch, w, patch
    tokens = cells.movedim((0, -3, -1), (-3, -2, -1)).flatten(-3)
    query = tokens.flatten(0, -2)[None]
    return Sample(name, Geometry(tuple(tokens.shape[:-1])), query, query, query, query.shape[-1] ** -0.5)


# -- capturing ---------------------------------------------------------------------------------------------------------


class _Enough(Exception):
    """Everything that was asked for is captured."""


@dataclass
class _Wanted:
    """Which calls are kept, and where.

    Args:
        layers, steps: None: all of them.
        heads: how many of each layer, evenly spaced.
    """

    folder: Path
    source: str
    layers: Sequence[int] | None
    steps: Sequence[int] | None
    heads: int

    def path(self, step: int, layer: int) -> Path:
        return self.folder / f"{self.source}-step{step:02}-layer{layer:02}.safetensors"

    def is_missing(self, step: int, layer: int) -> bool:
        is_wanted = self.layers is None or layer in self.layers
        is_wanted = is_wanted and (self.steps is None or step in self.steps)
        return is_wanted and not self.path(step, layer).exists()

    def is_complete(self, num_layers: int) -> bool:
        if self.steps is None:
            return False  # nobody knows how many there are
        layers = range(num_layers) if self.layers is None else self.layers
        return not any(self.is_missing(step, layer) for step in self.steps for layer in layers)


class _Capturing(Method):
    """A method that reads everything, and keeps what it was given."""

    order = "raster"

    def __init__(self, wanted: _Wanted, has_steps: bool) -> None:
        self.wanted, self.has_steps, self.num_layers = wanted, has_steps, 0

    @property
    def is_stateful(self) -> bool:
        return self.has_steps  # so that layers know the step

    def layer(self, geometry: Geometry, index: int = 0, **_: Any) -> "_CapturingLayer":
        return _CapturingLayer(self, geometry, index)


class _CapturingLayer(LayerAttention):
    def __init__(self, method: _Capturing, geometry: Geometry, index: int) -> None:
        self.method, self.geometry, self.index, self.step = method, geometry, index, 0

    @property
    def num_pairs(self) -> int:
        return self.geometry.num_tokens**2

    def set_step(self, moment: Moment) -> "_CapturingLayer":
        self.step = moment.step_index
        return self

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Any = "auto",
    ) -> Attended:
        wanted = self.method.wanted
        if wanted.is_missing(self.step, self.index):
            path = wanted.path(self.step, self.index)
            self._sample(path.stem, query, key, value, key_bias, scale).write(path)
        if wanted.is_complete(self.method.num_layers):
            raise _Enough
        full = full_layer(self.geometry.num_tokens, str(query.device))
        return full.attend(query, key, value, key_bias=key_bias, scale=scale, impl=impl)

    def _sample(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor | None,
        scale: float | None,
    ) -> Sample:
        """Of the last picture of the batch, the one that guidance asks the prompt for; without text that is hidden."""
        geometry, count = self.geometry, min(self.method.wanted.heads, query.shape[1])
        # Several heads of queries may share one of keys.
        tensors = [
            x[-1, [head * x.shape[1] // count for head in range(count)]].detach() for x in (query, key, value)
        ]
        if key_bias is not None:
            seen = key_bias[-1, 0] == 0
            hidden = int((~seen).sum())
            if int((~seen[slice(*geometry.text_span)]).sum()) != hidden:
                raise NotImplementedError("a bias on image tokens cannot be captured")
            tensors = [x[:, seen] for x in tensors]
            geometry = replace(geometry, text=geometry.text - hidden)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return Sample.of(name, geometry, tensors, scale)


def capture(
    target: Any,
    call: Callable[[], object],
    folder: Path,
    *,
    source: str = "model",
    layers: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    heads: int = 2,
) -> int:
    """Write what attention layers are given while `call` runs; returns how many files are new.

    Files that exist are kept, so that an interrupted capture goes on; where none is missing, nothing runs.

    Args:
        target: a diffusers pipeline, or its model, which `call` runs.
        source: what the names of the files begin with.
        layers: numbers of the layers; all by default.
        steps: numbers of the denoising steps; all by default. A model alone has only step 0.
        heads: how many heads of each layer, evenly spaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _Wanted(folder, source, layers, steps, heads)
    before = len(list(folder.glob(f"{source}-step*.safetensors")))
    method = _Capturing(wanted, has_steps=not isinstance(target, nn.Module))
    with apply(target, method) as handle, torch.no_grad():
        method.num_layers = handle.num_layers
        if not wanted.is_complete(method.num_layers):
            with suppress(_Enough):
                call()
    return len(list(folder.glob(f"{source}-step*.safetensors"))) - before
