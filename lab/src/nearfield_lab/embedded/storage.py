"""Tensors and the facts about them in one safetensors file, written whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._files import replace_file
from nearfield_lab.missing import MissingExtra

_FACTS = "nearfield"


class BadFile(OSError):
    """A file that is not what it should be; the message says which and why."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, with `facts` as JSON in the header."""
    save = _safetensors().torch.save_file
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": "pt", _FACTS: json.dumps(facts, sort_keys=True, allow_nan=False)}
    replace_file(path, lambda part: save(plain, str(part), metadata=header))


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the facts; no facts where another program wrote the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    package = _safetensors()
    try:
        with package.safe_open(str(path), "pt", device=str(device)) as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(header.get(_FACTS, "{}"))
    except (package.SafetensorError, json.JSONDecodeError) as error:
        raise BadFile(f"{path} is no whole safetensors file: {error}") from None


def read_facts(path: Path) -> dict[str, Any]:
    """The facts alone."""
    package = _safetensors()
    try:
        with package.safe_open(str(path), "pt") as file:
            facts: dict[str, Any] = json.loads((file.metadata() or {}).get(_FACTS, "{}"))
            return facts
    except (package.SafetensorError, json.JSONDecodeError) as error:
        raise BadFile(f"{path} is no whole safetensors file: {error}") from None


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingExtra("safetensors", error) from None
    return safetensors
