"""What full attention would read, predicted by weights, by means or by other scores."""

from nearfield.ops.predict.api import (
    Blocks,
    Mask,
    Prediction,
    ReadStats,
    by_means,
    by_scores,
    by_weights,
    log_masses,
    packed,
    unpacked,
)

__all__ = [
    "Blocks",
    "Mask",
    "Prediction",
    "ReadStats",
    "by_means",
    "by_scores",
    "by_weights",
    "log_masses",
    "packed",
    "unpacked",
]
