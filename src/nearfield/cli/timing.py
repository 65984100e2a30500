"""Median times of functions measured in turns, so that a warm chip or a busy neighbour is shared by all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Function = Callable[[], object]
Repeat = Callable[[Function, int, torch.device], list[float]]
Contexts = Mapping[str, Callable[[], AbstractContextManager[Any]]]
_FLUSH_BYTES = 2**30
_FLUSHES = 3
_LONG_SECONDS = 5


@dataclass(frozen=True)
class Effort:
    """How long to measure: `rounds` turns, in which every function runs for about `seconds`/`rounds`."""

    rounds: int
    seconds: float
    most: int = 50

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "Effort":
        if device.type == "cuda":
            return cls(rounds=3, seconds=0.06) if quick else cls(rounds=7, seconds=0.6)
        return cls(rounds=3, seconds=0.1, most=5) if quick else cls(rounds=5, seconds=2.0, most=5)


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median, the quartiles around it, and of how many samples."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))


def measure(
    functions: Mapping[str, Function], device: torch.device, effort: Effort, contexts: Contexts | None = None
) -> dict[str, Timing]:
    """Time every function, in turns.

    Args:
        contexts: what to enter before a function's turn and to leave after it; not timed.
    """
    contexts = contexts or {}
    repeat = _repeat_on_cuda if device.type == "cuda" else _repeat_on_cpu
    counts, is_long = {}, {}
    for name, function in functions.items():
        with _context(contexts, name):
            estimate = _estimate(repeat, function, device)
        counts[name] = max(1, min(effort.most, round(effort.seconds / effort.rounds / max(estimate, 1e-6))))
        is_long[name] = estimate > _LONG_SECONDS
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(effort.rounds):
        for name, function in functions.items():
            with _context(contexts, name):
                if name in contexts and not is_long[name]:
                    function()  # what is made at the first call is not timed; it hardly matters to a long one
                samples[name] += repeat(function, counts[name], device)
    return {name: Timing.of(values) for name, values in samples.items()}


def captured(function: Function, device: torch.device) -> Function:
    """A call of the function as a CUDA graph: the same kernels on the same memory, with nothing left to do for the
    processor. The function must not wait for the device."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        kept.append(function())

    def replay() -> object:
        graph.replay()
        return kept[0]

    return replay


def _context(contexts: Contexts, name: str) -> AbstractContextManager[Any]:
    return contexts[name]() if name in contexts else nullcontext()


def _estimate(repeat: Repeat, function: Function, device: torch.device) -> float:
    """Seconds per call, of as few calls as will do. On a GPU the first may have compiled and says nothing."""
    first = repeat(function, 1, device)[0]
    if device.type == "cpu" and first > 300:
        return first / 1000
    second = repeat(function, 1, device)[0]
    return (second if second > 300 else min(second, *repeat(function, 1, device))) / 1000


def _repeat_on_cpu(function: Function, count: int, device: torch.device) -> list[float]:
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        samples.append((time.perf_counter() - start) * 1000)
    return samples


def _repeat_on_cuda(function: Function, count: int, device: torch.device) -> list[float]:
    """Event times. Before each call a large buffer is cleared: it empties the caches and, being slow, lets the
    processor run ahead, so that launch overhead does not stand between the events.

    Once is enough for the caches. But it takes 0.25 ms, and launching a specialised kernel, with its descriptors and
    some forty arguments, up to 0.3 ms of the processor's time: the GPU would wait for it after the first event.
    """
    flush = _flush_buffer(device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, stop in events:
        for _ in range(_FLUSHES):
            flush.zero_()
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) for start, stop in events]


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.empty(min(_FLUSH_BYTES, total // 16), dtype=torch.int8, device=device)
