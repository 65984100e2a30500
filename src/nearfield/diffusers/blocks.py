"""Which blocks of a model can run on merged tokens: a table, as `specs.py` is one for attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.methods import Kind

TOKENS = "hidden_states"
ROTARY = "image_rotary_emb"


class Rows(NamedTuple):
    """Rotary rows of text and image, as attention has them: `[tokens, head_dim]`, each value twice."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of one kind, which add to their argument `hidden_states` what they compute.

    Args:
        path: where they are (a pattern as in `Move.place`).
        kind: as in `blockwise`.
        result: the index of the image tokens in what they return; None if that is all of it.
        holds_text: whether text and image stand in one tensor.
        rows: makes `Rows` of the argument `image_rotary_emb`; None if there is none.
        per_token: arguments `[B, tokens]` that say something about each image token.
        text_parts: modules inside that see text alone.
        once_parts: modules inside that see neither: they work once per sample.
        parts: modules inside that are merged one by one where that is asked for (`placement="module"`); none: the block
            as a whole, but for its `norm`.
        norm: where `parts` is empty, the module whose result is merged in the place of its input.
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


def _as_they_are(rotary: Any) -> Rows:
    return Rows(*rotary)


def _of_complex(rotary: Any) -> Rows:
    """Rows of the image and of the text, complex, one number for two channels."""
    image, text = rotary
    joint = torch.cat([text, image]).repeat_interleave(2, dim=-1)
    return Rows(joint.real, joint.imag)


_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_added_qkv", "attn.to_add_out")

_OF_TEXT = ("attn2.to_k", "attn2.to_v")

BLOCKS: Mapping[str, tuple[Blocks, ...]] = MappingProxyType(
    {
        "FluxTransformer2DModel": (
            Blocks(
                "transformer_blocks.*",
                "joint",
                result=1,
                rows=_as_they_are,
                text_parts=(*_ADDED, "ff_context"),
                once_parts=("norm1", "norm1_context"),
                parts=("attn",),
            ),
            Blocks(
                "single_transformer_blocks.*",
                "single",
                result=1,
                rows=_as_they_are,
                once_parts=("norm",),
                norm="norm",
            ),
        ),
        "Flux2Transformer2DModel": (
            Blocks(
                "transformer_blocks.*",
                "joint",
                result=1,
                rows=_as_they_are,
                text_parts=(*_ADDED, "ff_context"),
                parts=("attn",),
            ),
            # Attention and MLP are one module.
            Blocks(
                "single_transformer_blocks.*", "single", holds_text=True, rows=_as_they_are, parts=("attn",)
            ),
        ),
        "SD3Transformer2DModel": (
            Blocks(
                "transformer_blocks.*",
                "joint",
                result=1,
                text_parts=(*_ADDED, "ff_context"),
                once_parts=("norm1", "norm1_context"),
                parts=("attn", "attn2"),
            ),
        ),
        "QwenImageTransformer2DModel": (
            Blocks(
                "transformer_blocks.*",
                "joint",
                result=1,
                rows=_of_complex,
                per_token=("modulate_index",),
                text_parts=(*_ADDED, "txt_mlp"),
                once_parts=("img_mod", "txt_mod"),
                parts=("attn",),
            ),
        ),
        "PixArtTransformer2DModel": (
            Blocks("transformer_blocks.*", "plain", text_parts=_OF_TEXT, parts=("attn1", "attn2", "ff")),
        ),
        "UNet2DConditionModel": (
            Blocks("transformer_blocks.*", "plain", text_parts=_OF_TEXT, parts=("attn1", "attn2", "ff")),
        ),
    }
)
