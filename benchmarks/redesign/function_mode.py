"""What the function mode around an attention layer costs on the host, alone.

    PYTHONPATH=src:. python benchmarks/redesign/function_mode.py [--layers 57] [--repeats 30]

A `TorchFunctionMode` sees every call to torch inside of it, so `apply` no longer uses one around a layer. Here a tiny
FLUX with many layers runs with tensors so small that the host alone takes time: first as it is, then with processors
that do nothing but enter such a mode and pass every call on. The difference is what the mode costs. Measured is the
processor time of this process, in rounds that alternate; the median and the smallest are printed.

This folder serves the redesign alone, and goes away with its last commit.
"""

import argparse
import inspect
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import tiny_models  # noqa: E402

import nearfield  # noqa: E402


class PassOn(TorchFunctionMode):
    """Looks at every call to torch, as the real mode does, and takes over none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def watched(processor: Any) -> Any:
    """The same processor, called inside of a mode."""
    kind = type(processor)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with PassOn():
            return kind.__call__(self, *args, **kwargs)

    call.__signature__ = inspect.signature(kind.__call__)  # type: ignore[attr-defined]
    other = type(f"Watched{kind.__name__}", (kind,), {"__call__": call})
    return other()


def step(model: Any, inputs: Any, times: int) -> float:
    """Microseconds of processor time of one call of the model."""
    begin = time.process_time()
    for _ in range(times):
        model(**inputs)
    return (time.process_time() - begin) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=57, help="of which a third is joint")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    joint = options.layers // 3
    models = [tiny_models.flux(joint, options.layers - joint) for _ in range(3)]
    inputs = tiny_models.flux_inputs((4, 4))
    _, in_mode, sparse = models
    for module in in_mode.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(watched(module.processor))
    nearfield.apply(sparse, nearfield.Hilbert(dense_layers=0, dense_steps=0))
    found: list[list[float]] = [[], [], []]
    with torch.no_grad():
        for _ in range(options.repeats):
            for model, times in zip(models, found, strict=True):
                times.append(step(model, inputs, 2))
    for name, reduce in (("median", statistics.median), ("smallest", min)):
        plain, moded, applied = (reduce(times) for times in found)
        cost = moded - plain
        print(
            f"{name}: {plain:.0f} us a step as it is, {moded:.0f} us inside modes, {applied:.0f} us with apply;"
            f" the mode costs {cost / options.layers:.1f} us a layer, {cost / plain:.1%} of the step as it is and"
            f" {cost / applied:.1%} of the step with apply, in which a CPU also computes the attention"
        )


if __name__ == "__main__":
    main()
