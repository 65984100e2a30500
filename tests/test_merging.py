"""Merging against what it means: greedy choices and weighted means written out token by token."""

import math
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attending import NEEDS_TRITON, assert_budget
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize

import nearfield
from nearfield import Geometry, curves, planning
from nearfield._types import Impl
from nearfield.cli.check import poisoned_memory
from nearfield.methods.merge import Merge
from nearfield.ops.merge.api import Merging, Regions, merging_of
from nearfield.ops.merge.reference import destinations as reference

INF = float("inf")
REGIONS = ("run", "window", "global")


def random_features(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exact_features(*shape: int, seed: int = 0) -> Tensor:
    """Four entries of 1 or -1, all others zero: norms are 2, so cosines and their sums are exact, and often equal."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(shape, generator=generator).argsort(-1)[..., :4]
    signs = torch.randint(0, 2, places.shape, generator=generator) * 2.0 - 1
    return torch.zeros(shape).scatter(-1, places, signs)


OPPOSITE = torch.tensor([[math.nan] * 4, [2.0, 0, 0, 0], [-2.0, 0, 0, 0]])
"""Two tokens that are as unlike as can be: anything between them would be chosen first, but not what is NaN."""


def chosen(features: Tensor, count: int) -> list[int]:
    """What the reference chooses among `[n, D]`, without the ids that mean nothing."""
    n = len(features)
    ids = reference.choose_destinations(features[None, None], torch.tensor([n]), torch.tensor([count]), count)
    return [id_ for id_ in ids[0, 0].tolist() if id_ < n]


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other) / (float(one.norm()) * float(other.norm()))


def value(features: Tensor, some: Any) -> float:
    """How well some tokens represent all: 0 for none, 2 for each token at best."""
    return sum(1 + max((cosine(x, features[j]) for j in some), default=-1.0) for x in features)


def greedy_by_hand(features: Tensor, count: int) -> list[int]:
    """The tokens in the order in which they are chosen: always the first of those that help most."""
    picks: list[int] = []
    while len(picks) < min(count, len(features)):
        others = [j for j in range(len(features)) if j not in picks]
        picks.append(max(others, key=lambda j: (value(features, [*picks, j]), -j)))
    return picks


# -- choosing destinations ----------------------------------------------------------------------------------------

STEP = 2.0**-15
"""Similarities are told apart down to this."""


@settings(max_examples=25)
@given(n=st.integers(1, 9), count=st.integers(1, 10), dim=st.integers(4, 6), seed=st.integers(0, 50))
def test_the_greedy_choice_is_the_one_made_by_hand(n: int, count: int, dim: int, seed: int) -> None:
    features = exact_features(n, dim, seed=seed)
    assert chosen(features, count) == sorted(greedy_by_hand(features, count))


@settings(max_examples=15)
@given(n=st.integers(1, 8), dim=st.integers(2, 6), seed=st.integers(0, 50))
def test_every_choice_is_a_best_one(n: int, dim: int, seed: int) -> None:
    features = random_features(n, dim, seed=seed)
    for fewer, more in pairwise(chosen(features, count) for count in range(n + 1)):
        (new,) = set(more) - set(fewer)
        best = max(value(features, [*fewer, j]) for j in range(n) if j not in fewer)
        assert value(features, [*fewer, new]) >= best - n * STEP


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_helps_and_never_more_than_the_one_before(seed: int) -> None:
    features = random_features(14, 3, seed=seed)
    picks = [chosen(features, count) for count in range(15)]
    assert all(set(fewer) < set(more) for fewer, more in pairwise(picks))
    values = [value(features, some) for some in picks]
    gains = [more - fewer for fewer, more in pairwise(values)]
    assert min(gains) > 0
    assert all(later <= earlier + 14 * STEP for earlier, later in pairwise(gains))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_close_to_the_best_there_is(count: int, seed: int) -> None:
    features = random_features(9, 3, seed=seed)
    best = max(value(features, some) for some in combinations(range(9), count))
    got = value(features, chosen(features, count))
    assert (1 - 1 / math.e) * best <= got <= best + 1e-12


def test_equal_tokens_are_taken_from_the_first_on_and_never_twice() -> None:
    assert chosen(torch.ones(6, 3), 4) == [0, 1, 2, 3]
    # Two directions, three tokens each: one of either first, then those that add nothing, in their order.
    features = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(3, 1)
    assert [chosen(features, count) for count in (1, 2, 3, 6)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4, 5]]


def test_lengths_of_tokens_do_not_matter() -> None:
    """Two tokens that help only each other add the same, whatever rounding says: the first is taken."""
    for seed in range(20):
        features = random_features(8, 3, seed=seed, dtype=torch.float32)
        scaled = features * torch.logspace(-3, 3, 8)[:, None]
        assert chosen(scaled, 5) == chosen(features, 5) == chosen(features.double(), 5)


def test_nan_is_chosen_last_and_misleads_nobody() -> None:
    features = random_features(8, 3)
    others = [0, 1, 3, 4, 6, 7]
    for count in range(1, 7):
        features[[2, 5]] = math.nan
        assert chosen(features, count) == [others[id_] for id_ in chosen(features[others], count)]
    assert chosen(features, 7) == [0, 1, 2, 3, 4, 6, 7]
    assert chosen(OPPOSITE, 1) == [1]


def test_regions_choose_for_themselves_and_see_only_what_exists() -> None:
    features = random_features(2, 3, 10, 4)
    lengths, counts = torch.tensor([10, 4, 7]), torch.tensor([3, 4, 6])
    got = reference.choose_destinations(features, lengths, counts, 6)
    assert got.dtype == torch.int32
    for batch in range(2):
        for region, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            alone = chosen(features[batch, region, :length], count)
            assert got[batch, region].tolist() == alone + [10] * (6 - count)
            features[batch, region, length:] = math.nan
    assert torch.equal(reference.choose_destinations(features, lengths, counts, 6), got)


def test_more_than_there_are_means_all() -> None:
    features = random_features(1, 2, 3, 4)
    got = reference.choose_destinations(features, torch.tensor([2, 0]), torch.tensor([5, 1]), 5)
    assert got.tolist() == [[[0, 1, 3, 3, 3], [3, 3, 3, 3, 3]]]


KERNEL_CASES = [
    # n, lengths, counts
    (1, [1, 1], [1, 1]),
    (16, [16, 16, 0], [8, 8, 2]),
    (37, [37, 5, 37], [12, 5, 1]),
    (64, [64, 64, 10], [20, 32, 12]),
    (100, [100, 99], [7, 9]),
    (128, [128], [5]),
    (200, [200, 150], [6, 4]),
    (256, [256], [4]),
    (257, [31, 40], [31, 2]),
]


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "lengths", "counts"), KERNEL_CASES)
def test_kernel_chooses_as_the_reference(
    n: int, lengths: list[int], counts: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    from nearfield.ops.merge.triton import destinations as kernel

    features = exact_features(2, len(lengths), n, 24).to(device, dtype)
    call = (*(torch.tensor(x, device=device, dtype=torch.int32) for x in (lengths, counts)), max(counts))
    assert torch.equal(
        kernel.choose_destinations(features, *call), reference.choose_destinations(features, *call)
    )


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("n", "lengths", "counts"),
    [
        *KERNEL_CASES[:4],
        pytest.param(300, [280, 300], [150, 3], marks=pytest.mark.gpu),
        pytest.param(600, [600, 1], [599, 1], marks=pytest.mark.gpu),
        pytest.param(4096, [4096, 4000], [2048, 1000], marks=pytest.mark.gpu),
    ],
)
def test_gains_that_are_remembered_are_those_computed_anew(
    n: int,
    lengths: list[int],
    counts: list[int],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """The kernel for many tokens, with few of them where it is interpreted."""
    from nearfield.ops.merge.triton import destinations as kernel

    monkeypatch.setattr(kernel, "_FEW", 0)
    features = exact_features(2, len(lengths), n, 24).to(device)
    call = (*(torch.tensor(x, device=device, dtype=torch.int32) for x in (lengths, counts)), max(counts))
    assert torch.equal(
        kernel.choose_destinations(features, *call), reference.choose_destinations(features, *call)
    )


@NEEDS_TRITON
@pytest.mark.parametrize(("n", "few"), [(20, 256), (130, 256), (20, 0)])
def test_kernel_takes_nan_zeros_and_strides(
    n: int, few: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    from nearfield.ops.merge.triton import destinations as kernel

    monkeypatch.setattr(kernel, "_FEW", few)
    features = exact_features(n, 2, 1, 24).to(device).permute(2, 1, 0, 3)
    features[0, 0, 3] = math.nan
    features[0, 0, 4] = 0
    features[0, 1, 12:] = math.nan  # does not exist
    call = (*(torch.tensor(x, device=device, dtype=torch.int32) for x in ([n, 12], [n, 9])), n)
    if n > 100:
        call = (call[0], call[1].clamp(max=5), 5)
    got = kernel.choose_destinations(features, *call)
    assert torch.equal(got, reference.choose_destinations(features, *call))
    if n < 100:
        assert got[0, 0].tolist() == list(range(n))
    three, one = (torch.tensor([x], device=device, dtype=torch.int32) for x in (3, 1))
    assert kernel.choose_destinations(OPPOSITE.to(device)[None, None], three, one, 1).tolist() == [[[1]]]


@NEEDS_TRITON
@pytest.mark.parametrize("few", [256, 0])
def test_cosines_beyond_one_are_no_less_than_the_least(
    few: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """As products in tf32 are. Of tokens that are alike or opposite nothing is gained after two choices."""
    from nearfield.ops.merge.triton import destinations as kernel

    monkeypatch.setattr(kernel, "_FEW", few)
    for module in (kernel, reference):
        monkeypatch.setattr(module, "normalize", lambda x, dim: 1.0005 * normalize(x, dim=dim))
    features = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [1, 0], [-1, 0], [-1, 0]]).to(device)[None, None]
    length, count = (torch.tensor([x], device=device, dtype=torch.int32) for x in (6, 4))
    for call in ((length, count, 4), (length, length, 6)):
        assert torch.equal(
            kernel.choose_destinations(features, *call), reference.choose_destinations(features, *call)
        )


@NEEDS_TRITON
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_autocast_does_not_reach_the_choice(impl: Impl, device: torch.device) -> None:
    features, geometry = exact_features(2, 99, 24).to(device), Geometry((9, 11))
    expected = Merge(region_size=16).merging(features, geometry, impl=impl)
    with torch.autocast(device.type, torch.bfloat16):
        got = Merge(region_size=16).merging(features, geometry, impl=impl)
    assert torch.equal(got.destinations, expected.destinations)


@NEEDS_TRITON
def test_what_the_kernel_leaves_to_plain_torch_has_a_reason(device: torch.device) -> None:
    from nearfield.ops.merge.triton import destinations as kernel

    assert kernel.unsupported(torch.empty(1, 1, 16384, 8, device=device)) is None
    assert "float64" in str(kernel.unsupported(torch.empty(1, 1, 16, 8, device=device).double()))
    assert "16385 tokens" in str(kernel.unsupported(torch.empty(1, 1, 16385, 8, device=device)))


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_maps_are_the_same_by_either_implementation(dtype: torch.dtype, device: torch.device) -> None:
    geometry, method = Geometry((9, 11)), Merge(region_size=16)
    features = exact_features(2, 99, 24).to(device, dtype)
    kernel, plain = (method.merging(features, geometry, impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(kernel.destinations, plain.destinations)
    for one, other in zip(kernel.shares, plain.shares, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@NEEDS_TRITON
def test_the_kernel_runs_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from nearfield.ops.merge.triton import destinations as kernel

    def refuse(*call: Any) -> None:
        raise AssertionError("the kernel")

    monkeypatch.setattr(kernel, "choose_destinations", refuse)
    features = exact_features(1, 99, 24).to(device)
    Merge().merging(features, Geometry((9, 11)), impl="reference")
    with pytest.raises(AssertionError, match="the kernel"):
        Merge().merging(features, Geometry((9, 11)), impl="triton")


def test_locating_is_a_proper_operator() -> None:
    call = (random_features(1, 11, 3), [6, 5], [2, 3], "auto")
    torch.library.opcheck(torch.ops.nearfield.choose_destinations.default, call)


# -- the map ------------------------------------------------------------------------------------------------------

GEOMETRIES = {
    "whole": Geometry((8, 8)),
    "odd": Geometry((7, 9), text=3),
    "two images": Geometry((5, 7), references=((4, 4), (3, 1))),
    "video": Geometry((2, 5, 6)),
    "line": Geometry((21,)),
}


def matrices(merging: Merging) -> tuple[Tensor, Tensor]:
    """What `enter` and `leave` multiply by, `[B, merged, tokens]` and `[B, tokens, merged]`."""
    batch, regions = len(merging.destinations), merging.regions
    every, left = (
        torch.eye(n, dtype=torch.float64).expand(batch, -1, -1)
        for n in (regions.num_tokens, regions.num_merged)
    )
    return merging.enter(every), merging.leave(left)


def shares_by_hand(features: Tensor, merging: Merging, sharpness: float) -> Tensor:
    """Which part of each token goes where, `[merged, tokens]`, for one batch element, token by token."""
    regions = merging.regions
    shares = torch.zeros(regions.num_merged, regions.num_tokens, dtype=torch.float64)
    token = first = 0
    for length, count in zip(regions.lengths, regions.counts, strict=True):
        rows = range(first, first + count)
        for column in range(token, token + length):
            if count == length:
                shares[column - token + first, column] = 1
                continue
            scores = [cosine(features[column], features[int(merging.destinations[0, row])]) for row in rows]
            if sharpness == INF:
                shares[first + max(range(count), key=lambda i: (scores[i], -i)), column] = 1
            else:
                weights = [math.exp(sharpness * score) for score in scores]
                for row, weight in zip(rows, weights, strict=True):
                    shares[row, column] = weight / sum(weights)
        token, first = token + length, first + count
    return shares


@pytest.mark.parametrize("sharpness", [5.0, INF])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_tokens_are_shared_out_by_similarity(name: str, region: Any, sharpness: float) -> None:
    geometry = GEOMETRIES[name]
    method = Merge(ratio=0.6, region=region, region_size=9, sharpness=sharpness)
    features = random_features(1, geometry.num_image_tokens, 4)
    merging = method.merging(features, geometry)
    shares = shares_by_hand(features[0], merging, sharpness)
    enter, leave = matrices(merging)
    torch.testing.assert_close(enter[0], shares / shares.sum(1, keepdim=True))
    torch.testing.assert_close(leave[0], shares.T)
    torch.testing.assert_close(merging.sizes[0], shares.sum(1))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_destinations_are_those_of_each_region(name: str, region: Any) -> None:
    geometry, method = GEOMETRIES[name], Merge(ratio=0.6, region=region, region_size=9)
    features = random_features(2, geometry.num_image_tokens, 4)
    merging = method.merging(features, geometry)
    for batch in range(2):
        want, start = [], 0
        for length, count in zip(merging.regions.lengths, merging.regions.counts, strict=True):
            want += [start + id_ for id_ in chosen(features[batch, start : start + length], count)]
            start += length
        assert merging.destinations[batch].tolist() == want


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("region", REGIONS)
def test_hard_assignment_makes_leave_the_pseudo_inverse(region: Any, equal: bool) -> None:
    """Also where many tokens are equal: a destination never loses itself to another."""
    geometry, method = GEOMETRIES["odd"], Merge(region=region, region_size=16, sharpness=INF)
    features = random_features(2, 63, 5)
    if equal:
        features = features[:, :3].repeat(1, 21, 1)
    merging = method.merging(features, geometry)
    enter, leave = matrices(merging)
    torch.testing.assert_close(leave, torch.linalg.pinv(enter), rtol=1e-10, atol=1e-10)
    assert bool(((leave == 0) | (leave == 1)).all())
    assert float(merging.sizes.min()) >= 1
    y = random_features(2, merging.regions.num_merged, 6, seed=1)
    torch.testing.assert_close(merging.enter(merging.leave(y)), y)  # the way back and forth loses nothing


@pytest.mark.parametrize("sharpness", [50.0, INF])
@pytest.mark.parametrize("region", REGIONS)
def test_ratio_zero_is_the_identity(region: Any, sharpness: float) -> None:
    geometry = GEOMETRIES["two images"]
    x = random_features(2, geometry.num_image_tokens, 5, dtype=torch.float32)
    merging = Merge(ratio=0, region=region, region_size=9, sharpness=sharpness).merging(x, geometry)
    assert torch.equal(merging.enter(x), x)
    assert torch.equal(merging.leave(x), x)
    assert torch.equal(merging.key_bias, torch.zeros(2, 1, geometry.num_image_tokens))
    assert merging.destinations[1].tolist() == list(range(geometry.num_image_tokens))


def test_batch_elements_do_not_see_each_other() -> None:
    geometry, method = GEOMETRIES["odd"], Merge(region_size=16)
    x = random_features(3, 63, 5)
    together = method.merging(x, geometry)
    assert not torch.equal(together.destinations[0], together.destinations[1])
    for i in range(3):
        alone = method.merging(x[i : i + 1], geometry)
        assert torch.equal(alone.destinations[0], together.destinations[i])
        torch.testing.assert_close(alone.enter(x[i : i + 1])[0], together.enter(x)[i])
    x[1] = math.nan
    spoiled = method.merging(x, geometry)
    back = spoiled.leave(spoiled.enter(x))
    assert bool(back[1].isnan().all())
    assert not bool(back[[0, 2]].isnan().any())


def test_sharper_shares_come_close_to_hard_ones() -> None:
    geometry, x = Geometry((8, 8)), random_features(1, 64, 5)
    hard, *soft = (
        matrices(Merge(sharpness=s).merging(x, geometry))[1] for s in (INF, 10.0, 100.0, 1000.0, 1e6)
    )
    distances = [float((shares - hard).abs().sum()) for shares in soft]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-6 < distances[0]


def test_equal_tokens_survive_merging() -> None:
    """Four kinds of tokens and as many destinations: nothing is lost, whatever is carried."""
    kinds = torch.eye(4, dtype=torch.float64)
    kind = torch.tensor([2, 0, 1, 1, 3, 0, 2, 2, 3, 0, 1, 3])
    merging = merging_of(kinds[kind][None], Regions((12,), (4,)))
    x = random_features(4, 7)[kind][None]
    torch.testing.assert_close(merging.leave(merging.enter(x)), x)
    assert sorted(merging.sizes[0].tolist()) == [3.0] * 4


def test_size_bias_counts_a_merged_key_as_often_as_it_has_tokens() -> None:
    """Attending to merged keys with the bias is attending to each of them repeated."""
    geometry, method = GEOMETRIES["odd"], Merge(region_size=16, sharpness=INF, size_bias=True)
    features = random_features(2, 63, 5)
    merging = method.merging(features, geometry)
    left = merging.regions.num_merged
    query, key, value = (random_features(2, 3, n, 8, seed=n) for n in (10, left, left + 1))
    value = value[:, :, :left]
    bias = method.key_bias(merging)
    got = nearfield.attend(query, key, value, planning.full(10, left), key_bias=bias)
    every = (merging.leave(x, dim=2) for x in (key, value))
    want = nearfield.attend(query, *every, planning.full(10, 63))
    torch.testing.assert_close(got.out, want.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-12, atol=1e-12)
    assert float(merging.sizes.max()) > 1
    assert Merge().key_bias(merging) is None


def test_gradients_flow_through_tokens_and_soft_shares() -> None:
    regions = Regions((5, 5, 3, 1), (2, 2, 2, 1))
    features, x = (random_features(2, 14, 3, seed=seed).requires_grad_() for seed in (0, 1))
    y = random_features(2, 7, 2, seed=2).requires_grad_()
    destinations = merging_of(features, regions).destinations

    def both(features: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        merging = merging_of(features, regions, sharpness=3.0, destinations=destinations)
        return merging.enter(x), merging.leave(y), merging.key_bias

    assert torch.autograd.gradcheck(both, (features, x, y))
    (through,) = torch.autograd.grad(both(features, x, y)[0].square().sum(), features)
    assert bool((through[:, :13] != 0).any(-1).all())


def test_hard_shares_pass_gradients_to_tokens_alone() -> None:
    features, x = (random_features(1, 64, 3, seed=seed).requires_grad_() for seed in (0, 1))
    merging = Merge(sharpness=INF).merging(features, Geometry((8, 8)))
    grads = torch.autograd.grad(merging.enter(x).sum(), (x, features), allow_unused=True)
    assert grads[0] is not None
    assert grads[1] is None


def test_two_maps_are_bit_equal() -> None:
    x = random_features(2, 63, 5, dtype=torch.float32)
    runs = [Merge(region_size=16).merging(x, GEOMETRIES["odd"]) for _ in range(2)]
    assert torch.equal(runs[0].enter(x), runs[1].enter(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lower_precision_is_within_its_budget(dtype: torch.dtype) -> None:
    """Twice what the same means and sums in that precision are wrong by, for the same shares."""
    geometry, method = GEOMETRIES["odd"], Merge(region_size=16, sharpness=5.0)
    x = random_features(2, 63, 8, dtype=dtype)
    merging = method.merging(x, geometry)
    assert torch.equal(merging.destinations, method.merging(x.double(), geometry).destinations)
    exact = method.merging(x.double(), geometry)
    enter, leave = matrices(exact)
    y = random_features(2, 32, 8, seed=1, dtype=dtype)
    assert_budget("merged", merging.enter(x), enter @ x.double(), enter.to(dtype) @ x)
    assert_budget("parted", merging.leave(y), leave @ y.double(), leave.to(dtype) @ y)


def test_tokens_may_stand_in_any_dimension_after_the_batch() -> None:
    merging = Merge(region_size=16).merging(random_features(2, 63, 5), GEOMETRIES["odd"])
    x = random_features(2, 3, 63, 4)
    by_head = torch.stack([merging.enter(x[:, head]) for head in range(3)], 1)
    torch.testing.assert_close(merging.enter(x, dim=2), by_head)
    torch.testing.assert_close(merging.enter(x.mT, dim=-1), by_head.mT)
    torch.testing.assert_close(merging.enter(x.transpose(1, 2)), by_head.transpose(1, 2))
    back = torch.stack([merging.leave(by_head[:, head]) for head in range(3)], 1)
    torch.testing.assert_close(merging.leave(by_head, dim=2), back)


def test_rows_of_destinations() -> None:
    merging = Merge(region_size=16).merging(random_features(2, 63, 5), GEOMETRIES["odd"])
    table = random_features(63, 2, 3)
    got = merging.at_destinations(table)
    assert torch.equal(got[1, 7], table[merging.destinations[1, 7]])
    assert got.shape == (2, merging.regions.num_merged, 2, 3)


def test_destinations_may_be_kept_while_shares_are_renewed() -> None:
    geometry, method = GEOMETRIES["odd"], Merge(region_size=16)
    before, now = (random_features(2, 63, 5, seed=seed) for seed in (0, 1))
    first = method.merging(before, geometry)
    second = method.merging(now, geometry, destinations=first.destinations)
    assert torch.equal(second.destinations, first.destinations)
    assert not torch.equal(method.merging(now, geometry).destinations, first.destinations)
    want = shares_by_hand(now[0], second, 50.0)
    torch.testing.assert_close(matrices(second)[1][0], want.T)


def test_regions_of_one_size_are_views() -> None:
    x = torch.zeros(2, 64, 3)
    (group,) = Merge(region_size=16).regions(Geometry((8, 8))).groups
    assert group.tokens(x).data_ptr() == x.data_ptr()
    assert group.tokens(x).shape == (2, 4, 16, 3)


@pytest.mark.parametrize("region", REGIONS)
def test_making_a_map_never_looks_at_values(region: Any) -> None:
    """So it never waits for the device: tensors without values pass."""
    geometry, method = GEOMETRIES["two images"], Merge(region=region, region_size=9, sharpness=INF)
    method.merging(
        torch.ones(2, geometry.num_image_tokens, 5), geometry
    )  # layouts are made once, with values
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, geometry.num_image_tokens, 5)
        merging = method.merging(x, geometry)
        assert merging.leave(merging.enter(x)).shape == x.shape


def test_making_and_using_a_map_compile_whole() -> None:
    regions = Merge(region_size=16).regions(GEOMETRIES["odd"])

    def there_and_back(features: Tensor, x: Tensor) -> Tensor:
        merging = merging_of(features, regions, sharpness=5.0)
        return merging.leave(merging.enter(x).tanh())

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        features, x = random_features(2, 63, 5, seed=seed), random_features(2, 63, 4, seed=seed)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            torch.testing.assert_close(compiled(features, x), there_and_back(features, x))


# -- both ways, by a kernel ---------------------------------------------------------------------------------------

PRODUCT_CASES = {
    "one size": Regions((64, 64), (32, 32)),
    "ragged, and a region that stays": Regions((40, 40, 16, 7), (30, 30, 16, 3)),
    "several tiles": Regions((90, 90), (70, 70)),
    "one left": Regions((17, 1), (1, 1)),
}


def tokens_behind_text(regions: Regions, channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A view with three rows before each sample's tokens."""
    return random_features(2, 3 + regions.num_tokens, channels).to(device, dtype)[:, 3:]


def by_kernels(merging: Merging) -> Merging:
    """The same map; making it by kernels, too, would take long in the interpreter."""
    return Merging(merging.regions, merging.destinations, merging.shares, "triton")


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCT_CASES)
def test_kernels_merge_and_part_as_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    regions = PRODUCT_CASES[name]
    x = tokens_behind_text(regions, 140 if name == "one size" else 24, dtype, device)
    made = merging_of(x, regions, sharpness=9.0, impl="reference")
    kernel, plain = by_kernels(made).to(dtype), made.to(dtype)
    with poisoned_memory():
        short = kernel.enter(x)
        back = kernel.leave(short)
        updated = kernel.update(x, short, short.square())
    exact, wide = plain.to(torch.float64), x.double()
    assert_budget("enter", short, exact.enter(wide), plain.enter(x))
    assert_budget("leave", back, exact.leave(short.double()), plain.leave(short))
    want = exact.update(wide, short.double(), short.square().double())
    assert_budget("update", updated, want, plain.update(x, short, short.square()))
    assert updated.is_contiguous()


def test_an_update_is_what_leaves_and_is_added() -> None:
    regions = PRODUCT_CASES["ragged, and a region that stays"]
    x, change = random_features(2, regions.num_tokens, 5), random_features(2, regions.num_merged, 5, seed=1)
    merging = merging_of(x, regions, sharpness=9.0)
    short = merging.enter(x)
    assert torch.equal(merging.update(x, short, short + change), x + merging.leave(short + change - short))


@NEEDS_TRITON
def test_the_kernel_multiplies_where_it_can(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Not where it is not asked for, where gradients are, or for tokens it does not take."""
    from nearfield.ops.merge.triton import regions as kernel

    calls: list[Tensor] = []
    right = kernel.multiply_into
    monkeypatch.setattr(kernel, "multiply_into", lambda out, *call: (calls.append(out), right(out, *call)))
    regions = PRODUCT_CASES["one size"]
    x = tokens_behind_text(regions, 24, torch.float32, device)
    plain = merging_of(x, regions, sharpness=9.0, impl="grouped")
    kernels = by_kernels(plain)
    plain.enter(x)
    kernels.enter(x.double())
    kernels.enter(x.mT.contiguous().mT)
    kernels.enter(x[:, None], dim=2)
    kernels.enter(x.clone().requires_grad_())
    kept = merging_of(x, Regions((64, 64), (64, 64)), impl="triton")
    assert kept.enter(x).data_ptr() == x.data_ptr()
    assert not calls
    with torch.no_grad():
        kernels.enter(x.clone().requires_grad_())
    kernels.update(x, kernels.enter(x), kernels.enter(x))
    assert len(calls) == 4


@NEEDS_TRITON
def test_what_the_multiplying_kernel_leaves_to_plain_torch_has_a_reason(device: torch.device) -> None:
    from nearfield.ops.merge.triton import regions as kernel

    x = torch.empty(1, 512, 8, device=device)
    assert kernel.unsupported(x, [x], 256) is None
    assert "257 tokens" in str(kernel.unsupported(x, [], 257))
    assert "float64" in str(kernel.unsupported(x.double(), [], 16))
    assert "differ in dtype" in str(kernel.unsupported(x, [x.half()], 16))
    assert "side by side" in str(kernel.unsupported(x, [x.mT], 16))


# -- where and when -----------------------------------------------------------------------------------------------


def test_runs_are_those_of_the_curve() -> None:
    geometry = GEOMETRIES["two images"]
    order = Merge().ordering(geometry).order
    parts = [curves.hilbert(grid) for grid in geometry.images]
    assert torch.equal(order, torch.cat([parts[0], parts[1] + 35, parts[2] + 51]))
    assert Merge(region_size=8).regions(geometry).lengths == (8, 8, 8, 8, 3, 8, 8, 3)


@pytest.mark.parametrize("grid", [(8, 8), (7, 9), (3, 11), (2, 2), (2, 7, 5)])
def test_windows_are_squares_of_one_frame(grid: tuple[int, ...]) -> None:
    geometry, method = Geometry(grid), Merge(region="window", region_size=16)
    order, lengths = method.ordering(geometry).order, method.regions(geometry).lengths
    assert list(lengths) == sorted(lengths, reverse=True)
    seen = set()
    for window in order.split(list(lengths)):
        places = [x.tolist() for x in torch.unravel_index(window, grid)]
        rows, columns = places[-2:]
        assert len({place // 4 for place in rows}) == len({place // 4 for place in columns}) == 1
        assert len(set(places[0])) == 1 or len(grid) == 2
        seen.add((places[0][0] if len(grid) == 3 else 0, rows[0] // 4, columns[0] // 4))
    assert len(seen) == len(lengths)
    frames = grid[0] if len(grid) == 3 else 1
    assert len(lengths) == frames * math.ceil(grid[-2] / 4) * math.ceil(grid[-1] / 4)


def test_one_region_per_image_in_raster_order() -> None:
    geometry, method = GEOMETRIES["two images"], Merge(region="global", ratio=0.25)
    assert torch.equal(method.ordering(geometry).order, torch.arange(54))
    assert method.regions(geometry) == Regions((35, 16, 3), (27, 12, 3))


@pytest.mark.parametrize(
    ("ratio", "length", "left"), [(0.5, 64, 32), (0.5, 5, 3), (0.29, 100, 71), (0.99, 3, 1), (0.75, 4, 1)]
)
def test_ratio_is_the_share_merged_away(ratio: float, length: int, left: int) -> None:
    assert Merge(ratio=ratio, region="global").regions(Geometry((length,))).num_merged == left


def test_blocks_form_groups_after_those_left_out() -> None:
    method = Merge(skip_blocks=(2, 1))
    assert [method.block_group("joint", block) for block in range(5)] == [None, None, 0, 0, 0]
    assert [method.block_group("single", block) for block in range(3)] == [None, 0, 0]
    by_two = Merge(groups=2, skip_blocks=(1, 0))
    assert [by_two.block_group("joint", block) for block in range(6)] == [None, 0, 0, 1, 1, 2]


def test_phases_follow_the_step() -> None:
    phases = [Merge(refresh=(4, 2)).refresh_phase(step) for step in range(6)]
    assert phases == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 2), (1, 2)]


def test_describe_says_regions_and_tokens() -> None:
    words = Merge(region_size=16, sharpness=INF, size_bias=True).describe(GEOMETRIES["odd"])
    assert words == (
        "3 text + 7x9: 66 tokens; 32 of 63 image tokens are left\n"
        "  3 runs of 16 tokens: 8 left of each\n"
        "  1 run of 15 tokens: 8 left\n"
        "  tokens are given whole; log(size) on merged keys"
    )
    assert "shared out with sharpness 50; no bias" in Merge().describe(Geometry((8, 8)))


def test_the_map_is_a_token_map() -> None:
    from nearfield.layout.ordering import TokenMap

    def there_and_back(tokens: TokenMap, x: Tensor) -> Tensor:
        return tokens.leave(tokens.enter(x))

    x = random_features(1, 64, 3)
    assert there_and_back(Merge().merging(x, Geometry((8, 8))), x).shape == x.shape


SMALL = Geometry((4, 4))


def small_map() -> Merging:
    return Merge().merging(torch.ones(2, 16, 3), SMALL)


BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda: Merge(ratio=1), ValueError, "`ratio` must be at least 0 and below 1; got 1."),
    (lambda: Merge(ratio=-0.1), ValueError, "`ratio` must be at least 0 and below 1; got -0.1."),
    (lambda: Merge(ratio=math.nan), ValueError, "`ratio` must be at least 0 and below 1; got nan."),
    (lambda: Merge(ratio="half"), TypeError, "`ratio` must be a number; got 'half'."),
    (
        lambda: Merge(region="row"),
        ValueError,
        "`region` must be one of 'run', 'window', 'global'; got 'row'.",
    ),
    (lambda: Merge(region_size=0), ValueError, "`region_size` must be at least 1; got 0."),
    (
        lambda: Merge(region="window", region_size=60),
        ValueError,
        "`region_size` must be a square number for windows; got 60. Use 49, or runs.",
    ),
    (lambda: Merge(sharpness=0), ValueError, "`sharpness` must be above 0; got 0."),
    (lambda: Merge(sharpness=math.nan), ValueError, "`sharpness` must be above 0; got nan."),
    (lambda: Merge(sharpness=True), TypeError, "`sharpness` must be a number; got True."),
    (lambda: Merge(refresh=10), TypeError, "`refresh` must be a pair (destinations, shares); got 10."),
    (lambda: Merge(refresh=(10, 0)), ValueError, "`refresh` must be at least 1; got 0."),
    (lambda: Merge(groups=0), ValueError, "`groups` must be at least 1; got 0."),
    (lambda: Merge(groups="all"), TypeError, "`groups` must be an integer; got str."),
    (lambda: Merge(skip_blocks=(5,)), TypeError, "`skip_blocks` must be a pair (joint, single); got (5,)."),
    (lambda: Merge(skip_blocks=(5, -1)), ValueError, "`skip_blocks` must be at least 0; got -1."),
    (lambda: Merge(size_bias=1), TypeError, "`size_bias` must be True or False; got 1."),
    (
        lambda: Merge().regions((4, 4)),
        TypeError,
        "`geometry` must be a Geometry; got tuple. Write Geometry(grid=(64, 64), text=512).",
    ),
    (
        lambda: Merge().merging(torch.ones(16, 3), SMALL),
        ValueError,
        "`features` must have 3 dimensions; got shape [16, 3]. Expected [batch, image tokens, channels].",
    ),
    (
        lambda: Merge().merging(torch.ones(1, 15, 3), SMALL),
        ValueError,
        "`features` must have the 16 image tokens of the geometry (4x4); got shape [1, 15, 3].",
    ),
    (
        lambda: Merge().merging(torch.ones(1, 16, 3, dtype=torch.int64), SMALL),
        TypeError,
        "`features` must have a floating dtype; got torch.int64.",
    ),
    (
        lambda: Merge().merging(torch.ones(2, 16, 3), SMALL, destinations=torch.zeros(1, 8)),
        ValueError,
        "`destinations` must have shape [2, 8]; got shape [1, 8].",
    ),
    (
        lambda: Merge().merging(torch.ones(2, 16, 3).double(), SMALL, impl="triton"),
        NotImplementedError,
        "`impl` must be able to choose among these tokens (torch.float64, regions of 16, on cpu); got 'triton'. "
        "Use impl='auto'.",
    ),
    (
        lambda: Merge().block_group("text", 0),
        ValueError,
        "`kind` must be one of 'joint', 'single', 'plain'; got 'text'.",
    ),
    (lambda: Merge().refresh_phase(-1), ValueError, "`step` must be at least 0; got -1."),
    (
        lambda: Regions((4,), (2, 2)),
        ValueError,
        "`counts` must have one number for each of `lengths`, and at least one; got (1, 2).",
    ),
    (
        lambda: Regions((4,), (5,)),
        ValueError,
        "`counts` must be at most the length of the region (4); got 5.",
    ),
    (lambda: small_map().enter([1]), TypeError, "`x` must be a tensor; got list."),
    (
        lambda: small_map().enter(torch.ones(2, 16)),
        ValueError,
        "`x` must have at least 3 dimensions; got shape [2, 16]. Expected [batch, tokens, channels].",
    ),
    (
        lambda: small_map().leave(torch.ones(2, 8, 3), dim=0),
        ValueError,
        "`dim` must be a dimension of `y` (shape [2, 8, 3]) after the batch; got 0.",
    ),
    (
        lambda: small_map().leave(torch.ones(2, 16, 3)),
        ValueError,
        "`y` must have 8 tokens in dimension 1; got shape [2, 16, 3].",
    ),
    (
        lambda: small_map().enter(torch.ones(1, 16, 3)),
        ValueError,
        "`x` must have a batch of 2; got shape [1, 16, 3]. Every batch element has destinations of its own.",
    ),
    (
        lambda: small_map().enter(torch.ones(2, 16, 3, device="meta")),
        ValueError,
        "`x` must be on the device of `destinations` (cpu); got meta. Move it with `.to(device)`.",
    ),
    (
        lambda: small_map().at_destinations(torch.ones(8, 2)),
        ValueError,
        "`table` must have 16 rows; got shape [8, 2].",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[bad[2][:40] for bad in BAD_CALLS])
def test_bad_calls_say_what_is_wrong(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message
