"""Mutants that the suite must kill: one expression of the library changed, one named identity that then fails.

A mutant is a copy of one module with an expression replaced. It stands for the original, and so do copies of the
modules that hold its functions. The same identities pass on the library as it is, at the same size (test_attend.py runs
them all), so what a mutant fails at is its change.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from tests.attending import IDENTITIES, NEEDS_TRITON, SMALL
from tests.mutants import PACKAGE, changed
from tests.test_attend import SIZES
from torch import Tensor

from nearfield import planning
from nearfield.ops import KeyValuePart
from nearfield.ops import _triton as kernels
from nearfield.ops.attention import dispatch as implementations
from nearfield.plan.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


class Mutant(NamedTuple):
    """See `tests.mutants.changed` for the first four."""

    module: str
    function: str
    old: str
    new: str
    identity: str

    @property
    def impl(self) -> str:
        """The implementation that shows the change; the transpose is read by the kernels alone."""
        if self.module in (*KERNELS, PLAN):
            return "triton"
        return "grouped" if self.module in (GROUPED, RUNS) else "reference"


REFERENCE, GROUPED = "ops/attention/reference.py", "ops/attention/cpu.py"
RUNS = "ops/lists/runs.py"
PLAN, PLANNING = "plan/plan.py", "plan/builders.py"
WALK, FORWARD, BACKWARD = (
    "ops/_triton/walk.py",
    "ops/attention/triton/forward.py",
    "ops/attention/triton/backward.py",
)
# Each imports from those before it.
KERNELS = (
    WALK,
    "ops/lists/triton/pack.py",
    FORWARD,
    BACKWARD,
    "ops/attention/triton/pair.py",
    "ops/attention/triton/__init__.py",
)

MUTANTS = {
    # The specification.
    "reference forgets the bias": Mutant(
        REFERENCE,
        "_logits",
        "logits = logits + key_bias[:, :, None, :]",
        "pass",
        "repeated_block_is_bias_log_2",
    ),
    "reference counts repeated ids once": Mutant(
        REFERENCE,
        "_logits",
        "plan.pair_counts",
        "plan.to_mask",
        "repeated_block_is_bias_log_2",
    ),
    "reference forgets grad_lse": Mutant(
        REFERENCE,
        "_backward_of_part",
        "(grad_out * out_wide).sum(-1) - grad_lse",
        "(grad_out * out_wide).sum(-1)",
        "lse_alone_differentiates",
    ),
    "reference lets the gradient of an empty row spread": Mutant(
        REFERENCE,
        "_backward_of_part",
        "((grad_out * out_wide).sum(-1) - grad_lse).masked_fill(lse == -torch.inf, 0)",
        "(grad_out * out_wide).sum(-1) - grad_lse",
        "empty_rows_in_both_plans_merge",
    ),
    "reference deals key heads round": Mutant(
        REFERENCE,
        "_per_query_head",
        "_wide(key).repeat_interleave(query.shape[1] // key.shape[1], 1)",
        "_wide(key).repeat(1, query.shape[1] // key.shape[1], 1, 1)",
        "grouped_query_heads",
    ),
    "reference hides the present": Mutant(
        REFERENCE,
        "_logits",
        "positions.key[:, None, None, :] <= positions.query[:, None, :, None]",
        "positions.key[:, None, None, :] < positions.query[:, None, :, None]",
        "positions_hide_later_keys",
    ),
    "reference lets empty rows be NaN": Mutant(
        REFERENCE,
        "_weights",
        "torch.softmax(logits, -1).masked_fill((lse == -torch.inf)[..., None], 0)",
        "torch.softmax(logits, -1)",
        "empty_rows_are_zero",
    ),
    # The CPU path.
    "grouped drops the last list entry": Mutant(
        RUNS,
        "runs_of_rows",
        "blocks[start:stop]",
        "blocks[start:stop - 1]",
        "full_plan_is_dense",
    ),
    "grouped reads repeated blocks once": Mutant(
        RUNS,
        "runs_of_rows",
        "as_runs(ids, plan.k_block, plan.num_keys)",
        "as_runs(sorted(set(ids)), plan.k_block, plan.num_keys)",
        "repeated_block_is_bias_log_2",
    ),
    "grouped trims the ragged tail too far": Mutant(
        GROUPED,
        "_slots",
        "plan.num_keys % plan.k_block",
        "plan.num_keys % plan.k_block - 1",
        "lists_per_head_and_batch",
    ),
    "grouped forgets grad_lse": Mutant(
        GROUPED,
        "_differentiate_piece",
        "torch.linalg.vecdot(grad_weights, weights) - known.grad_lse.flatten(1, 2)",
        "torch.linalg.vecdot(grad_weights, weights)",
        "lse_alone_differentiates",
    ),
    "grouped scatters a key's gradient once": Mutant(
        GROUPED,
        "_add_at",
        "x.index_add_",
        "x.index_copy_",
        "lists_per_head_and_batch",
    ),
    "grouped trusts the operator with empty rows": Mutant(
        GROUPED,
        "_read_fused",
        "lse.masked_fill(empty, -torch.inf)",
        "lse",
        "empty_rows_are_zero",
    ),
    "grouped mixes key heads": Mutant(
        GROUPED,
        "_stacked_rows",
        "heads[some] // (query.shape[1] // key.shape[1])",
        "heads[some] % key.shape[1]",
        "lists_per_head_and_batch",
    ),
    "grouped keeps stale keys": Mutant(
        GROUPED,
        "_Store.gather",
        "sorted(wanted - self.content)",
        "sorted(wanted)[len(self.content):]",
        "ring_is_masked_dense",
    ),
    # The kernels.
    "kernels drop the last list entry": Mutant(
        FORWARD,
        "walk_list",
        "entries = blocks + start",
        "entries = blocks + start; count -= 1",
        "full_plan_is_dense",
    ),
    "kernels drop the last list entry backwards": Mutant(
        BACKWARD,
        "walk_for_queries",
        "entries = blocks + start",
        "entries = blocks + start; count -= 1",
        "full_plan_is_dense",
    ),
    "kernels forget the bias": Mutant(
        WALK,
        "masked_logits",
        "logits += bias",
        "logits += 0.0",
        "repeated_block_is_bias_log_2",
    ),
    "kernels forget the ragged tail": Mutant(
        WALK,
        "masked_logits",
        "tl.where(exists, logits, -INF)",
        "logits",
        "odd_sizes",
    ),
    "kernels mix key heads": Mutant(
        FORWARD,
        "_forward_kernel",
        "head // heads_per_key",
        "head % (num_heads // heads_per_key)",
        "grouped_query_heads",
    ),
    "kernels forget grad_lse": Mutant(
        BACKWARD,
        "statistics_of",
        "tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1) - grad_lse",
        "tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)",
        "lse_alone_differentiates",
    ),
    "kernels let the gradient of an empty row spread": Mutant(
        BACKWARD,
        "statistics_of",
        "tl.where(read_nothing, 0.0, products)",
        "products",
        "empty_rows_in_both_plans_merge",
    ),
    "kernels subtract a maximum of -inf": Mutant(
        FORWARD,
        "_read_tile",
        "tl.where(new_max == -INF, 0.0, new_max)",
        "new_max",
        "empty_rows_are_zero",
    ),
    # Who reads whom.
    "the ring does not wrap": Mutant(
        PLANNING,
        "_reach_on_ring",
        "curve[0] + wrapped",
        "torch.full_like(wrapped, curve[0])",
        "ring_is_masked_dense",
    ),
    "the transpose forgets the order of its sort": Mutant(
        PLAN,
        "Plan._transposed",
        "ordered % self.num_rows",
        "cell % self.num_rows",
        "lists_per_head_and_batch",
    ),
    "the transpose keeps unused slots": Mutant(
        PLAN,
        "Plan._transposed",
        "torch.where(used, self.blocks, self.num_columns)",
        "self.blocks",
        "lists_per_head_and_batch",
    ),
}


def load(name: str, path: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """A module made from a file under a name of its own choosing, until the test ends."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def write(mutant: Mutant, folder: Path) -> Path:
    """The changed module as a file, since Triton reads the source of its kernels."""
    path = folder / Path(mutant.module).name
    path.write_text(changed(mutant.module, mutant.function, mutant.old, mutant.new), encoding="utf-8")
    return path


def replace(mutant: Mutant, path: Path, patch: pytest.MonkeyPatch) -> None:
    """Put the mutant where the library looks for the original."""
    if mutant.module in KERNELS:
        kernels.load("attention.triton")  # the originals are there, to come back
        patch.setattr(kernels, "_module", importlib.import_module)  # which remembers nothing
        for file in KERNELS:
            name = ".".join(("nearfield", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
            package, _, attribute = name.rpartition(".")
            module = load(name, path if file == mutant.module else PACKAGE / file, patch)
            patch.setattr(sys.modules[package], attribute, module)
        return
    module = load("nearfield_mutant", path, patch)
    if mutant.module == REFERENCE:
        patch.setattr(implementations, "reference", module)
    elif mutant.module == GROUPED:
        patch.setattr(implementations, "grouped", module)
    elif mutant.module == RUNS:
        patch.setattr(implementations.grouped, "runs_of_rows", module.runs_of_rows)
    elif mutant.module == PLANNING:
        patch.setattr(planning, "ring", module.ring)
    else:  # a kernel may do the same
        patch.setattr(kernels.load("attention.triton").pair, "_rows_of_keys", _transposed_by_plans)
        patch.setattr(Plan, "_transposed", module.Plan._transposed)


def _transposed_by_plans(query: Tensor, parts: Sequence[KeyValuePart]) -> tuple[list[Any], list[int]]:
    """The rows of keys of a backward pass, whose plans are transposed by themselves and by no kernel."""
    from nearfield.ops.attention.triton.backward import KeyRows

    return [KeyRows.of(query, part.key, part.plan.transpose()) for part in parts], []


def where(impl: str, device: torch.device) -> torch.device:
    """The plain implementations are changed in what they do on the CPU."""
    return device if impl == "triton" else torch.device("cpu")


def marked(*case: str) -> Any:
    """The last of a case is its implementation."""
    return pytest.param(*case, marks=[NEEDS_TRITON] if case[-1] == "triton" else [])


@pytest.mark.parametrize(("name", "impl"), [marked(name, mutant.impl) for name, mutant in MUTANTS.items()])
def test_mutant_is_killed(
    name: str, impl: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = MUTANTS[name]
    replace(mutant, write(mutant, tmp_path), monkeypatch)
    with pytest.raises(AssertionError):
        IDENTITIES[mutant.identity](impl, SMALL, where(impl, device))


@pytest.mark.parametrize("impl", sorted({mutant.impl for mutant in MUTANTS.values()}))
def test_identities_are_run_without_mutants(impl: str) -> None:
    assert (impl, SMALL) in [(tested, size) for tested, size, _ in SIZES]
