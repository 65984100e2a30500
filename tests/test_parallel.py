"""One sequence over many ranks: what travels, by the plan alone, and what real processes compute with it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks.scaling_times import AbsentRanks
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.splits import (
    CASES,
    Part,
    bad_calls,
    chosen_overlap,
    counted,
    inputs,
    joined,
    lost,
    other_plans,
    other_types,
    part,
    whole,
    without_gradient,
)
from tests.tiles import paper
from tests.worlds import Failed, World, world_of

from nearfield import Geometry, Plan, attend, parallel, planning
from nearfield._types import Attended
from nearfield.methods.hilbert import Share
from nearfield.parallel import Shapes, Split, Traffic, bytes_sent
from nearfield.parallel.cuts import even_split
from nearfield.parallel.route import Call

# -- splits ------------------------------------------------------------------------------------------------------------


def test_even_split_cuts_each_span_on_units() -> None:
    split = Split.even([(21, 37), (37, 100)], 3, unit=8, replicated=[(0, 21)])
    assert split.owned == (((21, 24), (37, 56)), ((24, 32), (56, 80)), ((32, 37), (80, 100)))
    assert split.held(1).tolist() == [*range(21), *range(24, 32), *range(56, 80)]
    assert split.own(1).tolist() == [*range(24, 32), *range(56, 80)]
    assert [split.num_held(rank) for rank in range(3)] == [43, 53, 46]
    assert str(split) == "100 tokens over 3 ranks: 22, 32, 25; 21 on all"


BAD_SPLITS = {
    "twice": (
        lambda: Split(9, (((0, 5),), ((4, 9),))),
        "`owned` must give every token once to a rank or to all;",
    ),
    "gap": (
        lambda: Split(9, (((0, 4),), ((5, 9),))),
        "`owned` must give every token at all to a rank or to all;",
    ),
    "end": (lambda: Split(9, (((0, 4),), ((4, 8),))), r"`owned` must end at `num_tokens` \(9\); got 8\."),
    "nobody": (lambda: Split(9, ()), "`owned` must name at least one rank; got none"),
    "idle": (
        lambda: Split(9, (((0, 9),), ())),
        "`owned` must leave no rank without a token; got none for rank 1",
    ),
    "coarse": (lambda: Split.even([(0, 9)], 4, unit=8), "leave no rank without a token"),
    "backwards": (lambda: Split(9, (((9, 0),),)), "`owned` must hold spans with 0 <= start < stop"),
    "units": (
        lambda: Split.even([(0, 9), (9, 12)], 2, unit=[1, 2, 3]),
        "`unit` must be one number, or one for each of 2 spans; got 3",
    ),
    "no span": (lambda: Split(9, ((5,),)), r"`owned` must hold spans \(start, stop\) of tokens"),  # type: ignore[arg-type]
    "plan": (
        lambda: Traffic(planning.full(9), Split.even([(0, 8)], 2)),
        "`queries` must split the plan's 9 queries; got 8",
    ),
    "ranks": (
        lambda: Traffic(planning.full(8), Split.even([(0, 8)], 2), Split.even([(0, 8)], 4)),
        "`keys` must be split over the 2 ranks of the queries; got 4",
    ),
    "rank": (
        lambda: Traffic(planning.full(8), Split.even([(0, 8)], 2)).route(2),
        r"`rank` must be below the number of ranks \(2\); got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_SPLITS)
def test_bad_splits_are_refused(name: str) -> None:
    call, message = BAD_SPLITS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# -- routes ------------------------------------------------------------------------------------------------------------


def read_pairs(call: Call, groups: list[list[torch.Tensor]], total: torch.Tensor) -> None:
    """Add up which query of the whole sequence reads which key in one call of one rank."""
    queries = torch.cat([groups[group][0] for group in call.query_groups])
    keys = torch.cat([groups[group][1] for group in call.key_groups])
    pairs = call.plan.pair_counts()
    if call.keys.holes is not None:
        pairs = pairs * ~call.keys.holes
    pairs = pairs[:, :, call.queries.place][..., call.keys.place]
    for query, of_query in zip(queries, pairs.unbind(2), strict=True):  # one may be here and have come
        total[:, :, query, keys] += of_query


def all_pairs(plan: Plan, split: Split, overlap: bool) -> torch.Tensor:
    """How often each query reads each key, on whatever rank."""
    total = torch.zeros(*plan.blocks.shape[:2], plan.num_queries, plan.num_keys, dtype=torch.int32)
    traffic = Traffic(plan, split)
    for rank in range(split.num_ranks):
        route, held, own = traffic.route(rank), split.held(rank), split.own(rank)
        others = [other for other in range(split.num_ranks) if other != rank]
        came = torch.cat([traffic._sent_keys(other, rank) for other in others] or [own[:0]])
        visitors = torch.cat([traffic._sent_queries(other, rank) for other in others] or [own[:0]])
        for call in route.apart if overlap else [route.joined]:
            read_pairs(call, [[held, held], [visitors, came]], total)
    return total


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_read_every_pair_once(name: str, num_ranks: int) -> None:
    case = CASES[name]
    if name == "torn by text" and num_ranks == 1:
        num_ranks = 5
    for overlap in (False, True):
        assert torch.equal(all_pairs(case.plan, case.split(num_ranks), overlap), case.plan.pair_counts())


def test_text_that_reads_nothing_sends_nothing() -> None:
    idle, reading = (Traffic(CASES[name].plan, CASES[name].split(3)) for name in ("idle text", "hilbert"))
    assert not idle.has_everyones
    assert reading.has_everyones
    shapes = Shapes(1, 2, 2, 8, torch.float64)
    results = 24 // 3 * 2 * (8 + 1) * 8  # a third of the text: outputs and lse, in 8 bytes
    spared = 2 * 2 * results  # to two others: what is to be merged there, and what was merged here
    for mine, theirs in zip(
        bytes_sent(idle, shapes).forward, bytes_sent(reading, shapes).forward, strict=True
    ):
        assert theirs - mine == spared


@pytest.mark.parametrize("name", ["hilbert", "hilbert, keys", "hilbert, video", "full"])
def test_pairs_are_counted_per_rank(name: str) -> None:
    case = CASES[name]
    traffic = Traffic(case.plan, case.split(4))
    pairs = traffic.pairs_per_rank()
    assert sum(pairs) == case.plan.num_pairs
    routes = [traffic.route(rank) for rank in range(4)]
    calls = [route.joined for route in routes]
    is_whole = all(call.keys.holes is None and call.queries.holes is None for call in calls)
    assert is_whole == (name != "full")
    if is_whole:
        assert pairs == [route.num_pairs for route in routes]


@settings(max_examples=40)
@given(data=st.data())
def test_any_plan_over_any_split(data: st.DataObject) -> None:
    tokens, q_block, k_block = (data.draw(st.sampled_from(sizes)) for sizes in ([7, 32, 45], [4, 16], [1, 8]))
    rows, columns = -(-tokens // q_block), -(-tokens // k_block)
    share = data.draw(st.sampled_from([0.1, 0.5, 0.95]))
    seed = data.draw(st.integers(0, 99))
    mask = torch.rand(1, 2, rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    plan = planning.from_mask(mask, q_block=q_block, k_block=k_block, num_queries=tokens, num_keys=tokens)
    num_ranks = data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens - 1), min_size=num_ranks, max_size=num_ranks)))
    spans = list(zip([0, *cuts], [*cuts, tokens], strict=True))
    order = data.draw(st.permutations(range(num_ranks + 1)))  # the last piece is on all ranks
    split = Split(tokens, tuple((spans[place],) for place in order[:-1]), (spans[order[-1]],))
    assert torch.equal(all_pairs(plan, split, data.draw(st.booleans())), plan.pair_counts())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_only_what_is_read_is_sent(name: str, num_ranks: int) -> None:
    """Each key that travels is read by a row, of the rank it goes to, whose queries stay there."""
    case = CASES[name]
    split, traffic = case.split(num_ranks), Traffic(case.plan, case.split(num_ranks))
    reads = case.plan.pair_counts().sum(dim=(0, 1)) > 0
    for reader in range(num_ranks):
        for holder in set(range(num_ranks)) - {reader}:
            travelling = traffic._sent_queries(reader, holder)
            staying = split.own(reader)[~torch.isin(split.own(reader), travelling)]
            wanted = split.own(holder)[reads[staying][:, split.own(holder)].any(dim=0)]
            assert torch.equal(traffic._sent_keys(holder, reader), wanted)
            assert traffic.num_keys[holder, reader] == len(wanted)
            assert traffic.num_queries[reader, holder] == len(travelling)


@pytest.mark.parametrize("geometry", [Geometry((64, 64), text=128), Geometry((8, 24, 24), text=64)])
def test_tiles_send_a_halo_and_what_is_shared(geometry: Geometry) -> None:
    """The general route is the halo exchange: keys of the ring come from at most the tile that a cut tears."""
    method = paper(tiles=16, shared_tokens=128, share="two-way")
    spans, num_ranks = [section.span for section in method.sections(geometry)], 8
    split = Split.even(spans, num_ranks, unit=16, replicated=[geometry.text_span])
    shared, ring = spans
    tile = -(-(ring[1] - ring[0]) // 16) + 16
    for layer in range(4):
        traffic = Traffic(method.plan(geometry, layer), split)
        for rank in range(num_ranks):
            assert traffic.route(rank).is_aligned
            came = [traffic._sent_keys(other, rank) for other in range(num_ranks) if other != rank]
            keys = torch.cat(came)
            from_ring = keys[keys >= ring[0]]
            # The tiles at the two ends of a stretch are torn alike: what is missing of both is one tile.
            assert len(from_ring) <= tile + 16
            assert (layer % 4 == 0) == (len(from_ring) < tile // 2)
            own_shared = (split.own(rank) < shared[1]).sum()
            assert (keys < shared[1]).sum() == shared[1] - shared[0] - own_shared
            # Queries that travel are the shared ones, and go everywhere.
            for other in set(range(num_ranks)) - {rank}:
                assert (traffic._sent_queries(rank, other) < shared[1]).all()
                assert traffic.num_queries[rank, other] == own_shared


@pytest.mark.parametrize(("share", "most"), [("two-way", 4), ("keys", 64)])
def test_shared_tokens_that_read_all_are_spread_over_many_ranks(share: Share, most: int) -> None:
    """Whole blocks as long as few ranks are told; then those who tell many are many."""
    method, geometry = paper(tiles=64, shared_tokens=256, share=share), Geometry((256, 256), text=128)
    shared = method.sections(geometry)[0].span
    held = {}
    for num_ranks in (4, 64):
        split = even_split(method, geometry, num_ranks, 64)
        held[num_ranks] = max(int((split.own(rank) < shared[1]).sum()) for rank in range(num_ranks))
    assert held == {4: 64, 64: most}


def test_bytes_do_not_grow_with_the_image() -> None:
    """With tiles and a shared region of one size, four times the tokens send no more."""
    sent = []
    for side in (64, 128):
        geometry = Geometry((side, side), text=128)
        method = paper(tile_size=256, shared_tokens=128, share="keys")
        spans = [section.span for section in method.sections(geometry)]
        split = Split.even(spans, 4, unit=16, replicated=[geometry.text_span])
        shapes = Shapes(1, 4, 4, 64, torch.bfloat16)
        layers = [bytes_sent(Traffic(method.plan(geometry, layer), split), shapes) for layer in range(4)]
        sent.append(max(sum(layer.forward[rank] for layer in layers) for rank in range(4)))
    assert sent[1] <= sent[0] * 1.1
    dense = Traffic(planning.full(128**2 + 128), split)
    assert sent[1] / 4 < 0.15 * max(bytes_sent(dense, shapes).forward)


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda size: f"{size} ranks")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_does(world: World, name: str) -> None:
    parts: list[Part] = world.run(part, name)
    for mine, wanted in zip(joined(name, parts), whole(name), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12)
    assert [(one.bytes_forward, one.bytes_backward) for one in parts] == counted(name, world.size)
    # A run repeats bit by bit, and rows that all hold are the same on all.
    again: list[Part] = world.run(part, name)
    for first, second in zip(parts, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first.results, second.results, strict=True))
    split = CASES[name].split(world.size)
    for rank, one in enumerate(parts):
        everyones = split.owners[split.held(rank)] == -1
        first = split.owners[split.held(0)] == -1
        for number in range(2):
            assert torch.equal(one.results[number][:, :, everyones], parts[0].results[number][:, :, first])


@pytest.mark.parametrize("name", ["hilbert", "hilbert, keys", "torn by text"])
def test_reading_while_others_travel_gives_the_same(world: World, name: str) -> None:
    """In calls apart, whose results are merged: the same bytes, and the same up to rounding."""
    parts: list[Part] = world.run(part, name, torch.float64, True)
    for mine, wanted in zip(joined(name, parts), whole(name), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12)
    assert [(one.bytes_forward, one.bytes_backward) for one in parts] == counted(name, world.size)


def test_half_precision_stays_within_the_error_budget(world: World) -> None:
    """Twice what one process in the same precision is wrong by, against double precision."""
    name = "hilbert"
    exact, mine = whole(name), joined(name, world.run(part, name, torch.bfloat16))
    rounded = [x.bfloat16().double() for x in inputs(CASES[name])[0]]
    assert rounded
    for wanted, eager, found in zip(exact, whole(name, torch.bfloat16), mine, strict=True):
        budget = (eager.double() - wanted).norm()
        assert (found.double() - wanted).norm() <= 2 * budget


def test_inference_gives_the_same(world: World) -> None:
    name = "hilbert, text behind"
    for first, second in zip(world.run(part, name), world.run(without_gradient, name), strict=True):
        assert torch.equal(first.results[0], second)


@pytest.mark.parametrize("name", ["hilbert, two images", "random lists"])
def test_keys_that_came_are_read_where_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel reads keys from two places, it is given those that are here, those that came, and their plan."""
    case, handed = CASES[name], []
    route = Traffic(case.plan, case.split(3)).route(1)
    assert route.is_aligned == (name == "hilbert, two images")
    tensors = [x[:, :, case.split(3).held(1)] for x in inputs(case, torch.float32)[0]]
    bias = tensors[3] if case.has_bias else None
    ranks = AbsentRanks(1, 3)
    together = parallel.attend(*tensors[:3], route, ranks, key_bias=bias)

    def continued(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: tuple[torch.Tensor, torch.Tensor],
        plan: Plan, **rest: Any,
    ) -> Attended:  # fmt: skip
        handed.append((key.data_ptr(), more[0].untyped_storage().data_ptr()))
        sides = (torch.cat(parts, dim=2) for parts in ((key, more[0]), (value, more[1])))
        return attend(query, *sides, plan, **rest)

    monkeypatch.setattr("nearfield.parallel.attention.attend_continued", continued)
    found = parallel.attend(*tensors[:3], route, ranks, key_bias=bias)
    assert all(torch.equal(a, b) for a, b in zip(found, together, strict=True))
    # Neither was copied.
    noise = {x.untyped_storage().data_ptr() for x in ranks._noise.values()}
    assert [(mine == tensors[1].data_ptr(), came in noise) for mine, came in handed] == (
        [(True, True)] if route.is_aligned else []
    )


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_on_several_machines_read_while_others_travel(world: World, machines: int) -> None:
    assert world.run(chosen_overlap, machines) == [machines > 1] * world.size


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("work", "fact"), [(other_plans, "plan_and_split"), (other_types, "tensors")])
def test_ranks_that_disagree_are_told(world: World, work: object, fact: str) -> None:
    answers = world.tell(work)  # type: ignore[arg-type]
    for answer in answers:
        assert isinstance(answer, Failed)
        assert answer[0] == "ValueError"
        assert f"`{fact}` must be the same on every rank; got" in answer[1]
        assert "on rank 1" in answer[1]
    world.run(part, "read twice")  # and nothing is stuck


def test_bad_calls_are_refused(world: World) -> None:
    num = {2: 32, 3: 22, 4: 16}[world.size]
    last = world.size - 1
    messages = world.run(bad_calls)[last]
    held = 64 - last * num if world.size != 3 else 21
    size = world.size
    assert messages == [
        f"`query` must have the {held} tokens that rank {last} holds; got shape [1, 1, 65, 8].",
        f"`key` must have the {held} tokens that rank {last} holds; got shape [1, 1, 65, 8].",
        "`route` must be a Route; got Plan. Make one with Traffic(plan, split).route(rank).",
        f"`route` must be that of rank {last} of {size}; got 0 of 1.",
        "`mesh` must be a DeviceMesh; got str."
        ' Make one with torch.distributed.init_device_mesh("cuda", (8,)).',
    ]


@pytest.mark.parametrize(
    ("manner", "size"), [("dies", 3), ("hangs", 2), ("dies before its backward pass", 3)]
)
def test_a_lost_rank_is_an_error_and_no_hang(manner: str, size: int) -> None:
    with world_of(size, timeout=3) as doomed:
        answers = doomed.tell(lost, manner)
    assert answers[-1] == (0.0 if manner == "hangs" else None)
    for seconds in answers[:-1]:
        assert isinstance(seconds, float), seconds
        assert seconds < 5
