"""Merging and reading together. `apply` always holds one `Composition`, whatever it was given."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from nearfield._checks import check_bool, check_int, check_member, wrong_type, wrong_value
from nearfield._memo import device_name
from nearfield._types import Impl
from nearfield.layout import Geometry, Ordering, Shortened
from nearfield.methods.base import Method, Pieces, Section
from nearfield.methods.borders import Borders, borders_of_regions
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.layers import LayerAttention, PlanLayer, full_layer
from nearfield.methods.registry import default_method
from nearfield.methods.view import View
from nearfield.ops import Regions
from nearfield.plan import Plan

Kind = Literal["joint", "single", "plain"]
"""Blocks of a model: with streams of their own for text and images, with one for both, and others."""
Groups = int | Literal["auto"]

DENSE_FID = 31
"""Of 500 pictures of the embedded model with dense attention: what the FIDs of merged ones compare with."""


class MergeMethod(Method):
    """A method that merges tokens before a block of a model and unmerges them after it. Every token that is left
    reads every other, unless another method decides that: `merge | attention`.

    Args:
        ratio: the share of image tokens that is merged away.
        groups: how many consecutive blocks use one map; "auto": all of a kind.
        refresh: after how many denoising steps destinations are chosen anew, and after how many the shares.
        skip_blocks: how many of the first joint blocks and of the first single blocks are not merged. Models that have
            neither (UNets, PixArt) merge in all.
        size_bias: merged keys count as often as they have tokens: the log of that is added to the logits.
    """

    everything: ClassVar[Mapping[str, Any]] = {"ratio": 0.0}
    fids: ClassVar[dict[float, str]] = {}
    """FIDs of 500 pictures of the embedded model, by ratio, where they were measured."""
    fids_with_attention: ClassVar[dict[float, str]] = {}
    """The same together with sparse attention."""

    ratio: float = 0.5
    groups: Groups = "auto"
    refresh: tuple[int, int] = (10, 5)
    skip_blocks: tuple[int, int] = (5, 5)
    size_bias: bool = False

    @abstractmethod
    def regions(self, geometry: Geometry, pieces: Pieces | None = None) -> Regions:
        """How the image tokens are cut in the order of `ordering`, and how many of each region are left.

        Args:
            pieces: of another order of the tokens, the runs that are not to be mixed.
        """

    @abstractmethod
    def merging(
        self,
        features: Tensor,
        geometry: Geometry,
        *,
        pieces: Pieces | None = None,
        destinations: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Any:
        """The map for image tokens that hold `features`.

        Args:
            destinations: those of an earlier map, where only the shares are to be renewed.
        """

    def merging_in(
        self, features: Tensor, regions: Regions, *, destinations: Tensor | None = None, impl: Impl = "auto"
    ) -> Any:
        """The same for some of the regions: what a rank does with its own. Needed where `can_split` is true."""
        raise NotImplementedError

    @abstractmethod
    def describe_regions(self, geometry: Geometry, regions: Regions) -> str:
        """What the fields come to on a geometry whose tokens are cut so."""

    @property
    def merges_modules(self) -> bool:
        """Whether tokens are merged around each module of a block, not around the block."""
        return False

    def check_goes_with_attention(self) -> None:
        """Refuse to merge in the order of another method."""
        rule = "merge inside runs of an order to go together with attention"
        wrong_type("merge", rule, type(self).__name__)

    @property
    def warning(self) -> str | None:
        return self.picture_warning(self.fids)

    def picture_warning(self, fids: dict[float, str]) -> str | None:
        """The FID of the largest measured ratio up to this one. None below all measured ones."""
        measured = max((known for known in fids if known <= self.ratio), default=None)
        if measured is None:
            return None
        return (
            f"Merging loses much of a picture: {type(self).__name__}(ratio={measured:g}) has an FID of {fids[measured]}"
            f" where dense attention has {DENSE_FID} (500 pictures of the embedded model; see docs/merging.md). Use"
            " Hilbert() instead, or compare pictures of your own model with and without merging."
        )

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PlanLayer:
        """Everyone reads everyone."""
        del index, heads
        return full_layer(geometry.num_tokens, device_name(device))

    def dense_layer_reason(self, index: int, num_layers: int) -> str | None:
        del index, num_layers
        return "everyone reads everyone"

    def check_merging(self) -> None:
        """Check the fields that all methods that merge have."""
        for name, least, meaning in (
            ("refresh", 1, "(destinations, shares)"),
            ("skip_blocks", 0, "(joint, single)"),
        ):
            pair = getattr(self, name)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                wrong_type(name, f"be a pair {meaning}", repr(pair))
            for value in pair:
                check_int(name, value, at_least=least)
            object.__setattr__(self, name, tuple(pair))
        if self.groups != "auto":
            check_int("groups", self.groups, at_least=1)
        check_bool("size_bias", self.size_bias)

    def block_group(self, kind: Kind, block: int) -> int | None:
        """Which group the n-th block of a kind belongs to; None where it is not merged.

        A map is made at the first block of a group and serves all of it.
        """
        check_member("kind", kind, get_args(Kind))
        check_int("block", block, at_least=0)
        number = block - {"joint": self.skip_blocks[0], "single": self.skip_blocks[1], "plain": 0}[kind]
        if number < 0:
            return None
        return 0 if self.groups == "auto" else number // self.groups

    def refresh_phase(self, step: int) -> tuple[int, int]:
        """Counts the renewals of destinations and shares: what was made in the same phase may be used again."""
        check_int("step", step, at_least=0)
        return step // self.refresh[0], step // self.refresh[1]

    def borders(self, geometry: Geometry, **_: Any) -> Borders:
        """The borders of regions: what is added to tokens differs across them."""
        return borders_of_regions(self.ordering(geometry), geometry, self.regions(geometry).lengths)

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry: regions, and how many tokens are left."""
        del device  # regions are the same on all
        return self.describe_regions(geometry, self.regions(geometry))

    def __or__(self, attention: Method) -> "Composition":
        """Merge, and let merged tokens read as another method says."""
        return Composition(self, attention)


@dataclass(frozen=True)
class Composition(Method):
    """Merge, then read.

    Tokens stand in the order that the attention wants, and are merged inside its runs. What is left of an image is a
    shorter line in the same order, along which the attention reads; blocks that are not merged read among all tokens.

    Args:
        merge: which tokens become one; None: none do.
        attention: who reads whom; None: everyone reads everyone.
    """

    merge: MergeMethod | None = None
    attention: Method | None = None

    def __post_init__(self) -> None:
        if self.merge is not None and not isinstance(self.merge, MergeMethod):
            wrong_type("merge", "be a method that merges", type(self.merge).__name__)
        if self.attention is None:
            if self.merge is None:
                wrong_value("attention", "be given where nothing is merged", None)
            return
        if not isinstance(self.attention, Method) or isinstance(self.attention, Composition | MergeMethod):
            rule = f"be a method such as nearfield.{default_method().label}"
            wrong_type("attention", rule, repr(self.attention))
        if self.merge is None:
            return
        self.merge.check_goes_with_attention()
        if self.merge.size_bias and not self.attention.weighs_image_keys:
            name = type(self.attention).__name__
            hint = "It goes by weights or summaries that do not count how many tokens were merged."
            wrong_value("size_bias", f"be False together with {name} as it is set", True, hint)

    @classmethod
    def of(cls, method: Method) -> "Composition":
        """A method as a composition: of itself, or of one part."""
        if isinstance(method, Composition):
            return method
        return cls(method) if isinstance(method, MergeMethod) else cls(None, method)

    @property
    def parts(self) -> tuple[Method, ...]:
        """What it is made of."""
        return tuple(part for part in (self.merge, self.attention) if part is not None)

    @property
    def _reading(self) -> Method:
        """What answers for the attention: everyone reads everyone where only merging was asked for."""
        reading = self.attention or self.merge
        assert reading is not None
        return reading

    # -- who reads whom ----------------------------------------------------------------------------------------------

    def layer(self, geometry: Geometry, index: int = 0, **options: Any) -> LayerAttention:
        """What a layer needs to attend, among all tokens or, for a geometry that is `shortened`, merged ones."""
        return self._reading.layer(geometry, index, **options)

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens: that of the attention, if there is one."""
        return self._reading.ordering(geometry, device=device)

    def module(self, dim: int, heads: int) -> nn.Module | None:
        return self._reading.module(dim, heads)

    # -- which tokens become one -------------------------------------------------------------------------------------

    def pieces(self, geometry: Geometry) -> Pieces:
        """Of every image, the lengths of the runs of that order which regions do not cross."""
        return self._reading.pieces(geometry)

    def _pieces(self, geometry: Geometry) -> Pieces | None:
        return None if self.attention is None else self.attention.pieces(geometry)

    def regions(self, geometry: Geometry) -> Regions | None:
        """How the image tokens are cut in that order, and how many of each region are left; None without merging."""
        return None if self.merge is None else self.merge.regions(geometry, self._pieces(geometry))

    def merging(
        self, features: Tensor, geometry: Geometry, *, destinations: Tensor | None = None, impl: Impl = "auto"
    ) -> Any:
        """The map for image tokens that hold `features`, in the order of `ordering`."""
        assert self.merge is not None
        pieces = self._pieces(geometry)
        return self.merge.merging(features, geometry, pieces=pieces, destinations=destinations, impl=impl)

    def shortened(self, geometry: Geometry, regions: Regions | None = None) -> Geometry:
        """What is left of the tokens, as a geometry of its own; the same where nothing is merged."""
        regions = regions or self.regions(geometry)
        if regions is None:
            return geometry
        return Shortened.of(geometry, tuple(zip(regions.lengths, regions.counts, strict=True)))

    # -- where it applies --------------------------------------------------------------------------------------------

    @property
    def takes_text(self) -> bool:  # type: ignore[override]
        return self._reading.takes_text

    def check_layers(self, num_layers: int) -> None:
        self._reading.check_layers(num_layers)

    def dense_layer_reason(self, index: int, num_layers: int) -> str | None:
        return self._reading.dense_layer_reason(index, num_layers)

    def num_dense_steps(self, num_steps: int) -> tuple[int, int]:
        """How many of the first and of the last steps have dense attention. Tokens are merged in all."""
        return self._reading.num_dense_steps(num_steps)

    @property
    def is_stateful(self) -> bool:
        return self._reading.is_stateful

    def refreshes(self, num_steps: int) -> list[int]:
        """The steps at which the attention decides anew: also where other tokens are left than before."""
        if not self.is_stateful:
            return []
        due = set(self._reading.refreshes(num_steps))
        if self.merge is not None:
            phases = [self.merge.refresh_phase(step)[0] for step in range(num_steps)]
            due |= {step for step in range(1, num_steps) if phases[step] != phases[step - 1]}
        return sorted(due)

    @property
    def can_split(self) -> bool:
        return all(part.can_split for part in self.parts)

    @property
    def compile_reason(self) -> str | None:
        return next((part.compile_reason for part in self.parts if part.compile_reason is not None), None)

    @property
    def warning(self) -> str | None:
        """What merging loses, and what the attention says of itself."""
        merge, attention = self.merge, self.attention
        own = merge.warning if merge is not None else None
        if merge is not None and attention is not None:
            own = merge.picture_warning(merge.fids | merge.fids_with_attention)
        found = (own, None if attention is None else attention.warning)
        return " ".join(words for words in found if words) or None

    def sections(self, geometry: Geometry) -> tuple[Section, ...]:
        return self._reading.sections(geometry)

    @property
    def weighs(self) -> bool:
        """Whether merged keys have a bias, which only our own attention adds."""
        return self.merge is not None and self.merge.size_bias

    @property
    def weighs_image_keys(self) -> bool:
        return self._reading.weighs_image_keys

    def borders(self, geometry: Geometry, **options: Any) -> Borders | None:
        """The borders of merged regions, where there are any, else those of the attention."""
        regions = self.regions(geometry)
        if regions is not None:
            return borders_of_regions(self.ordering(geometry), geometry, regions.lengths)
        return self._reading.borders(geometry, **options)

    def view(self, geometry: Geometry, index: int = 0, *, near: Plan | None = None) -> View | None:
        """That of the attention, where nothing is merged by what tokens hold."""
        return None if self.merge is not None else self._reading.view(geometry, index, near=near)

    # -- words -------------------------------------------------------------------------------------------------------

    def with_dense_steps(self, steps: DenseSteps) -> Method:
        return Composition(self.merge, self._reading.with_dense_steps(steps))

    def sparse_form(self) -> Method:
        return self if self.attention is None else Composition(self.merge, self.attention.sparse_form())

    @property
    def label(self) -> str:
        return " | ".join(part.label for part in self.parts)

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What is merged, and what the attention is among merged tokens."""
        regions = self.regions(geometry)
        if regions is None:
            return self._reading.describe(geometry, device=device)
        assert self.merge is not None
        merged = self.merge.describe_regions(geometry, regions)
        if self.attention is None:
            return merged
        return f"{merged}\n{self.attention.describe(self.shortened(geometry, regions), device=device)}"
