"""What the cases stand on: inputs made by integer arithmetic, the list of cases, gradients.

This folder serves the redesign alone, and goes away with its last commit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Any]
"""Tensors by name; also numbers, texts, lists and tuples of them."""


def hashed(count: int, seed: int) -> Tensor:
    """`count` integers of 32 bits, `[count]` int64: the same with every release of torch and on every device."""
    x = torch.arange(count, dtype=torch.int64, device="cpu") + (seed * 0x3C6EF372 + 0x1234567) % 2**32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x046CA68B), (16, 0x2C1B3C6D)):
        x = x & 0xFFFFFFFF
        x = (x ^ (x >> shift)) * factor
    x = x & 0xFFFFFFFF
    return x ^ (x >> 16)


def normals(shape: Sequence[int], seed: int) -> Tensor:
    """Nearly normal numbers with mean 0 and deviation 1, float64: sums of four integers of 16 bits."""
    count = int(torch.Size(shape).numel())
    parts = [(part & 0xFFFF) + (part >> 16) for part in hashed(2 * count, seed).view(2, count)]
    return ((parts[0] + parts[1] - 131070).double() / 37837).view(*shape)


@dataclass(frozen=True)
class Ground:
    """Where a case runs.

    Args:
        device: of all tensors.
        impl: passed on to everything that takes it.
        is_exact: all inputs are the same numbers in float64, and `impl` is "reference".
    """

    device: torch.device
    impl: str
    is_exact: bool = False

    def exact(self) -> "Ground":
        return replace(self, impl="reference", is_exact=True)

    def normal(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = normals(shape, seed).to(dtype)
        return (made.double() if self.is_exact else made).to(self.device)

    def share(self, *shape: int, seed: int, below: float) -> Tensor:
        """True for about that share, bool."""
        return (hashed(int(torch.Size(shape).numel()), seed) < below * 2**32).view(*shape).to(self.device)

    def integers(self, *shape: int, seed: int, below: int) -> Tensor:
        return (hashed(int(torch.Size(shape).numel()), seed) % below).view(*shape).to(self.device)

    def qkv(
        self,
        tokens: int,
        keys: int | None = None,
        *,
        batch: int = 1,
        heads: int = 2,
        groups: int | None = None,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        side = batch, groups or heads, tokens if keys is None else keys, dim
        query = self.normal(batch, heads, tokens, dim, seed=seed, dtype=dtype)
        key, value = (self.normal(*side, seed=seed + part, dtype=dtype) for part in (1000, 2000))
        return query, key, value


@dataclass(frozen=True)
class Case:
    """One call, or several, and what it gives.

    Args:
        run: gives the results.
        impl: the implementation it is run by.
        apart: parts are differentiated apart today. Gradients then stay inside the error budget; `out` and `lse` of the
            differentiated call are those of today, or those of the call without gradients.
    """

    name: str
    run: Callable[[Ground], Results]
    impl: str
    apart: bool = False


DEVICES = ("cpu", "interpreter", "cuda")
IMPLS = {"cpu": ("grouped", "reference"), "interpreter": ("triton",), "cuda": ("auto", "triton", "gluon")}
FIRST = {"cpu": ("auto",), "interpreter": ("triton",), "cuda": ("auto",)}
"""Where a case is not about implementations."""

_MADE: list[tuple[str, Callable[[Ground], Results], tuple[str, ...], bool, Callable[[str, str], bool]]] = []


def never(device: str, impl: str) -> bool:
    return False


def plain(device: str, impl: str) -> bool:
    """Plain torch differentiates several parts apart today."""
    return device == "cpu"


def joint(device: str, impl: str) -> bool:
    """Everything differentiates several parts apart today where one has positions."""
    return True


def case(
    name: str,
    run: Callable[[Ground], Results],
    *,
    devices: Sequence[str] = DEVICES,
    every_impl: bool = False,
    apart: Callable[[str, str], bool] = never,
) -> None:
    """Add a case to the list."""
    _MADE.append((name, run, tuple(devices), every_impl, apart))


def cases(device: str) -> list[Case]:
    """All cases of a device."""
    found = [
        Case(f"{name} [{impl}]", run, impl, apart(device, impl))
        for name, run, devices, every_impl, apart in _MADE
        if device in devices
        for impl in (IMPLS if every_impl else FIRST)[device]
    ]
    assert len({one.name for one in found}) == len(found), "two cases have one name"
    return found


# -- gradients ---------------------------------------------------------------------------------------------------------


def differentiated(
    function: Callable[..., tuple[Tensor, Tensor]],
    leaves: dict[str, Tensor],
    ground: Ground,
    cotangents: str = "both",
) -> Results:
    """`out` and `lse` without gradients, then with them, and the gradients of all leaves.

    Args:
        function: called with the leaves, gives `out` and `lse`.
        cotangents: "both", or only that of "out" or of "lse".
    """
    with torch.no_grad():
        out, lse = function(*leaves.values())
    results: Results = {"plain out": out, "plain lse": lse}
    inputs = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    out, lse = function(*inputs.values())
    results |= {"out": out.detach(), "lse": lse.detach()}
    wanted = {"both": (out, lse), "out": (out,), "lse": (lse,)}[cotangents]
    grads = [
        ground.normal(*x.shape, seed=77 + number, dtype=torch.float32).to(x.dtype)
        for number, x in enumerate(wanted)
    ]
    found = torch.autograd.grad(wanted, list(inputs.values()), grads, allow_unused=True)
    named = zip(inputs, found, strict=True)
    return results | {f"grad {name}": x for name, x in named if x is not None}


def parameter_gradients(
    module: torch.nn.Module, out: Tensor, ground: Ground, inputs: dict[str, Tensor]
) -> Results:
    """A module's result, and the gradients of inputs and parameters."""
    leaves = inputs | dict(module.named_parameters())
    grad = ground.normal(*out.shape, seed=78).to(out.dtype)
    found = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    named = zip(leaves, found, strict=True)
    return {"out": out.detach()} | {f"grad {name}": x for name, x in named if x is not None}


def fill(module: torch.nn.Module, ground: Ground, size: float = 0.5) -> Any:
    """Give every parameter of a module numbers of its own."""
    for seed, parameter in enumerate(module.parameters()):
        made = normals(parameter.shape, 500 + seed).float() * size / max(1, parameter.shape[-1]) ** 0.5
        parameter.data = (made.double() if ground.is_exact else made).to(ground.device)
    return module
