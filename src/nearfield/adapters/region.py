"""A region: the part of a model that tokens enter in raster order and leave in raster order.

Most models are one region; a UNet has one per transformer. At its entrance, outside anything compiled, a region finds
out how large the image is, fetches the order of its tokens and what each layer reads, and hands that to the
processors. Between entrance and exit nothing is looked up and nothing but attention knows of the method.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nearfield._checks import wrong_value
from nearfield._types import Attended, Impl
from nearfield.adapters.diffusers_hooks import caches_in, guidance_in
from nearfield.adapters.grids import GridReader
from nearfield.adapters.merging import COMPILED_WHOLE, MergedCall, Merger
from nearfield.adapters.moments import Moments, Now
from nearfield.adapters.processor import SparseProcessor, refuse_to_copy, sparse_processor
from nearfield.adapters.spec import (
    CROSS_ATTENTION,
    Arguments,
    Located,
    Move,
    Spec,
    check_arguments,
    check_count,
    find,
    first_tensor,
    parameter_names,
)
from nearfield.adapters.steps import Steps
from nearfield.geometry import Geometry
from nearfield.merging import Regions
from nearfield.methods import Hilbert, Method, Reader, TimedReader
from nearfield.methods.merging import Merged, full_reader
from nearfield.parallel import Ranks
from nearfield.parallel.cuts import even_split, split_between_regions
from nearfield.parallel.model import Share, SplitModel, SplitReader
from nearfield.plan import Plan
from nearfield.tokenmap import Ordering

_REMEMBERED = 8
_MANY_STEPS = 1000
_DENSE_BLOCK = 128  # of plans where everyone reads everyone
_LARGEST_HEAD = 128  # that a kernel takes
_LOOKED_AT = 4096  # numbers of a sample that ranks compare
_NO_BACKWARD = -1
_PARALLEL = "a parallel configuration"
_OUTSIDE = "of attention layers that another model shares (a ControlNet)"

# Not put together where it is raised: torch.compile could not trace that.
_NOT_READY = (
    "`hidden_states` must have the size that was made ready before the model was compiled; got another."
    " Call `handle.prepare(height=..., width=...)` first, or compile blocks alone with `compile_repeated_blocks`."
)
_NOT_WHOLE = (
    "`target` must not be compiled as a whole where the method remembers from step to step; got torch.compile of the"
    " model. Compile blocks alone with `compile_repeated_blocks`, or let the method decide at every call"
    ' (predict="online").'
)
_READY_ELSEWHERE = (
    "`device` must be where the model runs when a size is made ready for torch.compile; got another."
    " Call `handle.prepare(height=..., width=..., device=...)`."
)


@dataclass(frozen=True)
class Layer:
    """One attention module of a region.

    Args:
        index: its number among the layers of the model; None where the method has no say (cross-attention).
        sees_text: whether its sequence holds the text.
        dense: why it stays dense, or None.
        processor: what was found in it.
        installed: what was put there; the same if it stays as it was.
        group: of the merged block it lies in; None if that is not merged.
        path: its name in the region.
    """

    index: int | None
    name: str
    attention: Any
    sees_text: bool
    dense: str | None
    processor: Any
    installed: Any
    group: int | None = None
    path: str = ""

    @property
    def is_sparse(self) -> bool:
        return self.dense is None

    @property
    def is_ours(self) -> bool:
        """Whether a processor was put in: also in dense layers, where tokens are split over ranks or merged."""
        return self.installed is not self.processor


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


class Call(NamedTuple):
    """What a call was computed with: gradient checkpointing computes parts of it again, perhaps after other calls."""

    ready: Ready | None = None
    is_dense_step: bool = False
    merged: MergedCall | None = None


class Region:
    """The hooks and processors of one region, and what its calls were like."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        root: nn.Module,
        spec: Spec,
        method: Method,
        steps: Steps,
        impl: Impl,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self.name, self.module, self.root = name, module, root
        self.spec, self.method, self.steps, self.impl = spec, method, steps, impl
        self.layers: tuple[Layer, ...] = ()
        self.num_sparse_layers = 0
        """Of the whole model."""
        self._is_active = False
        self.is_recomputing = False
        self.is_dense_step = False
        self.ready: Ready | None = None
        self.order: Ordering | Share | None = None
        self.dtype: torch.dtype | None = None
        self.dense_calls: Counter[str] = Counter()
        self._names = parameter_names(module)
        self.is_timed: bool = getattr(method, "needs_moment", False)
        self._moments = Moments(steps, self._forget)
        self._grids = GridReader(steps.is_in_loop)
        self._kept: OrderedDict[Any, Ready] = OrderedDict()
        self._handles: list[RemovableHandle] = []
        self._moved: tuple[Tensor, Tensor] | None = None
        self._call = Call()
        self._paused = Call()
        self._backward = _NO_BACKWARD
        self.merger: Merger | None = None
        if isinstance(method, Merged):
            self.merger = Merger(module, spec, method, impl, self.is_inside)
        self._places = [(move, find(module, move.place)) for move in spec.moves]
        for move, places in self._places:
            if not places:
                where = f"{name}.{move.place}" if name else move.place
                wrong_value("target", f"have `{where}`, where tokens enter or leave", type(root).__name__)

        self._anchors = [
            (path, module.get_submodule(path.rpartition(".")[0]), place)
            for move, places in self._places
            for path, place in places
            if move.place
        ]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_copy(type(self.root).__name__)

    @staticmethod
    def on(module: nn.Module) -> "list[Region]":
        """The regions that are in place on a module."""
        owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        return [owner for owner in owners if isinstance(owner, Region)]

    @property
    def is_installed(self) -> bool:
        return bool(self._handles)

    # -- putting in and taking out -------------------------------------------------------------------------------

    def describe_layers(self, first: int, num_layers: int) -> Iterator[Layer]:
        """The attention modules of the region; those of the model's layers are counted from `first`."""
        image_only = {name for path in self.spec.image_only for name, _ in find(self.module, path)}
        for path in self.spec.layers:
            for name, attention in find(self.module, path):
                reason = _unfit(attention) or self.method.dense_layer_reason(first, num_layers)
                yield self._layer(first, name, attention, name not in image_only, reason)
                first += 1
        for path, reason in self.spec.dense.items():
            for name, attention in find(self.module, path):
                yield self._layer(None, name, attention, False, reason)

    def _layer(
        self, index: int | None, name: str, attention: Any, sees_text: bool, reason: str | None
    ) -> Layer:
        processor = attention.get_processor()
        heads = attention.heads, attention.inner_dim // attention.heads
        is_split = self.ranks is not None and index is not None
        has_group = self.merger is not None and index is not None and reason != CROSS_ATTENTION
        group = self.merger.group_of(name) if self.merger is not None and has_group else None
        is_merged = self.merger is not None and group is not None and self.merger.needs_processors
        stays = reason is not None and not is_split and not is_merged
        installed = processor if stays else sparse_processor(processor, self, self.impl, heads)
        full_name = f"{self.name}.{name}" if self.name else name
        return Layer(index, full_name, attention, sees_text, reason, processor, installed, group, name)

    def install(self) -> None:
        for layer in self.layers:
            if layer.is_ours:
                layer.attention.set_processor(layer.installed)
        # torch's own hooks: offloading exchanges `module.forward`, which would drop hooks that live there.
        self._handles = [
            self.module.register_forward_pre_hook(self._entered, with_kwargs=True),
            self.module.register_forward_hook(self._left, always_call=True),
        ]
        remembers = self.is_timed or self.merger is not None
        has_dense_steps = self.steps.scheduler is not None and self.method.num_dense_steps(_MANY_STEPS)
        if remembers or has_dense_steps:  # another scheduler may come, which needs to be told the timestep
            hook = _CallHook(self, self._moments, parameter_names(self.root))
            self._handles.append(self.root.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        if self.is_timed and self.module is self.root:
            self._moments.listen(self.root)
        for move, places in self._places:
            for _, module in places if move.place else []:
                self._handles.append(self._hook(module, move))
        if self.merger is not None:
            processors = {
                layer.path: (layer.installed, layer.sees_text) for layer in self.layers if layer.is_ours
            }
            self._handles += self.merger.install(processors)

    def _hook(self, module: nn.Module, move: Move) -> RemovableHandle:
        if move.is_argument:
            hook = _ArgumentHook(self, move, parameter_names(module))
            return module.register_forward_pre_hook(hook, with_kwargs=True)
        return module.register_forward_hook(_ResultHook(self, move))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._moments.leave(self.root)
        for layer in self.layers:
            if layer.is_ours and layer.attention.get_processor() is layer.installed:
                layer.attention.set_processor(layer.processor)
        self._hand_out(None)
        self._forget()
        self._kept.clear()
        self._call, self._paused, self._is_active = Call(), Call(), False
        if self.merger is not None:
            self.merger.remove()
        self.steps = Steps()
        self._moments = Moments(self.steps, self._forget)
        self._grids = GridReader(self.steps.is_in_loop)

    # -- a call --------------------------------------------------------------------------------------------------

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = Arguments(self._names, args, kwargs)
        self._check_unchanged()
        check_arguments(self.spec, arguments)
        located = self.spec.locate(module, arguments, self._grids)
        if not isinstance(located, str):
            located = self.spec.padded(located)
            check_count(self.spec, arguments, located)
        if torch.compiler.is_compiling():
            self._check_ready(located, first_tensor(arguments.get(self.spec.sample)))
        else:
            self._get_ready(located, arguments.get(self.spec.sample))
        self.is_dense_step = self._is_dense_step()
        if self.is_timed or self.merger is not None:
            self._tell_moment(arguments.get(self.spec.sample))
        self._is_active, self.is_recomputing = True, False
        if not torch.compiler.is_compiling():
            self._call = self._state()
        if self.ranks is not None and self.ready is not None and not self.steps.is_in_loop():
            self._check_sample(first_tensor(arguments.get(self.spec.sample)), self.ranks)
        for move in self.spec.moves:
            if move.place == "":
                assert isinstance(move.what, str)
                value = arguments.get(move.what)
                if value is not None:
                    arguments.set(move.what, self.moved(value, move))
        return tuple(arguments.args), arguments.kwargs

    def _check_sample(self, sample: Tensor, ranks: Ranks) -> None:
        """Every rank must be given the same image, of which it takes its share: noise has to come from one seed."""
        hint = "Give every rank the same inputs: for a pipeline, a `generator` with one seed."
        first = sample.detach().flatten()[:_LOOKED_AT].double().sum()
        seen = f"{tuple(sample.shape)} beginning with a sum of {float(first):.12g}"
        ranks.compare({self.spec.sample: seen}, hint)

    def is_inside(self) -> bool:
        """Whether tokens are inside. Modules may be shared with another model, whose calls are not ours."""
        is_eager = not torch.compiler.is_compiling()
        if is_eager and self.is_recomputing and self._backward != _current_backward():
            self._backward_left()  # it was not told, because that backward pass raised
        return self._is_active

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Also called when the call raised; then there is no output."""
        self._is_active = False
        self._moved = None
        if self.merger is not None:
            self.merger.end()
        if torch.compiler.is_compiling():
            return  # what torch.compile computes again it does not compute with our hooks
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._backward_entered, self._call))

    def _check_unchanged(self) -> None:
        for name, parent, module in self._anchors:
            found = parent._modules[name.rpartition(".")[2]]
            if getattr(found, "_orig_mod", found) is not module:
                hint = "Call `handle.remove()` and apply again."
                wrong_value(name, "stay as it was when nearfield was applied", type(found).__name__, hint)
        check_parallel(self.root)
        for name in () if self.ranks is None else caches_in(self.root):
            hint = "Call `disable_cache()`: each rank would decide by its own tokens whether blocks are computed."
            wrong_value("target", "have no cache of diffusers where tokens are split over ranks", name, hint)
        for layer in self.layers:
            found = layer.attention.processor
            if found is not layer.installed:
                wrong_value(
                    f"{layer.name}.processor",
                    "stay as it was when nearfield was applied",
                    type(found).__name__,
                    "Load IP-Adapters, fuse projections and set processors first, then apply; `handle.remove()` now.",
                )
            if getattr(layer.installed, "_parallel_config", None) is not None:
                wrong_value(f"{layer.name}.processor", "not be parallelised", _PARALLEL)
            guidance = None if layer.index is None else guidance_in(layer.attention)
            if guidance is not None:
                hint = "It goes by the order of the image, or by attention that sparse layers do not compute."
                wrong_value(layer.name, "have no guidance that perturbs attention", guidance, hint)

    def _check_ready(self, located: Located | str, sample: Tensor) -> None:
        """Nothing can be looked up while torch.compile traces the whole model."""
        if self.merger is not None:
            raise ValueError(COMPILED_WHOLE)
        if self.ready is None or located != self.ready.located:
            raise ValueError(_NOT_READY)
        if sample.device != self.ready.device:
            raise ValueError(_READY_ELSEWHERE)

    def _is_dense_step(self) -> bool:
        if not self.method.num_dense_steps(_MANY_STEPS):
            return False
        step = self.steps.now()
        return step is not None and step.place < self.method.num_dense_steps(step.total)

    def _tell_moment(self, samples: Any) -> None:
        """Say to what remembers where the loop stands, and let it forget what is over."""
        if torch.compiler.is_compiling():
            raise ValueError(_NOT_WHOLE)
        now = self._now(len(samples))
        if now is not None and now.is_new:
            self._forget()
        if self.merger is not None:
            ready = self.ready
            regions = None if ready is None else ready.own_regions or ready.regions
            located = None if ready is None else ready.located
            is_split = self.ranks is not None
            if self.merger.begin(regions, located, len(samples), now and now.moment, is_split):
                self._forget_lists()
        if now is None:
            return
        for reader in self._timed_readers(self.ready):
            reader.at(now.moment)
            if now.is_first:
                reader.tally.clear()

    def _now(self, batch: int) -> Now | None:
        """None where nothing tells the step, and only maps depend on it: those are made anew then."""
        if self.is_timed:
            return self._moments.advance(batch)
        try:
            return self._moments.advance(batch)
        except ValueError:
            return None

    def _forget(self) -> None:
        self._forget_lists()
        if self.merger is not None:
            self.merger.forget()

    def _forget_lists(self) -> None:
        for ready in self._kept.values():
            for reader in self._timed_readers(ready):
                reader.forget()

    def _timed_readers(self, ready: Ready | None) -> Iterator[TimedReader]:
        for reader in ready.readers if ready and self.is_timed else ():
            if reader is not None:
                yield cast(TimedReader, reader)

    @property
    def device(self) -> torch.device:
        """Where the last call was computed, or would be; weights that are offloaded are on "meta"."""
        return next(self.module.parameters()).device if self.ready is None else self.ready.device

    # -- a backward pass -----------------------------------------------------------------------------------------

    def _backward_entered(self, call: Call, gradient: Tensor) -> None:
        """Gradients come in where tokens left: checkpointed blocks will be computed again, as in that call.

        Other calls may have been made since. Those that follow in the same backward pass come in after this one is
        through: autograd goes from the last operation to the first.
        """
        if not self.is_installed:
            self._check_nothing_is_recomputed()
            return
        self.is_inside()  # ends a backward pass that raised
        if self._backward != _current_backward():
            self._backward = _current_backward()
            self._paused = self._state()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_left)
        self._continue(call)
        self._is_active = self.is_recomputing = True

    def _backward_left(self) -> None:
        """Everything is as it was before the backward pass: the last call, or what was made ready since."""
        self._continue(self._paused)
        self._is_active = self.is_recomputing = False
        self._backward = _NO_BACKWARD

    def _state(self) -> Call:
        return Call(self.ready, self.is_dense_step, None if self.merger is None else self.merger.call)

    def _continue(self, call: Call) -> None:
        self.is_dense_step = call.is_dense_step
        if self.merger is not None:
            self.merger.call = call.merged
        if call.ready is not self.ready:
            self._hand_out(call.ready)

    def _check_nothing_is_recomputed(self) -> None:
        if any(getattr(module, "gradient_checkpointing", False) for module in self.root.modules()):
            hint = "Gradient checkpointing computes layers again: leave the `with` block after `backward()`."
            wrong_value(
                "backward", "come before `remove()` of what the loss was computed with", "it after", hint
            )

    def called_outside(self, was_shared: bool) -> None:
        """An attention layer runs while no tokens are inside: in another model that shares it."""
        if _current_backward() == _NO_BACKWARD:
            self.dense_calls[_OUTSIDE] += 1
        elif not was_shared:
            hint = "Gradient checkpointing computes its layers again, and has to know with what."
            wrong_value(
                "backward", f"begin at the output of {type(self.module).__name__}", "another loss", hint
            )

    # -- getting ready -------------------------------------------------------------------------------------------

    def _get_ready(self, located: Located | str, samples: Any) -> None:
        """`samples` are a tensor, or a list with one for each sample of the batch."""
        sample = first_tensor(samples)
        self._moved, self.dtype = None, sample.dtype
        if isinstance(located, str):
            self.dense_calls[located] += 1
            self._hand_out(None)
            return
        self.prepare(located, sample.device, len(samples))

    def prepare(self, located: Located, device: torch.device, batch: int) -> None:
        """Fetch the order and the readers for a layout of tokens, and hand them to the processors."""
        device = _with_index(device)
        key = (located, device)
        ready = self._kept.get(key)
        if ready is None:
            if self.ranks is not None:
                self.ranks.compare({"tokens": located, "part": self.name or type(self.root).__name__})
            ready = self.make_ready(located, device)
            self._kept[key] = ready
            while len(self._kept) > _REMEMBERED:
                self._kept.popitem(last=False)
        self._derive(ready, batch)
        if ready is not self.ready:
            for reader in self._timed_readers(self.ready):
                reader.forget()
            self._hand_out(ready)
        if any(move.what == "img_ids" for move in self.spec.moves):
            self._grids.expect(located.images, device)

    def make_ready(self, located: Located, device: torch.device) -> Ready:
        kinds = {layer.sees_text for layer in self.layers if layer.is_sparse} or {True}
        whole = {sees: located.geometry(self.spec.text_first, sees) for sees in (True, False)}
        ordering, *others = (self.method.ordering(whole[sees], device=device) for sees in kinds)
        if not all(torch.equal(other.order, ordering.order) for other in others):
            wrong_value("method", "order images alike with and without text", self.method)
        regions, short = self._merged(whole)
        readers: list[Reader | None] = []
        weighing: list[Reader | None] = []
        for layer in self.layers:
            geometry = (whole if layer.group is None else short)[layer.sees_text]
            reader = None
            if layer.is_sparse and layer.index is not None:
                reader = self.method.reader(geometry, layer.index, heads=layer.attention.heads, device=device)
            readers.append(reader)
            is_weighed = layer.group is not None and regions is not None and self.weighs
            weighing.append(full_reader(geometry.num_tokens, str(device)) if is_weighed else None)
        ready = Ready(located, device, ordering, tuple(readers), None, tuple(weighing), regions)
        for reader in self._timed_readers(ready):
            reader.among(self.num_sparse_layers)
        return ready if self.ranks is None else self._split(ready, self.ranks)

    def _merged(self, whole: dict[bool, Geometry]) -> tuple[Regions | None, Mapping[bool, Geometry]]:
        """How image tokens are merged, and the geometries of what is left; the same ones if nothing is merged."""
        if not isinstance(self.method, Merged):
            return None, whole
        regions = self.method.regions(whole[True])
        if regions.num_merged == regions.num_tokens:
            return None, whole
        return regions, {sees: self.method.shortened(geometry, regions) for sees, geometry in whole.items()}

    @property
    def weighs(self) -> bool:
        """Whether merged keys have a bias, which only our own attention adds."""
        return isinstance(self.method, Merged) and self.method.merge.size_bias

    def _split(self, ready: Ready, ranks: Ranks) -> Ready:
        """The same for the share of one rank. Dense layers read all, wherever it is."""
        assert isinstance(ready.ordering, Ordering)
        geometry = ready.located.geometry(self.spec.text_first, sees_text=True)
        whole, merged, own_regions = self._split_models(geometry, ready, ranks)
        models = [whole if layer.group is None else merged for layer in self.layers]
        dense = {id(model): model.dense_reader(ready.device) for model in (whole, merged)}
        readers, weighing = list[Reader | None](), list[Reader | None]()
        for layer, reader, model in zip(self.layers, ready.readers, models, strict=True):
            everything = dense[id(model)] if layer.is_ours else None
            readers.append(everything if reader is None else model.reader(reader))
            weighing.append(everything)
        return replace(
            ready,
            ordering=whole.share(ready.ordering, geometry),
            readers=tuple(readers),
            dense_reader=dense[id(whole)],
            weighing=tuple(weighing),
            own_regions=own_regions,
        )

    def _split_models(
        self, geometry: Geometry, ready: Ready, ranks: Ranks
    ) -> tuple[SplitModel, SplitModel, Regions | None]:
        """Who holds which of all tokens, and of the merged ones; and where this rank merges."""
        attention = self.method.attention if isinstance(self.method, Merged) else self.method
        assert attention is None or isinstance(attention, Hilbert)
        block = _DENSE_BLOCK
        if attention is not None:
            block = attention.plan(geometry, heads=1, device=ready.device).q_block
        if not isinstance(self.method, Merged):
            assert attention is not None
            whole = SplitModel(even_split(attention, geometry, ranks.size, block), block, ranks)
            return whole, whole, None
        split = split_between_regions(self.method, geometry, ranks.size, block)
        whole = SplitModel(split.whole, block, ranks)
        if ready.regions is None:
            return whole, whole, None
        return whole, SplitModel(split.merged, block, ranks), split.regions[ranks.index]

    def _derive(self, ready: Ready, batch: int) -> None:
        """Let plans derive what `attend` keeps of them, so that compiled layers find it and do not make it anew."""
        state = batch, torch.is_grad_enabled()
        if state in ready.derived:
            return
        for reader, layer in zip(ready.readers + ready.weighing, 2 * self.layers, strict=True):
            for plan in plans_of(reader):
                for part in (plan, plan.transpose()) if torch.is_grad_enabled() else (plan,):
                    if part.device.type == "cuda":
                        part.longest_first(batch, layer.attention.heads)
        ready.derived.add(state)

    def _hand_out(self, ready: Ready | None) -> None:
        self.ready = ready
        self.order = ready.ordering if ready else None
        for number, layer in enumerate(self.layers):
            if isinstance(layer.installed, SparseProcessor):
                reader = ready.readers[number] if ready else None
                layer.installed.reader = _Remembering(self, reader) if reader and self.is_timed else reader
                weighing = ready.weighing[number] if ready and ready.weighing else None
                layer.installed.dense_reader = weighing or (ready.dense_reader if ready else None)

    # -- moving tokens -------------------------------------------------------------------------------------------

    def moved(self, value: Any, move: Move) -> Any:
        """Tokens in their other order; also inside lists and dictionaries. What follows the images stays in place."""
        if self.order is None or not self.is_inside():
            return value
        if isinstance(value, list | tuple):
            items = [self.moved(item, move) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {name: self.moved(item, move) for name, item in value.items()}
        if move.num_dims not in (None, value.dim()):
            return value
        way: Callable[[Tensor, int], Tensor] = getattr(self.order, move.way)
        images, length = len(self.order), value.shape[move.dim]
        if length == 1:  # serves all tokens
            return value
        if length <= images:
            return way(value, move.dim)
        rest = value.narrow(move.dim, images, length - images)
        return torch.cat([way(value.narrow(move.dim, 0, images), move.dim), rest], dim=move.dim)

    def moved_argument(self, value: Tensor, move: Move) -> Tensor:
        """As `moved`, but a tensor that many layers are given is moved once (unless that would keep a graph alive)."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not self.is_inside():
            return self.moved(value, move)  # type: ignore[no-any-return]
        if self._moved is None or self._moved[0] is not value:
            self._moved = value, self.moved(value, move)
        return self._moved[1]


class _CallHook:
    """Tells which timestep a model is called with, and which text."""

    def __init__(self, region: Region, moments: Moments, names: tuple[str, ...]) -> None:
        self.region, self.moments, self.names = region, moments, names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = Arguments(self.names, args, kwargs)
        if "timestep" in self.names and self.region.steps.needs_timestep:
            self.region.steps.timestep = arguments.get("timestep")
        if self.region.is_timed or self.region.merger is not None:
            text = arguments.get(self.region.spec.conditioning)
            self.moments.conditioned_on(None if text is None else first_tensor(text))


class _Remembering:
    """A reader that remembers, in the place of a processor's: it is not traced, and nothing is computed again.

    What it does depends on the step, so torch.compile would have to make a graph for each; and a block that is
    computed again in the backward pass would find what its first computation has left.
    """

    def __init__(self, region: Region, reader: Reader) -> None:
        self.region, self.reader = region, reader
        self.attend = torch.compiler.disable(self._attend, reason="lists are remembered from step to step")

    @property
    def num_pairs(self) -> int | None:
        return self.reader.num_pairs

    def _attend(self, *args: Any, **kwargs: Any) -> Attended:
        if self.region.is_recomputing:
            hint = 'Use predict="online", or call `disable_gradient_checkpointing()`.'
            wrong_value("backward", "not compute layers again that remember", "checkpointing", hint)
        return self.reader.attend(*args, **kwargs)


class _ArgumentHook:
    """Moves one argument of a module that is called inside a region."""

    def __init__(self, region: Region, move: Move, names: tuple[str, ...]) -> None:
        self.region, self.move, self.names = region, move, names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = Arguments(self.names, args, kwargs)
        assert isinstance(self.move.what, str)
        value = arguments.get(self.move.what)
        if value is None:
            return None
        arguments.set(self.move.what, self.region.moved_argument(value, self.move))
        return tuple(arguments.args), arguments.kwargs


class _ResultHook:
    """Moves the result, or one part of it, of a module that is called inside a region."""

    def __init__(self, region: Region, move: Move) -> None:
        self.region, self.move = region, move

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.move.what is None:
            return self.region.moved(output, self.move)
        assert isinstance(self.move.what, int)
        parts = list(output)
        parts[self.move.what] = self.region.moved(parts[self.move.what], self.move)
        return tuple(parts)


def check_parallel(model: nn.Module) -> None:
    """Context and tensor parallelism of diffusers; it writes down what it did."""
    if getattr(model, "_parallel_config", None) is not None:
        hint = "Leave out `enable_parallelism`, and pass `mesh=` to apply: tokens are split along the curve, unevenly."
        wrong_value("target", "not be parallelised", _PARALLEL, hint)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))


def _with_index(device: torch.device) -> torch.device:
    """Tensors know which of the devices they are on, so "cuda" alone would never be found again."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _current_backward() -> int:
    """The number of the backward pass that is under way."""
    return torch._C._current_graph_task_id()


def _unfit(attention: Any) -> str | None:
    """Why a layer stays dense whatever the method says."""
    if getattr(attention, "is_cross_attention", False):
        return CROSS_ATTENTION
    head_dim = attention.inner_dim // attention.heads
    return f"head dimension {head_dim} is above {_LARGEST_HEAD}" if head_dim > _LARGEST_HEAD else None


def plans_of(reader: Any) -> Iterator[Plan]:
    """The plans inside a reader, whatever tuples it is made of."""
    if isinstance(reader, Plan):
        yield reader
    elif isinstance(reader, SplitReader):
        yield from reader.plans
    elif isinstance(reader, tuple):
        for part in reader:
            yield from plans_of(part)
