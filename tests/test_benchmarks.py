"""What all benchmarks share: cases, the loop that measures them, results files, and messages."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from benchmarks import __main__ as program
from benchmarks import cases, report, runner, special
from benchmarks.cases import CPU, QUICK, Case
from benchmarks.report import Column, Record
from tests import command_line as cli
from tests.cats import CATS

from nearfield import Hilbert, Merge
from nearfield.cli import machine
from nearfield.cli.check import Checked
from nearfield.cli.timing import Effort, Timing
from nearfield.methods import method_classes
from nearfield.ops import _triton as kernels

KINDS = [name for name, (place, _) in program.BENCHMARKS.items() if not place.endswith(":")]
NEEDED = {"errors": ["--captured", str(CATS)]}
"""What some benchmarks must be given."""
COMMIT = "0123456789ab"


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine everywhere, of a clean checkout; what is timed is timed shortly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "missing", lambda _: "switched off by the test")
    monkeypatch.setattr(machine, "commit", lambda: COMMIT)
    monkeypatch.setattr(Effort, "of", lambda *_: Effort(rounds=2, seconds=0.0, most=1))


class Toy(runner.Benchmark):
    """Notes what it measures; cases say what goes wrong."""

    name = "toy"
    examples = "  python -m benchmarks toy"
    table = cases.named([
        Case("one", {"what": "fine"}, where=(CPU, QUICK)),
        Case("two", {"what": "fine"}, where=(CPU,)),
        Case("wrong", {"what": "wrong"}),
        Case("broken", {"what": "broken"}),
        Case("refused", {"what": "refused"}),
        Case("stopped", {"what": "stopped"}),
        Case("tiles", {"what": "fine"}, "Hilbert", {"tiles": 4}),
    ])  # fmt: skip
    defaults: ClassVar[dict[str, Any]] = {"what": "fine", "size": 1}
    drawing = "tests.test_benchmarks:drawn"
    seen: ClassVar[list[str]] = []

    def measure(self, case: Case) -> Iterator[Record]:
        self.seen.append(case.name)
        what = case.on["what"]
        if what == "stopped":
            raise KeyboardInterrupt
        if what == "refused":
            raise NotImplementedError("there is no GPU")
        if what == "broken":
            raise RuntimeError("the kernel is lost\nand more")
        runner.require(Checked(2.0 if what == "wrong" else 0.0, 1.0, "row 3"))
        yield {"work": "call", "milliseconds": Timing(2.0, 1.0, 3.0, 5), "unknown": float("inf")}

    def columns(self, records: Any) -> list[Column]:
        return [Column("ms", "milliseconds/median", ".1f"), Column("nothing", "nothing")]

    def notes(self, records: Any) -> list[str]:
        return [f"{len(records)} measured"]


def drawn(path: Path, records: list[Record], title: str) -> None:
    path.write_text(f"{title}: {[record['case'] for record in records]}", encoding="utf-8")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the toy measured."""
    toys = {"toy": ("tests.test_benchmarks:Toy", "a toy")}
    monkeypatch.setattr(program, "BENCHMARKS", program.BENCHMARKS | toys)
    Toy.seen.clear()
    return Toy.seen


def records_of(path: Path) -> list[Record]:
    records: list[Record] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return records


# -- cases -------------------------------------------------------------------------------------------------------------


def test_cases_are_chosen_by_device_name_and_pattern() -> None:
    def names(*words: str, device: str = "cpu", quick: bool = False) -> list[str]:
        return [case.name for case in cases.chosen(Toy.table, words, [], device, quick)]

    assert names() == ["one", "two"]
    assert names(quick=True) == ["one"]
    assert names(device="cuda") == []
    assert names("t*", "one") == ["two", "tiles", "one"]
    assert names("two", "two") == ["two"]


def test_a_case_of_ones_own_is_read() -> None:
    def read(**given: Any) -> Case:
        (case,) = cases.read(json.dumps(given), Toy.defaults, Toy.table)
        return case

    mine = read(method="Merge", fields={"ratio": 0.25}, size=3)
    assert (mine.name, mine.on, mine.made()) == ("merge", {"what": "fine", "size": 3}, Merge(ratio=0.25))
    changed = read(name="tiles", fields={"far": None})
    assert (changed.name, changed.made()) == ("tiles, changed", Hilbert(tiles=4, far=None))
    assert read(name="tiles").name == "tiles"
    assert mine.document["fields"]["region"] == "run"  # all fields, for defaults may change


def test_cases_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('[{"name": "tiles"}, {"name": "a", "size": 2}]', encoding="utf-8")
    found = cases.read(str(path), Toy.defaults, Toy.table)
    assert [(case.name, case.on.get("size")) for case in found] == [("tiles", None), ("a", 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_of_a_table_can_be_made(kind: str) -> None:
    table = program._loaded(program.BENCHMARKS[kind][0]).table
    cases.check(table.values())
    assert {place for case in table.values() for place in case.where} <= {"cpu", "cuda", "quick"}
    assert table.keys() == {case.name for case in table.values()}


def test_methods_with_a_module_of_their_own_are_known_and_so_are_their_cases() -> None:
    for name, own in special.known().items():
        assert name in {kind.__name__ for kind in method_classes().values()}
        for benchmark, listed in own.cases.items():
            table = program._loaded(program.BENCHMARKS[benchmark][0]).table.values()
            names = {case.on.get("pattern", case.name) for case in table if case.method == name}
            assert {case.name for case in listed} <= names
    assert special.of("Hilbert") == special.Special("Hilbert")


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_a_run_writes_a_table_a_document_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], toy: list[str]
) -> None:
    path, picture = tmp_path / "new" / "toy.json", tmp_path / "toy.png"
    assert cli.main(["bench", "toy", "--json", str(path), "--plot", str(picture)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1].split() == ["case", "ms"]
    assert told[3].split() == ["one", "2.0"]
    assert "2 measured" in told
    assert picture.read_text().endswith(": ['one', 'two']")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["format"], document["benchmark"]) == (2, "toy")
    assert {"date", "commit", "versions", "cpu", "gpus", "system"} <= set(document["machine"])
    first = document["results"][0]
    assert first["milliseconds"] == {"median": 2.0, "low": 1.0, "high": 3.0, "samples": 5}
    assert (first["case"], first["status"], first["commit"], first["unknown"]) == ("one", "ok", COMMIT, None)
    assert first["settings"]["what"] == "fine"


def test_what_is_wrong_breaks_or_cannot_run_is_a_record_without_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], toy: list[str]
) -> None:
    path, picture = tmp_path / "toy.json", tmp_path / "toy.png"
    words = ["bench", "toy", "--json", str(path), "--plot", str(picture), "--cases"]
    assert cli.main([*words, "wrong,broken,refused"]) == 1
    assert "nothing to draw: no result passed its check" in capsys.readouterr().err
    assert not picture.exists()
    found = {record["case"]: (record["status"], record["note"]) for record in records_of(path)}
    assert found == {
        "wrong": ("check failed", "relative error 2.00e+00 exceeds 1.00e+00 (row 3)"),
        "broken": ("broke", "RuntimeError: the kernel is lost"),
        "refused": ("not run", "there is no GPU"),
    }
    assert all("milliseconds" not in record for record in records_of(path))
    assert cli.main([*words, "one,wrong"]) == 1
    assert "wrong: check failed: relative error" in capsys.readouterr().out
    assert cli.main([*words, "one,refused"]) == 0
    assert toy.count("wrong") == 2  # what failed is measured again
    assert toy.count("one") == 1


def test_an_interruption_keeps_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "toy.json"
    assert cli.main(["bench", "toy", "--cases", "one,stopped,two", "--json", str(path)]) == 130
    captured = capsys.readouterr()
    assert "interrupted; 2 of 3 cases are left; the same command goes on" in captured.err
    assert "1 measured" in captured.out
    assert [record["case"] for record in records_of(path)] == ["one"]
    assert cli.main(["bench", "toy", "--cases", "stopped", "--json", str(tmp_path / "none.json")]) == 130
    assert not (tmp_path / "none.json").exists()


def test_what_was_measured_is_on_disk_whatever_stops_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure = tmp_path / "toy.json", Toy.measure

    def killed(self: Toy, case: Case) -> Iterator[Record]:
        if case.name == "two":
            raise SystemExit
        return measure(self, case)

    monkeypatch.setattr(Toy, "measure", killed)
    with pytest.raises(SystemExit):
        cli.main(["bench", "toy", "--json", str(path)])
    assert [record["case"] for record in records_of(path)] == ["one"]


def test_what_is_known_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, toy: list[str]
) -> None:
    words = ["bench", "toy", "--json", str(tmp_path / "toy.json")]
    assert cli.main([*words, "--cases", "one", "--minutes", "9"]) == 0
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith(":\n  two: what fine\n")
    assert cli.main(words) == 0
    assert toy == ["one", "two"]
    assert cli.main([*words, "--rounds", "3"]) == 0  # other settings: both stay
    assert [record["case"] for record in records_of(tmp_path / "toy.json")] == ["one", "two"] * 2
    toy.clear()
    for commit in ("ba9876543210", "0123456789ab+", None):  # other code, or code nobody knows
        monkeypatch.setattr(machine, "commit", lambda commit=commit: commit)
        assert cli.main(words) == 0
    assert toy == ["one", "two"] * 3
    assert len(records_of(tmp_path / "toy.json")) == 4
    monkeypatch.setattr(Toy, "is_timed", lambda self: False)
    assert cli.main(words) == 0
    assert len(toy) == 6


def test_time_that_is_up_ends_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], toy: list[str]
) -> None:
    assert cli.main(["bench", "toy", "--minutes", "1e-9", "--json", str(tmp_path / "toy.json")]) == 0
    assert "time is up; 2 of 2 cases are left; the same command goes on" in capsys.readouterr().err
    assert not toy


def test_rows_are_of_the_code_that_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that others make while it runs have no part in it."""
    monkeypatch.setattr(
        Toy, "settings", lambda *_: monkeypatch.setattr(machine, "commit", lambda: "after") or {}
    )
    assert cli.main(["bench", "toy", "--cases", "one", "--json", str(tmp_path / "toy.json")]) == 0
    assert records_of(tmp_path / "toy.json")[0]["commit"] == COMMIT


def test_the_picture_is_drawn_where_the_json_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nearfield.cli.reports.write_json", full)
    document, picture = tmp_path / "results.json", tmp_path / "results.png"
    assert cli.main(["bench", "toy", "--json", str(document), "--plot", str(picture)]) == 1
    captured = capsys.readouterr()
    assert f"error: {document} was not written: [Errno 28] No space left on device\n" in captured.err
    assert f"wrote {picture}\n" in captured.out
    assert picture.exists()


def test_the_method_of_a_case_is_in_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    assert cli.main(["bench", "toy", "--cases", "tiles", "--json", str(path)]) == 0
    settings = records_of(path)[0]["settings"]
    assert (settings["method"], settings["fields"]["tiles"]) == ("Hilbert", 4)
    assert settings["fields"].keys() == {each.name for each in fields(Hilbert)}


# -- reports -----------------------------------------------------------------------------------------------------------


def test_figures_follow_from_the_times() -> None:
    dense = {"cudnn": Timing(6.0, 5.0, 7.0, 3), "flash": Timing(10.0, 9.0, 11.0, 3)}
    found = report.speed_figures(2.5, dense, 0.25, 2.5)
    assert found["speed_ups"] == pytest.approx({"cudnn": 2.4, "flash": 4.0})
    assert (found["dense_backend"], found["speed_up"]) == ("cudnn", pytest.approx(2.4))
    assert (found["bound"], found["fraction_of_bound"]) == (4.0, pytest.approx(0.6))
    assert found["target_reached"] is False
    assert report.target_cell(found) == "2.50x missed"
    assert report.speed_figures(2.5, {"flash": dense["flash"]}, 0.25, 2.5)["target_reached"] is True
    on_cpu = report.speed_figures(2.5, {"sdpa": dense["flash"]}, 0.25, 2.5)
    assert on_cpu["target_reached"] is None  # targets are meant over attention on a GPU
    assert report.speed_figures(2.5, {}, None, None)["speed_up"] is None


def test_tables_have_the_columns_that_any_record_has() -> None:
    columns = [Column("case", "case"), Column("a", "deep/a", ".1f"), Column("b", "b"), Column("c", "c")]
    text = report.table(columns, [{"case": "x", "deep": {"a": 2}}, {"case": "y", "b": 3}])
    heading, _, first, second = (line.split() for line in text.splitlines())
    assert (heading, first, second) == (["case", "a", "b"], ["x", "2.0", "-"], ["y", "-", "3"])


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_benchmark_has_help_and_a_dry_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", kind, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "examples:\n  python -m benchmarks" in told
    for option in ("--cases", "--case", "--quick", "--dry-run", "--json", "--device", "--minutes"):
        assert f"{option} " in told
    assert cli.main(["bench", kind, "--quick", "--dry-run", *NEEDED.get(kind, [])]) == 0
    assert " to measure on " in capsys.readouterr().out


def bad_calls(folder: Path) -> dict[str, str]:
    (folder / "other.json").write_text('{"format": 1, "benchmark": "toy", "results": []}', encoding="utf-8")
    names = ", ".join(Toy.table)
    return {
        "--cases three": f"`--cases` must be any of {names}, or a pattern of them; got 'three'.",
        "--case 3": "`--case` must be a JSON object, or a .json file with a list of them; got '3' (int is no object). "
        'Example: --case \'{"method": "Hilbert"}\'',
        '--case {"sizes":3}': "`--case` must hold any of name, method, fields, what, size; got sizes.",
        '--case {"method":"Hilbert","fields":{"tiles":0}}': "case 'hilbert': `tiles` must be at least 1; got 0.",
        '--case {"method":"Hilfiger"}': "case 'hilfiger': `recipe` must name a method of ",
        "--device gpu": "`--device` must name a device; got 'gpu'. Example: --device cuda:1",
        "--impl fast": "`--impl` must be one of auto, gluon, triton, grouped, reference; got 'fast'.",
        "--rounds 0": "`--rounds` must be an integer of at least 1; got '0'.",
        "--json .": "`--json` must name a file, not a directory; got '.'. Example: --json results.json",
        "--json new/": "`--json` must name a file, not a directory; got 'new/'. Example: --json results.json",
        "--json /dev/null": "`--json` must name a plain file; got '/dev/null'. Example: --json results.json",
        "--plot /dev/null/x/y.png": "`--plot` must stand in a directory; got '/dev/null/x/y.png', "
        "where /dev/null is a file. Example: --plot results.png",
        "--plot picture.gif": "`--plot` must end in .png; got 'picture.gif'. Example: --plot results.png",
        "--json a.png --plot a.png": "`--plot` must be another file than `--json`; got 'a.png'.",
        f"--json {folder}/other.json": "`--json` must name a new file or one of these results. ",
    }


@pytest.mark.parametrize("index", range(15))
def test_bad_calls_say_what_is_wrong(
    index: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], toy: list[str]
) -> None:
    calls = bad_calls(tmp_path)
    assert len(calls) == 15
    call, message = list(calls.items())[index]
    assert cli.main(["bench", "toy", *call.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"nearfield: error: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not toy


def test_options_are_a_benchmarks_own() -> None:
    parser = argparse.ArgumentParser()
    program.add_options(parser, Toy)
    assert parser.parse_args([]).plot is None
    assert parser.parse_args(["--case", "{}", "--case", "[]"]).case == ["{}", "[]"]
