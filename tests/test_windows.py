"""Summaries of short runs of tokens: formulas, gradients, and kernels beside their reference. Needs no hypothesis."""

import math

import pytest
import torch
from tests.attending import NEEDS_TRITON, assert_budget
from torch import Tensor

from nearfield.cli.check import poisoned_memory
from nearfield.ops.windows import reference as plain
from nearfield.ops.windows.api import query_sums, weighted_windows, window_means


def windows_of(sizes: list[int], gap: int) -> tuple[Tensor, Tensor]:
    """Windows one after another, with some tokens between them that are in none."""
    starts = [gap + sum(sizes[:number]) + gap * number for number in range(len(sizes))]
    return torch.tensor(starts), torch.tensor(sizes, dtype=torch.int32)


WINDOWS = [
    ([16] * 20, 0, 16),
    ([3, 16, 16, 1, 7], 2, 16),
    ([2] * 33, 0, 2),
    ([40, 64, 9], 5, 64),
    ([5], 1, 24),
]


@pytest.mark.parametrize(("sizes", "gap", "window"), WINDOWS)
def test_window_means_are_means(sizes: list[int], gap: int, window: int) -> None:
    starts, counts = windows_of(sizes, gap)
    length = int(starts[-1]) + sizes[-1] + gap
    x = torch.randn(2, 3, length, 5, dtype=torch.float64, requires_grad=True)
    x_with_nan = x.detach().clone()
    covered = torch.zeros(length, dtype=torch.bool)
    for start, size in zip(starts.tolist(), sizes, strict=True):
        covered[start : start + size] = True
    x_with_nan[:, :, ~covered] = math.nan  # what is in no window is not read
    wanted = [x[:, :, start : start + size].mean(2) for start, size in zip(starts, sizes, strict=True)]
    torch.testing.assert_close(window_means(x, starts, counts, window), torch.stack(wanted, 2))
    torch.testing.assert_close(window_means(x_with_nan, starts, counts, window), torch.stack(wanted, 2))
    arguments = (x[:1, :1].detach().requires_grad_(), starts, counts, window)
    assert torch.autograd.gradcheck(window_means, arguments)
    torch.library.opcheck(torch.ops.nearfield.window_means, (*arguments, "auto"))


def test_no_windows_have_no_means() -> None:
    x, starts = torch.randn(1, 2, 16, 8), torch.empty(0, dtype=torch.long)
    assert window_means(x, starts, starts.int(), 8).shape == (1, 2, 0, 8)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [16, 72, 128])
@pytest.mark.parametrize(("sizes", "gap", "window"), WINDOWS)
def test_window_kernels_do_as_the_reference(
    sizes: list[int], gap: int, window: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    from nearfield.ops.windows import triton as kernel

    places = [x.to(device) for x in windows_of(sizes, gap)]
    length = int(places[0][-1]) + sizes[-1]
    x = torch.randn(2, length, 3, dim, device=device, dtype=dtype).transpose(1, 2)
    exact = plain.window_means_forward(x.double(), *places, window)
    with poisoned_memory():
        means = kernel.window_means_forward(x, *places, window)
    assert_budget("means", means, exact, plain.window_means_forward(x, *places, window))
    grad = torch.randn(2, 3, len(sizes), dim, device=device, dtype=dtype)
    exact = plain.window_means_backward(grad.double(), *places, window, length)
    low = plain.window_means_backward(grad, *places, window, length)
    with poisoned_memory():
        spread = kernel.window_means_backward(grad, *places, window, length)
    assert_budget("spread", spread, exact, low)


@pytest.mark.parametrize(("sizes", "gap", "window"), WINDOWS)
def test_sums_over_all_windows(sizes: list[int], gap: int, window: int) -> None:
    """Of queries and of their squares; heads of a group share them, and what is in no window has no part."""
    starts, counts = windows_of(sizes, gap)
    length = int(starts[-1]) + sizes[-1] + gap
    covered = torch.zeros(length, dtype=torch.bool)
    for start, size in zip(starts.tolist(), sizes, strict=True):
        covered[start : start + size] = True
    query = torch.randn(2, 4, length, 5, dtype=torch.float64)
    query[:, :, ~covered] = math.nan
    inside = query[:, :, covered]
    wanted = torch.stack([inside.sum(2), inside.square().sum(2)])
    torch.testing.assert_close(query_sums(query, starts, counts, window, 4), wanted)
    shared = wanted.unflatten(2, (2, 2)).mean(3)
    torch.testing.assert_close(query_sums(query, starts, counts, window, 2), shared)
    arguments = (query[:1, :1].nan_to_num().requires_grad_(), starts, counts, window)
    assert torch.autograd.gradcheck(lambda x: query_sums(x, starts, counts, window, 1), arguments[:1])
    torch.library.opcheck(torch.ops.nearfield.window_sums, (*arguments, "auto"))


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [16, 72, 128])
@pytest.mark.parametrize(("sizes", "gap", "window"), WINDOWS)
def test_sums_by_the_kernel_are_the_references(
    sizes: list[int], gap: int, window: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    from nearfield.ops.windows import triton as kernel

    places = [x.to(device) for x in windows_of(sizes, gap)]
    length = int(places[0][-1]) + sizes[-1]
    x = torch.randn(2, length, 3, dim, device=device, dtype=dtype).transpose(1, 2)
    exact = plain.window_sums_forward(x.double(), *places, window)
    with poisoned_memory():
        sums = kernel.window_sums_forward(x, *places, window)
    assert sums.dtype == torch.float32
    assert_budget("sums", sums, exact, plain.window_sums_forward(x, *places, window))
    grad = torch.randn(2, 3, 2, dim, device=device).transpose(1, 2)  # not contiguous
    exact = plain.window_sums_backward(grad.double(), x.double(), *places, window)
    with poisoned_memory():
        spread = kernel.window_sums_backward(grad, x, *places, window)
    assert_budget("gradient", spread, exact, plain.window_sums_backward(grad, x, *places, window))


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("window", "dim", "heads"), [(4, 16, 2), (8, 40, 1), (16, 64, 3), (5, 128, 1), (50, 32, 1)]
)
def test_weighted_windows(
    window: int, dim: int, heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Against float64, with windows of all sizes, gaps between them, tokens in none, and scores far apart."""
    from nearfield.ops.windows import triton as kernel

    generator = torch.Generator().manual_seed(window)
    sizes = torch.randint(1, window + 1, (37,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), (sizes + 1).cumsum(0)[:-1]])
    length = int(starts[-1] + sizes[-1]) + 3
    key, value = (torch.randn(2, heads, length, dim, generator=generator).to(device, dtype) for _ in range(2))
    key[:, :, : length // 2] *= 6
    centre, spread = torch.randn(2, 2, heads, dim, generator=generator).to(device).unbind()
    moments = torch.stack([centre, centre.square() + spread.abs()])
    places = starts.to(device), sizes.int().to(device), window
    scale = dim**-0.5
    exact = plain.weighted_windows_forward(*(x.double() for x in (key, value, moments)), *places, scale)
    with poisoned_memory():
        found = kernel.weighted_windows_forward(key, value, moments, *places, scale)
    rough = plain.weighted_windows_forward(key, value, moments, *places, scale)
    for what, *each in zip(("keys", "values", "bias"), found, exact, rough, strict=True):
        assert_budget(what, *each)
    grads = [torch.randn(x.shape, generator=generator).to(device, x.dtype) for x in found]
    grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    inputs = (key, value, moments)
    exact = plain.weighted_windows_backward(
        tuple(x.double() for x in grads), *(x.double() for x in inputs), *places, scale
    )
    with poisoned_memory():
        gradients = kernel.weighted_windows_backward(tuple(grads), *inputs, *places, scale)
    rough = plain.weighted_windows_backward(tuple(grads), *inputs, *places, scale)
    for what, *each in zip(("key", "value", "moments"), gradients, exact, rough, strict=True):
        assert_budget(f"gradient of {what}", *each)


@NEEDS_TRITON
@pytest.mark.parametrize("number", [1, 4, 5, 7])
def test_tokens_in_no_window_have_no_part_in_gradients(number: int, device: torch.device) -> None:
    """However many windows there are for the programs to share out."""
    from nearfield.ops.windows import triton as kernel

    starts, sizes = (x.to(device) for x in windows_of([3] * number, 2))
    key, value = torch.randn(2, 1, 1, int(starts[-1]) + 5, 16, device=device)
    key[:, :, 0], value[:, :, 1] = math.nan, math.inf
    moments = (
        torch.rand(2, 1, 1, 16, device=device) + torch.tensor([0.0, 1.0], device=device)[:, None, None, None]
    )
    grads = tuple(
        torch.randn(shape, device=device) for shape in ((1, 1, number, 16),) * 2 + ((1, 1, number),)
    )
    arguments = (grads, key, value, moments, starts, sizes, 3, 0.25)
    with poisoned_memory():
        found = kernel.weighted_windows_backward(*arguments)
    for one, wanted in zip(found, plain.weighted_windows_backward(*arguments), strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("is_learned", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize(("sizes", "gap", "window"), WINDOWS)
def test_weighted_windows_window_by_window(sizes: list[int], gap: int, window: int, is_learned: bool) -> None:
    """The formula written out, where windows follow each other and where they do not; what is in none is not read."""
    starts, counts = windows_of(sizes, gap)
    spans = [slice(start, start + size) for start, size in zip(starts.tolist(), sizes, strict=True)]
    query, key, value = torch.randn(3, 1, 2, spans[-1].stop + gap, 6, dtype=torch.float64)
    inside = torch.cat([query[0, :, span] for span in spans], dim=1)
    covered = torch.zeros(query.shape[2], dtype=torch.bool)
    for span in spans:
        covered[span] = True
    for x in (query, key, value):
        x[:, :, ~covered] = math.nan
    found = weighted_windows(query.requires_grad_(is_learned), key, value, starts, counts, window, scale=0.5)
    for head in range(2):
        centre, spread = inside[head].mean(0), inside[head].var(0, correction=0)
        for number, span in enumerate(spans):
            keys, values = key[0, head, span], value[0, head, span]
            scores = 0.5 * keys @ centre
            weights = scores.softmax(0)
            mean = weights @ keys
            rest = 0.5**2 / 2 * (weights @ (keys - mean).square()) @ spread
            bias = scores.logsumexp(0) - 0.5 * mean @ centre + 2 * torch.log1p(rest / 2)
            for one, wanted in zip(found, (mean, weights @ values, bias), strict=True):
                torch.testing.assert_close(one[0, head, number].detach(), wanted)


def test_squares_of_queries_may_be_beyond_float16(device: torch.device) -> None:
    """Queries with a channel far from zero: biases err no more than single precision does, which the difference of two
    large numbers costs digits."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 64, 16, generator=generator, dtype=torch.float64)
    query[..., 3] += 300
    starts = torch.arange(0, 64, 8, device=device)
    places = starts, torch.full_like(starts, 8, dtype=torch.int32), 8
    errors = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = [x.to(device, dtype) for x in (query, key, value)]
        exact = weighted_windows(*(x.double() for x in rounded), *places, impl="reference")
        found = weighted_windows(*rounded, *places)
        errors[dtype] = [
            float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)
        ]
    for dtype, (keys, values, bias) in errors.items():
        assert max(keys, values) < torch.finfo(dtype).eps
        assert bias < 2 * errors[torch.float32][2] < 0.005


def test_weighted_windows_without_gradients_are_those_with_them(device: torch.device) -> None:
    """By the operator, around it, and as one that is differentiated; heads of a group share a mean query."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 50, 16, generator=generator).to(device) for heads in (4, 2, 2))
    starts, sizes = (
        torch.tensor([2, 10, 18, 26], device=device),
        torch.tensor([8, 8, 8, 5], device=device).int(),
    )
    call = (starts, sizes, 8)
    eager = weighted_windows(query, key, value, *call)
    learned = weighted_windows(query.clone().requires_grad_(), key, value, *call)
    compiled = torch.compile(weighted_windows, backend="eager", fullgraph=True)(query, key, value, *call)
    assert eager.bias.shape == (1, 4, 4)
    assert torch.equal(eager.bias[:, ::2], eager.bias[:, 1::2])
    for one, other, third in zip(eager, learned, compiled, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(one, third)
    numbers = torch.randn(2, 1, 2, 16, generator=generator).abs().to(device)
    torch.library.opcheck(torch.ops.nearfield.weighted_windows, (key, value, numbers, *call, 0.25, "auto"))


@pytest.mark.parametrize(("sizes", "gap", "window"), [([4, 4, 4], 0, 4), ([3, 5, 1], 2, 5)])
def test_gradients_of_weighted_windows(sizes: list[int], gap: int, window: int) -> None:
    """Of queries, keys and values, two heads of a group; where windows follow each other and where they do not."""
    starts, counts = windows_of(sizes, gap)
    length = int(starts[-1]) + sizes[-1] + gap
    generator = torch.Generator().manual_seed(window)
    query, key, value = (
        torch.randn(2, heads, length, 3, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )

    def found(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(weighted_windows(*inputs, starts, counts, window, scale=0.7))

    assert torch.autograd.gradcheck(found, (query, key, value))
    moments = torch.randn(2, 2, 2, 3, dtype=torch.float64, generator=generator).abs().requires_grad_()
    call = (starts, counts, window, 0.7)
    torch.library.opcheck(torch.ops.nearfield.weighted_windows, (key, value, moments, *call, "auto"))
    arguments = (key.detach(), value.detach(), moments.detach(), *call)
    grads = [torch.randn_like(x) for x in plain.weighted_windows_forward(*arguments)]
    torch.library.opcheck(torch.ops.nearfield.weighted_windows_backward, (*grads, *arguments, "auto"))


def test_gradients_of_weighted_windows_are_those_of_torch(device: torch.device) -> None:
    """By the kernels, where they run, beside what autograd makes of the formula in double precision."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 70, 16, generator=generator).to(device)
    starts, counts = (x.to(device) for x in windows_of([8, 8, 5, 8], 3))
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    weights = [
        torch.randn(shape, generator=generator).to(device)
        for shape in ((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 4))
    ]
    found = weighted_windows(*inputs, starts, counts, 8)
    sums = plain.window_sums_forward(exact[0], starts, counts, 8) / counts.sum()
    wanted = plain.weighted_windows_forward(*exact[1:], sums, starts, counts, 8, 0.25)
    sum((x * weight).sum() for x, weight in zip(found, weights, strict=True)).backward()
    sum((x * weight).sum() for x, weight in zip(wanted, weights, strict=True)).backward()
    for x, other in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
        assert not x.grad[:, :, :3].any()


def test_weighted_windows_keep_nothing_for_gradients() -> None:
    """But what they were made of: a model of many layers would keep several times its keys, in single precision."""
    query, key, value = (torch.randn(1, 4, 512, 32).requires_grad_() for _ in range(3))
    starts = torch.arange(0, 512, 16)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        weighted_windows(query, key, value, starts, torch.full_like(starts, 16, dtype=torch.int32), 16)
    for x in (query, key, value):
        kept.pop(x.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) < key.nbytes / 16


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("is_learned", [False, True], ids=["without gradients", "with gradients"])
def test_autocast_does_not_reach_weighted_windows(
    is_learned: bool, is_compiled: bool, device: torch.device
) -> None:
    inputs = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).to(device)
    query, key, value = (x.clone().requires_grad_(is_learned) for x in inputs)
    starts = torch.arange(0, 64, 8, device=device)
    call = (query, key, value, starts, torch.full_like(starts, 8, dtype=torch.int32), 8)
    function = weighted_windows
    if is_compiled:
        function = torch.compile(weighted_windows, backend="eager", fullgraph=True)
    with torch.autocast(device.type, torch.bfloat16):
        inside = function(*call)
    for one, other in zip(inside, weighted_windows(*call), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    if is_learned:
        gradients = [
            torch.autograd.grad(sum(x.sum() for x in found), call[:3])
            for found in (inside, weighted_windows(*call))
        ]
        total = sum(x.sum() for x in weighted_windows(*call))
        with torch.autocast(device.type, torch.bfloat16):  # the backward alone
            around_backward = torch.autograd.grad(total, call[:3])
        assert all(torch.equal(one, other) for one, other in zip(around_backward, gradients[1], strict=True))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
