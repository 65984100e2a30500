"""Distillation: a LoRA that teaches a model to do with sparse attention what it does with dense attention.

Teacher and student are one model: the teacher is called with its LoRA switched off and every layer dense, the student
with its LoRA on and attention as the method says. The loss is the mean squared error between their velocities. Nothing
is known about the model but that `apply` supports it, and nothing about the data but the calls the model gets.

Without a LoRA all weights are trained; the teacher is then a copy of the model.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from nearfield import recipes
from nearfield._checks import check_int, wrong_value
from nearfield.diffusers import apply, compiled_blocks
from nearfield.methods import Method
from nearfield_lab.embedded.model import TinyFlux
from nearfield_lab.embedded.sampler import precision
from nearfield_lab.missing import MissingExtra
from nearfield_lab.storage import write_tensors
from nearfield_lab.training.data import Latents
from nearfield_lab.training.flow import check_compilable, mixed, shifted
from nearfield_lab.training.loop import Draws, Loop, Outcome, Schedule
from nearfield_lab.training.runs import MODEL, OnStep, Run

LORA = "pytorch_lora_weights.safetensors"
"""The name under which diffusers looks for a LoRA in a folder."""

Write = Callable[[Path, Mapping[str, Any]], None]
"""Writes the model as it is to a file, with facts about it."""

Calls = Callable[[int, int], Mapping[str, Any]]
"""The arguments of the model for a step (from 0) and one of its parts."""

_ADAPTER = "nearfield"
_NOT_TUNED = ("norm", "embed", "modulation")
_DENSE_STEPS = re.compile(r"\bdense_steps=(\([^)]*\)|\[[^]]*\]|[^,()]*)")


@dataclass(frozen=True)
class Recipe:
    """What is distilled.

    Args:
        method: who reads whom in the student. Its `dense_steps` have no part in it.
        rank: of the LoRA, whose scale is 1 (alpha equals rank); None for no LoRA: all weights are trained.
        targets: names of the linear layers that get a LoRA; by default the layers of attention and feed-forward.
        seed: of the LoRA's weights.
        save_memory: compute activations again in the backward pass instead of keeping them.
        compiled: let torch.compile make teacher and student faster; the first step then takes a minute.
        is_one_size: all calls have the same sizes, as calls of the embedded model have; for `compiled`.
    """

    method: Method
    rank: int | None = 4
    targets: tuple[str, ...] | None = None
    seed: int = 0
    save_memory: bool = False
    compiled: bool = False
    is_one_size: bool = False

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_int("rank", self.rank, at_least=1)
        elif self.targets is not None:
            wrong_value("targets", "be left out where `rank` is None: all weights are trained", self.targets)
        check_compilable(self.method, self.compiled)
        self.method.with_dense_steps(0)  # refuses where the method has no such field


class Distillation(Run):
    """A transformer with its LoRA and loop. `run` trains and writes the LoRA.

    Args:
        transformer: any diffusers model that `apply` supports.
        calls: gives the arguments of the model, such as `latent_calls` or `RecordedCalls`.
        write: writes the model; needed where all of its weights are trained, and only there.
    """

    def __init__(
        self,
        transformer: Any,
        calls: Calls,
        folder: Path,
        recipe: Recipe,
        schedule: Schedule,
        *,
        on_step: OnStep | None = None,
        write: Write | None = None,
    ) -> None:
        if (write is None) != (recipe.rank is not None):
            wrong_value("write", "be given where the recipe's `rank` is None, and only there", write)
        super().__init__(folder, MODEL if recipe.rank is None else LORA, on_step)
        self.transformer, self.recipe = transformer, recipe
        self.device = next(transformer.parameters()).device
        self._calls, self._write = calls, write
        transformer.requires_grad_(False)
        self._copy = deepcopy(transformer).eval() if recipe.rank is None else None
        self.parameters = _all_weights(transformer) if recipe.rank is None else _add_lora(transformer, recipe)
        if recipe.save_memory:
            transformer.enable_gradient_checkpointing()
        # One step is dense, the other is not: a scheduler that stands still says which.
        self._phase = _Phase()
        student = recipe.method.with_dense_steps(1)
        self.handle = apply(transformer, student, scheduler=self._phase)
        facts = _as_now({"method": str(recipe.method), "rank": recipe.rank, "seed": recipe.seed})
        self.loop = Loop(self.parameters, self.loss, schedule, folder, facts, as_now=_as_now)

    def run(self) -> Outcome:
        self.transformer.train()
        try:
            # A call is the teacher's or the student's, and their blocks differ in what they are compiled for: layers of
            # the LoRA switched off or on, gradients, who reads whom. So each finds graphs of its own.
            with self._compiled():
                return self._trained(self.loop.schedule.checkpoint_seconds)
        finally:
            self.transformer.eval()

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in (self.transformer, self._copy) if self.recipe.compiled else ():
                if model is not None:
                    stack.enter_context(compiled_blocks(model, is_one_size=self.recipe.is_one_size))
            yield

    def loss(self, step: int, part: int) -> Tensor:
        arguments = self._calls(step, part)
        with precision(self.device):
            with torch.no_grad(), self.teacher() as teacher:
                wanted = tensors_in(teacher(**arguments))
            got = tensors_in(self.transformer(**arguments))
        losses = [mse_loss(one.float(), other.float()) for one, other in zip(got, wanted, strict=True)]
        return torch.stack(losses).mean()

    @contextmanager
    def teacher(self) -> Iterator[Any]:
        """The model as it was: dense, without the LoRA."""
        if self._copy is not None:
            yield self._copy
            return
        self._phase.step_index = 0
        _switch_lora(self.transformer, is_on=False)
        try:
            yield self.transformer
        finally:
            _switch_lora(self.transformer, is_on=True)
            self._phase.step_index = 1

    def facts(self) -> dict[str, Any]:
        recipe = recipes.Recipe(self.recipe.method).as_document()
        return {"recipe": recipe, "rank": self.recipe.rank, "step": self.loop.step}

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write the LoRA, as diffusers' `load_lora_weights` reads it; or the model."""
        if self._write is not None:
            self._write(path, facts)
        else:
            save_lora(path, self.transformer, facts)

    def close(self) -> None:
        """Leave the model as it was found, but for weights that were trained."""
        self.handle.remove()
        if self._copy is None:
            _remove_lora(self.transformer)
        self.transformer.requires_grad_(False)


def _as_now(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint must agree with: dense steps are none of it, though older ones name them."""
    return {**facts, "method": _DENSE_STEPS.sub("dense_steps=0", str(facts.get("method")))}


class _Phase:
    """As much of a scheduler as `apply` asks for."""

    def __init__(self) -> None:
        self.step_index = 1
        self.timesteps = (0, 1)


def _all_weights(transformer: nn.Module) -> dict[str, nn.Parameter]:
    return _trainable(dict(transformer.named_parameters()))


def _trainable(found: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    for value in found.values():
        value.data = value.data.float()  # small updates vanish in half precision
        value.requires_grad_(True)
    return found


def lora_targets(transformer: nn.Module) -> list[str]:
    """Linear layers inside the repeated blocks, without norms, embeddings and modulations."""
    return [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear)
        and any(piece.isdecimal() for piece in name.split(".")[:-1])  # a member of a list of blocks
        and not any(word in name for word in _NOT_TUNED)
    ]


def _add_lora(transformer: Any, recipe: Recipe) -> dict[str, nn.Parameter]:
    """By peft itself, which asks nothing of a model: not all of diffusers' classes know LoRAs."""
    peft = _peft()
    if getattr(transformer, "peft_config", None):
        wrong_value(
            "transformer", "have no LoRA yet", type(transformer).__name__, "Fuse it or unload it first."
        )
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.rank,
        target_modules=list(recipe.targets or lora_targets(transformer)),
        init_lora_weights="gaussian",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        peft.inject_adapter_in_model(config, transformer, adapter_name=_ADAPTER)
    named = transformer.named_parameters()
    return _trainable({name: value for name, value in named if f".{_ADAPTER}." in name})


def _switch_lora(transformer: Any, is_on: bool) -> None:
    """Only while it is computed: peft's own switch would also freeze the LoRA."""
    for module in transformer.modules():
        if hasattr(module, "_disable_adapters"):
            module._disable_adapters = not is_on


def _remove_lora(transformer: Any) -> None:
    for name, module in list(transformer.named_modules()):
        if hasattr(module, "_disable_adapters"):
            parent, _, child = name.rpartition(".")
            setattr(transformer.get_submodule(parent), child, module.get_base_layer())
    del transformer.peft_config


def save_lora(path: Path, transformer: Any, facts: Mapping[str, Any]) -> None:
    """The LoRA in half precision, under the names that diffusers and peft use."""
    state = _peft().get_peft_model_state_dict(transformer, adapter_name=_ADAPTER)
    prefix = "unet" if type(transformer).__name__.startswith("UNet") else "transformer"
    tensors = {f"{prefix}.{name}": tensor.half() for name, tensor in state.items()}
    write_tensors(path, tensors, {"kind": "lora"} | dict(facts))


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", error, "train") from None
    return peft


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of a model's output, whatever it is wrapped in."""
    if isinstance(output, Tensor):
        return [output]
    parts: Sequence[Any] = list(output.values()) if isinstance(output, Mapping) else output
    return [tensor for part in parts for tensor in tensors_in(part)]


def latent_calls(model: TinyFlux, latents: Latents, batch: int, parts: int = 1, seed: int = 0) -> Calls:
    """Calls of the embedded model: real latents at noise levels that are uniform, but for the model's shift."""
    device, shift = model.latent_mean.device, model.config.shift
    draws = Draws(seed, device)
    if batch % parts:
        wrong_value("batch", f"be a multiple of `parts` ({parts})", batch)

    def call(step: int, part: int) -> dict[str, Any]:
        indices = draws.indices(step, part, batch, parts, len(latents))
        clean = model.normalised(latents.take(indices).to(device))
        generator = draws.generator(step, part)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        level = shifted(torch.rand(len(clean), generator=generator, device=device), shift)
        return model.arguments(mixed(clean, noise, level), level)

    return call
