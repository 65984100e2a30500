"""Grids of tokens that several families of models work out alike."""

from nearfield.diffusers.models.spec import Arguments, without_single_frame
from nearfield.layout import Grid


def patches(arguments: Arguments, patch: Grid) -> Grid:
    """The grid of a latent `[B, C, ..., height, width]` that a model cuts into patches."""
    sides = arguments.get("hidden_states").shape[-len(patch) :]
    return without_single_frame(tuple(side // part for side, part in zip(sides, patch, strict=True)))


def num_text(arguments: Arguments) -> int:
    """Tokens of the text that is joined to the image."""
    length: int = arguments.get("encoder_hidden_states").shape[1]
    return length


def latent_frames(frames: int, factor: int) -> int:
    """Frames of a latent video: the first frame stands for itself, later ones are put together."""
    return (frames - 1) // factor + 1
