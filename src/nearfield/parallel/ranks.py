"""Ranks: the processes that share one sequence, and what they say to each other.

Everything that travels is packed into one buffer of bytes per exchange, so reading over one plan costs three
collectives at most, whatever types and tensors it sends. The bytes are counted where they are sent.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from nearfield._checks import wrong_type, wrong_value

ALIGNMENT = 16  # bytes; a tensor of any type may begin at a multiple of it
Shape = Sequence[int]


class ExchangeFailed(ConnectionError):
    """Another rank died, hung, or did something else. Commands end with one line, as after any OSError."""


@dataclass(eq=False)
class Ranks:
    """The ranks of a mesh, seen from one of them.

    Args:
        mesh: of one dimension; take one of several by its name, as in `mesh["cp"]`.
        overlap: whether a rank reads its own keys while others travel, in a call whose result is merged. That costs
            time on the device, and pays where the link is slow. By default ranks on several machines overlap.

    Attributes:
        bytes_sent: to other ranks, by this one, since it was made.
        num_exchanges: collectives that moved them.
    """

    mesh: DeviceMesh
    overlap: bool | None = None
    bytes_sent: int = field(default=0, init=False)
    num_exchanges: int = field(default=0, init=False)
    _agreed: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        mesh: object = self.mesh
        if not isinstance(mesh, DeviceMesh):
            hint = 'Make one with torch.distributed.init_device_mesh("cuda", (8,)).'
            wrong_type("mesh", "be a DeviceMesh", type(mesh).__name__, hint)
        if self.mesh.ndim != 1:
            hint = "Name the dimension to split tokens over."
            wrong_value("mesh", "have one dimension", tuple(self.mesh.shape), hint)

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def index(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    def agree(self, **facts: object) -> None:
        """Raise on every rank unless all have the same facts. Facts that were agreed on are not compared again."""
        if str(facts) not in self._agreed:
            self.compare(facts)
            self._agreed.add(str(facts))

    def compare(self, facts: Mapping[str, object], hint: str = "") -> None:
        """Raise on every rank unless all have the same facts. A collective call.

        Ranks also learn here whether they are on one machine, which is the default of `overlap`.
        """
        mine = {name: str(fact) for name, fact in facts.items()}, platform.node()
        everyones: list[Any] = [mine] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(everyones, mine, group=self.group)
            except RuntimeError as error:
                self._failed(error)
        _compare([facts for facts, _ in everyones], hint)
        if self.overlap is None:
            self.overlap = len({machine for _, machine in everyones}) > 1

    def all_to_all(self, outgoing: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Give every rank a tensor and get one from each, all of one type. A collective call, and differentiable.

        A rank's own tensor is not copied. In the backward pass gradients take the same ways back.

        Args:
            shapes: of the tensors that come, in the order of ranks.
        """
        found: tuple[Tensor, ...] = _AllToAll.apply(self, tuple(shapes), *outgoing)  # type: ignore[no-untyped-call]
        return list(found)

    def all_gather(self, own: Tensor, sizes: Sequence[int] | None = None, dim: int = 0) -> list[Tensor]:
        """Give every rank this rank's tensor and get one from each. A collective call, and differentiable.

        Args:
            sizes: the lengths of the tensors along `dim`, in the order of ranks; by default all are equal.
        """
        sizes = [own.shape[dim]] * self.size if sizes is None else sizes
        shapes = [(*own.shape[:dim], size, *own.shape[dim + 1 :]) for size in sizes]
        return self.all_to_all(own.expand(self.size, *own.shape).unbind(), shapes)

    def send(self, buffer: Tensor, sizes: Sequence[int], wanted: Sequence[int]) -> "Delivery":
        """Start sending `sizes` bytes to each rank and receiving `wanted` bytes from each. A collective call.

        What a rank sends to itself arrives like the rest, but is not counted.
        """
        if self.size == 1:
            return Delivery(self, None, buffer, buffer)
        received, work = self._carry(buffer, list(sizes), list(wanted))
        self.bytes_sent += sum(sizes) - sizes[self.index]
        self.num_exchanges += 1
        return Delivery(self, work, buffer, received)

    def _carry(self, buffer: Tensor, sizes: list[int], wanted: list[int]) -> tuple[Tensor, Any]:
        """Start the transfer. Returns the buffer that others' bytes arrive in, and the work to wait for."""
        received = buffer.new_empty(sum(wanted))
        try:
            work = dist.all_to_all_single(received, buffer, wanted, sizes, group=self.group, async_op=True)
        except RuntimeError as error:
            self._failed(error)
        return received, work

    def _failed(self, error: RuntimeError) -> Any:
        raise ExchangeFailed(
            f"rank {self.index} of {self.size} lost the others: one of them died, raised, or did not come within"
            f" the group's timeout. ({str(error).strip().splitlines()[0]})"
        ) from error


class Delivery(NamedTuple):
    """Bytes that are being sent. Both buffers are kept until they have arrived."""

    ranks: Ranks
    work: Any
    buffer: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        """The bytes that all ranks sent, in the order of ranks."""
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                self.ranks._failed(error)
        return self.received


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, shapes: tuple[Shape, ...], *outgoing: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.shapes = ranks, tuple(x.shape for x in outgoing)
        return _exchanged(ranks, shapes, outgoing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_exchanged(ctx.ranks, ctx.shapes, grads)


def _exchanged(ranks: Ranks, shapes: Sequence[Shape], outgoing: Sequence[Tensor]) -> tuple[Tensor, ...]:
    own, others = outgoing[ranks.index], [rank != ranks.index for rank in range(ranks.size)]
    parts = [x.reshape(-1)[: x.numel() * other] for x, other in zip(outgoing, others, strict=True)]
    wanted = [torch.Size(shape).numel() * other for shape, other in zip(shapes, others, strict=True)]
    sizes, wanted = ([count * own.element_size() for count in counts] for counts in (map(len, parts), wanted))
    arrived = ranks.send(torch.cat(parts).view(torch.uint8), sizes, wanted).wait().split(wanted)
    return tuple(
        part.view(own.dtype).view(shape) if other else own
        for part, shape, other in zip(arrived, shapes, others, strict=True)
    )


def _compare(everyones: Sequence[Mapping[str, str]], hint: str) -> None:
    names = sorted({name for facts in everyones for name in facts})
    for name in names:
        values = [facts.get(name, "nothing") for facts in everyones]
        if len(set(values)) > 1:
            got = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            wrong_value(name, "be the same on every rank", got, hint)
