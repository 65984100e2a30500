"""The plan of the quality campaign, carried out with a tiny model by the script itself; what is collected, shown."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from PIL import Image
from tests.cats import CATS, lively_model

from nearfield import cli
from nearfield._files import write_json
from nearfield.bench import collected, quality_results
from nearfield.bench.quality_cases import GROUPS, SECTIONS, as_file_name, pattern_named
from nearfield.demo.model import save_model
from nearfield.quality.results import QualityRow, as_document, read_rows
from nearfield.studio import results

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "measure_quality.sh"
SIZES = "size=64 steps=4 batch=4 screen=4 num=4 most=6 pairs=4"
TUNING = "tuning_steps=2 cool_down=1 equal_steps=1 tuning_batch=2 ranks=4,full"
SETTINGS = (*SIZES.split(), *TUNING.split(), "compiled=no", "sections=Fewer tiles")
CANDIDATES = [pattern.name for pattern in GROUPS["search"]]
BEGIN, END = collected.marks("quality")

# Python reads it where it starts: in the place of the network of FID, a few numbers that depend on everything.
FEATURES = """
import torch
from nearfield import quality
from nearfield.quality import measure

class Features(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, images):
        return torch.nn.functional.conv2d(images.float() / 255, self.weight, stride=8).abs().mean(dim=(2, 3))

quality.load_inception = measure.load_inception = lambda *_: Features()
"""


def script(*words: object) -> str:
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
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def staged(state: Path) -> Path:
    for name in ("photographs", "files", "tools"):
        (state / name).mkdir(parents=True)
    for photograph in CATS.glob("*.avif"):
        shutil.copy(photograph, state / "photographs")
    save_model(state / "files" / "cats.safetensors", lively_model())
    (state / "tools" / "sitecustomize.py").write_text(FEATURES)
    return state


def begun(printed: str) -> list[str]:
    return [line.split("] ")[1] for line in printed.splitlines() if " s left] " in line]


class Carried(NamedTuple):
    state: Path
    printed: str


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Carried:
    """The whole plan, once."""
    state = staged(tmp_path_factory.mktemp("plan") / "state")
    return Carried(state, script("plan", state, 9, *SETTINGS))


@pytest.fixture(scope="module")
def archive(carried: Carried, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("collected")
    script("collect", carried.state, out, "rank-full-equal")
    assert (out / "rank-full-equal-model.part-aa").exists()
    return out / "quality-results.tar.gz"


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_quality

    return plan_quality


def test_everything_is_done_in_order(carried: Carried) -> None:
    state, printed = carried
    assert printed.strip().endswith("all is done"), printed
    parts = json.loads((state / "plan.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"done"}, printed
    order = begun(printed)
    assert order[:2] == ["photographs", "dense-pictures"]
    assert set(order[2:6]) == {f"pictures-{as_file_name(name)}-4" for name in CANDIDATES}
    assert order[6:8] == ["tune-rank-4", "pictures-dense-6"]
    tuned = order.index("pictures-tuned-lora-of-rank-4-2-steps-6")
    assert tuned > order.index("tune-rank-4")
    assert order.index("pictures-tuned-all-weights-1-steps-4") > order.index("tune-rank-full-equal")
    chosen = json.loads((state / "chosen.json").read_text())["name"]
    fids = {name: read_rows(state / "quality" / f"{as_file_name(name)}.json")[0].fid for name in CANDIDATES}
    assert fids[chosen] == min(value for value in fids.values() if value is not None)


def test_rows_are_of_the_same_dense_pictures(carried: Carried) -> None:
    state = carried.state
    chosen = json.loads((state / "chosen.json").read_text())["name"]
    dense = read_rows(state / "quality" / "dense.json")
    assert [(row.pattern, row.samples) for row in dense] == [("dense", 4), ("dense", 6)]
    rows = read_rows(state / "quality" / f"{as_file_name(chosen)}.json")
    assert [row.samples for row in rows] == [4, 6]
    tuned = read_rows(state / "quality" / "tuned-lora-of-rank-4-2-steps.json")
    assert [(row.samples, row.settings["tuning"]) for row in tuned] == [(4, "LoRA"), (6, "LoRA")]
    assert tuned[-1].lpips != rows[-1].lpips
    assert tuned[-1].pairs_kept == rows[-1].pairs_kept
    (full,) = read_rows(state / "quality" / "tuned-all-weights-1-steps.json")
    assert full.settings["tuning"] == "own weights"
    assert len(list((state / "kept").glob("dense-*"))) == 1


def test_what_is_done_is_not_done_again(carried: Carried, tmp_path: Path, planning: ModuleType) -> None:
    state = tmp_path / "state"
    shutil.copytree(carried.state, state)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    assert not unsettled(plan)
    (state / "quality" / "far-16-4-tiles.json").unlink()
    (state / "tuned" / "rank-4" / "pytorch_lora_weights.safetensors").unlink()
    (state / "quality" / "tuned-lora-of-rank-4-2-steps.json").unlink()
    assert unsettled(plan) == [
        "tune-rank-4",
        "pictures-tuned-lora-of-rank-4-2-steps-6",
        "pictures-far-16-4-tiles-4",
    ]


def unsettled(plan: Any) -> list[str]:
    return [part.name for group in plan.groups() for part in group if not plan.is_settled(part)]


def test_a_new_machine_goes_on_from_what_was_collected(
    archive: Path, tmp_path: Path, planning: ModuleType
) -> None:
    with tarfile.open(archive) as opened:
        names = {name.removeprefix("./") for name in opened.getnames()}
    assert {
        "plan.json",
        "chosen.json",
        "quality/dense.json",
        "strips/dense.jpg",
        "tuned/rank-4/log.jsonl",
    } <= names
    assert "tuned/rank-4/pytorch_lora_weights-steps.safetensors" in names
    assert "tuned/rank-4/checkpoint.safetensors" in names  # so that it may go on
    assert not [name for name in names if name.startswith("kept") or name.endswith("model.safetensors")]
    assert archive.stat().st_size < 3_000_000
    state = staged(tmp_path / "state")
    script("restore", state, archive)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    assert unsettled(plan) == ["photographs", "dense-pictures"]


def test_commands_of_the_whole_plan_are_understood(tmp_path: Path, planning: ModuleType) -> None:
    """Those of the real sizes, which are run on a GPU alone."""
    (staged(tmp_path / "state") / "kept").mkdir()
    settings = planning.Settings.read(["tuned=far 16, centre, interleave, 3 dense steps"])
    plan = planning.Plan(tmp_path / "state", settings, 0.0)
    first, second = plan.groups()
    parts = [*first, *second]
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    wanted = {as_file_name(name) for section in SECTIONS.values() for name in section}
    assert wanted <= {name.removeprefix("pictures-").removesuffix("-1500") for name in names}
    commands = {}
    for part in parts:
        for chain in part.chains(3.0):
            for words in chain:
                cli._parser(words).parse_args(words)
        commands[part.name] = part.chains(3.0)[0][0]
    lora = commands["tune-rank-4"]
    assert {"--interleave", "--compile", "--keep-steps"} <= set(lora)
    assert lora[lora.index("--shared") + 1] == "centre"
    assert "--full" in commands["tune-rank-full-equal"]
    assert "--num 512,1500,5000" in " ".join(commands["pictures-dense-5000"])
    assert "--no-dense-row" not in commands["pictures-dense-5000"]
    assert names.index("tune-rank-64-equal") > names.index("pictures-band-of-600-1500")
    (listed,) = json.loads(
        (tmp_path / "state" / "patterns" / "tuned-natively-sparse-200-steps.json").read_text()
    )
    assert listed["weights"].endswith("tuned/rank-native-equal/model.safetensors")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tuned=far 17", "`tuned` must be any of far 16, centre, interleave, 3 dense steps;"),
        ("ranks=4,none", "`ranks` must be any of numbers; full; native; got 'none'."),
        ("sections=curve", "`sections` must be any of Fewer tiles;"),
    ],
)
def test_wrong_settings_are_named(word: str, message: str, planning: ModuleType) -> None:
    with pytest.raises(SystemExit) as ended:
        planning.Settings.read([word])
    assert str(ended.value).startswith(message)
    with pytest.raises(SystemExit, match="`STATE` must hold photographs; got nowhere: "):
        planning.main(["nowhere", "1"])


def test_nothing_is_begun_before_what_it_needs(tmp_path: Path, planning: ModuleType) -> None:
    state = staged(tmp_path)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    assert len(list(plan.groups())) == 1  # nothing was chosen yet
    chosen = pattern_named(CANDIDATES[0])
    tuned = plan.pictures(plan.tuned(chosen, "rank-4"), 5, after="rank-4")
    plan.statistics().parent.mkdir()
    plan.statistics().touch()
    assert not plan.pictures(chosen, 5).can_begin(100)
    (state / "kept" / "dense-x").mkdir()
    (state / "kept" / "dense-x" / "000000.safetensors").touch()
    assert plan.pictures(chosen, 5).can_begin(100)
    assert not plan.pictures(chosen, 5).can_begin(30)
    assert not tuned.can_begin(100)
    write_json(state / "tuned" / "rank-4" / "last.json", {"step": 1})
    (state / "tuned" / "rank-4" / "pytorch_lora_weights.safetensors").touch()
    assert not tuned.can_begin(100)  # it was written on the way
    write_json(state / "tuned" / "rank-4" / "last.json", {"step": 2})
    assert tuned.can_begin(100)


def test_compiling_is_given_up_where_it_breaks(tmp_path: Path, planning: ModuleType) -> None:
    plan = planning.Plan(staged(tmp_path), planning.Settings(), 0.0)
    part = plan.dense_pictures()
    assert ["--compile" in chain[0] for chain in part.chains(1.0)] == [True, False]
    for name in ("a", "b"):
        assert plan.compiling()
        plan.records[name] = planning.planned.Record(broke=1, status="done")
    assert not plan.compiling()


def test_training_runs_one_at_a_time(
    tmp_path: Path, planning: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more parts side by side than there are lanes."""
    plan = planning.Plan(staged(tmp_path), planning.Settings(), planning.planned.time.monotonic() + 500)
    chosen = pattern_named(CANDIDATES[0])
    trainings = [plan.lora(chosen), plan.native(chosen)]
    others = [
        part._replace(may_begin=lambda: True) for part in (plan.pictures(None, 5), plan.pictures(chosen, 5))
    ]
    names = [part.name for part in plan._startable([*trainings, *others], {})]
    assert names == ["tune-rank-4", "pictures-dense-5"]
    running = {1: planning.planned._Running(trainings[0], 0.0)}
    assert plan._startable([*trainings, *others], running) == others[:1]


def test_a_child_that_cannot_use_the_gpu_starts_anew(
    tmp_path: Path, planning: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning.planned.torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(planning.planned.cli, "main", lambda _: 7)  # which it would not call
    printed = tmp_path / "printed.txt"
    child = planning.planned.forked([["bench", "--help"], ["demo", "--help"]], printed, 1)
    _, status = os.waitpid(child, 0)
    text = printed.read_text()
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert "usage: nearfield bench" in text
    assert "usage: nearfield demo" in text


# -- what it came to -------------------------------------------------------------------------------------------------


def test_results_become_tables_and_pictures(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n")
    out = tmp_path / "quality-mine.json"
    plot, sheet = page.parent / "front.png", page.parent / "sheet.jpg"
    words = ["--out", out, "--plot", plot, "--sheet", sheet, "--page", page]
    for _ in range(2):  # what stands between the marks is replaced
        assert cli.main(["bench", "quality", "--results", str(archive), *map(str, words)]) == 0
    printed = capsys.readouterr().out
    assert "Ways of tuning" in printed
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| 6 pictures | pairs kept | FID |") == 1
    assert "| far 16, 4 tiles | " in text
    assert "](front.png)" in text
    assert "[quality-mine.json](../quality-mine.json)" in text
    rows = read_rows(out)
    assert len(rows) == 2 + 2 + 3 + 2 + 2 + 1 + 1 + 1
    document = json.loads(out.read_text())
    assert document["tunings"]["rank-4"]["step"] == 2
    assert "/" not in json.dumps([row.settings for row in rows])  # no paths of that machine
    with Image.open(plot) as front, Image.open(sheet) as pictures:
        assert front.width > 900
        assert pictures.format == "JPEG"
        assert pictures.height > 4 * 32
    shown = results.read("quality-mine", tmp_path)
    assert shown.kind == "quality"
    assert shown.draw is not None


def made_up(
    folder: Path, fids: dict[str, float], count: int = 1500, **figures: Any
) -> quality_results.Collected:
    """Rows as a campaign writes them, with these FIDs."""
    settings = {"size": 512, "steps": 16, "screen": 512, "num": 1500, "most": 5000, "pairs": 512}
    write_json(folder / "plan.json", {"settings": settings, "parts": {}})
    rows = []
    for name, fid in fids.items():
        known = {"method": "hilbert", "steps": 16, "tuning": "LoRA" if name == "tuned" else "none"}
        known |= {} if name == "dense" else {"fields": {"dense_steps": 3}}
        is_dense = name == "dense"
        row = QualityRow(
            name, 1.0 if is_dense else 0.35, count, fid=fid, settings={} if is_dense else known, **figures
        )
        rows.append(row)
    write_json(folder / "quality" / f"{count}.json", as_document(rows, {}))
    return quality_results.read_folder(folder)


def test_what_was_to_be_reached_is_told(tmp_path: Path) -> None:
    fids = {"dense": 20.0, "a": 26.0, "b": 24.0, "tuned": 20.5}
    both = made_up(tmp_path, fids, seam=1.05, dense_seam=1.0)
    untuned, tuned = quality_results.goals(both)[:2]
    assert untuned.startswith(
        "Untuned, at most 25% of the pairs in sparse steps, at most 20% of the steps dense: FID 24.0"
    )
    assert "20% above dense (b; 35.0% of the pairs over all; 1,500 pictures)" in untuned
    assert untuned.endswith("**reached**.")
    assert tuned.startswith("Tuned, 16 tiles: FID 20.5, 2% above dense")
    assert tuned.endswith("Seam energy 5.0% above dense. To reach: within 2%, **not reached**.")
    # Of many pictures, which count more, it is not.
    many = made_up(tmp_path, {"dense": 10.0, "b": 13.0, "a": 13.5}, 5000)
    assert (
        "(b; 35.0% of the pairs over all; 5,000 pictures). To reach: 25% above dense, **not reached**."
        in (quality_results.goals(many)[0])
    )


def test_what_helps_is_told(tmp_path: Path) -> None:
    found = made_up(
        tmp_path, {"dense": 20.0, "far 16": 40.0, "far 16, cycle 1": 50.0, "far 16, raster": 39.0}
    )
    sentences = quality_results.goals(found)
    assert "Sliding: FID 50.0 without, 40.0 with it: it improves FID." in sentences
    assert (
        "The Hilbert curve, over raster order: FID 39.0 without, 40.0 with it: it improves neither."
        in sentences
    )


def test_bad_results_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").mkdir()
    for words, message in {
        f"--results {tmp_path}/none": "`--results` must name a file or a folder that is there; got ",
        f"--results {tmp_path}/state": f"`--results` cannot be used: {tmp_path}/state holds no plan.json",
        "--page x.md": "`--page` must come with `--results`; got 'x.md'.",
        "--patterns far": "`--photographs` must name a folder, unless `--results` names results; got None.",
    }.items():
        assert cli.main(["bench", "quality", *words.split()]) == 2
        assert f"nearfield: error: {message}" in capsys.readouterr().err
