"""How far methods and rules are from dense attention on captured activations, at equal shares of pairs.

The table of `nearfield errors`, with results that name the commit they were made at.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.cases import Case, named
from benchmarks.report import Column, Record
from benchmarks.runner import Benchmark, Session
from nearfield.cli import UsageError, comma_list, number, wrong
from nearfield_lab.captured import Sample, averaged, default_rows, measured, read_samples, row_of


class Errors(Benchmark):
    name = "errors"
    examples = (
        "  python -m benchmarks errors --captured captured --json errors.json\n"
        "  python -m benchmarks errors --captured captured --cases 'routed*' --shares 0.2,0.1\n"
        '  python -m benchmarks errors --captured captured --case \'{"row": "hilbert near=tile tiles=32|16|8"}\''
    )
    table = named(Case(row, {"row": row}, where=("cpu", "cuda", "quick")) for row in default_rows())
    defaults: ClassVar = {"row": ""}

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._samples: list[Sample] | None = None

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--captured", type=Path, metavar="DIR", help="a folder that `nearfield capture` has written"
        )
        parser.add_argument(
            "--shares",
            type=comma_list(number("--shares", least=0, is_above=True)),
            default=[0.3, 0.2, 0.12],
            metavar="X,X",
            help="of pairs (default 0.3,0.2,0.12)",
        )

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        if options.captured is None or not options.captured.is_dir():
            wrong("--captured", "name a folder of `nearfield capture`", repr(str(options.captured)))
        for case in cases:
            try:
                row_of(case.on["row"])
            except (ValueError, TypeError, ImportError, AttributeError) as error:
                raise UsageError(f"case {case.name!r}: `row` must be one of the table. {error}") from None

    def settings(self, case: Case) -> Record:
        return super().settings(case) | {
            "captured": self.options.captured.name,
            "shares": self.options.shares,
        }

    def is_timed(self) -> bool:
        return False  # each record says of which commit it is

    def measure(self, case: Case) -> Iterator[Record]:
        if self._samples is None:
            self._samples = [sample.to(self.device) for sample in read_samples(self.options.captured)]
        row = {case.name: row_of(case.on["row"])}
        with torch.no_grad():
            yield from measured(self._samples, row, self.options.shares)

    def rows(self, records: Sequence[Record]) -> Sequence[Record]:
        """Means over samples and heads."""
        return averaged([record for record in records if record["status"] == "ok"])

    def columns(self, records: Sequence[Record]) -> list[Column]:
        return [
            Column("share", "share", ".0%"),
            Column("kept", "kept", ".1%"),
            Column("error", "error", ".4f"),
            Column("worst", "worst", ".4f"),
            Column("weight read", "weight", ".1%"),
            Column("heads", "heads"),
            Column("note", "note"),
        ]
