"""Where the tokens of one attention call stand: the text, and the images, each a grid in raster order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nearfield._checks import check_bool, check_int, wrong_type, wrong_value

Grid = tuple[int, ...]
Span = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """The layout of a sequence: `[text, image, references...]`, or `[image, references..., text]`.

    Args:
        grid: sides of the image or video in tokens, slowest axis first: `(height, width)` or
            `(frames, height, width)`.
        text: tokens that are not part of any grid. Padded text counts in full; a mask hides the padding.
        text_first: whether the text stands before the image.
        references: grids of further images that follow the first, as editing models have them. Every image keeps a
            curve of its own.
    """

    grid: Grid
    text: int = 0
    text_first: bool = True
    references: tuple[Grid, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", _checked_grid("grid", self.grid))
        if not isinstance(self.references, Sequence):
            wrong_type("references", "be a sequence of grids", type(self.references).__name__)
        hint = "Write ((height, width),) for a single one."
        grids = tuple(_checked_grid("references", grid, hint) for grid in self.references)
        object.__setattr__(self, "references", grids)
        check_int("text", self.text, at_least=0)
        check_bool("text_first", self.text_first)

    @property
    def images(self) -> tuple[Grid, ...]:
        """The grids of all images, the one that is made first."""
        return (self.grid, *self.references)

    @property
    def num_image_tokens(self) -> int:
        """Tokens of all images together."""
        return sum(math.prod(grid) for grid in self.images)

    @property
    def num_tokens(self) -> int:
        return self.text + self.num_image_tokens

    @property
    def text_span(self) -> Span:
        start = 0 if self.text_first else self.num_image_tokens
        return start, start + self.text

    @property
    def image_spans(self) -> tuple[Span, ...]:
        """Where each image stands in the sequence."""
        start = self.text if self.text_first else 0
        spans = []
        for grid in self.images:
            spans.append((start, start + math.prod(grid)))
            start = spans[-1][1]
        return tuple(spans)

    def __str__(self) -> str:
        images = " + ".join("x".join(map(str, grid)) for grid in self.images)
        if not self.text:
            return images
        return f"{self.text} text + {images}" if self.text_first else f"{images} + {self.text} text"


def check_geometry(geometry: object) -> None:
    if not isinstance(geometry, Geometry):
        hint = "Write Geometry(grid=(64, 64), text=512)."
        wrong_type("geometry", "be a Geometry", type(geometry).__name__, hint)


def check_no_text(geometry: Geometry) -> None:
    """For methods that know images only."""
    if geometry.text:
        wrong_value("geometry", "have no text for this method", f"{geometry}")


@dataclass(frozen=True)
class Shortened(Geometry):
    """A geometry whose image tokens were merged inside runs of their order: every image is a line of what is left.

    Args:
        whole: the geometry before merging.
        runs: how many tokens each run had, and how many are left; runs do not span two images.
    """

    whole: Geometry | None = None
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, whole: Geometry, runs: Sequence[tuple[int, int]]) -> "Shortened":
        lines = tuple((sum(left for _, left in some),) for some in _runs_of_images(whole, runs))
        return cls(lines[0], whole.text, whole.text_first, lines[1:], whole, tuple(runs))

    def runs_of_images(self) -> list[list[tuple[int, int]]]:
        """The runs of each image."""
        assert self.whole is not None
        return _runs_of_images(self.whole, self.runs)

    def __str__(self) -> str:
        return f"{super().__str__()} merged"


def _runs_of_images(whole: Geometry, runs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = []
    rest = list(runs)
    for grid in whole.images:
        missing, mine = math.prod(grid), []
        while missing > 0 and rest:
            mine.append(rest.pop(0))
            missing -= mine[-1][0]
        if missing:
            wrong_value("runs", f"make up the {math.prod(grid)} tokens of {grid}", runs)
        found.append(mine)
    if rest:
        wrong_value("runs", f"make up the {whole.num_image_tokens} image tokens of {whole}", runs)
    return found


def _checked_grid(name: str, grid: object, hint: str = "") -> Grid:
    if not isinstance(grid, Sequence) or any(
        isinstance(side, bool) or not isinstance(side, int) for side in grid
    ):
        wrong_type(name, "hold integers (height, width) or (frames, height, width)", repr(grid), hint)
    if not 1 <= len(grid) <= 3:
        wrong_value(name, "have one to three sides", tuple(grid))
    if min(grid) < 1:
        wrong_value(name, "have sides of at least 1", tuple(grid))
    return tuple(grid)
