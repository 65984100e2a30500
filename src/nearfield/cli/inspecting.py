"""`nearfield doctor`, `explain` and `bench`: what there is, what a method comes to, and how fast one call of it is."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from nearfield.cli import methods, presets
from nearfield.cli.arguments import (
    FAILED,
    OK,
    UsageError,
    command,
    grid_sides,
    layer_numbers,
    pixels,
    preset_name,
    wrong,
)
from nearfield.cli.options import add_device, add_impl, add_integer, add_json, add_plot, device_of
from nearfield.cli.reports import note_load, write_reports
from nearfield.methods import Composition

if TYPE_CHECKING:
    import torch

    from nearfield import Method
    from nearfield.cli.explain import Explained
    from nearfield.cli.steps import StepBench

_DEFAULT = "flux-1024"
"""The preset whose numbers of heads, layers and text tokens count where none is named."""


def add_commands(commands: Any) -> None:
    _add_doctor(commands)
    _add_explain(commands)
    _add_bench(commands)


def _doctor(arguments: argparse.Namespace) -> int:
    from nearfield.cli import doctor

    report = doctor.examine()
    print(json.dumps(report, indent=1) if arguments.json else doctor.text(report))
    return OK if report["ok"] else FAILED


def _explain(arguments: argparse.Namespace) -> int:
    from nearfield.cli import explain

    if not _asks(arguments):
        found = explain.overview()
        print(json.dumps(found, indent=1) if arguments.json else explain.overview_text(found))
        return OK
    method = _method(arguments)
    preset = _preset(arguments, method, arguments.preset or _DEFAULT)
    for layer in arguments.layer or ():
        if layer >= preset.layers:
            wrong("--layer", f"be below the {preset.layers} layers of {preset.name}", layer)
    try:
        shown = explain.Explained(preset, method, arguments.layer, device_of(arguments.device))
        report = explain.record(shown)
    except ValueError as error:  # fields that do not go together, or not with this grid
        raise UsageError(str(error)) from None
    if arguments.plot:
        _draw(arguments, shown)
    if arguments.json:
        print(json.dumps(report | {"picture": str(arguments.plot) if arguments.plot else None}, indent=1))
        return OK
    print(explain.text(shown, report))
    if arguments.preset is None and arguments.recipe is None:
        print(f"\nfields of {arguments.method}:", *methods.field_lines(arguments.method), sep="\n")
    if arguments.plot:
        print(f"wrote {arguments.plot}")
    return OK


def _asks(arguments: argparse.Namespace) -> bool:
    """Whether more than the names of what there is was asked for."""
    return bool(
        arguments.preset
        or arguments.grid
        or arguments.recipe
        or arguments.settings
        or arguments.layer
        or arguments.plot
        or arguments.is_method_given
    )


def _bench(arguments: argparse.Namespace) -> int:
    from nearfield.cli import bench
    from nearfield.cli.timing import Effort

    method, device = _method(arguments), device_of(arguments.device)
    note_load(device.type)
    effort = Effort.of(device, arguments.quick)
    try:
        if arguments.model:
            from nearfield.cli import steps

            step = _step(arguments, method, device)
            found = step.run(effort)
            shown, document, passed = steps.text(step, found), steps.document(step, found), found.passed
        else:
            call = bench.Bench(
                _bench_preset(arguments, method, device), method, arguments.layer, device, arguments.impl
            )
            measured = call.run(effort)
            shown, document = bench.text(call, measured), bench.document(call, measured)
            passed = measured.passed
    except (ValueError, NotImplementedError) as error:  # fields that do not fit, or an implementation
        raise UsageError(str(error)) from None
    print(shown)
    return OK if write_reports(document, arguments.json) and passed else FAILED


def _bench_preset(arguments: argparse.Namespace, method: "Method", device: "torch.device") -> presets.Preset:
    if Composition.of(method).merge is not None:
        hint = "What merging saves shows in a whole step: `nearfield bench --model`."
        wrong("--method", "be one that says who reads whom", repr(arguments.method), hint)
    if arguments.size or arguments.frames:
        wrong("--model", "be given with `--size` and `--frames`", None)
    quick = presets.QUICK_ON_CUDA if device.type == "cuda" else presets.QUICK_ON_CPU
    usual = presets.ON_CUDA if device.type == "cuda" else presets.ON_CPU
    return _preset(arguments, method, arguments.preset or (quick if arguments.quick else usual)[0])


def _step(arguments: argparse.Namespace, method: "Method", device: "torch.device") -> "StepBench":
    from nearfield.cli.bench import usual_dtype
    from nearfield.cli.steps import StepBench
    from nearfield.diffusers import open_model

    for name in ("preset", "grid", "heads"):
        if getattr(arguments, name) is not None:
            shown = "PRESET" if name == "preset" else f"--{name}"
            wrong(shown, "be left out with `--model`", getattr(arguments, name), "Say --size, in pixels.")
    try:
        opened = open_model(arguments.model, device, usual_dtype(device))
    except (ImportError, OSError) as error:
        hint = "It needs `pip install 'nearfield[diffusers]'`." if isinstance(error, ImportError) else ""
        wrong("--model", "name a folder or a model of diffusers", f"{arguments.model!r} ({error})", hint)
    height, width = arguments.size or (1024, 1024)
    pixels = height, width, arguments.frames or 1
    return StepBench(arguments.model, opened, method, pixels, arguments.text, device, arguments.impl)


def _method(arguments: argparse.Namespace) -> "Method":
    recipe = methods.recipe_of(arguments)
    if recipe is None:
        wrong("--method", "be sparse", methods.DENSE)
    return recipe.method


def _preset(arguments: argparse.Namespace, method: "Method", name: str) -> presets.Preset:
    """What was named, with what was changed. Without a name, a method that takes no text is shown without."""
    text = arguments.text
    if arguments.preset is None and text is None and not method.takes_text:
        text = 0
    return presets.PRESETS[name].changed(arguments.grid, text, arguments.heads)


def _draw(arguments: argparse.Namespace, shown: "Explained") -> None:
    from nearfield.cli.drawing import drawer

    drawer()(arguments.plot, shown.geometry, shown.method, shown.layers)


def _add_doctor(commands: Any) -> None:
    summary = "versions, devices, which implementation runs and why, and a self-check"
    parser = command(commands, "doctor", _doctor, summary, "  nearfield doctor\n  nearfield doctor --json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_explain(commands: Any) -> None:
    parser = command(
        commands,
        "explain",
        _explain,
        "who reads whom with a method, what that saves at most, and what would run it; alone: what there is",
        "  nearfield explain\n  nearfield explain flux-2048\n"
        "  nearfield explain flux-1024 --set near=tile --set shared=centre --layer 0..3 --plot tiles.png\n"
        "  nearfield explain --method NAME --grid 90x160 --text 0\n"
        "  nearfield explain wan-480p --grid 21x45x80 --json",
    )
    parser.add_argument(
        "preset",
        metavar="PRESET",
        nargs="?",
        type=preset_name("PRESET"),
        help=f"the call of a model: {', '.join(presets.PRESETS)} (default: heads and text of {_DEFAULT})",
    )
    methods.add_method(parser)
    _add_shape(parser)
    parser.add_argument(
        "--layer",
        type=layer_numbers("--layer"),
        metavar="N..N",
        help="layers: 2, 0,2 or 0..3 (default 0..3, or 0 where these read alike)",
    )
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_plot(parser, "draw the method on the image, with nearfield-lab", ".png", ".svg")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """What of a preset may be said otherwise."""
    parser.add_argument(
        "--grid", type=grid_sides, metavar="HxW", help="image tokens per side, or frames x height x width"
    )
    add_integer(parser, "--text", None, "text tokens (default: as many as is usual)", least=0, most=2**13)
    add_integer(parser, "--heads", None, "heads (default: the preset's)", most=2**16)


def _add_bench(commands: Any) -> None:
    parser = command(
        commands,
        "bench",
        _bench,
        "how fast a method is on this machine, in turns with dense attention: one attention call, or one call of your"
        " model; a wrong answer gets no figure",
        "  nearfield bench --quick\n  nearfield bench flux-2048 --set tiles=32 --json bench.json\n"
        "  nearfield bench --method NAME --grid 90x160 --text 256\n"
        "  nearfield bench --model FLUX.1-dev --size 2048 --json step.json",
    )
    parser.add_argument(
        "preset",
        metavar="PRESET",
        nargs="?",
        type=preset_name("PRESET"),
        help=f"the shape of the call: {', '.join(presets.PRESETS)} (default {presets.ON_CUDA[0]}; without a GPU"
        f" {presets.ON_CPU[0]})",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="instead, a diffusers pipeline or transformer: a folder, or a name on the Hub; where a folder has only a"
        " configuration, weights are random",
    )
    parser.add_argument(
        "--size", type=pixels, metavar="N", help="of --model, in pixels: N or HxW (default 1024)"
    )
    add_integer(parser, "--frames", None, "of --model, where it makes videos")
    methods.add_method(parser)
    _add_shape(parser)
    add_integer(parser, "--layer", 0, "which layer of the model it is", least=0, most=2**16)
    add_impl(parser)
    add_device(parser)
    parser.add_argument(
        "--quick", action="store_true", help="a small shape where there is no GPU, few repetitions"
    )
    add_json(parser)
