"""`python -m benchmarks errors`: its figures compared with velocities computed by hand, what is measured once."""

import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import errors, picture_runs
from benchmarks.cases import Case
from benchmarks.errors import OtherBlocks
from benchmarks.patterns import CASES, DEFAULTS, GROUPS, without_dense_steps
from benchmarks.report import Record
from tests import command_line as cli
from tests.cats import CATS, autoencoder
from torch import Tensor

from nearfield import Geometry, Hilbert, Merge, apply
from nearfield_lab.embedded.sampler import noise
from nearfield_lab.training.data import decoded, pictures

SIZE, STEPS = 64, 4
NOTHING_DENSE = {"dense_layers": 0, "dense_steps": 0}


def pattern(name: str, fields: Mapping[str, Any], method: str = "Hilbert") -> Case:
    return Case(name, DEFAULTS, method, fields)


WHOLE = pattern("one tile", {"tiles": 1, "far": None, **NOTHING_DENSE})
TILES = pattern("4 tiles", {"tiles": 4, "far": None, **NOTHING_DENSE})
FAR = pattern("4 tiles, far 16", {"tiles": 4, **NOTHING_DENSE})
LATER = replace(TILES, name="4 tiles, last 3 steps dense", fields={**TILES.fields, "dense_steps": (0, 3)})
WRONG = pattern("no such layer", {"dense_layers": [99]})


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def command(patterns: Sequence[Case], *words: object, photographs: Path = CATS) -> list[str]:
    """Of the tiny model and two photographs."""
    own = [{"name": each.name, "method": each.method, "fields": dict(each.fields)} for each in patterns]
    call = [
        "bench",
        "errors",
        "--photographs",
        str(photographs),
        "--tiny",
        "--steps",
        str(STEPS),
        "--seed",
        "5",
    ]
    given = [str(word) for word in words]
    for name, value in (("--size", SIZE), ("--num", 2), ("--at", "3,1")):
        call += [] if name in given else [name, str(value)]
    return [*call, *given, *(word for each in own for word in ("--case", json.dumps(each)))]


def measured(patterns: Sequence[Case], out: Path, *words: object) -> list[Record]:
    """All records of the file."""
    assert cli.main(command(patterns, "--json", out, *words)) == 0
    records: list[Record] = json.loads(out.read_text(encoding="utf-8"))["results"]
    return records


@torch.no_grad()
def by_hand(method: Hilbert, step: int) -> list[float]:
    """The errors for two of the six photographs, by nothing but the model's own forward and `apply`."""
    model, shift = picture_runs.tiny_pipeline().model, picture_runs.tiny_pipeline().model.config.shift
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


def test_errors_are_those_of_velocities(tmp_path: Path) -> None:
    whole, tiles, far = measured([WHOLE, TILES, FAR], tmp_path / "errors.json")
    assert (whole["pairs_kept"], whole["steps"][0]["error"]) == (1, pytest.approx(0, abs=1e-10))
    for row, each in ((tiles, TILES), (far, FAR)):
        assert [step["step"] for step in row["steps"]] == [1, 3]
        for step in row["steps"]:
            method: Any = each.made()
            assert step["photographs"] == pytest.approx(by_hand(method, step["step"]), rel=1e-3)
            assert step["level"] == pytest.approx(1 - step["step"] / STEPS)
    assert tiles["pairs_kept"] < far["pairs_kept"] < 1
    pairs = zip(tiles["steps"], far["steps"], strict=True)
    assert all(few["error"] > more["error"] > 1e-6 for few, more in pairs)


def test_the_mean_has_an_error_where_there_are_several() -> None:
    step = errors.step_error(8, 0.5, (1.0, 2.0, 3.0))
    assert (step["error"], step["standard_error"]) == (2, pytest.approx(3**-0.5))
    assert errors.step_error(8, 0.5, (1.0,))["standard_error"] is None
    assert errors._cell(8, {"steps": [step]}) == "2 ± 0.6"
    assert errors._cell(8, {"steps": [errors.step_error(8, 0.5, (2.0,))]}) == "2"
    assert errors._cell(9, {"steps": [step]}) is None


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
    assert errors.of_a_step(CASES["far/far-8"]).name == "far 8"  # as people call it
    assert errors.of_a_step(GROUPS["steps"][0]).name == "every step sparse"
    merge = pattern("merge", {"ratio": 0.5}, "Merge")
    assert errors.of_a_step(merge) == merge
    parts = {"merge": {"method": "Merge", "fields": {}}, "attention": {"method": "Hilbert", "fields": {}}}
    both = errors.of_a_step(pattern("both", parts, "Composition")).made()
    assert both == Merge() | Hilbert(dense_steps=0)
    tuned = [replace(TILES, name=name, on={**TILES.on, "lora": f"{name}/lora.safetensors"}) for name in "ab"]
    assert errors.distinct([LATER, *tuned, TILES, FAR]) == [TILES, *tuned, FAR]


def test_names_without_dense_steps() -> None:
    """What has none stays as it is."""
    for each in GROUPS["search"]:
        assert without_dense_steps(each) == each
    for group, names in {
        "around": {"around"},
        "three-steps": {"far 16, centre, interleave", "far 8, weighted"},
        "far-tiles": {
            "far 8, tiles by layer, weighted",
            "far 16, tiles by layer, weighted",
            "far 8, 12 tiles, weighted",
        },
    }.items():
        dense = [each for each in GROUPS[group] if each.fields["dense_steps"]]
        assert {without_dense_steps(each).name for each in dense} == names
    for group in ("search", "around", "far-steps", "three-steps", "far-tiles"):
        for each in GROUPS[group]:
            assert without_dense_steps(each).fields["dense_steps"] == 0
            assert "step" not in without_dense_steps(each).name


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


def test_blocks_of_a_gpu_are_what_is_measured(tmp_path: Path) -> None:
    three = pattern("3 tiles", {"tiles": 3, "near": "tile", **NOTHING_DENSE})
    for blocks in ("device", "gpu", "128x32"):
        rows = measured(
            [three], tmp_path / "errors.json", "--blocks", blocks, "--size", 128, "--num", 1, "--at", 2
        )
    assert [row["settings"]["blocks"] for row in rows] == ["device", "gpu", "128x32"]
    assert len({row["pairs_kept"] for row in rows}) == 3
    assert len({row["steps"][0]["error"] for row in rows}) == 3


# -- what is measured once -------------------------------------------------------------------------------------------


def test_what_is_known_is_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "errors.json"
    measured([TILES], out)
    assert cli.main(command([TILES, WRONG, LATER, FAR], "--json", out)) == 1  # the others go on
    records = json.loads(out.read_text())["results"]
    assert [row["pattern"] for row in records if row["status"] == "ok"] == ["4 tiles", "4 tiles, far 16"]
    assert "no such layer: broke: ValueError: `dense_layers` must hold indices" in capsys.readouterr().out
    assert cli.main(command([LATER, FAR], "--json", out, "--dry-run")) == 0
    assert capsys.readouterr().out.startswith("0 to measure")
    assert cli.main(command([TILES], "--json", out, "--dry-run", "--blocks", "gpu")) == 0
    assert capsys.readouterr().out.startswith("1 to measure")


def test_results_name_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "errors.json"
    (row,) = measured([pattern("t", {"tiles": 4})], out, "--num", 1, "--at", 1)
    text = out.read_text(encoding="utf-8")
    assert str(CATS.parent) not in text
    assert str(tmp_path) not in text
    assert row["settings"]["photographs"]["source"] == "cats"
    assert row["settings"]["fields"]["dense_steps"] == 0
    assert (row["settings"]["weights"], row["settings"]["at"]) == ("tiny", [1])


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_the_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured([pattern("t", {"tiles": 4, "dense_layers": 0})], tmp_path / "errors.json", "--num", 1, "--at", 1)
    _, first, _, line, *_ = capsys.readouterr().out.splitlines()
    assert first.split() == ["case", "pairs", "kept", "error", "in", "step", "1", "seconds"]
    assert line.split()[0] == "t"


def bad_calls(folder: Path) -> dict[str, tuple[list[str], str]]:
    def call(*words: str, photographs: Path = CATS) -> list[str]:
        return command([], *words, photographs=photographs)

    return {
        "none": (["bench", "errors", "--tiny"], "`--photographs` must be given; got None."),
        "photographs": (
            call(photographs=folder / "none"),
            "`--photographs` must name a folder of pictures or of tar files, or a tar file; got ",
        ),
        "empty": (call(photographs=folder), f"{folder} holds neither tar files of pictures nor pictures"),
        "num": (call("--num", "7"), "`--num` must be at most 6, for there are no more photographs; got 7."),
        "at": (
            call("--at", "1,4"),
            "`--at` must be numbers of steps, from 0 to 3; got 4. `--steps` says how many there are.",
        ),
        "words": (call("--at", "x"), "`--at` must be an integer of at least 0; got 'x'."),
        "both": (call("--weights", "x"), "`--weights` must be left out with `--tiny`; got 'x'"),
        "size": (call("--size", "68"), "`--size` must be a multiple of 8 pixels; got 68"),
        "blocks": (
            call("--blocks", "cpu"),
            "`--blocks` must be device or gpu, or sizes of queries (16, 32, 64, 128, 192) and keys (1, 2, 4, 8, 16, "
            "32, 64, 128, 192); got 'cpu'. Example: --blocks 128x64",
        ),
    }


@pytest.mark.parametrize(
    "name", ["none", "photographs", "empty", "num", "at", "words", "both", "size", "blocks"]
)
def test_bad_calls(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = bad_calls(tmp_path)[name]
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
