"""Work beside other work: in which order streams wait for each other; on a GPU, that nothing depends on timing."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.attending import NEEDS_TRITON, random_inputs, random_plan
from torch import Tensor

from nearfield import LogLinear, attend_with
from nearfield.cli.check import poisoned_memory
from nearfield.cli.timing import captured
from nearfield.ops import KeyValuePart, attend_parts, for_one_call
from nearfield.ops.pool_select import api as pyramid

GPU = torch.device("cuda", 0)
ON_GPU: Any = SimpleNamespace(is_cuda=True, device=GPU)
"""A tensor, as far as `SideStream` looks at it."""


class Streams:
    """Stands for torch's: what streams are told, and which one is current."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.number = 0
        self.current = self.make()

    def make(self, device: Any = None, priority: int = 0) -> Any:
        stream: Any = SimpleNamespace(stream_id=self.number, name=f"stream {self.number}")
        self.number += 1

        def record_event() -> str:
            self.told.append(f"{stream.name} records")
            return f"the event of {stream.name}"

        stream.record_event = record_event
        stream.wait_event = lambda event: self.told.append(f"{stream.name} waits for {event}")
        stream.wait_stream = lambda other: self.told.append(f"{stream.name} waits for {other.name}")
        return stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, what: str) -> None:
        self.told.append(f"{self.current.name} runs {what}")


@pytest.fixture
def beside() -> Any:
    pytest.importorskip("triton")
    from nearfield.ops.attention.triton import side_stream as beside

    return beside


@pytest.fixture
def streams(beside: Any, monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(beside, "_sides", {})
    monkeypatch.setattr(torch.cuda, "Stream", made.make)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    return made


def test_a_branch_begins_with_its_stretch_and_ends_before_what_follows(beside: Any, streams: Streams) -> None:
    with beside.SideStream(ON_GPU) as stretch:
        streams.launch("the large kernel")
        with stretch.branch():
            streams.launch("small ones")
    streams.launch("what follows")
    assert streams.told == [
        "stream 0 records",
        "stream 0 runs the large kernel",
        "stream 1 waits for the event of stream 0",
        "stream 1 runs small ones",
        "stream 0 waits for stream 1",
        "stream 0 runs what follows",
    ]


@pytest.mark.parametrize("where", ["before", "in", "behind"])
def test_a_branch_that_began_is_joined_whatever_happens(where: str, beside: Any, streams: Streams) -> None:
    """And one that did not is not waited for: in a capture that is an error of its own."""

    def fail_if(here: str) -> None:
        if here == where:
            raise RuntimeError(where)

    def run() -> None:
        with beside.SideStream(ON_GPU) as stretch:
            fail_if("before")
            with stretch.branch():
                fail_if("in")
            fail_if("behind")

    with pytest.raises(RuntimeError, match=where):
        run()
    assert ("stream 0 waits for stream 1" in streams.told) == (where != "before")


def test_what_need_not_run_beside_tells_no_stream(beside: Any, streams: Streams) -> None:
    for x, wanted in ((ON_GPU, False), (torch.empty(0), True)):
        with beside.SideStream(x, wanted=wanted) as stretch, stretch.branch():
            streams.launch("everything")
    assert streams.told == ["stream 0 runs everything"] * 2


def test_every_stream_of_every_device_has_one_side_of_its_own(beside: Any, streams: Streams) -> None:
    other = streams.make()
    pairs = [(GPU, streams.current), (GPU, other), (torch.device("cuda", 1), other)]
    sides = [beside._side_stream(*pair).stream_id for pair in pairs]
    assert len({streams.current.stream_id, other.stream_id, *sides}) == 5
    assert [beside._side_stream(*pair).stream_id for pair in pairs] == sides
    new, together = streams.make(), Barrier(8)

    def side(_: int) -> int:
        together.wait(timeout=60)
        return beside._side_stream(GPU, new).stream_id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(side, range(8)))) == 1


@NEEDS_TRITON
@pytest.mark.parametrize("once", [True, False])
def test_lists_are_transposed_behind_the_query_gradient_where_they_were_not_before(
    once: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nearfield.ops.attention.triton import pair
    from nearfield.ops.attention.triton import side_stream as beside

    told: list[str] = []

    class Watched(beside.SideStream):
        def __init__(self, x: Tensor, wanted: bool = True) -> None:
            told.append(f"wanted: {wanted}")
            super().__init__(x, wanted)

        @contextmanager
        def branch(self) -> Iterator[None]:
            told.append("branch")
            with super().branch():
                yield

    def watch(name: str) -> None:
        function: Callable[..., Any] = getattr(pair, name)

        def watched(*call: Any, **options: Any) -> Any:
            told.append(name)
            return function(*call, **options)

        monkeypatch.setattr(pair, name, watched)

    monkeypatch.setattr(pair, "SideStream", Watched)
    for name in ("room_for_transpose", "_query_gradient", "transpose_into", "key_gradient"):
        watch(name)
    query, key, value = (x.requires_grad_() for x in random_inputs(1, 1, 32, 32, 16, device=device))
    plans = [random_plan(32, 32, q_block=16, k_block=16, device=device, seed=seed) for seed in (0, 1)]
    parts = [KeyValuePart(key, value, plan) for plan in plans]
    for plan in plans if once else ():
        for_one_call(plan)
    attend_parts(query, parts, impl="triton").out.sum().backward()
    room, transposing = (["room_for_transpose"] * 2, ["transpose_into"]) if once else ([], [])
    assert told == [
        *room,
        f"wanted: {once}",
        "_query_gradient",
        "branch",
        *transposing,
        *["key_gradient"] * 2,
    ]


# -- on a GPU -----------------------------------------------------------------------------------------------------


def random_leaves(seed: int, device: torch.device = GPU) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(3, 1, 2, 3000, 64, generator=generator).to(device, torch.bfloat16)
    return list(made.unbind())


def results(leaves: list[Tensor], depth: int = 1) -> list[Tensor]:
    """Of several layers in a row, with the gradients of what goes in."""
    query, key, value = fresh = [x.detach().requires_grad_() for x in leaves]
    out = query
    for _ in range(depth):
        out = out + attend_with(LogLinear(), out, key, value)
    return [out.detach(), *torch.autograd.grad(out, fresh, torch.ones_like(out))]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def fall_behind() -> None:
    """Keep the device busy for a while, so that the host is far ahead of it."""
    torch.cuda._sleep(200_000_000)


@pytest.mark.gpu
def test_on_a_gpu_results_are_the_same_however_far_the_host_is_ahead() -> None:
    leaves = random_leaves(0)
    with poisoned_memory():
        expected = results(leaves, 2)
        torch.cuda.synchronize()
        fall_behind()
        found = [results(leaves, 2) for _ in range(10)]
        torch.cuda.synchronize()
    assert all(bool(x.isfinite().all()) for x in expected)
    assert all(equal(each, expected) for each in found)


@pytest.mark.gpu
def test_on_a_gpu_memory_does_not_depend_on_timing() -> None:
    leaves = random_leaves(0)
    results(leaves, 4)

    def peak(is_behind: bool) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if is_behind:
            fall_behind()
        for _ in range(5):
            results(leaves, 4)
            if not is_behind:
                torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])

    assert peak(is_behind=True) == peak(is_behind=False)


@pytest.mark.gpu
def test_on_a_gpu_several_layers_are_captured_by_a_graph() -> None:
    """New contents, other picks, the same graph: layers take memory from each other."""
    leaves = random_leaves(0)
    replay: Any = captured(lambda: results(leaves, 4), GPU)
    for seed in (1, 2):
        for x, new in zip(leaves, random_leaves(seed), strict=True):
            x.copy_(new)
        got = [x.clone() for x in replay()]
        assert equal(got, results(leaves, 4))


@pytest.mark.gpu
def test_on_a_gpu_threads_may_have_streams_of_their_own() -> None:
    inputs = [random_leaves(seed) for seed in (0, 1)]
    expected = [results(leaves) for leaves in inputs]
    together = Barrier(2)

    def work(leaves: list[Tensor]) -> list[list[Tensor]]:
        stream = torch.cuda.Stream(GPU)
        together.wait(timeout=60)
        with torch.cuda.stream(stream):
            found = [results(leaves) for _ in range(20)]
        stream.synchronize()
        return found

    torch.cuda.synchronize()
    with poisoned_memory(), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, inputs))
    for mine, wanted in zip(found, expected, strict=True):
        assert all(equal(each, wanted) for each in mine)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_a_gpu_that_is_not_current() -> None:
    """Pooling, choosing and attending, forward and backward."""

    def everything() -> list[Tensor]:
        leaves = random_leaves(0, torch.device("cuda", 1))
        query, key = (x.detach().requires_grad_() for x in leaves[:2])
        queries, keys = (pyramid.pool(x, 16, 2) for x in (query, key))
        picks = pyramid.select_blocks(queries, keys, 4)
        (of_key,) = torch.autograd.grad(keys.data.square().sum(), [key])
        return [keys.data.detach(), *picks, of_key, *results(leaves, 2)]

    with torch.cuda.device(1):
        expected = everything()
    with torch.cuda.device(0), poisoned_memory():
        found = everything()
        assert torch.cuda.current_device() == 0
    assert equal(found, expected)
