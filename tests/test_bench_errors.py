"""The benchmark `errors`: its figures against velocities computed by hand, what is measured once, its messages."""

import json
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import errors, pareto
from benchmarks.errors import ErrorRow, ErrorSweep, OtherBlocks, StepError
from benchmarks.picture_runs import Task, method_of
from benchmarks.quality_cases import GROUPS, Pattern, without_dense_steps
from tests import command_line as cli
from tests.cats import CATS, autoencoder
from torch import Tensor

from nearfield import Geometry, Hilbert, Merge, apply
from nearfield_lab.embedded.sampler import noise
from nearfield_lab.training.data import decoded, pictures

SIZE, STEPS, AT = 64, 4, (3, 1)
NOTHING_DENSE = {"dense_layers": 0, "dense_steps": 0}
WHOLE = Pattern("one tile", {"tiles": 1, "far": None, **NOTHING_DENSE})
TILES = Pattern("4 tiles", {"tiles": 4, "far": None, **NOTHING_DENSE})
FAR = Pattern("4 tiles, far 16", {"tiles": 4, **NOTHING_DENSE})
LATER = replace(TILES, name="4 tiles, last 3 steps dense", fields={**TILES.fields, "dense_steps": (0, 3)})
WRONG = Pattern("no such layer", {"dense_layers": [99]})


def sweep(out: Path | None = None, seen: list[str] | None = None, **options: object) -> ErrorSweep:
    """Of the tiny model and two photographs."""
    task = Task(pareto.TINY, num=2, steps=STEPS, size=SIZE, seed=5)
    chosen = errors.spread(pictures(CATS), 2)
    told = None if seen is None else lambda done, name, total: seen.append(f"{done}/{total} {name}")
    return ErrorSweep(task, chosen, "cats", AT, out=out, on_step=told, **options)


def measured(patterns: Sequence[Pattern], **options: object) -> list[ErrorRow]:
    found = sweep(**options)
    assert found.run(patterns)
    return found.rows


@torch.no_grad()
def by_hand(method: Hilbert, step: int) -> list[float]:
    """The errors for two of the six photographs, by nothing but the model's own forward and `apply`."""
    model, shift = pareto.tiny_pipeline().model, pareto.tiny_pipeline().model.config.shift
    even = 1 - step / STEPS
    level = torch.tensor([shift * even / (1 + (shift - 1) * even)])
    found = []
    for place, picture in ((0, pictures(CATS)[0]), (3, pictures(CATS)[3])):
        latents = model.normalised(autoencoder().encode(decoded(picture, SIZE)[None] / 255))
        number = place * STEPS + step
        added = noise(range(number, number + 1), (SIZE, SIZE), seed=5)
        noisy = (1 - level) * latents + level * added
        dense: Tensor = model(noisy, level)
        with apply(model.transformer, method):
            found.append(float((model(noisy, level) - dense).square().mean()))
    return found


# -- figures ---------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_velocities() -> None:
    whole, tiles, far = measured([WHOLE, TILES, FAR])
    assert (whole.pairs_kept, whole.steps[0].error) == (1, pytest.approx(0, abs=1e-10))
    for row, pattern in ((tiles, TILES), (far, FAR)):
        assert [each.step for each in row.steps] == [1, 3]
        for each in row.steps:
            assert each.photographs == pytest.approx(by_hand(method_of(pattern), each.step), rel=1e-3)
            assert each.level == pytest.approx(1 - each.step / STEPS)
    assert tiles.pairs_kept < far.pairs_kept < 1
    assert all(few.error > more.error > 1e-6 for few, more in zip(tiles.steps, far.steps, strict=True))


def test_the_mean_has_an_error_where_there_are_several() -> None:
    step = StepError(8, 0.5, (1.0, 2.0, 3.0))
    assert (step.error, step.standard_error) == (2, pytest.approx(3**-0.5))
    assert StepError(8, 0.5, (1.0,)).standard_error is None
    rows = [ErrorRow("a", 0.25, (step,), 1.25), ErrorRow("b", 1.0, (StepError(8, 0.5, (2.0,)),), 10)]
    lines = [line.split("  ") for line in errors.table(rows).splitlines()]
    assert [word.strip() for word in lines[0]] == ["pattern", "pairs kept", "error in step 8", "seconds"]
    assert [word.strip() for word in lines[2] if word.strip()] == ["a", "25.0%", "2 ± 0.6", "1.2"]
    assert [word.strip() for word in lines[3] if word.strip()] == ["b", "100.0%", "2", "10.0"]


def test_photographs_are_evenly_spaced() -> None:
    source = [pictures(CATS)[0]._replace(name=str(number)) for number in range(10)]
    assert list(errors.spread(source, 2)) == [0, 5]
    assert list(errors.spread(source, 4)) == [0, 2, 5, 7]
    assert errors.spread(source, 10) == dict(enumerate(source))


def test_one_tar_file_is_read_as_a_folder_of_them(tmp_path: Path) -> None:
    shard = tmp_path / "cats.tar"
    with tarfile.open(shard, "w") as archive:
        for picture in pictures(CATS):
            archive.add(picture.file, picture.name)
    assert pictures(shard) == pictures(tmp_path)
    assert [each.read() for each in pictures(shard)] == [each.read() for each in pictures(CATS)]


# -- patterns in a single step ---------------------------------------------------------------------------------------


def test_dense_steps_are_set_aside() -> None:
    assert errors.of_a_step(LATER) == TILES
    assert errors.of_a_step(GROUPS["steps"][0]).name == "every step sparse"
    merge = Pattern("merge", {"ratio": 0.5}, "Merge")
    assert errors.of_a_step(merge) == merge
    parts = {"merge": {"method": "Merge", "fields": {}}, "attention": {"method": "Hilbert", "fields": {}}}
    both = method_of(errors.of_a_step(Pattern("both", parts, "Composition")))
    assert both == Merge() | Hilbert(dense_steps=0)
    tuned = [replace(TILES, name=name, lora=f"{name}/lora.safetensors") for name in "ab"]
    assert sweep().distinct([LATER, *tuned, TILES, FAR]) == [TILES, *tuned, FAR]


def test_names_without_dense_steps() -> None:
    """What has none stays as it is."""
    for pattern in GROUPS["search"]:
        assert without_dense_steps(pattern) == pattern
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


def test_blocks_of_a_gpu() -> None:
    geometry = Geometry((32, 32), text=64)
    own = Hilbert(tiles=4, near="tile")
    gpu = errors.with_blocks(own, "gpu")
    assert isinstance(gpu, OtherBlocks)
    assert (own.layer(geometry).near.q_block, gpu.layer(geometry).near.q_block) == (16, 128)
    around = errors.with_blocks(Hilbert(tiles=4), "gpu")
    assert (
        around.layer(geometry).near == Hilbert(tiles=4).layer(geometry).near
    )  # no device likes small ones there
    both = errors.with_blocks(Merge() | own, "gpu")
    assert (both.merge, both.attention) == (Merge(), gpu)
    assert errors.with_blocks(Merge(), "gpu") == Merge()
    assert errors.with_blocks(own, "device") is own


def test_blocks_of_given_sizes() -> None:
    geometry = Geometry((32, 32), text=64)
    reader = errors.with_blocks(Hilbert(), "32x16").layer(geometry, 1)
    assert reader.near == Hilbert().layer(geometry, 1, q_block=32, k_block=16).near
    assert (reader.near.q_block, reader.near.k_block) == (32, 16)
    assert errors.with_blocks(Hilbert(), "32x16") != errors.with_blocks(Hilbert(), "32x32")


def test_blocks_of_a_gpu_are_what_is_measured() -> None:
    task = Task(pareto.TINY, num=1, steps=STEPS, size=128)
    chosen = errors.spread(pictures(CATS), 1)
    pattern = Pattern("3 tiles", {"tiles": 3, "near": "tile", **NOTHING_DENSE})
    rows = []
    for blocks in ("device", "gpu", "128x32"):
        one = ErrorSweep(task, chosen, "cats", [2], blocks=blocks)
        assert one.run([pattern])
        rows += one.rows
    assert [row.settings["blocks"] for row in rows] == ["device", "gpu", "128x32"]
    assert len({row.pairs_kept for row in rows}) == 3
    assert len({row.steps[0].error for row in rows}) == 3


# -- what is measured once -------------------------------------------------------------------------------------------


def test_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    out, seen = tmp_path / "errors.json", list[str]()
    patterns = [TILES, WRONG, LATER, FAR]
    assert not sweep(out, seen).run(patterns, has_time=lambda: not seen)
    assert [row.pattern for row in errors.read_rows(out)] == ["4 tiles"]
    assert seen[0] == "0/16 dense"
    assert [each.partition(" ")[2] for each in seen] == ["dense"] * 4 + ["4 tiles"] * 4
    again = sweep(out)
    assert [pattern.name for pattern in again.missing(patterns)] == ["no such layer", "4 tiles, far 16"]
    assert again.run(patterns)
    assert list(again.broken) == ["no such layer"]
    rows = errors.read_rows(out)
    assert rows == [replace(row, settings=rows[place].settings) for place, row in enumerate(again.rows)]
    assert [row.pattern for row in sweep(out).rows_of([FAR, LATER])] == ["4 tiles, far 16", "4 tiles"]
    seen.clear()
    assert sweep(out, seen).run([LATER, FAR], has_time=lambda: False)
    assert not seen
    assert sweep(out, blocks="gpu").missing([TILES])


def test_rows_are_of_the_code_that_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that others make while it runs have no part in it."""
    monkeypatch.setattr("nearfield.cli.machine.commit", lambda: "before")
    found = sweep(tmp_path / "errors.json")
    monkeypatch.setattr("nearfield.cli.machine.commit", lambda: "after")
    assert found.run([TILES])
    assert json.loads(found.out.read_text())["machine"]["commit"] == found.rows[0].commit == "before"


def test_results_name_no_folder(tmp_path: Path) -> None:
    out, mine = tmp_path / "errors.json", tmp_path / "mine.json"
    mine.write_text(json.dumps([{"name": "t", "fields": {"tiles": 4}}]), encoding="utf-8")
    assert cli.main(command("--patterns", str(mine), "--json", str(out))) == 0
    text = out.read_text(encoding="utf-8")
    assert str(CATS.parent) not in text
    assert str(tmp_path) not in text
    document = json.loads(text)
    assert (document["benchmark"], document["format"]) == ("errors", 1)
    assert document["results"][0]["commit"] == document["machine"]["commit"]
    assert document["machine"]["versions"]["torch"] == torch.__version__
    (row,) = document["results"]
    assert row["settings"]["photographs"]["source"] == "cats"
    assert row["settings"]["fields"]["dense_steps"] == 0
    assert (row["settings"]["weights"], row["settings"]["at"]) == ("tiny", [1])


# -- the command -----------------------------------------------------------------------------------------------------


def command(*words: str, photographs: Path = CATS) -> list[str]:
    fixed = ["--tiny", "--size", "64", "--num", "1", "--at", "1", "--steps", "4"]
    return ["bench", "errors", "--photographs", str(photographs), *fixed, *words]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, out = tmp_path / "mine.json", tmp_path / "errors.json"
    mine.write_text('[{"name": "t", "fields": {"tiles": 4, "dense_layers": 0}}]', encoding="utf-8")
    words = command("--patterns", str(mine), "--json", str(out))
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out == "1 to measure at 64 px, 1 photographs, steps 1 of 4:\n  t\n"
    assert not out.exists()
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    first, _, line, last = captured.out.splitlines()
    assert first.split() == ["pattern", "pairs", "kept", "error", "in", "step", "1", "seconds"]
    assert line.split()[0] == "t"
    assert last == f"wrote {out}"
    assert "0/2 steps, dense" in captured.err
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("0 to measure")
    assert cli.main([*words, "--minutes", "1"]) == 0
    assert line in capsys.readouterr().out
    assert cli.main([*words, "--seed", "1", "--minutes", "1e-9"]) == 0
    assert "time is up; the same command goes on" in capsys.readouterr().err


def test_broken_patterns_are_told_and_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('[{"name": "w", "fields": {"dense_layers": [99]}}]', encoding="utf-8")
    assert cli.main(command("--patterns", str(mine))) == 1
    assert "w: not measured: `dense_layers` must hold indices" in capsys.readouterr().err


def bad_calls(folder: Path) -> dict[str, tuple[list[str], str]]:
    (folder / "x.json").write_text("[]", encoding="utf-8")
    (folder / "w.json").write_text('[{"name": "w", "fields": {"tiles": 0}}]', encoding="utf-8")
    return {
        "none": (["bench", "errors"], "the following arguments are required: --photographs"),
        "photographs": (
            command(photographs=folder / "none"),
            "`--photographs` must name a folder of pictures or of tar files, or a tar file; got ",
        ),
        "empty": (command(photographs=folder), f"{folder} holds neither tar files of pictures nor pictures"),
        "num": (
            command("--num", "7"),
            "`--num` must be at most 6, for there are no more photographs; got 7.",
        ),
        "at": (
            command("--at", "1,4"),
            "`--at` must be numbers of steps, from 0 to 3; got 4. `--steps` says how many there are.",
        ),
        "words": (command("--at", "x"), "`--at` must be an integer of at least 0; got 'x'."),
        "patterns": (command("--patterns", "x"), "`--patterns` must name groups (default, far, "),
        "fields": (
            command("--patterns", str(folder / "w.json")),
            "pattern 'w': `tiles` must be at least 1; got 0",
        ),
        "both": (command("--weights", "x"), "`--weights` must be left out with `--tiny`; got 'x'"),
        "size": (command("--size", "68"), "`--size` must be a multiple of 8 pixels; got 68"),
        "blocks": (
            command("--blocks", "cpu"),
            "`--blocks` must be device or gpu, or sizes of queries (16, 32, 64, 128, 192) and keys (1, 2, 4, 8, 16, "
            "32, 64, 128, 192); got 'cpu'. Example: --blocks 128x64",
        ),
        "json": (
            command("--json", str(folder / "x.json")),
            "`--json` must name a new file or one of these results.",
        ),
    }


@pytest.mark.parametrize("name", [
    "none", "photographs", "empty", "num", "at", "words", "patterns", "fields", "both", "size", "blocks", "json"
])  # fmt: skip
def test_bad_calls(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = bad_calls(tmp_path)[name]
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
