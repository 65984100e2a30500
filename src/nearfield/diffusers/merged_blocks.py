"""Blocks on merged tokens: hooks around the blocks of a region, and the maps they share.

A block adds what it computes to its tokens. So a merged one becomes

    x + leave(block(enter(x)) - enter(x))

The residual stream keeps all tokens, everything inside the block (attention, cross-attention, MLP, norms) runs on few,
and no part of the block is written here again. Text is never merged. With `placement="module"` modules of a block are
merged one by one, after norms and modulation: what they give is parted, and the block adds it to all tokens.

The first block of a group makes the map, the others use it. Which maps of the last step still serve is decided at the
region's entrance: a call continues the last one of its branch (guidance makes several calls per step), one or more
steps later in the same loop. Where that is not known, maps are made anew.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nearfield._checks import wrong_value
from nearfield._types import Moment
from nearfield.diffusers.find import ModuleLayer, TargetModule
from nearfield.diffusers.models.spec import (
    ROTARY,
    TOKENS,
    Arguments,
    MergedBlocks,
    Rows,
    classes_where,
    parameter_names,
)
from nearfield.diffusers.processor import Extras
from nearfield.methods import MergeMethod
from nearfield.ops import Regions
from nearfield.session import TokenLayout, TokenState, find

_REMEMBERED = 4


class Block(NamedTuple):
    """One block of a region.

    Args:
        group: blocks with one number use one map; None: it is not merged.
        parts: modules in it that are merged one by one; none: it is merged as a whole.
        norm: a module that sees all tokens in a block that is merged as a whole; what it gives is merged.
    """

    name: str
    module: nn.Module
    facts: MergedBlocks
    group: int | None
    parts: tuple[str, ...] = ()
    norm: str | None = None

    def layers_in(self, part: str, layers: Sequence[ModuleLayer]) -> list[ModuleLayer]:
        """Those of a module in it, or, for "", all of them."""
        place = f"{self.name}.{part}" if part else self.name
        return [layer for layer in layers if layer.is_ours and f"{layer.path}.".startswith(f"{place}.")]


class Made(NamedTuple):
    """What a group needs in one call.

    Args:
        tokens: the map.
        rows: rotary rows of text and merged tokens, `[B, 1, tokens, head_dim]`.
        bias: on keys, with the text and without it, `[B, 1, tokens]`.
    """

    tokens: Any
    rows: Rows | None
    bias: tuple[Tensor, Tensor] | None

    def extras(self, sees_text: bool) -> Extras | None:
        """What attention has to add."""
        bias = None if self.bias is None else self.bias[0 if sees_text else 1]
        return None if self.rows is None and bias is None else Extras(self.rows, bias)


class MergedCall:
    """One call of a region: what it starts with, and the maps that were made in it."""

    def __init__(
        self,
        regions: Regions,
        layout: TokenLayout,
        known: Sequence[Any],
        keeps_shares: bool,
        num_groups: int,
    ) -> None:
        self.regions, self.layout = regions, layout
        self.known, self.keeps_shares = tuple(known), keeps_shares
        """Maps of an earlier step, group by group: for their destinations, or whole."""
        self.made: list[Made | None] = [None] * num_groups


class _Last(NamedTuple):
    """The last call of some kind, and its step."""

    step_index: int
    call: MergedCall


class Merger:
    """The merged blocks of one region."""

    def __init__(self, part: TargetModule, merge: MergeMethod, in_forward: Callable[[], bool]) -> None:
        spec = part.spec
        if not spec.blocks:
            known = classes_where(lambda spec: spec.blocks)
            wrong_value("target", f"be, or have, one of {known} to merge tokens in", spec.model)
        self.spec, self.method, self.merge, self.impl = spec, part.method, merge, part.impl
        self.is_split = part.ranks is not None
        self.in_forward = in_forward
        self.blocks = tuple(_grouped(part.module, spec.blocks, merge))
        self.num_groups = 1 + max(
            (block.group for block in self.blocks if block.group is not None), default=-1
        )
        self.call: MergedCall | None = None
        self._hooks: list[_Hook] = []
        self._last: OrderedDict[Any, _Last] = OrderedDict()
        self._begun: tuple[Any, _Last] | None = None
        self._renewed_at = -1

    @property
    def needs_processors(self) -> bool:
        """Whether attention has to know of merged tokens: where they rotate, or have sizes."""
        return self.merge.size_bias or any(facts.rows for facts in self.spec.blocks)

    def group_of(self, name: str) -> int | None:
        """The group of the block that a module lies in."""
        for block in self.blocks:
            if name.startswith(f"{block.name}."):
                return block.group
        return None

    def install(self, layers: Sequence[ModuleLayer]) -> list[RemovableHandle]:
        """Hooks for all merged blocks; the processors of their layers learn what was merged."""
        handles: list[RemovableHandle] = []

        def put(module: nn.Module, before: Any, after: Any = None) -> None:
            # torch.compile leaves hooks alone: it compiles what lies between them.
            before = torch.compiler.disable(before)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            if (
                after is not None
            ):  # first of all: all tokens are back before they leave the order of the region
                handles.append(module.register_forward_hook(torch.compiler.disable(after), prepend=True))

        for block in self.blocks:
            if block.group is None:
                continue
            if block.parts:
                put(block.module, _Hook(self, block, block.module, [], False).make_map)
            for part in block.parts or ("",):
                module = block.module.get_submodule(part)
                hook = _Hook(self, block, module, block.layers_in(part, layers), not part)
                self._hooks.append(hook)
                put(module, hook.before, hook.after)
            if block.norm is not None:
                norm = _NormHook(hook)
                put(block.module.get_submodule(block.norm), norm.before, norm.after)
        return handles

    def remove(self) -> None:
        self._hooks, self.call, self._begun = [], None, None
        self.forget()

    def forget(self) -> None:
        """Another generation begins: no map of the last one serves."""
        self._last.clear()
        self._renewed_at = -1

    # -- a call --------------------------------------------------------------------------------------------------

    def begin(self, state: TokenState | None, batch: int, moment: Moment | None) -> bool:
        """Tokens enter. Which maps of an earlier step still serve? None without a moment, which is not known then.

        Args:
            state: None where the call stays dense.

        Returns:
            Whether this is the first call of a step at which destinations are chosen anew.
        """
        self.call = self._begun = None
        regions = None if state is None else state.own_regions or state.regions
        if state is None or regions is None:
            return False
        known: Sequence[Any] = (None,) * self.num_groups
        keeps_shares = False
        if moment is not None:
            # Calls of one kind: with the same text (guidance has several), and as many samples and tokens.
            kind = moment.branch, batch, regions
            last = self._last.get(kind)
            if (
                last is not None and last.step_index < moment.step_index
            ):  # in the same step again it is another loop
                old, new = (self.merge.refresh_phase(place) for place in (last.step_index, moment.step_index))
                if old[0] == new[0]:
                    known = [None if made is None else made.tokens for made in last.call.made]
                    keeps_shares = old[1] == new[1]
        self.call = MergedCall(regions, state.layout, known, keeps_shares, self.num_groups)
        if moment is None:
            return False
        self._begun = kind, _Last(moment.step_index, self.call)
        is_renewed = all(tokens is None for tokens in known) and moment.step_index != self._renewed_at
        self._renewed_at = moment.step_index if is_renewed else self._renewed_at
        return is_renewed

    def end(self) -> None:
        """Tokens have left, or the call raised."""
        for hook in self._hooks:
            hook.forget()
        if self._begun is None:
            return
        kind, last = self._begun
        self._last[kind] = last
        self._last.move_to_end(kind)
        while len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)
        self._begun = None

    # -- a block -------------------------------------------------------------------------------------------------

    def make(self, call: MergedCall, group: int, image: Tensor, rotary: Rows | None) -> Made:
        """The map of a group, from the tokens that enter its first block. No gradient goes through the choice."""
        known = call.known[group]
        with torch.no_grad():
            tokens = known
            if known is None or not call.keeps_shares:
                destinations = None if known is None else known.destinations
                tokens = self._merging(call, image.detach(), destinations).to(image.dtype)
            rows = None if rotary is None else self._rows(tokens, rotary, call.layout)
            bias = self._bias(tokens, call.layout) if self.merge.size_bias else None
        return Made(tokens, rows, bias)

    def _merging(self, call: MergedCall, image: Tensor, destinations: Tensor | None) -> Any:
        if self.is_split:
            return self.merge.merging_in(image, call.regions, destinations=destinations, impl=self.impl)
        geometry = call.layout.geometry(self.spec.text_first, sees_text=True)
        return self.method.merging(image, geometry, destinations=destinations, impl=self.impl)

    def _rows(self, tokens: Any, rotary: Rows, layout: TokenLayout) -> Rows:
        assert self.spec.text_first  # as in all models that rotate the text with the image
        batch = len(tokens.destinations)

        def at(table: Tensor) -> Tensor:
            text, image = table[: layout.text], table[layout.text :]
            joint = torch.cat([text.expand(batch, -1, -1), tokens.at_destinations(image)], dim=1)
            return joint[:, None]

        return Rows(at(rotary.cos), at(rotary.sin))

    def _bias(self, tokens: Any, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        image: Tensor = tokens.key_bias.float()
        text = image.new_zeros(*image.shape[:2], layout.text)
        joint = torch.cat([text, image] if self.spec.text_first else [image, text], dim=2)
        return joint, image


class _Hook:
    """Merges what enters a block, or a module of it, and brings all tokens back behind it.

    Around a block, what the block added is brought back; around a module, its result, which the block will add.

    Args:
        layers: those in the module, whose processors learn of the merged tokens.
        is_whole: whether the module is the block.
    """

    def __init__(
        self,
        merger: Merger,
        block: Block,
        module: nn.Module,
        layers: Sequence[ModuleLayer],
        is_whole: bool,
    ) -> None:
        assert block.group is not None
        self.merger, self.facts, self.group, self.layers = merger, block.facts, block.group, layers
        self.names, self.is_whole = parameter_names(module), is_whole
        self.inside: _Inside | None = None

    def forget(self) -> None:
        """No tokens are inside, also if the module raised."""
        self.inside = None
        for layer in self.layers:
            layer.installed.extras = None

    def make_map(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a block whose modules are merged one by one: they use its map."""
        call = self._call()
        if call is not None:
            self._made(call, Arguments(self.names, args, kwargs))

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.forget()  # what a block left that raised when it was computed again
        call = self._call()
        if call is None:
            return None
        arguments = Arguments(self.names, args, kwargs)
        full, text = arguments.get(TOKENS), self._num_text(call)
        made = self._made(call, arguments)
        short = _merged(full, made.tokens, text)
        arguments.set(TOKENS, short)
        if self.facts.rows and (self.is_whole or ROTARY in arguments.kwargs):
            arguments.set(
                ROTARY, None
            )  # attention rotates by rows of its own, which differ from sample to sample
        for name in self.facts.per_token if self.is_whole else ():
            arguments.change(name, lambda entries: entries.gather(1, made.tokens.destinations))
        for layer in self.layers:
            layer.installed.extras = made.extras(layer.sees_text)
        self.inside = _Inside(full, short, made.tokens, text)
        return arguments.call

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        inside = self.inside
        if inside is None:
            return None
        self.forget()
        if not isinstance(output, tuple):
            return inside.unmerged(output, self.is_whole)
        place = self.facts.result if self.is_whole else 0  # a module gives the image before the text
        assert place is not None
        parts = list(output)
        parts[place] = inside.unmerged(parts[place], self.is_whole)
        return tuple(parts)

    def _call(self) -> MergedCall | None:
        """What tokens are merged by, if they are."""
        return self.merger.call if self.merger.call is not None and self.merger.in_forward() else None

    def _num_text(self, call: MergedCall) -> int:
        """Tokens of text that stand before the image."""
        return call.layout.text if self.facts.holds_text else 0

    def _made(self, call: MergedCall, arguments: Arguments) -> Made:
        """The map of the group, made where it is missing."""
        made = call.made[self.group]
        if made is None:
            image = arguments.get(TOKENS)[:, self._num_text(call) :]
            rotary = self.facts.rows(arguments.get(ROTARY)) if self.facts.rows else None
            made = call.made[self.group] = self.merger.make(call, self.group, image, rotary)
        return made


class _NormHook:
    """Lets a block that runs on merged tokens normalise all of them, and merges what comes of it.

    What the block adds to the merged tokens is brought back, as ever. So its linear layers, which a LoRA may wrap, need
    no hook.
    """

    def __init__(self, around: _Hook) -> None:
        self._around = around

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = self._around.inside
        if inside is None:
            return None
        text = args[0].shape[1] - inside.short.shape[1]
        return (torch.cat([args[0][:, :text], inside.full], dim=1), *args[1:]), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        inside = self._around.inside
        if inside is None:
            return None
        text = output[0].shape[1] - inside.full.shape[1]
        return (_merged(output[0], inside.tokens, text), *output[1:])


def _merged(tokens: Tensor, by: Any, text: int) -> Tensor:
    """Text as it is, and merged tokens of the image behind it."""
    with _in_full_precision(tokens):
        short: Tensor = by.enter(tokens[:, text:])
    return torch.cat([tokens[:, :text], short], dim=1) if text else short


class _Inside(NamedTuple):
    """What a block was called with: all tokens, those that are left, the map between them, and the text before them."""

    full: Tensor
    short: Tensor
    tokens: Any
    text: int

    def unmerged(self, result: Tensor, is_whole: bool) -> Tensor:
        """All tokens: with what a block added to those that are left, or with what a module of it gave."""
        with _in_full_precision(result):
            full, short, changed = (x[:, self.text :] for x in (self.full, self.short, result))
            image: Tensor = (
                self.tokens.update(full, short, changed) if is_whole else self.tokens.leave(changed)
            )
        if is_whole and image.dtype == torch.float16:  # as blocks do
            image = image.clip(-65504, 65504)
        return torch.cat([result[:, : self.text], image], dim=1) if self.text else image


def _in_full_precision(tokens: Tensor) -> AbstractContextManager[Any]:
    """Autocast would round the tokens that go around a block."""
    kind = tokens.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _grouped(module: nn.Module, kinds: Sequence[MergedBlocks], merge: MergeMethod) -> Iterator[Block]:
    """The blocks of a region; groups of all kinds are numbered in one row."""
    first = 0
    for facts in kinds:
        found = [merge.block_group(facts.kind, place) for place in range(len(find(module, facts.path)))]
        for (name, block), group in zip(find(module, facts.path), found, strict=True):
            parts = tuple(part for part in facts.parts if getattr(block, part, None) is not None)
            inner = (parts, facts.norm) if merge.merges_modules else ()
            yield Block(name, block, facts, None if group is None else first + group, *inner)
        first += 1 + max((group for group in found if group is not None), default=-1)
