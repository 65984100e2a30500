"""Tensors and the facts about them in one safetensors file, written whole or not at all, with a checksum."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nearfield._files import BadFile, check_fields, parsed_json, replace_file
from nearfield_lab.missing import MissingExtra

_FACTS, _CHECKSUM = "nearfield", "nearfield-sha256"
Found = TypeVar("Found")

__all__ = ["BadFile", "read_facts", "read_tensors", "require_finite", "write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, with `facts` as JSON and a checksum of both in the header."""
    package = _safetensors()
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    header = {"format": "pt", _FACTS: text, _CHECKSUM: _checksum(plain, text)}
    try:
        replace_file(path, lambda part: package.torch.save_file(plain, str(part), metadata=header))
    except package.SafetensorError as error:  # such as a full disk
        raise OSError(f"{path} was not written: {error}") from None


def read_tensors(
    path: Path, device: torch.device | str = "cpu", fields: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the facts; no facts where another program wrote the file.

    A file that `write_tensors` wrote is refused where its checksum does not fit what it holds.

    Args:
        fields: what the facts must hold, see `check_fields`.
    """
    tensors, text, checksum = _opened(path, _tensors_in)
    if checksum is not None and checksum != _checksum(tensors, text):
        raise BadFile(f"{path} is damaged: its checksum does not fit what it holds")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, _facts(path, text, fields or {})


def read_facts(path: Path) -> dict[str, Any]:
    """The facts alone, without a look at the tensors."""
    return _facts(path, _opened(path, lambda file: None)[1], {})


def require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are no numbers."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BadFile(f"`{name}` in {path} must hold finite numbers; got NaN or infinity")


def _tensors_in(file: Any) -> dict[str, Tensor]:
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _opened(path: Path, read: Callable[[Any], Found]) -> tuple[Found, str, str | None]:
    """What `read` finds in a file, the text of its facts, and its checksum."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    package = _safetensors()
    try:
        with package.safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            return read(file), header.get(_FACTS, "{}"), header.get(_CHECKSUM)
    except (package.SafetensorError, ValueError, RuntimeError) as error:
        raise BadFile(f"{path} is no whole safetensors file: {error}") from None


def _facts(path: Path, text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = parsed_json(f"the header of {path}", text)
    check_fields(f"the header of {path}", facts, fields)
    return facts


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingExtra("safetensors", error) from None
    return safetensors
