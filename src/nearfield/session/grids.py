"""Reading the grids of images from position ids, without waiting for the device more often than needed."""

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.layout import Grid

_IMAGE, _ROW, _COLUMN = range(3)
_REMEMBERED = 8

_NOT_EXPECTED = (
    "`img_ids` must be those of the size that was made ready before the model was compiled; got another size with as"
    " many tokens. Call `handle.prepare(height=..., width=...)` first."
)
_CHANGED = (
    "`img_ids` must describe the same grids in all steps of a denoising loop; got others with as many tokens."
)


class Layout:
    """Where lines and images begin among the tokens of some grids. Ids are compared with it where they are.

    Args:
        grids: (height, width) of each image, in sequence order.
        device: that of the ids.
    """

    def __init__(self, grids: tuple[Grid, ...], device: torch.device) -> None:
        self.grids = grids
        self.num_tokens = sum(math.prod(grid) for grid in grids)
        widths = torch.tensor([width for height, width in grids for _ in range(height)], device="cpu")
        image = torch.tensor([n for n, (height, _) in enumerate(grids) for _ in range(height)], device="cpu")
        ends = widths.cumsum(0)
        starts = ends - widths
        is_start = torch.zeros(self.num_tokens, dtype=torch.bool, device="cpu")
        is_start[starts] = True
        goes_on = image[1:] == image[:-1]
        self.is_start = is_start[1:].to(device)
        self.starts, self.ends = starts.to(device), (ends - 1).to(device)
        self.is_wide = (widths > 1).to(device)
        self.goes_on = goes_on.to(device)
        # Where the width changes, so does the image, whatever the ids of the two lines say.
        self.is_told = (goes_on | (widths[1:] == widths[:-1])).to(device)

    def fits(self, ids: Tensor) -> Tensor:
        """Whether ids describe these grids: a single boolean, on the device of the ids."""
        place = _places(ids)
        lines = place[self.starts]
        is_flat = self.is_wide & (place[self.ends, _COLUMN] <= lines[:, _COLUMN])
        differs = (_goes_on(lines) != self.goes_on) & self.is_told
        return ~((_is_start(place) != self.is_start).any() | is_flat.any() | differs.any())


class _Seen(NamedTuple):
    tensor: "weakref.ref[Tensor]"
    version: int
    address: int
    grids: tuple[Grid, ...] | None


class GridReader:
    """The grids behind tensors of position ids, read as rarely as can be.

    Reading values waits for the device. A tensor is read once, and again only if it was written to. Some pipelines
    make a new one in every step: if it looks like the last one, it is compared with what was read then. On the CPU
    that is exact, and other grids are read. On other devices the answer would have to be waited for, so there the
    comparison is an assertion on the device, and it is trusted only inside a denoising loop, whose grids cannot
    change; the first step of each loop, and every call without a scheduler, reads.

    Args:
        is_in_loop: whether the call is a later step of a denoising loop.
    """

    def __init__(self, is_in_loop: Callable[[], bool]) -> None:
        self.expected: Layout | None = None
        """What was made ready last: under torch.compile values cannot be read, only expected."""
        self._is_in_loop = is_in_loop
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._layouts: OrderedDict[tuple[tuple[Grid, ...], torch.device], Layout] = OrderedDict()
        self._last: tuple[object, Layout] | None = None

    def expect(self, grids: tuple[Grid, ...], device: torch.device) -> None:
        self.expected = self._layout(grids, device)

    def read(self, ids: Tensor) -> tuple[Grid, ...] | None:
        """The grids of all images, in sequence order; None if the ids describe no grids.

        Args:
            ids: `[N, 3 or more]` (a batch of equal ids is allowed): image, row and column of each token.
        """
        if torch.compiler.is_compiling():
            return self._read_compiled(ids)
        if ids.is_inference():  # their writes are not counted, so what was read may be out of date
            return self._read(ids)
        seen = self._seen.get(id(ids))
        if seen is not None and seen.tensor() is ids and seen[1:3] == (ids._version, ids.data_ptr()):
            return seen.grids
        grids = self._read(ids)
        self._seen[id(ids)] = _Seen(weakref.ref(ids), ids._version, ids.data_ptr(), grids)
        _keep_few(self._seen)
        return grids

    def _read_compiled(self, ids: Tensor) -> tuple[Grid, ...] | None:
        if self.expected is None:
            return None
        if ids.shape[-2] == self.expected.num_tokens:  # else the number of tokens is refused in plain words
            torch._assert_async(self.expected.fits(ids), _NOT_EXPECTED)
        return self.expected.grids

    def _read(self, ids: Tensor) -> tuple[Grid, ...] | None:
        kind = ids.shape, ids.dtype, ids.device
        if self._last is not None and self._last[0] == kind and self._is_as(self._last[1], ids):
            return self._last[1].grids
        grids = image_grids(ids)
        self._last = None if grids is None else (kind, self._layout(grids, ids.device))
        return grids

    def _is_as(self, layout: Layout, ids: Tensor) -> bool:
        if not _has_to_be_waited_for(ids):
            return bool(layout.fits(ids))
        if not self._is_in_loop():
            return False
        torch._assert_async(layout.fits(ids), _CHANGED)
        return True

    def _layout(self, grids: tuple[Grid, ...], device: torch.device) -> Layout:
        layout = self._layouts.get((grids, device))
        if layout is None:
            layout = self._layouts[grids, device] = Layout(grids, device)
            _keep_few(self._layouts)
        return layout


def image_grids(ids: Tensor) -> tuple[Grid, ...] | None:
    """The (height, width) of each image: lines of equal width, stacked while image and rows go on.

    Ids may be rounded (bfloat16 knows every second row beyond 256), so a line ends where columns start again, too.
    Images whose ids continue each other downwards, column under column, are one grid. Lines without columns (ids that
    are all zero) and single lines of one image that do not go together (ids in disorder) are none: the result is None.
    """
    place = _places(ids).detach().cpu()
    starts = torch.cat([torch.tensor([0], device="cpu"), _is_start(place).nonzero().flatten() + 1])
    ends = torch.cat([starts[1:], torch.tensor([len(place)], device="cpu")])
    widths, lines = ends - starts, place[starts]
    if ((widths > 1) & (place[ends - 1, _COLUMN] <= lines[:, _COLUMN])).any():
        return None
    goes_on = _goes_on(lines) & (widths[1:] == widths[:-1])
    grids: list[Grid] = []
    for width, same in zip(widths.tolist(), [False, *goes_on.tolist()], strict=True):
        if same:
            grids[-1] = (grids[-1][0] + 1, width)
        else:
            grids.append((1, width))
    starts_image = torch.cat([torch.tensor([True], device="cpu"), ~goes_on])
    return None if _has_loose_lines(grids, lines[starts_image, _IMAGE].tolist()) else tuple(grids)


def _has_loose_lines(grids: list[Grid], images: list[float]) -> bool:
    """Whether two grids of one line, one behind the other, claim to be of the same image."""
    lines = [image if grid[0] == 1 else None for grid, image in zip(grids, images, strict=True)]
    return any(line is not None and line == other for line, other in pairwise(lines))


def _places(ids: Tensor) -> Tensor:
    return (ids[0] if ids.dim() == 3 else ids)[:, : _COLUMN + 1]


def _is_start(place: Tensor) -> Tensor:
    """Whether a line starts, `[N - 1]`: at the second token and those behind it."""
    step = place[1:] - place[:-1]
    return (step[:, :_COLUMN] != 0).any(dim=1) | (step[:, _COLUMN] < 0)


def _goes_on(lines: Tensor) -> Tensor:
    """Whether an image goes on, `[lines - 1]`, by the places of the first tokens of lines."""
    this, previous = lines[1:], lines[:-1]
    is_below = this[:, _ROW] >= previous[:, _ROW]
    return is_below & (this[:, _IMAGE] == previous[:, _IMAGE]) & (this[:, _COLUMN] == previous[:, _COLUMN])


def _has_to_be_waited_for(ids: Tensor) -> bool:
    return ids.device.type != "cpu"


def _keep_few(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > _REMEMBERED:
        kept.popitem(last=False)
