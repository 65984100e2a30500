"""The gates of files: whatever is wrong with one is a line that names it, and nothing half-written stays."""

import io
import json
import lzma
import pickle
import resource
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image
from tests import command_line as cli
from tests.cats import CATS, lively_model

from nearfield import Geometry, Hilbert, recipes
from nearfield._files import BadFile, read_json, replace_file
from nearfield.methods import own_methods
from nearfield.methods.recipes import Recipe
from nearfield_lab.captured import Sample
from nearfield_lab.drawings.captions import Drawing
from nearfield_lab.drawings.packages import Source
from nearfield_lab.drawings.packed import read_parts, write_parts
from nearfield_lab.embedded.lora import FusedLora
from nearfield_lab.embedded.model import load_model, save_model
from nearfield_lab.images import MOST_PIXELS, decode, in_archive, is_whole
from nearfield_lab.missing import MissingExtra
from nearfield_lab.quality import Statistics, open_images
from nearfield_lab.quality.results import read_rows
from nearfield_lab.storage import read_facts, read_tensors, write_tensors
from nearfield_lab.training.loop import CHECKPOINT, PREVIOUS
from nearfield_lab.training.recording import read_call, write_call
from nearfield_lab.tuning import from_records

DEEP = "[" * 100_000

# -- JSON --------------------------------------------------------------------------------------------------------------

FIELDS = {"name": str, "size": int, "share": float, "more": (dict, type(None))}
WHOLE = {"name": "a", "size": 1, "share": 1, "more": None}
MALFORMED: dict[str, tuple[str, str]] = {
    "cut": ('{"a": 1', "must be a JSON file; Expecting ',' delimiter"),
    "no text": ("\udc80", "must be a JSON file; 'utf-8' codec can't decode"),
    "deep": (DEEP, "must be a JSON file; it is nested too deeply."),
    "no object": ("[]", "must hold an object; got a list."),
    "a text": (json.dumps(WHOLE | {"name": 3}), "must be a text; got an integer."),
    "an integer": (json.dumps(WHOLE | {"size": True}), "must be an integer; got true or false."),
    "a number": (json.dumps(WHOLE | {"share": "1"}), "must be a number; got a text."),
    "one of two": (json.dumps(WHOLE | {"more": []}), "must be an object or null; got a list."),
    "missing": (json.dumps({"name": "a", "size": 1}), "must be a number; got nothing."),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_json_names_file_field_and_rule(case: str, tmp_path: Path) -> None:
    text, message = MALFORMED[case]
    path = tmp_path / "a.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadFile) as raised:
        read_json(path, FIELDS)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_fields_that_may_be_left_out_and_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({name: WHOLE[name] for name in ("name", "size", "share")}))
    assert read_json(path, FIELDS) == {"name": "a", "size": 1, "share": 1}


JUNK = [None, True, 0, -1, 1.5, "", "x", [], [1], {}, {"a": 1}, 10**40, float("nan"), {"method": []}]


def places(document: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield before
    if isinstance(document, dict):
        for name, value in document.items():
            yield from places(value, (*before, name))


@pytest.mark.parametrize("kind", own_methods(), ids=lambda kind: kind.name)
def test_malformed_recipes_are_one_line(kind: Any, tmp_path: Path) -> None:
    """Every value of a recipe replaced by values of other kinds: it is read, or refused by name."""
    path = tmp_path / "recipe.json"
    whole = json.loads(json.dumps(Recipe(kind()).as_document()))
    for place in places(whole):
        for junk in JUNK:
            document = json.loads(json.dumps(whole))
            inner = document
            for name in place[:-1]:
                inner = inner[name]
            if place:
                inner[place[-1]] = junk
            path.write_text(json.dumps(document if place else junk))
            told = "`"
            try:
                recipes.read(path)
            except ValueError as error:
                told = str(error)
            assert "`" in told, (place, junk)
            assert "\n" not in told


def test_other_files_of_json_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model.safetensors", lively_model())
    model = ["--weights", str(tmp_path / "model.safetensors"), "--size", "64", "--steps", "1", "--num", "1"]
    folder = tmp_path / "images" / "hilbert"
    many = ["generate", *model, "--option", "engine=process", "--images", str(tmp_path / "images")]
    tune = ["tune", *model, "--out", str(tmp_path / "recipe.json")]
    for path, call in ((folder / "settings.json", many), (tmp_path / "recipe.json.trials", tune)):
        path.parent.mkdir(exist_ok=True, parents=True)
        for text in ("[]", DEEP, '{"settings": {}, "trials": 3}' if call is tune else "{"):
            path.write_text(text)
            assert cli.main(call) in (1, 2)
            error = capsys.readouterr().err.splitlines()[-1]
            assert error.startswith("nearfield: error: ")
            assert str(path) in error
    for text in (
        "[]",
        '{"benchmark": "quality", "format": 1}',
        '{"benchmark": "pictures", "format": 2, "results": [3]}',
    ):
        (tmp_path / "rows.json").write_text(text)
        with pytest.raises(ValueError, match=r"rows\.json"):
            read_rows(tmp_path / "rows.json")


# -- tensors -----------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Files may grow to so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_of_the_system_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.zeros(8)}, {"step": 1})
    with full_disk(4096), pytest.raises(OSError, match="was not written: "):
        write_tensors(path, {"a": torch.zeros(4096)}, {"step": 2})
    assert read_facts(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("command", ["train demo", "distill"])
def test_commands_say_in_one_line_that_a_disk_is_full(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("No space left on device")

    save_model(tmp_path / "model.safetensors", lively_model())
    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    which = ["--tiny"] if command != "distill" else ["--weights", str(tmp_path / "model.safetensors")]
    words = f"{command} --data {CATS} --out {tmp_path / 'out'} --size 32 --batch 2 --steps 1"
    assert cli.main([*words.split(), *which]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("nearfield: error: ")
    assert error.endswith("was not written: No space left on device")


def test_a_full_disk_stops_latents_before_they_are_mapped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train demo --data {CATS} --out {tmp_path} --tiny --size 64 --batch 2 --steps 1"
    with full_disk(4096):
        assert cli.main(words.split()) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("nearfield: error: ")


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """Wherever it is: in names, shapes, facts or numbers, of whatever kind."""
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.ones(5).bfloat16()}
    write_tensors(path, tensors, {"step": 7})
    whole = path.read_bytes()
    found, generator = 0, torch.Generator().manual_seed(0)
    for place in torch.randperm(8 * len(whole), generator=generator)[:600].tolist():
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            read, facts = read_tensors(path)
        except BadFile:
            found += 1
            continue
        # Such as a space behind the header, or the name of the checksum.
        assert facts == {"step": 7}
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert found > 400


def test_a_damaged_checkpoint_offers_the_one_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = f"train demo --data {CATS} --out {out} --tiny --size 32 --batch 2 --option samples=0".split()
    assert cli.main([*words, "--steps", "1"]) == 0
    assert cli.main([*words, "--steps", "2", "--resume"]) == 0
    content = bytearray((out / CHECKPOINT).read_bytes())
    content[-100] ^= 4
    (out / CHECKPOINT).write_bytes(content)
    capsys.readouterr()
    assert cli.main([*words, "--steps", "3", "--resume"]) == 1
    assert capsys.readouterr().err == (
        f"nearfield: error: {out / CHECKPOINT} is damaged: its checksum does not fit what it holds. "
        f"The one before it, {out / PREVIOUS}, of step 1, is whole: rename it to {CHECKPOINT} to go on\n"
    )
    (out / PREVIOUS).rename(out / CHECKPOINT)
    assert cli.main([*words, "--steps", "3", "--resume"]) == 0
    assert "resumed at step 1" in capsys.readouterr().out
    (out / CHECKPOINT).write_bytes(content)
    (out / PREVIOUS).unlink()
    assert cli.main([*words, "--steps", "4", "--resume"]) == 1
    assert "Remove it to train anew, or name another folder" in capsys.readouterr().err


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A file with other tensors and facts, whose checksum fits them."""
    tensors, facts = read_tensors(path)
    change(tensors, facts)
    write_tensors(path, tensors, facts)
    return path


BAD_MODELS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "config": (lambda tensors, facts: facts.update(config=[]), "`config` in .* must be an object; got a list"),
    "heads": (lambda _, facts: facts["config"].update(heads="6"), "`heads` in .* must be an integer; got a text"),
    "format": (lambda tensors, facts: facts.pop("format"), "has format None; this version reads 1"),
    "numbers": (lambda tensors, _: tensors["pooled"].fill_(float("nan")), "`pooled` in .* must hold finite numbers"),
    "scales": (
        lambda tensors, facts: tensors.update({"transformer.proj_out.weight:scale": torch.ones(3, 7)}),
        "must hold weights and scales that fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MODELS)
def test_malformed_models_are_named(case: str, tmp_path: Path) -> None:
    path, (change, message) = tmp_path / "model.safetensors", BAD_MODELS[case]
    save_model(path, lively_model())
    with pytest.raises(BadFile, match=message):
        load_model(rewritten(path, change))


LAYER = "transformer.transformer_blocks.0.attn.to_q"
BAD_LORAS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], float, str]] = {
    "no dimensions": (
        LAYER,
        (),
        (),
        0.0,
        "must be two matrices that can be multiplied; got shape \\[\\] and",
    ),
    "ranks": (LAYER, (2, 32), (32, 3), 0.0, "must be two matrices that can be multiplied"),
    "no layer": (LAYER.replace("to_q", "norm_q"), (2, 16), (16, 2), 0.0, "this one has no such layer"),
    "numbers": (LAYER, (2, 32), (32, 2), float("nan"), "must hold finite numbers; got NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD_LORAS)
def test_malformed_loras_are_named(case: str, tmp_path: Path) -> None:
    name, down, up, value, message = BAD_LORAS[case]
    path = tmp_path / "lora.safetensors"
    factors = {
        f"{name}.lora_A.weight": torch.full(down, value),
        f"{name}.lora_B.weight": torch.full(up, value),
    }
    write_tensors(path, factors, {})
    with pytest.raises(BadFile, match=message):
        FusedLora(lively_model().transformer, path)


def test_other_files_of_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"mean": torch.zeros(2), "covariance": torch.eye(2)}, {"kind": "feature statistics"})
    with pytest.raises(BadFile, match=r"`count` in .* must be an integer; got nothing"):
        Statistics.load(path)
    write_call(path, {"x": torch.zeros(1), "y": torch.ones(1)})
    with pytest.raises(BadFile, match="is no whole recorded call: it lacks tensor '1'"):
        read_call(rewritten(path, lambda tensors, facts: tensors.pop("1")))


# -- pictures ----------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def header(side: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))


SMALL = chunk(b"IDAT", zlib.compress(bytes(8 * 25)))
HOSTILE = {
    "a header of 20,000 x 20,000": png(header(20_000), SMALL, chunk(b"IEND", b"")),
    "zeros of 13,000 x 13,000": png(
        header(13_000), chunk(b"IDAT", zlib.compress(bytes(10**6))), chunk(b"IEND", b"")
    ),
    "a header of 5 bytes": png(chunk(b"IHDR", b"12345"), SMALL, chunk(b"IEND", b"")),
    "a text of 100 MB": png(
        header(8), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8))), SMALL, chunk(b"IEND", b"")
    ),
    "no content": b"",
    "half a picture": png(header(64), chunk(b"IDAT", zlib.compress(torch.arange(64 * 193).byte().numpy())))[
        :200
    ],
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.filterwarnings("ignore:Image size")
def test_hostile_pictures_are_named_and_made_again(case: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"^some place cannot be read as a picture: .+$"):
        decode("some place", lambda: HOSTILE[case])
    path = tmp_path / "a.png"
    path.write_bytes(HOSTILE[case])
    assert not is_whole(path)
    with pytest.raises(BadFile, match=r"a\.png in .* cannot be read as a picture: "):
        next(open_images(tmp_path).batches(1, 32))


def test_the_limit_is_one_of_pixels() -> None:
    side = int(MOST_PIXELS**0.5) + 1
    content = png(header(side), SMALL, chunk(b"IEND", b""))
    with pytest.raises(BadFile, match=f"it must have at most 67,108,864 pixels; got {side} x {side}"):
        decode("x", lambda: content)
    stream = io.BytesIO()
    Image.new("L", (20, 10)).save(stream, "PNG")
    assert decode("x", stream.getvalue).mode == "RGB"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_cut_archives_are_named(share: float, tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(CATS, arcname="cats")
    assert len(in_archive(path)) == 6
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(BadFile, match=r"a\.tgz is not a tar archive, or not a whole one: .+$"):
        in_archive(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# -- files of other commands -------------------------------------------------------------------------------------------

BAD_SAMPLES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "no sample": (lambda tensors, facts: facts.clear(), "`geometry` in .* must be an object; got nothing"),
    "grid": (lambda _, facts: facts["geometry"].update(grid=3), "must hold one captured layer: `grid`"),
    "unknown": (lambda _, facts: facts["geometry"].update(frames=3), "must hold one captured layer: "),
    "names": (lambda tensors, _: tensors.pop("key"), "must hold one captured layer: "),
    "tokens": (lambda tensors, _: tensors.update(value=torch.ones(2, 3, 8)), r"must hold numbers \[heads, 18, ch"),
    "numbers": (lambda tensors, _: tensors["query"].fill_(float("nan")), "`query` in .* must hold finite numbers"),
    "scale": (lambda _, facts: facts.update(scale=10**400), "must hold one captured layer: int too large"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_malformed_activations_are_named(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (change, message) = tmp_path / "a.safetensors", BAD_SAMPLES[case]
    Sample("a", Geometry((4, 4), text=2), *(torch.randn(2, 18, 8) for _ in range(3)), 0.3).write(path)
    assert Sample.read(path).geometry == Geometry((4, 4), text=2)
    with pytest.raises(BadFile, match=message):
        Sample.read(rewritten(path, change))
    assert "`DIR` must hold captured activations" in cli.run(capsys, "errors", tmp_path, code=2)


def test_malformed_configurations_make_no_model(tmp_path: Path) -> None:
    """Negative and endless ones: a model is made after its configuration was judged."""
    path = tmp_path / "model.safetensors"
    for name, value in (("condition_dim", -1), ("single_blocks", 10**40)):
        save_model(path, lively_model())
        with pytest.raises(BadFile, match=f"{name}.* (must be from 0 to|at least)"):
            load_model(rewritten(path, lambda _, facts, n=name, v=value: facts["config"].update({n: v})))


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, lively_model())
    with pytest.raises(BadFile, match="does not hold the weights") as raised:
        load_model(rewritten(path, lambda tensors, _: tensors.pop("pooled")))
    assert "\n" not in str(raised.value)


DRAWN = Drawing("lucide", 0, "cat", "line icon", "<g/>", (0.0, 0.0, 1.0, 1.0), ("pet",), "red", "white")
BAD_DRAWINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda document: document.pop("set"),
    "name": lambda document: document.update(name=3),
    "box": lambda document: document.update(box=["x"]),
    "keywords": lambda document: document.update(keywords=[None]),
    "background": lambda document: document.update(background="no colour"),
}


def write_drawings(folder: Path) -> None:
    write_parts(folder, [(Source("lucide", "Lucide", "many", "ISC", "", "npm"), [DRAWN, DRAWN])], 2**20)


@pytest.mark.parametrize("case", BAD_DRAWINGS)
def test_malformed_drawings_are_named(case: str, tmp_path: Path) -> None:
    write_drawings(tmp_path)
    assert read_parts(tmp_path) == [DRAWN, DRAWN]
    document = json.loads(json.dumps(DRAWN.document()))
    BAD_DRAWINGS[case](document)
    (tmp_path / "drawings-0.xz").write_bytes(lzma.compress(json.dumps(document).encode()))
    with pytest.raises(BadFile, match=r"drawings-0\.xz is no whole file of drawings: "):
        read_parts(tmp_path)


def test_drawings_that_are_missing_are_counted(tmp_path: Path) -> None:
    """A file that lost its last streams is whole to xz."""
    write_drawings(tmp_path)
    (tmp_path / "drawings-0.xz").write_bytes(lzma.compress(json.dumps(DRAWN.document()).encode()))
    with pytest.raises(BadFile, match=r"must hold the 2 drawings that drawings\.json counts; got 1"):
        read_parts(tmp_path)


@pytest.mark.parametrize("junk", ["[", "[]", '{"format": 1}', '{"format": 1, "parts": [3], "sets": []}',
                                  '{"format": 1, "parts": [], "sets": [{"set": "a"}]}'])  # fmt: skip
def test_malformed_indexes_of_drawings_are_named(junk: str, tmp_path: Path) -> None:
    (tmp_path / "drawings.json").write_text(junk)
    with pytest.raises(BadFile, match=r"drawings\.json"):
        read_parts(tmp_path)


def test_trials_of_another_method_are_named() -> None:
    figures = dict.fromkeys(("lpips", "pairs_kept", "seconds_per_step", "speed_up"), 0.5)
    for fields in ({"zzz": 1}, {"interleave": "x"}):
        with pytest.raises(BadFile, match=r"`fields` in a\.trials must be those of hilbert: "):
            from_records([{"fields": fields, "purpose": "search", **figures}], Hilbert(), "a.trials")


def test_a_missing_package_is_said_in_the_same_words_by_another_process() -> None:
    error = MissingExtra("resvg-py", extra="drawings", purpose="to render drawings")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


WRONG_DRAWINGS = {
    "render --data {0} --out {0}/a.png": "`--out` must end in .tar",
    "draw --weights {0}/a --out {0}/a.jpg": "`--out` must end in .png or .tar",
    "card --data {0} --out {0}/drawings.json/a.md": "`--out` must stand in a directory",
    "render --data {0} --out {0}/a.tar --workers 0": "`--workers` must be an integer of at least 1; got '0'",
}


@pytest.mark.parametrize("words", WRONG_DRAWINGS)
def test_wrong_arguments_of_drawings_are_named(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_drawings(tmp_path)
    assert WRONG_DRAWINGS[words] in cli.run(capsys, f"drawings {words.format(tmp_path)}", code=2)
