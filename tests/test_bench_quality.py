"""The sweep over patterns: what it measures, that it goes on, and its masks."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import masks, picture_runs
from benchmarks import quality as sweeping
from benchmarks.quality_cases import GROUPS, Pattern, read_patterns
from PIL import Image
from tests import command_line as cli
from tests.cats import CATS, CONFIG, lively_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

from nearfield import FineGrained, Geometry, Hilbert, LogLinear, Merge, apply
from nearfield.cli import machine
from nearfield.diffusers.compiling import compiled_blocks
from nearfield.methods import BipartiteMerge, Composition
from nearfield_lab import quality
from nearfield_lab.embedded.model import save_model
from nearfield_lab.embedded.sampler import DemoPipeline
from nearfield_lab.embedded.storage import write_tensors
from nearfield_lab.training import distill
from nearfield_lab.training.data import batches, pictures
from nearfield_lab.training.loop import Schedule

PATTERNS = [
    Pattern(
        "2 tiles", {"tiles": 2, "near": "tile", "summary": "mean", "dense_layers": [0], "dense_steps": 0}
    ),
    Pattern("disc", {"radius": 2}, "window"),
]


class Features(nn.Module):
    """In the place of Inception: a few numbers that depend on everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, images: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(images.float() / 255, self.weight, stride=8).abs().mean(dim=(2, 3))


@pytest.fixture
def task(tmp_path: Path) -> picture_runs.Task:
    save_model(tmp_path / "model.safetensors", lively_model())
    return picture_runs.Task(tmp_path / "model.safetensors", num=4, steps=2, size=64, batch=3)


def references(folder: Path) -> quality.Statistics:
    return sweeping.photograph_statistics(
        batches(pictures(CATS), 64), Features(), 64, folder / "kept.safetensors"
    )


def test_patterns_are_measured_once(
    task: picture_runs.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    seen: list[str] = []

    def sweep() -> sweeping.Sweep:
        return sweeping.Sweep(
            task, lambda: references(tmp_path), Features(), out, on_picture=lambda _, name: seen.append(name)
        )

    monkeypatch.setattr(machine, "commit", lambda: "first")
    assert not sweep().run(PATTERNS, has_time=lambda: len(set(seen)) < 2)
    assert [row["pattern"] for row in json.loads(out.read_text())["results"]] == ["dense", "2 tiles"]
    monkeypatch.setattr(machine, "commit", lambda: "second")
    again = sweep()
    assert again.run(PATTERNS)
    dense, tiles, disc = again.rows
    assert [row.commit for row in quality.results.read_rows(out)] == ["first", "first", "second"]
    assert seen == ["dense"] * 2 + ["2 tiles"] * 2 + ["dense"] * 2 + ["disc"] * 2
    assert (dense.pairs_kept, dense.psnr, dense.settings["name"]) == (1, None, "dense")
    assert 0.3 < tiles.pairs_kept < 0.9
    for row in (dense, tiles, disc):
        assert row.fid is not None
        assert row.fid > 0
        assert row.kid is not None
    assert tiles.psnr is not None
    assert tiles.lpips is not None
    assert tiles.seam is not None
    assert tiles.seam != tiles.dense_seam
    assert disc.seam is None
    assert dense.inception_distance is None
    for row in (tiles, disc):
        assert row.inception_distance is not None
        assert 0 < row.inception_distance < 1


NOTHING_DENSE = {"dense_layers": 0, "dense_steps": 0}


@pytest.mark.parametrize("lacking", ["near", "summary"])
def test_rows_without_a_field_of_today_are_of_nothing(lacking: str, task: picture_runs.Task) -> None:
    """What a method read before it had a field is not known from its default."""
    default = Pattern("a", NOTHING_DENSE)
    rows = [quality.QualityRow("a", 0.5, 4, settings=json.loads(json.dumps(task.settings(default))))]
    assert picture_runs.is_known(task.settings(default), rows)
    other = Pattern("a", NOTHING_DENSE | {"near": "tile"})
    assert not picture_runs.is_known(task.settings(other), rows)
    del rows[0].settings["fields"][lacking]
    assert not picture_runs.is_known(task.settings(default), rows)


def test_rows_of_fewer_pictures_come_free(task: picture_runs.Task, tmp_path: Path) -> None:
    """They are made of the same batches, and say what a sweep of so few says."""
    seen: list[tuple[int, str]] = []

    def sweep(name: str, *counts: int) -> sweeping.Sweep:
        return sweeping.Sweep(
            task,
            lambda: references(tmp_path),
            Features(),
            tmp_path / f"{name}.json",
            counts=counts,
            pairs=4,
            on_picture=lambda *words: seen.append(words),
        )

    both = sweep("both", 7, 5)
    assert both.run(PATTERNS[:1])
    assert seen == [(start, name) for name in ("dense", "2 tiles") for start in (0, 3, 6)]
    assert [(row.pattern, row.samples) for row in both.rows] == [
        (name, count) for name in ("dense", "2 tiles") for count in (5, 7)
    ]
    fewer, more = both.rows[2:]
    assert fewer.lpips == more.lpips  # of the first four
    assert fewer.fid != more.fid
    for count, row in ((5, fewer), (7, more)):
        alone = sweep(f"{count} alone", count)
        assert alone.run(PATTERNS[:1])
        figures = {name: value for name, value in vars(alone.rows[1]).items() if isinstance(value, float)}
        for name, value in figures.items():
            assert getattr(row, name) == pytest.approx(value, rel=1e-5, abs=1e-9), name

    # Of what is known, the dense pictures are made again, as many as are compared.
    seen.clear()
    again = sweep("both", 5, 7)
    assert again.run(PATTERNS)
    assert seen == [(0, "dense"), (3, "dense"), (0, "disc"), (3, "disc"), (6, "disc")]


def test_photographs_are_measured_once(tmp_path: Path) -> None:
    first = references(tmp_path)
    again = sweeping.photograph_statistics(iter(()), Features(), 64, tmp_path / "kept.safetensors")
    assert torch.equal(first.mean, again.mean)
    assert first.count == again.count == 6


@pytest.mark.parametrize(
    "fields", [{"dense_steps": 0.5}, {"dense_layers": [1]}, {"dense_layers": [0, 1, 2]}], ids=str
)
def test_pairs_are_counted_over_layers_and_steps(task: picture_runs.Task, fields: dict[str, Any]) -> None:
    pattern = Pattern(
        "tiles", {"tiles": 2, "shared": "none", "cycle": 2, "dense_layers": 0, "dense_steps": 0} | fields
    )
    method, geometry = picture_runs.method_of(pattern), Geometry((8, 8), text=16)
    with picture_runs.PictureMaker(task, torch.device("cpu")).using(pattern) as drawing:
        drawing.draw(range(1))
        found = drawing.facts()
    assert found.geometry == geometry
    assert found.pairs_kept == pytest.approx(quality.pairs_kept(method, geometry, layers=3, steps=2))
    assert found.tokens_kept is None


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
    method = Hilbert(**PATTERNS[0].fields | {"dense_layers": (0,)})
    recipe, schedule = distill.Recipe(method), Schedule(steps=1, learning_rate=0.1, warm_up=0)
    calls = lambda *_: model.arguments(torch.randn(1, 32, 8, 8), torch.tensor([0.5]))  # noqa: E731
    distill.Distillation(model.transformer, calls, tmp_path, recipe, schedule).run()
    tuned = Pattern("tuned", PATTERNS[0].fields, lora=str(tmp_path / distill.LORA))
    assert tuned.tuning == "LoRA"
    before, with_lora, after = (images for images, _ in pictures_of(task, [PATTERNS[0], tuned, PATTERNS[0]]))
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
    task: picture_runs.Task, patterns: Sequence[Pattern | None]
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
        Pattern("far", FAR),
        Pattern("tuned", FAR | {"summary": "weighted", "dense_steps": 0}, lora=lora_file(tmp_path)),
        PATTERNS[1],  # by a mask
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
        ((_, (graphs,)),) = pictures_of(compiled, PATTERNS[1:])
        made.append(graphs)
    assert 0 < made[0] == made[1]


@pytest.mark.usefixtures("quick")
def test_rows_say_whether_they_were_compiled(two_blocks: picture_runs.Task, tmp_path: Path) -> None:
    by_module = Pattern(
        "by module", {"skip_blocks": [0, 0], "region_size": 16, "placement": "module"}, "Merge"
    )
    out, patterns = tmp_path / "rows.json", [PATTERNS[1], by_module]
    sweep = sweeping.Sweep(replace(two_blocks, compiled=True), lambda: references(tmp_path), Features(), out)
    assert sweep.run(patterns)
    assert [row.compiled for row in sweep.rows] == [True, True, False]
    assert sweep.not_compiled == {"by module": 'with placement="module" tokens are merged inside of blocks'}
    again = sweeping.Sweep(two_blocks, lambda: references(tmp_path), Features(), out)
    assert again.run(patterns)  # the same settings: nothing is measured again
    assert [row.compiled for row in again.rows] == [True, True, False]


def test_methods_that_are_not_compiled_say_why() -> None:
    assert Hilbert().compile_reason is None
    assert Merge().compile_reason is None
    assert FineGrained(predict="online").compile_reason is None
    for method, words in (
        (FineGrained(), "remembered from step to step"),
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
        method = picture_runs.method_of(pattern)
        if isinstance(method, Hilbert | masks.Masked):
            reader = method.layer(geometry, 1, heads=6, device="cpu")
            assert 0 < reader.num_pairs < geometry.num_tokens**2, pattern.name
    names = [pattern.name for patterns in GROUPS.values() for pattern in patterns]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("group", ["chosen", "merge", "peers", "together"])
def test_patterns_that_choose_or_merge_read_less(group: str) -> None:
    pipeline = DemoPipeline(lively_model())
    for pattern in GROUPS[group]:
        method = picture_runs.method_of(pattern)
        size = 192 if isinstance(method, LogLinear) else 128  # of fewer tokens all are chosen
        task = picture_runs.Task(Path("model"), num=1, steps=2, size=size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # LogLinear cautions
            handle = apply(pipeline, method)
        with handle:
            pipeline.sample(range(1), size=task.size, steps=task.steps)
            facts = picture_runs.Drawing(pipeline, task, handle).facts()
        # In two steps lists are only made, by full attention; random tokens are so unlike that a guard keeps them.
        least_left_out = 0 if isinstance(method, FineGrained) else 0.05
        assert 0 < facts.pairs_kept <= 1 - least_left_out, pattern.name
        is_merged = isinstance(method, Merge | Composition | BipartiteMerge)
        assert (facts.tokens_kept is not None) == is_merged
        if isinstance(method, Merge | BipartiteMerge):
            assert facts.tokens_kept == 1 - method.ratio


def test_patterns_with_wrong_fields_are_told_by_name(task: picture_runs.Task, tmp_path: Path) -> None:
    sweep = sweeping.Sweep(task, lambda: references(tmp_path), Features(), tmp_path / "rows.json")
    for pattern, words in (
        (Pattern("a", {"tiles": 0}), "pattern 'a': `tiles` must be at least 1; got 0"),
        (Pattern("b", {"tile": 4}), "pattern 'b': `recipe` must hold fields of Hilbert"),
        (Pattern("c", method="Hilfiger"), "pattern 'c': `recipe` must name a method of BipartiteMerge"),
        (Pattern("d", {"ratio": 1.5}, "Merge"), "pattern 'd': `ratio` must be at least 0 and below 1"),
    ):
        with pytest.raises(ValueError) as raised:
            sweep.run([PATTERNS[0], pattern])
        assert str(raised.value).startswith(words)
    assert not (tmp_path / "rows.json").exists()


def test_patterns_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('[{"name": "a", "fields": {"tiles": 4}, "lora": "x"}]')
    assert read_patterns(str(path)) == [Pattern("a", {"tiles": 4}, lora="x")]
    assert len(read_patterns("tiles,far")) == len(GROUPS["tiles"]) + len(GROUPS["far"])
    path.write_text('[{"nam": "a"}]')
    for text in (str(path), "tiles,x", str(tmp_path / "none.json")):
        with pytest.raises(ValueError, match="got"):
            read_patterns(text)


@pytest.mark.usefixtures("quick")
def test_the_command(
    task: picture_runs.Task,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality, "load_inception", lambda *_: Features())
    (tmp_path / "mine.json").write_text('[{"name": "a", "fields": {"tiles": 2, "dense_steps": 0}}]')
    out, plot = tmp_path / "new" / "rows.json", tmp_path / "rows.png"
    words = ["bench", "quality", "--photographs", str(CATS), "--weights", str(task.weights), "--num", "4"]
    words += ["--patterns", str(tmp_path / "mine.json"), "--size", "64", "--steps", "1", "--out", str(out)]
    strips = tmp_path / "strips"
    assert cli.main([*words, "--plot", str(plot), "--strips", str(strips)]) == 0
    first = {strip.name: np.asarray(Image.open(strip)) for strip in strips.iterdir()}
    assert first.keys() == {"dense.png", "a.png"}
    assert first["dense.png"].shape == first["a.png"].shape == (64, 4 * 64 + 3 * 4, 3)
    assert (first["dense.png"] != first["a.png"]).any()
    printed = capsys.readouterr().out
    assert "| pattern | pairs kept |" in printed
    assert printed.endswith(f"wrote {plot}\nwrote {out}\n")
    before = json.loads(out.read_text())["results"]
    remembering = {"name": "b", "method": "FineGrained", "fields": {"dense_steps": 0}}
    (tmp_path / "mine.json").write_text(json.dumps([remembering]))
    assert cli.main([*words, "--compile"]) == 0
    assert "b: not compiled, its lists are remembered from step to step" in capsys.readouterr().out
    after = json.loads(out.read_text())["results"]
    assert after[:2] == before
    assert [(row["pattern"], row["compiled"]) for row in after[1:]] == [("a", False), ("b", False)]
    assert cli.main(["bench", "quality", "--photographs", ".", "--dry-run", "--patterns", "steps"]) == 0
    assert capsys.readouterr().out.startswith("dense and 4 patterns:\n  10% dense steps\n")
    assert cli.main(["bench", "quality", "--photographs", ".", "--patterns", "x"]) == 2
    assert "`--patterns` must name groups (default, far, " in capsys.readouterr().err
