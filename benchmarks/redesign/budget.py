"""The error budget of gradients that are made of several parts apart today.

The rule is the tests': an implementation may be wrong by twice what plain attention in the precision of its inputs is
wrong by. What the library gave before the redesign stands for the latter here. Kept are its error, and of the exact
gradient (the case in float64 by the reference) some values, and some sums of all values with signs, which no error
anywhere escapes.

This folder serves the redesign alone, and goes away with its last commit.
"""

from typing import Any

import torch
from ground import hashed
from torch import Tensor

SAMPLES, SUMS = 4, 4


def recorded(results: dict[str, Any], exact: dict[str, Any], case: str) -> dict[str, Any]:
    """What `excess` needs of every gradient."""
    found = {}
    least = 1e-4 if results["out"].dtype in (torch.float32, torch.float64) else 0.05
    for name, got in results.items():
        if not name.startswith("grad "):
            continue
        error, size = _largest(got.double() - exact[name].double()), _largest(exact[name])
        # A case whose float64 is another one (which chose other blocks, say) would allow anything.
        assert error <= least * max(1.0, size), f"{case}: {name} is wrong by {error:.3g} of {size:.3g}"
        digits = 17 if got.dtype == torch.float64 else 9
        sums = [float(f"{value:.{digits}g}") for value in _signature(exact[name].double())]
        found[name] = {"allowed": float(f"{2 * error + _slack(got.dtype, size):.4g}"), "exact": sums}
    return found


def excess(got: Tensor, known: dict[str, Any]) -> str | None:
    """Why a gradient is outside its budget, or None."""
    count = got.numel()
    allowed = [known["allowed"]] * SAMPLES + [known["allowed"] * count**0.5] * SUMS
    mine = _signature(got.detach().double())
    for number, (value, exact, most) in enumerate(zip(mine, known["exact"], allowed, strict=True)):
        if not abs(value - exact) <= most:
            what = "a value" if number < SAMPLES else "a signed sum"
            return f"is outside its budget: {what} is {value:.9g}, should be {exact:.9g} within {most:.3g}"
    return None


def _slack(dtype: torch.dtype, size: float) -> float:
    epsilon = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    return float(8 * epsilon * max(1.0, size))


def _signature(x: Tensor) -> list[float]:
    """Some values, and sums of all with signs."""
    flat = x.detach().cpu().flatten()
    places = hashed(SAMPLES, 3) % len(flat)
    signs = (hashed(SUMS * len(flat), 4) % 2).view(SUMS, -1).double() * 2 - 1
    return [*flat[places].tolist(), *(signs * flat).sum(1).tolist()]


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
