"""The tiny FLUX: diffusers' FluxTransformer2DModel with few, narrow blocks, and a condition of its own.

There is no text: a few learned tokens stand where a prompt's would, so that the same code runs. 64 of them,
because fused attention likes sequences of whole multiples of 64 (a backward crashes at 1,032 tokens), and 1,024 or
4,096 image tokens and 64 more are that.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from nearfield._checks import check_member, check_tensor, shape_of, wrong_value
from nearfield._files import check_fields
from nearfield_lab.embedded.autoencoder import CHANNELS, WEIGHTS
from nearfield_lab.missing import MissingExtra
from nearfield_lab.storage import BadFile, read_tensors, require_finite, write_tensors

EMBEDDED = WEIGHTS / "cats.safetensors"
EMBEDDED_LORA = WEIGHTS / "cats_hilbert_lora.safetensors"
FORMAT = 1

Packing = Literal["int8", "bf16", "none"]
Model = TypeVar("Model", bound="TinyFlux")
Config = TypeVar("Config")

_GROUP = 64  # weights that share a scale
_MOST = 2**16  # of any count or width in a configuration
SCALE = ":scale"


@dataclass(frozen=True)
class ModelConfig:
    """What a model file says about its model.

    Args:
        joint_blocks, single_blocks, heads, head_dim: as in FLUX.
        condition_tokens: learned tokens that stand for text.
        condition_dim: their width, and that of the pooled vector.
        span: positions run from 0 to this along the longer side, whatever its tokens, so that a model keeps its
            sense of place when it is tuned at another size.
        size: pixels per side it was trained at last.
        shift: of the noise levels, in training and sampling; larger sizes want more of the early, noisy ones.
    """

    joint_blocks: int = 2
    single_blocks: int = 10
    heads: int = 6
    head_dim: int = 64
    condition_tokens: int = 64
    condition_dim: int = 64
    span: int = 64
    size: int = 256
    shift: float = 1.0

    def transformer(self) -> dict[str, Any]:
        """The arguments of diffusers' class."""
        axis = 2 * (self.head_dim * 3 // 16)  # of 64: 16 for nothing, 24 for rows, 24 for columns
        return {
            "patch_size": 1,
            "in_channels": CHANNELS,
            "num_layers": self.joint_blocks,
            "num_single_layers": self.single_blocks,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_dim,
            "joint_attention_dim": self.condition_dim,
            "pooled_projection_dim": self.condition_dim,
            "guidance_embeds": False,
            "axes_dims_rope": (self.head_dim - 2 * axis, axis, axis),
        }


class TinyFlux(nn.Module):
    """Latents and a noise level to velocities. `transformer` is what `apply` works on."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer: Any = from_diffusers("FluxTransformer2DModel")(**config.transformer())
        self.condition = nn.Parameter(torch.randn(config.condition_tokens, config.condition_dim))
        self.pooled = nn.Parameter(torch.zeros(config.condition_dim))
        self.register_buffer("latent_mean", torch.zeros(CHANNELS))
        self.register_buffer("latent_std", torch.ones(CHANNELS))
        self._ids: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        _start_as_identity(self.transformer)

    def forward(self, latents: Tensor, noise_level: Tensor, network: Any = None, **condition: Any) -> Tensor:
        """The velocity (noise minus image) at normalised latents `[B, 32, h, w]` and levels `[B]` in [0, 1].

        Args:
            network: what to call instead of the transformer: the same, compiled.
            condition: further arguments of `arguments`, where a model has a condition that can be chosen.
        """
        network = self.transformer if network is None else network
        (out,) = network(**self.arguments(latents, noise_level, **condition))
        height, width = latents.shape[2:]
        velocity: Tensor = out.transpose(1, 2).unflatten(2, (height, width))
        return velocity

    def arguments(self, latents: Tensor, noise_level: Tensor) -> dict[str, Any]:
        """What the transformer is called with."""
        check_tensor("latents", latents, dims=4, hint="Expected [batch, 32, h, w].")
        if latents.shape[1] != CHANNELS:
            wrong_value("latents", f"have {CHANNELS} channels", shape_of(latents))
        batch, _, height, width = latents.shape
        dtype = self.transformer.dtype
        image_ids, text_ids = self._positions(height, width, latents.device)
        return {
            "hidden_states": latents.flatten(2).transpose(1, 2).to(dtype),
            "encoder_hidden_states": self.condition.to(dtype).expand(batch, -1, -1),
            "pooled_projections": self.pooled.to(dtype).expand(batch, -1),
            "timestep": noise_level,
            "img_ids": image_ids,
            "txt_ids": text_ids,
            "return_dict": False,
        }

    def normalised(self, latents: Tensor) -> Tensor:
        """The autoencoder's latents as the model wants them: mean 0 and standard deviation 1 per channel."""
        mean, std = (part[:, None, None] for part in (self.latent_mean, self.latent_std))
        return (latents - mean) / std

    def denormalised(self, latents: Tensor) -> Tensor:
        mean, std = (part[:, None, None] for part in (self.latent_mean, self.latent_std))
        return latents * std + mean

    def _positions(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids of image and condition. The same tensors each time: whoever reads their values does it once."""
        key = height, width, device
        if key not in self._ids:
            scale = self.config.span / max(height, width)
            rows, columns = ((torch.arange(side) + 0.5) * scale - 0.5 for side in (height, width))
            places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
            image = torch.cat([torch.zeros(len(places), 1), places], dim=1)
            self._ids[key] = image.to(device), torch.zeros(len(self.condition), 3, device=device)
        return self._ids[key]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _start_as_identity(transformer: nn.Module) -> None:
    """Blocks add nothing and the output is zero at first: gates and the last layer start at zero."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and (name.endswith(".linear") or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def from_diffusers(name: str) -> Any:
    """A class of diffusers, loaded when it is asked for."""
    try:
        import diffusers

        return getattr(diffusers, name)
    # diffusers turns what its lazy imports raise into RuntimeError
    except (ImportError, RuntimeError, AttributeError) as error:
        raise MissingExtra("diffusers", error) from None


# -- files ---------------------------------------------------------------------------------------------------------


def save_model(
    path: Path, model: TinyFlux, facts: Mapping[str, Any] | None = None, packing: Packing = "int8"
) -> None:
    """Write a model with its configuration and further `facts`."""
    write_weights(path, "tiny-flux", model, facts, packing)


def load_model(path: Path) -> tuple[TinyFlux, dict[str, Any]]:
    """The model in float32 on the CPU, and all facts of its file."""
    weights, facts = read_weights(path, "tiny-flux", "nearfield train demo")
    model = TinyFlux(stored_config(path, ModelConfig, facts))
    put_weights(path, model, weights)
    return model.eval().requires_grad_(False), facts


def write_weights(
    path: Path, kind: str, model: Any, facts: Mapping[str, Any] | None = None, packing: Packing = "int8"
) -> None:
    """Write the weights of a module that has a `config`."""
    check_member("packing", packing, ("int8", "bf16", "none"))
    stored = dict(model.state_dict())
    if packing == "int8":
        stored = packed(stored)
    elif packing == "bf16":
        stored = {name: tensor.bfloat16() if tensor.dim() > 1 else tensor for name, tensor in stored.items()}
    header = {"format": FORMAT, "kind": kind, "packing": packing, "config": asdict(model.config)}
    write_tensors(path, stored, header | dict(facts or {}))


def read_weights(path: Path, kind: str, command: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights in float32 on the CPU, and all facts of the file, which `command` should have written."""
    stored, facts = read_tensors(path)
    if facts.get("kind") != kind:
        raise BadFile(f"{path} is no model of `{command}`")
    if facts.get("format") != FORMAT:
        raise BadFile(f"{path} has format {facts.get('format')}; this version reads {FORMAT}")
    check_fields(path, facts, {"config": dict})
    try:
        weights = unpacked(stored)
    except (RuntimeError, IndexError) as error:
        raise BadFile(f"{path} must hold weights and scales that fit: {error}") from None
    require_finite(path, weights)
    return weights, facts


def stored_config(path: Path, kind: type[Config], facts: Mapping[str, Any]) -> Config:
    """The configuration of a model file; fields that this version does not know are passed over."""
    known: Any = kind()
    given = facts["config"]
    kinds = {each: type(value) for each, value in asdict(known).items() if each in given}
    check_fields(path, given, kinds)
    try:
        config = kind(**{name: given[name] for name in kinds})
    except (TypeError, ValueError) as error:
        raise BadFile(f"{path} must hold a configuration of a model: {error}") from None
    for name in asdict(known):
        value = getattr(config, name)
        if type(value) is int and not 0 <= value <= _MOST:
            raise BadFile(f"`{name}` in {path} must be from 0 to {_MOST:,}; got {value}")
    return config


def put_weights(path: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise BadFile(f"{path} does not hold the weights its configuration asks for: {words}") from None


def reconfigured(model: Model, **changes: Any) -> Model:
    """The same weights under a configuration that differs in `size` or `shift`."""
    model.config = replace(model.config, **changes)
    return model


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as 8-bit integers with a half-precision scale for every 64 weights of a row; the rest as it is."""
    stored = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.shape[1] % _group(tensor):
            stored[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, _group(tensor)))
        # Rounded before use: what is stored is what the integers were made for.
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7).half()
        whole = (groups / scale.float()).round().clamp(-127, 127).to(torch.int8)
        stored[name], stored[name + SCALE] = whole.flatten(1), scale.squeeze(-1)
    return stored


def unpacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float32 tensors of what `packed` made, or of plain ones."""
    tensors = dict[str, Tensor]()
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            continue
        scale = stored.get(name + SCALE)
        if scale is None:
            tensors[name] = tensor.float()
        else:
            groups = tensor.float().unflatten(1, (scale.shape[1], -1))
            tensors[name] = (groups * scale.float()[..., None]).flatten(1)
    return tensors


def _group(tensor: Tensor) -> int:
    return min(_GROUP, tensor.shape[1])
