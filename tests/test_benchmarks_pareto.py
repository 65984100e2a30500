"""`python -m benchmarks pareto`: its points and fronts, and what it reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import pareto
from benchmarks.pareto import COMMITTED, PANELS, Point, files_in, points_of, read_points, with_fronts
from tests import command_line as cli

from nearfield._files import write_json
from nearfield_lab.plots.fronts import pareto_panels
from nearfield_lab.quality.results import QualityRow, as_document
from nearfield_lab.studio import results as studio_results

SPEED, PAIRS, FID, _ = (panel.title for panel in PANELS)


# -- points ----------------------------------------------------------------------------------------------------------


def test_fronts_are_what_nothing_in_a_group_beats() -> None:
    points = [
        Point("dense", "dense", "a", pairs_kept=1.0, speed_up=1.0, lpips=0.0),
        Point("fast", "Hilbert", "a", pairs_kept=0.2, speed_up=3.0, lpips=0.2),
        Point("slower and worse", "Merge", "a", pairs_kept=0.1, speed_up=2.0, lpips=0.3),
        Point("close", "Merge", "a", pairs_kept=0.5, speed_up=1.5, lpips=0.1, fid=9.0),
        Point("alone", "Hilbert", "b", pairs_kept=0.9, speed_up=0.5, lpips=0.9),
        Point("speed only", "Hilbert", "c", pairs_kept=0.9, speed_up=9.0),
    ]
    fronts = {record["name"]: record["front"] for record in with_fronts(points)}
    assert fronts == {
        "dense": [SPEED, PAIRS],
        "fast": [SPEED, PAIRS],
        "slower and worse": [PAIRS],
        "close": [SPEED, PAIRS, FID],
        "alone": [SPEED, PAIRS],
        "speed only": [],
    }


def test_rows_become_points_of_their_own_setting() -> None:
    merged = {"method": "Composition", "size": 64, "steps": 2}
    rows = [
        QualityRow("dense", 1.0, 4, settings={"name": "dense", "size": 64, "steps": 2}),
        QualityRow("a", 0.5, 4, lpips=0.1, milliseconds=5.0, dense_milliseconds=10.0, settings=merged),
        QualityRow(
            "b", 0.5, 4, seam=1.2, dense_seam=0.8, settings=merged | {"method": "hilbert", "size": 128}
        ),
    ]
    dense, both, tiles = points_of(rows, "mine")
    assert (dense.family, dense.lpips, dense.speed_up) == ("dense", 0.0, None)
    assert dense.group == both.group == "mine: 4 pictures, 64 px, 2 steps"
    assert (both.family, both.speed_up) == ("Merge | Hilbert", 2.0)
    assert (tiles.family, tiles.group) == ("Hilbert", "mine: 4 pictures, 128 px, 2 steps")
    assert tiles.seam_ratio == pytest.approx(1.5)


def test_committed_results_are_read() -> None:
    files = {path.stem: read_points(path) for path in files_in([COMMITTED])}
    assert {"hilbert-h200", "model-h200"} <= set(files)
    assert "attend-h200" not in files
    step = files["model-h200"][0]
    assert (step.name, step.group) == ("1024 px", "model-h200: one step")
    assert step.milliseconds is not None
    assert all(point.pairs_kept for points in files.values() for point in points)
    timed = [
        points for name, points in files.items() if not name.startswith(("pareto", "quality"))
    ]  # they have no times
    assert all(point.speed_up for points in timed for point in points)


def test_other_files_are_refused_by_name_and_passed_over_in_folders(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    write_json(tmp_path / "rows.json", as_document([QualityRow("a", 0.5, 4)], {}))
    assert files_in([tmp_path]) == [tmp_path / "rows.json"]
    for name in ("broken.json", "list.json"):
        assert files_in([tmp_path / name]) == [tmp_path / name]
        with pytest.raises(
            ValueError, match=r"holds no results of quality, pictures, model, step, hilbert, attention\."
        ):
            read_points(tmp_path / name)


def test_tables_have_the_columns_that_are_known() -> None:
    records = with_fronts(
        [Point("a", "Hilbert", "g", pairs_kept=0.25, speed_up=2.0), Point("b", "Merge", "h", fid=7)]
    )
    first, second = pareto.tables(records).split("\n\n")
    assert first.splitlines()[:2] == ["g", "method  pairs  speed-up"]
    assert first.splitlines()[3].split() == ["a", "25.0%", "2.00"]
    assert second.splitlines()[1].split() == ["method", "FID"]


# -- pictures and the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_panels_are_drawn_for_what_is_known(tmp_path: Path, suffix: str) -> None:
    whole = Point("a", "Hilbert", "g", pairs_kept=0.5, speed_up=2.0, lpips=0.1, fid=9.0)
    speed = Point("b", "Merge", "h", pairs_kept=0.5, speed_up=2.0)
    sizes = []
    for number, points in enumerate([[speed], [whole], [whole, speed]]):
        path = tmp_path / f"{number}{suffix}"
        pareto_panels(path, with_fronts(points), "title")
        sizes.append(path.stat().st_size)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures that were measured here, with committed steps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    own, document, plot = (tmp_path / name for name in ("own.json", "all.json", "all.svg"))
    assert cli.main(["bench", "pictures", "--quick", "--cases", "default/hilbert", "--json", str(own)]) == 0
    capsys.readouterr()
    words = ["bench", "pareto", "--results", str(own), str(COMMITTED / "model-h200.json")]
    assert cli.main([*words, "--json", str(document), "--plot", str(plot)]) == 0
    told = capsys.readouterr().out
    assert "own: 1 pictures, 64 px, 2 steps\n" in told
    assert "model-h200: one step\n" in told
    records: list[dict[str, Any]] = json.loads(document.read_text(encoding="utf-8"))["results"]
    assert [record["name"] for record in records] == ["dense", "Hilbert()", "1024 px", "2048 px", "4096 px"]
    assert PAIRS in records[0]["front"]
    assert plot.stat().st_size > 1000
    shown = studio_results.read("all", tmp_path)
    assert shown.kind == "pareto"
    assert shown.draw is not None
    shown.draw(tmp_path / "studio.png")
    assert (tmp_path / "studio.png").stat().st_size > 1000


def test_committed_results_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "pareto"]) == 0
    assert "hilbert-h200: one attention call\n" in capsys.readouterr().out


def test_bad_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("[]", encoding="utf-8")
    for words, message in (
        (
            ["--results", str(tmp_path / "none.json")],
            "`--results` must name files or folders that are there; got ",
        ),
        (["--results", str(tmp_path / "x.json")], "`--results` must name results of benchmarks."),
        (["--plot", "own.pdf"], "`--plot` must end in .png or .svg; got 'own.pdf'"),
    ):
        assert cli.main(["bench", "pareto", *words]) == 2
        assert message in capsys.readouterr().err
