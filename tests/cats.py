"""Real photographs, their latents, and a model small enough to train in a test."""

import functools
import tempfile
from pathlib import Path

import torch

from nearfield_lab.embedded.autoencoder import Autoencoder
from nearfield_lab.embedded.model import ModelConfig, TinyFlux
from nearfield_lab.training.data import Latents, encode, pictures

CATS = Path(__file__).parent / "data" / "cats"
SIZE = 32
CONFIG = ModelConfig(
    joint_blocks=1, single_blocks=2, heads=2, head_dim=16, condition_tokens=16, condition_dim=8, size=SIZE
)


@functools.cache
def autoencoder() -> Autoencoder:
    return Autoencoder()


@functools.cache
def latents(size: int = SIZE) -> Latents:
    with tempfile.TemporaryDirectory() as folder:
        made = encode(pictures(CATS), Path(folder), size, autoencoder=autoencoder())
        return Latents(made.values.clone(), made.mean, made.std)


def lively_model(config: ModelConfig = CONFIG) -> TinyFlux:
    """Random weights also where a new model has zeros, so that its output depends on everything."""
    torch.manual_seed(1)
    model = TinyFlux(config)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval().requires_grad_(False)
