"""Tensors in files: safetensors, read whole, written whole or not at all."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from nearfield._files import replace_file
from nearfield_lab.missing import MissingExtra


class Stored(dict[str, Tensor]):
    """The tensors of a file by name, and what the file says about itself."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata)


def load(path: Path) -> Stored:
    """Everything a safetensors file holds, on the CPU; ValueError where it is not such a file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise MissingExtra("safetensors", error, purpose="to read tensors") from None
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Stored(tensors, file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the whole file or nothing: a reader never sees half of it."""
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise MissingExtra("safetensors", error, purpose="to write tensors") from None
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    replace_file(path, lambda part: save_file(whole, part, dict(metadata)))
