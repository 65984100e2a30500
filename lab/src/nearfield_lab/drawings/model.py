"""The model that draws from captions: the tiny FLUX, with a small text encoder that is trained with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention

from nearfield._checks import check_tensor
from nearfield._files import BadFile, check_fields
from nearfield_lab.drawings.text import PADDING, Vocabulary
from nearfield_lab.embedded.model import (
    ModelConfig,
    Packing,
    TinyFlux,
    put_weights,
    read_weights,
    stored_config,
    write_weights,
)

_KIND = "drawing-flux"
# Training may ask for a kernel that takes no mask.
_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class DrawingConfig(ModelConfig):
    """What a model file says about its model.

    Args:
        condition_tokens: of a caption, at most; learned tokens stand where it has none.
        condition_dim: the width of the text encoder.
        vocabulary: tokens that it knows.
        text_blocks, text_heads: of the text encoder.
    """

    single_blocks: int = 7
    condition_dim: int = 256
    vocabulary: int = 4096
    text_blocks: int = 5
    text_heads: int = 4


class TextEncoder(nn.Module):
    """Tokens `[B, length]` to vectors `[B, length, dim]`. Padding is read by nobody."""

    def __init__(self, config: DrawingConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.condition_dim)
        self.places = nn.Parameter(torch.zeros(config.condition_tokens, config.condition_dim))
        self.blocks = nn.ModuleList(
            _TextBlock(config.condition_dim, config.text_heads) for _ in range(config.text_blocks)
        )
        self.norm = nn.LayerNorm(config.condition_dim)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        is_read = tokens != PADDING
        # Something has to be read where there is no caption; what comes of it is not used.
        is_read = is_read | (torch.arange(tokens.shape[1], device=tokens.device) == 0)
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x, is_read[:, None, None])
        encoded: Tensor = self.norm(x)
        return encoded


class _TextBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_wide = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.inputs, self.outputs = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, is_read: Tensor) -> Tensor:
        parts = self.inputs(self.norm_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        with sdpa_kernel(_MASKED):
            read = scaled_dot_product_attention(query, key, value, attn_mask=is_read)
        x = x + self.outputs(read.transpose(1, 2).flatten(2))
        y: Tensor = x + self.narrow(gelu(self.wide(self.norm_wide(x))))
        return y


class DrawingFlux(TinyFlux):
    """Latents, a noise level and captions to velocities. Without captions it draws anything."""

    config: DrawingConfig

    def __init__(self, config: DrawingConfig) -> None:
        super().__init__(config)
        self.text = TextEncoder(config)

    def arguments(
        self, latents: Tensor, noise_level: Tensor, captions: Tensor | None = None
    ) -> dict[str, Any]:
        """What the transformer is called with.

        Args:
            captions: tokens `[B, condition_tokens]`; a row of padding is no caption.
        """
        arguments = super().arguments(latents, noise_level)
        if captions is None:
            return arguments
        check_tensor("captions", captions, dims=2, hint="Expected [batch, tokens].")
        is_text = (captions != PADDING)[..., None]
        encoded = self.text(captions)
        dtype = self.transformer.dtype
        mean = (encoded * is_text).sum(1) / is_text.sum(1).clamp(min=1)
        return arguments | {
            "encoder_hidden_states": torch.where(is_text, encoded, self.condition).to(dtype),
            "pooled_projections": torch.where(is_text.any(1), mean, self.pooled).to(dtype),
        }


def save_model(
    path: Path,
    model: DrawingFlux,
    vocabulary: Vocabulary,
    facts: Mapping[str, Any] | None = None,
    packing: Packing = "int8",
) -> None:
    """Write a model with its configuration, its vocabulary and further `facts`."""
    write_weights(path, _KIND, model, {"vocabulary": vocabulary.document(), **(facts or {})}, packing)


def load_model(path: Path) -> tuple[DrawingFlux, Vocabulary, dict[str, Any]]:
    """The model in float32 on the CPU, its vocabulary, and all facts of its file."""
    weights, facts = read_weights(path, _KIND, "nearfield drawings train")
    model = DrawingFlux(stored_config(path, DrawingConfig, facts))
    put_weights(path, model, weights)
    check_fields(path, facts, {"vocabulary": dict})
    try:
        vocabulary = Vocabulary.of(facts["vocabulary"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFile(f"{path} must hold a vocabulary of letters and pairs: {error}") from None
    if len(vocabulary) > model.config.vocabulary:
        raise BadFile(f"{path} must hold at most {model.config.vocabulary} tokens; got {len(vocabulary)}")
    return model.eval().requires_grad_(False), vocabulary, facts
