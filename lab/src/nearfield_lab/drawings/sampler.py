"""Pictures from captions, with guidance: away from what the model would draw without a caption."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import check_number
from nearfield_lab.drawings.model import DrawingFlux, load_model
from nearfield_lab.drawings.text import PADDING, Vocabulary
from nearfield_lab.embedded.autoencoder import Autoencoder
from nearfield_lab.embedded.sampler import DemoPipeline, Sampled

GUIDANCE = 4.0


class DrawingPipeline(DemoPipeline):
    """The model, its vocabulary, its scheduler and the autoencoder. `draw` makes a picture for each caption.

    Args:
        guidance: how far a velocity goes from that without a caption to that with it; 1 leaves out the former.
    """

    model: DrawingFlux

    def __init__(
        self,
        model: DrawingFlux,
        vocabulary: Vocabulary,
        autoencoder: Autoencoder | None = None,
        guidance: float = GUIDANCE,
    ) -> None:
        super().__init__(model, autoencoder)
        check_number("guidance", guidance)
        self.vocabulary, self.guidance = vocabulary, guidance
        self._captions = self._tokens([""])
        self._asked = self._captions

    @classmethod
    def load(
        cls, path: Path, device: torch.device | str = "cpu", guidance: float = GUIDANCE
    ) -> "DrawingPipeline":
        """A model from its file; in bfloat16 where that is fast."""
        model, vocabulary, _ = load_model(path)
        pipeline = cls(model, vocabulary, guidance=guidance)
        pipeline.to(device)
        if pipeline.device.type == "cuda":
            pipeline.halved()
        return pipeline

    def draw(self, captions: Sequence[str], **options: Any) -> Sampled:
        """A picture for each caption; `options` are those of a call. Picture `i` starts from noise number `i`."""
        self.ask(captions)
        return self(len(captions), **options)

    def ask(self, captions: Sequence[str]) -> None:
        """Let picture number `i` be of caption `i`, beginning anew behind the last one."""
        self._captions = self._tokens(captions)

    def sample(self, indices: range, **options: Any) -> Tensor:
        """Latents of one batch, of the captions with these numbers."""
        places = torch.tensor([index % len(self._captions) for index in indices])
        self._asked = self._captions[places].to(self.device)
        return super().sample(indices, **options)

    def velocity(self, latents: Tensor, timestep: Tensor, context: str = "cond", **condition: Any) -> Tensor:
        """What the model says of normalised latents at one of the timesteps, guided, in float32."""
        asked = super().velocity(latents, timestep, context, captions=self._asked, **condition)
        if self.guidance == 1:
            return asked
        nothing = torch.full_like(self._asked, PADDING)
        free = super().velocity(latents, timestep, f"un{context}", captions=nothing, **condition)
        return free + self.guidance * (asked - free)

    def _tokens(self, captions: Sequence[str]) -> Tensor:
        return self.vocabulary.tokens(captions, self.model.config.condition_tokens)
