"""The model whose pictures the page shows: the embedded one, one of `nearfield train demo`, or a diffusers pipeline."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nearfield import Geometry
from nearfield._checks import wrong_value
from nearfield.methods import Method
from nearfield_lab.embedded import generate
from nearfield_lab.embedded.autoencoder import PIXELS_PER_TOKEN
from nearfield_lab.embedded.generate import NoWeights, Sampler
from nearfield_lab.embedded.lora import FusedLora, suits
from nearfield_lab.embedded.model import EMBEDDED_LORA, ModelConfig
from nearfield_lab.embedded.sampler import DemoPipeline, OnStep

# Of FLUX.1 and most others; used for drawing before a pipeline is opened: its own facts are known after a run.
_PIPELINE_PIXELS_PER_TOKEN, _PIPELINE_TEXT, _PIPELINE_SIZE = 16, 512, 1024
_MOST_PIXELS = {"cpu": 1024**2, "cuda": 4096**2}


class PictureModel:
    """One choice of the page. A model file is read at once, a pipeline when its first picture is asked for.

    Args:
        weights: a file of `nearfield train demo`; the embedded model without.
        pipeline: the id or folder of a diffusers pipeline, instead.
    """

    def __init__(
        self, device: torch.device, weights: Path | None = None, pipeline: str | None = None
    ) -> None:
        self.device = device
        self.problem: str | None = None
        self.takes_prompt = pipeline is not None
        self.pixels_per_token, self.text, self.size = (
            _PIPELINE_PIXELS_PER_TOKEN,
            _PIPELINE_TEXT,
            _PIPELINE_SIZE,
        )
        self.name = pipeline or (weights.name if weights else "embedded: cats")
        self._opened: Any = None
        self._lora: FusedLora | None = None
        self._lock = threading.Lock()
        if pipeline is None:
            self._read(weights)

    def _read(self, weights: Path | None) -> None:
        config = ModelConfig()
        try:
            self._opened = DemoPipeline.load(weights or generate.embedded_weights(), self.device)
            config = self._opened.model.config
        except NoWeights as error:
            self.problem = f"No pictures can be made: {error}."
        if weights is None and self._opened is not None and EMBEDDED_LORA.exists():
            self._lora = FusedLora(self._opened.transformer, EMBEDDED_LORA)
        self.pixels_per_token, self.text, self.size = PIXELS_PER_TOKEN, config.condition_tokens, config.size

    def geometry(self, height: int, width: int) -> Geometry:
        """The tokens of a picture with sides in pixels; refuses what is too large, or is no whole number of tokens."""
        step, most = self.pixels_per_token, _MOST_PIXELS.get(self.device.type, _MOST_PIXELS["cpu"])
        for name, side in (("height", height), ("width", width)):
            if not isinstance(side, int) or side < 4 * step or side % step:
                wrong_value(name, f"be a multiple of {step} pixels, from {4 * step}", side)
        if height * width > most:
            rule = f"be at most {round(most**0.5)} x {round(most**0.5)} pixels on this device"
            wrong_value("size", rule, f"{height} x {width}")
        return Geometry((height // step, width // step), text=self.text)

    def pipeline(self) -> Any:
        """What `apply` takes; opened once."""
        if self.problem:
            raise NoWeights(self.problem)
        with self._lock:
            if self._opened is None:
                self._opened = generate.open_pipeline(self.name, self.device)
            return self._opened

    def sampler(
        self, size: tuple[int, int], steps: int, seed: int, prompt: str, on_step: OnStep | None
    ) -> Sampler:
        """What makes one picture."""
        opened = self.pipeline()
        if not self.takes_prompt:
            return generate.demo_sampler(opened, 1, on_step, size=size, steps=steps, seed=seed)
        if not prompt.strip():
            wrong_value("prompt", "say what to draw", repr(prompt))
        return generate.pipeline_sampler(
            opened, prompt, 1, size=size, steps=steps, seed=seed, on_step=on_step
        )

    @contextmanager
    def tuned_for(self, method: Method, is_wanted: bool = True) -> Iterator[FusedLora | None]:
        """With the embedded model's LoRA, where it was made for the method and is wanted."""
        lora = self._lora
        if lora is None or not is_wanted or not suits(lora.method, method):
            yield None
            return
        lora.switch(True)
        try:
            yield lora
        finally:
            lora.switch(False)
