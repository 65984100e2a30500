"""A figure from its axes to its file, where matplotlib is installed."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nearfield._files import replace_file
from nearfield_lab.missing import MissingExtra
from nearfield_lab.plots.style import INK


def require_matplotlib() -> None:
    """Raise, with the remedy, where nothing can be drawn."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtra("matplotlib", error, purpose="to draw") from None
    matplotlib.use("Agg")


def require_pyplot() -> Any:
    """What figures are made with."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    return pyplot


def row_of_axes(shapes: Sequence[float]) -> tuple[Any, list[Any]]:
    """Axes of one height side by side, as wide as their shapes (width over height) ask, within reason."""
    shapes = [_within_reason(shape) for shape in shapes]
    gap, above, below = 0.42, 0.62, 0.30
    height = min(3.0, 15.0 / sum(shapes))
    size = sum(shapes) * height + gap * (len(shapes) + 1), height + above + below
    figure = require_pyplot().figure(figsize=size)
    axes, left = [], gap
    for shape in shapes:
        box = (left / size[0], below / size[1], shape * height / size[0], height / size[1])
        axes.append(figure.add_axes(box, anchor="NW"))
        left += shape * height + gap
    return figure, axes


def two_rows_of_axes(shape: float, columns: int) -> tuple[Any, list[Any], list[Any]]:
    """Pictures of one shape (width over height) side by side above, a square below each."""
    shape = _within_reason(shape)
    gap, head, foot = 0.42, 0.62, 0.34
    height = min(3.0, 17.0 / (columns * shape))
    width = shape * height
    square = min(width, 3.0)
    size = columns * (width + gap) + gap, head + height + gap + square + foot
    figure = require_pyplot().figure(figsize=size)
    above, below = [], []
    for column in range(columns):
        left = (gap + column * (width + gap)) / size[0]
        box = (left, (foot + square + gap) / size[1], width / size[0], height / size[1])
        above.append(figure.add_axes(box, anchor="NW"))
        wide = width if column == 0 else square
        below.append(figure.add_axes((left, foot / size[1], wide / size[0], square / size[1]), anchor="NW"))
    return figure, above, below


def _within_reason(shape: float) -> float:
    return min(2.5, max(0.62, shape))


def save_titled(figure: Any, axis: Any, title: str, path: Path) -> None:
    """Write a figure of one axis below its title."""
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the whole picture or nothing, without the date, so that equal pictures are equal files."""
    import matplotlib
    import matplotlib.pyplot as pyplot

    kind = "svg" if path.suffix.lower() == ".svg" else "png"
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    drawn = partial(figure.savefig, format=kind, dpi=110, facecolor="white", metadata=metadata)
    try:
        with matplotlib.rc_context({"svg.hashsalt": "nearfield"}):
            replace_file(path, drawn)
    finally:
        pyplot.close(figure)
