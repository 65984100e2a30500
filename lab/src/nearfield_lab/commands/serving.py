"""`nearfield studio`: the page in the browser."""

import argparse
import socket
from typing import Any

from nearfield.cli import OK, add_device, add_integer, command, input_file, wrong
from nearfield_lab.commands.further import add_path, add_switch
from nearfield_lab.commands.launched import chosen_device
from nearfield_lab.plots.figures import require_matplotlib


def add_commands(commands: Any) -> None:
    parser = command(
        commands,
        "studio",
        _studio,
        "a page in the browser: who reads whom, pictures dense and sparse, results, retrieval",
        "  nearfield studio --open\n  nearfield studio --weights run/model.safetensors --docs notes/\n"
        "  nearfield studio --model black-forest-labs/FLUX.1-dev --port 8000",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default 127.0.0.1: this machine alone)",
    )
    add_integer(parser, "--port", None, "(default: the first free from 7860)", most=65535)
    words = "offer a model of `nearfield train demo`, too"
    add_path(parser, "--weights", "FILE", words, type=input_file("--weights"))
    parser.add_argument(
        "--model", metavar="ID", help="offer a diffusers pipeline, too: its id on the Hub, or its folder"
    )
    add_path(parser, "--docs", "DIR", "texts to ask, as for `nearfield rag`")
    small = "default: SmolLM2-135M-Instruct, where its package is installed"
    add_path(parser, "--language-model", "DIR", f"a folder of transformers that answers ({small})")
    add_device(parser)
    add_switch(parser, "--open", "open the page in the browser")


def _studio(arguments: argparse.Namespace) -> int:
    if arguments.model and arguments.weights:
        wrong("--weights", "be left out with `--model`", str(arguments.weights))
    _require_free(arguments.host, arguments.port)
    device = chosen_device(arguments.device)
    from nearfield_lab.studio.asking import Library
    from nearfield_lab.studio.models import PictureModel
    from nearfield_lab.studio.page import require_gradio
    from nearfield_lab.studio.server import serve

    require_gradio()
    require_matplotlib()
    models = [PictureModel(device)]
    if arguments.weights or arguments.model:
        given = PictureModel(device, arguments.weights, arguments.model)
        models = [given] + [model for model in models if model.problem is None]
    library = Library(arguments.docs, arguments.language_model, device)
    serve(arguments.host, arguments.port, models, library, arguments.open)
    print("stopped")
    return OK


def _require_free(host: str, port: int | None) -> None:
    """Refuse an address that is not this machine's, and a port that is taken, before anything is loaded."""
    hint = "Example: --host 127.0.0.1 --port 8000"
    try:  # Gradio cannot read addresses of IPv6
        found = socket.getaddrinfo(host.strip() or "?", port or 0, socket.AF_INET, socket.SOCK_STREAM)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(found[0][-1])
    except OSError as error:
        got = f"{host!r}, {port or 'any port'} ({error.strerror or error})"
        wrong("--host", "be an IPv4 address of this machine, and `--port` free there", got, hint)
