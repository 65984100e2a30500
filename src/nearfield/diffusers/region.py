"""A region: the part of a model that tokens enter in raster order and leave in raster order, once adapted.

Most models are one region; a UNet has one per transformer. At its entrance, outside anything compiled, a region finds
out how large the image is, fetches the order of its tokens and what each layer reads from its session, and hands that
to the processors. Between entrance and exit nothing is looked up and nothing but attention knows of the method.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nearfield._types import Moment
from nearfield.diffusers.calls import Call, Calls
from nearfield.diffusers.find import ModuleLayer, TargetModule, layers_of
from nearfield.diffusers.guards import check_merged_blocks, check_ready, check_same_sample, check_unchanged
from nearfield.diffusers.lora import SWITCHED_WHOLE
from nearfield.diffusers.merged_blocks import Merger
from nearfield.diffusers.models.spec import (
    Arguments,
    check_arguments,
    check_count,
    first_tensor,
    parameter_names,
)
from nearfield.diffusers.moves import Mover, places_of
from nearfield.diffusers.processor import SparseProcessor, StatefulAttention, refuse_to_copy
from nearfield.diffusers.ranks import SuspendedParallelism
from nearfield.diffusers.steps import SchedulerState
from nearfield.parallel import split_tokens
from nearfield.session import GridReader, Session, TokenLayout, TokenState

# Not put together where it is raised: torch.compile could not trace that.
_NOT_WHOLE = (
    "`target` must not be compiled as a whole where the method remembers from step to step; got torch.compile of the"
    " model. Compile blocks alone with `compile_repeated_blocks`, or let the method decide at every call"
    ' (predict="online").'
)


class Region:
    """The hooks and processors in one part of a model, and the session they work with.

    Args:
        first: the index of the first layer of the part among those of the model.
        num_layers: how many the model has.
    """

    def __init__(self, part: TargetModule, steps: SchedulerState, first: int, num_layers: int) -> None:
        self.part, self.steps = part, steps
        self.suspended = SuspendedParallelism(None)
        self.dtype: torch.dtype | None = None
        """Of the last call."""
        self._is_lora_off = False
        self.calls = Calls(part, self._state, self._resume)
        merge = part.method.merge
        self.merger = None if merge is None else Merger(part, merge, self.calls.in_forward)
        self.layers: Sequence[ModuleLayer] = layers_of(part, self.merger, self.calls, first, num_layers)
        split = None if part.ranks is None else partial(split_tokens, ranks=part.ranks)
        self.session = Session(part.method, self.layers, part.spec.text_first, split=split)
        self._mover = Mover(self.calls.in_forward)
        self._places = places_of(part)
        self._names, self._root_names = parameter_names(part.module), parameter_names(part.root)
        self._listener: Any = None
        self._grids = GridReader(steps.is_in_loop)
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
    def state(self) -> TokenState | None:
        """What the last call worked with; None before the first, and where it was dense."""
        return self.session.state

    @property
    def device(self) -> torch.device:
        """Where the last call was computed, or would be; weights that are offloaded are on "meta"."""
        return next(self.part.module.parameters()).device if self.state is None else self.state.device

    # -- putting in and taking out -------------------------------------------------------------------------------

    def install(self) -> None:
        self.suspended = SuspendedParallelism(self.part.root)
        for layer in self.layers:
            if layer.is_ours:
                layer.attention.set_processor(layer.installed)
        # torch's own hooks: offloading exchanges `module.forward`, which would drop hooks that live there.
        self._handles = [
            self.part.module.register_forward_pre_hook(self._entered, with_kwargs=True),
            self.part.module.register_forward_hook(self._left, always_call=True),
        ]
        self._install_call_hooks()
        self._handles += self._mover.hooks(self._places)
        if self.merger is not None:
            self._handles += self.merger.install(self.layers)

    def _install_call_hooks(self) -> None:
        root = self.part.root
        is_stepwise = self.steps.scheduler is not None and self.session.has_dense_steps
        if self.part.lora is not None and is_stepwise:
            self._handles += [
                root.register_forward_pre_hook(self._root_entered, prepend=True),
                root.register_forward_hook(self._root_left, always_call=True),
            ]
        if self._remembers or is_stepwise:  # another scheduler may come, which needs the timestep
            hook = root.register_forward_pre_hook(self._model_entered, with_kwargs=True, prepend=True)
            self._handles.append(hook)
        if self._remembers and self.part.module is root and hasattr(root, "cache_context"):
            from nearfield.diffusers.listening import Listener

            self._listener = Listener(root, self._forget)

    @property
    def _remembers(self) -> bool:
        """Whether anything is kept from call to call: by layers, or as maps of merged tokens."""
        return self.part.method.is_stateful or self.merger is not None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._listener is not None:
            self._listener.leave(self.part.root)
            self._listener = None
        for layer in self.layers:
            if layer.is_ours and layer.attention.get_processor() is layer.installed:
                layer.attention.set_processor(layer.processor)
        self.suspended.end()
        self.session.close()
        self._hand_out(None)
        self.calls.close()
        if self.merger is not None:
            self.merger.remove()
        self._switch_lora_off(False)
        self.steps = SchedulerState()
        self._grids = GridReader(self.steps.is_in_loop)

    # -- a call --------------------------------------------------------------------------------------------------

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tokens enter."""
        spec, ranks = self.part.spec, self.part.ranks
        arguments = Arguments(self._names, args, kwargs)
        self.suspended.check()
        check_unchanged(self.part, self.layers, self._places)
        check_arguments(spec, arguments)
        # Asked once: where a graph broke, torch.compile takes up every function by itself, where the answer is another.
        is_traced = torch.compiler.is_compiling()
        locate = self._locate if is_traced else _outside_graphs(self._locate)
        layout = locate(module, arguments)
        if not isinstance(layout, str):
            layout = spec.padded(layout)
            check_count(spec, arguments, layout)
        samples = arguments.get(spec.sample)
        if is_traced:
            check_ready(self.part, self.state, layout, first_tensor(samples))
        else:
            _outside_graphs(self._get_ready)(layout, samples)
        self.calls.is_dense_step = self._is_dense_step()
        if self._remembers:
            self._begin_step(len(samples))
        self.calls.enter()
        if ranks is not None and self.state is not None and not self.steps.is_in_loop():
            check_same_sample(spec.sample, first_tensor(samples), ranks)
        self._mover.enter(spec.moves, arguments)
        return arguments.call

    def _locate(self, module: nn.Module, arguments: Arguments) -> TokenLayout | str:
        """The tokens of a call, or the reason why it has to stay dense."""
        spec = self.part.spec
        if spec.locate is not None:
            return spec.locate(module, arguments)
        images = self._grids.read(arguments.get(spec.ids))
        text = first_tensor(arguments.get(spec.conditioning)).shape[1]
        return f"`{spec.ids}` describe no grid" if images is None else TokenLayout(images, text)

    def _model_entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads which timestep the model is called with, and which text."""
        arguments = Arguments(self._root_names, args, kwargs)
        if arguments.has("timestep") and self.steps.needs_timestep:
            self.steps.timestep = arguments.get("timestep")
        if self._remembers:
            text = arguments.get(self.part.spec.conditioning)
            self.session.tracker.set_text(None if text is None else first_tensor(text))

    def _root_entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before any layer: those of a model that lie outside its parts may have a LoRA, too."""
        if torch.compiler.is_compiling():
            raise ValueError(SWITCHED_WHOLE)
        self._switch_lora_off(False)  # where the last call ended by Ctrl-C, after which no hook runs
        self._switch_lora_off(self._is_dense_step())

    def _root_left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Between calls the model is what others made it."""
        if self.part.module is not module:
            self.calls.leave_model(output)
        self._switch_lora_off(False)

    def _switch_lora_off(self, is_off: bool) -> None:
        if self.part.lora is not None and is_off != self._is_lora_off:
            self.part.lora.switch(not is_off)
            self._is_lora_off = is_off

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Tokens have left, or the call raised; then there is no output."""
        self._mover.forget()
        if self.merger is not None:
            self.merger.end()
        self.calls.leave(output)

    def _is_dense_step(self) -> bool:
        return self.session.has_dense_steps and self.session.is_dense_step(self.steps.now())

    def _state(self) -> Call:
        merged = None if self.merger is None else self.merger.call
        return Call(self.state, self.calls.is_dense_step, merged, self._is_lora_off)

    def _resume(self, call: Call) -> None:
        self.calls.is_dense_step = call.is_dense_step
        self._switch_lora_off(call.is_lora_off)
        if self.merger is not None:
            self.merger.call = call.merged
        if call.state is not self.state:
            self._hand_out(call.state)

    # -- what is kept from step to step --------------------------------------------------------------------------

    def _begin_step(self, batch: int) -> None:
        """Say to what is kept where the loop stands, and let it forget what is over."""
        if torch.compiler.is_compiling():
            raise ValueError(_NOT_WHOLE)
        step = self._step()
        if step is None:
            if self.merger is not None:
                self._begin_merging(self.merger, batch, None)
            return
        name = None if self._listener is None else self._listener.name
        now = self.session.tracker.advance(step, self.steps.scheduler.timesteps, name, batch)
        if now.is_new:
            self._forget()
        if self.merger is not None:
            self._begin_merging(self.merger, batch, now.step)
        self.session.begin(now.step, now.is_first)

    def _step(self) -> Moment | None:
        """None where nothing tells the step, and only maps depend on it: those are made anew then."""
        try:
            self.steps.check_is_given()
            return self.steps.now()
        except ValueError:
            if self.part.method.is_stateful:
                raise
            return None

    def _begin_merging(self, merger: Merger, batch: int, step: Moment | None) -> None:
        if self.state is not None and self.state.regions is not None:
            check_merged_blocks(merger)
        if merger.begin(self.state, batch, step):
            self.session.forget()  # other tokens are left from now on

    def _forget(self) -> None:
        self.session.forget()
        if self.merger is not None:
            self.merger.forget()

    # -- getting ready -------------------------------------------------------------------------------------------

    def _get_ready(self, layout: TokenLayout | str, samples: Any) -> None:
        """`samples` are a tensor, or a list with one for each sample of the batch."""
        sample = first_tensor(samples)
        self.dtype = sample.dtype
        self._mover.forget()
        if isinstance(layout, str):
            self.calls.dense[layout] += 1
            self._hand_out(None)
            return
        self.prepare(layout, sample.device, len(samples))

    def prepare(self, layout: TokenLayout, device: torch.device, batch: int) -> None:
        """Fetch the order and what layers read for a layout of tokens, and hand them to the processors."""
        if self.part.ranks is not None and not self.session.is_known(layout, device):
            name = self.part.name or type(self.part.root).__name__
            self.part.ranks.compare({"tokens": layout, "part": name})
        before = self.state
        state = self.session.prepare(layout, device, batch)
        if state is not before:
            self._hand_out(state)
        if self.part.spec.ids:
            self._grids.expect(layout.images, state.device)

    def _hand_out(self, state: TokenState | None) -> None:
        self.session.state = state
        self._mover.state = state
        for number, layer in enumerate(self.layers):
            if isinstance(layer.installed, SparseProcessor):
                attention = state.attentions[number] if state else None
                is_stateful = attention is not None and self.part.method.is_stateful
                layer.installed.attention = (
                    StatefulAttention(attention, self.calls) if attention and is_stateful else attention
                )
                weighing = state.weighing[number] if state and state.weighing else None
                layer.installed.dense_attention = weighing or (state.dense_attention if state else None)


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile leaves alone, if it is in use at all."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
