"""`python -m benchmarks pictures`: what it measures, that rows of fewer pictures come free, and its masks."""

import argparse
import json
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import __main__ as program
from benchmarks import picture_runs, special
from benchmarks import pictures as benchmark
from benchmarks.cases import Case
from benchmarks.patterns import ALL_METHODS, CASES, GROUPS, tuning_of
from benchmarks.pictures import Pictures
from benchmarks.report import Record
from benchmarks.rivals import masks
from benchmarks.runner import Session
from PIL import Image
from tests import command_line as cli
from tests.cats import CATS, CONFIG, SIZE, lively_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

from nearfield import Geometry, Hilbert, LogLinear, Merge, apply
from nearfield.cli import machine
from nearfield.diffusers.compiling import compiled_blocks
from nearfield.methods import BipartiteMerge, Composition
from nearfield_lab import quality
from nearfield_lab.embedded.model import save_model
from nearfield_lab.embedded.sampler import DemoPipeline
from nearfield_lab.quality.results import read_rows
from nearfield_lab.storage import write_tensors
from nearfield_lab.training import distill
from nearfield_lab.training.data import pictures
from nearfield_lab.training.loop import Schedule

TILES = Case("2 tiles", {}, "Hilbert", {"tiles": 2, "near": "tile", "summary": "mean", "dense_layers": [0],
                                        "dense_steps": 0})  # fmt: skip
DISC = Case("disc", {}, "window", {"radius": 2})
SAME = Case("same", {}, "Merge", {"ratio": 0, "skip_blocks": [0, 0]})
MERGED = Case("merged", {}, "Merge", {"ratio": 0.5, "region_size": 16, "skip_blocks": [0, 0]})
WRONG = Case("no such layer", {}, "Hilbert", {"dense_layers": [99]})


class Features(nn.Module):
    """In the place of Inception: a few numbers that depend on everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, images: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(images.float() / 255, self.weight, stride=8).abs().mean(dim=(2, 3))


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(quality, "load_inception", lambda *_: Features())
    monkeypatch.setattr(quality, "load_efficientnet", lambda *_: Features())


@pytest.fixture
def task(tmp_path: Path) -> picture_runs.Task:
    save_model(tmp_path / "model.safetensors", lively_model())
    return picture_runs.Task(tmp_path / "model.safetensors", num=4, steps=2, size=64, batch=3)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which pictures were made."""
    seen: list[tuple[str, int]] = []
    right = Pictures._say

    def noted(self: Pictures, pattern: Case | None, first: int) -> None:
        seen.append((benchmark.shown_name(pattern), first))
        right(self, pattern, first)

    monkeypatch.setattr(Pictures, "_say", noted)
    return seen


def words_of(task: picture_runs.Task, patterns: Sequence[Case], *more: object) -> list[str]:
    """The command that measures patterns, with photographs unless `more` says `--timed`."""
    own = [
        {"name": each.name, "method": each.method, "fields": dict(each.fields), **each.on}
        for each in patterns
    ]
    words = ["bench", "pictures", "--weights", str(task.weights), "--steps", str(task.steps)]
    words += ["--size", str(task.size), "--batch", str(task.batch)]
    given = [str(word) for word in more if word != "--timed"]
    words += given if "--num" in given else ["--num", str(task.num), *given]
    words += ["--compile"] if task.compiled else []
    words += [] if "--timed" in more else ["--photographs", str(CATS)]
    return words + [word for each in own for word in ("--case", json.dumps(each))]


def measured(
    task: picture_runs.Task, patterns: Sequence[Case], out: Path, *more: object, code: int = 0
) -> list[Record]:
    """All records of the file."""
    assert cli.main(words_of(task, patterns, "--json", out, *more)) == code
    records: list[Record] = json.loads(out.read_text(encoding="utf-8"))["results"]
    return records


# -- rows --------------------------------------------------------------------------------------------------------------


def test_patterns_are_measured_once(
    task: picture_runs.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[tuple[str, int]]
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setattr(machine, "commit", lambda: "first")
    measured(task, [TILES], out)
    monkeypatch.setattr(machine, "commit", lambda: "second")
    dense, tiles, disc = measured(task, [TILES, DISC], out)
    assert [row.commit for row in read_rows(out)] == ["first", "first", "second"]
    # The dense pictures are made again, for the new pattern is compared with them.
    both = [(name, first) for name in ("dense", "2 tiles") for first in (0, 3)]
    assert drawn == [*both, *both[:2], ("disc", 0), ("disc", 3)]
    assert (dense["pairs_kept"], dense.get("psnr"), dense["settings"]["name"]) == (1, None, "dense")
    assert (dense["pattern"], tiles["samples"]) == ("dense", 4)
    assert 0.3 < tiles["pairs_kept"] < 0.9
    for row in (dense, tiles, disc):
        assert row["fid"] > 0
        assert row["kid"] is not None
    for row in (tiles, disc):
        assert row["psnr"] is not None
        assert row["lpips"] is not None
        assert 0 < row["inception_distance"] < 1
        assert row["efficientnet_distance"] == pytest.approx(row["inception_distance"])
    assert tiles["seam"] != tiles["dense_seam"]
    assert "seam" not in disc
    assert "inception_distance" not in dense
    assert [row.pattern for row in read_rows(out)] == ["dense", "2 tiles", "disc"]


def bench_of(task: picture_runs.Task, *words: str) -> Pictures:
    parser = argparse.ArgumentParser()
    program.add_options(parser, Pictures)
    options = parser.parse_args(["--weights", str(task.weights), "--photographs", str(CATS), *words])
    return Pictures(Session(options, torch.device("cpu")))


@pytest.mark.parametrize("lacking", ["near", "summary"])
def test_rows_without_a_field_of_today_are_of_nothing(
    lacking: str, task: picture_runs.Task, tmp_path: Path, drawn: list[tuple[str, int]]
) -> None:
    """What a method read before it had a field is not known from its default."""
    out = tmp_path / "rows.json"
    measured(task, [TILES], out)
    document = json.loads(out.read_text())
    del document["results"][1]["settings"]["fields"][lacking]
    out.write_text(json.dumps(document))
    drawn.clear()
    assert len(measured(task, [TILES], out)) == 3
    assert ("2 tiles", 0) in drawn


def test_rows_of_fewer_pictures_come_free(
    task: picture_runs.Task, tmp_path: Path, drawn: list[tuple[str, int]]
) -> None:
    """They are made of the same batches, and say what a sweep of so few says."""
    out, pairs = tmp_path / "both.json", ("--pairs", 4)
    rows = measured(task, [TILES], out, "--num", "7,5", *pairs)
    assert drawn == [(name, start) for name in ("dense", "2 tiles") for start in (0, 3, 6)]
    assert [(row["pattern"], row["samples"]) for row in rows] == [
        (name, count) for name in ("dense", "2 tiles") for count in (5, 7)
    ]
    fewer, more = rows[2:]
    assert fewer["lpips"] == more["lpips"]  # of the first four
    assert fewer["fid"] != more["fid"]
    for count, row in ((5, fewer), (7, more)):
        alone = measured(task, [TILES], tmp_path / f"{count}.json", "--num", count, *pairs)[1]
        for name, value in alone.items():
            if isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name
    # Of what is known, the dense pictures are made again, as many as are compared.
    drawn.clear()
    measured(task, [TILES, DISC], out, "--num", "5,7", *pairs)
    assert drawn == [("dense", 0), ("dense", 3), ("disc", 0), ("disc", 3), ("disc", 6)]


def test_photographs_are_measured_once(task: picture_runs.Task, tmp_path: Path) -> None:
    words = ["--size", "64", "--num", "4", "--json", str(tmp_path / "rows.json")]
    first = bench_of(task, *words).references
    (kept,) = tmp_path.glob("photographs-64-*.safetensors")
    again = benchmark.photograph_statistics(iter(()), Features(), 64, kept)
    assert torch.equal(first.mean, again.mean)
    assert first.count == again.count == 6


def test_patterns_are_timed_and_compared_without_photographs(
    task: picture_runs.Task, tmp_path: Path, drawn: list[tuple[str, int]]
) -> None:
    out, one = tmp_path / "own.json", replace(task, num=2, batch=1)
    found = measured(one, [TILES, WRONG, SAME, MERGED], out, "--timed", code=1)
    dense, tiles, wrong, same, merged = found
    assert wrong["status"] == "broke"
    assert "`dense_layers` must hold indices from -3 to 2; got 99" in wrong["note"]
    assert dense["speed_up"] == 1
    for row in (dense, tiles, same, merged):
        assert row["speed_up"] == row["dense_milliseconds"] / row["milliseconds"]
        assert row["settings"]["batch"] == 1
    # The order of the tokens changes sums in their last digit, and a pixel in a thousand by 1.
    assert same["tokens_kept"] == 1
    assert same["lpips"] == pytest.approx(0, abs=1e-6)
    assert same["psnr"] is None or same["psnr"] > 70
    assert merged["tokens_kept"] == 0.5
    for row in (tiles, merged):
        assert row["lpips"] > 1e-5
        assert row["psnr"] is not None
        assert row["inception_distance"] == row["efficientnet_distance"] > 0
        assert row["seam"] != row["dense_seam"]
    drawn.clear()
    measured(one, [TILES, SAME, MERGED], out, "--timed")
    assert not drawn


def test_pictures_are_as_large_as_those_the_model_was_trained_with(task: picture_runs.Task) -> None:
    assert picture_runs.trained_size(task.weights) == SIZE
    assert picture_runs.trained_size(picture_runs.TINY) == 128


def test_the_first_timing_warms_up() -> None:
    assert benchmark._median([9.0, 1.0, 3.0, 2.0]) == 2.0
    assert benchmark._median([9.0, 1.0]) == 5.0


def test_the_tiny_model_is_the_same_each_time_and_notices_attention() -> None:
    state = torch.random.get_rng_state()
    pipeline = picture_runs.tiny_pipeline()
    assert torch.equal(torch.random.get_rng_state(), state)
    dense = pipeline.sample(range(1), size=64, steps=1)
    assert torch.equal(picture_runs.tiny_pipeline().sample(range(1), size=64, steps=1), dense)
    with apply(pipeline, Hilbert(tiles=4, shared="none", dense_layers=0, dense_steps=0)):
        assert not torch.allclose(pipeline.sample(range(1), size=64, steps=1), dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "fields", [{"dense_steps": 0.5}, {"dense_layers": [1]}, {"dense_layers": [0, 1, 2]}], ids=str
)
def test_pairs_are_counted_over_layers_and_steps(task: picture_runs.Task, fields: dict[str, Any]) -> None:
    own = {"tiles": 2, "shared": "none", "cycle": 2, "dense_layers": 0, "dense_steps": 0} | fields
    pattern = Case("tiles", {}, "Hilbert", own)
    method, geometry = pattern.made(), Geometry((8, 8), text=16)
    with picture_runs.PictureMaker(task, torch.device("cpu")).using(pattern) as drawing:
        drawing.draw(range(1))
        found = drawing.facts()
    assert found.geometry == geometry
    assert found.pairs_kept == pytest.approx(quality.pairs_kept(method, geometry, layers=3, steps=2))
    assert found.tokens_kept is None


# -- masks and LoRAs ---------------------------------------------------------------------------------------------------


def test_masks_read_what_they_say() -> None:
    geometry = Geometry((4, 5), text=3)
    disc = masks.Masked("window", radius=1).layer(geometry, 0, heads=1, device="cpu").mask
    assert disc[:3].all()
    assert disc[:, :3].all()
    assert disc[3 + 7, 3:].nonzero().flatten().tolist() == [2, 6, 7, 8, 12]  # a cross around row 1, column 2
    band = masks.Masked("band", width=4).layer(geometry, 0, heads=1, device="cpu").mask
    assert band[3 + 7, 3:].nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_a_mask_that_hides_nothing_is_dense() -> None:
    model = lively_model()
    x, level = torch.randn(1, 32, 4, 4), torch.tensor([0.5])
    dense = model(x, level)
    with apply(model.transformer, masks.Masked("window", radius=99)):
        torch.testing.assert_close(model(x, level), dense, rtol=1e-4, atol=1e-4)
    with apply(model.transformer, masks.Masked("window", radius=1)) as handle:
        assert not torch.allclose(model(x, level), dense, rtol=1e-3, atol=1e-3)
        assert "window, pairs kept" in handle.summary()


def test_masks_read_the_same_in_a_graph() -> None:
    """There flex reads them, which skips blocks; here dense attention does, under the mask itself. Nothing is a whole
    number of blocks, and what was compiled for one mask serves another."""
    geometry = Geometry((24, 20), text=9)
    inputs = tuple(torch.randn(2, 3, geometry.num_tokens, 16) for _ in range(3))

    def attended(reader: masks.MaskLayer) -> Tensor:
        return reader.attend(*inputs, scale=0.3).out

    graphs = list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph)
        return compile_fx(graph, example)

    torch.compiler.reset()
    compiled = torch.compile(attended, backend=backend, fullgraph=True)
    dense = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.3)
    for method in (masks.Masked("window", radius=3), masks.Masked("band", width=40)):
        reader = method.layer(geometry, 0, heads=3, device="cpu")
        with torch.no_grad():
            found, want = compiled(reader), attended(reader)
        torch.testing.assert_close(found, want)
        assert not torch.allclose(found, dense, rtol=1e-2, atol=1e-2)
        # In blocks of 128: those are listed in which anybody reads anybody, and they are not all.
        missing = 4 * 128 - geometry.num_tokens
        padded = torch.nn.functional.pad(reader.mask, (0, missing, 0, missing))
        read = padded.unflatten(0, (4, 128)).unflatten(2, (4, 128)).any(3).any(1)
        assert torch.equal(reader.blocks.to_dense()[0, 0].bool(), read)
        assert not read.all()
    (graph,) = graphs
    called = {node.target for node in graph.graph.nodes}
    assert torch.ops.higher_order.flex_attention in called
    assert torch.nn.functional.scaled_dot_product_attention not in called


def test_a_lora_serves_its_pattern_alone(task: picture_runs.Task, tmp_path: Path) -> None:
    model = lively_model()
    method = Hilbert(**{**TILES.fields, "dense_layers": (0,)})
    recipe, schedule = distill.Recipe(method), Schedule(steps=1, learning_rate=0.1, warm_up=0)
    calls = lambda *_: model.arguments(torch.randn(1, 32, 8, 8), torch.tensor([0.5]))  # noqa: E731
    distill.Distillation(model.transformer, calls, tmp_path, recipe, schedule).run()
    tuned = replace(TILES, name="tuned", on={"lora": str(tmp_path / distill.LORA)})
    assert tuning_of(tuned) == "LoRA"
    before, with_lora, after = (images for images, _ in pictures_of(task, [TILES, tuned, TILES]))
    assert not torch.equal(with_lora, before)
    assert torch.equal(after, before)


# -- compiled --------------------------------------------------------------------------------------------------------

TWO_BLOCKS = replace(CONFIG, single_blocks=1)
FAR = {"tiles": 4, "shared": "none", "far": 4, "dense_layers": [0], "dense_steps": 1}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as ever, but what is traced is run by torch itself: what inductor makes of it takes long to compile."""
    monkeypatch.setattr(picture_runs, "compiled_blocks", partial(compiled_blocks, backend="eager"))


def lora_file(folder: Path) -> str:
    """A LoRA that changes much, for the model of two blocks."""
    model = lively_model(TWO_BLOCKS)
    tensors = {}
    for name in distill.lora_targets(model.transformer):
        outputs, inputs = model.transformer.get_submodule(name).weight.shape
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(2, inputs)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(outputs, 2) * 0.1
    write_tensors(folder / "lora.safetensors", tensors, {"kind": "lora"})
    return str(folder / "lora.safetensors")


@pytest.fixture
def two_blocks(task: picture_runs.Task) -> picture_runs.Task:
    """With few graphs to make: one kind of block each."""
    save_model(task.weights, lively_model(TWO_BLOCKS))
    return task


def pictures_of(
    task: picture_runs.Task, patterns: Sequence[Case | None]
) -> Iterator[tuple[Tensor, list[int]]]:
    """Of every pattern, by one maker, with the number of graphs after each batch."""
    maker = picture_runs.PictureMaker(task, torch.device("cpu"))
    for pattern in patterns:
        parts, made = list[Tensor](), list[int]()
        with maker.using(pattern) as drawing:
            assert drawing.is_compiled == task.compiled
            counters.clear()
            for numbers in task.batches():
                parts.append(drawing.pictures(numbers))
                made.append(counters["stats"]["unique_graphs"])
            assert not counters["graph_break"]
        yield torch.cat(parts), made


@pytest.mark.usefixtures("quick")
def test_compiled_pictures_are_the_same(two_blocks: picture_runs.Task, tmp_path: Path) -> None:
    """Pattern after pattern, each with graphs of its own, which its first batch makes; the last one is smaller."""
    patterns = [
        None,
        Case("far", {}, "Hilbert", FAR),
        Case(
            "tuned", {"lora": lora_file(tmp_path)}, "Hilbert", FAR | {"summary": "weighted", "dense_steps": 0}
        ),
        DISC,  # by a mask
    ]
    plain = [images for images, _ in pictures_of(two_blocks, patterns)]
    compiled = list(pictures_of(replace(two_blocks, compiled=True), patterns))
    for expected, (images, made) in zip(plain, compiled, strict=True):
        assert images.shape == expected.shape == (4, 64, 64, 3)
        assert (images.int() - expected.int()).abs().max() <= 1  # rounded to whole numbers
        assert 0 < made[0] == made[1]
    assert len({images.sum().item() for images in plain}) == len(patterns)


@pytest.mark.usefixtures("quick")
def test_layers_with_masks_share_their_graphs(two_blocks: picture_runs.Task) -> None:
    """Though each has a reader of its own."""
    compiled, made = replace(two_blocks, num=1, compiled=True), []
    for single_blocks in (2, 7):
        save_model(two_blocks.weights, lively_model(replace(CONFIG, single_blocks=single_blocks)))
        ((_, (graphs,)),) = pictures_of(compiled, [DISC])
        made.append(graphs)
    assert 0 < made[0] == made[1]


@pytest.mark.usefixtures("quick")
def test_rows_say_whether_they_were_compiled(
    two_blocks: picture_runs.Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"skip_blocks": [0, 0], "region_size": 16, "placement": "module"}
    patterns = [DISC, Case("by module", {}, "Merge", fields)]
    out, compiled = tmp_path / "rows.json", replace(two_blocks, compiled=True)
    assert [row["compiled"] for row in measured(compiled, patterns, out)] == [True, True, False]
    reason = 'by module: not compiled, with placement="module" tokens are merged inside of blocks'
    assert reason in capsys.readouterr().out
    rows = measured(two_blocks, patterns, out)  # the same settings: nothing is measured again
    assert [row["compiled"] for row in rows] == [True, True, False]


def test_methods_that_are_not_compiled_say_why() -> None:
    assert Hilbert().compile_reason is None
    assert Merge().compile_reason is None
    for method, words in (
        (Merge(placement="module"), "inside of blocks"),
        (Composition(Merge(placement="module"), Hilbert()), "inside of blocks"),
    ):
        assert words in str(method.compile_reason)
    message = "`model` must have blocks that diffusers can compile (`compile_repeated_blocks`); got Linear."
    with pytest.raises(ValueError) as raised, compiled_blocks(nn.Linear(1, 1)):
        pass
    assert str(raised.value) == message


@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_patterns_of_the_embedded_model(group: str) -> None:
    # Masks are as large as the square of what they hide.
    geometry = Geometry((32, 32) if group == "rivals" else (64, 64), text=64)
    for pattern in GROUPS[group]:
        method: Any = pattern.made()
        if isinstance(method, Hilbert | masks.Masked):
            reader = method.layer(geometry, 1, heads=6, device="cpu")
            assert 0 < reader.num_pairs < geometry.num_tokens**2, pattern.name
    names = [pattern.name for patterns in GROUPS.values() for pattern in patterns]
    assert len(names) == len(set(names))
    assert {CASES[name].on["pattern"] for name in CASES if name.startswith(f"{group}/")} == {
        pattern.name for pattern in GROUPS[group]
    }


def test_every_method_has_its_place() -> None:
    methods = {pattern.method for group in ALL_METHODS for pattern in GROUPS[group]}
    own = {pattern.method for pattern in special.cases("pictures")}
    assert methods - own == {
        "Hilbert", "LogLinear", "BlockTopK", "Merge", "BipartiteMerge", "StridedKeys", "Composition"
    }  # fmt: skip
    assert own <= methods


def facts_of(pattern: Case) -> picture_runs.Facts:
    """What is known of one picture of a random model."""
    pipeline, method = DemoPipeline(lively_model()), pattern.made()
    size = 192 if isinstance(method, LogLinear) else 128  # of fewer tokens all are chosen
    task = picture_runs.Task(Path("model"), num=1, steps=2, size=size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # LogLinear cautions
        handle = apply(pipeline, method)
    with handle:
        pipeline.sample(range(1), size=task.size, steps=task.steps)
        return picture_runs.Drawing(pipeline, task, handle).facts()


@pytest.mark.parametrize("group", ["chosen", "merge", "peers", "together"])
def test_patterns_that_choose_or_merge_read_less(group: str) -> None:
    own = special.cases("pictures")
    for pattern in (pattern for pattern in GROUPS[group] if pattern not in own):
        method, facts = pattern.made(), facts_of(pattern)
        assert 0 < facts.pairs_kept <= 0.95, pattern.name
        is_merged = isinstance(method, Merge | Composition | BipartiteMerge)
        assert (facts.tokens_kept is not None) == is_merged
        if isinstance(method, Merge | BipartiteMerge):
            assert facts.tokens_kept == 1 - method.ratio


def test_the_command_keeps_strips_and_draws_a_front(
    task: picture_runs.Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot, strips = tmp_path / "new" / "rows.json", tmp_path / "rows.png", tmp_path / "strips"
    pattern = Case("a", {}, "Hilbert", {"tiles": 2, "dense_steps": 0})
    words = words_of(replace(task, steps=1), [pattern], "--json", out, "--plot", plot, "--strips", strips)
    assert cli.main(words) == 0
    first = {strip.name: np.asarray(Image.open(strip)) for strip in strips.iterdir()}
    assert first.keys() == {"dense.png", "a.png"}
    assert first["dense.png"].shape == first["a.png"].shape == (64, 4 * 64 + 3 * 4, 3)
    assert (first["dense.png"] != first["a.png"]).any()
    told = capsys.readouterr().out
    assert told.endswith(f"wrote {out}\nwrote {plot}\n")
    heading = told.splitlines()[1].split()
    assert heading[:3] == ["case", "pictures", "pairs"]
    assert "FID" in heading


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tiny --weights README.md", "`--weights` must be left out with `--tiny`; got 'README.md'."),
        ("--weights x", "`--weights` must name a file that is there; got 'x'."),
        ("--tiny --size 68", "`--size` must be a multiple of 8 pixels; got 68."),
        ("--tiny --inception x", "`--inception` must name a file that is there; got 'x'."),
        ("--tiny --num 4,8", "`--num` must be one number without `--photographs`; got 4,8."),
        ("--tiny --cases far", "`--cases` must be any of default/hilbert, "),
        (
            '--tiny --case {"name":"w","method":"Hilbert","fields":{"tile":4}}',
            "case 'w': `recipe` must hold fields of Hilbert",
        ),
    ],
)
def test_bad_calls(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "pictures", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_one_tar_file_is_read_as_a_folder_of_them(tmp_path: Path) -> None:
    shard = tmp_path / "cats.tar"
    with tarfile.open(shard, "w") as archive:
        for picture in pictures(CATS):
            archive.add(picture.file, picture.name)
    assert pictures(shard) == pictures(tmp_path)
    assert [each.read() for each in pictures(shard)] == [each.read() for each in pictures(CATS)]
