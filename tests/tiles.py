"""What the tests of the Hilbert method share: its pattern token by token, and statements that every part of it serves.

The pattern is written down here a second time, from the paper's formulas and the rounding rules, one token at a time
and in fractions. It uses the curves and the order that the method gives its tokens, and nothing of how plans are built.

`STATEMENTS` are functions of the module `nearfield.methods.hilbert` that raise AssertionError. test_hilbert.py runs
each of them, test_mutants.py runs them on copies of the module with one line changed.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield import Geometry, Hilbert, curves

ORDERS = {
    "auto": curves.hilbert,
    "hilbert": lambda grid: curves.hilbert(grid, closed=False),
    "hilbert-closed": lambda grid: curves.hilbert(grid, closed=True),
    "morton": curves.morton,
    "raster": curves.raster,
}


def paper(**fields: Any) -> Hilbert:
    """The method with the paper's parts and no other: tiles, a shared centre, and no far field. A layer and a fifth of
    the steps stay dense."""
    own = {"near": "tile", "shared": "centre", "far": None, "summary": "mean"}
    return Hilbert(**own | {"dense_layers": 1, "dense_steps": 0.2} | fields)


def has_closed_curve(grid: Sequence[int]) -> bool:
    cells = math.prod(grid)
    return cells <= 2 or (cells % 2 == 0 and sum(side > 1 for side in grid) >= 2)


# -- the pattern, token by token ---------------------------------------------------------------------------------------


def unit_of(method: Any, q_block: int) -> int:
    """Cuts lie on multiples of it: no block of queries, and no summary, belongs to two tiles."""
    return q_block if method.far is None else math.lcm(q_block, method.far)


def num_shared(method: Any, grid: Sequence[int], span: tuple[int, int]) -> int:
    """As near to what was asked for as a ring that begins on a whole block allows; at least one.

    The block is the largest power of two, from 16 to 128, that is not larger than what was asked for.
    """
    if method.shared == "none":
        return 0
    wanted = method.shared_tokens or math.prod(max(1, side // 4) for side in grid)
    unit = 2 ** min(max(math.floor(math.log2(wanted)), 4), 7)
    start, stop = span
    ends = [end for end in range(start + 1, start + wanted + 2 * unit) if end % unit == 0]
    distances = [abs(end - start - wanted) for end in ends]
    nearest = [end for end, distance in zip(ends, distances, strict=True) if distance == min(distances)]
    # Of two that are equally near: the one whose number of units is even.
    end = min(nearest, key=lambda end: end // unit % 2)
    return min(end, stop) - start


def round_to(place: Fraction, unit: int) -> int:
    """The nearest multiple of a unit; the larger of two."""
    return math.floor(place / unit + Fraction(1, 2)) * unit


def tile_of(place: int, ring: tuple[int, int], tiles: int, shift: Fraction, unit: int) -> int:
    """The tile of a token of the ring, with cuts moved by `shift` tiles and rounded to the unit."""
    start, stop = ring
    share = Fraction(stop - start, tiles)
    begins = [min(max(round_to(start + (tile + shift) * share, unit), start), stop) for tile in range(tiles)]
    begun = [tile for tile, begin in enumerate(begins) if begin <= place]
    return begun[-1] if begun else tiles - 1  # what precedes the first cut belongs to the tile that wraps


class Labels(NamedTuple):
    """What the pattern says of each token of the sequence.

    Args:
        image: which image it is in; -1 for text.
        tile: the tile in which it reads; -1 for none.
        on_ring: whether it is read by its tile alone.
        reads_all: whether it reads everything.
    """

    image: Tensor
    tile: Tensor
    on_ring: Tensor
    reads_all: Tensor


def labels(method: Any, geometry: Geometry, layer: int, q_block: int) -> Labels:
    unit = unit_of(method, q_block)
    shift = Fraction(layer % method.cycle, method.cycle)
    image, tile = (torch.full((geometry.num_tokens,), -1) for _ in range(2))
    on_ring, reads_all = (torch.zeros(geometry.num_tokens, dtype=torch.bool) for _ in range(2))
    reads_all[slice(*geometry.text_span)] = method.text_reads == "all"
    tiles = method.tiles or 16
    order = method.ordering(geometry).order
    offset = geometry.image_spans[0][0]
    for number, (grid, span) in enumerate(zip(geometry.images, geometry.image_spans, strict=True)):
        image[slice(*span)] = number
        count = num_shared(method, grid, span)
        ring = span[0] + count, span[1]
        if number == 0 and method.tile_size is not None:
            tiles = max(1, round((ring[1] - ring[0]) / method.tile_size))
        on_ring[slice(*ring)] = True
        memory: dict[int, int] = {}
        for place in range(*ring):
            tile[place] = memory[place] = tile_of(place, ring, tiles, shift, unit)
        if method.share == "two-way" or ring[0] == ring[1]:
            reads_all[span[0] : ring[0]] = True
            continue
        here = (order[span[0] - offset : span[1] - offset] - (span[0] - offset)).tolist()
        shared = set(here[:count])
        passed = 0
        for cell in ORDERS[method.curve](grid).tolist():
            if cell in shared:
                tile[span[0] + here.index(cell)] = memory[ring[0] + passed % (ring[1] - ring[0])]
            else:
                passed += 1
    return Labels(image, tile, on_ring, reads_all)


def pattern(found: Labels) -> Tensor:
    """Which token reads which, `[N, N]` bool."""
    same_tile = found.tile[:, None] == found.tile[None, :]
    return found.reads_all[:, None] | ~found.on_ring[None, :] | (same_tile & found.on_ring[None, :])


def paper_pattern(geometry: Geometry, tiles: int, cycle: int, layer: int, shared: int = 0) -> Tensor:
    """The paper's own formulas, for one image whose tiles and shifts are whole numbers."""
    ((start, stop),) = geometry.image_spans
    start += shared
    ring, size = stop - start, (stop - start) // tiles
    assert size * tiles == ring
    assert size % cycle == 0
    offset = size // cycle * (layer % cycle)
    token = torch.arange(geometry.num_tokens)
    on_ring = (token >= start) & (token < stop)
    tile = torch.where(on_ring, ((token - start - offset) % ring) // size, -1)
    return ~on_ring[:, None] | ~on_ring[None, :] | (tile[:, None] == tile[None, :])


def block_cover(pairs: Tensor, q_block: int, k_block: int) -> Tensor:
    """The smallest pattern of blocks over a pattern of tokens, as tokens again."""
    rows, columns = pairs.shape
    padded = torch.nn.functional.pad(pairs, (0, -columns % k_block, 0, -rows % q_block))
    cells = padded.unflatten(1, (-1, k_block)).any(2).unflatten(0, (-1, q_block)).any(1)
    return cells.repeat_interleave(q_block, 0).repeat_interleave(k_block, 1)[:rows, :columns]


# -- the far field, window by window -----------------------------------------------------------------------------------


def windows(found: Labels, window: int, k_block: int) -> Tensor:
    """Which window each ring token is in, `[windows, N]` bool.

    Windows lie on multiples of `window`, inside one image. The part of a key block that a ring shares with something
    else makes windows of its own, since whoever reads the something reads that part, too.
    """
    names = []
    for place, (image, is_ring) in enumerate(zip(found.image.tolist(), found.on_ring.tolist(), strict=True)):
        block = slice(place // k_block * k_block, (place // k_block + 1) * k_block)
        alone = bool((found.on_ring[block] & (found.image[block] == image)).all())
        names.append((image, place // window, -1 if alone else place // k_block) if is_ring else None)
    distinct = sorted({name for name in names if name is not None})
    return torch.tensor([[name == one for name in names] for one in distinct], dtype=torch.bool).reshape(
        len(distinct), len(names)
    )


def far_formula(
    query: Tensor, key: Tensor, value: Tensor, near: Tensor, members: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Near keys exactly, the mean of each window that is not near with the log of its size: out and lse, dense."""
    sizes = members.sum(1)
    times = near.to(query.dtype) @ members.to(query.dtype).mT
    assert bool(((times == 0) | (times == sizes)).all()), "a window is near in part"
    mean = members.to(query.dtype) / sizes[:, None]
    # The library keeps the bias in float32.
    weight = sizes.double().log().float().to(query.dtype)
    exact = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~near, -torch.inf)
    if bias is not None:
        exact = exact + bias[:, :, None, :].to(query.dtype)
    coarse = query @ (mean @ key).mT * query.shape[-1] ** -0.5 + weight
    logits = torch.cat([exact, coarse.masked_fill(times > 0, -torch.inf)], -1)
    return logits.softmax(-1) @ torch.cat([value, mean @ value], 2), logits.logsumexp(-1)


def times_counted(reader: Any, geometry: Geometry, head: int = 0) -> Tensor:
    """How often each query counts each token, exactly or in a summary, `[N, N]`; read off what is computed.

    A summary is the mean of the tokens it stands for, and weighs as much as its bias says: the pooled identity matrix
    times that weight is the number of times each token counts.
    """
    counted = reader.near.pair_counts()[0, head % reader.near.blocks.shape[1]].double()
    if reader.far is None:
        return counted
    shares = reader.far.pooled(torch.eye(geometry.num_tokens, dtype=torch.float64)[None, None])[0, 0]
    far = reader.far.plan.pair_counts()[0, head % reader.far.plan.blocks.shape[1]].double()
    return counted + far @ (shares * reader.far.bias.double().exp()[:, None])


# -- statements --------------------------------------------------------------------------------------------------------


def image_places(method: Any, geometry: Geometry) -> Tensor:
    """Coordinates in the first image of the tokens in the method's order, `[tokens, sides]`; raster tokens entered."""
    axes = [torch.arange(side) for side in geometry.grid]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
    return method.ordering(geometry).enter(places, dim=0)


def tiles_are_squares_of_the_image(module: ModuleType) -> None:
    """What a token reads lies in a 16x16 box of the image around it, and every box is read whole."""
    geometry = Geometry((64, 64))
    for curve in ("hilbert", "hilbert-closed"):
        method = module.Hilbert(tiles=16, near="tile", far=None, curve=curve)
        places = image_places(method, geometry)
        reads = method.plan(geometry, 0, q_block=64, k_block=64).to_mask()[0, 0]
        boxes = set()
        for token in range(0, 4096, 64):
            read = places[reads[token]]
            low, high = read.amin(0), read.amax(0)
            assert len(read) == 256
            assert (high - low + 1).tolist() == [16, 16], f"{curve}: {low.tolist()} to {high.tolist()}"
            assert bool(((places[token] >= low) & (places[token] <= high)).all())
            boxes.add(tuple(low.tolist()))
        assert len(boxes) == 16


def neighbours_on_the_ring_are_neighbours_in_the_image(module: ModuleType) -> None:
    """Every step of the sequence is a step to a neighbour, and the closed curve's wrap, too; a shared region, taken
    out of the curve, makes few longer ones."""
    for grid in ((64, 64), (24, 40), (45, 80)):
        geometry = Geometry(grid)
        for curve, shared, longest_mean in (
            ("hilbert-closed", "none", 1.0),
            ("hilbert", "none", 1.0),
            ("hilbert-closed", "centre", 1.05),
            ("hilbert-closed", "distributed", 1.05),
        ):
            method = module.Hilbert(shared=shared, far=None, curve=curve)
            ring = image_places(method, geometry)[num_shared(method, grid, (0, math.prod(grid))) :]
            steps = (ring.roll(-1, 0) - ring).abs().sum(1).double()
            mean = float((steps[:-1] if curve == "hilbert" else steps).mean())
            assert mean <= longest_mean, f"{grid}, {curve}, {shared}: mean step {mean:.3f}"


def plan_is_the_papers_pattern(module: ModuleType) -> None:
    """Exactly, where tiles and shifts are whole blocks: text on either side, with and without a shared region."""
    for text_first in (True, False):
        geometry = Geometry((16, 16), text=64, text_first=text_first)
        for shared in (0, 64):
            region = {"shared": "centre", "shared_tokens": shared} if shared else {"shared": "none"}
            tiles = (256 - shared) // 32
            method = module.Hilbert(**{"tiles": tiles, "near": "tile", "cycle": 4, "far": None} | region)
            for layer in range(9):
                plan = method.plan(geometry, layer, q_block=8, k_block=8)
                expected = paper_pattern(geometry, tiles, 4, layer, shared)
                assert torch.equal(plan.pair_counts()[0, 0], expected.int()), (text_first, shared, layer)


def shared_tokens_read_their_own_tile(module: ModuleType) -> None:
    """With keys-only sharing a shared token reads the tile that the curve passes it in; all read it."""
    geometry = Geometry((12, 14), text=5)
    method = module.Hilbert(
        tiles=5, near="tile", shared="centre", share="keys", shared_tokens=20, cycle=3, far=None
    )
    for layer in range(3):
        plan = method.plan(geometry, layer, q_block=1, k_block=1)
        assert torch.equal(plan.to_mask()[0, 0], pattern(labels(method, geometry, layer, 1))), layer


def what_is_around_is_read(module: ModuleType) -> None:
    """Of 64 x 64 tokens a row of 8 x 8 reads itself, all that is next to it, and, inside, nothing 8 tokens away."""
    geometry = Geometry((64, 64))
    method = module.Hilbert(tiles=16, near="around")
    places = image_places(method, geometry)
    reads = method.plan(geometry, q_block=64, k_block=16).to_mask()[0, 0]
    for token in range(0, 4096, 64):
        low, high = places[token : token + 64].amin(0), places[token : token + 64].amax(0)
        beyond = torch.maximum(low - places, places - high).amax(1)
        assert bool(reads[token][beyond <= 0].all()), "its own block"
        assert int(beyond[reads[token]].max()) <= 24
        inside = bool((low >= 8).all() and (high < 56).all())
        assert not inside or int(beyond[reads[token]].max()) <= 8
        assert not inside or bool(reads[token][beyond <= 1].all()), "what is next to it"


def every_token_counts_once(module: ModuleType) -> None:
    """With a far field every query counts every token once, whatever does not fit: text, images, last windows."""
    for geometry in (
        Geometry((12, 16), text=32),
        Geometry((13, 15), text=5),
        Geometry((13, 15), text=7, text_first=False),
        Geometry((11, 13), references=((9, 9), (3, 5))),
        Geometry((5, 6, 7), text=3, references=((5, 5, 5),)),
    ):
        for shared, share in (("none", "two-way"), ("centre", "two-way"), ("centre", "keys")):
            method = module.Hilbert(tiles=5, near="tile", shared=shared, share=share, far=8, cycle=3)
            for layer in range(3):
                reader = method.layer(geometry, layer, q_block=4, k_block=4)
                counted = times_counted(reader, geometry)
                torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)
            for text_reads in ("all", "summary"):
                method = module.Hilbert(tiles=5, shared=shared, share=share, far=8, text_reads=text_reads)
                counted = times_counted(method.layer(geometry, q_block=4, k_block=4), geometry)
                torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)


def text_reads_images_in_summary(module: ModuleType) -> None:
    """If it is asked to: exactly text and what is shared, every window of the rest; image tokens read as before."""
    for near in ("tile", "around"):
        for text_first in (True, False):
            geometry = Geometry((16, 16), text=32, text_first=text_first)
            text, image = slice(*geometry.text_span), slice(*geometry.image_spans[0])
            fields = {"tiles": 5, "near": near, "shared": "centre", "shared_tokens": 16, "far": 8}
            readers = [
                module.Hilbert(**fields, text_reads=reads).layer(geometry, 1, q_block=8, k_block=8)
                for reads in ("all", "summary")
            ]
            usual, found = (reader.near.to_mask()[0, 0] for reader in readers)
            expected = torch.zeros(geometry.num_tokens, dtype=torch.bool)
            expected[text] = expected[image.start : image.start + 16] = True
            assert bool((found[text] == expected).all())
            assert bool(usual[text].all())
            assert torch.equal(found[image], usual[image])
            usual, found = (reader.far.plan.to_mask()[0, 0] for reader in readers)
            assert bool(found[text].all())
            assert not bool(usual[text].any())
            assert torch.equal(found[image], usual[image])


def far_field_is_its_formula(module: ModuleType) -> None:
    """Exact keys and means with the log of their size, in one softmax, in float64."""
    geometry = Geometry((9, 11), text=7, references=((6, 6),))
    method = module.Hilbert(tiles=4, near="tile", far=8, summary="mean", shared="none")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 2, 2, geometry.num_tokens, 6, generator=generator, dtype=torch.float64)
    for layer in range(4):
        got = method.layer(geometry, layer).attend(*inputs)
        found = labels(method, geometry, layer, 16)
        near = block_cover(pattern(found), 16, 16)
        out, lse = far_formula(*inputs, near, windows(found, 8, 16))
        torch.testing.assert_close(got.out, out)
        torch.testing.assert_close(got.lse, lse)


STATEMENTS: dict[str, Callable[[ModuleType], None]] = {
    function.__name__: function
    for function in (
        tiles_are_squares_of_the_image,
        neighbours_on_the_ring_are_neighbours_in_the_image,
        plan_is_the_papers_pattern,
        shared_tokens_read_their_own_tile,
        what_is_around_is_read,
        every_token_counts_once,
        text_reads_images_in_summary,
        far_field_is_its_formula,
    )
}
