"""Matrices of regions times the tokens of regions, and what they are added to: the specification."""

from torch import Tensor


def multiplied(
    matrix: Tensor | None, x: Tensor, minus: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """`onto + matrix @ (x - minus)`, region by region.

    Args:
        matrix: `[..., regions, rows, columns]`; None stands for that which changes nothing.
        x, minus: `[..., regions, columns, C]`; by default nothing is taken away.
        onto: `[..., regions, rows, C]`, or nothing.
    """
    change = x if minus is None else x - minus
    product = change if matrix is None else matrix @ change
    return product if onto is None else onto + product
