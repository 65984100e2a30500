"""What a step is timed with: a denoising loop that is moved by hand, maps of merged tokens that never get old, and the
parts that are timed separately."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nearfield import Geometry, Merge, Method
from nearfield.methods import Composition, Kind
from nearfield.ops import Merging

FOREVER = 2**30
SELECTING, MERGING, REFRESH = "making maps", "merging", "making lists"
"""Parts of a step that are timed separately. A method whose steps are timed with REFRESH says by `refreshes` when it
is due."""
Context = Callable[[], AbstractContextManager[Any]]
Step = Callable[[], object]
Turn = tuple[Context, Step]
"""What is entered before something is timed, and what is timed."""


@dataclass(frozen=True)
class Variant:
    """One way to run a step by a method.

    Args:
        name: the work that its record names.
        turn: the step.
        density: asked after it has run: the share of all pairs that was read; None: what `apply` has counted. It
            raises WrongAnswer where that is not the share that was asked for.
        parts: what it is made of, or needs at some steps: timed separately.
        facts: for its record.
    """

    name: str
    method: Any
    turn: Turn
    density: Callable[[], float] | None
    parts: Mapping[str, Turn] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class Loop:
    """A loop as far as `apply` asks for one: every call is a later step of one long generation."""

    def __init__(self) -> None:
        self.step_index = 0
        self.timesteps = range(FOREVER)

    def later(self, step: Callable[[], object]) -> Callable[[], object]:
        """The next step: what was remembered serves."""

        def run() -> object:
            self.step_index += 1
            return step()

        return run

    def anew(self, step: Callable[[], object]) -> Callable[[], object]:
        """The first step of another generation: nothing is remembered."""

        def run() -> object:
            self.step_index, self.timesteps = 0, range(FOREVER)
            return step()

        return run


def with_kept_maps(method: Method) -> Composition:
    """The method with maps that never get old."""
    method, merge = _parts(method)
    return replace(method, merge=replace(merge, refresh=(FOREVER, FOREVER)))


@dataclass(frozen=True)
class _Fixed(Merge):
    """Destinations that do not depend on tokens: rounding cannot change them."""

    def merging(self, features: Tensor, geometry: Geometry, **more: Any) -> Merging:
        regions = self.regions(geometry, more.get("pieces"))
        places = torch.cat(
            [
                (
                    group.starts(features.device) + _spread(group.length, group.num_left, features.device)
                ).flatten()
                for group in regions.groups
            ]
        )
        return super().merging(
            features, geometry, **more | {"destinations": places.expand(len(features), -1)}
        )


def _spread(length: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * length // count


def with_fixed_destinations(method: Method) -> Composition:
    method, merge = _parts(method)
    return replace(method, merge=_Fixed(**asdict(merge)))


def _parts(method: Method) -> tuple[Composition, Merge]:
    method = Composition.of(method)
    assert isinstance(method.merge, Merge)
    return method, method.merge


def check_choice(merge: Merge, geometry: Geometry, device: torch.device) -> None:
    """The kernel chooses what the reference does."""
    tokens = torch.randn(1, geometry.num_image_tokens, 64, device=device)
    chosen, expected = (merge.merging(tokens, geometry, impl=impl) for impl in ("auto", "reference"))
    if not torch.equal(chosen.destinations, expected.destinations):
        raise RuntimeError("the kernel that chooses destinations does not choose those of the reference")


def density(method: Method, geometry: Geometry) -> float:
    """Pairs that a layer in a merged block reads, of all there are."""
    method = Composition.of(method)
    short = method.shortened(geometry)
    pairs = method.layer(short, 0, heads=1).num_pairs
    assert pairs is not None
    return float(pairs / geometry.num_tokens**2)


class Parts:
    """Making the maps of a step, and merging and parting in all of its blocks, without the blocks."""

    def __init__(
        self,
        method: Method,
        geometry: Geometry,
        model: Any,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        (self.method, self._merge), self.geometry = _parts(method), geometry
        joint = self._groups("joint", len(model.transformer_blocks))
        single = self._groups("single", len(model.single_transformer_blocks))
        self.num_joint, self.num_single = len(joint), len(single)
        self.num_maps = len(set(joint)) + len(set(single))
        width = model.config.num_attention_heads * model.config.attention_head_dim
        self.text = torch.randn(1, geometry.text, width, device=device, dtype=dtype)
        self.tokens = torch.randn(1, geometry.num_image_tokens, width, device=device, dtype=dtype)
        self.map = self._made()
        short = self.map.regions.num_merged
        self.result = torch.randn(1, short, width, device=device, dtype=dtype)
        """What a block gives: not what it was given, which would still be in the cache."""

    def _groups(self, kind: Kind, blocks: int) -> list[int]:
        """The group of each block that is merged."""
        groups = (self._merge.block_group(kind, block) for block in range(blocks))
        return [group for group in groups if group is not None]

    def _made(self) -> Merging:
        made: Merging = self.method.merging(self.tokens, self.geometry).to(self.tokens.dtype)
        return made

    def select(self) -> list[Merging]:
        return [self._made() for _ in range(self.num_maps)]

    def merge(self) -> Tensor:
        is_by_module = self._merge.merges_modules
        tokens = self.tokens
        for _ in range(self.num_joint):
            tokens = self._around_module(tokens) if is_by_module else self._around_block(tokens)
        for _ in range(self.num_single):
            if is_by_module:
                self._normed(tokens)
            tokens = self._around_block(tokens)
        return tokens

    def _around_block(self, tokens: Tensor) -> Tensor:
        return self.map.update(tokens, self.map.enter(tokens), self.result)

    def _around_module(self, tokens: Tensor) -> Tensor:
        """What comes out of the module is added by the block itself."""
        return self.map.leave(self.map.enter(tokens))

    def _normed(self, tokens: Tensor) -> Tensor:
        """A norm that sees all tokens, whose result is merged."""
        whole = torch.cat([self.text, tokens], dim=1)
        num_text = self.text.shape[1]
        return torch.cat([whole[:, :num_text], self.map.enter(whole[:, num_text:])], dim=1)
