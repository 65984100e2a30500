"""Workers on a Ray cluster: one actor each, started again where it died."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nearfield_lab.engines import Answer, Start, Work, WorkersLost
from nearfield_lab.missing import MissingExtra

_STARTS = 3  # in a row that may fail before a worker is given up
_PATIENCE = 30.0  # seconds without any worker after which it is said what is waited for
_RESTART = 120.0  # seconds that an actor may take to be restarted, each try at it being refused at once
_BREATH = 0.5  # seconds between such tries


class RayWorkers:
    """Actors that are handed items only while they are known to live.

    An actor whose machine has no room, or that is being restarted, would keep an item waiting for ever. So each is
    asked to load first, at its start and after every loss, and counts as idle when it has answered.
    """

    def __init__(self, start: Start, num_workers: int, gpus: float) -> None:
        self._ray = _import_ray()
        # Restarts are not limited here: an item's tries are, and the starts in a row that fail.
        actor = self._ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=0)(_Actor)
        self._idle = list[Any]()
        self._items = dict[Any, tuple[Any, Any]]()  # what is being done: the actor and its item
        self._starting = dict[Any, Any]()  # who was asked to load
        self._failed_starts = dict[Any, int]()
        self._deadlines = dict[Any, float]()  # until when a worker's being restarted is no failure
        for _ in range(num_workers):
            worker = actor.remote(start)
            self._failed_starts[worker] = 0
            self._begin_start(worker)

    @property
    def num_workers(self) -> int:
        return len(self._failed_starts)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def hand(self, item: Any) -> None:
        worker = self._idle.pop(0)
        self._items[worker.work.remote(item)] = worker, item

    def wait(self) -> list[Answer]:
        ready: list[Any] = []
        while not ready:
            ready, _ = self._ray.wait([*self._items, *self._starting], timeout=_PATIENCE)
            if not ready and not self._items:
                self._say_what_is_waited_for()
        return self._answers(ready[0])

    def close(self) -> None:
        for worker in self._failed_starts:
            self._ray.kill(worker)

    def _begin_start(self, worker: Any) -> None:
        self._deadlines[worker] = time.monotonic() + _RESTART
        self._ask_to_load(worker)

    def _ask_to_load(self, worker: Any) -> None:
        self._starting[worker.load.remote()] = worker

    def _answers(self, reference: Any) -> list[Answer]:
        value, error, is_alive = self._result(reference)
        if reference in self._starting:
            self._started(self._starting.pop(reference), error)
            return []
        worker, item = self._items.pop(reference)
        if is_alive:
            self._idle.append(worker)
        else:
            self._begin_start(worker)
        return [Answer(item, value, error)]

    def _result(self, reference: Any) -> tuple[Any, Exception | None, bool]:
        """What came back: a value or an error, and whether the worker outlived it."""
        try:
            return self._ray.get(reference), None, True
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause  # without the far traceback, which is no line for a report
            return None, cause if isinstance(cause, Exception) else error, True
        except self._ray.exceptions.RayError as error:
            return None, error, False

    def _started(self, worker: Any, error: Exception | None) -> None:
        if error is None:
            self._failed_starts[worker] = 0
            self._idle.append(worker)
            return
        is_restarting = isinstance(error, self._ray.exceptions.ActorUnavailableError)
        if is_restarting and time.monotonic() < self._deadlines[worker]:
            time.sleep(_BREATH)
            self._ask_to_load(worker)
            return
        self._failed_starts[worker] += 1
        if self._failed_starts[worker] < _STARTS:
            self._ask_to_load(worker)
            return
        del self._failed_starts[worker]
        self._ray.kill(worker)
        if not self._failed_starts:
            reason = f"no worker could be started; the last: {type(error).__name__}: {error}"
            raise WorkersLost(reason) from error

    def _say_what_is_waited_for(self) -> None:
        free = self._ray.available_resources()
        counts = ", ".join(f"{free.get(name, 0):g} free {name}s" for name in ("CPU", "GPU"))
        print(
            f"waiting for {self.num_workers} workers to start; the cluster has {counts}",
            file=sys.stderr,
            flush=True,
        )


class _Actor:
    """Lives in a process of its own, on some machine of the cluster."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._work: Work | None = None

    def load(self) -> None:
        if self._work is None:
            self._work = self._start()

    def work(self, item: Any) -> Any:
        self.load()  # where it was started anew in between
        assert self._work is not None
        return self._work(item)


@contextmanager
def joined(address: str | None) -> Iterator[dict[str, float]]:
    """The resources of the cluster at an address, or of one that is started here and ended again.

    One that this process has joined already is used, and stays.
    """
    ray = _import_ray()
    is_mine = not ray.is_initialized()
    if is_mine:
        _join(ray, address)
    try:
        yield ray.cluster_resources()
    finally:
        if is_mine:
            ray.shutdown()


def _join(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, **quiet)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for telemetry
    ray.init(address="local", include_dashboard=False, **quiet)


@contextmanager
def on_ray(start: Start, num_workers: int, *, gpus: float) -> Iterator[RayWorkers]:
    """Workers on the cluster that was joined.

    Args:
        gpus: how many each worker needs.
    """
    workers = RayWorkers(start, num_workers, gpus)
    try:
        yield workers
    finally:
        workers.close()


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtra("ray", error, "ray") from None
    return ray
