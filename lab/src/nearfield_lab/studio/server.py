"""Serving the page: on loopback unless another host is given, until it is interrupted, and nothing is left behind."""

import ipaddress
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from nearfield_lab.studio import page as pages
from nearfield_lab.studio.asking import Library
from nearfield_lab.studio.models import PictureModel

_MOST_UPLOADED = "1kb"  # nothing on the page takes a file


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(
    host: str,
    port: int | None,
    models: Sequence[PictureModel],
    library: Library,
    opens_browser: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises OSError where the port is taken.

    Args:
        port: the first free one from 7860 on if None.
    """
    with tempfile.TemporaryDirectory(prefix="nearfield-studio-") as folder:
        gr = pages.gradio(Path(folder))
        page = pages.build(gr, models, library)
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            inbrowser=opens_browser,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=False,
            allowed_paths=[],
            max_file_size=_MOST_UPLOADED,
            enable_monitoring=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            footer_links=[],
            app_kwargs={"middleware": _guards(host)},
            theme=pages.theme(gr),
            css=pages.STYLE,
        )
        try:
            with _ending() as ended:
                say(f"{pages.TITLE}: {address}")
                if not is_loopback(host):
                    say(f"note: other machines can reach {host}, and whoever can may use this page")
                say("stop it with Ctrl-C")
                while not ended.wait(1.0):
                    pass
        finally:
            page.close(verbose=False)


def _guards(host: str) -> list[Any]:
    """On loopback, requests must name it: a page from elsewhere that resolves its own name to here is refused."""
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    if not is_loopback(host):
        return []
    names = ["localhost", "127.0.0.1", host]
    return [Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)]


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set: both are an ordinary end."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
