"""Seam energy: lines are where the method's plans leave neighbours apart, and only there do steps count."""

import math
from pathlib import Path

import pytest
import torch
from tests.tiles import paper
from torch import Tensor

from nearfield import Geometry, Hilbert, Merge
from nearfield.layout import tiling
from nearfield_lab.quality import Borders, line_gradients, open_images, seam_energy

DATA = Path(__file__).with_name("data")


def labels(method: Hilbert, geometry: Geometry, layer: int, q_block: int) -> Tensor:
    """The tile of every token in raster order, by the functions that cut the curve; -1 for shared tokens."""
    (segment,) = tiling.segments_of(geometry, method.curve, method.shared, method.shared_tokens)
    shift = layer % method.cycle, method.cycle
    begins = tiling.cuts(segment.ring, method.tiles or 16, shift, q_block)
    tile = torch.full((math.prod(geometry.grid),), -1)
    ring = torch.arange(segment.ring[1] - segment.ring[0])
    tile[segment.order[segment.num_shared :]] = tiling.tile_at(ring, begins)
    return tile.view(geometry.grid)


def differing(tile: Tensor) -> Borders:
    """A shared token that reads all and is read by all has no border."""

    def apart(first: Tensor, second: Tensor) -> Tensor:
        return ((first != second) & (first >= 0) & (second >= 0)).double()

    return Borders(apart(tile[:, 1:], tile[:, :-1]), apart(tile[1:], tile[:-1]))


@pytest.mark.parametrize("grid", [(16, 16), (12, 20), (9, 15), (1, 32)])
@pytest.mark.parametrize("curve", ["auto", "hilbert", "morton", "raster"])
@pytest.mark.parametrize("shared", ["none", "centre"])
def test_borders_are_where_tiles_differ(
    grid: tuple[int, int], curve: tiling.Curve, shared: tiling.Shared
) -> None:
    method, geometry = paper(tiles=6, curve=curve, shared=shared), Geometry(grid, text=16)
    for layer in range(method.cycle):
        found = method.borders(geometry, layers=[layer], q_block=1 if shared == "none" else 16)
        expected = differing(labels(method, geometry, layer, 1 if shared == "none" else 16))
        # A block of keys may hold tokens of two tiles where the ring ends inside it; both are then read.
        if math.prod(grid) % 16 and shared != "none":
            assert (found.right <= expected.right).all()
            assert (found.below <= expected.below).all()
        else:
            assert torch.equal(found.right, expected.right)
            assert torch.equal(found.below, expected.below)


def test_borders_of_merged_regions() -> None:
    """Windows are squares of the image, runs are cut from the curve, and the whole image has no border."""
    geometry = Geometry((8, 12), text=16)
    square = torch.arange(8)[:, None] // 4 * 3 + torch.arange(12) // 4
    windows = Merge(region="window", region_size=16).borders(geometry)
    expected = differing(square)
    assert torch.equal(windows.right, expected.right)
    assert torch.equal(windows.below, expected.below)
    method = Merge(region_size=16) | paper(tiles=6, shared="none")
    runs = method.borders(geometry)
    along = torch.empty(96, dtype=torch.long)
    along[method.ordering(geometry).order] = torch.arange(96) // 16
    expected = differing(along.view(8, 12))
    assert torch.equal(runs.right, expected.right)
    assert torch.equal(runs.below, expected.below)
    whole = Merge(region="global").borders(geometry)
    assert not whole.right.any()
    assert not whole.below.any()
    with pytest.raises(ValueError, match="`geometry` must have a grid of two sides"):
        Merge().borders(Geometry((2, 8, 8)))


def test_cycle_is_the_mean_of_its_layers() -> None:
    method, geometry = paper(tiles=5), Geometry((16, 24), text=8)
    layers = [method.borders(geometry, layers=[layer]) for layer in range(method.cycle)]
    whole = method.borders(geometry)
    for name in ("right", "below"):
        expected = torch.stack([getattr(layer, name) for layer in layers]).mean(dim=0)
        torch.testing.assert_close(getattr(whole, name), expected)


def test_interleaved_heads_have_the_borders_of_the_cycle() -> None:
    geometry = Geometry((16, 16), text=16)
    plain, mixed = (paper(interleave=flag).borders(geometry, layers=layers)
                    for flag, layers in ((False, None), (True, [2])))  # fmt: skip
    torch.testing.assert_close(plain.right, mixed.right)
    torch.testing.assert_close(plain.below, mixed.below)


def test_shared_keys_are_half_a_border() -> None:
    """The ring reads the shared region, which does not read the ring beyond its tile."""
    borders = paper(share="keys").borders(Geometry((16, 16)), layers=[0])
    assert set(torch.cat([borders.right.flatten(), borders.below.flatten()]).tolist()) == {0.0, 0.5, 1.0}


def test_text_and_later_images_do_not_move_the_lines() -> None:
    method = paper(tiles=4, shared="none")
    alone = method.borders(Geometry((16, 16)))
    for geometry in (
        Geometry((16, 16), text=32),
        Geometry((16, 16), text=32, text_first=False),
        Geometry((16, 16), references=((16, 16),)),
    ):
        found = method.borders(geometry)
        torch.testing.assert_close(found.right, alone.right)
        torch.testing.assert_close(found.below, alone.below)


ROWS = paper(tiles=8, curve="raster", shared="none", cycle=1)
"""On an 8 x 8 grid every row of tokens is a tile."""


def test_energy_by_hand() -> None:
    """A ramp of 2 per pixel that jumps by 10 between rows of tokens."""
    borders = ROWS.borders(Geometry((8, 8)), q_block=8)
    assert borders.right.sum() == 0
    assert (borders.below == 1).all()
    y = torch.arange(64.0)
    image = (2 * y + 10 * (y // 8))[:, None].expand(64, 64).expand(1, 3, 64, 64)
    gradients = line_gradients(image, borders)
    assert gradients.tolist() == [[12.0, 2.0]]
    energy = seam_energy(gradients)
    assert energy[:1] + energy[2:] == (6.0, 12.0, 2.0)
    assert math.isnan(energy.error)


@pytest.mark.parametrize("pixels", [4, 8, 16])
def test_a_plain_ramp_has_energy_one(pixels: int) -> None:
    borders = paper().borders(Geometry((16, 24), text=8))
    y, x = (torch.arange(float(side * pixels)) for side in (16, 24))
    image = (3 * y[:, None] + 3 * x[None]).expand(2, 3, 16 * pixels, 24 * pixels)
    energy = seam_energy(line_gradients(image, borders))
    assert energy.value == pytest.approx(1)
    assert energy.error == pytest.approx(0)


def photographs() -> Tensor:
    pytest.importorskip("PIL")
    return next(open_images(DATA / "quality-cats-128.webp", sheet_cell=128).batches(4, None)).double()


def test_steps_between_tiles_show_on_their_own_lines() -> None:
    """Photographs are smooth across the lines. A step of 12 grey levels per tile shows, most where it is."""
    method, geometry = paper(tiles=4, shared="none"), Geometry((16, 16))
    images = photographs()
    tile = labels(method, geometry, 0, 16).double().repeat_interleave(8, 0).repeat_interleave(8, 1)
    stepped = images + 12 * (tile % 2) + 6 * (tile // 2)
    own, others = (method.borders(geometry, layers=[layer]) for layer in (0, 2))
    clean = seam_energy(line_gradients(images, own))
    seen, elsewhere = (seam_energy(line_gradients(stepped, lines)) for lines in (own, others))
    assert clean.value == pytest.approx(1, abs=0.1)
    assert seen.value > clean.value + 0.5
    assert seen.value > elsewhere.value + 0.4
    assert seen.around == pytest.approx(clean.around, rel=0.05)


def test_energy_does_not_change_with_contrast_mirroring_or_batches() -> None:
    images = photographs()
    borders = paper().borders(Geometry((16, 16), text=8))
    whole = line_gradients(images, borders)
    torch.testing.assert_close(line_gradients(images / 3 + 5, borders) * 3, whole)
    mirrored = Borders(borders.right.flip(1), borders.below.flip(1))
    torch.testing.assert_close(line_gradients(images.flip(3), mirrored), whole)
    torch.testing.assert_close(line_gradients(images[1:2], borders)[0], whole[1])
    torch.testing.assert_close(line_gradients(images.byte(), borders), whole)


def test_error_of_the_energy_is_that_of_repeated_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(200, 50, 2, generator=generator, dtype=torch.float64) + 0.5
    found = [seam_energy(draw) for draw in draws]
    spread = torch.tensor([each.value for each in found]).std()
    assert sum(each.error for each in found) / 200 == pytest.approx(float(spread), rel=0.15)


def test_bad_calls_say_what_is_wrong() -> None:
    borders = ROWS.borders(Geometry((8, 8)), q_block=8)
    images = torch.zeros(1, 3, 64, 64)
    cases = {
        "`images` must have a whole number of pixels, at least 4, for each of 8 x 8 tokens;"
        " got shape [1, 3, 64, 60].": (lambda: line_gradients(images[..., :60], borders)),
        "`borders` must cut the image somewhere; got none. Neighbours always read each other here.": (
            lambda: line_gradients(images, Borders(torch.zeros(8, 7), torch.zeros(7, 8)))
        ),
        "`gradients` must come from images with some contrast; got none.": (
            lambda: seam_energy(line_gradients(images, borders))
        ),
        "`geometry` must have a grid of two sides; got 4x8x8. Measure the frames of a video one by one.": (
            lambda: ROWS.borders(Geometry((4, 8, 8)))
        ),
        "`layers` must name at least one layer; got none.": (
            lambda: ROWS.borders(Geometry((8, 8)), layers=[])
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message
