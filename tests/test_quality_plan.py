"""The plan of the quality campaign, carried out with a tiny model by the script itself; what is collected, shown."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from tests.cats import CATS, CONFIG, lively_model

from nearfield import cli, recipes
from nearfield._files import write_json
from nearfield.bench import collected, quality_results
from nearfield.bench import quality as sweeping
from nearfield.bench.picture_runs import Task, method_of
from nearfield.bench.quality_cases import (
    GROUPS,
    SECTIONS,
    as_file_name,
    pattern_named,
    tuned_name,
    without_dense_steps,
)
from nearfield.demo.model import save_model
from nearfield.demo.storage import write_tensors
from nearfield.quality.results import QualityRow, as_document, read_rows
from nearfield.studio import results

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "measure_quality.sh"
SIZES = "size=64 steps=4 batch=4 screen=4 num=4 most=6 pairs=4"
TUNING = "tuning_steps=2 cool_down=1 equal_steps=1 tuning_batch=2 ranks=4,full"
SETTINGS = (*SIZES.split(), *TUNING.split(), "compiled=no", "sections=Fewer tiles")
AS_DEEP = replace(CONFIG, joint_blocks=2, single_blocks=10, heads=1)
"""A narrow model with as many layers as the embedded one has, for patterns that speak of each."""
CANDIDATES = [pattern.name for pattern in GROUPS["search"]]
WITH_DENSE_STEPS = ["around, first 3 steps dense", "around, last 3 steps dense"]
"""Patterns that could be tuned in their place."""
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

# The same: other patterns that could be tuned; tables speak of those that can be.
SEARCHED = """
from nearfield.bench.quality_cases import GROUPS, pattern_named

GROUPS |= {{"real": GROUPS["search"], "search": [pattern_named(name) for name in {names}]}}
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
    save_model(state / "files" / "cats.safetensors", lively_model(AS_DEEP))
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
def with_dense_steps(tmp_path_factory: pytest.TempPathFactory) -> Carried:
    """The same where all that could be tuned has dense steps, and differs in these alone."""
    state = staged(tmp_path_factory.mktemp("dense-steps") / "state")
    with (state / "tools" / "sitecustomize.py").open("a") as file:
        file.write(SEARCHED.format(names=WITH_DENSE_STEPS))
    return Carried(state, script("plan", state, 9, *SETTINGS))


@pytest.fixture(scope="module")
def archive(carried: Carried, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("collected")
    script("collect", carried.state, out, "rank-full-equal")
    (part,) = out.glob("rank-full-equal-of-*-model.part-aa")
    assert part.stat().st_size > 1000
    return out / "quality-results.tar.gz"


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_quality

    return plan_quality


@pytest.fixture
def searching(
    planning: ModuleType, restoring: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[str]], None]:
    """Makes other patterns those that could be tuned."""

    def search(names: Sequence[str]) -> None:
        monkeypatch.setitem(GROUPS, "real", GROUPS["search"])
        monkeypatch.setitem(GROUPS, "search", [pattern_named(name) for name in names])
        for module in (planning, restoring):
            monkeypatch.setattr(module, "CANDIDATES", list(names))

    return search


def test_everything_is_done_in_order(carried: Carried) -> None:
    state, printed = carried
    assert printed.strip().endswith("all is done"), printed
    parts = json.loads((state / "plan.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"done"}, printed
    order = begun(printed)
    assert order[:2] == ["photographs", "dense-pictures"]
    assert set(order[2:4]) == {f"pictures-{as_file_name(name)}-4" for name in CANDIDATES}
    chosen = chosen_in(state)
    of = as_file_name(without_dense_steps(pattern_named(chosen)).name)
    assert order[4] == "pictures-dense-6"  # beside the last candidate
    beside = order[5 : order.index(f"tune-rank-4-of-{of}")]
    assert set(beside) <= {
        "pictures-far-16-4",
        "pictures-far-16-4-tiles-4",
        "pictures-around-4-tiles-4",
    }  # what does not hang on the choice
    tuned = order.index(f"pictures-{as_file_name(chosen)}-tuned-lora-of-rank-4-2-steps-6")
    assert tuned > order.index(f"tune-rank-4-of-{of}")
    full = order.index(f"pictures-{as_file_name(chosen)}-tuned-all-weights-1-steps-4")
    assert full > order.index(f"tune-rank-full-equal-of-{of}")
    assert len(set(order)) == len(order)
    fids = {name: read_rows(state / "quality" / f"{as_file_name(name)}.json")[0].fid for name in CANDIDATES}
    assert fids[chosen] == min(value for value in fids.values() if value is not None)


def chosen_in(state: Path) -> str:
    return str(json.loads((state / "chosen.json").read_text())["name"])


def rows_of(state: Path, name: str) -> list[QualityRow]:
    return read_rows(state / "quality" / f"{as_file_name(name)}.json")


def test_rows_are_of_the_same_dense_pictures(carried: Carried) -> None:
    state = carried.state
    chosen = chosen_in(state)
    assert [(row.pattern, row.samples) for row in rows_of(state, "dense")] == [("dense", 4), ("dense", 6)]
    rows = rows_of(state, chosen)
    assert [row.samples for row in rows] == [4, 6]
    tuned = rows_of(state, f"{chosen}, tuned: LoRA of rank 4, 2 steps")
    assert [(row.samples, row.settings["tuning"]) for row in tuned] == [(4, "LoRA"), (6, "LoRA")]
    assert tuned[-1].lpips != rows[-1].lpips
    assert tuned[-1].pairs_kept == rows[-1].pairs_kept
    (full,) = rows_of(state, f"{chosen}, tuned: all weights, 1 steps")
    assert full.settings["tuning"] == "own weights"
    # Every step is sparse: the same without dense ones has no rows of its own.
    assert without_dense_steps(pattern_named(chosen)).name == chosen
    assert len(list((state / "kept").glob("dense-*"))) == 1


def test_dense_steps_have_no_part_in_tuning(
    with_dense_steps: Carried, planning: ModuleType, searching: Callable[[Sequence[str]], None]
) -> None:
    """One LoRA for the chosen pattern and for the same without dense steps, which has a row of its own."""
    state, printed = with_dense_steps
    assert printed.strip().endswith("all is done"), printed
    order, chosen = begun(printed), chosen_in(state)
    assert set(order[2:4]) == {f"pictures-{as_file_name(name)}-4" for name in WITH_DENSE_STEPS}
    assert chosen in WITH_DENSE_STEPS
    tunings = [name for name in order if name.startswith("tune-")]
    assert tunings == ["tune-rank-4-of-around", "tune-rank-full-equal-of-around"]
    for tuned in (
        f"{as_file_name(chosen)}-tuned-lora-of-rank-4-2-steps-6",
        "around-tuned-lora-of-rank-4-2-steps-4",
    ):
        assert order.index(f"pictures-{tuned}") > order.index(tunings[0])
    rows = rows_of(state, chosen)
    after = rows_of(state, f"{chosen}, tuned: LoRA of rank 4, 2 steps")
    assert [row.samples for row in rows] == [row.samples for row in after] == [4, 6]
    assert after[-1].pairs_kept == rows[-1].pairs_kept
    (all_sparse,) = rows_of(state, "around, tuned: LoRA of rank 4, 2 steps")
    assert all_sparse.pairs_kept < rows[-1].pairs_kept
    searching(WITH_DENSE_STEPS)
    assert not unsettled(planning.Plan(state, planning.Settings.read(SETTINGS), 0.0))


def test_what_is_done_is_not_done_again(carried: Carried, tmp_path: Path, planning: ModuleType) -> None:
    state = tmp_path / "state"
    shutil.copytree(carried.state, state)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    assert not unsettled(plan)
    chosen = pattern_named(chosen_in(state))
    lora, tuned = plan.best(chosen), as_file_name(plan.tuned(chosen, plan.best(chosen)).name)
    (state / "quality" / "far-16-4-tiles.json").unlink()
    plan.result(lora).unlink()
    (state / "quality" / f"{tuned}.json").unlink()
    again = [f"tune-{lora.name}", f"pictures-{tuned}-6", "pictures-far-16-4-tiles-4"]
    assert unsettled(plan) == again
    # Rows of another size are none of this plan's.
    path = state / "quality" / "dense.json"
    path.write_text(path.read_text().replace('"size": 64', '"size": 32'))
    assert unsettled(plan) == [again[0], "pictures-dense-6", *again[1:]]


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
    } <= names
    tuned = {Path(name).name for name in names if name.startswith("tuned/rank-4-of-")}
    assert {"log.jsonl", "pytorch_lora_weights-steps.safetensors"} <= tuned
    assert "checkpoint.safetensors" in tuned  # so that it may go on
    assert not [name for name in names if name.startswith("kept") or name.endswith("model.safetensors")]
    assert archive.stat().st_size < 3_000_000
    state = staged(tmp_path / "state")
    script("restore", state, archive)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    assert unsettled(plan) == ["photographs", "dense-pictures"]


# -- from what was published -----------------------------------------------------------------------------------------


@pytest.fixture
def restoring(planning: ModuleType) -> ModuleType:
    import restore_quality

    return restore_quality


@pytest.fixture
def published(carried: Carried, tmp_path: Path) -> Path:
    """As an older version would have: of another commit, and without a field that there was not yet.

    "interleave" is left at its default by all patterns of the plan.
    """
    return published_from(carried.state, tmp_path / "published.json")


def published_from(state: Path, path: Path) -> Path:
    document = quality_results.as_json(quality_results.read_folder(state))
    for row in document["results"]:
        row |= {"commit": "0ld", "date": "2026-01-01"}
        row["settings"].get("fields", {}).pop("interleave", None)
    write_json(path, document)
    return path


@pytest.fixture
def state(carried: Carried, tmp_path: Path) -> Path:
    return of_the_same_model(carried.state, tmp_path / "state")


def of_the_same_model(state: Path, path: Path) -> Path:
    """A new machine's, with the same model: written anew, its file would have other bytes."""
    files = Path("files", "cats.safetensors")
    new = staged(path)
    shutil.copy(state / files, new / files)
    return new


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    document = json.loads(path.read_text())
    change(document)
    write_json(path, document)
    return path


def without_row(path: Path, name: str) -> Path:
    return rewritten(
        path, lambda document: document["results"].remove(*rows_named(document["results"], name))
    )


def rows_named(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["pattern"] == name]


def contents(state: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in [state / "plan.json", *(state / "quality").iterdir()]}


def test_published_rows_are_not_measured_again(
    carried: Carried, published: Path, state: Path, planning: ModuleType
) -> None:
    chosen = chosen_in(carried.state)
    without_row(published, "far 16, 4 tiles")
    script("restore", state, published)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    plan.check_fixed()
    missing = ["photographs", "dense-pictures", "pictures-far-16-4-tiles-4"]
    assert sorted(unsettled(plan)) == sorted(missing)
    assert chosen_in(state) == chosen  # it follows from the rows
    assert not (state / "tuned").exists()
    # They are published again as they were.
    again = quality_results.as_json(quality_results.read_folder(state))
    document = json.loads(published.read_text())
    assert document["tunings"]
    for name in ("results", "settings", "parts", "machine", "chosen", "tunings"):
        assert again[name] == document[name]
    before = contents(state)
    assert "0 rows restored; 11 were there, 0 are of other settings." in script("restore", state, published)
    assert contents(state) == before


def test_published_rows_are_known_where_they_are_measured(
    carried: Carried, published: Path, state: Path, restoring: ModuleType
) -> None:
    """`bench quality` makes no picture of them."""
    restoring.main([str(state), str(published)])
    chosen = chosen_in(carried.state)
    for name, counts in ((chosen, (4, 6)), ("far 16, 4 tiles", (4,)), ("dense", (4, 6))):
        out = state / "quality" / f"{as_file_name(name)}.json"
        task = Task(state / "files" / "cats.safetensors", 6, 4, 64)
        extent = sweeping.Extent(counts, has_dense_row=name == "dense")
        sweep = sweeping.Sweep(task, pytest.fail, torch.nn.Identity(), out, extent=extent)
        before = out.read_text()
        assert sweep.run([] if name == "dense" else [pattern_named(name)])
        assert out.read_text() == before


def test_a_published_lora_is_not_taken_for_one_that_is_there(
    carried: Carried, published: Path, state: Path, planning: ModuleType, restoring: ModuleType
) -> None:
    """What it had learned after as many steps as others was not measured, and is not in such a file: so many steps are
    made again, and no more."""
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    chosen = pattern_named(chosen_in(carried.state))
    lora = plan.best(chosen)
    on_its_way = plan.tuned(chosen, lora._replace(is_equal=True)).name
    restoring.main([str(state), str(without_row(published, on_its_way))])
    assert rows_of(state, plan.tuned(chosen, lora).name)
    equal = lora._replace(is_equal=True)
    missing = [f"tune-{equal.name}", f"pictures-{as_file_name(on_its_way)}-4"]
    assert unsettled(plan) == ["photographs", "dense-pictures", *missing]
    assert not plan.is_tuned(lora)
    (tuning,) = (part for part in plan.parts() if part.name == missing[0])
    ((command,), _) = tuning.chains(1.0)
    assert command[command.index("--steps") + 1] == "1"
    assert command[command.index("--rank") + 1] == "4"
    plan.folder(equal).mkdir(parents=True)
    assert plan.result(equal) == plan.folder(equal) / "pytorch_lora_weights.safetensors"


def test_a_published_lora_is_made_again_for_sparse_steps(
    with_dense_steps: Carried,
    tmp_path: Path,
    planning: ModuleType,
    restoring: ModuleType,
    searching: Callable[[Sequence[str]], None],
) -> None:
    """Where the chosen pattern has dense ones, and the same without them was not measured."""
    searching(WITH_DENSE_STEPS)
    state = of_the_same_model(with_dense_steps.state, tmp_path / "state")
    published = published_from(with_dense_steps.state, tmp_path / "published.json")
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    chosen = pattern_named(chosen_in(with_dense_steps.state))
    lora = plan.best(chosen)
    sparse = plan.tuned(without_dense_steps(chosen), lora).name
    restoring.main([str(state), str(without_row(published, sparse))])
    assert rows_of(state, plan.tuned(chosen, lora).name)
    missing = [f"tune-{lora.name}", f"pictures-{as_file_name(sparse)}-4"]
    assert unsettled(plan) == ["photographs", "dense-pictures", *missing]
    assert not plan.is_tuned(lora)


def test_rows_of_a_state_stay_beside_published_ones(
    published: Path, state: Path, restoring: ModuleType
) -> None:
    own = QualityRow("dense", 1.0, 4, fid=1.0, commit="new", settings={"size": 64, "steps": 4})
    write_json(state / "quality" / "dense.json", as_document([own], {"commit": "new", "date": "2026-02-01"}))
    restoring.main([str(state), str(published)])
    rows = rows_of(state, "dense")
    assert [(row.samples, row.commit) for row in rows] == [(4, "new"), (6, "0ld")]
    assert rows[0].fid == 1.0


def test_published_rows_of_other_settings_are_left(
    published: Path, state: Path, planning: ModuleType, restoring: ModuleType
) -> None:
    """Of another size, of other fields under the same name; a name that is no pattern's any more is kept."""

    def change(document: dict[str, Any]) -> None:
        rows = document["results"]
        rows_named(rows, "dense")[0]["settings"]["size"] = 32  # that of six pictures
        rows_named(rows, "far 16")[0]["settings"]["fields"]["far"] = 8
        (older,) = rows_named(rows, "far 16, 4 tiles")
        older["pattern"] = older["settings"]["name"] = "far 16, as it once was"

    restoring.main([str(state), str(rewritten(published, change))])
    assert [row.samples for row in rows_of(state, "dense")] == [4]
    assert not (state / "quality" / "far-16.json").exists()
    assert rows_of(state, "far 16, as it once was")
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    assert {"pictures-dense-6", "pictures-far-16-4", "pictures-far-16-4-tiles-4"} <= set(unsettled(plan))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document["settings"].update(size=32), "`size` must be 64, as in .*; got 32. "),
        (lambda document: document["settings"].update(weights="other"), "`FILE` must be of the model "),
        (
            lambda document: document["settings"].pop("weights"),
            "`FILE` must be of the model ",
        ),  # the embedded one
        (lambda document: document.pop("settings"), r"`FILE` must be results that .*: 'settings'\)\.$"),
        (lambda document: document.update(parts=[]), "`FILE` must be results that "),
        (lambda document: document.update(format=0), "`FILE` must be results that "),
    ],
    ids=["size", "weights", "older", "no settings", "parts", "format"],
)
def test_a_file_that_does_not_fit_is_one_line(
    change: Callable[[dict[str, Any]], Any],
    message: str,
    published: Path,
    state: Path,
    planning: ModuleType,
    restoring: ModuleType,
) -> None:
    planning.Plan(state, planning.Settings.read(SETTINGS), 0.0).write()
    with pytest.raises(SystemExit, match=message) as ended:
        restoring.main([str(state), str(rewritten(published, change))])
    assert "\n" not in str(ended.value)
    assert not (state / "quality").exists()


def option(words: Sequence[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_table_can_be_asked_for_alone(section: str, planning: ModuleType) -> None:
    assert planning.Settings.read([f"sections={section}"]).sections == (section,)


@pytest.mark.parametrize("tuned", [CANDIDATES[0], WITH_DENSE_STEPS[0]])
def test_commands_of_the_whole_plan_are_understood(
    tuned: str, tmp_path: Path, planning: ModuleType, searching: Callable[[Sequence[str]], None]
) -> None:
    """Those of the real sizes, which are run on a GPU alone."""
    (staged(tmp_path / "state") / "kept").mkdir()
    searching(CANDIDATES if tuned in CANDIDATES else WITH_DENSE_STEPS)
    settings = planning.Settings.read([f"tuned={tuned}"])
    plan = planning.Plan(tmp_path / "state", settings, 0.0)
    (parts,) = plan.groups()
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    commands = {}
    for part in parts:
        for chain in part.chains(3.0):
            for words in chain:
                cli._parser(words).parse_args(words)
        commands[part.name] = part.chains(3.0)[0][0]
    counted = {
        (Path(option(words, "--out")).stem, int(count))
        for words in commands.values()
        if "--num" in words
        for count in option(words, "--num").split(",")
    }
    assert {(as_file_name(name), 1500) for section in SECTIONS.values() for name in section} <= counted
    after = "tuned-lora-of-rank-4-400-steps"
    assert {(f"{as_file_name(tuned)}-{after}", count) for count in (1500, 5000)} <= counted
    assert (f"around-{after}", 1500) in counted  # with every step sparse
    of = "of-around"
    lora, native = commands[f"tune-rank-4-{of}"], commands[f"tune-rank-native-equal-{of}"]
    assert {"--compile", "--keep-steps"} <= set(lora)
    assert option(lora, "--near") == option(native, "--near") == "around"
    assert option(native, "--dense-steps") == "0"
    assert "--full" in commands[f"tune-rank-full-equal-{of}"]
    assert "--num 512,1500,5000" in " ".join(commands["pictures-dense-5000"])
    assert "--no-dense-row" not in commands["pictures-dense-5000"]
    assert names.index(f"tune-rank-64-equal-{of}") > names.index("pictures-band-of-832-1500")
    (other,) = {as_file_name(name) for name in planning.CANDIDATES} - {as_file_name(tuned)}
    assert names.index(f"pictures-{other}-1500") < names.index("pictures-far-16-1500")
    (listed,) = json.loads(
        next((tmp_path / "state" / "patterns").glob("*-tuned-natively-sparse-200-steps.json")).read_text()
    )
    assert listed["weights"].endswith(f"tuned/rank-native-equal-{of}/model.safetensors")
    assert listed["name"] == f"{settings.tuned}, tuned: natively sparse, 200 steps"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tuned=far 17", "`tuned` must be any of around; around, 16 tiles, far 8; got 'far 17'."),
        ("ranks=4,none", "`ranks` must be any of numbers; full; native; got 'none'."),
        ("sections=curve", "`sections` must be any of Around in the place of tiles; Fewer tiles;"),
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
    chosen = pattern_named(CANDIDATES[0])
    lora = plan.best(chosen)
    names = [part.name for part in plan.parts()]
    assert names[4:] == [
        "pictures-dense-6",
        "pictures-far-16-4",
        "pictures-far-16-4-tiles-4",
        "pictures-around-4-tiles-4",
    ]  # nothing was chosen yet
    tuned = plan.pictures(plan.tuned(chosen, lora), 5, after=lora)
    plan.statistics().parent.mkdir()
    plan.statistics().touch()
    assert not plan.pictures(chosen, 5).can_begin(100)
    (state / "kept" / "dense-x").mkdir()
    (state / "kept" / "dense-x" / "000000.safetensors").touch()
    assert plan.pictures(chosen, 5).can_begin(100)
    assert not plan.pictures(chosen, 5).can_begin(30)
    assert not tuned.can_begin(100)
    write_json(plan.folder(lora) / "last.json", {"step": 1})
    plan.result(lora).touch()
    assert not tuned.can_begin(100)  # it was written on the way
    write_json(plan.folder(lora) / "last.json", {"step": 2})
    assert tuned.can_begin(100)


def screened(state: Path, fids: dict[str, float]) -> None:
    """Candidates that were looked at."""
    for name, fid in fids.items():
        row = QualityRow(name, 0.4, 4, fid=fid, settings={"size": 64, "steps": 4})
        write_json(state / "quality" / f"{as_file_name(name)}.json", as_document([row], {}))


def test_a_choice_among_other_patterns_is_made_anew(tmp_path: Path, planning: ModuleType) -> None:
    state = staged(tmp_path)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    screened(state, {CANDIDATES[0]: 40.0})
    for name in (CANDIDATES[0], "far 16, as it once was"):
        write_json(state / "chosen.json", {"name": name, "fields": {}})
        assert plan.chosen() is None  # the others were not looked at yet
    named = planning.Plan(state, planning.Settings.read([*SETTINGS, f"tuned={CANDIDATES[1]}"]), 0.0)
    assert named.chosen().name == CANDIDATES[1]
    screened(state, dict.fromkeys(CANDIDATES, 40.0) | {CANDIDATES[1]: 39.0})
    assert plan.chosen().name == chosen_in(state) == CANDIDATES[1]
    other = planning.Plan(state, planning.Settings.read([*SETTINGS, f"tuned={CANDIDATES[0]}"]), 0.0)
    assert other.chosen().name == CANDIDATES[0]
    assert chosen_in(state) == CANDIDATES[1]  # what a call names is no choice
    screened(state, {CANDIDATES[0]: 1.0})
    assert plan.chosen().name == CANDIDATES[1]  # it stays


def test_no_lane_is_idle_while_the_last_pattern_is_looked_at(tmp_path: Path, planning: ModuleType) -> None:
    state = staged(tmp_path)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), planning.planned.time.monotonic() + 500)
    for path in (plan.statistics(), state / "kept" / "dense-x" / "000000.safetensors"):
        path.parent.mkdir(parents=True)
        path.touch()
    screened(state, dict.fromkeys(CANDIDATES[:-1], 40.0))
    (parts,) = plan.groups()
    dense = plan.pictures(None, 4, 6)

    def begun_beside(part: Any) -> list[str]:
        running = {1: planning.planned._Running(part, 0.0)}
        return [each.name for each in plan._startable(parts, running)]

    assert begun_beside(plan.pictures(pattern_named(CANDIDATES[-1]), 4)) == [dense.name, "pictures-far-16-4"]
    screened(state, {CANDIDATES[-1]: 39.0})
    chosen = "around-16-tiles-far-8"
    assert begun_beside(dense) == [f"tune-rank-4-of-{chosen}", f"pictures-{chosen}-6"]


def test_tunings_are_those_of_their_pattern(tmp_path: Path, planning: ModuleType) -> None:
    """A LoRA of before folders named patterns goes on where dense steps alone differ; another pattern has its own."""
    state = staged(tmp_path)
    plan = planning.Plan(state, planning.Settings.read(SETTINGS), 0.0)
    first, last = map(pattern_named, WITH_DENSE_STEPS)
    sparse, own = map(pattern_named, CANDIDATES)
    far_8 = pattern_named("far 8, weighted, first and last 2 steps dense")
    recipe = recipes.Recipe(method_of(first)).as_document()
    older = state / "tuned" / "rank-4"
    write_tensors(older / "pytorch_lora_weights.safetensors", {"a": torch.zeros(1)}, {"recipe": recipe})
    write_json(older / "last.json", {"step": 2})
    for other in (far_8, own):
        assert not plan.is_tuned(plan.best(other))
        assert older.exists()
    assert plan.is_tuned(plan.best(last))
    assert not older.exists()
    assert plan.best(last) == plan.best(first) == plan.best(sparse)
    assert len({plan.best(pattern).name for pattern in (first, own, far_8)}) == 3
    tuned = {plan.tuned(pattern, plan.best(pattern)).name for pattern in (first, last, sparse, own, far_8)}
    assert len(tuned) == 5
    older.mkdir()
    (older / "pytorch_lora_weights.safetensors").write_bytes(b"not whole")
    assert not plan.is_tuned(plan.best(far_8))


def test_settings_of_a_state_stay(tmp_path: Path, planning: ModuleType) -> None:
    state = staged(tmp_path)
    planning.Plan(state, planning.Settings.read(SETTINGS), 0.0).write()
    planning.Plan(state, planning.Settings.read([*SETTINGS, "num=5", "lanes=1"]), 0.0).check_fixed()
    message = f"`size` must be 64, as in {state}/plan.json: other figures do not compare; got 32."
    with pytest.raises(SystemExit) as ended:
        planning.main([str(state), "1", *SETTINGS, "size=32"])
    assert str(ended.value) == f"{message} Give it a STATE of its own."
    save_model(state / "files" / "cats.safetensors", lively_model(), packing="bf16")
    planning.digest_of.cache_clear()
    with pytest.raises(SystemExit, match="`weights` must be "):
        planning.main([str(state), "1", *SETTINGS])


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
    trainings = [plan.lora(chosen), plan.native(chosen, planning.Tuning(chosen, planning.NATIVE))]
    patterns = None, chosen, pattern_named(CANDIDATES[1])
    others = [plan.pictures(pattern, 5)._replace(may_begin=lambda: True) for pattern in patterns]
    names = [part.name for part in plan._startable([*trainings, *others], {})]
    assert names == ["tune-rank-4-of-around", "pictures-dense-5", "pictures-around-5"]
    running = {1: planning.planned._Running(trainings[0], 0.0)}
    assert plan._startable([*trainings, *others], running) == others[:2]
    # Nor do two parts write rows of one pattern at a time.
    more = plan.pictures(chosen, 6)._replace(may_begin=lambda: True)
    assert plan._startable([others[1], more], {}) == others[1:2]


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
    assert len(rows) == 2 + 2 + 1 + 2 + 3 + 1 + 1
    document = json.loads(out.read_text())
    steps = {name.partition("-of-")[0]: last["step"] for name, last in document["tunings"].items()}
    assert steps == {"rank-4": 2, "rank-full-equal": 1}
    assert len({row.commit for row in rows}) == 1
    assert all(row.date for row in rows)
    assert "/" not in json.dumps([row.settings for row in rows])  # no paths of that machine
    with Image.open(plot) as front, Image.open(sheet) as pictures:
        assert front.width > 900
        assert pictures.format == "JPEG"
        assert pictures.height > 4 * 32
    shown = results.read("quality-mine", tmp_path)
    assert shown.kind == "quality"
    assert shown.draw is not None


def test_a_sheet_whose_pictures_were_lost_stays(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "results", tmp_path / "page.md"
    shutil.unpack_archive(archive, folder)
    for strip in (folder / "strips").glob("far-16-4-tiles.*"):
        strip.unlink()
    page.write_text(f"{BEGIN}\n\n{END}\n")
    sheet = tmp_path / "sheet.jpg"
    words = ["--out", tmp_path / "quality-mine.json", "--sheet", sheet, "--page", page]
    command = ["bench", "quality", "--results", str(folder), *map(str, words)]
    assert cli.main(command) == 0  # of what there is
    with Image.open(sheet) as first:
        assert first.height > 32
    assert "stays" not in capsys.readouterr().err
    sheet.write_bytes(b"with more rows")
    assert cli.main(command) == 0
    assert sheet.read_bytes() == b"with more rows"
    assert "stays as it is: no pictures were collected of far 16, 4 tiles" in capsys.readouterr().err
    assert "](sheet.jpg)" in page.read_text()


def made_up(
    folder: Path,
    fids: dict[str, float],
    count: int = 1500,
    own: dict[str, dict[str, Any]] | None = None,
    **figures: Any,
) -> quality_results.Collected:
    """Rows as a campaign writes them, with these FIDs; other figures of all rows, and of some their own."""
    settings = {"size": 512, "steps": 16, "screen": 512, "num": 1500, "most": 5000, "pairs": 512}
    settings |= {"tuning_steps": 600, "equal_steps": 200, "tuning_batch": 32}
    write_json(folder / "plan.json", {"settings": settings, "parts": {}})
    rows = []
    for name, fid in fids.items():
        known = {"method": "hilbert", "steps": 16, "tuning": "LoRA" if "tuned" in name else "none"}
        known |= {} if name == "dense" else {"fields": {"dense_steps": 3}}
        is_dense = name == "dense"
        values = figures | (own or {}).get(name, {})
        values = {"settings": {} if is_dense else known} | values
        rows.append(QualityRow(name, 1.0 if is_dense else 0.35, count, fid=fid, **values))
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
    assert tuned.startswith("Tuned: FID 20.5, 2% above dense")
    assert tuned.endswith("Seam energy 5.0% above dense. To reach: within 2%, **not reached**.")
    # Of many pictures it is not; those of few, in which "b" is nearer to dense, do not compare with them.
    many = made_up(tmp_path, {"dense": 10.0, "a": 13.5, "tuned": 10.2}, 5000)
    untuned, tuned = quality_results.goals(many)[:2]
    assert (
        "(a; 35.0% of the pairs over all; 5,000 pictures). To reach: 25% above dense, **not reached**."
        in untuned
    )
    assert "FID 10.2, 2% above dense (tuned; " in tuned
    # Without a row of the dense model they compare with nothing.
    alone = made_up(tmp_path, {"a": 9.0}, 9000)
    assert quality_results.goals(alone)[0] == untuned


def test_fronts_of_what_was_tuned_and_what_was_not_are_told_apart(tmp_path: Path) -> None:
    """A tuned pattern that is better than all others takes none of them from theirs."""
    made_up(tmp_path, {"dense": 20.0, "a": 24.0, "tuned": 19.0})
    few = [QualityRow("few", 0.2, 1500, fid=30.0), QualityRow("beaten", 0.3, 1500, fid=31.0)]
    write_json(tmp_path / "quality" / "few.json", as_document(few, {}))
    sentences = quality_results.goals(quality_results.read_folder(tmp_path))
    assert sentences[-2:] == [
        "Untuned, nothing beats these in both pairs kept and FID: few; a; dense.",
        "Tuned, nothing beats these in both pairs kept and FID: tuned.",
    ]


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"kid": 0.030}, "it improves FID; no difference in seams beyond the error."),
        ({"kid": 0.039}, "no difference beyond the error."),
        ({"kid": 0.050}, "no difference beyond the error."),  # FID and KID are not of one mind
        ({"kid": 0.030, "kid_error": None}, "no difference beyond the error."),
        ({"kid": 0.030, "seam": 1.01}, "it improves FID; it improves seams."),
        ({"kid": 0.030, "seam": 0.90}, "it improves FID; it makes seams worse."),
        ({"kid": 0.040, "seam": 0.96}, "no difference beyond the error."),
        ({"kid": 0.030, "seam": None}, "it improves FID."),
        ({"kid": 0.060, "fid": 51.0}, "it makes FID worse; no difference in seams beyond the error."),
    ],
    ids=str,
)
def test_what_helps_is_told_beyond_the_error(figures: dict[str, Any], verdict: str, tmp_path: Path) -> None:
    fids = {"dense": 20.0, "far 16": figures.get("fid", 40.0), "far 16, cycle 1": 50.0}
    known = {"kid": 0.040, "kid_error": 0.001, "seam": 1.05, "seam_error": 0.01, "dense_seam": 1.0}
    own = {"far 16": {name: value for name, value in figures.items() if name != "fid"}}
    sentences = quality_results.goals(made_up(tmp_path, fids, own=own, **known))
    (sliding,) = [sentence for sentence in sentences if sentence.startswith("Sliding: FID 50.0 without")]
    assert sliding.endswith(f": {verdict}")


def test_tables_begin_with_what_is_tuned(tmp_path: Path) -> None:
    """As soon as it stands beside dense; of tunings that have no row yet nothing is told."""
    chosen, other = CANDIDATES[:2]
    write_json(tmp_path / "chosen.json", {"name": chosen})
    write_json(tmp_path / "tuned" / "rank-4-of-x" / "last.json", {"step": 487})
    write_json(tmp_path / "tuned" / "rank-64-equal-of-x" / "last.json", {"step": 200})
    before = made_up(tmp_path, {"dense": 20.0, chosen: 30.0})
    assert [(each.title, each.num) for each in quality_results.sections(before)] == [
        ("Before and after tuning", 1500)
    ]
    assert "Tuned with batch" not in quality_results.markdown(before)
    after = made_up(tmp_path, {"dense": 20.0, chosen: 30.0, other: 31.0, "tuned": 25.0})
    assert [each.title for each in quality_results.sections(after)] == [
        "Ways of tuning",
        "Patterns that could be tuned",
    ]
    more = made_up(tmp_path, {"dense": 20.0, chosen: 30.0, other: 31.0, "tuned": 25.0, "around, means": 29.0})
    last = quality_results.sections(more)[-1]
    assert last.title == "Around in the place of tiles"
    assert [row.pattern for row in last.rows] == ["dense", "around, means", chosen, other]
    words = "Tuned with batch 32: rank-4-of-x unfinished, 487 of 600 steps, rank-64-equal-of-x 200 steps."
    assert words in quality_results.markdown(after).replace("\n", " ")


def test_what_was_tuned_stands_behind_the_same_untuned(tmp_path: Path) -> None:
    """Where several patterns were tuned, the chosen one first."""
    chosen, other = CANDIDATES[:2]
    write_json(tmp_path / "chosen.json", {"name": chosen})
    names = [chosen, *(tuned_name(chosen, how) for how in ("LoRA of rank 16", "LoRA of rank 4"))]
    names += [other, tuned_name(other, "LoRA of rank 4")]
    found = made_up(tmp_path, {"dense": 20.0} | dict.fromkeys(reversed(names), 25.0), 5000)
    (section,) = [each for each in quality_results.sections(found) if each.num == 5000]
    assert [row.pattern for row in section.rows] == ["dense", *names]


def test_all_commits_are_named(tmp_path: Path) -> None:
    runs = {
        "far 16": {"commit": "bbb", "date": "2026-02"},
        "far 16, 4 tiles": {"commit": "aaa", "date": "2026-03"},
    }
    found = made_up(tmp_path, {"dense": 20.0, "far 16": 30.0, "far 16, 4 tiles": 29.0}, own=runs)
    assert "commits bbb, aaa." in quality_results.markdown(found)
    # Rows of before they were kept in rows are of the file's.
    path = tmp_path / "quality" / "1500.json"
    document = json.loads(path.read_text()) | {"machine": {"commit": "ccc", "date": "2026-01"}}
    path.write_text(json.dumps(document))
    assert "commits ccc, bbb, aaa." in quality_results.markdown(quality_results.read_folder(tmp_path))
    assert [row.commit for row in read_rows(path)] == ["ccc", "bbb", "aaa"]


def test_names_without_dense_steps() -> None:
    """What has none stays as it is."""
    for pattern in GROUPS["search"]:
        assert without_dense_steps(pattern) == pattern
    assert CANDIDATES == ["around", "around, 16 tiles, far 8"]
    for group, names in {
        "around": {"around"},
        "three-steps": {"far 16, centre, interleave", "far 8, weighted"},
        "far-tiles": {
            "far 8, tiles by layer, weighted",
            "far 16, tiles by layer, weighted",
            "far 8, 12 tiles, weighted",
        },
    }.items():
        dense = [pattern for pattern in GROUPS[group] if pattern.fields["dense_steps"]]
        assert {without_dense_steps(pattern).name for pattern in dense} == names
    for group in ("search", "around", "far-steps", "three-steps", "far-tiles"):
        for pattern in GROUPS[group]:
            assert without_dense_steps(pattern).fields["dense_steps"] == 0
            assert "step" not in without_dense_steps(pattern).name


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
