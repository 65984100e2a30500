"""Calls of a model on disk: what a pipeline asks of its transformer while it makes pictures, to distill from later.

Any model can be distilled from its own calls, without a data set and without knowing what its arguments mean.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import wrong_type
from nearfield._files import write_json
from nearfield_lab.storage import BadFile, read_tensors, write_tensors
from nearfield_lab.training.loop import Draws

_TENSOR = "__tensor__"


def record(
    pipeline: Any,
    prompts: Sequence[str | Mapping[str, Any]],
    folder: Path,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int, str], None] | None = None,
    **options: Any,
) -> list[Path]:
    """Make a picture for every prompt, and write every call of the transformer to a file of its own.

    Prompts whose calls are there are passed over, so an interrupted recording goes on where it stopped.

    Args:
        prompts: texts, or arguments of the pipeline in their place (`prompt_embeds` ...).
        options: further arguments of the pipeline (`height`, `num_inference_steps` ...).
    """
    for number, prompt in enumerate(prompts):
        if on_progress is not None:
            on_progress(number, len(prompts), "recording calls")
        done = folder / f"prompt-{number:05d}.json"
        if not done.exists():
            given = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
            _record_one(pipeline, folder, number, seed, given | options)
            write_json(done, {"prompt": given.get("prompt")})
    return recorded_files(folder)


def _record_one(pipeline: Any, folder: Path, number: int, seed: int, options: Mapping[str, Any]) -> None:
    step = 0

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal step
        if args:
            wrong_type(
                "pipeline", "call its transformer by names of arguments", f"{len(args)} without a name"
            )
        write_call(folder / f"call-{number:05d}-{step:03d}.safetensors", kwargs)
        step += 1

    hook = pipeline.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        generator = torch.Generator().manual_seed(seed + number)
        pipeline(generator=generator, output_type="latent", **options)
    finally:
        hook.remove()


def recorded_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("call-*.safetensors"))


def write_call(path: Path, arguments: Mapping[str, Any]) -> None:
    tensors: list[Tensor] = []
    shape = _taken_apart(dict(arguments), tensors)
    write_tensors(
        path, {str(number): tensor.clone() for number, tensor in enumerate(tensors)}, {"call": shape}
    )


def read_call(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    tensors, facts = read_tensors(path, device)
    if not isinstance(facts.get("call"), dict):
        raise BadFile(f"{path} is no recorded call")
    try:
        call: dict[str, Any] = _put_together(facts["call"], tensors)
    except KeyError as error:
        raise BadFile(f"{path} is no whole recorded call: it lacks tensor {error}") from None
    return call


class RecordedCalls:
    """Calls in an order that depends on the seed; every one once per epoch. One call per part of a step."""

    def __init__(self, files: Sequence[Path], parts: int, device: torch.device, seed: int = 0) -> None:
        if not files:
            raise BadFile("no calls were recorded")
        self._files, self._parts, self._device = list(files), parts, device
        self._draws = Draws(seed, torch.device("cpu"))

    def __call__(self, step: int, part: int) -> dict[str, Any]:
        index = self._draws.indices(step, part, self._parts, self._parts, len(self._files))
        return read_call(self._files[int(index)], self._device)


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The value with a number for each tensor; the tensors are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {name: _taken_apart(part, tensors) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_taken_apart(part, tensors) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    wrong_type("arguments", "hold tensors and plain values", type(value).__name__)


def _put_together(shape: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(shape, dict):
        if _TENSOR in shape:
            return tensors[str(shape[_TENSOR])]
        return {name: _put_together(part, tensors) for name, part in shape.items()}
    if isinstance(shape, list):
        return [_put_together(part, tensors) for part in shape]
    return shape
