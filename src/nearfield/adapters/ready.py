"""Everything that calls of one size need, made once: the order of the tokens, and what each layer reads."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.adapters.layers import Layer
from nearfield.adapters.part import Part
from nearfield.adapters.spec import Located
from nearfield.geometry import Geometry
from nearfield.merging import Regions
from nearfield.methods import Hilbert, Reader, TimedReader
from nearfield.methods.merging import Merged, full_reader
from nearfield.parallel import Ranks
from nearfield.parallel.cuts import even_split, split_between_regions
from nearfield.parallel.model import Share, SplitModel, SplitReader
from nearfield.plan import Plan
from nearfield.tokenmap import Ordering

_DENSE_BLOCK = 128  # of plans where everyone reads everyone


@dataclass(frozen=True, eq=False)
class Ready:
    """Everything a call needs, made for one layout of tokens and one device.

    Args:
        readers: what each layer reads, in the order of layers; None where it is dense.
        dense_reader: what dense steps read where tokens are split over ranks.
        weighing: what each layer reads in dense steps, or where it is dense, if merged keys have a bias.
        regions: how image tokens are merged; None where they are not.
        own_regions: those of this rank, where tokens are split over several.
        derived: for which batches, and whether for training, plans have derived what they keep.
    """

    located: Located
    device: torch.device
    ordering: Ordering | Share
    readers: tuple[Reader | None, ...]
    dense_reader: Reader | None = None
    weighing: tuple[Reader | None, ...] = ()
    regions: Regions | None = None
    own_regions: Regions | None = None
    derived: set[tuple[int, bool]] = field(default_factory=set)

    def derive(self, layers: Sequence[Layer], batch: int) -> None:
        """Let plans derive what `attend` keeps of them, so that compiled layers find it and do not make it anew."""
        state = batch, torch.is_grad_enabled()
        if state in self.derived:
            return
        self._derive_orders(layers, batch)
        for reader in self.readers + self.weighing:
            _leave_lengths_open(reader)
        self.derived.add(state)

    def _derive_orders(self, layers: Sequence[Layer], batch: int) -> None:
        for reader, layer in zip(self.readers + self.weighing, 2 * tuple(layers), strict=True):
            for plan in plans_of(reader):
                for part in (plan, plan.transpose()) if torch.is_grad_enabled() else (plan,):
                    if part.device.type == "cuda":
                        part.longest_first(batch, layer.attention.heads)


def make_ready(
    part: Part, layers: Sequence[Layer], located: Located, device: torch.device, num_sparse_layers: int
) -> Ready:
    """`num_sparse_layers` are those of the whole model: they share what a method lets its readers remember."""
    whole = {sees: part.geometry(located, sees) for sees in (True, False)}
    ordering = _ordering(part, layers, whole, device)
    regions, short = _merged(part.method, whole)
    readers: list[Reader | None] = []
    weighing: list[Reader | None] = []
    for layer in layers:
        geometry = (whole if layer.group is None else short)[layer.sees_text]
        reader = None
        if layer.is_sparse and layer.index is not None:
            reader = part.method.reader(geometry, layer.index, heads=layer.attention.heads, device=device)
        readers.append(reader)
        is_weighed = layer.group is not None and regions is not None and part.weighs
        weighing.append(full_reader(geometry.num_tokens, str(device)) if is_weighed else None)
    ready = Ready(located, device, ordering, tuple(readers), None, tuple(weighing), regions)
    for timed in timed_readers(part, ready):
        timed.among(num_sparse_layers)
    return ready if part.ranks is None else _split(part, layers, ready, part.ranks)


def timed_readers(part: Part, ready: Ready | None) -> Iterator[TimedReader]:
    """Those that remember from call to call."""
    for reader in ready.readers if ready and part.is_timed else ():
        if reader is not None:
            yield cast(TimedReader, reader)


def plans_of(reader: Any) -> Iterator[Plan]:
    """The plans inside a reader, whatever tuples it is made of."""
    if isinstance(reader, Plan):
        yield reader
    elif isinstance(reader, SplitReader):
        yield from reader.plans
    elif isinstance(reader, tuple):
        for part in reader:
            yield from plans_of(part)


def _leave_lengths_open(reader: Any) -> None:
    """Let torch.compile make graphs for lists of any length: layers differ in it, methods too, and no code asks for it.

    Who compiles has loaded its tracer, or diffusers has; where neither did, it is not loaded for this.
    """
    tracer = sys.modules.get("torch._dynamo")
    if tracer is None:
        return
    for plan in plans_of(reader):
        tracer.maybe_mark_dynamic(plan._extent, (0, 1))
    for each in _lists_of(reader):
        tracer.maybe_mark_dynamic(each, each.dim() - 1)


def _lists_of(reader: Any) -> Iterator[Tensor]:
    """Lists of plans, and others, which have one axis, inside a reader."""
    if isinstance(reader, Plan):
        yield from reader.lists()
    elif isinstance(reader, Tensor) and reader.dim() == 1:
        yield reader
    elif isinstance(reader, tuple):
        for part in reader:
            yield from _lists_of(part)


def _ordering(
    part: Part, layers: Sequence[Layer], whole: Mapping[bool, Geometry], device: torch.device
) -> Ordering:
    """One order for all layers, whether they see the text or not."""
    kinds = {layer.sees_text for layer in layers if layer.is_sparse} or {True}
    ordering, *others = (part.method.ordering(whole[sees], device=device) for sees in kinds)
    if not all(torch.equal(other.order, ordering.order) for other in others):
        wrong_value("method", "order images alike with and without text", part.method)
    return ordering


def _merged(method: object, whole: Mapping[bool, Geometry]) -> tuple[Regions | None, Mapping[bool, Geometry]]:
    """How image tokens are merged, and the geometries of what is left; the same ones if nothing is merged."""
    if not isinstance(method, Merged):
        return None, whole
    regions = method.regions(whole[True])
    if regions.num_merged == regions.num_tokens:
        return None, whole
    return regions, {sees: method.shortened(geometry, regions) for sees, geometry in whole.items()}


# -- over ranks ----------------------------------------------------------------------------------------------------


class _SplitModels(NamedTuple):
    """Who holds which of all tokens, and of the merged ones; and where this rank merges."""

    whole: SplitModel
    merged: SplitModel
    own_regions: Regions | None = None


def _split(part: Part, layers: Sequence[Layer], ready: Ready, ranks: Ranks) -> Ready:
    """The same for the share of one rank. Dense layers read all, wherever it is."""
    assert isinstance(ready.ordering, Ordering)
    geometry = part.geometry(ready.located)
    models = _split_models(part.method, geometry, ready, ranks)
    dense = {id(model): model.dense_reader(ready.device) for model in (models.whole, models.merged)}
    readers, weighing = list[Reader | None](), list[Reader | None]()
    for layer, reader in zip(layers, ready.readers, strict=True):
        model = models.whole if layer.group is None else models.merged
        everything = dense[id(model)] if layer.is_ours else None
        readers.append(everything if reader is None else model.reader(reader))
        weighing.append(everything)
    return replace(
        ready,
        ordering=models.whole.share(ready.ordering, geometry),
        readers=tuple(readers),
        dense_reader=dense[id(models.whole)],
        weighing=tuple(weighing),
        own_regions=models.own_regions,
    )


def _split_models(method: object, geometry: Geometry, ready: Ready, ranks: Ranks) -> _SplitModels:
    attention = method.attention if isinstance(method, Merged) else method
    assert attention is None or isinstance(attention, Hilbert)
    block = _DENSE_BLOCK
    if attention is not None:
        plans = (
            attention.plan(geometry, layer, heads=1, device=ready.device) for layer in attention.tile_changes
        )
        block = max(plan.q_block for plan in plans)
    if not isinstance(method, Merged):
        assert attention is not None
        whole = SplitModel(even_split(attention, geometry, ranks.size, block), block, ranks)
        return _SplitModels(whole, whole)
    split = split_between_regions(method, geometry, ranks.size, block)
    whole = SplitModel(split.whole, block, ranks)
    if ready.regions is None:
        return _SplitModels(whole, whole)
    return _SplitModels(whole, SplitModel(split.merged, block, ranks), split.regions[ranks.index])
