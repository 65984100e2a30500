"""Pictures that commands draw: whether they can, and where to."""

from pathlib import Path

from nearfield.cli import UsageError, wrong
from nearfield_lab.missing import MissingExtra
from nearfield_lab.plots.figures import require_matplotlib


def require_reports(argument: str, picture: Path | None, json_path: Path | None) -> None:
    """A picture can be drawn if one was asked for, and is another file than the JSON."""
    if picture is None:
        return
    require_drawing(argument)
    if json_path and json_path.resolve() == picture.resolve():
        wrong(argument, "be another file than `--json`", repr(str(picture)))


def require_drawing(argument: str) -> None:
    try:
        require_matplotlib()
    except MissingExtra as error:
        raise UsageError(f"`{argument}` needs a picture. {error}") from None
