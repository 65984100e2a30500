"""Make the page of what works where: `python docs/build.py` writes it, and a test holds it.

Three sources, none of them written by hand: what the adapters' tables say of a model, what is tried here (every method
in every model, tiny and random), and which models the tests of a feature run for.
"""

import importlib
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
sys.path[:0] = [path for path in (str(ROOT / "src"), str(ROOT)) if path not in sys.path]

from tests import tiny_models  # noqa: E402

import nearfield  # noqa: E402
from nearfield.diffusers import Spec, all_specs  # noqa: E402
from nearfield.methods import Method, fields, method_classes  # noqa: E402

# In float64 two orders of the same sums differ by much less; what a method leaves out, by much more. Rotary tables are
# float32, in which a difference of the last bit may be rounded.
SAME = 1e-6


class Tried(NamedTuple):
    """A method to try: with fields that leave something out, and, where there are such, with fields that do not."""

    method: Any
    whole: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, kind: type[Method]) -> "Tried":
        """With the fields that the method itself names, in all layers, blocks and steps."""
        own = {field.name for field in fields.fields_of(kind)}
        nowhere = {"dense_layers": 0, "dense_steps": 0, "skip_blocks": (0, 0)}
        given = {name: value for name, value in nowhere.items() if name in own} | dict(kind.example)
        return cls(kind(**given), kind.everything)


def all_methods() -> dict[str, Tried]:
    """Every method that is known, those to compare with last."""
    kinds = sorted(method_classes(installed=False).values(), key=lambda kind: kind.is_baseline)
    return {kind.__name__: Tried.of(kind) for kind in kinds}


COVERED: dict[str, tuple[tuple[str, str], ...]] = {
    "ControlNet": (("test_adapters", "test_controlnet_residuals_meet_their_tokens"),),
    "LoRA": (
        ("test_adapters_features", "test_lora_loaded_and_unloaded_between_calls"),
        ("test_adapters_video", "test_lora_loaded_and_unloaded_between_calls"),
    ),
    "blocks compiled": (
        ("test_adapters_features", "test_compiled_blocks_take_any_size"),
        ("test_adapters_video", "test_compiled_blocks"),
    ),
    "compiled whole": (
        ("test_adapters_features", "test_whole_model_compiled"),
        ("test_adapters_features", "test_whole_model_compiled_but_not_for_another_size_of_as_many_tokens"),
    ),
    "gradients": (
        ("test_adapters_features", "test_gradients_with_and_without_checkpointing"),
        ("test_adapters_video", "test_gradients_with_and_without_checkpointing"),
    ),
}
"""Features, and the tests that run them for models by name."""

STATED: dict[str, Callable[[Spec], bool]] = {
    "references": lambda spec: spec.takes_references,
    "video": lambda spec: spec.is_video,
    "merged blocks": lambda spec: bool(spec.blocks),
    "split over ranks": lambda spec: spec.can_split,
}
"""Features that the tables of the adapters state."""


MARKS = (
    "The adapters' tables state: {stated}. In the other columns a mark says that a test of the feature runs for this"
    " class. Where there is none, the feature was not tested with the class, or diffusers does not have it."
)

TEXT = """# Support matrix

Made by `make docs` from the adapters' tables and the tests; a test fails where it is out of date. What users call these
models, and what goes together with what, is on the page of [models](models.md).

## Models and methods

Every method was tried in a tiny model of each class with random weights, in float64, while this page was made.

- **exact**: with fields that read everything, or merge nothing, it is the stock model; with others it is not.
- **runs**: it changes what the model computes and has no such fields; the tests of the method hold it.
- **-**: refused with a reason.

{methods}

## Models and features

{marks}

{features}

## Versions

The lower bounds of both `pyproject.toml` are versions that were tried, by `make package` (diffusers) and `make smoke`
(everything, in clean environments), which also try the newest: FLUX.1 with and without `apply`, the embedded model's
picture, the commands.

| | lowest | newest that was tried | all tests run with |
| --- | --- | --- | --- |
| torch | 2.11.0 | 2.15.0 | 2.13.0, on a GPU 2.11.0 |
| diffusers | 0.39.0 | 0.42.1 | 0.42.0 |
| transformers | 5.0.0 | 5.23.0 | 5.22.2 |
| peft | 0.18.0 | 0.21.2 | 0.21.2 |
| Triton | 3.6.0 | 3.9.0 | 3.7.1 (interpreted), on a GPU 3.6.0 |
| Python | 3.11 | 3.12 | 3.11; of 3.10 see below |

- torch: with either end the tests of `apply` pass on the CPU. Before 2.11 it was not tried: such CUDA builds bring a
  Triton before 3.6, for which there are no kernels here.
- diffusers: with 0.39.0 the tests of adapters pass, but for offloading by groups on a machine without a GPU, which
  breaks in diffusers itself. Earlier releases are not supported, though from 0.35 on FLUX.1, SD3, PixArt, the UNet and
  videos compute the right thing; FLUX.2 does not before 0.38, nor Qwen-Image with merged blocks before 0.39.
- transformers: with 5.0.0 the tests of retrieval pass.
- peft: 0.17 cannot be imported beside transformers 5.
- Triton: the Hopper kernels compile under 3.6.0 and 3.9.0.
- Python: 3.10 is allowed, and nothing was run under it but its compiler (3.10.13), which takes every file; types are
  checked for 3.10, and no name of a later standard library is used. pip finds no newer diffusers for it than 0.41, no
  newer transformers than 5.20 and no newer Triton than 3.8.
"""


def page() -> str:
    features = {name: covered(tests) for name, tests in COVERED.items()}
    header = ["model", "sequence", *STATED, *features]
    rows = [
        [
            f"`{spec.model}`",
            sequence(spec),
            *(_tick(states(spec)) for states in STATED.values()),
            *(_tick(_is_among(spec, names)) for names in features.values()),
        ]
        for spec in all_specs()
    ]
    known = all_methods()
    methods = [[f"`{spec.model}`", *(tried(spec, one) for one in known.values())] for spec in all_specs()]
    return TEXT.format(
        methods=_table(["model", *(f"`{name}`" for name in known)], methods),
        features=_table(header, rows),
        marks=textwrap.fill(MARKS.format(stated=", ".join(STATED)), 125),
    )


def sequence(spec: Spec) -> str:
    image = "video" if spec.is_video else "image"
    if not spec.text:
        return image
    return f"text, {image}" if spec.text_first else f"{image}, text"


def tried(spec: Spec, one: Tried) -> str:
    """What comes of a method in a model of this class."""
    make, inputs_of = (tiny_models.MODELS | tiny_models.VIDEO_MODELS)[spec.name]
    grid = (3, 4, 6) if spec.is_video else (8, 12)
    model, inputs = make().double(), _double(inputs_of(grid))
    stock = _run(model, inputs)
    sparse = _applied(model, inputs, one.method)
    if sparse is None:
        return "-"
    if not torch.isfinite(sparse).all() or torch.allclose(sparse, stock, rtol=0, atol=SAME):
        return "wrong"
    if one.whole is None:
        return "runs"
    whole = _applied(model, inputs, replace(one.method, **one.whole))
    return "exact" if whole is not None and torch.allclose(whole, stock, rtol=0, atol=SAME) else "wrong"


def _applied(model: Any, inputs: dict[str, Any], method: Any) -> Tensor | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of methods for models that are trained with them
        try:
            handle = nearfield.apply(model, method)
        except (ValueError, NotImplementedError):
            return None
        with handle:
            try:
                return _run(model, inputs)
            except (ValueError, NotImplementedError):
                return None


def covered(tests: Iterable[tuple[str, str]]) -> set[str]:
    """The names of models, and whatever else is a word, that some tests are parametrised by."""
    words: set[str] = set()
    for module, name in tests:
        test = getattr(importlib.import_module(f"tests.{module}"), name)
        for mark in test.pytestmark:
            if mark.name == "parametrize":
                words |= {value for value in mark.args[1] if isinstance(value, str)}
    return words


def _is_among(spec: Spec, names: set[str]) -> bool:
    """Also where a test runs for a variant of the class: `wan_ti2v` is Wan, but `flux2` is not FLUX.1."""
    return any(name == spec.name or name.startswith(f"{spec.name}_") for name in names)


def _run(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return tiny_models.first(model(**inputs))


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _double(item) for name, item in value.items()}
    return [_double(item) for item in value] if isinstance(value, list) else value


def _tick(is_so: bool) -> str:
    return "yes" if is_so else ""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(line) for line in [header, *rows]]
    return "\n".join(f"| {line} |" for line in [lines[0], " | ".join(["---"] * len(header)), *lines[1:]])


def write() -> None:
    """The page, whole or not at all."""
    draft = PAGE.with_suffix(".draft")
    draft.write_text(page(), encoding="utf-8")
    draft.replace(PAGE)


if __name__ == "__main__":
    write()
