"""`nearfield tune`: the boldest fields that keep a model's pictures close to its dense ones, as a recipe."""

import argparse
import json
from pathlib import Path
from typing import Any

from nearfield import Method, apply, recipes
from nearfield._files import read_json, write_json
from nearfield.cli import (
    DENSE,
    FAILED,
    OK,
    UsageError,
    add_method,
    add_number,
    add_plot,
    command,
    method_of,
    output_file,
    settings_of,
    time_for,
    wrong,
)
from nearfield.methods import fields
from nearfield_lab import tuning
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.commands.further import Further, add_path
from nearfield_lab.commands.generating import (
    add_further_pictures,
    add_model,
    add_pictures,
    check_model,
    measures,
)
from nearfield_lab.commands.many import opened, sampler_of
from nearfield_lab.embedded import generate
from nearfield_lab.plots.fronts import tuning_front
from nearfield_lab.tuning import Figures, Search, Trial

_SETTINGS = ("model", "prompt", "size", "steps", "seed", "num")


def add_commands(commands: Any) -> None:
    parser = command(
        commands,
        "tune",
        _tune,
        "find the boldest fields that keep a model's pictures close to its dense ones, and write them as a recipe",
        "  nearfield tune --max-lpips 0.1 --out recipe.json\n"
        "  nearfield tune black-forest-labs/FLUX.1-dev --prompt 'a cat' --size 2048 --minutes 60",
    )
    parser.add_argument(
        "pipeline", nargs="?", metavar="MODEL", help="the same as --model (default: the embedded model)"
    )
    add_pictures(parser, steps=12, num=2)
    add_model(parser)
    add_method(parser, takes_dense=False, takes_recipe=False)
    add_number(
        parser, "--max-lpips", 0.1, "mean distance to the dense pictures that is allowed", is_above=True
    )
    add_number(parser, "--minutes", None, "stop after X minutes; the same command goes on", is_above=True)
    words = "the recipe (default recipe.json); trials are kept in FILE.trials"
    add_path(parser, "--out", "FILE", words, type=output_file("--out"), default="recipe.json")
    add_plot(parser, "draw pairs kept against distance")
    add_further_pictures(Further(parser))


def _tune(arguments: argparse.Namespace) -> int:
    if arguments.pipeline and arguments.model:
        wrong("--model", "be left out where MODEL is given", repr(arguments.model))
    arguments.model = arguments.pipeline or arguments.model
    check_model(arguments)
    require_reports("--plot", arguments.plot)
    method = method_of(arguments)
    if method is None:
        wrong("--method", "be sparse: dense has nothing to seek", DENSE)
    search, model = _search(arguments, method)
    is_done = search.run(time_for(arguments.minutes))
    print("what nothing else beats, from the closest to the boldest:")
    for trial in tuning.front([trial for trial in search.trials if trial.purpose == "search"]):
        print(_line(trial, search))
    if arguments.plot:
        tuning_front(arguments.plot, search.trials, arguments.max_lpips)
        print(f"wrote {arguments.plot}")
    if not is_done:
        print("time is up; run the same command again to go on")
    return _write_recipe(arguments, search, model)


def _search(arguments: argparse.Namespace, method: Method) -> tuple[Search, str]:
    """Makes the dense pictures, reads what an earlier run has found, and says every trial; also names the model."""
    try:
        ladders = tuning.ladders_of(method, held=settings_of(arguments))
    except ValueError as error:
        raise UsageError(str(error).replace("`method`", "`--method`")) from None
    pipeline = opened(arguments)
    sample = sampler_of(arguments, pipeline)
    dense = generate.run_dense(sample)
    distance = measures(arguments.device, dense.images).get("lpips")
    if distance is None:
        wrong("--size", "be at least 64 pixels, for LPIPS", arguments.size)

    def evaluate(method: Any) -> Figures:
        with apply(pipeline, method) as handle:
            images, seconds = sample()
            kept = handle.pairs_kept()
        assert kept is not None  # the method decides, not queries and keys
        run = generate.Run("", images, seconds)
        return Figures(distance(dense.images, images), kept, run.seconds_per_step)

    path = Path(f"{arguments.out}.trials")
    weights = str(arguments.weights) if arguments.weights else None
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    settings |= {"weights": weights, "method": fields.as_document(method)}
    with apply(pipeline, method) as handle:
        num_layers = handle.num_layers
    search = Search(
        method,
        evaluate,
        num_layers,
        dense.seconds_per_step,
        arguments.max_lpips,
        ladders=ladders,
        known=_known(path, settings, method),
        on_trial=lambda trial: _keep(path, settings, search, trial),
    )
    print(f"dense: {dense.seconds_per_step:.3f} s per step; {len(search.trials)} trials are known")
    return search, type(pipeline.transformer).__name__


def _known(path: Path, settings: dict[str, Any], method: Method) -> list[Trial]:
    """Trials of an earlier run with the same pictures."""
    if not path.exists():
        return []
    document = read_json(path, {"settings": dict, "trials": list})
    if document["settings"] != json.loads(json.dumps(settings)):
        wrong(
            "--out",
            "name another file, or be used with the settings it was begun with",
            str(path),
            f"Those are {document['settings']}.",
        )
    return tuning.from_records(document["trials"], method, path)


def _keep(path: Path, settings: dict[str, Any], search: Search, trial: Trial) -> None:
    write_json(path, {"settings": settings, "trials": tuning.as_records(search.trials)})
    print(_line(trial, search), flush=True)


def _line(trial: Trial, search: Search) -> str:
    mark = " " if trial.lpips <= search.max_lpips else "x"
    figures = f"LPIPS {trial.lpips:.4f}  {trial.pairs_kept:6.1%} of the pairs  {trial.speed_up:5.2f}x"
    return f"{mark} {figures}  {trial.purpose}: {tuning.changed(search.method, trial.fields).label}"


def _write_recipe(arguments: argparse.Namespace, search: Search, model: str) -> int:
    best = search.best
    if best is None:
        nearest = min((trial.lpips for trial in search.trials), default=float("nan"))
        print(f"no recipe: nothing keeps within LPIPS {arguments.max_lpips:g}; the nearest is {nearest:.4f}")
        return FAILED
    measured = {
        "lpips": best.lpips,
        "pairs_kept": best.pairs_kept,
        "speed_up": best.speed_up,
        **{name: getattr(arguments, name) for name in _SETTINGS},
    }
    method = tuning.changed(search.method, best.fields)
    recipe = recipes.Recipe(method, model=model, measured=measured, lora="none")
    write_json(Path(arguments.out), recipe.as_document())
    print(
        f"wrote {arguments.out}: {best.pairs_kept:.1%} of the pairs, {best.speed_up:.2f}x, LPIPS {best.lpips:.4f}"
    )
    return OK
