"""Captured activations, and the table of errors on them, as commands and as a benchmark."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import command_line as cli
from tests import tiny_models
from tests.cats import CATS, lively_model
from tests.remembering import Remembering
from torch import Tensor

from nearfield import Geometry, Hilbert
from nearfield.layout import along
from nearfield.methods import fields
from nearfield.ops import weighted_windows
from nearfield_lab.captured import (
    Read,
    Sample,
    averaged,
    capture,
    latent_sample,
    measured,
    read_samples,
    row_of,
)
from nearfield_lab.captured.dino import samples_by
from nearfield_lab.captured.plain import ROWS, Levels, heads_of
from nearfield_lab.captured.rows import MethodRow, read_by
from nearfield_lab.embedded.model import save_model
from nearfield_lab.training.data import decoded, pictures

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def sample(grid: tuple[int, ...] = (16, 16), text: int = 5, dtype: torch.dtype = torch.float64) -> Sample:
    geometry = Geometry(grid, text)
    generator = torch.Generator().manual_seed(0)
    shape = 2, geometry.num_tokens, 16
    query, key, value = (2 * torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    return Sample("random", geometry, query, key, value, 0.25)


def weights_of(given: Sample) -> Tensor:
    return torch.softmax(given.scale * given.query @ given.key.mT, -1)


def masked(given: Sample, mask: Tensor) -> Tensor:
    scores = given.scale * given.query @ given.key.mT
    return torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ given.value


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [0, 5])
def test_a_method_reads_what_its_mask_holds(text: int) -> None:
    given = sample((12, 16), text)
    method = Hilbert(tiles=4, near="tile", shared="none", far=None, dense_layers=0, dense_steps=0)
    found = read_by(method, given)
    place = torch.arange(given.geometry.num_tokens)
    place[text:] = text + method.ordering(given.geometry).inverse
    mask = method.plan(given.geometry, 1).to_mask()[0][:, place][..., place]
    assert found.kept == pytest.approx(float(mask.double().mean()))
    torch.testing.assert_close(found.out, masked(given, mask))
    assert found.weight is not None
    torch.testing.assert_close(found.weight, (weights_of(given) * mask).sum(-1))


@pytest.mark.parametrize("grain", [1, 16, 64])
def test_the_best_cells_are_those_with_the_largest_weights(grain: int) -> None:
    """As many of every block of queries as the share has room for."""
    given = sample()
    found = ROWS["best keys" if grain == 1 else f"best blocks of {grain}"](given, 0.4)
    assert found is not None
    assert found.weight is not None
    order = torch.arange(given.geometry.num_tokens)
    order[5:] = 5 + along("hilbert", given.geometry, "cpu").order
    weights = weights_of(given)[:, order[5:]][..., order[5:]]
    cells = weights.unflatten(1, (-1, 128)).sum(2).unflatten(2, (-1, grain)).sum(3)
    count = int((0.4 * 261 - 5) / grain)
    keep = torch.zeros_like(cells).scatter(2, cells.topk(count, 2).indices, 1).bool()
    mask = torch.ones(2, 261, 261, dtype=torch.bool)
    mask[:, 5:, 5:] = keep.repeat_interleave(128, 1).repeat_interleave(grain, 2)
    back = order.argsort()
    mask = mask[:, back][..., back]
    assert found.kept == (5 + count * grain) / 261
    torch.testing.assert_close(found.out[:, 5:], masked(given, mask)[:, 5:])
    torch.testing.assert_close(found.weight, (weights_of(given) * mask).sum(-1))


@pytest.mark.parametrize("name", ROWS)
def test_rules_are_dense_where_everything_is_read_and_keep_to_their_share(name: str) -> None:
    given = sample((32, 32), 6)
    whole = ROWS[name](given, 1.0)
    assert whole is not None
    torch.testing.assert_close(whole.out, given.dense[0])
    assert whole.kept <= 1
    some = ROWS[name](given, 0.3)
    assert some is not None
    assert 0.2 < some.kept <= 0.3
    assert ROWS[name](given, 0.001) is None


def test_summaries_are_those_of_the_library() -> None:
    given = sample((16, 16), 5)
    head = heads_of(given)[1]
    moved = given.in_order(along("hilbert", given.geometry, "cpu").order)
    tensors = [x[None, 1:, 5:].contiguous() for x in (moved.query, moved.key, moved.value)]
    sizes = torch.full((16,), 16, dtype=torch.int32)
    starts = 16 * torch.arange(16)
    keys, values, _ = weighted_windows(*tensors, starts, sizes, 16, scale=0.25)
    torch.testing.assert_close(head.summaries(16).key, keys[0, 0])
    torch.testing.assert_close(head.summaries(16).value, values[0, 0])


def test_levels_read_every_token_once() -> None:
    head = heads_of(sample((64, 32), 5))[0]
    for rule in ("around", "routed", "descended"):
        exact, *levels = Levels(rule, 4).chosen(head, 20)  # type: ignore[arg-type]
        counts = exact.repeat_interleave(16, 1).int()
        for window, mask in zip((16, 64, 256, 1024), levels, strict=True):
            counts += mask.repeat_interleave(window, 1).int()
        assert bool((counts == 1).all())
        assert exact.sum(1).tolist() == [20] * 16


def test_the_values_of_a_field_are_chosen_by_the_share() -> None:
    given = sample((32, 32), 6, torch.float32)
    row = row_of("hilbert near=tile far=none summary=mean tiles=2|8|16")
    assert isinstance(row, MethodRow)
    assert [fields.texts_of(method)["tiles"] for method in row.methods] == ["2", "8", "16"]
    for share, tiles in ((0.9, 2), (0.2, 8), (0.1, 16)):
        found = row(given, share)
        assert found is not None
        wanted = read_by(Hilbert(near="tile", far=None, summary="mean", tiles=tiles), given)
        assert (found.kept, bool(torch.equal(found.out, wanted.out))) == (wanted.kept, True)
    assert row(given, 0.01) is None
    ladder = row_of("hilbert tiles=*")
    assert isinstance(ladder, MethodRow)
    assert [method.tiles for method in ladder.methods] == list(Hilbert.ladders["tiles"])  # type: ignore[attr-defined]
    blocks = row_of("hilbert near=tile tiles=8 blocks=128x64")
    assert isinstance(blocks, MethodRow)
    assert blocks.blocks == {"q_block": 128, "k_block": 64}


def test_a_method_with_a_memory_is_read_at_a_step_between_two_decisions() -> None:
    given = sample((16, 16), 5, torch.float32)
    found = read_by(Remembering(16, 4), given)
    assert 0 < found.kept < 1
    assert 0 < float((found.out - given.dense[0]).norm() / given.dense[0].norm()) < 0.5


def first_half(given: Sample, share: float) -> Read | None:
    """A rule of a user: the first keys alone."""
    mask = torch.arange(given.geometry.num_tokens) < share * given.geometry.num_tokens
    return Read(masked(given, mask), float(mask.float().mean())) if bool(mask.any()) else None


def test_a_function_of_ones_own_is_a_row() -> None:
    given = sample()
    row = row_of(f"{__name__}:first_half")
    (found,) = measured([given], {"mine": row}, [0.5])
    mask = torch.arange(261) < 0.5 * 261
    want = given.dense[0][:, 5:]
    errors = (masked(given, mask)[:, 5:] - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert found["errors"] == pytest.approx(errors.tolist())


def test_rows_without_a_figure_say_why() -> None:
    rows = {"best keys": ROWS["best keys"], "too many": ROWS["routed, 4"]}
    records = list(measured([sample((16, 16), 5)], rows, [0.5, 0.01]))
    means = {(each["case"], each["share"]): each for each in averaged(records)}
    assert means["best keys", 0.5]["heads"] == 2
    assert means["best keys", 0.01]["note"] == "it reads more, whatever its fields"
    assert means["too many", 0.5]["note"] == "256 tokens have 3 levels, not 4"
    assert [each["share"] for each in averaged(records)] == [0.5, 0.5, 0.01, 0.01]


# -- capturing ---------------------------------------------------------------------------------------------------------


def test_layers_are_captured_in_raster_order(tmp_path: Path) -> None:
    model, inputs = tiny_models.pixart(2), tiny_models.pixart_inputs((6, 8), 2)
    tokens: list[Tensor] = []
    attention = model.transformer_blocks[1].attn1
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(args[0]), with_kwargs=True
    )
    assert capture(model, lambda: model(**inputs), tmp_path, layers=[1]) == 1
    hook.remove()
    (found,) = read_samples(tmp_path)
    assert (found.name, found.geometry, found.scale) == ("model-step00-layer01", Geometry((6, 8)), 0.25)
    wanted = attention.to_q(tokens[0]).unflatten(-1, (2, -1)).transpose(1, 2)[-1]
    torch.testing.assert_close(found.query, wanted)


def test_text_that_is_hidden_is_left_out(tmp_path: Path) -> None:
    """The second prompt of this batch is three tokens shorter."""
    model = tiny_models.qwen(1)
    capture(model, lambda: model(**tiny_models.qwen_inputs((6, 4), 2)), tmp_path)
    (found,) = read_samples(tmp_path)
    assert found.geometry.text == tiny_models.TEXT - 3
    assert found.query.shape == (2, found.geometry.num_tokens, tiny_models.HEAD_DIM)


def test_a_capture_goes_on_where_it_ended(tmp_path: Path) -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((6, 8))
    calls = []

    def call() -> None:
        calls.append(1)
        model(**inputs)
        raise KeyboardInterrupt

    def once(**options: Any) -> int:
        return capture(model, call, tmp_path, steps=[0], **options)

    assert once(layers=[0, 3]) == 2  # the call is left as soon as nothing is missing
    assert once(layers=[0, 3]) == 0
    assert len(calls) == 1
    first = (tmp_path / "model-step00-layer00.safetensors").stat().st_mtime_ns
    assert once(layers=[0, 1, 3]) == 1
    with pytest.raises(KeyboardInterrupt):
        capture(model, call, tmp_path)  # nobody knows how many steps there are
    assert len(list(tmp_path.iterdir())) == 5
    assert (tmp_path / "model-step00-layer00.safetensors").stat().st_mtime_ns == first


def test_tokens_of_a_latent() -> None:
    latent = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    found = latent_sample(latent)
    assert found.geometry == Geometry((2, 2, 3))
    normal = (latent - latent.mean((1, 2, 3), keepdim=True)) / latent.flatten(1).std(1)[:, None, None, None]
    # The token in the second frame, first row, third column.
    wanted = normal[:, 1, 0:2, 4:6].flatten()
    torch.testing.assert_close(found.query[0, 1 * 6 + 0 * 3 + 2].sort().values, wanted.sort().values)
    assert latent_sample(latent[:, 0]).geometry == Geometry((2, 3))
    with pytest.raises(ValueError, match="`latent` must have 3 or 4 sides, the last two multiples of 2"):
        latent_sample(latent[..., :5])


def test_the_network_of_photographs_is_captured() -> None:
    """Of random weights: the first layer reads the patches with their places, behind five others."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    weights = {"patch_embed.proj.weight": random(384, 3, 14, 14), "patch_embed.proj.bias": random(384)}
    weights |= {"pos_embed": random(1, 1370, 384), "cls_token": random(1, 1, 384)}
    weights |= {"register_tokens": random(1, 4, 384)}
    for index in range(12):
        for name, shape in {
            "norm1": (384,), "norm2": (384,), "attn.qkv": (1152, 384), "attn.proj": (384, 384),
            "mlp.fc1": (96, 384), "mlp.fc2": (384, 96),
        }.items():  # fmt: skip
            weights[f"blocks.{index}.{name}.weight"] = random(*shape)
            weights[f"blocks.{index}.{name}.bias"] = random(shape[0])
        for name in ("ls1", "ls2"):
            weights[f"blocks.{index}.{name}.gamma"] = random(384)
    image = decoded(pictures(CATS)[0], 28)
    first, second = samples_by(weights, image, [0, 11], 2)
    assert (first.geometry, second.name) == (Geometry((2, 2), text=5), "dino-step00-layer11")
    start = weights["cls_token"][0, 0] + weights["pos_embed"][0, 0]
    normed = torch.nn.functional.layer_norm(
        start, (384,), weights["blocks.0.norm1.weight"], weights["blocks.0.norm1.bias"], 1e-6
    )
    wanted = weights["blocks.0.attn.qkv.weight"] @ normed + weights["blocks.0.attn.qkv.bias"]
    torch.testing.assert_close(
        first.query[:, 0].float(), wanted[:384].view(6, 64)[[0, 3]], rtol=1e-3, atol=1e-3
    )


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "model.safetensors", lively_model())
    folder, out = tmp_path / "captured", tmp_path / "errors.json"
    call = ["capture", "--weights", str(tmp_path / "model.safetensors"), "--size", "256", "--steps", "3"]
    call += ["--at", "0,2", "--layers", "0,2", "--out", str(folder), "--device", "cpu"]
    assert cli.main(call) == 0
    assert f"wrote 4 files to {folder}" in capsys.readouterr().out
    assert cli.main(call) == 0
    assert f"wrote 0 files to {folder}" in capsys.readouterr().out
    names = [each.name for each in read_samples(folder)]
    assert names == [f"seed0-step{step:02}-layer{layer:02}" for step in (0, 2) for layer in (0, 2)]
    rows = ["--row", "best keys", "--row", "hilbert near=tile far=none summary=mean tiles=8|4"]
    words = ["errors", str(folder), *rows, "--shares", "0.5,0.01", "--device", "cpu", "--json", str(out)]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "it reads more, whatever its fields" in text
    document = json.loads(out.read_text())
    assert len(document["results"]) == 4 * 2 * 2
    for line in averaged(document["results"])[:2]:
        assert f"{line['error']:.4f}" in text
        assert line["heads"] == 8
    assert str(tmp_path) not in json.dumps(document["results"])


def test_a_latent_is_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"latents": torch.randn(2, 4, 3, 8, 8)}, tmp_path / "latents.safetensors")
    words = ["capture", "--latent", str(tmp_path / "latents.safetensors"), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert [each.geometry.grid for each in read_samples(tmp_path / "out")] == [(3, 4, 4)] * 2


def test_the_benchmark_is_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "captured", tmp_path / "errors.json"
    folder.mkdir()
    sample((16, 16), 5, torch.float32).write(folder / "one.safetensors")
    words = [
        "bench",
        "errors",
        "--captured",
        str(folder),
        "--cases",
        "best*",
        "--shares",
        "0.5",
        "--device",
        "cpu",
    ]
    assert cli.main([*words, "--case", '{"row": "hilbert tiles=8"}', "--json", str(out)]) == 0
    text = capsys.readouterr().out
    records = json.loads(out.read_text())["results"]
    names = ["best keys", "best blocks of 16", "best blocks of 64", "case"]
    assert [record["case"] for record in records] == names
    best = read_by(Hilbert(tiles=8), next(iter(read_samples(folder))).to("cpu"))
    assert records[3]["note"] or records[3]["kept"] == pytest.approx(best.kept)
    assert f"{averaged(records)[0]['error']:.4f}" in text
    assert cli.main([*words, "--json", str(out), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("0 to measure")


BAD_CALLS = {
    "capture --at 8": "`--at` must be numbers of steps below 8; got 8.",
    "capture --photo x": "`--photo` must be given with `--dino`, and only there; got x.",
    "capture --model x": "`--prompt` must be given with `--model`, and only there; got None.",
    "capture --size 60": "`size` must be one or two multiples of 8 pixels; got 60.",
    "errors none": "`DIR` must hold captured activations. none holds no captured activations.",
    "errors none --row nobody": "`--row` must name a rule, a method or a function; got 'nobody'. `method` must ",
    "bench errors": "`--captured` must name a folder of `nearfield capture`; got 'None'.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(call.split()) == 2
    assert BAD_CALLS[call] in capsys.readouterr().err


# -- committed results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recall-wan21-latents", "recall-cats512"])
def test_committed_results_keep_more_the_finer_they_choose(name: str) -> None:
    document = json.loads((RESULTS / f"{name}.json").read_text())
    assert not document["machine"]["commit"].endswith("+")
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for one in document["results"]:
        groups.setdefault((one["pattern"], one["by"], one["tiles"]), []).append(one)
    means = {
        key: {name: fmean(one[name] for one in group) for name in ("kept", "recall")}
        for key, group in groups.items()
    }
    patterns = [f"grain {grain}" if grain < 16 else f"blocks of {grain}" for grain in (1, 4, 8, 16, 64, 128)]
    for tiles in (2, 4, 8, 16):
        found = [means[pattern, "weights", tiles] for pattern in patterns]
        runs = means["Hilbert runs", "place", tiles]
        assert all(one["kept"] <= 1.001 * runs["kept"] for one in found)
        shares = [one["recall"] for one in found]
        assert shares == sorted(shares, reverse=True)
        assert shares[2] > runs["recall"]
