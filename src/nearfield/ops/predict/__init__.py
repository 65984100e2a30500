"""What full attention would read, predicted by weights or by means."""

from nearfield.ops.predict.api import (
    Blocks,
    Mask,
    Prediction,
    ReadStats,
    by_means,
    by_weights,
    packed,
    unpacked,
)

__all__ = ["Blocks", "Mask", "Prediction", "ReadStats", "by_means", "by_weights", "packed", "unpacked"]
