"""Measure one image split over ranks: what each sends, compared with ring attention and Ulysses; what each computes.

Bytes are counted by the code that sends them (`parallel.bytes_sent`), and small runs of real processes are compared
with that. Step times are computed: from kernel times measured on one H200, scaled by the pairs and tokens of the
busiest rank, and from link speeds that are stated, not measured.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import scaling_times
from benchmarks.cases import Case
from benchmarks.report import Column, Record
from benchmarks.runner import Benchmark, WrongAnswer
from benchmarks.scaling_cases import BYTES, CASES, DEFAULTS, LATENCY, LINKS, PROCESSES, TIMES
from benchmarks.scaling_split import SplitCase, check, count
from nearfield.cli import UsageError


class Scaling(Benchmark):
    name = "scaling"
    examples = (
        "  python -m benchmarks scaling --cases flux-2048,flux-4096 --json scaling.json --plot scaling.png\n"
        "  python -m benchmarks scaling --cases 'processes-*'\n"
        "  python -m benchmarks scaling --cases flux-4096-times --json times.json\n"
        '  python -m benchmarks scaling --case \'{"name": "flux-2048", "ranks": [8]}\''
    )
    table = CASES
    defaults = DEFAULTS
    drawing = "nearfield_lab.plots.lines:scaling_lines"

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        super().check(cases, options)
        for case in cases:
            method: Any = case.made() if case.method else None
            far = getattr(method, "far", None)
            if case.on["work"] not in _WORKS:
                _wrong(case, "work", f"be one of {', '.join(_WORKS)}", repr(case.on["work"]))
            if method is None or not method.can_split:
                _wrong(case, "method", "be one whose tokens can be split", repr(case.method))
            if min(case.on["ranks"]) < 2:
                _wrong(case, "ranks", "be at least 2", case.on["ranks"])
            if case.on["work"] == TIMES and far:
                _wrong(case, "far", "be None where times are measured", far)

    def measure(self, case: Case) -> Iterator[Record]:
        work, split = case.on["work"], SplitCase(case)
        for ranks in case.on["ranks"]:
            self.session.say(f"{case.name} on {ranks} ranks")
            if work == TIMES:
                effort = scaling_times.effort(self.device, self.session.effort(), self.options.quick)
                for layer in range(split.num_layers):
                    yield {"work": work} | scaling_times.measure(split, ranks, layer, self.device, effort)
                continue
            found = count(split, ranks) if work == BYTES else check(split, ranks)
            if work == PROCESSES and found["sent_by_rank"] != found["counted"]:
                raise WrongAnswer(
                    f"{found['sent_by_rank']} bytes were sent, but {found['counted']} were counted"
                )
            yield {"work": work} | found

    def facts(self, records: Sequence[Record]) -> Record:
        return {
            "measured": "bytes of real processes; times of ranks; kernel times on one H200 (hilbert-h200, model-h200)",
            "computed": "bytes of the other sizes, by the same code; all step times",
            "links": LINKS,
            "latency_seconds": LATENCY,
            "target_kernel_loss": scaling_times.TARGET,
        }

    def columns(self, records: Sequence[Record]) -> list[Column]:
        return [
            Column("ranks", "ranks"),
            Column("layer", "layer"),
            Column("MiB sent", partial(_mebibytes, "sent")),
            Column("ring", partial(_mebibytes, "ring")),
            Column("Ulysses", partial(_mebibytes, "ulysses")),
            Column("of ring", _of_ring),
            *(Column(f"step, {link}", partial(_seconds, link)) for link in LINKS),
            Column("whole ms", "whole/median", ".3f"),
            Column("share", _share),
            Column("kernels", partial(_slowest, "kernels")),
            Column("loss", "kernel_loss", "+.1%"),
            Column("all", partial(_slowest, "layers")),
            Column("loss", "layer_loss", "+.1%"),
            Column("pairs", _pairs),
            Column("bytes sent, as counted", _counted),
        ]

    def notes(self, records: Sequence[Record]) -> list[str]:
        lines = []
        if any(record["work"] == BYTES for record in records):
            lines.append(
                "sent: by the busiest rank, per layer, forward. Step times are computed, not measured."
            )
        if timed := [record for record in records if record["work"] == TIMES]:
            graphs = all(record["is_graph"] for record in timed)
            how = "as CUDA graphs" if graphs else "with what starting them takes"
            lines += [
                "whole: one call; share: an even part of it; kernels: of the slowest rank; all: with packing, merging;",
                f"pairs: the busiest rank over an even share. Calls were timed {how}.",
                f"to reach: at most {scaling_times.TARGET:+.0%} for the kernels, on 8 ranks at 4096 pixels",
            ]
        return lines

    def draw(self, path: Path, records: Sequence[Record], title: str) -> None:
        super().draw(path, [record for record in records if record["work"] == BYTES], title)


_WORKS = (BYTES, TIMES, PROCESSES)


def _wrong(case: Case, name: str, rule: str, got: object) -> NoReturn:
    raise UsageError(f"case {case.name!r}: `{name}` must {rule}; got {got}.")


def _mebibytes(name: str, record: Record) -> str | None:
    return f"{record[name] / 2**20:.1f}" if record.get(name) is not None else None


def _of_ring(record: Record) -> str | None:
    return f"{record['sent'] / record['ring']:.1%}" if "ring" in record else None


def _pairs(record: Record) -> str | None:
    """The busiest rank over an even share."""
    loss = record["pairs"] - 1 if "ring" in record else record.get("pair_loss")
    return None if loss is None else f"{loss:+.1%}"


def _seconds(link: str, record: Record) -> str | None:
    times = record.get("step_seconds", {}).get(link)
    return f"{times['nearfield']:.3f} s (ring {times['ring']:.3f})" if times else None


def _share(record: Record) -> str | None:
    return f"{record['whole']['median'] / record['ranks']:.3f}" if "whole" in record else None


def _slowest(name: str, record: Record) -> str | None:
    return f"{max(time['median'] for time in record[name]):.3f}" if name in record else None


def _counted(record: Record) -> str | None:
    return " ".join(map(str, record.get("counted", []))) or None
