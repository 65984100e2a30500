"""A package that is not installed: one error for all of the lab, which says what to install."""

from typing import Any

from nearfield.cli import UsageError


class MissingExtra(UsageError, ImportError):
    """A package that the lab needs cannot be imported. Commands say so in one line, as of any wrong usage.

    Args:
        package: its name, as pip knows it.
        extra: the extra of nearfield-lab that brings it; without one, nearfield-lab itself does.
        purpose: what it is needed for.
    """

    def __init__(
        self, package: str, error: Exception | None = None, extra: str = "", purpose: str = "for this"
    ) -> None:
        got = f"; got {error}" if error else ""
        brings = f"'nearfield-lab[{extra}]'" if extra else "nearfield-lab"
        super().__init__(
            f"`{package}` must be installed {purpose}{got}. Install it with `pip install {brings}`."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return UsageError, self.args  # from another process comes the message, not what it was made of
