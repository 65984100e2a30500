"""Rows walked together, and rows that several programs share, give what each row by itself gives."""

from typing import Any

import pytest
import torch
from tests.attending import NEEDS_TRITON, assert_budget, random_bias, random_inputs, random_plan
from torch import Tensor

from nearfield import Plan
from nearfield._types import Attended
from nearfield.cli.check import poisoned_memory
from nearfield.ops import KeyValuePart, attend_parts
from nearfield.ops.attention import reference
from nearfield.ops.pool_select import api as pool_select

pytestmark = NEEDS_TRITON


def merged_by_hand(plan: Plan, head: tuple[int, int], first: int, pack: int) -> list[tuple[int, int]]:
    """Ids that rows `first` to `first + pack` read, ascending, with a bit for each of them that does, as often as it
    does."""
    offsets = plan.offsets[head].tolist()
    lists = [
        plan.blocks[head][offsets[row] : offsets[row + 1]].tolist() if row < plan.num_rows else []
        for row in range(first, first + pack)
    ]
    merged = []
    for id_ in sorted({id_ for each in lists for id_ in each}):
        for times in range(max(each.count(id_) for each in lists)):
            merged.append((id_, sum(1 << row for row, each in enumerate(lists) if each.count(id_) > times)))
    return merged


@pytest.mark.parametrize("pack", [2, 4, 16])
def test_lists_are_merged_and_filled_up(pack: int, device: torch.device) -> None:
    from nearfield.ops._triton.launch import Tiles
    from nearfield.ops.lists.triton.pack import rows_of

    plan = random_plan(
        150, 90, q_block=16, k_block=8, batch=2, heads=2, repeats=True, empty_rows=True, device=device
    )
    with poisoned_memory():
        rows = rows_of(plan, Tiles(16 * pack, 32, 4, 2, pack=pack), 2, 2)
    assert rows.order is None
    assert (rows.number, rows.size) == (-(-10 // pack), 16 * pack)
    for head in ((0, 0), (1, 1)):
        for group, (start, count) in enumerate(rows.offsets[head].view(-1, 2).tolist()):
            want = merged_by_hand(plan, head, group * pack, pack)
            got = [
                (entry >> pack, entry % 2**pack)
                for entry in rows.blocks[head][start : start + count].tolist()
            ]
            assert got[: len(want)] == want
            assert len(got) == -(-len(want) // 4) * 4  # tiles of 32 keys are 4 blocks
            assert all(entry == (want[-1][0], 0) for entry in got[len(want) :])


CASES = {
    "bias, ragged": (100, 90, 16, 16, True, 2),
    "blocks of a tile": (70, 64, 8, 32, False, 2),
    "grouped heads": (64, 70, 16, 8, True, 1),
    "single keys": (100, 50, 32, 1, True, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_and_shared_rows_are_right(name: str, device: torch.device) -> None:
    """Against float64, within twice the error of plain float32: results, and gradients of everything."""
    from nearfield.ops._triton.launch import Tiles
    from nearfield.ops.attention.triton import backward, forward

    num_queries, num_keys, q_block, k_block, has_bias, key_heads = CASES[name]
    query, key, value = random_inputs(2, 2, num_queries, num_keys, 16, device=device)
    key, value = key[:, :key_heads], value[:, :key_heads]
    plan = random_plan(
        num_queries, num_keys, q_block=q_block, k_block=k_block, heads=2, empty_rows=True, device=device
    )
    bias = random_bias(2, 2, num_keys, device=device) if has_bias else None
    grad_out = torch.randn(query.shape, device=device)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        tensors = [x.to(dtype) for x in (query, key, value)]
        wide_bias = None if bias is None else bias.to(dtype)
        part = KeyValuePart(*tensors[1:], plan, wide_bias)
        attended = reference.attend_forward(tensors[0], part, 0.25)
        grads = Attended(grad_out.to(dtype), torch.zeros_like(attended.lse))
        found = reference.attend_backward(grads, tensors[0], [part], attended, 0.25, [has_bias])
        return [*attended, found.query, *(x for x in found.parts[0] if x is not None)]

    with poisoned_memory():
        tiles = Tiles(4 * q_block, 32, 4, 2, pack=4)
        part = KeyValuePart(key, value, plan, bias)
        attended = forward.attend_forward(query, part, 0.25, tiles)
        of_rows = backward.row_gradients(Attended(grad_out, torch.zeros_like(attended.lse)), attended)
        call = of_rows, query, part, 0.25
        half = backward.query_gradient(*call, tiles) / 2
        grad_query = backward.query_gradient(*call, tiles, before=half.clone()) - half
        pack = 2 if k_block > 1 else 16
        key_tiles = Tiles(max(16, pack * k_block), 16, 4, 1, pack=pack, chunk=2)
        grads = [x for x in backward.key_gradient(*call, key_tiles) if x is not None]
    names = ("out", "lse", "query", "key", "value", "bias")
    exact, low = plain(torch.float64), plain(torch.float32)
    assert len(grads) == len(exact) - 3
    for what, *values in zip(names, [*attended, grad_query, *grads], exact, low, strict=False):
        assert_budget(what, *values)


def test_rows_that_several_programs_share_have_one_result(device: torch.device) -> None:
    """What is left by programs is summed in their order: equal bits from run to run; and a launch that splits does
    split, for a plan in which one block is read by all."""
    from nearfield.ops._triton.launch import Tiles, chunk_of
    from nearfield.ops.attention.triton import backward

    query, key, value = random_inputs(1, 1, 96, 64, 16, device=device)
    plan = random_plan(96, 64, q_block=16, k_block=16, device=device)
    zeros = torch.zeros(1, 1, 96, device=device)
    call = backward.RowGradients(query, zeros, zeros), query, KeyValuePart(key, value, plan), 0.25
    first, second, whole = (
        backward.key_gradient(*call, Tiles(16, 16, 4, 1, chunk=chunk))[:2] for chunk in (2, 2, 0)
    )
    for one, other, alone in zip(first, second, whole, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone)
    long = random_plan(65536, 64, q_block=128, k_block=16).transpose()
    assert chunk_of(6, long, Tiles(16, 64, 4, 2)) == 128
    assert chunk_of(600, long, Tiles(16, 64, 4, 2)) == 0


@pytest.mark.parametrize("grain", [1, 4])
def test_small_blocks_of_keys_fill_a_tile_where_rows_are_alike(
    grain: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are those of each block by itself; ids that leave no room for bits are not packed."""
    from nearfield.ops._triton import launch
    from nearfield.ops.attention.triton import backward

    query, key, value = random_inputs(1, 2, 70, 40, 16, device=device)
    far_key, far_value = torch.randn(2, 1, 2, 37, 16, device=device).unbind()
    near = random_plan(70, 40, q_block=32, k_block=16, device=device)
    far = random_plan(70, 37, q_block=32, k_block=grain, share=0.8, device=device)
    packs: list[int] = []

    def chosen(*call: Any, **how: Any) -> launch.Tiles:
        tiles = key_gradient_tiles(*call, **how)
        packs.append(tiles.pack)
        return tiles

    key_gradient_tiles = launch.key_gradient_tiles
    monkeypatch.setattr(backward, "key_gradient_tiles", chosen)
    found = []
    for similar, has_room in ((False, True), (True, True), (True, False)):
        if not has_room:
            monkeypatch.setattr(backward, "has_room_for_bits", lambda _, pack: pack == 1)
        leaves = [x.clone().requires_grad_() for x in (query, key, value, far_key, far_value)]
        plan = similar_rows(far) if similar else far
        parts = [KeyValuePart(*leaves[1:3], near), KeyValuePart(*leaves[3:], plan)]
        out = attend_parts(leaves[0], parts, impl="triton").out
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    assert packs == [1, 1, 1, 16 // grain, 1, 16 // grain, 1]
    for one, packed, unpacked in zip(*found, strict=True):
        torch.testing.assert_close(one, packed)
        assert torch.equal(one, unpacked)


def similar_rows(plan: Plan) -> Plan:
    sizes = plan.q_block, plan.k_block, plan.num_queries, plan.num_keys
    return Plan(plan.offsets, plan.blocks, *sizes, similar_rows=True, check=False)


def test_ids_have_room_for_bits(device: torch.device) -> None:
    from nearfield.ops.lists.triton.pack import has_room_for_bits

    offsets, blocks = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 1, dtype=torch.int32)
    for columns, pack, wanted in ((2**15, 16, True), (2**15 + 1, 16, False), (2**15 + 1, 4, True)):
        plan = Plan(offsets, blocks, 16, 16, 16, 16 * columns, check=False)
        assert has_room_for_bits(plan, pack) == wanted


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("pack", [1, 4])
def test_keys_get_their_shares_of_the_gradients_of_means(pack: int, chunk: int, device: torch.device) -> None:
    """In rows that one program finishes, and in those that several share; beside a pass of its own."""
    from nearfield.ops._triton.launch import Tiles
    from nearfield.ops.attention.triton import backward
    from nearfield.ops.pool_select.triton import pool

    query, key, value = random_inputs(2, 2, 96, 70, 16, device=device)
    plan = random_plan(96, 70, q_block=16, k_block=16, heads=2, device=device)
    zeros = torch.zeros(2, 2, 96, device=device)
    call = backward.RowGradients(query, zeros, zeros), query, KeyValuePart(key, value, plan), 0.25
    means = torch.randn(2, 2, 2, 28, 16, device=device)
    tiles = Tiles(16 * pack, 16, 4, 1, pack=pack, chunk=chunk)
    with poisoned_memory():
        alone = backward.key_gradient(*call, tiles)
        together = backward.key_gradient(*call, tiles, means=backward.Means(means[0], means[1], 4, 2))
    for one, both, mean in zip(alone[:2], together[:2], means, strict=True):
        torch.testing.assert_close(both, one + pool.pool_backward(mean, 70, 4, 2))


@pytest.mark.parametrize(("num_keys", "key_heads"), [(80, 2), (75, 1)])
def test_two_parts_are_read_by_one_kernel(
    num_keys: int, key_heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by one each: with a bias on either, ragged blocks, rows that read nothing in one part or in both."""
    from nearfield.ops._triton import launch
    from nearfield.ops._triton.launch import Tiles
    from nearfield.ops.attention.triton import pair

    query, key, value = random_inputs(2, 2, 100, num_keys, 16, device=device)
    _, far_key, far_value = random_inputs(2, 2, 100, 40, 16, device=device, seed=5)
    key, value, far_key, far_value = (x[:, :key_heads] for x in (key, value, far_key, far_value))
    blocks = {"heads": 2, "empty_rows": True, "device": device}
    near = random_plan(100, num_keys, q_block=16, k_block=16, **blocks)  # type: ignore[arg-type]
    far = random_plan(100, 40, q_block=64, k_block=8, seed=1, **blocks)  # type: ignore[arg-type]
    bias, far_bias = (random_bias(2, 2, length, device=device) for length in (num_keys, 40))
    parts = [
        KeyValuePart(far_key, far_value, far, far_bias),
        KeyValuePart(key, value, similar_rows(near), bias),
    ]
    weights = torch.randn(query.shape, device=device)

    def attended(parts: list[KeyValuePart]) -> tuple[Tensor, ...]:
        leaf = query.clone().requires_grad_()
        with poisoned_memory():
            out, lse = attend_parts(leaf, parts, impl="triton")
            loss = (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0).square().sum()
            return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaf)

    apart = attended(parts)
    tiles = Tiles(32, 32, 4, 2, pack=2)
    for function in ("pair_tiles", "pair_gradient_tiles"):
        monkeypatch.setattr(pair, function, lambda query, near, far: tiles)
    paired = attended(parts)
    # Rows that nobody calls similar are walked one by one.
    assert all(map(torch.equal, attended([parts[0], parts[1]._replace(plan=near)]), apart))
    for mine, theirs in zip(paired, apart, strict=True):
        assert not torch.equal(mine, theirs)  # the other kernel ran
        torch.testing.assert_close(mine, theirs)
    assert bool((paired[1] == -torch.inf).any())
    # Which plans it would read is known without running it.
    monkeypatch.setattr(launch, "PAIR", tiles)
    half = query.half()
    assert launch.pair_tiles(half, near, far) == tiles
    assert launch.pair_tiles(query, near, far) is None
    assert launch.pair_tiles(half, far, far) is None


def test_rows_are_packed_only_if_called_similar(device: torch.device) -> None:
    """And small tiles have few warps only where programs are many, for the precision and the heads they were measured
    with."""
    from nearfield.ops._triton import launch

    half = torch.empty(1, 4, 8192, 64, device=device, dtype=torch.float16)
    few, wide, exact = half[:, :, :256], torch.empty(1, 4, 8192, 128, device=device).half(), half.float()
    assert launch.key_gradient_tiles(half, half, 16, 16, similar=True).pack == 4
    assert launch.query_gradient_tiles(half, 16, 16, similar=True).pack == 4
    for query in (half, few, wide, exact):
        assert launch.key_gradient_tiles(query, query, 16, 16).pack == 1
        assert launch.query_gradient_tiles(query, 16, 16).pack == 1
    for query in (wide, exact):
        assert launch.key_gradient_tiles(query, query, 16, 16, similar=True).pack == 1
        assert launch.query_gradient_tiles(query, 16, 16, similar=True).pack == 1
    for query, warps in ((half, (1, 1, 2)), (few, (4, 4, 4)), (wide, (4, 4, 4)), (exact, (4, 4, 4))):
        tiles = (
            launch.forward_tiles(query, query, 16, 16),
            launch.query_gradient_tiles(query, 16, 16),
            launch.key_gradient_tiles(query, query, 128, 16),
        )
        assert tuple(each.warps for each in tiles) == warps
    near, far = (random_plan(256, 256, q_block=q_block, k_block=16, device=device) for q_block in (16, 128))
    assert launch.pair_tiles(few, near, far) == launch.PAIR
    for shape in (launch.PAIR, launch.PAIR_GRADIENT):  # rows are merged as these kernels walk them
        assert shape is not None
        assert (shape.pack, shape.other // 16) == pool_select._PACKING
    assert launch.pair_gradient_tiles(few, near, far) == launch.PAIR_GRADIENT
    assert launch.pair_tiles(wide, near, far) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_tensor_cores_read_packed_rows(dtype: torch.dtype) -> None:
    """Blocks of 16 as LogLinear has them, in tiles of 64: both parts by one kernel, and the gradients of each."""
    from nearfield.ops._triton.launch import Tiles
    from nearfield.ops.attention.triton import backward, forward, pair

    device = torch.device("cuda")
    query, key, value = (x.to(dtype) for x in random_inputs(2, 4, 1000, 1000, 64, device=device))
    _, far_key, far_value = (x.to(dtype) for x in random_inputs(2, 4, 1000, 90, 64, device=device, seed=5))
    bias = random_bias(2, 4, 90, device=device)
    near = random_plan(1000, 1000, q_block=16, k_block=16, heads=4, share=0.1, device=device)
    far = random_plan(1000, 90, q_block=128, k_block=16, heads=4, device=device, seed=1)
    parts = [KeyValuePart(key, value, near), KeyValuePart(far_key, far_value, far, bias)]
    tiles = Tiles(64, 64, 4, 3, pack=4)
    with poisoned_memory():
        attended = pair.attend_pair(query, parts[0], parts[1], 0.125, tiles)
    apart = forward.attend_forward(query, parts[1], 0.125)
    apart = forward.attend_forward(query, parts[0], 0.125, before=apart)
    for together, alone in zip(attended, apart, strict=True):
        assert_alike(together, alone)
    grads = Attended(torch.randn_like(query), torch.zeros_like(attended.lse))
    of_rows = backward.row_gradients(grads, attended)
    for part, packed in zip(parts, (tiles, Tiles(64, 64, 4, 3)), strict=True):
        call = of_rows, query, part, 0.125
        with poisoned_memory():
            got = [backward.query_gradient(*call, packed)]
            got += [
                x for x in backward.key_gradient(*call, Tiles(64, 64, 4, 2, pack=4, chunk=2)) if x is not None
            ]
        want = [backward.query_gradient(*call)]
        want += [x for x in backward.key_gradient(*call, Tiles(16, 64, 4, 2, chunk=0)) if x is not None]
        for mine, theirs in zip(got, want, strict=True):
            assert_alike(mine, theirs)
    both = [backward.query_gradient(of_rows, query, part, 0.125) for part in parts]
    grad_query, found = pair.query_gradient_of_pair(grads, query, *parts, attended, 0.125, tiles)
    assert_alike(grad_query, both[0] + both[1])
    for mine, theirs in zip(found[1:], of_rows[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)  # summed in another order


@pytest.mark.gpu
def test_on_a_gpu_long_rows_are_shared_by_default() -> None:
    """A plan in which some blocks of keys are read by all of many queries, as LogLinear's top level is."""
    from nearfield.ops._triton.launch import Tiles, chunk_of, key_gradient_tiles
    from nearfield.ops.attention.triton import backward

    device, dtype = torch.device("cuda"), torch.bfloat16
    query, key, value = (x.to(dtype) for x in random_inputs(1, 2, 16384, 256, 64, device=device))
    plan = random_plan(16384, 256, q_block=128, k_block=16, heads=2, share=0.1, device=device)
    tiles = key_gradient_tiles(query, key, 128, 16)
    assert chunk_of(2, plan.transpose(), tiles) > 0
    grad_out = torch.randn_like(query)
    lse = torch.full((1, 2, 16384), 5.0, device=device)
    of_rows = backward.row_gradients(Attended(grad_out, torch.zeros_like(lse)), Attended(query, lse))
    call = of_rows, query, KeyValuePart(key, value, plan), 0.125
    shared, alone = (
        backward.key_gradient(*call, chosen)[:2] for chosen in (None, Tiles(*tiles[:4], chunk=0))
    )
    for mine, theirs in zip(shared, alone, strict=True):
        assert_alike(mine, theirs)


def assert_alike(mine: Tensor, theirs: Tensor) -> None:
    """Up to the rounding of half precision: both were computed in it, in different orders."""
    assert mine.dtype == theirs.dtype
    error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
    assert float(error) < 0.01
