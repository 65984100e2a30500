"""The sweep over patterns: what it measures, that it goes on, and its masks."""

import json
from pathlib import Path

import pytest
import torch
from tests.cats import CATS, lively_model
from torch import Tensor, nn

from nearfield import Geometry, Hilbert, apply, cli, quality
from nearfield.bench import quality as sweeping
from nearfield.bench.quality_cases import GROUPS, Pattern, read_patterns
from nearfield.demo.model import save_model
from nearfield.training import distill
from nearfield.training.data import batches, pictures
from nearfield.training.loop import Schedule

PATTERNS = [
    Pattern("2 tiles", {"tiles": 2, "shared": "none", "dense_layers": [0], "dense_steps": 0}),
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
def task(tmp_path: Path) -> sweeping.Task:
    save_model(tmp_path / "model.safetensors", lively_model())
    return sweeping.Task(tmp_path / "model.safetensors", num=4, steps=2, size=64, batch=3)


def references(folder: Path) -> quality.Statistics:
    return sweeping.photograph_statistics(
        batches(pictures(CATS), 64), Features(), 64, folder / "kept.safetensors"
    )


def test_patterns_are_measured_once(task: sweeping.Task, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    seen: list[str] = []

    def sweep() -> sweeping.Sweep:
        return sweeping.Sweep(
            task, references(tmp_path), Features(), out, on_picture=lambda _, name: seen.append(name)
        )

    assert not sweep().run(PATTERNS, has_time=lambda: len(set(seen)) < 2)
    assert [row["pattern"] for row in json.loads(out.read_text())["results"]] == ["dense", "2 tiles"]
    again = sweep()
    assert again.run(PATTERNS)
    dense, tiles, disc = again.rows
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


def test_photographs_are_measured_once(tmp_path: Path) -> None:
    first = references(tmp_path)
    again = sweeping.photograph_statistics(iter(()), Features(), 64, tmp_path / "kept.safetensors")
    assert torch.equal(first.mean, again.mean)
    assert first.count == again.count == 6


def test_pairs_are_counted_over_layers_and_steps() -> None:
    geometry = Geometry((16, 16), text=16)
    method = Hilbert(tiles=4, shared="none", dense_layers=0, dense_steps=0)
    alone = sum(method.plan(geometry, layer).num_pairs for layer in range(4)) / 4 / geometry.num_tokens**2
    cpu = torch.device("cpu")
    assert sweeping.pairs_kept(method, geometry, 4, 2, 10, cpu) == pytest.approx(alone)
    steps = Hilbert(tiles=4, shared="none", dense_layers=0, dense_steps=0.2)
    assert sweeping.pairs_kept(steps, geometry, 4, 2, 10, cpu) == pytest.approx(0.2 + 0.8 * alone)
    layers = Hilbert(tiles=4, shared="none", dense_layers=(0, 1, 2, 3), dense_steps=0)
    assert sweeping.pairs_kept(layers, geometry, 4, 2, 10, cpu) == 1


def test_masks_read_what_they_say() -> None:
    geometry = Geometry((4, 5), text=3)
    disc = sweeping.Masked("window", radius=1).reader(geometry, 0, heads=1, device="cpu").mask
    assert disc[:3].all()
    assert disc[:, :3].all()
    assert disc[3 + 7, 3:].nonzero().flatten().tolist() == [2, 6, 7, 8, 12]  # a cross around row 1, column 2
    band = sweeping.Masked("band", width=4).reader(geometry, 0, heads=1, device="cpu").mask
    assert band[3 + 7, 3:].nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_a_mask_that_hides_nothing_is_dense() -> None:
    model = lively_model()
    x, level = torch.randn(1, 32, 4, 4), torch.tensor([0.5])
    dense = model(x, level)
    with apply(model.transformer, sweeping.Masked("window", radius=99)):
        torch.testing.assert_close(model(x, level), dense, rtol=1e-4, atol=1e-4)
    with apply(model.transformer, sweeping.Masked("window", radius=1)) as handle:
        assert not torch.allclose(model(x, level), dense, rtol=1e-3, atol=1e-3)
        assert "window, pairs kept" in handle.summary()


def test_a_lora_serves_its_pattern_alone(task: sweeping.Task, tmp_path: Path) -> None:
    model = lively_model()
    method = Hilbert(**PATTERNS[0].fields | {"dense_layers": (0,)})
    recipe, schedule = distill.Recipe(method), Schedule(steps=1, learning_rate=0.1, warm_up=0)
    calls = lambda *_: model.arguments(torch.randn(1, 32, 8, 8), torch.tensor([0.5]))  # noqa: E731
    distill.Distillation(model.transformer, calls, tmp_path, recipe, schedule).run()
    tuned = Pattern("tuned", PATTERNS[0].fields, lora=str(tmp_path / distill.LORA))
    assert tuned.tuning == "LoRA"
    sweep = sweeping.Sweep(task, references(tmp_path), Features(), tmp_path / "rows.json")
    before = sweep._pictures(PATTERNS[0])
    assert not torch.equal(sweep._pictures(tuned), before)
    assert torch.equal(sweep._pictures(PATTERNS[0]), before)


@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_patterns_of_the_embedded_model(group: str) -> None:
    # Masks are as large as the square of what they hide.
    geometry = Geometry((32, 32) if group == "rivals" else (64, 64), text=64)
    for pattern in GROUPS[group]:
        method = sweeping.method_of(pattern)
        reader = method.reader(geometry, 1, heads=6, device="cpu")
        assert 0 < reader.num_pairs < geometry.num_tokens**2, pattern.name
    names = [pattern.name for patterns in GROUPS.values() for pattern in patterns]
    assert len(names) == len(set(names))


def test_patterns_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('[{"name": "a", "fields": {"tiles": 4}, "lora": "x"}]')
    assert read_patterns(str(path)) == [Pattern("a", {"tiles": 4}, lora="x")]
    assert len(read_patterns("tiles,far")) == len(GROUPS["tiles"]) + len(GROUPS["far"])
    path.write_text('[{"nam": "a"}]')
    for text in (str(path), "tiles,x", str(tmp_path / "none.json")):
        with pytest.raises(ValueError, match="got"):
            read_patterns(text)


def test_the_command(
    task: sweeping.Task, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "load_inception", lambda *_: Features())
    (tmp_path / "mine.json").write_text('[{"name": "a", "fields": {"tiles": 2, "dense_steps": 0}}]')
    out, plot = tmp_path / "new" / "rows.json", tmp_path / "rows.png"
    words = ["bench", "quality", "--photographs", str(CATS), "--weights", str(task.weights), "--num", "4"]
    words += ["--patterns", str(tmp_path / "mine.json"), "--size", "64", "--steps", "1", "--out", str(out)]
    assert cli.main([*words, "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "| pattern | pairs kept |" in printed
    assert printed.endswith(f"wrote {plot}\nwrote {out}\n")
    assert cli.main(["bench", "quality", "--photographs", ".", "--dry-run", "--patterns", "steps"]) == 0
    assert capsys.readouterr().out.startswith("dense and 4 patterns:\n  10% dense steps\n")
    assert cli.main(["bench", "quality", "--photographs", ".", "--patterns", "x"]) == 2
    assert "`--patterns` must name groups (tiles, default, " in capsys.readouterr().err
