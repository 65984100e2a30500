"""Lists as runs of consecutive tokens, as numbers of Python: what the CPU path walks."""

from collections.abc import Sequence
from itertools import pairwise

from nearfield.plan import Plan, Run, Runs

# At most this many runs are kept with a plan: as numbers of Python they are large.
_MOST_KEPT_RUNS = 2**16


def runs_of_rows(plan: Plan, list_batch: int) -> tuple[Runs, ...]:
    """What each row reads, where all heads share the lists of a batch element; kept with the plan for later calls."""
    known = plan.prepared.runs
    if list_batch in known:
        return known[list_batch]
    offsets = plan.offsets[list_batch, 0].tolist()
    blocks = plan.blocks[list_batch, 0].tolist()
    runs_of: dict[tuple[int, ...], Runs] = {}
    rows = []
    for start, stop in pairwise(offsets):
        ids = tuple(blocks[start:stop])
        if ids not in runs_of:
            runs_of[ids] = as_runs(ids, plan.k_block, plan.num_keys)
        rows.append(runs_of[ids])
    if sum(map(len, runs_of.values())) <= _MOST_KEPT_RUNS:
        known[list_batch] = tuple(rows)
    return tuple(rows)


def as_runs(ids: Sequence[int], block: int, length: int) -> Runs:
    """Ascending blocks as runs of tokens. A repeated block starts a new run."""
    runs: list[Run] = []
    for index in ids:
        start, stop = index * block, min((index + 1) * block, length)
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)
