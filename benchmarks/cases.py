"""What is measured and what came of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from benchmarks import layouts
from nearfield._types import Impl
from nearfield.cli.check import Checked
from nearfield.cli.presets import Preset
from nearfield.cli.timing import Timing
from nearfield.plan.plan import Plan

TILES = 16
FORWARD_WORK, BACKWARD_WORK = 4, 10
"""Floating-point operations per pair and head dimension: two products forward, five backward."""


@dataclass(frozen=True)
class Case:
    """One line of the table. `pattern` is "random" lists, "tiles", or "ragged": tiles and the parts they consist of."""

    preset: Preset
    pattern: str
    grain: int
    q_block: int
    impl: Impl
    backward: bool = False

    @property
    def direction(self) -> str:
        return "backward" if self.backward else "forward"

    def __str__(self) -> str:
        blocks = f"{self.q_block} x {self.grain}"
        return f"{self.preset.name} {self.direction}, {self.pattern}, blocks {blocks}, {self.impl}"

    def plan(self, device: torch.device) -> Plan:
        if self.pattern == "random":
            return layouts.random_lists(self.preset, self.grain, self.q_block, device)
        return layouts.tiles(
            self.preset, TILES, centre=True, q_block=self.q_block, k_block=self.grain, device=device
        )


@dataclass(frozen=True)
class Result:
    """What one case gave. Figures are None unless `status` is "ok"."""

    case: Case
    dtype: str
    status: str
    note: str = ""
    ran: str | None = None
    density: float | None = None
    pairs: int | None = None
    checked: Checked | None = None
    timing: Timing | None = None
    dense_name: str | None = None
    dense_timing: Timing | None = None
    dense_survey: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def speed_up(self) -> float | None:
        """Dense time over our time, both from the same turns."""
        return self.dense_timing.median / self.timing.median if self.timing and self.dense_timing else None

    @property
    def rate_fraction(self) -> float | None:
        """Our rate on the kept pairs over the dense rate: the same number as the speed-up over its pair-count bound."""
        return self.speed_up * self.density if self.speed_up and self.density else None

    def rate_fraction_of(self, backend: str) -> float | None:
        """The same for any dense implementation of the survey: its time over the best one's is from the survey's turns,
        the best one's over ours from this case's."""
        if self.rate_fraction is None or self.dense_name is None or backend not in self.dense_survey:
            return None
        return self.rate_fraction * self.dense_survey[backend] / self.dense_survey[self.dense_name]

    def _work(self) -> int:
        return (BACKWARD_WORK if self.case.backward else FORWARD_WORK) * self.case.preset.head_dim

    @property
    def tflops(self) -> float | None:
        return self._work() * self.pairs / self.timing.median / 1e9 if self.timing and self.pairs else None

    @property
    def dense_tflops(self) -> float | None:
        if not self.dense_timing:
            return None
        batch, heads, tokens, _ = self.case.preset.shape
        return self._work() * batch * heads * tokens**2 / self.dense_timing.median / 1e9

    @property
    def overhead(self) -> float | None:
        """Time over the sum of the parts, less one."""
        return self.timing.median / sum(self.parts.values()) - 1 if self.timing and self.parts else None


def cases(
    presets: list[Preset],
    grains: list[int],
    impls: list[Impl],
    q_block: int | None,
    device: torch.device,
    *,
    backward: bool = False,
    ragged: bool = False,
) -> list[Case]:
    """Everything to measure, preset by preset."""
    return [
        case
        for preset in presets
        for impl in impls
        for case in _cases_of(preset, grains, impl, q_block, device.type == "cuda", backward, ragged)
    ]


def _cases_of(
    preset: Preset,
    grains: list[int],
    impl: Impl,
    q_block: int | None,
    on_cuda: bool,
    backward: bool,
    ragged: bool,
) -> Iterator[Case]:
    for grain in grains:
        yield Case(preset, "random", grain, q_block or preset.queries_per_list(grain), impl)
    if preset.text:
        # On the CPU small blocks cost nothing and fit tiles of any length; kernels want whole compute tiles. Text,
        # centre and tiles are multiples of 128 tokens, not of 192.
        tile_rows, tile_grain = (q_block or 128, 64) if on_cuda else (q_block or 16, 16)
        yield Case(preset, "ragged" if ragged else "tiles", tile_grain, tile_rows, impl)
    if backward:
        rows = q_block or preset.queries_per_list(64)
        yield Case(preset, "random", 64, rows, impl, backward=True)
