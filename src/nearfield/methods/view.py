"""What of a method can be drawn on an image."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.layout import Span


class View(NamedTuple):
    """A layer of a method on one image. Tokens stand in raster order where no other order is named.

    Args:
        curve: `[n]`, the raster index of each token along the curve.
        curve_name: the name of that curve.
        sequence: `[n]`, the raster index of each token as they stand after the text.
        group: `[n]` int64, the group of every token: what one colour shows.
        group_name: what groups are called.
        reads_group: whether a token reads exactly its group; otherwise a group is a block of queries.
        is_shared: `[n]` bool, tokens that everyone reads. They may lie in any group.
        shared_reads_all: whether these read everyone, too.
        subtitle: a fact about the layer.
        facts: facts about the method, one line each.
    """

    curve: Tensor
    curve_name: str
    sequence: Tensor
    group: Tensor
    group_name: str
    reads_group: bool
    is_shared: Tensor
    shared_reads_all: bool
    subtitle: str
    facts: Sequence[str]


def view_of_blocks(order: Tensor, span: Span, q_block: int, curve_name: str) -> View:
    """Tokens in an order, of which each belongs to the block of queries that it is in."""
    is_shared = torch.zeros(len(order), dtype=torch.bool)
    group = blocks_in_picture(order, span[0], q_block)
    return View(order, curve_name, order, group, "Blocks of queries", False, is_shared, False, "", ())


def blocks_in_picture(order: Tensor, start: int, q_block: int) -> Tensor:
    """The block of queries of every token, in raster order, from 0 on."""
    row = (torch.arange(len(order)) + start) // q_block
    return torch.empty_like(row).scatter_(0, order, row - row[0])
