"""Distances between sets of images and between pairs: closed forms, invariances, and photographs."""

import math
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nearfield_lab.quality import (
    Statistics,
    cosine_distance,
    features_of,
    fid,
    frechet_distance,
    kernel_distance,
    load_lpips,
    open_images,
    precision_recall,
    psnr,
    ssim,
)
from nearfield_lab.quality.lpips import WEIGHTS

pytest.importorskip("PIL")
pytest.importorskip("safetensors")

DATA = Path(__file__).with_name("data")
SMALL, LARGE = DATA / "quality-cats-64.webp", DATA / "quality-cats-128.webp"


def cats(path: Path, size: int) -> Tensor:
    images = open_images(path, sheet_cell=size)
    return next(images.batches(len(images), None))


def noisy(images: Tensor, deviation: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(images.shape, generator=generator) * deviation
    return (images + noise).round().clamp(0, 255).byte()


def blurred(images: Tensor, reach: int) -> Tensor:
    padded = nn.functional.pad(images.double(), (reach,) * 4, mode="replicate")
    return nn.functional.avg_pool2d(padded, 2 * reach + 1, stride=1).round().byte()


# -- Fréchet distance --------------------------------------------------------------------------------------------------


def gaussian(mean: Tensor, covariance: Tensor) -> Statistics:
    return Statistics(mean.double(), covariance.double(), count=100)


def random_features(count: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64) @ mix + seed


def distance_by_singular_values(first: Tensor, second: Tensor) -> float:
    """The same distance without a covariance: the last trace is the nuclear norm of the product of the samples."""
    parts = [(x - x.mean(dim=0)) / math.sqrt(len(x) - 1) for x in (first, second)]
    cross = torch.linalg.svdvals(parts[0] @ parts[1].T).sum()
    traces = sum(part.square().sum() for part in parts)
    return float((first.mean(dim=0) - second.mean(dim=0)).square().sum() + traces - 2 * cross)


def test_frechet_distance_of_diagonal_gaussians() -> None:
    first = gaussian(torch.tensor([1.0, 2.0, 3.0]), torch.diag(torch.tensor([4.0, 9.0, 1.0])))
    second = gaussian(torch.tensor([1.0, 0.0, 3.0]), torch.diag(torch.tensor([1.0, 9.0, 25.0])))
    assert frechet_distance(first, second) == pytest.approx(4 + (2 - 1) ** 2 + 0 + (1 - 5) ** 2)


def test_frechet_distance_of_turned_gaussians() -> None:
    """In the plane the trace of the root of a matrix is sqrt(trace + 2 sqrt(determinant))."""
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    first = torch.diag(torch.tensor([5.0, 0.5], dtype=torch.float64))
    second = turn @ torch.diag(torch.tensor([2.0, 3.0], dtype=torch.float64)) @ turn.T
    product = first @ second
    root = (product.trace() + 2 * product.det().sqrt()).sqrt()
    expected = float(first.trace() + second.trace() - 2 * root)
    zero = torch.zeros(2)
    assert frechet_distance(gaussian(zero, first), gaussian(zero, second)) == pytest.approx(expected)


@pytest.mark.parametrize("counts", [(300, 200), (30, 20), (30, 200), (2, 3)])
def test_frechet_distance_with_any_rank(counts: tuple[int, int]) -> None:
    """Also where there are fewer images than features, and the covariances have no inverse."""
    first, second = (random_features(count, 48, seed) for seed, count in enumerate(counts))
    expected = distance_by_singular_values(first, second)
    found = frechet_distance(Statistics.of(first), Statistics.of(second))
    assert found == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(Statistics.of(second), Statistics.of(first)) == pytest.approx(found, rel=1e-6)


def test_frechet_distance_is_zero_for_equal_sets_and_blind_to_rotations() -> None:
    first, second = random_features(40, 64, 1), random_features(50, 64, 2)
    turn = torch.linalg.qr(random_features(64, 64, 3))[0]
    assert frechet_distance(Statistics.of(first), Statistics.of(first)) == pytest.approx(0, abs=1e-4)
    turned = frechet_distance(Statistics.of(first @ turn), Statistics.of(second @ turn))
    assert turned == pytest.approx(frechet_distance(Statistics.of(first), Statistics.of(second)), rel=1e-6)


def test_frechet_distance_adds_the_offset() -> None:
    features = random_features(50, 16, 1).float()
    moved = features + 3
    found = frechet_distance(Statistics.of(features), Statistics.of(moved))
    assert found == pytest.approx(9 * 16, rel=1e-5)


def test_statistics_are_unbiased_and_survive_a_file(tmp_path: Path) -> None:
    features = random_features(30, 8, 4)
    made = Statistics.of(features, size=128)
    torch.testing.assert_close(made.covariance, torch.cov(features.T))
    made.save(tmp_path / "deep" / "cats.safetensors")
    read = Statistics.load(tmp_path / "deep" / "cats.safetensors")
    assert (read.count, read.size) == (30, 128)
    assert torch.equal(read.mean, made.mean)
    assert torch.equal(read.covariance, made.covariance)
    assert read.features is not None
    assert torch.equal(read.features, features.float())
    elsewhere = made.to("meta")
    assert all(
        x is not None and x.is_meta for x in (elsewhere.mean, elsewhere.covariance, elsewhere.features)
    )
    assert (elsewhere.count, elsewhere.size) == (made.count, made.size)
    made.save(tmp_path / "small.safetensors", with_features=False)
    assert Statistics.load(tmp_path / "small.safetensors").features is None
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_features_of_keeps_the_order() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False))
    images = torch.arange(7 * 12.0).view(7, 3, 2, 2)
    found = features_of(images.split(3), network)
    torch.testing.assert_close(found, network(images).detach())


def test_cosine_distance_by_hand() -> None:
    first = torch.tensor([[1.0, 0.0], [3.0, 4.0], [1.0, 1.0]])
    second = torch.tensor([[0.0, 5.0], [6.0, 8.0], [-1.0, -1.0]])
    torch.testing.assert_close(cosine_distance(first, second), torch.tensor([1.0, 0.0, 2.0]).double())


# -- kernel distance, precision and recall -----------------------------------------------------------------------------


def test_kernel_distance_by_hand() -> None:
    first = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    second = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0]])

    def kernel(x: Tensor, y: Tensor) -> float:
        return (float(x @ y) / 2 + 1) ** 3

    def mean(pairs: list[tuple[Tensor, Tensor]]) -> float:
        return sum(kernel(x, y) for x, y in pairs) / len(pairs)

    within = [[(x, y) for i, x in enumerate(s) for j, y in enumerate(s) if i != j] for s in (first, second)]
    across = [(x, y) for x in first for y in second]
    expected = mean(within[0]) + mean(within[1]) - 2 * mean(across)
    found = kernel_distance(first, second, blocks=1)
    assert found.value == pytest.approx(expected)
    assert math.isnan(found.error)


def test_kernel_distance_is_unbiased_and_knows_its_error() -> None:
    """Over many draws from one distribution the estimates scatter around zero, as widely as their errors say."""
    found = []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        both = torch.randn(2, 200, 16, generator=generator)
        found.append(kernel_distance(both[0], both[1], seed=seed))
    values = torch.tensor([each.value for each in found])
    assert abs(values.mean()) < 3 * values.std() / math.sqrt(len(values))
    errors = torch.tensor([each.error for each in found])
    assert 0.6 < float(errors.mean() / values.std()) < 1.6


def test_kernel_distance_finds_a_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 200, 16, generator=generator)
    near, far = kernel_distance(first, second + 0.2), kernel_distance(first, second + 1)
    assert far.value > near.value > 0
    assert far.value > 10 * far.error


def test_precision_and_recall_of_equal_far_and_partial_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(100, 8, generator=generator)
    assert precision_recall(points, points) == (1.0, 1.0)
    assert precision_recall(points, points + 100) == (0.0, 0.0)
    both = torch.cat([points, points + 100])
    assert precision_recall(points, both) == (1.0, 0.5)
    assert precision_recall(both, points) == (0.5, 1.0)


def test_precision_and_recall_by_hand() -> None:
    """On a line with k = 1: the reach of 0, 1, 4 is 1, 1, 3; the samples have the reach 1.5, 1.5, 13.5."""
    references = torch.tensor([[0.0], [1.0], [4.0]])
    samples = torch.tensor([[1.5], [3.0], [16.5]])
    found = precision_recall(samples, references, neighbours=1)
    assert found.precision == pytest.approx(2 / 3)
    assert found.recall == 1


def test_precision_and_recall_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 60, 4, generator=generator)
    whole = precision_recall(first, second)
    monkeypatch.setattr(fid, "_MOST_DISTANCES", 7 * 60)
    assert precision_recall(first, second) == whole


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_psnr_by_hand() -> None:
    first = torch.full((2, 3, 4, 4), 100, dtype=torch.uint8)
    second = first + torch.tensor([5, 0], dtype=torch.uint8).view(2, 1, 1, 1)
    found = psnr(first, second)
    assert found[0] == pytest.approx(10 * math.log10(255**2 / 25))
    assert found[1] == math.inf


def test_ssim_by_hand() -> None:
    """One window, written out."""
    first, second = (image[None, :1, 20:31, 30:41] for image in cats(SMALL, 64)[:2])
    place = torch.arange(11, dtype=torch.float64) - 5
    weight = torch.exp(-(place[:, None] ** 2 + place[None] ** 2) / (2 * 1.5**2))
    weight = weight / weight.sum()
    x, y = first[0, 0].double(), second[0, 0].double()
    mean_x, mean_y = (weight * x).sum(), (weight * y).sum()
    variances = (weight * (x - mean_x) ** 2).sum() + (weight * (y - mean_y) ** 2).sum()
    covariance = (weight * (x - mean_x) * (y - mean_y)).sum()
    c1, c2 = 2.55**2, 7.65**2
    expected = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    expected /= (mean_x**2 + mean_y**2 + c1) * (variances + c2)
    torch.testing.assert_close(ssim(first, second), expected[None])


def test_similarity_of_photographs_falls_with_damage() -> None:
    images = cats(SMALL, 64)
    assert torch.allclose(ssim(images, images), torch.ones(16, dtype=torch.float64))
    lpips = load_lpips()
    with torch.no_grad():
        assert torch.equal(lpips(images, images), torch.zeros(16))
        for damage, steps in ((noisy, (4, 12, 36)), (blurred, (1, 2, 4))):
            damaged = [damage(images, step) for step in steps]
            for measure, sign in ((psnr, -1), (ssim, -1), (lpips, 1)):
                values = torch.stack([sign * measure(images, each) for each in damaged])
                assert (values.mean(dim=1).diff() > 0).all(), (damage, measure)


def test_lpips_is_symmetric_and_does_not_mix_images() -> None:
    images = cats(SMALL, 64)[:4]
    others = noisy(images, 20).roll(1, 0)
    lpips = load_lpips()
    with torch.no_grad():
        together = lpips(images, others)
        torch.testing.assert_close(lpips(others, images), together)
        torch.testing.assert_close(lpips(images[2:3], others[2:3])[0], together[2])


def test_lpips_gives_the_values_of_the_official_package() -> None:
    """Frozen from this network when it agreed with `lpips` 0.1.4 (the same convolutions) to 6e-8."""
    images = cats(LARGE, 128)
    with torch.no_grad():
        found = load_lpips()(images, images.roll(1, 0))
    torch.testing.assert_close(found, torch.tensor(OFFICIAL_LPIPS), atol=2e-5, rtol=0)


OFFICIAL_LPIPS = [0.5370805, 0.4862567, 0.4635903, 0.5068547]


def test_lpips_weights_travel_with_their_licence() -> None:
    licence = WEIGHTS.with_name("LICENSE").read_text(encoding="utf-8")
    assert "Richard Zhang" in licence
    assert "Redistribution and use" in licence


# -- reading images ----------------------------------------------------------------------------------------------------


def written(folder: Path, images: Tensor, suffix: str = ".png") -> list[Path]:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:03}{suffix}" for index in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return paths


def test_folder_archives_and_sheet_hold_the_same(tmp_path: Path) -> None:
    images = cats(SMALL, 64)
    paths = written(tmp_path / "folder" / "inner", images)
    (tmp_path / "folder" / "notes.txt").write_text("not a picture")
    (tmp_path / "folder" / ".hidden.png").write_text("not a picture either")
    for name in ("shard.tar", "shard.tar.gz"):
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as archive:
            for path in reversed(paths):
                archive.add(path, arcname=path.name)
            archive.add(tmp_path / "folder" / "notes.txt", arcname="notes.txt")
    for source in ("folder", "shard.tar", "shard.tar.gz"):
        found = open_images(tmp_path / source)
        assert found.names == tuple(path.stem for path in paths)
        assert torch.equal(torch.cat(list(found.batches(5, 64))), images)
        assert [len(batch) for batch in found.batches(5, None)] == [5, 5, 5, 1]
    assert torch.equal(torch.cat(list(found[2:4].batches(5, None))), images[2:4])


def test_folder_of_archives(tmp_path: Path) -> None:
    paths = written(tmp_path / "loose", cats(SMALL, 64)[:4])
    (tmp_path / "shards").mkdir()
    for index in range(2):
        with tarfile.open(tmp_path / "shards" / f"{index}.tar", "w") as archive:
            for path in paths[2 * index : 2 * index + 2]:
                archive.add(path, arcname=path.name)
    assert open_images(tmp_path / "shards").names == tuple(path.stem for path in paths)


def test_avif_is_read_where_pillow_can(tmp_path: Path) -> None:
    from PIL import features

    if not features.check("avif"):
        pytest.skip("this Pillow was built without AVIF")
    images = cats(LARGE, 128)
    written(tmp_path, images, ".avif")
    read = torch.cat(list(open_images(tmp_path).batches(4, None)))
    assert (psnr(images, read) > 30).all()


def test_images_are_cropped_to_the_middle_and_scaled_by_lanczos(tmp_path: Path) -> None:
    from PIL import Image

    image = cats(LARGE, 128)[0]
    wide = torch.cat(
        [torch.zeros(3, 128, 10, dtype=torch.uint8), image, torch.zeros(3, 128, 10).byte()], dim=2
    )
    written(tmp_path, wide[None])
    found = next(open_images(tmp_path).batches(1, 32))[0]
    expected = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((32, 32), Image.Resampling.LANCZOS)
    assert bytes(found.permute(1, 2, 0).flatten().tolist()) == expected.tobytes()


# -- errors ------------------------------------------------------------------------------------------------------------

FEW = torch.zeros(4, 8)
IMAGES = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)

BAD_CALLS: dict[str, tuple[Any, str]] = {
    "one image has no covariance": (
        lambda: Statistics.of(FEW[:1]),
        "`features` must hold at least two images; got shape [1, 8].",
    ),
    "features of other networks": (
        lambda: frechet_distance(Statistics.of(FEW), Statistics.of(FEW[:, :4])),
        "`second` must have features like the first (shape [8]); got shape [4].",
    ),
    "kernel of other networks": (
        lambda: kernel_distance(FEW, FEW[:, :4]),
        "`second` must have 8 features like the first; got shape [4, 4].",
    ),
    "pairs of unequal sets": (
        lambda: cosine_distance(FEW, FEW[:2]),
        "`second` must have as many images as the first (4); got 2.",
    ),
    "too many blocks": (
        lambda: kernel_distance(FEW, FEW),
        "`blocks` must be at most half the number of images (4); got 10.",
    ),
    "too many neighbours": (
        lambda: precision_recall(FEW, FEW, neighbours=4),
        "`neighbours` must be below the number of images (4); got 4.",
    ),
    "images of two shapes": (
        lambda: psnr(IMAGES, IMAGES[:1]),
        "`second` must have the shape of the first (shape [2, 3, 32, 32]); got shape [1, 3, 32, 32].",
    ),
    "integers": (
        lambda: ssim(IMAGES.int(), IMAGES),
        "`first` must be uint8 or floating point, from 0 to 255; got torch.int32.",
    ),
    "too small for a window": (
        lambda: ssim(IMAGES[..., :8], IMAGES[..., :8]),
        "`first` must have at least 11 pixels per side; got shape [2, 3, 32, 8].",
    ),
    "too small for the network": (
        lambda: load_lpips()(IMAGES[..., :8], IMAGES[..., :8]),
        "`first` must have 3 channels and at least 32 pixels per side; got shape [2, 3, 32, 8].",
    ),
    "no images": (
        lambda: features_of([], nn.Linear(1, 1)),
        "`batches` must hold at least one image; got none.",
    ),
    "a sheet that is not cut evenly": (
        lambda: open_images(SMALL, sheet_cell=100),
        "`size` must divide the sheet of 512 x 128 pixels into images; got 100.",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(case: str) -> None:
    call, message = BAD_CALLS[case]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert str(error.value) == message


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_images(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        open_images(tmp_path / "empty")
    with pytest.raises(ValueError, match="neither a folder, nor an archive"):
        open_images(Path(__file__))
    with pytest.raises(ValueError, match="needs the size of the images on it"):
        open_images(SMALL)
    (tmp_path / "broken.tar").write_bytes(b"not an archive")
    with pytest.raises(ValueError, match="is not a tar archive"):
        open_images(tmp_path / "broken.tar")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"not a picture")
    with pytest.raises(
        OSError, match=r"a\.png in .* cannot be read as a picture: cannot identify image file"
    ):
        next(open_images(tmp_path / "broken").batches(1, 32))
    (tmp_path / "weights.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        Statistics.load(tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="does not hold feature statistics"):
        Statistics.load(WEIGHTS)


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    written(tmp_path / "a", cats(SMALL, 64)[:1])
    written(tmp_path / "b", cats(LARGE, 128)[:1])
    images = open_images(tmp_path)
    with pytest.raises(ValueError, match="holds images of several sizes"):
        next(images.batches(2, None))
    assert next(images.batches(2, 48)).shape == (2, 3, 48, 48)
