"""Fine-grained attention in models and pipelines: what it reads, and what it remembers between steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny_models
from tests.test_adapters import assert_differ, assert_same, double, run
from tests.test_adapters_moments import LAYERS, call_of, flux_of, gradients, guidance, oracle, pipe_of
from tests.test_adapters_video import made, with_other_padding
from torch import Tensor

import nearfield
from nearfield import FineGrained, Hilbert, Merge, recipes
from nearfield.methods import Composition, fields
from nearfield.methods.recipes import Recipe

FINE = FineGrained(16, 2, threshold="1/N", refresh=(0.0, 0.5))
"""Reads as `Remembering()` does, which the oracle writes out."""
ONLINE = FineGrained(16, 2, predict="online", top_p=0.5, min_similarity=None)

__all__ = ["oracle"]


@pytest.mark.parametrize("is_guided", [False, True])
def test_lists_are_made_on_schedule_and_serve_until_the_next(
    is_guided: bool, oracle: Callable[..., Tensor]
) -> None:
    pipe = pipe_of()
    more, branches = (guidance(), 2) if is_guided else ({}, 1)
    expected = oracle(pipe, call_of(**more), branches=branches)
    with nearfield.apply(pipe, FINE) as handle:
        assert_same(pipe(**call_of(**more)).images, expected)
        told = handle.summary()
    calls = 6 * LAYERS * branches
    assert f"last generation: {calls // 3} of {calls} attention calls full, the others kept " in told


def test_memory_bound_is_held(oracle: Callable[..., Tensor]) -> None:
    pipe = pipe_of()
    expected = oracle(pipe, call_of(4, **guidance()), branches=2)
    method = FineGrained(16, 2, threshold="1/N", refresh=(0.0, 0.5), memory=0)
    with nearfield.apply(pipe, method) as handle:
        assert "at most 0 GiB on the device (memory=0)" in handle.summary(height=192, width=160)
        assert_same(pipe(**call_of(4, **guidance())).images, expected)
        told = handle.summary()
    # 2 layers, 2 heads, 8 blocks of queries, 64 of keys; 2 branches.
    assert f"memory: {2 * 2 * (8 * 8 + 4 * 9) / 1024:.1f} KiB as bits" in told
    assert f"taken: {2 * 2 * 2 * (8 * 8 + 4 * 9) / 1024:.1f} KiB as bits in host memory" in told


def test_layers_share_the_memory_allowed() -> None:
    """All of them together stay below the bound, as lists where those fit and as bits where not."""
    pipe = pipe_of()

    def taken(**fields: Any) -> list[Any]:
        with nearfield.apply(pipe, replace(FINE, **fields)) as handle:
            pipe(**call_of(2))
            return [reader.most for reader in handle._regions[0].state.attentions]

    free = taken()
    assert all(set(most) == {"lists"} for most in free)
    bound = max(most["lists"] for most in free)  # of one layer, where there are two
    bounded = taken(memory=bound / 2**30)
    assert all(set(most) == {"bits"} for most in bounded)
    assert sum(most["bits"] for most in bounded) <= bound


# -- lists that are predicted at every call --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan_ti2v", "hunyuan_i2v", "ltx_i2v"])
def test_online_lists_of_everything_are_the_stock_model(name: str) -> None:
    model, inputs = made(name, (3, 4, 5), 2)
    stock = run(model, inputs)
    with nearfield.apply(model, ONLINE) as handle:
        assert_differ(run(model, inputs), stock)
        assert "attention calls kept " in handle.summary()
    with nearfield.apply(model, replace(ONLINE, top_p=1.0)):
        assert_same(run(model, inputs), stock)


def test_a_mask_of_text_is_kept_out_of_predictions() -> None:
    """What padded text holds does not matter."""
    model, inputs = made("hunyuan", (3, 4, 5), 2)
    with nearfield.apply(model, ONLINE):
        expected = run(model, inputs)
        blocks = list[Tensor]()
        hook = model.transformer_blocks[0].register_forward_pre_hook(
            lambda module, args: (args[0], with_other_padding(args[1], blocks), *args[2:])
        )
        found = run(model, inputs)
        hook.remove()
    assert len(blocks) == 1
    assert_same(found, expected)


def test_online_lists_compile_and_train() -> None:
    torch._dynamo.reset()
    model, inputs = flux_of(layers=0), double(tiny_models.flux_inputs((12, 10)))
    method = FineGrained(16, 4, predict="online", top_p=0.5)
    assert method.compile_reason is None
    assert "remembered from step to step" in str(FineGrained().compile_reason)
    with nearfield.apply(model, method):
        expected = run(model, inputs)
        plain = gradients(model, inputs)
        model.enable_gradient_checkpointing()
        assert_same(gradients(model.train(), inputs), plain)
        model.disable_gradient_checkpointing()
        model.eval().compile_repeated_blocks(fullgraph=True, backend="eager")
        assert_same(run(model, inputs), expected)
    torch._dynamo.reset()


def test_everything_read_changes_nothing_about_merging() -> None:
    model, call = tiny_models.flux().double(), double(tiny_models.flux_inputs((6, 8), 2))
    merge = Merge(0.5, region_size=16, skip_blocks=(1, 1), sharpness=float("inf"))
    every = Hilbert(tiles=1, near="tile", far=None, dense_layers=0, dense_steps=0)
    with nearfield.apply(model, merge | every):
        expected = run(model, call)
    everything = FineGrained(query_block=16, predict="online", top_p=1.0, min_similarity=None)
    with nearfield.apply(model, merge | everything):
        assert_same(run(model, call), expected)


def test_recipes_and_commands_know_its_fields() -> None:
    method = Merge(0.25) | FineGrained(threshold=0.01, min_similarity=None, refresh=(0.0,), memory=0.5)
    assert recipes.read(Recipe(method).as_document()).method == method
    assert isinstance(method, Composition)
    given = {"threshold": "0.2/N", "refresh": "0,0.5", "min_similarity": "none", "memory": "1"}
    made = fields.made("finegrained", given)
    assert made == FineGrained(threshold="0.2/N", refresh=(0.0, 0.5), min_similarity=None, memory=1)
    assert fields.made("finegrained", {"threshold": "0.01"}) == FineGrained(threshold=0.01)
