"""The specification against softmax written out by hand, and its backward against finite differences."""

import math
from dataclasses import replace

import pytest
import torch
from tests.attending import IDENTITIES, SMALL, Call, eager, random_bias, random_inputs, random_plan, run
from torch import Tensor

import nearfield
from nearfield import planning
from nearfield._types import Positions
from nearfield.ops import KeyValuePart
from nearfield.ops.attention import reference
from nearfield.plan.plan import Plan

CPU = torch.device("cpu")


def double_call() -> Call:
    """Everything at once: grouped-query heads, lists per head, ragged and repeated blocks, a bias with hidden keys,
    positions, and rows that read nothing."""
    inputs = random_inputs(1, 4, 7, 9, 2, key_heads=2, dtype=torch.float64)
    plan = random_plan(7, 9, q_block=2, k_block=2, heads=4, repeats=True, empty_rows=True)
    bias = random_bias(1, 4, 9).double()
    bias[:, :, 3] = -math.inf
    positions = Positions(torch.arange(7)[None], (torch.arange(9) % 5)[None])
    return Call(*inputs, plan, bias, positions, 0.7)


@pytest.mark.parametrize("identity", IDENTITIES)
def test_identity_in_float64(identity: str) -> None:
    """The budget is then that of float64."""
    IDENTITIES[identity]("reference", replace(SMALL, dtype=torch.float64), CPU)


def test_one_row_by_hand() -> None:
    """Two queries, three keys; the first reads key 0 once and key 2 twice, the second nothing."""
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)[None, None]
    key = torch.tensor([[1.0, 5.0], [9.0, 9.0], [3.0, 7.0]], dtype=torch.float64)[None, None]
    value = torch.tensor([[1.0, 0.0], [9.0, 9.0], [0.0, 1.0]], dtype=torch.float64)[None, None]
    offsets = torch.tensor([[[0, 3, 3]]], dtype=torch.int32)
    plan = Plan(offsets, torch.tensor([[[0, 2, 2]]], dtype=torch.int32), 1, 1, 2, 3)
    bias = torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)
    out, lse = nearfield.attend(query, key, value, plan, key_bias=bias, scale=2.0, impl="reference")
    weights = math.exp(2 * 1 + 0.5), 2 * math.exp(2 * 3 + 0.25)
    total = sum(weights)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([w / total for w in weights], dtype=torch.float64))
    assert lse[0, 0].tolist() == pytest.approx([math.log(total), -math.inf])
    assert out[0, 0, 1].tolist() == [0, 0]


def test_matches_softmax_with_a_mask() -> None:
    inputs = random_inputs(2, 3, 20, 30, 8, dtype=torch.float64)
    plan = random_plan(20, 30, q_block=8, k_block=4, heads=3)
    mask = plan.to_mask().expand(2, 3, 20, 30)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
    torch.testing.assert_close(nearfield.attend(*inputs, plan, impl="reference").out, expected)


def test_everything_at_once_matches_eager() -> None:
    call = double_call()
    expected = eager(call, torch.float64)
    assert bool((expected["lse"] == -math.inf).any())
    got = run(call, "reference")
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_gradcheck() -> None:
    """Results and lse, by query, key, value and bias. Empty rows have an infinite lse, so they are left out."""
    call = double_call()
    alive = eager(call, torch.float64, backward=False)["lse"] > -math.inf
    hidden = call.key_bias == -math.inf

    def attended(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor) -> tuple[Tensor, Tensor]:
        bias = key_bias.masked_fill(hidden, -math.inf)
        out, lse = nearfield.attend(
            query, key, value, call.plan, key_bias=bias, positions=call.positions, scale=0.7, impl="reference"
        )
        return out, lse[alive]

    bias = call.key_bias.masked_fill(hidden, 0)
    leaves = [x.clone().requires_grad_() for x in (call.query, call.key, call.value, bias)]
    assert torch.autograd.gradcheck(attended, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Computed in float32: exactly the float32 results, rounded."""
    inputs = random_inputs(1, 2, 20, 30, 8, dtype=dtype)
    plan = random_plan(20, 30, q_block=8, k_block=4)
    out, lse = nearfield.attend(*inputs, plan, impl="reference")
    wide = nearfield.attend(*(x.float() for x in inputs), plan, impl="reference")
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, wide.out.to(dtype))
    assert torch.equal(lse, wide.lse)


def test_bias_has_a_gradient_only_if_there_is_one() -> None:
    query, key, value = random_inputs(1, 1, 8, dim=4)
    plan = planning.full(8, q_block=8, k_block=8)
    attended = reference.attend_forward(query, KeyValuePart(key, value, plan), 0.5)
    for bias in (None, torch.zeros(1, 1, 8)):
        parts = [KeyValuePart(key, value, plan, bias)]
        found = reference.attend_backward(attended, query, parts, attended, 0.5, [bias is not None])
        assert (found.parts[0][2] is None) == (bias is None)
