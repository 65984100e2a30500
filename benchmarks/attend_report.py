"""Results of the benchmark `attend`: a table for people, and JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.cases import Result
from nearfield.cli.report import check_record, table, too_small_note

_SIZES = ("preset", "work", "blocks", "kept", "impl")
_FIGURES = ("of dense rate", "speed-up", "bound", "error / limit")


def results_table(results: Sequence[Result]) -> str:
    """Every result as a line; what did not run or was wrong is named below, without figures."""
    fastest = max((result.tflops or 0 for result in results), default=0)
    unit, scale = ("TFLOP/s", 1) if fastest >= 1 else ("GFLOP/s", 1000)
    lines = [
        table([(*_SIZES, "dense ms", "ms", unit, *_FIGURES), *(_cells(result, scale) for result in results)])
    ]
    for result in results:
        if result.parts and result.overhead is not None:
            parts = " + ".join(f"{name} {milliseconds:.3f} ms" for name, milliseconds in result.parts.items())
            lines.append(f"{result.case}: {result.overhead:+.1%} over the sum of its parts ({parts})")
    lines += [f"{result.case}: {result.status}: {result.note}" for result in results if result.status != "ok"]
    return "\n".join(lines)


def too_small(results: Sequence[Result]) -> str | None:
    """A note where a problem is slower than dense because there is little to save on it."""
    for result in results:
        if result.speed_up and result.density:
            note = too_small_note(result.case.preset.tokens, result.speed_up, result.density)
            if note:
                return note
    return None


def _cells(result: Result, scale: int) -> list[str]:
    case = result.case
    work = case.pattern if not case.backward else f"{case.pattern}, backward"
    start = [case.preset.name, work, f"{case.q_block} x {case.grain}"]
    kept = f"{result.density:.1%}" if result.density is not None else "-"
    impl = result.ran or case.impl
    if result.timing is None or result.dense_timing is None or result.density is None:
        return [*start, kept, impl, *["-"] * 6, result.status]
    return [
        *start,
        kept,
        impl,
        f"{result.dense_timing.median:.3f} {result.dense_name}",
        f"{result.timing.median:.3f}",
        f"{(result.tflops or 0) * scale:.0f}",
        f"{result.rate_fraction:.2f}",
        f"{result.speed_up:.2f}x",
        f"{1 / result.density:.2f}x",
        f"{result.checked.error:.1e} / {result.checked.limit:.1e}" if result.checked else "-",
    ]


def as_json(results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """A document with the machine's facts and, for each case, its sizes and figures (null where there are none)."""
    return {"format": 1, "benchmark": "attend", "machine": machine, "results": [_record(r) for r in results]}


def _record(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "preset": case.preset.name,
        "shape": dict(zip("BHND", case.preset.shape, strict=True)),
        "dtype": result.dtype,
        "direction": case.direction,
        "pattern": case.pattern,
        "grain": case.grain,
        "q_block": case.q_block,
        "impl_asked": case.impl,
        "impl": result.ran,
        "status": result.status,
        "note": result.note,
        "density": result.density,
        "pairs": result.pairs,
        "bound": 1 / result.density if result.density else None,
        "check": check_record(result.checked),
        "milliseconds": asdict(result.timing) if result.timing else None,
        "tflops": result.tflops,
        "dense_backend": result.dense_name,
        "dense_milliseconds": asdict(result.dense_timing) if result.dense_timing else None,
        "dense_tflops": result.dense_tflops,
        "dense_survey_milliseconds": result.dense_survey,
        "fraction_of_dense_rate": result.rate_fraction,
        "fraction_of_cudnn_rate": result.rate_fraction_of("cudnn"),
        "fractions_of_dense_rates": {name: result.rate_fraction_of(name) for name in result.dense_survey},
        "speed_up": result.speed_up,
        "parts_milliseconds": result.parts,
        "overhead_over_parts": result.overhead,
    }
