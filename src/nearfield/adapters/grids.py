"""Reading the grids of images from position ids, without waiting for the device more often than needed."""

import weakref
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.geometry import Grid

_IMAGE, _ROW, _COLUMN = range(3)
_REMEMBERED = 8


class _Seen(NamedTuple):
    tensor: "weakref.ref[Tensor]"
    version: int
    address: int
    grids: tuple[Grid, ...]


class GridReader:
    """The grids behind tensors of position ids. A tensor is read once, and again only if it was written to."""

    def __init__(self) -> None:
        self.expected: tuple[Grid, ...] = ()
        """What was made ready last: under torch.compile values cannot be read, only expected."""
        self._seen: OrderedDict[int, _Seen] = OrderedDict()

    def read(self, ids: Tensor) -> tuple[Grid, ...]:
        """The grids of all images, in sequence order.

        Args:
            ids: `[N, 3 or more]` (a batch of equal ids is allowed): image, row and column of each token.
        """
        if torch.compiler.is_compiling():
            return self.expected
        if ids.is_inference():  # their writes are not counted, so what was read may be out of date
            return image_grids(ids)
        seen = self._seen.get(id(ids))
        if seen is not None and seen.tensor() is ids and seen[1:3] == (ids._version, ids.data_ptr()):
            return seen.grids
        grids = image_grids(ids)
        self._seen[id(ids)] = _Seen(weakref.ref(ids), ids._version, ids.data_ptr(), grids)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return grids


def image_grids(ids: Tensor) -> tuple[Grid, ...]:
    """The (height, width) of each image: lines of equal width, stacked while image and rows go on.

    Ids may be rounded (bfloat16 knows every second row beyond 256), so a line ends where columns start again, too.
    """
    place = (ids[0] if ids.dim() == 3 else ids)[:, : _COLUMN + 1].detach().cpu()
    step = place[1:] - place[:-1]
    is_new = (step[:, :_COLUMN] != 0).any(dim=1) | (step[:, _COLUMN] < 0)
    starts = torch.cat([torch.tensor([0], device="cpu"), is_new.nonzero().flatten() + 1])
    widths = torch.cat([starts[1:], torch.tensor([len(place)], device="cpu")]) - starts
    grids: list[Grid] = []
    previous: list[float] = []
    for line, width in zip(place[starts].tolist(), widths.tolist(), strict=True):
        goes_on = previous and line[_IMAGE] == previous[_IMAGE] and line[_ROW] >= previous[_ROW]
        if goes_on and width == grids[-1][1]:
            grids[-1] = (grids[-1][0] + 1, width)
        else:
            grids.append((1, width))
        previous = line
    return tuple(grids)
