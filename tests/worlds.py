"""Worlds of real processes: each holds a gloo group and runs what a test asks of it, until the test module ends."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The server imports once what every process needs, and each process is a fork of it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.splits",
        "tests.store_workers",
        "torch._dynamo",
        "diffusers.models.transformers.transformer_flux",
    ]
)
_PATIENCE = 60


class Failed(tuple[str, str, str]):
    """What a rank raised: (type, message, traceback)."""


class World:
    """Processes that wait for work."""

    def __init__(self, size: int, folder: Path, timeout: float) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(theirs, rank, size, str(folder / "store"), timeout)
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def tell(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """`work(mesh, *args)` on every rank; what each returned, a `Failed`, or None from one that died."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, args)))
        return [self._answer(pipe) for pipe in self._pipes]

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """The same, where nothing may fail."""
        answers = self.tell(work, *args)
        for rank, answer in enumerate(answers):
            assert not isinstance(answer, Failed), f"rank {rank} raised:\n{answer[2]}"
        return answers

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        if not pipe.poll(_PATIENCE):
            raise TimeoutError(f"a rank gave no answer within {_PATIENCE} seconds")
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            return None

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def world_of(size: int, timeout: float = 30) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(size, Path(folder), timeout)
        try:
            yield world
        finally:
            world.close()


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    mesh = dist.init_device_mesh("cpu", (size,))
    while True:
        try:
            work, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # a group whose other ranks may be gone is not taken down in order
        try:
            answer = work(mesh, *args)
        except Exception as error:
            answer = Failed((type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(pickle.dumps(answer))  # by value: torch's own way of sending shares memory
