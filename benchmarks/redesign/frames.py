"""How many of the library's own Python frames lie between the processor of a FLUX layer and the launch.

    PYTHONPATH=src python benchmarks/redesign/frames.py [--device cpu|interpreter|cuda]

The stack is looked at where an implementation begins: on a CPU at its function that reads, elsewhere wherever a Triton
kernel is launched. Counted are the frames of files under `src/nearfield`, from the processor's own to the one that
reads or launches, both included. Frames of torch, Triton and diffusers are not.

A step that renames a place edits `PROCESSOR` and `LAUNCHES`, and nothing else here.

This folder serves the redesign alone, and goes away with its last commit.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "nearfield"

PROCESSOR = ("diffusers/processor.py", "__call__")
LAUNCHES = (("ops/attention/cpu.py", "attend_forward"), ("ops/attention/cpu.py", "attend_parts_forward"))
TRITON = {
    "interpreter": ("triton/runtime/interpreter.py", "__call__", "GridExecutor"),
    "cuda": ("triton/runtime/jit.py", "run", "JITFunction"),
}
METHODS = {
    "Hilbert()": {},
    'Hilbert(near="tile", far=None)': {"near": "tile", "far": None},
    'Hilbert(near="tile")': {"near": "tile"},
}


class Stacks:
    """The chains of own frames at every launch."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.found: list[tuple[str, ...]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._is_launch(frame):
            chain = self._chain(frame)
            if chain is not None:
                self.found.append(chain)

    def _is_launch(self, frame: FrameType) -> bool:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if self.device == "cpu":
            return any(name == what and file.endswith(f"nearfield/{where}") for where, what in LAUNCHES)
        where, what, kind = TRITON[self.device]
        # The interpreter also calls each device function by a `__call__`: that is no launch.
        return name == what and file.endswith(where) and type(frame.f_locals.get("self")).__name__ == kind

    def _chain(self, frame: FrameType | None) -> tuple[str, ...] | None:
        """From the processor on; None where there is none below."""
        chain: list[str] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
                file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
                chain.append(f"{file}: {code.co_qualname if sys.version_info >= (3, 11) else code.co_name}")
                if (file, code.co_name) == PROCESSOR:
                    return tuple(reversed(chain))
            frame = frame.f_back
        return None


def chains(fields: dict[str, Any], device: str) -> list[tuple[str, ...]]:
    """The chains of one layer's second call, when everything that is made once is made."""
    import names
    import torch

    tiny = names.tiny_models()
    place = "cuda" if device == "cuda" else "cpu"
    model = tiny.flux(layers=1, single_layers=0).to(place)
    inputs = {name: x.to(place) if hasattr(x, "to") else x for name, x in tiny.flux_inputs((12, 10)).items()}
    method = names.method("Hilbert", dense_layers=0, dense_steps=0, **fields)
    stacks = Stacks(device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with names.apply(model, method, impl="triton" if device == "interpreter" else "auto"):
            model(**inputs)
            sys.setprofile(stacks)
            try:
                model(**inputs)
            finally:
                sys.setprofile(None)
    return stacks.found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "interpreter", "cuda"), default="cpu")
    device = parser.parse_args().device
    if device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.path.insert(0, str(ROOT))
    import names

    if Path(names.PACKAGE).resolve().parent != PACKAGE:
        print(f"PYTHONPATH must name this tree's `src`; nearfield comes from {names.PACKAGE}.")
        return 2
    longest = 0
    for words, fields in METHODS.items():
        found = chains(fields, device)
        if not found:
            print(f"{words}: no launch was seen; look at PROCESSOR and LAUNCHES in {Path(__file__).name}")
            return 1
        for chain in dict.fromkeys(found):
            print(f"{words}: {len(chain)} frames, {found.count(chain)} times")
            for place in chain:
                print(f"    {place}")
            longest = max(longest, len(chain))
    print(f"longest: {longest} frames")
    return 0


if __name__ == "__main__":
    sys.exit(main())
