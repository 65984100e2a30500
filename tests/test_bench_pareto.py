"""`python -m benchmarks pareto`: its points and fronts, what it measures, and that it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import pareto, pareto_report
from benchmarks.pareto_report import COMMITTED, Point, files_in, points_of, read_points, with_fronts
from benchmarks.picture_runs import Task
from benchmarks.quality_cases import ALL_METHODS, Pattern, read_patterns
from tests import command_line as cli
from tests.cats import SIZE, lively_model
from tests.test_bench_quality import Features

from nearfield import Hilbert, apply
from nearfield._files import write_json
from nearfield_lab import quality
from nearfield_lab.embedded.model import save_model
from nearfield_lab.plots.fronts import PANELS, pareto_panels
from nearfield_lab.quality.results import QualityRow, as_document, read_rows
from nearfield_lab.studio import results as studio_results

SPEED, PAIRS, FID, _ = (panel.title for panel in PANELS)
TILES = Pattern("2 tiles", {"tiles": 2, "shared": "none", "dense_layers": 0, "dense_steps": 0})
SAME = Pattern("same", {"ratio": 0, "skip_blocks": [0, 0]}, "Merge")
MERGED = Pattern("merged", {"ratio": 0.5, "region_size": 16, "skip_blocks": [0, 0]}, "Merge")
WRONG = Pattern("no such layer", {"dense_layers": [99]})


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
        with pytest.raises(ValueError, match=r"holds no results of the benchmarks quality, model, hilbert\."):
            read_points(tmp_path / name)


def test_tables_have_the_columns_that_are_known() -> None:
    records = with_fronts(
        [Point("a", "Hilbert", "g", pairs_kept=0.25, speed_up=2.0), Point("b", "Merge", "h", fid=7)]
    )
    first, second = pareto_report.tables(records).split("\n\n")
    assert first.splitlines()[:2] == ["g", "method  pairs  speed-up"]
    assert first.splitlines()[3].split() == ["a", "25.0%", "2.00"]
    assert second.splitlines()[1].split() == ["method", "FID"]


def test_every_method_has_its_place() -> None:
    methods = {pattern.method for pattern in read_patterns(",".join(ALL_METHODS))}
    assert methods == {
        "hilbert", "LogLinear", "FineGrained", "BlockTopK", "Merge", "BipartiteMerge", "StridedKeys", "Composition"
    }  # fmt: skip


# -- measuring -------------------------------------------------------------------------------------------------------


def test_the_tiny_model_is_the_same_each_time_and_notices_attention() -> None:
    state = torch.random.get_rng_state()
    pipeline = pareto.tiny_pipeline()
    assert torch.equal(torch.random.get_rng_state(), state)
    dense = pipeline.sample(range(1), size=64, steps=1)
    assert torch.equal(pareto.tiny_pipeline().sample(range(1), size=64, steps=1), dense)
    with apply(pipeline, Hilbert(tiles=4, shared="none", dense_layers=0, dense_steps=0)):
        assert not torch.allclose(pipeline.sample(range(1), size=64, steps=1), dense, rtol=1e-3, atol=1e-3)


def test_patterns_are_timed_and_compared_once(tmp_path: Path) -> None:
    out, seen = tmp_path / "own.json", list[str]()
    task = Task(pareto.TINY, num=2, steps=2, size=64, batch=1)
    networks = {"inception": Features(), "efficientnet": Features()}

    def sweep() -> pareto.TimedSweep:
        return pareto.TimedSweep(task, out, networks=networks, on_picture=lambda _, name: seen.append(name))

    patterns = [TILES, WRONG, SAME, MERGED]
    assert not sweep().run(patterns, has_time=lambda: len(set(seen)) < 2)
    assert [row.pattern for row in read_rows(out)] == ["dense", "2 tiles"]
    again = sweep()
    assert again.run(patterns)
    twice = [name for name in ("dense", "2 tiles", "same", "merged") for _ in range(2)]
    assert seen == [*twice[:4], "no such layer", *twice[4:]]
    assert list(again.broken) == ["no such layer"]
    assert "`dense_layers` must hold indices from -5 to 4; got 99" in again.broken["no such layer"]
    dense, tiles, same, merged = rows = read_rows(out)
    assert dense.speed_up == 1
    assert all(row.speed_up and row.milliseconds and row.settings["batch"] == 1 for row in rows)
    # The order of the tokens changes sums in their last digit, and a pixel in a thousand by 1.
    assert same.tokens_kept == 1
    assert same.lpips == pytest.approx(0, abs=1e-6)
    assert same.psnr is None or same.psnr > 70
    assert merged.tokens_kept == 0.5
    for row in (tiles, merged):
        assert row.lpips is not None
        assert row.lpips > 1e-5
        assert row.psnr is not None
        assert row.inception_distance == row.efficientnet_distance
        assert row.inception_distance is not None
        assert row.inception_distance > 0
        assert row.seam != row.dense_seam
    seen.clear()
    assert sweep().run([TILES, SAME, MERGED], has_time=lambda: False)
    assert not seen


def test_pictures_are_as_large_as_those_the_model_was_trained_with(tmp_path: Path) -> None:
    save_model(tmp_path / "model.safetensors", lively_model())
    assert pareto.trained_size(tmp_path / "model.safetensors") == SIZE
    assert pareto.trained_size(pareto.TINY) == 128


def test_the_first_timing_warms_up() -> None:
    assert pareto._median([9.0, 1.0, 3.0, 2.0]) == 2.0
    assert pareto._median([9.0, 1.0]) == 5.0


# -- pictures and the command ----------------------------------------------------------------------------------------


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


def command(*words: str, out: Path) -> list[str]:
    return [
        "bench",
        "pareto",
        "--tiny",
        "--num",
        "1",
        "--steps",
        "1",
        "--size",
        "64",
        "--out",
        str(out),
        *words,
    ]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "load_inception", lambda *_: Features())
    mine, out, document, plot = (tmp_path / name for name in ("mine.json", "own.json", "all.json", "all.svg"))
    mine.write_text(json.dumps([{"name": "t", "fields": {"tiles": 2, "dense_steps": 0}}]), encoding="utf-8")
    words = command("--patterns", str(mine), "--results", str(COMMITTED / "model-h200.json"), out=out)
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(
        "2 to measure at 64 px, 1 steps:\n  dense\n  t\n1 result files to read:"
    )
    assert cli.main([*words, "--json", str(document), "--plot", str(plot)]) == 0
    told = capsys.readouterr().out
    assert "own: 1 pictures, 64 px, 1 steps\n" in told
    assert "model-h200: one step\n" in told
    records: list[dict[str, Any]] = json.loads(document.read_text(encoding="utf-8"))["results"]
    assert [record["name"] for record in records] == ["dense", "t", "1024 px", "2048 px", "4096 px"]
    assert PAIRS in records[0]["front"]
    assert records[1]["inception_distance"] is not None
    assert plot.stat().st_size > 1000
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("0 to measure")
    shown = studio_results.read("all", tmp_path)
    assert shown.kind == "pareto"
    assert shown.draw is not None
    shown.draw(tmp_path / "studio.png")
    assert (tmp_path / "studio.png").stat().st_size > 1000


def test_results_alone_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "pareto", "--patterns", "none", "--out", str(tmp_path / "own.json")]) == 0
    assert "hilbert-h200: one attention call\n" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_broken_patterns_are_told_and_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('[{"name": "w", "fields": {"dense_layers": [99]}}]', encoding="utf-8")
    assert cli.main(command("--patterns", str(mine), out=tmp_path / "own.json")) == 1
    assert "w: not measured: `dense_layers` must hold indices" in capsys.readouterr().err


def bad_calls(folder: Path) -> dict[str, tuple[list[str], str]]:
    (folder / "x.json").write_text("[]", encoding="utf-8")
    (folder / "w.json").write_text('[{"name": "w", "fields": {"tiles": 0}}]', encoding="utf-8")
    out = folder / "own.json"
    return {
        "patterns": (command("--patterns", "x", out=out), "`--patterns` must name groups (default, far, "),
        "fields": (
            command("--patterns", str(folder / "w.json"), out=out),
            "pattern 'w': `tiles` must be at least 1; got 0",
        ),
        "both": (command("--weights", "x", out=out), "`--weights` must be left out with `--tiny`; got 'x'"),
        "size": (command("--size", "68", out=out), "`--size` must be a multiple of 8 pixels; got 68"),
        "results": (
            command("--results", str(folder / "none.json"), out=out),
            "`--results` must name files or folders that are there; got ",
        ),
        "kind": (
            command("--results", str(folder / "x.json"), out=out),
            "`--results` must name results of benchmarks.",
        ),
        "out": (command("--plot", "own.pdf", out=out), "`--plot` must end in .png or .svg; got 'own.pdf'"),
        "weights": (
            ["bench", "pareto", "--weights", str(folder / "no.safetensors")],
            "`--weights` must name a file that is there; got ",
        ),
        "inception": (
            command("--inception", str(folder / "no.safetensors"), "--patterns", "tiles", out=out),
            "`--inception` must name a file that is there; got ",
        ),
        "used": (
            command("--patterns", "tiles", out=folder / "x.json"),
            "`--out` must name a new file or one of these results.",
        ),
    }


@pytest.mark.parametrize("name", [
    "patterns", "fields", "both", "size", "results", "kind", "out", "weights", "inception", "used"
])  # fmt: skip
def test_bad_calls(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = bad_calls(tmp_path)[name]
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
