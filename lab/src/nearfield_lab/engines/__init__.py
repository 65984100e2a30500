"""Work handed out to workers, item by item, and tried again where it failed: the same in one process and on a cluster.

An engine opens `Workers`; `mapped` hands them the items. What is retried, and when to give up, is decided here alone.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

Work = Callable[[Any], Any]
Start = Callable[[], Work]
"""Called once by every worker, to load what it needs; does one item after another from then on. It travels, pickled."""


class WorkersLost(RuntimeError):
    """No worker is left, or none ever succeeds: what is not done yet will not be."""


class Answer(NamedTuple):
    """One try of one item: a value, or what went wrong."""

    item: Any
    value: Any = None
    error: Exception | None = None


class Outcome(NamedTuple):
    """An item that is finished: done, or given up after the last of its tries."""

    item: Any
    value: Any
    error: Exception | None
    tries: int


class Workers(Protocol):
    """Workers that do one item at a time."""

    @property
    def num_workers(self) -> int:
        """All that may come to work, ready or not."""

    @property
    def num_idle(self) -> int:
        """How many could take an item now."""

    def hand(self, item: Any) -> None:
        """Give an item to an idle worker."""

    def wait(self) -> list[Answer]:
        """Wait until something changed: answers, or, where there are none, a worker that came or went."""


def mapped(
    workers: Workers, items: Sequence[Hashable], *, tries: int, hopeless: tuple[type[Exception], ...] = ()
) -> Iterator[Outcome]:
    """The outcome of every item, as they are finished.

    An item that failed goes to the end of the queue, where likely another worker takes it, until it was tried `tries`
    times. Raises WorkersLost where not one item has worked and each worker could have used up its tries.

    Args:
        items: all different.
        hopeless: errors that another try would meet again; they are raised.
    """
    waiting, under_way, has_worked = deque(items), 0, False
    tried: Counter[Hashable] = Counter()
    finished = list[Outcome]()
    while waiting or under_way:
        while waiting and workers.num_idle:
            workers.hand(waiting.popleft())
            under_way += 1
        yield from finished  # after workers have got something to do: what the caller does with it takes time
        finished = []
        for answer in workers.wait():
            under_way -= 1
            tried[answer.item] += 1
            if isinstance(answer.error, hopeless):
                raise answer.error
            has_worked |= answer.error is None
            if not has_worked and tried.total() > tries * workers.num_workers:
                raise WorkersLost(f"not one of {tried.total()} tries succeeded; the last: {_said(answer)}")
            if answer.error is not None and tried[answer.item] < tries:
                waiting.append(answer.item)
            else:
                finished.append(Outcome(*answer, tries=tried[answer.item]))
    yield from finished


def _said(answer: Answer) -> str:
    return f"{type(answer.error).__name__}: {answer.error}"


class OneWorker:
    """The engine that needs nothing: this process, which works while it is waited for."""

    num_workers = 1

    def __init__(self, start: Start) -> None:
        self._work = start()
        self._items = list[Any]()

    @property
    def num_idle(self) -> int:
        return 1 - len(self._items)

    def hand(self, item: Any) -> None:
        self._items.append(item)

    def wait(self) -> list[Answer]:
        item = self._items.pop()
        try:
            return [Answer(item, self._work(item))]
        except Exception as error:
            return [Answer(item, error=error)]
