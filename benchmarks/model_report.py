"""Results of the benchmark `model` as a table for people and as JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.model import CEILING, MERGING, OURS, REFRESH, REORDERING, SELECTING, STEPS, ModelResult
from nearfield.cli.check import Checked
from nearfield.cli.model_cases import MERGING_SHARE, ModelCase
from nearfield.cli.report import check_record, table

FIXED = (
    "fixed: the share of keys that is skipped. Weights are random, so thresholds and masses were sought for it, layer"
    " by layer, and blocks that are unlike their mean are not kept whole.\n"
    "real: all that is timed, by the method's own code: predictions, lists, attention, moving of tokens."
)


def heading(case: ModelCase, parameters: int, device: str, dtype: torch.dtype) -> str:
    blocks = f"{' + '.join(map(str, case.blocks))} blocks"
    size = f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
    return f"{case.model}: {blocks}, {size} parameters, {str(dtype).removeprefix('torch.')}, on {device}"


def results_table(results: Sequence[ModelResult]) -> str:
    """Every size as a line; what broke is named below, without figures."""
    dense = list(dict.fromkeys(name for result in results for name in result.dense))
    headings = ["pixels", "tokens", "kept", *(f"{name} ms" for name in (*dense, CEILING)), "ms"]
    headings += [*(f"over {name}" for name in dense), "ceiling", "target", "reordering"]
    lines = [table([headings, *(_cells(result, dense) for result in results)])]
    if any(result.ceiling for result in results):
        lines.append("ceiling: the speed-up over the best dense step if attention cost nothing")
    if any(result.skipped for result in results):
        lines.append(FIXED)
    lines += [_merging_words(result) for result in results if result.merging_share is not None]
    lines += [_list_words(result) for result in results if result.over_generation is not None]
    lines += [
        f"{result.label}: {result.status}: {result.note}" for result in results if result.status != "ok"
    ]
    return "\n".join(lines)


def _merging_words(result: ModelResult) -> str:
    selecting, merging = (result.timings[name].median for name in (SELECTING, MERGING))
    verdict = "reached" if result.merging_share <= MERGING_SHARE else "missed"  # type: ignore[operator]
    return (
        f"{result.label}: maps take {selecting:.2f} ms where they are made, merging and parting {merging:.2f} ms:"
        f" {result.merging_share:.1%} of a step (target: at most {MERGING_SHARE:.0%}, {verdict})"
    )


def _list_words(result: ModelResult) -> str:
    anew = result.timings[REFRESH].median
    dense_steps = anew / result.timings[result.best_dense or OURS].median
    return (
        f"{result.label}: a step that makes the lists takes {anew:.1f} ms, as {dense_steps:.2f} dense ones; with the"
        f" few of {STEPS} steps that do, a generation is {result.over_generation:.2f}x as fast (reckoned)"
    )


def _cells(result: ModelResult, dense: Sequence[str]) -> list[str]:
    start = [result.label, f"{result.tokens:,}"]
    if result.status != "ok":
        return [*start, *["-"] * (2 * len(dense) + 5), result.status]
    times = [result.timings[name].median for name in (*dense, CEILING, OURS)]
    ratios = [result.over(name) for name in dense]
    target = result.target
    is_out_of_reach = target is not None and result.ceiling is not None and result.ceiling < target
    verdict = "reached" if result.reached else "above the ceiling" if is_out_of_reach else "missed"
    return [
        *start,
        f"{result.density:.1%}",
        *(f"{time:.1f}" for time in times),
        *(f"{ratio:.2f}x" for ratio in ratios),
        f"{result.ceiling:.2f}x",
        f"{target:.2f}x {verdict}" if target else "-",
        f"{result.reordering_share:.2%}",
    ]


def as_json(
    results: Sequence[ModelResult], checked: Checked, parameters: int, machine: dict[str, Any]
) -> dict[str, Any]:
    """A document with the machine's facts, the verdict and, for each size, its figures (null where there are none)."""
    return {
        "format": 1,
        "benchmark": "model",
        "machine": machine,
        "model": results[0].case.model,
        "config": results[0].case.config,
        "parameters": parameters,
        "check": check_record(checked),
        "results": [_record(result) for result in results],
    }


def _record(result: ModelResult) -> dict[str, Any]:
    return {
        "name": result.label if result.size.frames > 1 else f"{result.label} px",
        "model": result.case.model,
        "pixels": str(result.size),
        "frames": result.size.frames,
        "variant": result.variant,
        "skipped": result.skipped,
        "grid": list(result.size.grid),
        "tokens": result.tokens,
        "method": result.case.method_fields(result.size),
        "method_name": result.case.method,
        "merge": result.case.merging_fields() if result.case.merges else None,
        "merging_share": result.merging_share,
        "speed_up_over_generation": result.over_generation,
        "status": result.status,
        "note": result.note,
        "density": result.density,
        "milliseconds": {name: asdict(timing) for name, timing in result.timings.items()},
        "dense_backend": result.best_dense,
        "speed_up": result.speed_up,
        "speed_ups": {name: result.over(name) for name in result.dense},
        "ceiling": result.ceiling,
        "ceilings": {name: result.over(name, CEILING) for name in result.dense},
        "reordering_share": result.over(REORDERING),
        "target": result.target,
        "target_reached": result.reached,
        "peak_bytes": result.peak_bytes,
        "summary": result.summary,
    }
