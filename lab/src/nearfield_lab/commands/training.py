"""`nearfield train` and `nearfield distill`, which resume where they were stopped and end within `--minutes`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_args

import torch

from nearfield import Geometry, Method
from nearfield.cli import (
    DENSE,
    DEVICE_WORDS,
    FAILED,
    INTERRUPTED,
    OK,
    Bar,
    TakesOptions,
    add_integer,
    add_json,
    add_method,
    add_number,
    add_weights,
    as_usage,
    command,
    input_file,
    machine,
    recipe_of,
    show_help_without_command,
    write_reports,
    wrong,
)
from nearfield.methods import DEFAULT
from nearfield_lab.commands.further import Further, add_choice, add_path, add_switch
from nearfield_lab.commands.launched import chosen_device
from nearfield_lab.embedded.dense_kernels import DenseKernel
from nearfield_lab.embedded.generate import embedded_weights, open_pipeline
from nearfield_lab.embedded.model import ModelConfig, Packing, load_model, num_parameters, save_model
from nearfield_lab.embedded.pixel import PixelConfig
from nearfield_lab.training import distill, flow
from nearfield_lab.training.data import Latents, encode, fits, pictures, read_pixels
from nearfield_lab.training.loop import Diverged, Schedule
from nearfield_lab.training.pixel import PixelRecipe, PixelTraining
from nearfield_lab.training.recording import RecordedCalls, record
from nearfield_lab.training.runs import Run

PACKINGS, BACKENDS = get_args(Packing), get_args(DenseKernel)

# For trying the whole chain: minutes on a laptop, pictures of nothing much.
_TINY = {"joint_blocks": 1, "single_blocks": 3, "heads": 4, "head_dim": 32, "condition_tokens": 16}
# A step changes every weight by about the rate, and a LoRA has few.
_LORA_RATE, _FULL_RATE = 1e-3, 3e-5
TINY_PIXEL = {"layers": 2, "heads": 2, "head_dim": 32}


def add_commands(commands: Any) -> None:
    summary = "train a model"
    train = commands.add_parser("train", help=summary, description=f"{summary.capitalize()}.")
    show_help_without_command(train)
    models = train.add_subparsers(title="models", metavar="MODEL")
    _add_train_demo(models)
    _add_train_pixel(models)
    _add_distill(commands)


def _add_train_demo(models: Any) -> None:
    further = _add_trained(
        models,
        "demo",
        _train_demo,
        "train the embedded model on photographs, by flow matching",
        "  nearfield train demo --data cats512 --out run256 --minutes 60 --compile --option kernel=flash\n"
        "  nearfield train demo --data cats512 --out run512 --size 512 --start run256/model.safetensors --steps 4000\n"
        "  nearfield train demo --data cats512 --out try --tiny --size 64 --batch 16 --steps 300",
        size=(256, "pixels per side", 32, 4096),
        batch=256,
        start=("--start", "start from this model, such as one of a smaller size"),
        kept="latents",
    )
    _add_schedule(further, learning_rate=4e-4, warm_up=200)
    add_number(further, "shift", 1.0, "of the noise levels; larger sizes want more than 1", is_above=True)
    _add_results(further, "dense attention", packing="int8")


def _add_train_pixel(models: Any) -> None:
    further = _add_trained(
        models,
        "pixel",
        _train_pixel,
        "train a transformer on the pixels of photographs, with full or with trainable sparse attention",
        "  nearfield train pixel --data cats512 --out run64 --minutes 60 --batch 64 --compile\n"
        "  nearfield train pixel --data cats512 --out run128 --size 128 --method NAME"
        " --init run64/model.safetensors --minutes 60 --compile\n"
        "  nearfield train pixel --data cats512 --out try --tiny --size 32 --method NAME --steps 300",
        size=(64, "pixels per side, each a token", 8, 1024),
        batch=16,
        start=("--init", "start from this model: one of a smaller size, or one with full attention"),
        kept="pixels",
    )
    _add_schedule(further, learning_rate=1e-4, warm_up=200, average=0.9999)
    add_integer(further, "keep-steps", None, "keep the model of this step, in model-steps.safetensors")
    add_number(
        further,
        "keep-seconds",
        None,
        "keep the model when steps have taken so long, in model-seconds.safetensors; without --steps, training ends"
        " when it was kept at both",
        is_above=True,
    )
    _add_results(further, "full attention", packing="bf16")


def _add_trained(
    models: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    examples: str,
    *,
    size: tuple[int, str, int, int],
    batch: int,
    start: tuple[str, str],
    kept: str,
) -> Further:
    """A command that trains a model, with the options that both models have.

    Args:
        size: its default, what it counts, its least and its most.
        start: the option that names a model to start from, and its help.
        kept: what of photographs is kept.
    """
    parser = command(models, name, run, summary, examples)
    _add_places(parser, is_data_needed=True)
    add_integer(parser, "--size", *size)
    add_integer(parser, "--batch", batch, "pictures per step")
    _add_ends(parser)
    option, words = start
    add_path(parser, option, "FILE", words, dest="start", type=input_file(option))
    add_switch(parser, "--tiny", "a model to try the chain with, in minutes on a CPU")
    _add_compile(parser)
    add_method(parser, DENSE)
    add_json(parser)
    further = Further(parser)
    _add_kept(further, kept)
    return further


def _add_compile(parser: TakesOptions, name: str = "--compile") -> None:
    add_switch(parser, name, "let torch.compile make the model, or its blocks, faster")


def _add_results(further: Further, attention: str, packing: str) -> None:
    add_choice(further, "kernel", BACKENDS, "auto", f"torch's for {attention}")
    add_choice(further, "packing", PACKINGS, packing, "how the model is written", "HOW")
    add_integer(further, "samples", 16, "pictures on a sample sheet", least=0, most=256)
    add_number(further, "sample-seconds", 180.0, "time between sample sheets", is_above=True)
    _add_common(further)


def _add_distill(commands: Any) -> None:
    parser = command(
        commands,
        "distill",
        _distill,
        "teach a model, by a LoRA or all of its weights, to do with sparse attention what it does with dense attention",
        "  nearfield distill --data cats512 --out lora --steps 2000\n"
        "  nearfield distill --data cats512 --out lora --weights run512/model.safetensors --set tiles=16"
        " --option rank=16\n"
        "  nearfield distill --model black-forest-labs/FLUX.1-dev --prompts prompts.txt --out lora"
        " --option save-memory=true",
    )
    _add_places(parser, is_data_needed=False)
    parser.add_argument(
        "--model", metavar="ID", help="a diffusers pipeline: its id on the Hub, or its folder"
    )
    words = "one prompt per line, whose calls are learned from; for --model"
    add_path(parser, "--prompts", "FILE", words, type=input_file("--prompts"))
    add_weights(parser)
    add_integer(
        parser,
        "--size",
        None,
        "pixels per side (default: what the model was trained at)",
        least=32,
        most=4096,
    )
    add_integer(parser, "--batch", 8, "samples per step")
    _add_ends(parser)
    add_method(parser)
    add_json(parser)
    further = Further(parser)
    add_integer(further, "rank", None, "of the LoRA (default 4)", most=1024)
    add_switch(further, "full", "train all weights instead of a LoRA, and write a model; not for --model")
    add_switch(further, "save-memory", "compute activations again in the backward pass")
    _add_compile(further, "compile")
    _add_kept(further, "latents")
    add_integer(further, "denoising-steps", 20, "per prompt; for --model")
    _add_schedule(further, learning_rate=None, warm_up=50)
    words = "keep what was learned until this step, in a file whose name ends in -steps"
    add_integer(further, "keep-steps", None, words)
    _add_common(further)


def _add_places(parser: argparse.ArgumentParser, is_data_needed: bool) -> None:
    words = "photographs: tar files in a folder, or a folder of pictures"
    add_path(parser, "--data", "DIR", words, required=is_data_needed)
    add_path(parser, "--out", "DIR", "checkpoints and results", required=True)
    add_switch(parser, "--resume", "go on from the checkpoint in --out, if there is one")


def _add_kept(further: Further, kept: str) -> None:
    add_path(further, kept, "DIR", f"where the {kept} of photographs are kept (default: --out)")


def _add_ends(parser: argparse.ArgumentParser) -> None:
    """What ends a training."""
    add_integer(parser, "--steps", None, "to reach in all, over all runs")
    add_number(parser, "--minutes", None, "time for this run", is_above=True)


def _add_schedule(
    further: Further, learning_rate: float | None, warm_up: int, average: float = 0.999
) -> None:
    """Options of the loop.

    Args:
        learning_rate: the default; None: that of distilling, which depends on what is trained.
    """
    words = "after warming up"
    if learning_rate is None:
        words += f" (default {_LORA_RATE:g}, with full=true {_FULL_RATE:g})"
    add_number(further, "learning-rate", learning_rate, words, is_above=True)
    add_integer(further, "warm-up", warm_up, "steps until the full learning rate", least=0)
    add_integer(further, "cool-down", 0, "last steps, over which the learning rate falls to zero", least=0)
    add_number(further, "average", average, "decay of the moving average of the weights")
    add_integer(further, "accumulate", 1, "pieces of a batch, one after another, to save memory", most=4096)
    add_number(further, "checkpoint-seconds", 120.0, "time between checkpoints", is_above=True)


def _add_common(further: Further) -> None:
    add_integer(further, "seed", 0, "of weights, order and noise", least=0)
    further.add_argument("device", metavar="NAME", help=DEVICE_WORDS)


# -- commands ----------------------------------------------------------------------------------------------------------


Asked = TypeVar("Asked")


def _asked(kind: type[Asked], arguments: argparse.Namespace, **others: Any) -> Asked:
    """A dataclass from the options that are called like its fields, and from what is given."""
    options = {each.name: getattr(arguments, each.name, None) for each in fields(kind)}  # type: ignore[arg-type]
    named = {name: value for name, value in options.items() if hasattr(arguments, name)}
    with as_usage():
        return kind(**(named | others))


def _method(arguments: argparse.Namespace, base: Method) -> Method | None:
    recipe = recipe_of(arguments, base)
    return None if recipe is None else recipe.method


def _train_demo(arguments: argparse.Namespace) -> int:
    method = _method(arguments, DEFAULT.with_dense_steps(0))
    if arguments.start and arguments.tiny:
        wrong("--tiny", "be left out with `--start`, which brings a model", "both")
    schedule = _schedule(arguments)
    how = {"dense_kernel": arguments.kernel, "compiled": arguments.compile}
    recipe = _asked(flow.Recipe, arguments, method=method, **how)
    latents = _latents(arguments, arguments.size)
    with Bar(arguments.steps, "steps") as bar:
        with as_usage():
            training = flow.FlowTraining(
                latents,
                arguments.out,
                recipe,
                schedule,
                config=ModelConfig(**_TINY) if arguments.tiny else None,
                start=arguments.start,
                device=chosen_device(arguments.device),
                on_step=shown(bar),
            )
        begin(arguments, training)
        print(f"{num_parameters(training.model):,} parameters, {len(latents):,} latents at {recipe.size} px")
        if training.handle is not None:
            print(training.handle.summary())
        return ended(arguments, training)


def _train_pixel(arguments: argparse.Namespace) -> int:
    method = _method(arguments, DEFAULT)
    schedule = _schedule(arguments)
    sizes: dict[str, Any] = TINY_PIXEL if arguments.tiny else {}
    with as_usage(TypeError):  # fields that do not fit the size are found before photographs are read
        config = PixelConfig.of(method, size=arguments.size, **sizes)
        whole = Geometry((config.size, config.size))
        words = "full attention" if method is None else method.describe(whole)
    how = {"dense_kernel": arguments.kernel, "compiled": arguments.compile}
    recipe = _asked(PixelRecipe, arguments, config=config, **how)
    source = pictures(arguments.data)
    with Bar(len(source), "pictures") as bar:
        kept = arguments.pixels or arguments.out
        pixels = read_pixels(source, kept, config.size, on_progress=_counted(bar))
    with Bar(arguments.steps, "steps") as bar:
        with as_usage():
            training = PixelTraining(
                pixels,
                arguments.out,
                recipe,
                schedule,
                start=arguments.start,
                device=chosen_device(arguments.device),
                on_step=shown(bar),
            )
        begin(arguments, training)
        sizes_told = f"{len(pixels):,} pictures of {config.size**2:,} tokens"
        print(f"{num_parameters(training.model):,} parameters, {sizes_told}, {words}")
        return ended(arguments, training)


def _distill(arguments: argparse.Namespace) -> int:
    method = _method(arguments, DEFAULT)
    if method is None:
        wrong("--method", "be sparse: dense needs no tuning", DENSE)
    if bool(arguments.model) == bool(arguments.data):
        wrong("--data", "be given for the embedded model, or `--model` with `--prompts`", "both or none")
    if bool(arguments.model) != bool(arguments.prompts):
        wrong("--prompts", "be given with `--model`, and only there", arguments.prompts)
    if arguments.learning_rate is None:
        arguments.learning_rate = _FULL_RATE if arguments.full else _LORA_RATE
    if arguments.full and arguments.rank is not None:
        wrong("rank", "be left out with `full`, which trains no LoRA", arguments.rank)
    if arguments.full and arguments.model:
        wrong("full", "be left out with `--model`", arguments.model, "Large models are tuned by a LoRA.")
    schedule = _schedule(arguments)
    write = None
    if arguments.model:
        transformer, calls = _model_calls(arguments)
    else:
        model, calls = _demo_calls(arguments)
        transformer = model.transformer
        if arguments.full:  # in 8 bits, as the embedded model ships
            write = lambda path, facts: save_model(path, model, facts)  # noqa: E731
    if arguments.compile and not getattr(transformer, "_repeated_blocks", None):
        name = type(transformer).__name__
        wrong("compile", "be left out where diffusers cannot compile a model's blocks", name)
    how = {"compiled": arguments.compile, "is_one_size": not arguments.model}
    rank = None if arguments.full else arguments.rank or 4
    recipe = _asked(distill.Recipe, arguments, method=method, rank=rank, **how)
    with Bar(arguments.steps, "steps") as bar:
        distillation = distill.Distillation(
            transformer, calls, arguments.out, recipe, schedule, on_step=shown(bar), write=write
        )
        begin(arguments, distillation)
        return ended(arguments, distillation)


def _demo_calls(arguments: argparse.Namespace) -> tuple[Any, Any]:
    model, _ = load_model(arguments.weights or embedded_weights())
    device = chosen_device(arguments.device)
    model.to(device)
    latents = _latents(arguments, arguments.size or model.config.size)
    if fits(latents.values, device):
        latents = latents.to(device)
    with as_usage():
        return model, distill.latent_calls(
            model, latents, arguments.batch, arguments.accumulate, arguments.seed
        )


def _model_calls(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The calls that a pipeline makes for its prompts, recorded first. A step takes `--batch` of them."""
    device = chosen_device(arguments.device)
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        wrong("--prompts", "hold a prompt per line", f"{arguments.prompts}, which holds none")
    pipeline = open_pipeline(arguments.model, device)
    size = arguments.size or 1024
    with Bar(len(prompts), "prompts") as bar:
        files = record(
            pipeline,
            prompts,
            arguments.out / "calls",
            seed=arguments.seed,
            on_progress=_counted(bar),
            height=size,
            width=size,
            num_inference_steps=arguments.denoising_steps,
        )
    return pipeline.transformer, RecordedCalls(files, arguments.batch, device, arguments.seed)


def _schedule(arguments: argparse.Namespace) -> Schedule:
    keep = [getattr(arguments, name, None) for name in ("keep_steps", "keep_seconds")]
    if (arguments.steps, arguments.minutes, *keep) == (None,) * 4:
        wrong("--steps", "be given, or `--minutes`", None, "Training has to end somewhere.")
    # Recorded calls come one by one, so a step has as many parts as samples.
    parts = arguments.batch if getattr(arguments, "model", None) else arguments.accumulate
    return _asked(Schedule, arguments, parts=parts)


def _latents(arguments: argparse.Namespace, size: int) -> Latents:
    source = pictures(arguments.data)
    device, kept = chosen_device(arguments.device), arguments.latents or arguments.out
    with Bar(len(source), "pictures") as bar, as_usage():
        return encode(source, kept, size, device=device, on_progress=_counted(bar))


def _counted(bar: Bar) -> Callable[[int, int, str], None]:
    return lambda done, total, words: bar.show(done, words, total)


def shown(bar: Bar) -> Callable[[int, float | None], None]:
    return lambda step, loss: bar.show(step, "" if loss is None else f"loss {loss:.4g}")


def begin(arguments: argparse.Namespace, training: Run) -> None:
    """Resume from a checkpoint if that was asked for; refuse to write over one otherwise."""
    if not training.can_resume:
        return
    if not arguments.resume:
        hint = "Add --resume, or name another folder."
        wrong("--out", "hold no checkpoint unless `--resume` is given", str(arguments.out), hint)
    training.resume()
    print(f"resumed at step {training.loop.step:,}")


def ended(arguments: argparse.Namespace, training: Run) -> int:
    """Run, then say and write what came of it."""
    first = training.loop.step
    try:
        outcome = training.run()
    except Diverged as error:
        print(f"nearfield: error: {error}", file=sys.stderr)
        return FAILED
    except torch.OutOfMemoryError:
        hint = "Compute it in pieces: --option accumulate=2, or 4 ..."
        wrong("--batch", "fit into the device's memory", arguments.batch, hint)
    reasons = {"steps": "all steps done", "minutes": "time is up", "stopped": "stopped; go on with --resume"}
    done = outcome.step - first
    speed = f", {done * arguments.batch / outcome.seconds:,.1f} samples/s" if done else ""
    if done and outcome.tokens_per_second:
        speed += f", {outcome.tokens_per_second:,.0f} tokens/s without pauses"
    print(f"step {outcome.step:,}: loss {outcome.loss:.4g}{speed} ({reasons[outcome.ending]})")
    print(f"wrote {arguments.out / training.result}")
    document = {
        "format": 1,
        "command": "train",
        "machine": machine.facts(),
        "step": outcome.step,
        "ending": outcome.ending,
        "loss": outcome.loss if done else None,
        "seconds": outcome.seconds,
        "training_seconds": outcome.training_seconds,
        "steps_of_this_run": done,
        "tokens_per_second": outcome.tokens_per_second,
        "batch": arguments.batch,
    }
    if not write_reports(document, arguments.json):
        return FAILED
    return INTERRUPTED if outcome.ending == "stopped" else OK
