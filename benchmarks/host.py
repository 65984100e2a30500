"""What one attention call costs the host: microseconds until it has launched everything, of small tensors.

The GPU takes less than that, so calls are timed one after another without waiting for it. Without a GPU the host
computes, too, and the figures are of that.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import special
from benchmarks.attention_cases import DEFAULT, hilbert_fields
from benchmarks.cases import CPU, CUDA, QUICK, Case, named
from benchmarks.report import Column, Record
from benchmarks.runner import Benchmark
from nearfield import Geometry
from nearfield.cli.bench import in_a_usual_step, usual_dtype

INFERENCE, TRAINING, COMPILED = "inference", "training", "compiled"
WORKS = (INFERENCE, TRAINING, COMPILED)
DEFAULTS: dict[str, Any] = {"grid": [32, 32], "text": 128, "heads": 8, "head_dim": 64}
"""The tensors: 1,152 tokens, so few that the GPU is never the limit."""
_WARM, _CALLS = 10, 60
_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "sdpa": ("", {}),
    "paper": ("Hilbert", hilbert_fields(None) | {"shared": "centre"}),
    "tiles-mean": ("Hilbert", hilbert_fields(None, far=16)),
    "tiles-weighted": ("Hilbert", hilbert_fields(None, far=16, summary="weighted")),
    "default": ("Hilbert", DEFAULT),
    "loglinear": ("LogLinear", {}),
}
_LEAST: dict[str, dict[str, float]] = {
    "paper": {INFERENCE: 80, COMPILED: 40},
    "default": {INFERENCE: 200, TRAINING: 800, COMPILED: 80},
    "loglinear": {INFERENCE: 200, COMPILED: 80},
}
"""Microseconds to reach on one H200's host."""


def _cases() -> Iterator[Case]:
    for name, (method, fields) in _METHODS.items():
        quick = (QUICK,) if name in ("sdpa", "paper", "default") else ()
        yield Case(name, {}, method, fields, _LEAST.get(name, {}), (CUDA, CPU, *quick))
    yield from special.cases("host")


class Host(Benchmark):
    name = "host"
    examples = (
        "  python -m benchmarks host --quick\n"
        "  python -m benchmarks host --json host.json\n"
        '  python -m benchmarks host --case \'{"method": "BlockTopK", "fields": {"keep": 0.1}}\''
    )
    table = named(_cases(), DEFAULTS)
    defaults = DEFAULTS

    def measure(self, case: Case) -> Iterator[Record]:
        if self.device.type == "cpu":
            self.session.say(f"{case.name}: the host computes, too: this is no cost of launching")
        attend, tensors, reason = self._call(case)
        for work in WORKS:
            run = self._run(work, attend, tensors)
            about = {"work": work, "host_is_device": self.device.type == "cpu"}
            if work == COMPILED and reason is not None:
                yield about | {"status": "not run", "note": f"not compiled: {reason}"}
                continue
            host, whole = self._timed(run)
            yield about | {
                "host_microseconds": host,
                "call_microseconds": whole,
                "target_microseconds": case.targets.get(work),
            }

    def _call(self, case: Case) -> tuple[Callable[..., Tensor], Sequence[Tensor], str | None]:
        """The attention, its tensors, and why torch.compile leaves it alone."""
        on = case.on
        method = case.made() if case.method else None
        text = on["text"] if method is None or method.takes_text else 0
        geometry = Geometry(tuple(on["grid"]), text=text)
        shape = 3, 1, on["heads"], geometry.num_tokens, on["head_dim"]
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = usual_dtype(self.device)
        tensors = torch.randn(shape, generator=generator, device=self.device, dtype=dtype).unbind()
        if method is None:
            return scaled_dot_product_attention, tensors, None
        maker: Any = method.layer
        layer = maker(geometry, 1, heads=on["heads"], device=self.device)
        layer.prepare(1, on["heads"], training=True)
        impl = self.session.impl

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = layer.attend(query, key, value, impl=impl).out
            return out

        with torch.no_grad():
            in_a_usual_step(method, layer, lambda: attend(*tensors))
        return attend, tensors, method.compile_reason

    def _run(
        self, work: str, attend: Callable[..., Tensor], tensors: Sequence[Tensor]
    ) -> Callable[[], object]:
        if work == TRAINING:
            leaves = [x.detach().requires_grad_() for x in tensors]
            return lambda: torch.autograd.grad(attend(*leaves).sum(), leaves)
        function = torch.compile(attend, fullgraph=True) if work == COMPILED else attend

        def run() -> object:
            with torch.no_grad():
                return function(*tensors)

        return run

    def _timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Microseconds per call until the host is done, and until the device is."""
        is_short = self.options.quick or self.device.type == "cpu"
        for _ in range(1 if is_short else _WARM):
            run()
        self._wait()
        calls = self.options.rounds or (3 if is_short else _CALLS)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        host = time.perf_counter() - start
        self._wait()
        return 1e6 * host / calls, 1e6 * (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def columns(self, records: Sequence[Record]) -> list[Column]:
        return [
            Column("work", "work"),
            Column("host us", "host_microseconds", ",.0f"),
            Column("with the device, us", "call_microseconds", ",.0f"),
            Column("target us", "target_microseconds", ",.0f"),
        ]

    def notes(self, records: Sequence[Record]) -> list[str]:
        is_device = any(record["host_is_device"] for record in records)
        return ["without a GPU: the host computes, too, so this is no cost of launching"] if is_device else []
