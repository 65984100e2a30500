"""Training on drawings and their captions: flow matching, where one caption in ten is left out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield_lab.drawings.captions import VARIANTS, Drawing, captions
from nearfield_lab.drawings.model import DrawingConfig, DrawingFlux, load_model, save_model
from nearfield_lab.drawings.pixels import rendered
from nearfield_lab.drawings.prompts import PROMPTS
from nearfield_lab.drawings.sampler import DrawingPipeline
from nearfield_lab.drawings.text import PADDING, Vocabulary
from nearfield_lab.embedded.autoencoder import CHANNELS, PIXELS_PER_TOKEN, Autoencoder
from nearfield_lab.embedded.model import ModelConfig, TinyFlux
from nearfield_lab.storage import read_facts, read_tensors, write_tensors
from nearfield_lab.training.data import Latents, OnProgress
from nearfield_lab.training.flow import FlowTraining, Recipe
from nearfield_lab.training.loop import Schedule
from nearfield_lab.training.runs import OnStep

_UNCAPTIONED = 0.1  # of the pictures of a batch
_COLOURED_TIMES = 2  # as often as drawings of one colour, which are the larger part

FORMAT = 1


class DrawingLatents(Latents):
    """Latents of drawings.

    Args:
        values: `[pictures, 1, 32, h, w]` float16.
        rows: the pictures of one epoch; some stand there more than once.
    """

    def __init__(self, values: Tensor, mean: Tensor, std: Tensor, rows: Tensor) -> None:
        super().__init__(values, mean, std)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> "DrawingLatents":
        return DrawingLatents(self.values.to(device), self.mean, self.std, self.rows)

    def take(self, indices: Tensor) -> Tensor:
        return super().take(self.rows[indices])


def epoch_rows(drawings: Sequence[Drawing]) -> Tensor:
    """The numbers of drawings, twice of those with colours of their own."""
    return torch.tensor(
        [
            number
            for number, drawing in enumerate(drawings)
            for _ in range(1 if drawing.colour else _COLOURED_TIMES)
        ]
    )


def encode(
    drawings: Sequence[Drawing],
    folder: Path,
    size: int,
    *,
    workers: int,
    device: torch.device | str = "cpu",
    on_progress: OnProgress = lambda done, total, words: None,
) -> tuple[DrawingLatents, list[Drawing]]:
    """The latents of drawings at `size` pixels, and those drawings that could be rendered.

    They are kept in `folder`, so that another run on the same machine finds them there.
    """
    if size % PIXELS_PER_TOKEN:
        wrong_value("size", f"be a multiple of {PIXELS_PER_TOKEN} pixels", size)
    path = folder / f"latents-{size}.safetensors"
    known = {"format": FORMAT, "kind": "drawing latents", "drawings": fingerprint(drawings)}
    if path.is_file() and read_facts(path) == known:
        tensors, _ = read_tensors(path)
    else:
        tensors = _encoded(drawings, size, workers, torch.device(device), on_progress)
        write_tensors(path, tensors, known)
    kept = [drawings[number] for number in tensors["numbers"].tolist()]
    values = tensors["values"].unsqueeze(1)
    return DrawingLatents(values, tensors["mean"], tensors["std"], epoch_rows(kept)), kept


def _encoded(
    drawings: Sequence[Drawing], size: int, workers: int, device: torch.device, on_progress: OnProgress
) -> dict[str, Tensor]:
    autoencoder = Autoencoder().to(device)
    side = size // PIXELS_PER_TOKEN
    values = torch.empty(len(drawings), CHANNELS, side, side, dtype=torch.float16)
    numbers = list[int]()
    total, squares = (torch.zeros(CHANNELS, dtype=torch.float64, device=device) for _ in range(2))
    for some, pictures in rendered(drawings, size, workers):
        on_progress(len(numbers), len(drawings), f"encoding at {size} px")
        latents = torch.cat(
            [
                autoencoder.encode(part.to(device).float() / 255)
                for part in pictures.split(64 if device.type == "cuda" else 2)
            ]
        )
        total += latents.sum(dim=(0, 2, 3), dtype=torch.float64)
        squares += latents.square().sum(dim=(0, 2, 3), dtype=torch.float64)
        values[len(numbers) : len(numbers) + len(some)] = latents.half().cpu()
        numbers += some
    count = len(numbers) * side**2
    mean = total / count
    std = (squares / count - mean**2).clamp(min=1e-12).sqrt()
    return {
        "values": values[: len(numbers)],
        "numbers": torch.tensor(numbers),
        "mean": mean.float().cpu(),
        "std": std.float().cpu(),
    }


def fingerprint(drawings: Sequence[Drawing]) -> str:
    """What tells collections of drawings apart."""
    digest = hashlib.sha256()
    for drawing in drawings:
        digest.update(f"{drawing.set}\0{drawing.number}\0{drawing.name}\0{len(drawing.body)}\n".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class DrawingRecipe(Recipe):
    """What is learned from what.

    Args:
        data: the fingerprint of the drawings.
        prompts: of the sample sheet.
        guidance: of the sample sheet.
    """

    data: str = ""
    prompts: tuple[str, ...] = field(default=PROMPTS)
    guidance: float = 4.0

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"data": self.data}


class DrawingTraining(FlowTraining):
    """Model, latents, captions and loop.

    Args:
        drawings: those of the latents, in their order.
        vocabulary: learned from their captions where no model is started from, which has one.
    """

    model: DrawingFlux
    recipe: DrawingRecipe

    def __init__(
        self,
        latents: DrawingLatents,
        drawings: Sequence[Drawing],
        folder: Path,
        recipe: DrawingRecipe,
        schedule: Schedule,
        *,
        config: DrawingConfig | None = None,
        start: Path | None = None,
        device: torch.device | str = "cpu",
        on_step: OnStep | None = None,
    ) -> None:
        self._captions = [caption for drawing in drawings for caption in captions(drawing)]
        self.earlier = list[dict[str, Any]]()
        super().__init__(
            latents, folder, recipe, schedule, config=config, start=start, device=device, on_step=on_step
        )
        tokens = self.vocabulary.tokens(self._captions, self.model.config.condition_tokens)
        self._tokens = tokens.unflatten(0, (-1, VARIANTS)).short().to(self.device)
        self._rows = latents.rows

    def first_model(self, latents: Latents, config: ModelConfig | None, start: Path | None) -> TinyFlux:
        if start is None:
            size = (config if isinstance(config, DrawingConfig) else DrawingConfig()).vocabulary
            self.vocabulary = Vocabulary.learn(self._captions, size)
            return super().first_model(latents, config, start)
        model, self.vocabulary, facts = load_model(start)
        self.earlier = [*facts.get("earlier", ()), {name: facts[name] for name in ("step", "recipe")}]
        return model

    def new_model(self, config: ModelConfig | None) -> TinyFlux:
        return DrawingFlux(config if isinstance(config, DrawingConfig) else DrawingConfig())

    def condition(self, indices: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """One of the captions of each picture, or none."""
        chosen = torch.randint(VARIANTS, (len(indices),), generator=generator, device=generator.device)
        is_left_out = torch.rand(len(indices), generator=generator, device=generator.device) < _UNCAPTIONED
        tokens = self._tokens[self._rows[indices].to(self.device), chosen].long()
        return {"captions": tokens.masked_fill(is_left_out[:, None], PADDING)}

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        save_model(path, self.model, self.vocabulary, facts | {"earlier": self.earlier}, self.recipe.packing)

    def pipeline(self) -> DrawingPipeline:
        pipeline = DrawingPipeline(self.model, self.vocabulary, guidance=self.recipe.guidance)
        pipeline.ask(self.recipe.prompts)
        return pipeline
