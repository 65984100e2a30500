"""The plan of the comparison on pixels, carried out with tiny models by the script itself; what is collected, shown."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from tests.cats import CATS

from nearfield import cli
from nearfield._files import write_json
from nearfield.bench import collected, pixel_results
from nearfield.quality import Statistics
from nearfield.studio import results

BEGIN, END = collected.marks("pixel")
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "train_pixel.sh"
SETTINGS = (
    "tiny=yes compiled=no small=8 small_batch=2 small_seconds=0.1 size=12 batch=2 seconds=0.1 large=0 sheet=0 "
    "attention=loglinear ablations=loglinear-unweighted benchmarks=8x1 pictures=2"
)
RUNS = ("8-full", "12-full", "12-loglinear", "12-loglinear-unweighted")


def script(*words: object, code: int = 0) -> str:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


class Carried(NamedTuple):
    state: Path
    printed: str


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Carried:
    """The whole plan, once, on two photographs."""
    state = tmp_path_factory.mktemp("plan") / "state"
    (state / "photographs").mkdir(parents=True)
    for photograph in sorted(CATS.glob("*.avif"))[:2]:
        shutil.copy(photograph, state / "photographs")
    return Carried(state, script("plan", state, 9, *SETTINGS.split()))


@pytest.fixture(scope="module")
def archive(carried: Carried, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What travels, with distances between features that were drawn, for there is no network here to make them."""
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(("12-full-steps", "12-loglinear-steps", "12-loglinear-seconds")):
        files = [carried.state / f"{kind}.safetensors" for kind in ("drawn", "others")]
        for place, file in enumerate(files):
            features = torch.randn(40, 8, generator=generator) + number * place
            Statistics.of(features, 32).save(file)
        words = ["quality", *map(str, files), "--size", "32", "--json", str(carried.state / "quality" / name)]
        assert cli.main([*words[:-1], f"{words[-1]}.json"]) == 0
    out = tmp_path_factory.mktemp("collected")
    script("collect", carried.state, out)
    return out / "pixel-results.tar.gz"


def log_of(state: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state / "runs" / run / "log.jsonl").read_text().splitlines()]


def test_everything_is_done_in_order(carried: Carried) -> None:
    state, printed = carried
    assert printed.strip().endswith("all is done")
    parts = json.loads((state / "plan.json").read_text())["parts"]
    broken = [name for name, part in parts.items() if part["status"] != "done"]
    assert broken in ([], ["photographs"])  # without the network of FID
    begun = [line.split("] ")[1] for line in printed.splitlines() if " s left] " in line]
    assert begun[:5] == ["bench-8", "train-8-full", "photographs", "train-12-full", "train-12-loglinear"]
    assert begun[5] == "train-12-loglinear-unweighted"  # pictures are made beside it
    assert begun[-1] == "pictures-12-loglinear-unweighted-steps"
    assert {run.name for run in (state / "runs").iterdir()} == set(RUNS)


def test_runs_are_equal_in_samples_and_in_time(carried: Carried) -> None:
    state = carried.state
    full = log_of(state, "12-full")
    assert full[-1]["seconds"] >= 0.1
    made = json.loads((state / "quality" / "12-loglinear-steps-made.json").read_text())
    assert made["settings"]["step"] == len(full)
    assert made["loss"] > 0
    assert len(log_of(state, "12-loglinear-unweighted")) == len(full)
    sparse = log_of(state, "12-loglinear")
    assert len(sparse) >= len(full)
    assert sparse[-1]["seconds"] >= 0.1
    # All start from one model and see the same pictures, noise and levels.
    starts = {round(log_of(state, run)[0]["loss"], 2) for run in RUNS[1:]}
    assert len(starts) == 1


def test_what_is_done_is_not_done_again(carried: Carried, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(carried.state, state)
    (state / "quality" / "12-loglinear-seconds-made.json").unlink()
    before = (state / "runs" / "12-loglinear" / "log.jsonl").read_bytes()
    printed = script("plan", state, 9, *SETTINGS.split())
    begun = [line.split("] ")[1] for line in printed.splitlines() if " s left] " in line]
    assert begun == ["pictures-12-loglinear-seconds"]
    assert (state / "runs" / "12-loglinear" / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("speed=3", "`settings` must be name=value with names among small, small_batch,"),
        ("size=big", "`size` must be of kind int; got 'big'."),
        ("tiny=perhaps", "`tiny` must be of kind bool; got 'perhaps'."),
        ("ablations=none", "`ablations` must be any of loglinear-unenriched,"),
    ],
)
def test_wrong_settings_are_named(word: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_pixel

    with pytest.raises(SystemExit) as ended:
        plan_pixel.Settings.read([word])
    assert str(ended.value).startswith(message)


@pytest.mark.parametrize("is_full_trained", [True, False])
def test_commands_of_the_whole_plan_are_understood(
    is_full_trained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the real sizes, which are run on a GPU alone."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_pixel

    if is_full_trained:
        write_json(tmp_path / "runs" / "64-full" / "last.json", {"step": 300})
        (tmp_path / "quality").mkdir()
        (tmp_path / "quality" / "photographs-64.safetensors").touch()
    plan = plan_pixel.Plan(tmp_path, plan_pixel.Settings(), 0.0)
    parts = [part for group in plan.groups() for part in group]
    assert len({part.name for part in parts}) == len(parts) == 23
    options: dict[str, list[str]] = {}
    for part in parts:
        for chain in part.chains(3.0):
            for words in chain:
                cli._parser(words).parse_args(words)
        options[part.name] = part.chains(3.0)[0][0]
    assert ("--keep-steps" in options["train-64-loglinear-raster"]) == is_full_trained
    assert "raster" in options["train-64-loglinear-raster"]
    assert "--unweighted" in options["train-64-loglinear-unweighted"]


def test_parts_whose_seconds_count_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_pixel

    write_json(tmp_path / "runs" / "64-full" / "last.json", {"step": 300})
    groups = list(plan_pixel.Plan(tmp_path, plan_pixel.Settings(), 0.0).groups())
    for group in groups:
        timed = [part for part in group if "--keep-seconds" in part.chains(3.0)[0][0]]
        timed += [part for part in group if part.name.startswith("bench-")]
        assert (
            not timed or len(group) == 1 or {part.name for part in group} == {"train-32-full", "photographs"}
        )
    (beside,) = (group for group in groups if len(group) > 2)
    ablations = [part for part in beside if part.name.startswith("train-")]
    assert len(ablations) == len(plan_pixel.ABLATIONS)
    assert {part.uses for part in ablations} == {"training"}  # one at a time
    assert sum(part.name.startswith("pictures-") for part in beside) == 7 + len(ablations)


def test_nothing_is_begun_without_time_or_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_pixel

    def refused(*_: object) -> int:
        raise AssertionError

    monkeypatch.setattr(plan_pixel.planned, "forked", refused)
    settings = plan_pixel.Settings.read(SETTINGS.split())
    assert not plan_pixel.Plan(tmp_path, settings, time.monotonic() + 20).carry_out()
    pictures = plan_pixel.Plan(tmp_path, settings, 0.0).sampled("12-full", "steps")
    assert not pictures.can_begin(1000)
    (tmp_path / "runs" / "12-full").mkdir(parents=True)
    (tmp_path / "runs" / "12-full" / "model-seconds.safetensors").touch()
    assert pictures.can_begin(1000)
    assert not pictures.can_begin(20)


def test_parts_that_break_are_tried_in_another_way_and_then_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_pixel

    plan = plan_pixel.Plan(tmp_path, plan_pixel.Settings(), time.monotonic() + 500)
    tried: list[Any] = []

    def forked(chain: list[list[str]], *_: object) -> int:
        tried.append(chain[0])
        return len(tried)

    monkeypatch.setattr(plan_pixel.planned, "forked", forked)
    monkeypatch.setattr(plan_pixel.planned, "ended", lambda children: [(child, 1) for child in children])
    part = plan.pretraining()
    monkeypatch.setattr(plan, "groups", lambda: iter([[part]]))
    assert plan.carry_out()  # nothing is left that could be done
    assert ["--compile" in words for words in tried] == [True, False]
    assert plan.records[part.name].broke == 2


def test_who_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import planned

    hanging = subprocess.Popen(["sleep", "60"])
    child = hanging.pid
    assert planned.ended({child: 5.0}) == []
    assert planned.ended({child: -1.0}) == []
    assert planned.ended({child: 5.0}) == [(child, -15)]
    hanging.returncode = -15  # waited for above


def test_what_travels_is_small_and_shows_everything(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = {name.removeprefix("./") for name in opened.getnames()}
    assert {
        "plan.json",
        "bench/8.json",
        "runs/12-full/log.jsonl",
        "samples/12-full-steps/000001.png",
    } <= names
    assert not [name for name in names if name.endswith(".safetensors")]
    assert archive.stat().st_size < 100_000


def test_results_become_tables_and_pictures(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n")
    files = {
        "--json": tmp_path / "results.json",
        "--plot": page.parent / "images" / "loss.png",
        "--sheet": page.parent / "images" / "samples.png",
        "--page": page,
    }
    words = [str(word) for pair in files.items() for word in pair]
    for _ in range(2):  # what stands between the marks is replaced
        assert cli.main(["bench", "pixel", "--results", str(archive), *words]) == 0
    printed = capsys.readouterr().out
    assert "log-linear, summaries without weight" in printed
    document = json.loads(files["--json"].read_text())
    runs = {record["run"]: record for record in document["results"]}
    assert set(runs) == set(RUNS)
    full, sparse = runs["12-full"], runs["12-loglinear"]
    assert full["equal_time"] == full["equal_samples"]
    assert sparse["equal_samples"]["fid"] != sparse["equal_time"]["fid"]
    assert [share for *_, share in full["over_full"]] == [1.0] * len(full["over_full"])
    assert sparse["over_full"][0][2] == pytest.approx(1, abs=0.02)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| training speed |") == 1
    assert f"| {full['equal_samples']['fid']:.1f} |" in text
    assert "](images/loss.png)" in text
    assert "[results.json](../results.json)" in text
    assert "FID and KID: 40 pictures, 20 steps, against 40 photographs." in " ".join(text.split())
    with Image.open(files["--plot"]) as losses, Image.open(files["--sheet"]) as sheet:
        assert losses.width > 1000
        assert sheet.height > 3 * 2 * 12


def test_what_there_is_of_a_first_slice_is_shown(
    carried: Carried, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.json", "bench", "runs/8-full"):
        source, place = carried.state / name, tmp_path / "state" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}")
    words = f"--plot {tmp_path}/loss.png --sheet {tmp_path}/sheet.png --page {page}".split()
    assert cli.main(["bench", "pixel", "--results", str(tmp_path / "state"), *words]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("nothing to draw for ") == 2
    assert "training speed" in captured.out
    assert "![" not in page.read_text()


def test_the_studio_shows_them(archive: Path, tmp_path: Path) -> None:
    assert cli.main(["bench", "pixel", "--results", str(archive), "--json", str(tmp_path / "mine.json")]) == 0
    shown = results.read("mine", tmp_path)
    assert shown.headings[-2:] == ["equal time loss", "equal time fid"]
    assert [row[0] for row in shown.rows][:2] == ["full", "full"]
    assert shown.draw is not None
    shown.draw(tmp_path / "mine.png")
    with Image.open(tmp_path / "mine.png") as picture:
        assert picture.width > 1000


def test_curves_are_means_of_stretches() -> None:
    log = torch.tensor([[step, step / 2, step] for step in range(1, 121)], dtype=torch.float64)
    points = pixel_results.curve(log)
    assert points[:2] == [[2, 1.0, 1.5], [4, 2.0, 3.5]]
    assert len(points) == 60
    assert pixel_results.curve(log[:0]) == []


def test_bad_results_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    (tmp_path / "text.tar.gz").write_text("no archive")
    (tmp_path / "state").mkdir()
    for words, message in {
        f"--results {tmp_path}/none": "`--results` must name a file or a folder that is there; got ",
        f"--results {tmp_path}/text.tar.gz": "`--results` cannot be used: ",
        f"--results {tmp_path}/state": f"`--results` cannot be used: {tmp_path}/state holds no plan.json",
        f"--results {tmp_path}/state --page {tmp_path}/none": "`--page` must name a page that is there; got ",
        "--plot x.png": "`--plot` must come with `--results`; got 'x.png'.",
    }.items():
        assert cli.main(["bench", "pixel", *words.split()]) == 2
        assert f"nearfield: error: {message}" in capsys.readouterr().err
    with pytest.raises(collected.BadResults, match="the page has no place for results"):
        collected.put_into("no marks", "results", "pixel")
