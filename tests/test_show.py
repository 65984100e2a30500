"""What `nearfield explain --plot` draws: tiles that are those of the plan, what blocks read, and the command."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch
from tests import command_line as cli
from tests.tiles import paper

import nearfield.cli
from nearfield import Geometry, Hilbert, LogLinear, Merge, Plan, PlanMethod, planning
from nearfield.cli import drawing
from nearfield.methods import registry
from nearfield.methods.fields import texts_of
from nearfield_lab.plots import show
from nearfield_lab.plots.cells import canvas_of, draw_curve_lines
from nearfield_lab.plots.method import draw_layer
from nearfield_lab.plots.style import SHARED, SHARED_KEYS, rgb


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = cli.main(["explain", *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


# -- what is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize(
    ("grid", "fields"),
    [
        ((12, 16), {"tiles": 5}),
        ((9, 13), {"tiles": 3, "shared": "none", "curve": "raster"}),
        ((12, 16), {"tiles": 5, "share": "keys", "shared": "distributed"}),
        ((4, 6, 8), {"tiles": 4, "far": 16}),
    ],
)
def test_tiles_that_are_shown_are_those_of_the_plan(
    grid: tuple[int, ...], fields: dict[str, object], layer: int
) -> None:
    """Two tokens of the ring read each other if and only if they are shown in one tile."""
    geometry, method = Geometry(grid, text=16), paper(**fields)
    shown = show.examine(geometry, method, [layer])
    drawn = show.picture(shown)
    num_shared = int(drawn.view.is_shared.sum())
    assert num_shared == sum(method.pieces(geometry)[0][:-1])
    start, stop = shown.start + num_shared, geometry.num_tokens
    reads = shown.layers[layer].near.to_mask()[0, 0, start:stop, start:stop]
    tile = shown.views[layer].group[drawn.view.sequence[num_shared:]]
    same = tile[:, None] == tile[None]
    assert reads[same].all()
    # A block of keys at a cut is read by both sides; no more than that.
    assert (reads & ~same).sum(dim=1).max() < 2 * 16
    assert torch.equal(drawn.view.sequence, method.ordering(geometry).order)


def test_more_tokens_are_drawn_in_larger_blocks_but_counted_in_fine_ones() -> None:
    geometry, method = Geometry((160, 160)), paper(tiles=16, shared="none")
    shown = show.examine(geometry, method, [1])
    assert shown.layers[1].near.k_block == 64
    assert shown.density[1] == pytest.approx(method.plan(geometry, 1, k_block=16).density)
    for fields, blocks in (({"tiles": 400}, (16, 64)), ({}, (128, 128))):
        method = Hilbert(**fields)
        shown, reader = show.examine(geometry, method, [1]), method.layer(geometry, 1)
        assert (reader.near.k_block, shown.layers[1].near.k_block) == blocks
        assert shown.density[1] == reader.num_pairs / geometry.num_tokens**2


@pytest.mark.parametrize("q_block", [None, 32])
@pytest.mark.parametrize(
    ("grid", "fields", "around"),
    [
        ((64, 64), {}, 512),
        ((32, 32), {"far": None}, 256),
        ((64, 64), {"tiles": 16, "shared": "centre", "summary": "mean"}, 256),
        ((8, 24, 32), {"shared": "distributed", "share": "keys"}, 512),
    ],
)
def test_what_is_shown_around_blocks_is_what_is_read(
    grid: tuple[int, ...], fields: dict[str, Any], around: int, q_block: int | None
) -> None:
    """In blocks of keys of the method's own, since finer ones would have others around them."""
    geometry, method = Geometry(grid, text=64), Hilbert(**fields)
    shown = show.examine(geometry, method, [2], q_block)
    reader = method.layer(geometry, 2, q_block=q_block)
    assert shown.layers[2] == reader
    assert shown.density[2] == reader.num_pairs / geometry.num_tokens**2
    drawn = show.picture(shown)
    assert (drawn.q_block, drawn.k_block) == (reader.near.q_block, reader.near.k_block)
    assert drawn.view.group_name == "Blocks of queries"
    assert torch.equal(drawn.layers[0].reads, reader.near.block_counts()[0, 0] > 0)
    assert f"{around} tokens around each block of {drawn.q_block}" in drawn.facts
    assert f"around: {around} tokens, those nearest" in method.describe(geometry, q_block=q_block)
    means = {"mean": "far field: means of 16 tokens", "weighted": "far field: weighted means of 16 tokens"}
    assert [fact for fact in drawn.facts if "far" in fact] == [means[method.summary]] * bool(method.far)
    # The blocks that are shown apart: what they read exactly and in summary is what the plans list.
    order = method.ordering(geometry).order
    start = geometry.image_spans[0][0]
    near = reader.near.to_mask()[0, 0]
    assert 1 <= len(drawn.readings) <= 2
    for reading in drawn.readings:
        own = (drawn.layers[0].tile == reading.block).nonzero().flatten()
        place = int((order == int(own[0])).nonzero()) + start
        exactly = near[place, start : start + len(order)]
        assert torch.equal(reading.exactly[order], exactly)
        assert bool(reading.exactly[own].all())
        counted = (reading.summary >= 0) if reader.far else torch.zeros_like(exactly)
        if reader.far:
            shares = reader.far.pooled(torch.eye(geometry.num_tokens)[None, None])[0, 0] > 0
            read = reader.far.plan.to_mask()[0, 0, place]
            assert torch.equal(counted[order], shares[read][:, start : start + len(order)].any(0))
            assert len(reading.summary[counted].unique()) == int(read.sum())
            assert bool((counted ^ reading.exactly).all()), "every token once"
        assert not bool((counted & reading.exactly).any())
    # Every colour is of one block of queries.
    block = shown.views[2].group[method.ordering(geometry).order]
    places = torch.arange(len(block)) + geometry.image_spans[0][0]
    assert torch.equal(block, places // drawn.q_block - int(places[0]) // drawn.q_block)
    assert int(block.max()) < drawn.num_tiles


@pytest.mark.parametrize(
    ("grid", "fields", "number"),
    [
        ((21, 12, 16), {}, 2),
        ((3, 16, 16), {"shared": "centre"}, 2),
        ((24, 24), {"shared": "centre", "share": "keys"}, 2),
        ((1, 1), {}, 1),
        ((2, 4), {"shared": "centre", "shared_tokens": 8}, 1),
        ((1, 90), {"far": None}, 2),
    ],
)
def test_the_block_in_the_middle_is_shown(
    grid: tuple[int, ...], fields: dict[str, Any], number: int, tmp_path: Path
) -> None:
    """Of a frame that is drawn, and of tokens that are not shared where there are any."""
    shown = show.examine(Geometry(grid, text=8), Hilbert(**fields), [0])
    drawn = show.picture(shown)
    assert len(drawn.readings) == number
    cells = canvas_of(grid)
    own = (drawn.layers[0].tile == drawn.readings[0].block).nonzero().flatten()
    assert bool(torch.isin(own, cells.cells[cells.shown]).any())
    assert bool((~drawn.view.is_shared[own]).any()) or bool(drawn.view.is_shared.all())
    show.draw(tmp_path / "show.png", shown)
    assert (tmp_path / "show.png").stat().st_size > 5_000


def test_frames_of_a_video_are_shown_side_by_side() -> None:
    canvas = canvas_of((9, 4, 6))
    assert canvas.frames == [0, 3, 5, 8]
    assert canvas.cells.shape == (2 * 4 + 1, 2 * 6 + 1)
    assert canvas.cells[0, 0] == 0
    assert canvas.cells[0, 7] == 3 * 24
    assert canvas.cells[-1, -1] == 9 * 24 - 1
    assert canvas.cells[4].eq(-1).all()
    assert canvas_of((2, 4, 6)).frames == [0, 1]
    assert torch.equal(canvas_of((4, 6)).cells, torch.arange(24).view(4, 6))


class Recorder:
    """An axis that remembers the lines it is given."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def add_collection(self, collection) -> None:
        self.lines = collection.get_segments()


def test_the_curve_is_drawn_step_by_step_inside_frames() -> None:
    axis, grid = Recorder(), (2, 4, 4)
    order = torch.cat([torch.arange(16), torch.arange(16) + 16])
    assert not draw_curve_lines(axis, order, canvas_of(grid))
    assert len(axis.lines) == 15 + 15
    assert draw_curve_lines(axis, torch.tensor([0, 1, 3, 2]), canvas_of((2, 2)))
    assert [line.tolist() for line in axis.lines] == [
        [[0, 0], [1, 0]],
        [[1, 0], [1, 1]],
        [[1, 1], [0, 1]],
        [[0, 1], [0, 0]],
    ]


def test_masks_have_the_colours_of_text_shared_tokens_and_tiles() -> None:
    images: list[torch.Tensor] = []

    class Axis(Recorder):
        @property
        def spines(self) -> dict[str, object]:
            return {}

        def imshow(self, cells, **_: object) -> None:
            images.append(torch.from_numpy(cells))

        def __getattr__(self, name: str):
            return lambda *_, **__: None

    shown = show.examine(Geometry((16, 16), text=32), paper(tiles=4, shared_tokens=32, far=16), [1])
    picture = show.picture(shown)
    draw_layer(Axis(), picture, picture.layers[0])
    near, far = images
    assert near.shape == (18, 18, 3)
    assert far.shape == (18, shown.layers[1].far.plan.num_keys, 3)
    dark, keys = rgb(SHARED), rgb(SHARED_KEYS)
    assert (near[:4] == dark).all()
    assert (near[:, :2] == dark).all()
    assert (near[4:, 2:4] == keys).all()
    assert (near[4, 4:] == 1).all(dim=-1).any()
    assert (far[:4] == 1).all()


# -- other methods -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bands() -> Iterator[type[PlanMethod]]:
    """A method that says nothing but its plan."""

    @dataclass(frozen=True)
    class Bands(PlanMethod):
        """Everyone reads a band.

        Args:
            width: tokens to either side.
        """

        name: ClassVar[str] = "bandsofshow"
        width: int = 16
        dense_layers: int | tuple[int, ...] = 0
        dense_steps: int | float = 0

        def plan(self, geometry: Geometry, layer: int, *, q_block: int, k_block: int) -> Plan:
            tokens = geometry.num_tokens
            begins = torch.arange(0, tokens, q_block)[:, None]
            starts, stops = (
                (begins - self.width).clamp(min=0),
                (begins + q_block + self.width).clamp(max=tokens),
            )
            sizes = {"q_block": q_block, "k_block": k_block, "num_queries": tokens, "num_keys": tokens}
            return planning.from_spans(starts, stops, **sizes)

    yield Bands
    del registry._CLASSES[Bands.name]


def test_a_method_that_is_its_plan_alone_is_explained_and_drawn(
    bands: type[PlanMethod], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bands.png"
    words = f"--method bandsofshow --set width=32 --grid 16x20 --text 16 --plot {path}"
    text = run(capsys, *words.split())
    assert "Bands(width=32)" in text
    assert "  width=16: tokens to either side." in text, "fields are listed with their defaults"
    assert path.read_bytes().startswith(b"\x89PNG")
    geometry = Geometry((16, 20), text=16)
    shown = show.examine(geometry, bands(32), [0])  # type: ignore[call-arg]
    drawn = show.picture(shown)
    assert drawn.view.group_name == "Blocks of queries"
    assert not drawn.view.is_shared.any()
    near = bands(32).layer(geometry).near  # type: ignore[call-arg]
    assert shown.density[0] == near.density
    assert torch.equal(drawn.layers[0].reads, near.block_counts()[0, 0] > 0)
    order = bands().ordering(geometry).order
    assert torch.equal(drawn.layers[0].tile[order], (torch.arange(320) + 16) // near.q_block - 1)


@pytest.mark.parametrize(
    "method", [LogLinear(), Merge(0.5), Merge(0.5) | Hilbert()], ids=lambda each: each.label
)
def test_what_content_decides_cannot_be_drawn(method: Any) -> None:
    geometry = Geometry((16, 16))
    assert not show.can_be_drawn(method)
    with pytest.raises(ValueError, match="`method` must decide by the geometry to be drawn; got "):
        show.examine(geometry, method, [0])


# -- the command -------------------------------------------------------------------------------------------------------


def test_picture_and_description(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "new" / "show.png"
    arguments = "--grid 16x20 --set near=tile --set tiles=4 --layer 0,2 --text 16 --plot"
    text = run(capsys, *arguments.split(), str(path))
    described = Hilbert(near="tile", tiles=4).describe(Geometry((16, 20), text=16))
    assert "tiles: 4 of" in described
    assert all(line in text for line in described.splitlines())
    assert text.endswith(f"\nwrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in path.parent.iterdir()] == ["show.png"]


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ("", [0]),
        ("--set near=tile", [0, 1, 2, 3]),
        ("--set tiles=2,4", [0, 1, 2, 3]),
        ("--layer 2,5", [2, 5]),
    ],
)
def test_layers_that_read_alike_are_told_once(
    fields: str, layers: list[int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = f"--grid 16x16 --text 0 --json {fields} --plot {tmp_path / 'show.png'}"
    report = json.loads(run(capsys, *arguments.split()))
    assert [layer["layer"] for layer in report["layers"]] == layers


def test_picture_and_description_of_the_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "show.png"
    text = run(capsys, "--grid", "32x32", "--text", "16", "--plot", str(path))
    described = Hilbert().describe(Geometry((32, 32), text=16))
    assert all(line in text for line in described.splitlines())
    assert "around: 256 tokens, those nearest to each block of 64" in text
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        "--grid 9x13 --set shared=none --set curve=morton --text 0",
        "--grid 9x13 --set shared=none --set curve=morton --text 0 --set near=tile",
        "--grid 12x16 --set share=keys --set shared=distributed --set interleave=true --layer 5 --set near=tile",
        "--grid 12x16 --set share=keys --set shared=distributed --layer 5 --set far=0",
        "--grid 5x6x8 --set far=16 --layer 1..2 --set shared=centre --set shared-tokens=32",
        "--grid 5x6x8 --set far=16 --layer 1..2 --set shared=centre --set shared-tokens=32 --set near=tile",
        "--grid 3x2 --set tiles=2 --text 1",
        "--grid 3x2 --set tiles=2 --text 1 --set near=tile",
        "--grid 16x16 --set tiles=5000 --text 0 --set near=tile",
        "--grid 160x160 --set near=tile --layer 1",
        "--grid 3x3 --text 5 --set shared=centre",
    ],
)
def test_everything_can_be_drawn_and_twice_alike(
    arguments: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in paths:
        run(capsys, *arguments.split(), "--plot", str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert ElementTree.parse(paths[0]).getroot().tag.endswith("svg")


def test_json_has_the_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "show.png"
    fields = "--set near=tile --set tiles=4 --set share=keys --grid 16x16"
    report = json.loads(
        run(capsys, *fields.split(), *["--layer", "0..3", "--json", "--text", "32", "--plot"], str(path))
    )
    assert report["picture"] == str(path)
    assert report["fields"]["share"] == "keys"
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2, 3]
    assert all(0 < layer["density"] < 1 for layer in report["layers"])
    method = Hilbert(near="tile", tiles=4, share="keys")
    shown = show.examine(Geometry((16, 16), text=32), method, range(4))
    assert [layer["density"] for layer in report["layers"]] == list(shown.density.values())
    for view in shown.views.values():
        assert int((view.group.bincount(minlength=4) > 0).sum()) <= 5
        assert len(view.group) == 256
    assert len({view.subtitle for view in shown.views.values()}) == 4


def test_json_of_the_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No tiles, nothing that slides, and the pairs that the method reads."""
    arguments = "--grid 32x32 --text 16 --layer 0..1 --json --plot"
    report = json.loads(run(capsys, *arguments.split(), str(tmp_path / "show.svg")))
    assert report["fields"] == texts_of(Hilbert())
    reader = Hilbert().layer(Geometry((32, 32), text=16))
    assert report["plans"][0]["q_block"] == reader.near.q_block == 64
    density = reader.num_pairs / 1040**2
    alike = {"dense": None, "density": density, "bound_over_dense": 1 / density}
    assert report["layers"] == [{"layer": layer} | alike for layer in (0, 1)]


def test_without_matplotlib_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["explain", "--plot", "show.png"]) == 2
    assert "Install it with `pip install nearfield-lab`." in capsys.readouterr().err


def test_without_the_lab_its_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_drawers", [])
    monkeypatch.setattr(sys.modules["nearfield.cli.main"], "entry_points", lambda group: [])
    assert nearfield.cli.main(["explain", "cpu-small", "--plot", "show.png"]) == 2
    told = "`--plot` needs nearfield-lab, which draws. Run `pip install nearfield-lab`."
    assert capsys.readouterr().err == f"nearfield: error: {told}\n"


BAD_CALLS = {
    "--grid 64 --plot a.png": "`grid` must have two or three sides to be drawn; got 64.",
    "--grid 300x300 --plot a.png": "`grid` must hold at most 65,536 tokens to be drawn; got 90,000.",
    "--layer 0..8 --plot a.png": "`layer` must name at most 8 layers to be drawn; got 9.",
    "--layer 57": "`--layer` must be below the 57 layers of flux-1024; got 57.",
    "--set shared=corner": "`shared` must be one of centre, distributed, none; got 'corner'.",
    "--plot show.jpg": "`--plot` must end in .png or .svg; got 'show.jpg'. Example: --plot results.png",
    "--method loglinear --grid 16x16 --plot a.png": "`method` must decide by the geometry to be drawn; "
    "got LogLinear().",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *call.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"nearfield: error: {BAD_CALLS[call]}\n"
    assert captured.out == ""


def test_a_curve_that_does_not_fit_the_grid_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--grid", "5x7", "--set", "curve=hilbert-closed"]) == 2
    assert "A closed curve needs an even number of tokens" in capsys.readouterr().err
