"""One loop for all benchmarks: every result is written at once, a failure is a record, and known results stay."""

import argparse
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from benchmarks import report
from benchmarks.cases import Case, check, chosen
from benchmarks.cases import read as read_cases
from benchmarks.report import Column, Record
from nearfield.cli import FAILED, INTERRUPTED, OK, Bar, UsageError, device_of, machine, time_for
from nearfield.cli.check import Checked
from nearfield.cli.reports import note_load, write_reports, write_so_far
from nearfield.cli.timing import Effort
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.missing import MissingExtra


class WrongAnswer(Exception):
    """What was to be timed does not give what it should: it gets no figure."""

    def __init__(self, checked: Checked | str) -> None:
        super().__init__(str(checked))
        self.checked = checked if isinstance(checked, Checked) else None


def require(checked: Checked) -> Checked:
    """The verdict, if it is good."""
    if not checked.passed:
        raise WrongAnswer(checked)
    return checked


@dataclass(frozen=True)
class Session:
    """What holds for all cases of a run.

    Args:
        rounds: turns that were asked for; None: as many as suit the work.
        say: shows on stderr what is being done.
    """

    options: argparse.Namespace
    device: torch.device
    say: Callable[[str], None] = lambda text: None
    has_time: Callable[[], bool] = lambda: True

    @property
    def impl(self) -> Any:
        """Which implementation reads."""
        return self.options.impl

    def effort(self, rounds: int | None = None) -> Effort:
        """How long to measure: by `--rounds`, else by `rounds` where calls are long; None for short calls."""
        asked = self.options.rounds or rounds
        if asked is None:
            return Effort.of(self.device, self.options.quick)
        return Effort(asked, seconds=0.4 * asked, most=10)


class Benchmark(ABC):
    """What is measured of each case.

    Args:
        table: the cases that have names.
        defaults: all that a case may be `on`.
        drawing: what draws records, "module:function".
    """

    name: ClassVar[str]
    examples: ClassVar[str]
    table: ClassVar[Mapping[str, Case]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    drawing: ClassVar[str] = ""
    plot_suffixes: ClassVar[tuple[str, ...]] = (".png",)

    def __init__(self, session: Session) -> None:
        self.session, self.options, self.device = session, session.options, session.device

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """The benchmark's own options; most have none."""
        del parser

    @classmethod
    def cases(cls, options: argparse.Namespace, device: torch.device) -> list[Case]:
        """What was asked for."""
        own = [case for text in options.case for case in read_cases(text, cls.defaults, cls.table)]
        return chosen(cls.table, options.cases or (), own, device.type, options.quick)

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        """Refuse what cannot be measured, before anything takes time."""
        check(cases)

    def settings(self, case: Case) -> Record:
        """What it takes to measure it again, and to know that it was."""
        own = {"device": machine.device_name(self.device), "quick": self.options.quick}
        return case.document | own | {"impl": self.options.impl, "rounds": self.options.rounds}

    @abstractmethod
    def measure(self, case: Case) -> Iterable[Record]:
        """The records of a case. Raises WrongAnswer for one that gets no figure."""

    def is_timed(self) -> bool:
        """Whether figures depend on the state of the code, so that those of another commit do not serve."""
        return True

    def facts(self, records: Sequence[Record]) -> Record:
        """What a results file says besides its records."""
        del records
        return {}

    def rows(self, records: Sequence[Record]) -> Sequence[Record]:
        """What the table shows: by default every record."""
        return records

    @abstractmethod
    def columns(self, records: Sequence[Record]) -> Sequence[Column]:
        """The table's columns behind the first, which names the case."""

    def notes(self, records: Sequence[Record]) -> list[str]:
        """Lines below the table."""
        del records
        return []

    def draw(self, path: Any, records: Sequence[Record], title: str) -> None:
        module, _, name = self.drawing.partition(":")
        getattr(importlib.import_module(module), name)(path, records, title)


class Run:
    """One benchmark on its cases, with the records of a results file."""

    def __init__(self, bench: Benchmark, cases: Sequence[Case], earlier: Sequence[Record]) -> None:
        self.bench, self.cases = bench, cases
        self.records = list(earlier)
        self.machine = machine.facts()  # now: what is committed while it runs is not what runs
        self._settings = {id(case): report.plain(bench.settings(case)) for case in cases}

    def missing(self) -> list[Case]:
        """Cases without records that serve."""
        return [
            case for case in self.cases if not (found := self._of(case)) or not all(map(self._serves, found))
        ]

    def wanted(self) -> list[Record]:
        """Records of the cases, in their order."""
        return [record for case in self.cases for record in self._of(case)]

    def document(self) -> Record:
        facts = report.plain(self.bench.facts(self.wanted()))
        return report.document(self.bench.name, facts, self.machine, self.records)

    def measure(self, case: Case) -> None:
        """Replace the records of a case. A failure is a record, too, so that the other cases still run."""
        found = list[Record]()
        try:
            self._collect(case, found)
        except KeyboardInterrupt:
            if found:  # what there is stays, but does not serve later
                self._keep(case, [record | {"is_partial": True} for record in found])
            raise
        self._keep(case, found)

    def _keep(self, case: Case, found: Sequence[Record]) -> None:
        old = [id(record) for record in self._of(case)]
        made = [self._record(case, record) for record in found]
        self.records = [record for record in self.records if id(record) not in old] + made

    def _of(self, case: Case) -> list[Record]:
        settings = self._settings[id(case)]
        return [record for record in self.records if record["settings"] == settings]

    def _serves(self, record: Record) -> bool:
        if record["status"] != "ok" or record.get("is_partial"):
            return False
        commit = record["commit"]
        is_this_code = commit is not None and not commit.endswith("+") and commit == self.machine["commit"]
        return is_this_code or not self.bench.is_timed()

    def _record(self, case: Case, found: Record) -> Record:
        made = {"commit": self.machine["commit"], "date": self.machine["date"]}
        start = {"case": case.name, "status": "ok", "note": ""}
        record: Record = report.plain(start | found | made)
        return record | {"settings": self._settings[id(case)]}

    def _collect(self, case: Case, found: list[Record]) -> None:
        """Add what is measured, and last what went wrong."""
        try:
            found.extend(self.bench.measure(case))
            return
        except UsageError:
            raise
        except WrongAnswer as error:
            found.append({"status": "check failed", "note": str(error), "check": error.checked})
        except NotImplementedError as error:
            found.append({"status": "not run", "note": str(error)})
        except Exception as error:  # whatever breaks is what its record says
            note = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            found.append({"status": "broke", "note": note})
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()  # after the handler: the error held on to what was in use


def run(kind: type[Benchmark], options: argparse.Namespace) -> int:
    """Measure what is missing and report everything that was asked for; returns the exit code.

    It is 0 if something was measured, nothing was wrong or broke, and all of it was written.
    """
    device = device_of(options.device)
    cases = kind.cases(options, device)
    kind.check(cases, options)
    require_reports("--plot", options.plot, options.json)
    try:
        earlier = report.read(options.json, kind.name)
    except ValueError as error:
        raise UsageError(f"`--json` must name a new file or one of these results. {error}") from None
    try:
        with Bar(len(cases), "cases") as bar:
            done = [0]
            session = Session(
                options, device, lambda text: bar.show(done[0], text), time_for(options.minutes)
            )
            course = Run(kind(session), cases, earlier)
            if options.dry_run:
                return _list(course, device)
            note_load(device.type)
            ended = _measure_all(course, options, done)
    except MissingExtra as error:
        raise UsageError(str(error)) from None
    return _told(course, options, ended)


def _list(course: Run, device: torch.device) -> int:
    missing = course.missing()
    print(f"{len(missing)} to measure on {machine.device_name(device)}:", *missing, sep="\n  ")
    return OK


def _measure_all(course: Run, options: argparse.Namespace, done: list[int]) -> str:
    """Why it ended before all was measured, or nothing."""
    missing = course.missing()
    done[0] = len(course.cases) - len(missing)
    try:
        for case in missing:
            if not course.bench.session.has_time():
                return "time is up"
            course.bench.session.say(case.name)
            course.measure(case)
            done[0] += 1
            write_so_far(course.document(), options.json)
    except KeyboardInterrupt:
        if not course.wanted():
            raise
        return "interrupted"
    return ""


def _told(course: Run, options: argparse.Namespace, ended: str) -> int:
    bench, records = course.bench, course.wanted()
    measured = [record for record in records if record["status"] == "ok"]
    if ended:
        left = len(course.missing())
        goes_on = "; the same command goes on" if options.json else ""
        print(f"{ended}; {left} of {len(course.cases)} cases are left{goes_on}", file=sys.stderr)
    print(machine.device_name(bench.device))
    if rows := bench.rows(records):
        print(report.table([Column("case", "case"), *bench.columns(rows)], rows))
    for line in [*bench.notes(measured), *_failures(records)]:
        print(line)
    drawn = {"results": measured} if options.plot else {}
    written = write_reports(course.document(), options.json)
    if drawn:
        title = f"{bench.name} on {machine.device_name(bench.device)}"
        written &= write_reports(drawn, None, options.plot, bench.draw, title)
    if ended == "interrupted":
        return INTERRUPTED
    is_wrong = any(record["status"] in ("check failed", "broke") for record in records)
    return OK if written and not is_wrong and (measured or ended) else FAILED


def _failures(records: Sequence[Record]) -> list[str]:
    return [
        f"{record['case']}: {record['status']}: {record['note']}"
        for record in records
        if record["status"] != "ok"
    ]
