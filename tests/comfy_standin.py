"""A stand-in for ComfyUI (GPL-3, a program rather than a package): its calling convention at tiny sizes, written anew.

It follows the sources that docs/comfyui.md names, by commit: `ModelPatcher.clone` and its keyed wrappers; a model's
`apply_model` around `_apply_model` by wrappers of the kind "apply_model"; models that hand `transformer_options` to
every attention call; attention functions that look for `optimized_attention_override` in it, except inside an override.
The models keep what matters to a token: where the text stands, where positions are added, how heads are laid out in a
call. `test_comfy.py` runs the same tests against ComfyUI's own models where they can be imported.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nearfield import Geometry, Hilbert

APPLY_MODEL = "apply_model"
DIM, HEADS = 32, 2


def modules() -> dict[str, ModuleType]:
    """What a node imports."""
    package, extension = ModuleType("comfy"), ModuleType("comfy.patcher_extension")
    package.__path__ = []
    extension.WrappersMP = type("WrappersMP", (), {"APPLY_MODEL": APPLY_MODEL})
    return {"comfy": package, "comfy.patcher_extension": extension}


class ModelPatcher:
    """Options and wrappers around a model that all clones share."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[str, dict[str, list[Any]]] = {}

    def clone(self) -> "ModelPatcher":
        other = ModelPatcher(self.model)
        other.model_options = {name: dict(options) for name, options in self.model_options.items()}
        other.wrappers = {
            kind: {key: list(wrappers) for key, wrappers in keyed.items()}
            for kind, keyed in self.wrappers.items()
        }
        return other

    def get_model_object(self, name: str) -> Any:
        return getattr(self.model, name)

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)


class Executor:
    """Wrappers one inside the other: each is given the executor, and calls it to go on."""

    def __init__(self, original: Callable[..., Any], owner: Any, wrappers: list[Any]) -> None:
        self.original, self.class_obj, self.wrappers = original, owner, wrappers

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.original(*args, **kwargs)
        return self.wrappers[0](self, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Executor(self.original, self.class_obj, self.wrappers[1:]).execute(*args, **kwargs)


class BaseModel(nn.Module):
    """What a patcher holds: the diffusion model, and the call that samplers make."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = diffusion_model

    def apply_model(
        self,
        x: Tensor,
        t: Tensor,
        c_concat: Any = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = transformer_options or {}
        keyed = options.get("wrappers", {}).get(APPLY_MODEL, {})
        wrappers = [wrapper for some in keyed.values() for wrapper in some]
        executor = Executor(self._apply_model, self, wrappers)
        return executor.execute(x, t, c_concat, c_crossattn, control, options, **kwargs)

    def _apply_model(
        self, x: Tensor, t: Tensor, c_concat: Any, c_crossattn: Any, control: Any, options: Any, **kwargs: Any
    ) -> Tensor:
        return self.diffusion_model(x, t, context=c_crossattn, transformer_options=options, **kwargs)


def sample(patcher: Any, x: Tensor, text: Tensor, sigmas: Tensor, step: int = 0, **kwargs: Any) -> Tensor:
    """One call of the model as a sampler makes it: options of the patcher, its wrappers, the schedule."""
    options = dict(patcher.model_options["transformer_options"])
    options |= {"wrappers": patcher.wrappers, "sample_sigmas": sigmas}
    sigma = sigmas[step].expand(len(x))
    return patcher.model.apply_model(x, sigma, c_crossattn=text, transformer_options=options, **kwargs)


def overridable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        if override is None or kwargs.get("_inside_attn_wrapper"):
            return function(*args, **kwargs)
        return override(function, *args, **kwargs | {"_inside_attn_wrapper": True})

    return wrapper


@overridable
def optimized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    if not skip_reshape:
        q, k, v = (x.flatten(2).unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.dim() == 2 else mask
        mask = mask[:, None] if mask.dim() == 3 else mask
    out = scaled_dot_product_attention(q, k, v, mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Masked:
    """An override that reads the same pairs by masks, tokens in raster order."""

    def __init__(self, method: Hilbert, calls: list[Geometry]) -> None:
        self.method, self.left, self.layer = method, list(calls), 0

    def __call__(
        self, attention: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **kwargs: Any
    ) -> Tensor:
        if q.shape[-2] != k.shape[-2]:
            return attention(q, k, v, heads, mask, **kwargs)
        geometry, layer = self.left.pop(0), self.layer
        self.layer += 1
        assert q.shape[-2] == geometry.num_tokens
        if layer == 0:  # dense_layers=1
            return attention(q, k, v, heads, mask, **kwargs)
        order = self.method.ordering(geometry).order + geometry.text
        order = torch.cat([torch.arange(geometry.text), order])
        in_order = self.method.plan(geometry, layer).to_mask()[0, 0]
        is_read = torch.zeros_like(in_order)
        is_read[order[:, None], order[None]] = in_order
        assert not is_read.all()
        # Added to the logits: not all of ComfyUI's attention functions know masks of bools.
        hidden = torch.zeros(is_read.shape, dtype=q.dtype).masked_fill(~is_read, float("-inf"))
        return attention(q, k, v, heads, hidden, **kwargs)


class Projections(nn.Module):
    """Queries, keys and values of tokens, `[B, N, DIM]` each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, dim=-1)


class Tokens(nn.Module):
    """Patches in and out, with positions: what all of the models do around their blocks."""

    patch_size: int | tuple[int, ...] = 2

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.enter, self.leave = nn.Linear(4 * channels, DIM), nn.Linear(DIM, 4 * channels)
        self.places = nn.Linear(3, DIM)
        self.text = nn.Linear(8, DIM)

    def tokens(self, x: Tensor, image: int = 0) -> Tensor:
        """`[B, N, DIM]` in raster order; their values depend on where they stand, as with rotary tables."""
        x = x if x.dim() == 5 else x[:, :, None]
        x = nn.functional.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2))
        axes = [torch.arange(side, dtype=x.dtype) for side in (x.shape[2], x.shape[3] // 2, x.shape[4] // 2)]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
        patches = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 2, 3, 5, 1, 4, 6)
        return self.enter(patches.flatten(4).flatten(1, 3)) + self.places(0.3 * places + image).sin()

    def latent(self, tokens: Tensor, like: Tensor) -> Tensor:
        frames = like.shape[2] if like.dim() == 5 else 1
        height, width = (math.ceil(side / 2) for side in like.shape[-2:])
        tokens = self.leave(tokens[:, : frames * height * width])
        patches = tokens.unflatten(2, (self.channels, 2, 2)).unflatten(1, (frames, height, width))
        x = patches.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)
        return x[..., : like.shape[-2], : like.shape[-1]].reshape_as(like)


class _Joint(nn.Module):
    """A block over text and image with projections of their own; the text stands first."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = Projections(), Projections()

    def forward(self, image: Tensor, text: Tensor, is_split: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        joined = [torch.cat(pair, 1) for pair in zip(self.words(text), self.image(image), strict=True)]
        if is_split:
            joined = [x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in joined]
            out = optimized_attention(*joined, HEADS, skip_reshape=True, **kwargs)
        else:
            query, key, value = joined
            value = value.unflatten(2, (HEADS, -1))  # as SD3 leaves it
            out = optimized_attention(query, key, value, HEADS, None, **kwargs)
        return image + out[:, text.shape[1] :], text + out[:, : text.shape[1]]


class Flux(Tokens):
    """Double blocks, then single ones over the joined sequence; reference images behind the image."""

    def __init__(self) -> None:
        super().__init__()
        self.double_blocks = nn.ModuleList(_Joint() for _ in range(2))
        self.single_blocks = nn.ModuleList(Projections() for _ in range(3))

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        ref_latents: Any = None,
        attention_mask: Any = None,
        transformer_options: Any = None,
    ) -> Tensor:
        latents = [x, *(ref_latents or [])]
        image = torch.cat([self.tokens(latent, place) for place, latent in enumerate(latents)], 1)
        text = self.text(context)
        options = {"mask": attention_mask, "transformer_options": transformer_options}
        for block in self.double_blocks:
            image, text = block(image, text, True, **options)
        joined = torch.cat([text, image], 1)
        for block in self.single_blocks:
            qkv = [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in block(joined)]
            joined = joined + optimized_attention(*qkv, HEADS, skip_reshape=True, **options)
        return self.latent(joined[:, text.shape[1] :], x)


class QwenImageTransformer2DModel(Tokens):
    """Joint blocks; latents have a side of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(_Joint() for _ in range(4))

    def forward(
        self, x: Tensor, t: Tensor, context: Tensor, ref_latents: Any = None, transformer_options: Any = None
    ) -> Tensor:
        latents = [x, *(ref_latents or [])]
        image = torch.cat([self.tokens(latent, place) for place, latent in enumerate(latents)], 1)
        text = self.text(context)
        for block in self.transformer_blocks:
            image, text = block(image, text, False, transformer_options=transformer_options)
        return self.latent(image, x)


class _DualBlock(_Joint):
    """A joint block that may read the image alone, too."""

    def __init__(self, x_block_self_attn: bool) -> None:
        super().__init__()
        self.x_block = nn.Module()
        self.x_block.attn = self.image
        self.x_block.x_block_self_attn = x_block_self_attn
        if x_block_self_attn:
            self.x_block.attn2 = Projections()

    def forward(self, image: Tensor, text: Tensor, is_split: bool, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new, text = super().forward(image, text, is_split, **kwargs)
        if self.x_block.x_block_self_attn:
            new = new + optimized_attention(*self.x_block.attn2(image), heads=HEADS, **kwargs)
        return new, text


class OpenAISignatureMMDITWrapper(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.joint_blocks = nn.ModuleList(_DualBlock(index < 2) for index in range(3))

    def forward(self, x: Tensor, t: Tensor, context: Tensor, transformer_options: Any = None) -> Tensor:
        image, text = self.tokens(x), self.text(context)
        for block in self.joint_blocks:
            image, text = block(image, text, False, transformer_options=transformer_options)
        return self.latent(image, x)


class _CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Projections(), Projections()

    def forward(self, x: Tensor, text: Tensor, **kwargs: Any) -> Tensor:
        x = x + optimized_attention(*self.own(x), heads=HEADS, **kwargs)
        query, (_, key, value) = self.cross(x)[0], self.cross(text)
        return x + optimized_attention(query, key, value, heads=HEADS, **kwargs)


class WanModel(Tokens):
    """Self-attention over a video; the text is read by cross-attention."""

    patch_size = (1, 2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_CrossBlock() for _ in range(3))

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        time_dim_concat: Any = None,
        transformer_options: Any = None,
    ) -> Tensor:
        whole = x if time_dim_concat is None else torch.cat([x, time_dim_concat], 2)
        tokens, text = self.tokens(whole), self.text(context)
        for block in self.blocks:
            tokens = block(tokens, text, transformer_options=transformer_options)
        return self.latent(tokens, x)
