"""The sums. One folder for each operation: what it does (`api`), its specification in plain torch, and its kernels."""

from nearfield._types import Positions
from nearfield.ops import predict
from nearfield.ops.attention.api import attend, attend_continued, attend_parts, check_tensors
from nearfield.ops.attention.dispatch import explain_choice
from nearfield.ops.attention.partials import merge_partials
from nearfield.ops.attention.parts import KeyValuePart, gradients_of_part, merge_attended
from nearfield.ops.lists.api import for_one_call
from nearfield.ops.lists.boxes import find_boxes
from nearfield.ops.merge.api import Assignment, Group, Merging, Regions, matched, merging_of
from nearfield.ops.pool_select.api import (
    attend_pooled,
    check_pooling,
    chosen_blocks,
    log_sizes,
    pool,
    pool_and_select,
)
from nearfield.ops.predict.api import Blocks, Mask, Prediction, ReadStats
from nearfield.ops.rotary.api import is_rotated_by_kernel, rerotate_keys, rotate
from nearfield.ops.windows.api import (
    WeightedWindows,
    query_sums,
    weighted_windows,
    window_means,
    window_slope,
)

__all__ = [
    "Assignment",
    "Blocks",
    "Group",
    "KeyValuePart",
    "Mask",
    "Merging",
    "Positions",
    "Prediction",
    "ReadStats",
    "Regions",
    "WeightedWindows",
    "attend",
    "attend_continued",
    "attend_parts",
    "attend_pooled",
    "check_pooling",
    "check_tensors",
    "chosen_blocks",
    "explain_choice",
    "find_boxes",
    "for_one_call",
    "gradients_of_part",
    "is_rotated_by_kernel",
    "log_sizes",
    "matched",
    "merge_attended",
    "merge_partials",
    "merging_of",
    "pool",
    "pool_and_select",
    "predict",
    "query_sums",
    "rerotate_keys",
    "rotate",
    "weighted_windows",
    "window_means",
    "window_slope",
]
