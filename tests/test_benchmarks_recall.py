"""`python -m benchmarks recall`: the mass that patterns hold, against weights written out."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import recall
from safetensors.torch import save_file
from tests import tiny_models
from tests.cats import CATS
from tests.command_line import main
from torch import Tensor

from nearfield.layout.geometry import Geometry
from nearfield.layout.ordering import along
from nearfield.methods import Hilbert
from nearfield.ops.predict.api import Blocks
from nearfield_lab.embedded.model import ModelConfig, TinyFlux, save_model

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def sample(text: int = 0) -> recall.Sample:
    geometry = Geometry((12, 16), text)
    generator = torch.Generator().manual_seed(0)
    query, key = (
        2 * torch.randn(1, 2, geometry.num_tokens, 16, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    return recall.Sample("random", geometry, query, key, 0.25)


def weights_of(given: recall.Sample) -> Tensor:
    return torch.softmax(given.scale * given.query @ given.key.mT, -1)


@pytest.mark.parametrize("text", [0, 5])
def test_runs_hold_what_their_mask_holds(text: int) -> None:
    given = sample(text)
    method = Hilbert(tiles=4, near="tile", shared="none", dense_layers=0, dense_steps=0)
    found = recall.run_recall(given, recall.full_lse(given), 4)
    inverse = method.ordering(given.geometry).inverse
    place = torch.arange(given.geometry.num_tokens)
    place[text:] = text + inverse
    mask = method.plan(given.geometry, 0).to_mask()[:, :, place][..., place]
    assert found["kept"] == pytest.approx(float(mask.double().mean()))
    assert found["recall"] == pytest.approx(float((weights_of(given) * mask).sum(-1).mean()))


@pytest.mark.parametrize(("text", "rows"), [(0, 128), (5, 128), (5, 16)])
def test_chosen_blocks_hold_what_their_mask_holds(text: int, rows: int) -> None:
    """With the largest weights, and as many pairs as the runs have."""
    given = sample(text)
    results = list(recall.measured(given, (4,), rows))
    runs = next(result for result in results if result["pattern"] == recall.RUNS)
    found = next(result for result in results if (result["pattern"], result["by"]) == ("grain 4", "weights"))
    tokens = given.geometry.num_tokens
    order = torch.arange(tokens)
    order[text:] = text + along("hilbert", given.geometry, "cpu").order
    weights = weights_of(given)[:, :, order][..., order]
    blocks = Blocks(rows, 4, tokens, tokens, (given.geometry.text_span,))
    largest = torch.stack([part.amax(2) for part in weights.split(rows, 2)], 2)
    largest = torch.stack([columns.amax(-1) for columns in largest.split(4, -1)], -1)
    keep = recall.largest(largest, blocks, runs["kept"])
    spread = keep.repeat_interleave(rows, 2)[:, :, :tokens].repeat_interleave(4, 3)[..., :tokens]
    assert found["recall"] == pytest.approx(float((weights * spread).sum(-1).mean()))
    assert found["kept"] == pytest.approx(float(spread.double().mean()))
    if not text:  # a block of queries that holds text reads all
        assert found["kept"] == pytest.approx(runs["kept"], abs=0.01)


def test_the_largest_are_kept_and_no_row_is_empty() -> None:
    maxima = torch.tensor([[[[0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.05, 0.0]]]])
    keep = recall.largest(maxima, Blocks(16, 4, 32, 16), 0.5)
    assert keep.tolist() == [[[[True, True, True, False], [False, True, False, False]]]]


def test_layers_of_a_model_are_recorded_in_raster_order() -> None:
    model, inputs = tiny_models.pixart(1), tiny_models.pixart_inputs((6, 8), 2)
    tokens: list[Tensor] = []
    attention = model.transformer_blocks[0].attn1
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(args[0]), with_kwargs=True
    )
    samples = recall.recorded(model, lambda: model(**inputs))
    hook.remove()
    assert [one.name for one in samples] == ["layer 0"]
    assert samples[0].geometry == Geometry((6, 8))
    wanted = attention.to_q(tokens[0]).unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(samples[0].query, wanted)


def test_tokens_of_a_latent() -> None:
    latent = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    found = recall.latent_sample(latent)
    assert found.geometry == Geometry((2, 2, 3))
    normal = (latent - latent.mean((1, 2, 3), keepdim=True)) / latent.flatten(1).std(1)[:, None, None, None]
    # The token in the second frame, first row, third column.
    wanted = normal[:, 1, 0:2, 4:6].flatten()
    torch.testing.assert_close(found.query[0, 0, 1 * 6 + 0 * 3 + 2].sort().values, wanted.sort().values)
    assert recall.latent_sample(latent[:, 0]).geometry == Geometry((2, 3))


def smooth_latent() -> Tensor:
    """Neighbours are alike, as in a video."""
    rough = torch.randn(1, 8, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(rough, scale_factor=(1, 4, 4), mode="trilinear")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"latents": smooth_latent()}, tmp_path / "latents.safetensors")
    arguments = ["--latents", str(tmp_path / "latents.safetensors"), "--tiles", "2,8"]
    written = ["--json", str(tmp_path / "recall.json"), "--plot", str(tmp_path / "recall.png")]
    assert main(["bench", "recall", *arguments, *written, "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "tokens of a latent: 3x12x16, 1 samples" in told
    document = json.loads((tmp_path / "recall.json").read_text())
    assert (tmp_path / "recall.png").stat().st_size > 1000
    records = {(one["pattern"], one["by"], one["tiles"]): one for one in document["results"]}
    assert len(records) == 2 * (1 + 2 * len(recall.GRAINS))
    for tiles in (2, 8):
        fine, coarse = (records[name, "weights", tiles] for name in ("grain 1", "blocks of 128"))
        assert f"{fine['recall']:.1%}" in told
        assert fine["recall"] > coarse["recall"]
        assert fine["kept"] == pytest.approx(records[recall.RUNS, "place", tiles]["kept"], abs=0.01)


def test_the_command_on_the_embedded_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(joint_blocks=1, single_blocks=1, heads=2, head_dim=16, condition_tokens=4, size=64)
    save_model(tmp_path / "model.safetensors", TinyFlux(config))
    arguments = ["--weights", str(tmp_path / "model.safetensors"), "--images", str(CATS), "--num", "2"]
    assert main(["bench", "recall", *arguments, "--tiles", "2", "--device", "cpu"]) == 0
    assert "layers of the embedded model: 4 text + 8x8, 4 samples" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["recall-wan21-latents", "recall-cats512"])
def test_committed_results_keep_more_the_finer_they_choose(name: str) -> None:
    document = json.loads((RESULTS / f"{name}.json").read_text())
    assert not document["machine"]["commit"].endswith("+")
    means = {(one["pattern"], one["by"], one["tiles"]): one for one in recall.averaged(document["results"])}
    patterns = [f"grain {grain}" if grain < 16 else f"blocks of {grain}" for grain in recall.GRAINS]
    for tiles in recall.TILES:
        found = [means[pattern, "weights", tiles] for pattern in patterns]
        kept = means[recall.RUNS, "place", tiles]["kept"]
        assert all(one["kept"] <= 1.001 * kept for one in found)
        shares = [one["recall"] for one in found]
        assert shares == sorted(shares, reverse=True)
        assert shares[2] > means[recall.RUNS, "place", tiles]["recall"]


def test_samples_that_are_known_are_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"latents": smooth_latent()}, tmp_path / "latents.safetensors")
    words = ["bench", "recall", "--latents", str(tmp_path / "latents.safetensors"), "--tiles", "2"]
    words += ["--json", str(tmp_path / "recall.json")]
    assert main(words) == 0
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 to measure")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`--latents` must be given, or `--weights`; got neither."),
        (["--weights", "model.safetensors"], "`--images` must be given with `--weights`; got None."),
        (["--latents", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["--latents", "x.safetensors", "--noise", "2"], "`--noise` must lie between 0 and 1; got 2.0."),
    ],
)
def test_wrong_use_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "recall", *arguments]) == 2
    assert message in capsys.readouterr().err
