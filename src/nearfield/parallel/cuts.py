"""Cuts a model's tokens evenly, along blocks, summaries and merged regions. The text is on all ranks."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, NoReturn

from nearfield._checks import wrong_value
from nearfield.layout import Geometry, Span
from nearfield.methods import Composition, Method
from nearfield.ops import Regions
from nearfield.parallel.split import Split

# At least: shares then differ by a quarter at most. Small ones may tear blocks for it.
_SHARE_OVER_UNIT = 4


def even_split(method: Method, geometry: Geometry, num_ranks: int, block: int) -> Split:
    """Cut the sections of a method evenly, and put the text on all ranks.

    Cuts lie on multiples of the block where shares are large enough. A two-way shared region that has no block for
    every rank is cut more finely on many: who holds some of it talks to all others, and that should not be one rank's
    load. With keys-only sharing that would cost more than it saves: the rows of a torn block read the tiles of all
    of its tokens, on every rank that holds some.
    """
    sections = method.sections(geometry)
    lengths = [stop - start for (start, stop), _, _ in sections]
    share = max(lengths) // num_ranks // _SHARE_OVER_UNIT
    units = []
    for section, length in zip(sections, lengths, strict=True):
        is_spread = section.is_spread and length < block * num_ranks
        unit = min(block, _power_of_two(share // (num_ranks - 1) if is_spread and num_ranks > 1 else share))
        units.append(_whole_windows(unit, section.window, share) if section.window > 1 else unit)
    text = [geometry.text_span] if geometry.text else []
    return Split.even([section.span for section in sections], num_ranks, unit=units, replicated=text)


def _whole_windows(unit: int, far: int, share: int) -> int:
    """Cuts that tear no summary's tokens apart, and no block if shares are large enough for both."""
    both = math.lcm(unit, far)
    return both if both <= share else far


def _power_of_two(number: int) -> int:
    """The largest one that is not above a number."""
    return int(2 ** (max(number, 1).bit_length() - 1))


class MergedSplit(NamedTuple):
    """Tokens that are merged inside regions, split between regions. A rank merges and unmerges its own by itself.

    Args:
        whole: of all tokens.
        merged: of the tokens that are left after merging.
        regions: of each rank.
    """

    whole: Split
    merged: Split
    regions: tuple[Regions, ...]


def split_between_regions(method: Composition, geometry: Geometry, num_ranks: int, block: int) -> MergedSplit:
    """Cut every piece of the order as evenly as regions allow, and put the text on all ranks.

    Cuts lie between regions, preferably where they tear no block. With a far field a cut may tear no summary, neither
    of all tokens nor of the tokens that are left after merging.
    """
    regions = method.regions(geometry)
    assert regions is not None
    runs = list(zip(regions.lengths, regions.counts, strict=True))
    pieces = [tokens for image in method.pieces(geometry) for tokens in image]
    unit = min(block, _power_of_two(max(pieces) // num_ranks // _SHARE_OVER_UNIT))
    begin = geometry.text if geometry.text_first else 0
    windows = {section.span: section.window for section in method.sections(geometry)}
    whole, merged, first = begin, begin, 0
    mine: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]  # first and last region, one per piece
    for tokens in pieces:
        borders, left = [whole], [merged]
        while borders[-1] < whole + tokens:
            length, count = runs[first + len(borders) - 1]
            borders.append(borders[-1] + length)
            left.append(left[-1] + count)
        window = windows.get((whole, whole + tokens), 1)
        fits = [place % window == 0 == short % window for place, short in zip(borders, left, strict=True)]
        cuts = _cut_at(borders, fits, num_ranks, unit)
        for rank, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                mine[rank].append((first + start, first + stop))
        whole, merged, first = borders[-1], left[-1], first + len(borders) - 1
    for rank, spans in enumerate(mine):
        if not spans:
            _refuse_idle(rank, num_ranks, len(runs), max(windows.values()))
    short = method.shortened(geometry, regions)
    return MergedSplit(
        _split_at(mine, begin, [length for length, _ in runs], geometry),
        _split_at(mine, begin, [count for _, count in runs], short),
        tuple(_regions_in(regions, spans) for spans in mine),
    )


def _refuse_idle(rank: int, num_ranks: int, num_regions: int, far: int) -> NoReturn:
    hint = "Use fewer ranks, or smaller regions."
    got = f"{num_regions} regions, none for rank {rank}"
    if far > 1:
        got = f"{got} that begins on a multiple of `far` ({far}), before and after merging"
        hint = f"{hint} Or far=None, or text and regions, before and after, of multiples of {far} tokens."
    wrong_value("method", f"leave each of {num_ranks} ranks a region to merge in", got, hint)


def _cut_at(borders: Sequence[int], fits: Sequence[bool], num_ranks: int, unit: int) -> list[int]:
    """Which of some places to cut at, into one part per rank.

    A place on a multiple of `unit` is taken if it is hardly farther from an even share than the nearest place.

    Args:
        fits: which places may be taken; the first and the last always may.
    """
    last = len(borders) - 1
    places = [number for number, is_fit in enumerate(fits) if is_fit or number in (0, last)]
    aligned = [number for number in places if borders[number] % unit == 0]
    share = (borders[-1] - borders[0]) / num_ranks
    cuts = [0]
    for rank in range(1, num_ranks):
        ideal = borders[0] + share * rank

        def distance(number: int, ideal: float = ideal) -> float:
            return abs(borders[number] - ideal)

        nearest = min(places, key=distance)
        whole = min(aligned, key=distance, default=nearest)
        is_close = distance(whole) <= distance(nearest) + share / (2 * _SHARE_OVER_UNIT)
        cuts.append(max(cuts[-1], whole if is_close else nearest))
    return [*cuts, last]


def _split_at(mine: list[list[Span]], begin: int, sizes: list[int], geometry: Geometry) -> Split:
    """The split of a sequence whose regions have some sizes."""
    places = [begin, *(begin + size for size in accumulate(sizes))]
    owned = tuple(tuple((places[start], places[stop]) for start, stop in spans) for spans in mine)
    return Split(geometry.num_tokens, owned, (geometry.text_span,) if geometry.text else ())


def _regions_in(regions: Regions, spans: Sequence[Span]) -> Regions:
    chosen = [number for start, stop in spans for number in range(start, stop)]
    return Regions(
        tuple(regions.lengths[number] for number in chosen),
        tuple(regions.counts[number] for number in chosen),
    )
