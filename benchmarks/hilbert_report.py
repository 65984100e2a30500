"""Results of the benchmark `hilbert` as a table for people and as JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.hilbert import MODEL_LAYERS, HilbertResult
from nearfield.cli.report import check_record, table
from nearfield.cli.timing import Timing


def results_table(results: Sequence[HilbertResult]) -> str:
    """Every result as a line; what did not run or was wrong is named below, without figures."""
    dense = list(dict.fromkeys(name for result in results for name in result.dense))
    others = [*dense, "flex"] if any(result.flex for result in results) else dense
    headings = ["case", "blocks", "impl", "kept", *(f"{name} ms" for name in others), "ms", "graph ms"]
    headings += [f"over {name}" for name in others]
    headings += ["bound", "of bound", "target", "reordering", "error / limit"]
    lines = [table([headings, *(_cells(result, others) for result in results)])]
    if any(result.reordering for result in results):
        lines.append(
            f"reordering: hidden states in and back, ms and share of {MODEL_LAYERS} layers' attention"
        )
    lines += [f"{result.case}: no flex: {result.flex_note}" for result in results if result.flex_note]
    lines += [f"{result.case}: {result.status}: {result.note}" for result in results if result.status != "ok"]
    return "\n".join(lines)


def _cells(result: HilbertResult, others: Sequence[str]) -> list[str]:
    blocks = "{} x {}".format(*result.blocks) if result.blocks else "-"
    kept = f"{result.density:.1%}" if result.density else "-"
    start = [result.case.name, blocks, result.ran or "-", kept]
    if result.milliseconds is None:
        return [*start, *["-"] * (2 * len(others) + 6), result.status]
    times = {name: timing.median for name, timing in result.dense.items()}
    if result.flex:
        times["flex"] = result.flex.median
    return [
        *start,
        *(f"{times[name]:.3f}" if name in times else "-" for name in others),
        f"{result.milliseconds:.3f}",
        f"{result.graph.median:.3f}" if result.graph else "-",
        *(f"{result.speed_ups[name]:.2f}x" if name in result.speed_ups else "-" for name in others),
        f"{result.bound:.2f}x",
        f"{result.fraction_of_bound:.2f}",
        _target_words(result),
        f"{result.reordering.median:.3f} ({result.reordering_share:.2%})" if result.reordering else "-",
        f"{result.checked.error:.1e} / {result.checked.limit:.1e}" if result.checked else "-",
    ]


def _target_words(result: HilbertResult) -> str:
    if result.reached is None:
        return "-"
    return f"{result.case.target:.2f}x {'reached' if result.reached else 'missed'}"


def as_json(results: Sequence[HilbertResult], machine: dict[str, Any]) -> dict[str, Any]:
    """A document with the machine's facts and, for each case, its fields and figures (null where there are none)."""
    return {"format": 1, "benchmark": "hilbert", "machine": machine, "results": [_record(r) for r in results]}


def _record(result: HilbertResult) -> dict[str, Any]:
    case = result.case
    return {
        "case": case.name,
        "preset": case.preset.name,
        "shape": dict(zip("BHND", case.preset.shape, strict=True)),
        "dtype": result.dtype,
        "method": case.fields,
        "q_block": result.blocks[0] if result.blocks else None,
        "k_block": result.blocks[1] if result.blocks else None,
        "impl": result.ran,
        "status": result.status,
        "note": result.note,
        "density": result.density,
        "bound": result.bound,
        "check": check_record(result.checked),
        "milliseconds": result.milliseconds,
        "layers_milliseconds": {str(layer): asdict(timing) for layer, timing in result.layers.items()},
        "dense_milliseconds": {name: asdict(timing) for name, timing in result.dense.items()},
        "graph_milliseconds": _timing_record(result.graph),
        "flex_milliseconds": _timing_record(result.flex),
        "flex_note": result.flex_note,
        "dense_backend": result.best_dense,
        "speed_up": result.speed_up,
        "speed_ups": result.speed_ups,
        "fraction_of_bound": result.fraction_of_bound,
        "target": case.target,
        "target_reached": result.reached,
        "reordering_milliseconds": _timing_record(result.reordering),
        "reordering_share": result.reordering_share,
    }


def _timing_record(timing: Timing | None) -> dict[str, float] | None:
    return asdict(timing) if timing else None
