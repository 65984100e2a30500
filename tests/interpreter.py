"""Triton's interpreter, quicker: it does the same, once where it did it many times."""

from collections.abc import Callable
from typing import Any


def patch_once_per_launch() -> None:
    """A launch puts the interpreter's functions into `triton.language`, and every call of a device function looks at
    all its names again, to find them there: a third of the time of an interpreted kernel."""
    try:
        from triton.runtime import interpreter
    except ModuleNotFoundError:
        return
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[int] = set()  # the modules whose functions were called in this launch

    def patch_unless_seen(function: Callable[..., Any]) -> Any:
        module = id(function.__globals__)
        if module in seen:
            return None
        seen.add(module)
        return patch_language(function)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_unless_seen
    interpreter.GridExecutor.__call__ = launch_anew
