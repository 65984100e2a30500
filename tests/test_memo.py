"""Tensors that follow from sizes are made once, and never kept where they hold nothing."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nearfield import _memo


def test_what_follows_from_sizes_is_made_once() -> None:
    made = []

    @_memo.tensor_cache
    def count(length: int, device: torch.device) -> Tensor:
        made.append(length)
        return torch.arange(length, device=device)

    cpu = torch.device("cpu")
    with FakeTensorMode():
        assert count(3, cpu).shape == (3,)
    with torch.inference_mode():
        first = count(3, cpu)
    assert first.tolist() == [0, 1, 2]
    assert not first.is_inference()
    assert count(3, cpu) is first
    assert made == [3, 3]  # a stand-in is not kept
    for length in range(10, 10 + _memo._MOST):
        count(length, cpu)
    assert count(3, cpu) is not first  # memory is bounded


def test_a_gpu_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept for "cuda" would else serve whichever GPU is current later."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    named = [_memo.device_name(device) for device in ("cuda", torch.device("cuda"), "cuda:0", "cpu", "meta")]
    assert named == ["cuda:1", "cuda:1", "cuda:0", "cpu", "meta"]


def test_a_compiled_graph_makes_its_own() -> None:
    @_memo.tensor_cache
    def count(length: int) -> Tensor:
        return torch.arange(length)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + count(4), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(4)).tolist() == [0, 1, 2, 3]
    torch._dynamo.reset()
