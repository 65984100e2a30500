"""Is the answer right? Sampled rows against float64, with an error budget taken from data.

The budget of every sample is twice the error that plain torch makes on it in the same low precision. Fresh memory is
filled with NaN during the checked call, so a result that was never written cannot pass for a number.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.methods import FarField, Summary
from nearfield.plan import Plan

Inputs = tuple[Tensor, Tensor, Tensor]
Head = tuple[int, int]


@dataclass(frozen=True)
class Checked:
    """The worst sample: its error, the error it may have, and which it was."""

    error: float
    limit: float
    where: str

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN too

    def __str__(self) -> str:
        if self.error != self.error:
            return self.where
        verdict = "within" if self.passed else "exceeds"
        return f"relative error {self.error:.2e} {verdict} {self.limit:.2e} ({self.where})"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN instead of whatever was there."""
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def relative_error(got: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def check_forward(
    inputs: Inputs,
    plan: Plan,
    out: Tensor,
    lse: Tensor | None,
    *,
    rows: Sequence[int] = (),
    far: FarField | None = None,
    summary: Summary = "mean",
) -> Checked:
    """Compare several query blocks of several heads; every other value must at least be finite.

    Args:
        lse: None where it is not known.
        rows: query blocks to compare besides the first, the middle and the last.
        far, summary: summaries that are read, too, and of which kind.
    """
    if not bool(torch.isfinite(out).all()):
        return Checked(float("nan"), 0.0, "out holds values that are not finite")
    samples = []
    for head in _heads(inputs[0]):
        for row in sorted({*_picked(plan.num_rows), *rows}):
            exact, rough = (
                _row_outputs(inputs, plan, head, row, dtype, far, summary)
                for dtype in (torch.float64, out.dtype)
            )
            for name, got, want, low in zip(("out", "lse"), (out, lse), exact, rough, strict=True):
                if got is not None:
                    where = f"{name}, head {head[1]}, row {row}"
                    samples.append(compare(got[head][_rows(plan, row)], want, low, where))
    return worst(samples)


def check_backward(inputs: Inputs, plan: Plan, grad_out: Tensor, gradients: Inputs) -> Checked:
    """Compare the query gradients of several query blocks, and the key and value gradients of several key blocks."""
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        if not bool(torch.isfinite(gradient).all()):
            return Checked(float("nan"), 0.0, f"the gradient of {name} holds values that are not finite")
    samples = []
    for head in _heads(inputs[0]):
        for row in _picked(plan.num_rows):
            got = gradients[0][head][_rows(plan, row)]
            exact, rough = (
                _row_gradients(inputs, plan, grad_out, head, row, low)[0] for low in (False, True)
            )
            samples.append(compare(got, exact, rough, f"query gradient, head {head[1]}, row {row}"))
        for column in _picked(plan.num_columns, most=2):
            keys = slice(column * plan.k_block, min((column + 1) * plan.k_block, plan.num_keys))
            sums = [_column_gradients(inputs, plan, grad_out, head, keys, low) for low in (False, True)]
            for index, name in enumerate(("key", "value")):
                got = gradients[index + 1][head][keys]
                where = f"{name} gradient, head {head[1]}, column {column}"
                samples.append(compare(got, sums[0][index], sums[1][index], where))
    return worst(samples)


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def _eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def _row_outputs(
    inputs: Inputs,
    plan: Plan,
    head: Head,
    row: int,
    dtype: torch.dtype,
    far: FarField | None,
    summary: Summary,
) -> tuple[Tensor, Tensor]:
    """What one query block should give, computed in `dtype`."""
    query, key, value = (part.to(dtype) for part in _row_inputs(inputs, plan, head, row))
    if far is None:
        return _eager(query, key, value)
    far_key, far_value, far_bias = (
        part[keys_of(far.plan, head, row)] for part in _summaries(inputs, head, dtype, far, summary)
    )
    bias = torch.cat([far_bias.new_zeros(len(key)), far_bias])
    return _eager(query, torch.cat([key, far_key]), torch.cat([value, far_value]), bias)


def _summaries(inputs: Inputs, head: Head, dtype: torch.dtype, far: FarField, summary: Summary) -> Inputs:
    """Keys, values and biases of all windows of a head."""
    query, key, value = (x.detach()[head][None, None].to(dtype) for x in inputs)
    if summary == "mean":
        return far.pooled(key)[0, 0], far.pooled(value)[0, 0], far.bias
    keys, values, bias = far.weighted(query, key, value, None, "reference")
    return keys[0, 0], values[0, 0], bias[0, 0]


def _row_inputs(inputs: Inputs, plan: Plan, head: Head, row: int) -> Inputs:
    keys = keys_of(plan, head, row)
    query, key, value = (x.detach()[head] for x in inputs)
    return query[_rows(plan, row)], key[keys], value[keys]


def _row_gradients(
    inputs: Inputs, plan: Plan, grad_out: Tensor, head: Head, row: int, low: bool
) -> tuple[Tensor, ...]:
    """Gradients of one query block's queries, and of the keys and values it reads."""
    dtype = inputs[0].dtype if low else torch.float64
    leaves = [part.to(dtype).requires_grad_() for part in _row_inputs(inputs, plan, head, row)]
    out = _eager(leaves[0], leaves[1], leaves[2])[0]
    return torch.autograd.grad(out, leaves, grad_out[head][_rows(plan, row)].to(dtype))


def _column_gradients(
    inputs: Inputs, plan: Plan, grad_out: Tensor, head: Head, keys: slice, low: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of one block of keys and values, summed over every query block that reads it."""
    size, width = keys.stop - keys.start, inputs[1].shape[-1]
    dtype = torch.float32 if low else torch.float64
    total = torch.zeros(2, size, width, device=plan.device, dtype=dtype)
    for row in _ids(plan.transpose(), head, keys.start // plan.k_block).tolist():
        listed = keys_of(plan, head, row)
        chosen = ((listed >= keys.start) & (listed < keys.stop)).nonzero().flatten()
        parts = _row_gradients(inputs, plan, grad_out, head, row, low)[1:]
        for sum_, part in zip(total, parts, strict=True):
            sum_.index_add_(0, listed[chosen] - keys.start, part[chosen].to(dtype))
    return total[0].to(inputs[1].dtype if low else dtype), total[1].to(inputs[1].dtype if low else dtype)


# -- samples -----------------------------------------------------------------------------------------------------------


def _picked(count: int, most: int = 3) -> list[int]:
    """A few of `count` places: the first, the last (it may be ragged) and one between."""
    places = (0, count - 1, count // 2)[:most]
    return sorted(set(places))


def _heads(query: Tensor) -> list[Head]:
    return sorted({(0, 0), (query.shape[0] - 1, query.shape[1] - 1)})


def _rows(plan: Plan, row: int) -> slice:
    return slice(row * plan.q_block, min((row + 1) * plan.q_block, plan.num_queries))


def _ids(plan: Plan, head: Head, row: int) -> Tensor:
    own = tuple(min(index, size - 1) for index, size in zip(head, plan.blocks.shape[:2], strict=True))
    start, stop = plan.offsets[own][row : row + 2].tolist()
    return plan.blocks[own][start:stop].long()


def keys_of(plan: Plan, head: Head, row: int) -> Tensor:
    inside = torch.arange(plan.k_block, device=plan.device)
    keys = (_ids(plan, head, row)[:, None] * plan.k_block + inside).flatten()
    return keys[keys < plan.num_keys]


def compare(got: Tensor, exact: Tensor, rough: Tensor, where: str) -> Checked:
    # One rounding of the result itself is always allowed, even where plain torch was lucky.
    limit = 2 * relative_error(rough, exact) + torch.finfo(rough.dtype).eps
    return Checked(relative_error(got, exact), limit, where)


def worst(samples: list[Checked]) -> Checked:
    failed = [sample for sample in samples if not sample.passed]
    return max(failed or samples, key=lambda sample: sample.error / sample.limit)
