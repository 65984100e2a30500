"""`nearfield bench`: measurements on this machine."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nearfield.bench import (
    fine_cases,
    hilbert_cases,
    loglinear_cases,
    model_cases,
    pixel_cases,
    presets,
    quality_cases,
)
from nearfield.commands import pareto_benchmark, recall_benchmark, retrieval_benchmark, scaling_benchmark
from nearfield.commands.arguments import (
    FAILED,
    GRAINS,
    IMPLS,
    INTERRUPTED,
    OK,
    PLACEMENTS,
    QUERY_BLOCKS,
    UsageError,
    add_method_fields,
    add_plot,
    block_counts,
    comma_list,
    command,
    integer,
    layer_numbers,
    member,
    output_file,
    pixels,
    preset_name,
    share,
    show_help_without_command,
    wrong,
)
from nearfield.commands.generating import chosen_device, missing_extras_told
from nearfield.commands.progress import Bar
from nearfield.commands.reports import note_load, require_reports, verdict, write_reports, write_so_far


def add_commands(commands: Any) -> None:
    summary = "measure on this machine"
    bench = commands.add_parser("bench", help=summary, description=f"{summary.capitalize()}.")
    show_help_without_command(bench)
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    _add_bench_attend(benchmarks)
    _add_bench_fine(benchmarks)
    _add_bench_hilbert(benchmarks)
    _add_bench_loglinear(benchmarks)
    _add_bench_model(benchmarks)
    pareto_benchmark.add_command(benchmarks)
    _add_bench_pixel(benchmarks)
    _add_bench_quality(benchmarks)
    recall_benchmark.add_command(benchmarks)
    retrieval_benchmark.add_command(benchmarks)
    scaling_benchmark.add_command(benchmarks)


def _bench_attend(arguments: argparse.Namespace) -> int:
    require_reports("--plot", arguments.plot, arguments.json)
    import torch

    from nearfield.bench import attend, machine, report
    from nearfield.bench.cases import cases as all_cases
    from nearfield.bench.progress import Progress
    from nearfield.bench.timing import Effort
    from nearfield.plots.bars import attend_bars

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [
        presets.PRESETS[name] for name in arguments.presets or _default_presets(device.type, arguments.quick)
    ]
    cases = all_cases(
        chosen,
        arguments.grains,
        arguments.impl,
        arguments.q_block,
        device,
        backward=arguments.backward,
        ragged=arguments.ragged,
    )
    if arguments.dry_run:
        print(f"{len(cases)} measurements on {machine.device_name(device)}:", *cases, sep="\n  ")
        return OK
    note_load(device.type)
    with Progress(len(cases)) as progress:
        results = attend.run_all(cases, device, Effort.of(device, arguments.quick), progress.step)
    print(report.results_table(results))
    if arguments.quick and (note := report.too_small(results)):
        print(note)
    document = report.as_json(results, machine.facts())
    written = write_reports(
        document, arguments.json, arguments.plot, attend_bars, machine.device_name(device)
    )
    return verdict(results, written)


def _bench_hilbert(arguments: argparse.Namespace) -> int:
    require_reports("--plot", arguments.plot, arguments.json)
    import torch

    from nearfield.bench import hilbert, hilbert_report, machine
    from nearfield.bench.progress import Progress
    from nearfield.bench.timing import Effort
    from nearfield.plots.bars import hilbert_bars

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = arguments.cases or _default_cases(device.type, arguments.quick)
    cases = [hilbert_cases.CASES[name] for name in names]
    if arguments.dry_run:
        print(f"{len(cases)} measurements on {machine.device_name(device)}:", *cases, sep="\n  ")
        return OK
    note_load(device.type)
    options = hilbert.Options(
        tuple(arguments.layers), arguments.q_block, arguments.k_block, arguments.impl, arguments.flex
    )
    with Progress(len(cases)) as progress:
        effort = Effort.of(device, arguments.quick)
        results = hilbert.run_all(cases, options, device, effort, progress.step)
    print(f"{machine.device_name(device)}, {_layers_words(arguments.layers)}")
    print(hilbert_report.results_table(results))
    document = hilbert_report.as_json(results, machine.facts())
    written = write_reports(
        document, arguments.json, arguments.plot, hilbert_bars, machine.device_name(device)
    )
    return verdict(results, written)


def _bench_fine(arguments: argparse.Namespace) -> int:
    from nearfield.bench import fine

    return _bench_calls(arguments, fine, fine_cases, fine.effort)


def _bench_loglinear(arguments: argparse.Namespace) -> int:
    from nearfield.bench import loglinear
    from nearfield.bench.timing import Effort

    return _bench_calls(arguments, loglinear, loglinear_cases, Effort.of)


def _bench_calls(
    arguments: argparse.Namespace, bench: Any, cases: Any, effort: Callable[[Any, bool], Any]
) -> int:
    """Measure single calls of attention: `cases` has their tables, `bench` measures them with an `effort`.

    What is measured is written at once: whatever stops the command, it has taken minutes.
    """
    import torch

    from nearfield.bench import machine
    from nearfield.bench.progress import Progress

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = cases.QUICK | cases.CASES
    few = arguments.quick or device.type == "cpu"
    names = arguments.cases or tuple(cases.QUICK if few else cases.CASES)
    results: list[Any] = []
    is_whole, facts = True, machine.facts()
    try:
        with Progress(len(names)) as progress:
            chosen, much = [known[name] for name in names], effort(device, arguments.quick)
            for result in bench.run_all(chosen, device, much, arguments.impl, progress.step):
                results.append(result)
                write_so_far(bench.as_json(results, facts), arguments.json)
    except KeyboardInterrupt:
        if not results:
            raise
        is_whole = False
        print(f"interrupted; {len(results)} of {len(names)} were measured")
    print(machine.device_name(device))
    print(bench.results_table(results))
    written = write_reports(bench.as_json(results, facts), arguments.json)
    return verdict(results, written) if is_whole else INTERRUPTED


_HILBERT_FIELDS = ("tiles", "shared", "share", "shared_tokens", "curve", "far", "summary", "interleave")
_MERGE_FIELDS = ("ratio", "region_size", "placement")
_FINE_FIELDS = ("query_block", "grain")


def _model_case(arguments: argparse.Namespace) -> model_cases.ModelCase:
    """What was asked for; fields that the method, or the model, does not have are refused."""
    known = model_cases.ARCHITECTURES[arguments.model]
    method = arguments.method or known.methods[0]
    if method not in known.methods:
        hint = f"Methods for {arguments.model}: {', '.join(known.methods)}."
        wrong("--method", f"go with `--model {arguments.model}`", repr(method), hint)
    if arguments.layers and len(arguments.layers) != len(known.layers):
        count, example = ("two numbers of blocks joined by +", "2+4")
        if len(known.layers) == 1:
            count, example = ("one number of blocks", "4")
        got = repr("+".join(map(str, arguments.layers)))
        wrong("--layers", f"be {count}", got, f"Example: --layers {example}")

    def given(names: Sequence[str], is_allowed: bool) -> dict[str, Any]:
        found = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
        if found and not is_allowed:
            name = next(iter(found))
            wrong(f"--{name.replace('_', '-')}", f"be left out with `--method {method}`", found[name])
        return found

    shares = given(("skipped",), method == "fine").get("skipped", (model_cases.SKIPPED,))
    return model_cases.ModelCase(
        arguments.model,
        arguments.layers,
        arguments.tiny,
        given(_HILBERT_FIELDS, "hilbert" in method),
        method,
        given(_MERGE_FIELDS, "merge" in method),
        given(_FINE_FIELDS, method == "fine"),
        tuple(shares),
    )


def _bench_model(arguments: argparse.Namespace) -> int:
    case = _model_case(arguments)
    sizes = [case.size(*size) for size in arguments.sizes or ()] or case.sizes
    import torch

    from nearfield.bench import machine, model, model_report, random_model
    from nearfield.bench.progress import Progress
    from nearfield.bench.timing import Effort

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    effort = Effort(arguments.rounds, seconds=0.4 * arguments.rounds, most=10)
    results: list[Any] = []
    is_whole = True
    with Progress(len(sizes) + 2) as progress:
        try:
            progress.step(f"making {arguments.model} with random weights")
            bench = model.ModelBench(case, device, effort, arguments.impl)
        except random_model.MissingDiffusers as error:
            raise UsageError(str(error)) from None
        except random_model.TooLarge as error:
            fewer = "+".join(map(str, case.architecture.tiny_layers))
            wrong("--model", "fit into memory", error, f"Use --layers {fewer} for fewer layers, or --tiny.")
        progress.step("checking outputs")
        checked = bench.check(model.check_size(sizes))
        if not checked.passed:
            print(f"no figures: {checked}")
            return FAILED
        parameters, facts = random_model.num_parameters(bench.model), machine.facts()
        try:
            for size in sizes:
                progress.step(f"{size}: {size.tokens + case.text:,} tokens")
                results += bench.run(size)
                write_so_far(model_report.as_json(results, checked, parameters, facts), arguments.json)
        except KeyboardInterrupt:  # what was measured until then has taken minutes
            if not results:
                raise
            is_whole = False
            print("interrupted; what was measured until then:")
    print(model_report.heading(case, parameters, machine.device_name(device), bench.dtype))
    print(model_report.results_table(results))
    print(f"checked: {checked}")
    document = model_report.as_json(results, checked, parameters, facts)
    written = write_reports(document, arguments.json)
    return verdict(results, written) if is_whole else INTERRUPTED


def _bench_pixel(arguments: argparse.Namespace) -> int:
    from nearfield.bench import machine
    from nearfield.commands.training import TINY_PIXEL

    device = chosen_device(arguments.device)
    variants = [pixel_cases.read_variant(name) for name in arguments.attention]
    sizes: dict[str, int] = TINY_PIXEL if arguments.tiny else {}
    words = f"{arguments.size} px, {arguments.size**2:,} tokens x {arguments.batch}"
    words += ", compiled" if arguments.compile else ""
    with missing_extras_told():
        from nearfield.bench import pixel
        from nearfield.bench.progress import Progress
        from nearfield.bench.timing import Effort

        task = pixel.PixelTask(arguments.size, arguments.batch, arguments.compile, sizes)
        try:
            for variant in variants:
                task.config(variant)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from None
        if arguments.dry_run:
            print(
                f"training steps at {words} on {machine.device_name(device)}:",
                *(variant.name for variant in variants),
                sep="\n  ",
            )
            return OK
        note_load(device.type)
        effort = Effort(arguments.rounds, seconds=0.4 * arguments.rounds, most=10)
        bench = pixel.PixelBench(task, device, effort)
        with Progress(len(bench.lines(variants)) + 1) as progress:
            results = bench.run(variants, progress.step)
    print(f"{machine.device_name(device)}, {words}")
    print(pixel.results_table(results, task))
    document = pixel.as_json(results, task, machine.facts())
    return verdict(results, write_reports(document, arguments.json))


def _variant_name(text: str) -> str:
    try:
        return pixel_cases.read_variant(text).name
    except ValueError as error:
        raise UsageError(f"`--attention` must {error}.") from None


def _default_presets(device: str, quick: bool) -> tuple[str, ...]:
    if device == "cuda":
        return presets.QUICK_ON_CUDA if quick else presets.ON_CUDA
    return presets.QUICK_ON_CPU if quick else presets.ON_CPU


def _default_cases(device: str, quick: bool) -> tuple[str, ...]:
    if quick:
        return hilbert_cases.QUICK
    return hilbert_cases.ON_CUDA if device == "cuda" else hilbert_cases.ON_CPU


def _layers_words(layers: Sequence[int]) -> str:
    return (
        f"tiles of layer {layers[0]}"
        if len(layers) == 1
        else f"mean over layers {', '.join(map(str, layers))}"
    )


def _add_bench_attend(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "attend",
        _bench_attend,
        "time attend beside dense attention on the same tensors; a wrong answer gets no figure",
        "  nearfield bench attend --quick\n  nearfield bench attend --dry-run\n"
        "  nearfield bench attend --presets flux-2048,wan-480p --grains 64,16,1 --backward\n"
        "  nearfield bench attend --ragged --json results.json --plot results.png",
    )
    parser.add_argument(
        "--presets",
        type=comma_list(preset_name("--presets")),
        metavar="A,B",
        help=f"any of {', '.join(presets.PRESETS)}",
    )
    parser.add_argument(
        "--grains",
        type=comma_list(member("--grains", GRAINS)),
        default=[64, 16, 1],
        metavar="N,N",
        help="keys per id (default 64,16,1)",
    )
    parser.add_argument(
        "--impl",
        type=comma_list(member("--impl", IMPLS)),
        default=["auto"],
        metavar="A,B",
        help=f"any of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument(
        "--q-block",
        type=member("--q-block", QUERY_BLOCKS),
        metavar="N",
        help="queries per list (default: the preset's)",
    )
    parser.add_argument("--backward", action="store_true", help="also time the backward pass at grain 64")
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="instead of the tile row, time it and its parts, to see what mixing them costs",
    )
    parser.add_argument("--quick", action="store_true", help="one small preset and few repetitions")
    parser.add_argument(
        "--json", type=output_file("--json"), metavar="FILE", help="write results and machine facts"
    )
    add_plot(parser, "draw the results")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _add_bench_hilbert(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "hilbert",
        _bench_hilbert,
        "time one attention call of the Hilbert method, text and shared rows included, beside dense attention",
        "  nearfield bench hilbert --quick\n  nearfield bench hilbert --cases 2048-keys,2048-far --layers 0..3\n"
        "  nearfield bench hilbert --flex --json hilbert.json --plot hilbert.png",
    )
    parser.add_argument(
        "--cases",
        type=comma_list(member("--cases", tuple(hilbert_cases.CASES))),
        metavar="A,B",
        help=f"any of {', '.join(hilbert_cases.CASES)}",
    )
    parser.add_argument(
        "--layers",
        type=layer_numbers("--layers"),
        default=[1],
        metavar="N,N",
        help="whose tiles to read, averaged; 0..3 is a whole cycle (default 1, which slides)",
    )
    parser.add_argument(
        "--q-block",
        type=member("--q-block", QUERY_BLOCKS),
        metavar="N",
        help="queries per list (default: what suits the device)",
    )
    parser.add_argument(
        "--k-block",
        type=member("--k-block", GRAINS),
        metavar="N",
        help="keys per id (default: what suits the device)",
    )
    parser.add_argument(
        "--impl",
        type=member("--impl", IMPLS),
        default="auto",
        metavar="A",
        help=f"one of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument(
        "--flex", action="store_true", help="also time torch's flex_attention, compiled, with the same mask"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few repetitions")
    parser.add_argument(
        "--json", type=output_file("--json"), metavar="FILE", help="write results and machine facts"
    )
    add_plot(parser, "draw the results")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _add_bench_fine(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "fine",
        _bench_fine,
        "time fine-grained attention, its predictions and the making of its lists, beside dense attention",
        "  nearfield bench fine --quick\n"
        "  nearfield bench fine --cases wan-480p-70-128x8,wan-480p-90-192x8 --json fine.json",
    )
    _add_call_options(parser, fine_cases, "model, percent of the keys that is skipped, and blocks")


def _add_bench_loglinear(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "loglinear",
        _bench_loglinear,
        "time log-linear attention, pooling and choosing included, beside dense attention",
        "  nearfield bench loglinear --quick\n"
        "  nearfield bench loglinear --cases 1x6x65536x64,4x6x16384x64 --json loglinear.json",
    )
    _add_call_options(parser, loglinear_cases, "batch x heads x tokens x head dimension")


def _add_call_options(parser: argparse.ArgumentParser, cases: Any, meaning: str) -> None:
    names = (*cases.CASES, *cases.QUICK)
    parser.add_argument(
        "--cases",
        type=comma_list(member("--cases", names)),
        metavar="A,B",
        help=f"{meaning}: any of {', '.join(names)}",
    )
    parser.add_argument(
        "--impl",
        type=member("--impl", IMPLS),
        default="auto",
        metavar="A",
        help=f"one of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few repetitions")
    parser.add_argument(
        "--json", type=output_file("--json"), metavar="FILE", help="write results and machine facts"
    )


def _add_bench_model(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "model",
        _bench_model,
        "time one denoising step of a real architecture with random weights: dense, with a method, and with no"
        " attention at all",
        "  nearfield bench model --tiny\n  nearfield bench model --sizes 1024,2048,4096 --json model.json\n"
        "  nearfield bench model --layers 2+4 --sizes 1024 --share two-way --tiles 4\n"
        "  nearfield bench model --sizes 2048 --method merge+hilbert --ratio 0.5\n"
        "  nearfield bench model --model wan21-1.3b --sizes 480p,720p --method fine --skipped 0.7,0.9",
    )
    parser.add_argument(
        "--model",
        type=member("--model", model_cases.MODELS),
        default=model_cases.MODELS[0],
        metavar="NAME",
        help=f"one of {', '.join(model_cases.MODELS)} (default {model_cases.MODELS[0]})",
    )
    parser.add_argument(
        "--sizes",
        type=comma_list(pixels("--sizes")),
        metavar="N,HxW",
        help="pixels of the images or videos (default 1024,2048,4096; of Wan 480p,720p)",
    )
    parser.add_argument(
        "--layers",
        type=block_counts,
        metavar="N+N",
        help="fewer layers: double-stream + single-stream blocks; of Wan one number",
    )
    parser.add_argument("--tiny", action="store_true", help="a few narrow layers and a small image")
    parser.add_argument(
        "--method",
        type=member("--method", model_cases.METHODS),
        metavar="NAME",
        help=f"one of {', '.join(model_cases.METHODS)} (default hilbert; of Wan fine)",
    )
    parser.add_argument(
        "--ratio",
        type=share("--ratio"),
        metavar="X",
        help="share of the image tokens that is merged away (default 0.5)",
    )
    parser.add_argument(
        "--region-size",
        type=integer("--region-size", 1),
        metavar="N",
        help="tokens that merge among themselves",
    )
    parser.add_argument(
        "--placement",
        type=member("--placement", PLACEMENTS),
        metavar="WHERE",
        help=f"around what tokens are merged: {' or '.join(PLACEMENTS)} (default block)",
    )
    parser.add_argument(
        "--skipped",
        type=comma_list(share("--skipped")),
        metavar="X,X",
        help=f"shares of the keys that fine skips (default {model_cases.SKIPPED})",
    )
    parser.add_argument(
        "--query-block",
        type=member("--query-block", QUERY_BLOCKS),
        metavar="N",
        help="queries that share a list of keys (default 128)",
    )
    parser.add_argument(
        "--grain",
        type=member("--grain", GRAINS),
        metavar="N",
        help="keys that are kept or skipped together (default 4)",
    )
    add_method_fields(parser)
    parser.add_argument(
        "--impl",
        type=member("--impl", IMPLS),
        default="auto",
        metavar="A",
        help=f"one of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument(
        "--rounds",
        type=integer("--rounds", 2, 1000),
        default=5,
        metavar="N",
        help="turns in which everything is timed (default 5)",
    )
    parser.add_argument(
        "--json", type=output_file("--json"), metavar="FILE", help="write results and machine facts"
    )


def _add_bench_pixel(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "pixel",
        _bench_pixel,
        "time whole training steps on pixels, for every attention in turns",
        "  nearfield bench pixel --tiny --size 32 --batch 2\n"
        "  nearfield bench pixel --size 128 --batch 16 --compile --json pixel128.json\n"
        "  nearfield bench pixel --size 256 --batch 4 --attention full,loglinear:levels=2,gated:topk=32 --compile",
    )
    parser.add_argument(
        "--attention",
        type=comma_list(_variant_name),
        default=list(pixel_cases.ATTENTION),
        metavar="A,B",
        help="any of "
        + ", ".join(pixel_cases.ATTENTION)
        + ", with fields as in loglinear:levels=2 (default all)",
    )
    for name, least, most, default, words in (
        ("--size", 8, 1024, 128, "pixels per side"),
        ("--batch", 1, 4096, 16, "pictures per step"),
        ("--rounds", 2, 1000, 5, "turns in which everything is timed"),
    ):
        parser.add_argument(
            name,
            type=integer(name, least, most),
            default=default,
            metavar="N",
            help=f"{words} (default {default})",
        )
    parser.add_argument("--compile", action="store_true", help="let torch.compile make the models faster")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    parser.add_argument(
        "--json", type=output_file("--json"), metavar="FILE", help="write results and machine facts"
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _add_bench_quality(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "quality",
        _bench_quality,
        "make the embedded model's pictures with many patterns of attention, and measure them beside the dense ones",
        "  nearfield bench quality --photographs cats512 --weights run512/model.safetensors --patterns tiles,steps\n"
        "  nearfield bench quality --photographs cats512 --patterns mine.json --num 5000 --minutes 9 --out mine.json",
    )
    parser.add_argument(
        "--photographs",
        type=Path,
        required=True,
        metavar="DIR",
        help="what FID compares with: tar files or pictures",
    )
    parser.add_argument(
        "--patterns",
        default="tiles",
        metavar="A,B",
        help=f"groups ({', '.join(quality_cases.GROUPS)}), or a .json file with a list of patterns (default tiles)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="a model of `nearfield train demo` (default: the embedded one)",
    )
    parser.add_argument(
        "--inception", type=Path, metavar="FILE", help="the FID network (default: the installed package's)"
    )
    for name, least, default, words in (
        ("--num", 4, 1500, "pictures of each pattern"),
        ("--steps", 1, 16, "denoising steps"),
        ("--size", 64, 512, "pixels per side"),
        ("--seed", 0, 0, "of the noise"),
        ("--batch", 1, 64, "pictures at a time"),
    ):
        parser.add_argument(
            name, type=integer(name, least), default=default, metavar="N", help=f"{words} (default {default})"
        )
    parser.add_argument(
        "--minutes",
        type=integer("--minutes", 1),
        metavar="N",
        help="begin no further pattern after this time",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    parser.add_argument(
        "--out",
        type=output_file("--out", ".json"),
        default="quality.json",
        metavar="FILE",
        help="the results; what stands there already is not measured again (default quality.json)",
    )
    parser.add_argument(
        "--strips",
        type=Path,
        metavar="DIR",
        help="keep the first four pictures of every pattern, side by side, one file each",
    )
    add_plot(parser, "draw pairs against FID")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _bench_quality(arguments: argparse.Namespace) -> int:
    try:
        patterns = quality_cases.read_patterns(arguments.patterns)
    except ValueError as error:
        raise UsageError(f"`--patterns` must {error}.") from None
    if arguments.dry_run:
        print(f"dense and {len(patterns)} patterns:", *(pattern.name for pattern in patterns), sep="\n  ")
        return OK
    if arguments.size % 8:
        wrong("--size", "be a multiple of 8 pixels", arguments.size)
    require_reports("--plot", arguments.plot, arguments.out)
    with missing_extras_told():
        done = _swept(arguments, patterns)
    print(f"wrote {arguments.out}")
    if not done:
        print("time is up; the same command goes on", file=sys.stderr)
    return OK


def _swept(arguments: argparse.Namespace, patterns: Sequence[quality_cases.Pattern]) -> bool:
    from nearfield import quality as measures
    from nearfield.bench import quality
    from nearfield.bench.picture_runs import Task
    from nearfield.demo.generate import embedded_weights
    from nearfield.quality.inception import MissingWeights
    from nearfield.quality.results import table
    from nearfield.training import data

    started, device = time.monotonic(), chosen_device(arguments.device)
    try:
        network = measures.load_inception(arguments.inception, device)
    except MissingWeights as error:
        raise UsageError(str(error)) from None
    source = data.pictures(arguments.photographs)
    kept = arguments.out.with_name(
        f"photographs-{arguments.size}-{data.fingerprint(source)[:12]}.safetensors"
    )
    with Bar(len(source), "photographs") as bar:
        batches = data.batches(
            source, arguments.size, on_progress=lambda done, total, words: bar.show(done, words)
        )
        references = quality.photograph_statistics(batches, network, arguments.size, kept)
    task = Task(
        arguments.weights or embedded_weights(),
        *(arguments.num, arguments.steps, arguments.size, arguments.seed, arguments.batch),
    )
    with Bar(arguments.num, "pictures") as bar:
        sweep = quality.Sweep(
            task,
            references,
            network,
            arguments.out,
            networks=pareto_benchmark.second_network(device),
            device=device,
            on_picture=bar.show,
            strips=arguments.strips,
        )
        try:
            done = sweep.run(
                patterns, lambda: not arguments.minutes or time.monotonic() - started < 60 * arguments.minutes
            )
        except ValueError as error:  # fields that do not go together, or not with this size
            raise UsageError(str(error)) from None
    print(table(sweep.rows))
    if arguments.plot:
        from nearfield.plots.fronts import quality_front

        quality_front(arguments.plot, sweep.rows, f"{arguments.num:,} pictures at {arguments.size} px")
        print(f"wrote {arguments.plot}")
    return done
