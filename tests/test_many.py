"""`nearfield generate --option engine=process`: many pictures, resumed, tried again, interrupted."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import command_line as cli
from tests.cats import lively_model

from nearfield import Hilbert
from nearfield_lab.commands import many
from nearfield_lab.commands.many import runs_of
from nearfield_lab.embedded import generate
from nearfield_lab.embedded.model import save_model

Make = Callable[[range], list[bytes]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "weights.safetensors"
    save_model(path, lively_model(), packing="none")
    return path


@pytest.fixture
def words(weights: Path, tmp_path: Path) -> list[str]:
    fields = "--set tiles=4 --set dense_steps=0 --steps 1 --size 32 --num 7 --option first=2 --option batch=3"
    engine = "--option device=cpu --option engine=process"
    return f"generate --weights {weights} {fields} {engine} --images {tmp_path / 'made'}".split()


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "made" / "hilbert").glob("*.png"))}


def watch(monkeypatch: pytest.MonkeyPatch, change: Callable[[range], None]) -> list[range]:
    """Every batch that is begun; `change` sees it before and may raise."""
    seen = list[range]()
    start = many.Job.__call__

    def watched(job: Any) -> Make:
        make = start(job)

        def made(numbers: range) -> list[bytes]:
            seen.append(numbers)
            change(numbers)
            return make(numbers)

        return made

    monkeypatch.setattr(many.Job, "__call__", watched)
    return seen


def nothing(_: range) -> None:
    pass


def test_pictures_are_those_of_generate(words: list[str], tmp_path: Path) -> None:
    assert cli.main(words) == 0
    place = words.index("engine=process")
    plain = words[: place - 1] + words[place + 1 :]
    plain[plain.index("--images") + 1] = str(tmp_path / "plain")
    assert cli.main([*plain, "--out", str(tmp_path / "sheet.png")]) == 0
    expected = {path.name: path.read_bytes() for path in sorted((tmp_path / "plain" / "hilbert").iterdir())}
    assert list(expected) == [f"00000{number}.png" for number in range(2, 9)]
    assert pictures(tmp_path) == expected


def test_only_what_is_missing_or_torn_is_made(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0
    before = pictures(tmp_path)
    folder = tmp_path / "made" / "hilbert"
    untouched = (folder / "000004.png").stat()
    (folder / "000003.png").unlink()
    (folder / "000006.png").write_bytes(before["000006.png"][:-20])
    damaged = bytearray(before["000007.png"])
    damaged[len(damaged) // 2] ^= 1
    (folder / "000007.png").write_bytes(damaged)
    seen = watch(monkeypatch, nothing)
    capsys.readouterr()
    assert cli.main([*words, "--json", str(tmp_path / "a.json")]) == 0
    assert seen == [range(3, 4), range(6, 8)]
    assert capsys.readouterr().out.startswith("made 3 pictures, ")
    assert pictures(tmp_path).keys() == before.keys()
    assert pictures(tmp_path)["000003.png"] == before["000003.png"]
    assert (folder / "000004.png").stat() == untouched
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["pictures_of_this_run"], record["missing"], record["workers"]) == (3, 0, 1)
    assert record["images_per_second"] == pytest.approx(3 / record["seconds"], rel=0.2)

    seen.clear()
    assert cli.main(words) == 0  # all is there: not even the model is loaded
    assert seen == []
    assert capsys.readouterr().out.splitlines()[-1] == f"7 of 7 pictures are in {folder}"


def test_failures_are_tried_again_and_reported(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [5, 5, 2]  # the batch that begins there, once for each

    def fail(numbers: range) -> None:
        if numbers[0] in failures:
            failures.remove(numbers[0])
            raise RuntimeError(f"out of memory at {numbers[0]}")

    seen = watch(monkeypatch, fail)
    assert cli.main([*words, "--option", "tries=2", "--json", str(tmp_path / "a.json")]) == 1
    captured = capsys.readouterr()
    assert [numbers[0] for numbers in seen] == [2, 5, 8, 2, 5]
    expected = "pictures 5 to 7 failed 2 times; the last: RuntimeError: out of memory at 5"
    assert f"nearfield: error: {expected}\n" in captured.err
    assert captured.err.endswith("the same command tries the missing ones again\n")
    assert list(pictures(tmp_path)) == [f"00000{number}.png" for number in (2, 3, 4, 8)]
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["retries"] == 2
    assert record["missing"] == 3
    assert record["failures"] == [{"pictures": [5, 6, 7], "tries": 2, "error": expected}]
    assert cli.main(words) == 0
    assert len(pictures(tmp_path)) == 7


def test_an_interrupted_run_goes_on(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(numbers: range) -> None:
        if numbers[0] == 8 and len(seen) == 3:
            raise KeyboardInterrupt

    seen = watch(monkeypatch, interrupt)
    assert cli.main(words) == 130
    folder = tmp_path / "made" / "hilbert"
    assert f"\n6 of 7 pictures are in {folder}; the same command goes on\n" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"00000{number}.png" for number in range(2, 8)),
        "settings.json",
    ]
    assert cli.main(words) == 0
    assert seen[3:] == [range(8, 9)]


def test_what_never_works_ends_early(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: range) -> None:
        raise RuntimeError("no")

    seen = watch(monkeypatch, fail)
    words[words.index("--num") + 1] = "1000"
    assert cli.main([*words, "--json", str(tmp_path / "a.json")]) == 1
    assert len(seen) == 4
    said = "not one of 4 tries succeeded; the last: RuntimeError: no"
    assert f"nearfield: error: {said}\n" in capsys.readouterr().err
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["missing"], record["given_up"], record["images_per_second"]) == (1000, said, None)


def test_fields_that_do_not_fit_are_told_at_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words += ["--set", "curve=hilbert-closed", "--size", "24"]
    seen = watch(monkeypatch, nothing)
    assert cli.main(words) == 2
    assert len(seen) == 1
    assert "nearfield: error: `curve` must" in capsys.readouterr().err


def test_a_folder_holds_pictures_of_one_kind(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0
    folder = tmp_path / "made" / "hilbert"
    rule = "nearfield: error: `--images` must hold pictures of the same settings, or none; got"
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["method"] == repr(
        Hilbert(tiles=4, dense_steps=0)
    )  # also the fields that are at their defaults
    for name, value, other in (("steps", 1, 2), ("seed", 0, 1), ("size", 32, 40)):
        capsys.readouterr()
        assert cli.main([*words, f"--{name}", str(other)]) == 2
        assert capsys.readouterr().err.startswith(
            f"{rule} {folder}, made with {name} = {value} instead of {other}."
        )
    weights = Path(words[words.index("--weights") + 1])
    other_weights = tmp_path / "other" / weights.name
    other_weights.parent.mkdir()
    save_model(other_weights, lively_model(), packing="int8")
    capsys.readouterr()
    assert cli.main([*words, "--weights", str(other_weights)]) == 2
    assert f"{rule} {folder}, made with weights = {weights.name}, sha256 " in capsys.readouterr().err
    (folder / "settings.json").unlink()
    assert cli.main(words) == 2
    assert "whose pictures do not say how they were made" in capsys.readouterr().err


def test_pictures_of_a_pipeline_are_named_by_their_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline takes seeds as they are, so runs with other seeds fill the same folder."""
    from tests import tiny_models

    call = tiny_models.flux_call()
    embeds = {name: call[name] for name in ("prompt_embeds", "pooled_prompt_embeds", "guidance_scale")}
    sampler = generate.pipeline_sampler
    monkeypatch.setattr(generate, "open_pipeline", lambda name, device: tiny_models.flux_pipeline())
    monkeypatch.setattr(
        generate, "pipeline_sampler", lambda pipe, prompt, num, **rest: sampler(pipe, embeds, num, **rest)
    )
    words = "generate --model x --prompt y --size 24x32 --steps 1 --set tiles=2 --set shared=none --set dense_steps=0"
    engine = "--option engine=process --option device=cpu --images"
    common = [*words.split(), *engine.split(), str(tmp_path / "made")]
    assert cli.main([*common, "--seed", "40", "--num", "3", "--option", "batch=2"]) == 0
    first = pictures(tmp_path)
    assert list(first) == ["000040.png", "000041.png", "000042.png"]
    assert len(set(first.values())) == 3
    assert cli.main([*common, "--seed", "42", "--num", "2"]) == 0
    assert pictures(tmp_path).keys() - first.keys() == {"000043.png"}


BAD_CALLS = {
    "--option engine=process": "`--images` must name a folder with `engine`; got None. Example: --images samples",
    "--option engine=spark": "`engine` must be one of process, ray; got 'spark'.",
    "--option engine=process --images a --compare": "`--compare` must be left out with `engine`; got True. "
    "Run it once more with --method dense.",
    "--option engine=process --images a --out b.png": "`--out` must be left out with `engine`, which makes no sheet; "
    "got b.png.",
    "--option engine=process --images a --option workers=2": "`workers` must be given with `engine=ray` only; got 2.",
    "--option engine=process --images a --option ray-address=auto": "`ray-address` must be given with `engine=ray` "
    "only; got auto.",
    "--option tries=2": "`tries` must be given with `engine` only; got 2.",
    "--option engine=ray --images a --option tries=0": "`tries` must be an integer of at least 1; got '0'.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", *call.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"nearfield: error: {BAD_CALLS[call]}\n"
    assert captured.out == ""


def test_ray_is_an_extra(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words[words.index("engine=process")] = "engine=ray"
    assert cli.main(words) == 2
    assert "Install it with `pip install 'nearfield-lab[ray]'`." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "most", "expected"),
    [
        ([], 3, []),
        ([5], 3, [range(5, 6)]),
        ([0, 1, 2, 3, 5, 7, 8], 3, [range(3), range(3, 4), range(5, 6), range(7, 9)]),
        ([1, 2, 3, 4], 2, [range(1, 3), range(3, 5)]),
    ],
)
def test_numbers_become_batches(numbers: list[int], most: int, expected: list[range]) -> None:
    assert runs_of(numbers, most) == expected


def test_a_job_travels(words: list[str], weights: Path) -> None:
    """Workers of a cluster stand in other folders: paths are absolute, and nothing of the parser is left."""
    import pickle

    arguments = cli.parser(words).parse_args(words)
    arguments.weights = Path(arguments.weights.name)
    job = many.Job(many.portable(arguments), None, None)
    copy = pickle.loads(pickle.dumps(job))
    assert isinstance(copy.arguments, argparse.Namespace)
    assert copy.arguments.weights.is_absolute()
    assert not hasattr(copy.arguments, "run")
