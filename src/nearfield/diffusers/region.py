"""A region: the part of a model that tokens enter in raster order and leave in raster order, once adapted.

Most models are one region; a UNet has one per transformer. At its entrance, outside anything compiled, a region finds
out how large the image is, fetches the order of its tokens and what each layer reads, and hands that to the
processors. Between entrance and exit nothing is looked up and nothing but attention knows of the method.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nearfield._memo import device_name
from nearfield.diffusers.calls import Call, Calls
from nearfield.diffusers.entrance_checks import check_ready, check_same_sample, check_unchanged
from nearfield.diffusers.foreign_ranks import SuspendedParallelism
from nearfield.diffusers.layers import Layer, layers_of
from nearfield.diffusers.lora import SWITCHED_WHOLE
from nearfield.diffusers.merging import Merger
from nearfield.diffusers.models.ids import GridReader
from nearfield.diffusers.models.spec import (
    Arguments,
    TokenLayout,
    check_arguments,
    check_count,
    first_tensor,
    parameter_names,
)
from nearfield.diffusers.moving import Mover, places_of
from nearfield.diffusers.processor import SparseProcessor, StatefulAttention, refuse_to_copy
from nearfield.diffusers.scheduler_state import SchedulerState, has_dense_steps
from nearfield.diffusers.step_tracker import CallHook, Now, StepTracker
from nearfield.diffusers.target import TargetModule
from nearfield.diffusers.token_state import TokenState, prepare_tokens
from nearfield.methods import LayerAttention, stays_dense

_REMEMBERED = 8

# Not put together where it is raised: torch.compile could not trace that.
_NOT_WHOLE = (
    "`target` must not be compiled as a whole where the method remembers from step to step; got torch.compile of the"
    " model. Compile blocks alone with `compile_repeated_blocks`, or let the method decide at every call"
    ' (predict="online").'
)


class Region:
    """The hooks and processors in one part of a model, and what they work with."""

    def __init__(self, part: TargetModule, steps: SchedulerState) -> None:
        self.part, self.steps = part, steps
        self.layers: tuple[Layer, ...] = ()
        self.resting = SuspendedParallelism(None)
        self.num_sparse_layers = 0
        """Of the whole model."""
        self.ready: TokenState | None = None
        self.dtype: torch.dtype | None = None
        """Of the last call."""
        self._lora_rests = False
        self.calls = Calls(part, self._state, self._resume)
        self.merger: Merger | None = None
        if part.method.merge is not None:
            facts = part.module, part.spec, part.method, part.method.merge, part.impl
            self.merger = Merger(*facts, self.calls.is_inside)
        self._mover = Mover(self.calls.is_inside)
        self._places = places_of(part)
        self._names = parameter_names(part.module)
        self._moments = StepTracker(steps, self._forget)
        self._grids = GridReader(steps.is_in_loop)
        self._kept: OrderedDict[Any, TokenState] = OrderedDict()
        self._handles: list[RemovableHandle] = []

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_copy(type(self.part.root).__name__)

    @staticmethod
    def on(module: nn.Module) -> "list[Region]":
        """The regions that are in place on a module."""
        owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        return [owner for owner in owners if isinstance(owner, Region)]

    @property
    def is_installed(self) -> bool:
        return bool(self._handles)

    @property
    def device(self) -> torch.device:
        """Where the last call was computed, or would be; weights that are offloaded are on "meta"."""
        return next(self.part.module.parameters()).device if self.ready is None else self.ready.device

    # -- putting in and taking out -------------------------------------------------------------------------------

    def find_layers(self, first: int, num_layers: int) -> None:
        """Those of the region, of so many in the model, of which they are counted from `first`."""
        self.layers = tuple(layers_of(self.part, self.merger, self.calls, first, num_layers))

    def install(self) -> None:
        self.resting = SuspendedParallelism(self.part.root)
        for layer in self.layers:
            if layer.is_ours:
                layer.attention.set_processor(layer.installed)
        # torch's own hooks: offloading exchanges `module.forward`, which would drop hooks that live there.
        self._handles = [
            self.part.module.register_forward_pre_hook(self._entered, with_kwargs=True),
            self.part.module.register_forward_hook(self._left, always_call=True),
        ]
        self._install_call_hook()
        self._handles += self._mover.hooks(self._places)
        if self.merger is not None:
            processors = {
                layer.path: (layer.installed, layer.sees_text) for layer in self.layers if layer.is_ours
            }
            self._handles += self.merger.install(processors)

    def _install_call_hook(self) -> None:
        root = self.part.root
        is_stepwise = self.steps.scheduler is not None and has_dense_steps(self.part.method)
        if self.part.lora is not None and is_stepwise:
            self._handles += [
                root.register_forward_pre_hook(self._root_entered, prepend=True),
                root.register_forward_hook(self._root_left, always_call=True),
            ]
        if self._remembers or is_stepwise:  # another scheduler may come, which needs to be told the timestep
            conditioning = self.part.spec.conditioning if self._remembers else None
            hook = CallHook(self.steps, self._moments, parameter_names(root), conditioning)
            self._handles.append(root.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        if self._remembers and self.part.module is root:
            self._moments.listen(root)

    @property
    def _remembers(self) -> bool:
        """Whether anything does from call to call: readers, or maps of merged tokens."""
        return self.part.method.is_stateful or self.merger is not None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._moments.leave(self.part.root)
        for layer in self.layers:
            if layer.is_ours and layer.attention.get_processor() is layer.installed:
                layer.attention.set_processor(layer.processor)
        self.resting.end()
        self._hand_out(None)
        self._forget()
        self._kept.clear()
        self.calls.close()
        if self.merger is not None:
            self.merger.remove()
        self._let_lora_rest(False)
        self.steps = SchedulerState()
        self._moments = StepTracker(self.steps, self._forget)
        self._grids = GridReader(self.steps.is_in_loop)

    # -- a call --------------------------------------------------------------------------------------------------

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tokens enter."""
        spec, ranks = self.part.spec, self.part.ranks
        arguments = Arguments(self._names, args, kwargs)
        self.resting.check()
        check_unchanged(self.part, self.layers, self._places)
        check_arguments(spec, arguments)
        # Asked once: where a graph broke, torch.compile takes up every function by itself, where the answer is another.
        is_traced = torch.compiler.is_compiling()
        locate = spec.locate if is_traced else _outside_graphs(spec.locate)
        located = locate(module, arguments, self._grids)
        if not isinstance(located, str):
            located = spec.padded(located)
            check_count(spec, arguments, located)
        samples = arguments.get(spec.sample)
        if is_traced:
            check_ready(self.part, self.ready, located, first_tensor(samples))
        else:
            _outside_graphs(self._get_ready)(located, samples)
        self.calls.is_dense_step = self._is_dense_step()
        if self._remembers:
            self._tell_moment(len(samples))
        self.calls.enter()
        if ranks is not None and self.ready is not None and not self.steps.is_in_loop():
            check_same_sample(spec.sample, first_tensor(samples), ranks)
        self._mover.enter(spec.moves, arguments)
        return tuple(arguments.args), arguments.kwargs

    def _root_entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before any layer: those of a model that lie outside its parts may have a LoRA, too."""
        if torch.compiler.is_compiling():
            raise ValueError(SWITCHED_WHOLE)
        self._let_lora_rest(False)  # where the last call ended by Ctrl-C, of which hooks are not told
        self._let_lora_rest(self._is_dense_step())

    def _root_left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Between calls the model is what others made it."""
        if self.part.module is not module:
            self.calls.leave_model(output)
        self._let_lora_rest(False)

    def _let_lora_rest(self, rests: bool) -> None:
        if self.part.lora is not None and rests != self._lora_rests:
            self.part.lora.switch(not rests)
            self._lora_rests = rests

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Tokens have left, or the call raised; then there is no output."""
        self._mover.forget()
        if self.merger is not None:
            self.merger.end()
        self.calls.leave(output)

    def _is_dense_step(self) -> bool:
        if not has_dense_steps(self.part.method):
            return False
        step = self.steps.now()
        if step is None:
            return False
        return stays_dense(self.part.method.num_dense_steps(step.total), step.place, step.total)

    def _state(self) -> Call:
        merged = None if self.merger is None else self.merger.call
        return Call(self.ready, self.calls.is_dense_step, merged, self._lora_rests)

    def _resume(self, call: Call) -> None:
        self.calls.is_dense_step = call.is_dense_step
        self._let_lora_rest(call.lora_rests)
        if self.merger is not None:
            self.merger.call = call.merged
        if call.ready is not self.ready:
            self._hand_out(call.ready)

    # -- what remembers ------------------------------------------------------------------------------------------

    def _tell_moment(self, batch: int) -> None:
        """Say to what remembers where the loop stands, and let it forget what is over."""
        if torch.compiler.is_compiling():
            raise ValueError(_NOT_WHOLE)
        now = self._now(batch)
        if now is not None and now.is_new:
            self._forget()
        if self.merger is not None and self._begin_merging(self.merger, batch, now):
            self._forget_lists()
        if now is None:
            return
        for attention in self._stateful(self.ready):
            attention.set_step(now.moment)
            if now.is_first and attention.stats is not None:
                attention.stats.clear()

    def _now(self, batch: int) -> Now | None:
        """None where nothing tells the step, and only maps depend on it: those are made anew then."""
        if self.part.method.is_stateful:
            return self._moments.advance(batch)
        try:
            return self._moments.advance(batch)
        except ValueError:
            return None

    def _begin_merging(self, merger: Merger, batch: int, now: Now | None) -> bool:
        """Whether other tokens are left from now on, so that lists of them are out of date."""
        ready, moment = self.ready, now and now.moment
        regions = None if ready is None else ready.own_regions or ready.regions
        located = None if ready is None else ready.located
        return merger.begin(regions, located, batch, moment, is_split=self.part.ranks is not None)

    def _forget(self) -> None:
        self._forget_lists()
        if self.merger is not None:
            self.merger.forget()

    def _forget_lists(self) -> None:
        for ready in self._kept.values():
            for attention in self._stateful(ready):
                attention.forget()

    def _stateful(self, ready: TokenState | None) -> Iterator[LayerAttention]:
        """What layers read, where that depends on earlier steps."""
        if ready is not None and self.part.method.is_stateful:
            yield from (attention for attention in ready.attentions if attention is not None)

    # -- getting ready -------------------------------------------------------------------------------------------

    def _get_ready(self, located: TokenLayout | str, samples: Any) -> None:
        """`samples` are a tensor, or a list with one for each sample of the batch."""
        sample = first_tensor(samples)
        self.dtype = sample.dtype
        self._mover.forget()
        if isinstance(located, str):
            self.calls.dense[located] += 1
            self._hand_out(None)
            return
        self.prepare(located, sample.device, len(samples))

    def prepare(self, located: TokenLayout, device: torch.device, batch: int) -> None:
        """Fetch the order and what layers read for a layout of tokens, and hand them to the processors."""
        device = torch.device(device_name(device))
        key = (located, device)
        ready = self._kept.get(key)
        if ready is None:
            if self.part.ranks is not None:
                name = self.part.name or type(self.part.root).__name__
                self.part.ranks.compare({"tokens": located, "part": name})
            ready = self.prepare_tokens(located, device)
            self._kept[key] = ready
            while len(self._kept) > _REMEMBERED:
                self._kept.popitem(last=False)
        ready.prepare(self.layers, batch)
        if ready is not self.ready:
            for attention in self._stateful(self.ready):
                attention.forget()
            self._hand_out(ready)
        if any(move.what == "img_ids" for move in self.part.spec.moves):
            self._grids.expect(located.images, device)

    def prepare_tokens(self, located: TokenLayout, device: torch.device) -> TokenState:
        return prepare_tokens(self.part, self.layers, located, device, self.num_sparse_layers)

    def _hand_out(self, ready: TokenState | None) -> None:
        self.ready = ready
        self._mover.order = ready.ordering if ready else None
        for number, layer in enumerate(self.layers):
            if isinstance(layer.installed, SparseProcessor):
                attention = ready.attentions[number] if ready else None
                is_stateful = attention is not None and self.part.method.is_stateful
                layer.installed.attention = (
                    StatefulAttention(attention, self.calls) if attention and is_stateful else attention
                )
                weighing = ready.weighing[number] if ready and ready.weighing else None
                layer.installed.dense_attention = weighing or (ready.dense_attention if ready else None)


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile leaves alone, if it is in use at all."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
