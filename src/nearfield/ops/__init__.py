"""The sums. One folder for each operation: what it does (`api`), its specification in plain torch, and its kernels."""

import nearfield.ops.lists.api  # noqa: F401, declares an operator that builders of plans call
from nearfield._types import Positions
from nearfield.ops import predict
from nearfield.ops.attention.api import (
    KeyValuePart,
    Pooling,
    attend,
    attend_continued,
    attend_parts,
    check_tensors,
    gradients,
    merge_attended,
    packing_for,
)
from nearfield.ops.attention.dispatch import explain_choice
from nearfield.ops.attention.partials import merge_partials
from nearfield.ops.merge.api import Assignment, Group, Merging, Regions, matched, merging_of
from nearfield.ops.pool_select.api import check_pooling, chosen_blocks, log_sizes, pool, pool_and_select
from nearfield.ops.predict.api import Blocks, Mask, Prediction, ReadStats
from nearfield.ops.rotary.api import is_rotated_by_kernel, rerotate_keys, rotate
from nearfield.ops.windows.api import WeightedWindows, query_sums, weighted_windows, window_means

__all__ = [
    "Assignment",
    "Blocks",
    "Group",
    "KeyValuePart",
    "Mask",
    "Merging",
    "Pooling",
    "Positions",
    "Prediction",
    "ReadStats",
    "Regions",
    "WeightedWindows",
    "attend",
    "attend_continued",
    "attend_parts",
    "check_pooling",
    "check_tensors",
    "chosen_blocks",
    "explain_choice",
    "gradients",
    "is_rotated_by_kernel",
    "log_sizes",
    "matched",
    "merge_attended",
    "merge_partials",
    "merging_of",
    "packing_for",
    "pool",
    "pool_and_select",
    "predict",
    "query_sums",
    "rerotate_keys",
    "rotate",
    "weighted_windows",
    "window_means",
]
