"""Pictures that commands draw."""

from pathlib import Path

from nearfield.cli import wrong
from nearfield_lab.plots.figures import require_matplotlib


def require_reports(argument: str, picture: Path | None, json_path: Path | None = None) -> None:
    """A picture can be drawn if one was asked for, and is another file than the JSON."""
    if picture is None:
        return
    require_matplotlib()
    if json_path and json_path.resolve() == picture.resolve():
        wrong(argument, "be another file than `--json`", repr(str(picture)))
