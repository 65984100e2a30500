"""Work that is handed out and tried again, with workers that fail as a script says. A real Ray is in `test_ray.py`."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from nearfield_lab.engines import (
    Answer,
    OneWorker,
    Outcome,
    Start,
    WorkersLost,
    cluster,
    mapped,
)
from nearfield_lab.missing import MissingExtra


class Scripted:
    """Workers whose every answer is written down: a value, or an exception; None is a change without an answer."""

    def __init__(self, num_workers: int, script: dict[Any, list[Any]]) -> None:
        self.num_workers, self.num_idle = num_workers, num_workers
        self._script = {item: deque(answers) for item, answers in script.items()}
        self._items = deque[Any]()
        self.handed = list[Any]()

    def hand(self, item: Any) -> None:
        assert self.num_idle > 0
        self.num_idle -= 1
        self._items.append(item)
        self.handed.append(item)

    def wait(self) -> list[Answer]:
        assert self._items, "waited for nobody"
        said = self._script[self._items[0]].popleft()
        if said is None:
            return []
        self.num_idle += 1
        item = self._items.popleft()
        return [Answer(item, error=said) if isinstance(said, Exception) else Answer(item, said)]


def failing(*failures: int) -> Start:
    """Squares; each number in `failures` makes one try of that item fail."""

    def start() -> Callable[[int], int]:
        left = list(failures)

        def work(item: int) -> int:
            if item in left:
                left.remove(item)
                raise RuntimeError(f"no {item}")
            return item * item

        return work

    return start


def test_every_item_is_done_once() -> None:
    outcomes = list(mapped(OneWorker(failing()), range(5), tries=1))
    assert outcomes == [Outcome(item, item * item, None, 1) for item in range(5)]


def test_what_failed_is_tried_again_behind_the_others() -> None:
    outcomes = list(mapped(OneWorker(failing(1, 1)), range(3), tries=3))
    assert [(outcome.item, outcome.tries) for outcome in outcomes] == [(0, 1), (2, 1), (1, 3)]
    assert all(outcome.error is None for outcome in outcomes)


def test_what_fails_too_often_is_given_up_and_the_rest_goes_on() -> None:
    *done, last = mapped(OneWorker(failing(1, 1, 1)), range(3), tries=2)
    assert [outcome.item for outcome in done] == [0, 2]
    assert (last.item, last.value, str(last.error), last.tries) == (1, None, "no 1", 2)


def test_hopeless_errors_are_raised_at_once() -> None:
    workers = Scripted(1, {0: [0], 1: [ValueError("size")], 2: [2]})
    with pytest.raises(ValueError, match="size"):
        list(mapped(workers, range(3), tries=9, hopeless=(ValueError,)))
    assert workers.handed == [0, 1]


def test_nothing_that_ever_works_ends_early() -> None:
    items = range(1000)
    workers = Scripted(2, {item: [RuntimeError(f"no {item}")] * 3 for item in items})
    with pytest.raises(WorkersLost, match=r"^not one of 7 tries succeeded; the last: RuntimeError: no 6$"):
        list(mapped(workers, items, tries=3))


def test_after_one_success_all_are_tried() -> None:
    items = range(100)
    workers = Scripted(1, {item: [RuntimeError()] * 2 for item in items} | {0: [0]})
    outcomes = list(mapped(workers, items, tries=2))
    assert len(outcomes) == 100
    assert [outcome.item for outcome in outcomes if outcome.error is None] == [0]


def test_waiting_without_an_answer_changes_nothing() -> None:
    workers = Scripted(2, {0: [None, None, "a"], 1: ["b"], 2: [None, "c"]})
    assert [outcome.value for outcome in mapped(workers, range(3), tries=1)] == ["a", "b", "c"]


def test_workers_get_the_next_item_before_a_result_is_looked_at() -> None:
    workers = Scripted(1, {item: [item] for item in range(3)})
    outcomes = mapped(workers, range(3), tries=1)
    assert next(outcomes).item == 0
    assert workers.handed == [0, 1]


def test_a_start_that_fails_is_raised() -> None:
    def start() -> Callable[[int], int]:
        raise FileNotFoundError("no weights")

    with pytest.raises(FileNotFoundError, match="no weights"):
        OneWorker(start)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra) as raised, cluster.joined(None):
        pass
    assert str(raised.value).startswith("`ray` must be installed for this; got ")
    assert str(raised.value).endswith("Install it with `pip install 'nearfield-lab[ray]'`.")


# -- actors, without a cluster: a stand-in for the few functions of Ray that are called --------------------------------


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Method:
    """A method of an actor as its owner sees it: asked for from afar, run when it is fetched."""

    def __init__(self, actor: "Handle", run: Callable[..., Any]) -> None:
        self._actor, self._run = actor, run

    def remote(self, *given: Any) -> "Reference":
        return Reference(self._actor, lambda: self._run(*given))


class Handle:
    def __init__(self, actor: Any) -> None:
        self.load, self.work = Method(self, actor.load), Method(self, actor.work)


@dataclass(frozen=True, eq=False)
class Reference:
    actor: Handle
    run: Callable[[], Any]


class StandIn:
    """A cluster with room for some actors: the others wait until one of the first is killed."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, ActorUnavailableError=ActorUnavailableError
    )

    def __init__(self, room: int) -> None:
        self._room = room
        self.living = list[Handle]()

    def remote(self, **options: Any) -> Callable[[type], Any]:
        assert options == {"num_cpus": 1, "num_gpus": 0, "max_restarts": -1, "max_task_retries": 0}
        return lambda actor: SimpleNamespace(remote=lambda start: self._made(actor(start)))

    def _made(self, actor: Any) -> Handle:
        self.living.append(Handle(actor))
        return self.living[-1]

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        able = [reference for reference in references if reference.actor in self.living[: self._room]]
        assert able, "this would wait for ever"
        return able[:1], [reference for reference in references if reference is not able[0]]

    def get(self, reference: Reference) -> Any:
        try:
            return reference.run()
        except RayError:
            raise
        except Exception as error:
            raise RayTaskError(error) from None

    def kill(self, actor: Handle) -> None:
        self.living.remove(actor)


def on_stand_in(monkeypatch: pytest.MonkeyPatch, start: Start, num_workers: int, room: int) -> Any:
    stand_in = StandIn(room)
    monkeypatch.setattr(cluster, "_import_ray", lambda: stand_in)
    return stand_in, cluster.on_ray(start, num_workers, gpus=0)


def test_actors_for_whom_there_is_no_room_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, opened = on_stand_in(monkeypatch, failing(2), num_workers=5, room=2)
    with opened as workers:
        outcomes = list(mapped(workers, range(8), tries=2))
    assert sorted(outcome.value for outcome in outcomes) == [item * item for item in range(8)]
    assert [outcome.item for outcome in outcomes if outcome.tries == 2] == [2]
    assert ray.living == []


def test_actors_that_cannot_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = list[int]()

    def start() -> Callable[[int], int]:
        starts.append(len(starts))
        raise FileNotFoundError("no weights here")

    ray, opened = on_stand_in(monkeypatch, start, num_workers=3, room=2)
    expected = r"^no worker could be started; the last: FileNotFoundError: no weights here$"
    with pytest.raises(WorkersLost, match=expected), opened as workers:
        list(mapped(workers, range(8), tries=2))
    assert len(starts) == 9  # three times each
    assert ray.living == []


@pytest.mark.parametrize("is_in_time", [True, False])
def test_an_actor_that_is_being_restarted_is_waited_for(
    is_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses every try at once, far more often than starts may fail."""
    refusals = list[int]()
    monkeypatch.setattr(cluster, "_BREATH", 0.0)
    if not is_in_time:
        monkeypatch.setattr(cluster, "_RESTART", -1.0)

    def start() -> Callable[[int], int]:
        if len(refusals) < 10:
            refusals.append(0)
            raise ActorUnavailableError("it is restarting")
        return lambda item: item + 1

    _, opened = on_stand_in(monkeypatch, start, num_workers=1, room=1)
    if is_in_time:
        with opened as workers:
            assert [outcome.value for outcome in mapped(workers, range(3), tries=1)] == [1, 2, 3]
        return
    with pytest.raises(WorkersLost, match="it is restarting"), opened as workers:
        list(mapped(workers, range(3), tries=1))


def test_actors_that_can_start_do_what_the_others_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = list[int]()

    def start() -> Callable[[int], int]:
        starts.append(len(starts))
        if len(starts) <= 3:
            raise FileNotFoundError("no weights here")
        return lambda item: item + 1

    ray, opened = on_stand_in(monkeypatch, start, num_workers=2, room=1)
    with opened as workers:
        outcomes = list(mapped(workers, range(3), tries=1))
        assert workers.num_workers == 1
    assert [outcome.value for outcome in outcomes] == [1, 2, 3]
    assert ray.living == []


def test_an_actor_that_was_lost_loads_before_it_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[Any]()

    def start() -> Callable[[int], int]:
        def work(item: int) -> int:
            events.append(item)
            if events.count(1) == 1 and item == 1:
                raise RayError("the actor died")
            return item

        return work

    _, opened = on_stand_in(monkeypatch, start, num_workers=1, room=1)
    load = cluster._Actor.load
    monkeypatch.setattr(cluster._Actor, "load", lambda actor: (events.append("load"), load(actor))[1])
    with opened as workers:
        outcomes = list(mapped(workers, range(3), tries=2))
    assert [(outcome.item, outcome.tries) for outcome in outcomes] == [(0, 1), (2, 1), (1, 2)]
    # Asked to load at its start and after its loss; in between, every item looks for itself whether it must.
    assert events == ["load", *("load", 0), *("load", 1), "load", *("load", 2), *("load", 1)]
