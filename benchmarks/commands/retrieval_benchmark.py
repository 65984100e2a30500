"""The benchmark `retrieval`: how near reuse comes to full prefill, and how much sooner the first token is there."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearfield.cli.arguments import (
    INTERRUPTED,
    OK,
    UsageError,
    comma_list,
    command,
    integer,
    member,
    number,
    output_file,
    wrong,
)
from nearfield.cli.options import add_device, add_integer, add_plot
from nearfield.cli.progress import Bar, time_for
from nearfield.cli.reports import collect, list_measurements, note_load, verdict, write_reports
from nearfield_lab.commands import retrieval_cases as cases
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.commands.generating import chosen_device
from nearfield_lab.commands.retrieving import retrieval_told

_MODELS = (cases.EMBEDDED, *cases.ARCHITECTURES)


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "retrieval",
        _bench_retrieval,
        "compare reuse of document caches with full prefill: what is said (--questions), or how soon (--speed)",
        "  python -m benchmarks retrieval --questions multihop.json --out fidelity.json --plot fidelity.png\n"
        "  python -m benchmarks retrieval --questions multihop.json --answers --out answers.json\n"
        "  python -m benchmarks retrieval --speed\n"
        "  python -m benchmarks retrieval --speed --models llama-3.1-8b,qwen3-14b --lengths 8192,16384,32768,65536",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="JSON: a list of objects with `question` and `passages` of `title` and `text`, and `answer` for --answers",
    )
    what.add_argument("--speed", action="store_true", help="time to the first token, each step apart")
    parser.add_argument(
        "--answers",
        action="store_true",
        help="for --questions: how many words of short answers are right (F1), instead of how near they come to full"
        " prefill",
    )
    parser.add_argument(
        "--models",
        type=comma_list(str),
        default=[cases.EMBEDDED],
        metavar="A,B",
        help=f"any of {', '.join(_MODELS)} (random weights but for the first), or folders of transformers"
        f" (default {cases.EMBEDDED}); one for --questions",
    )
    parser.add_argument(
        "--lengths",
        type=comma_list(integer("--lengths", 128)),
        metavar="N,N",
        help=f"tokens of context for --speed (default {cases.EMBEDDED_LENGTH}; on a GPU "
        f"{','.join(map(str, cases.LENGTHS))})",
    )
    parser.add_argument(
        "--selectors",
        type=comma_list(member("--selectors", (*cases.SELECTORS, "all"))),
        metavar="A,B",
        help=f"any of {', '.join(cases.SELECTORS)}, all (default: the first five; for --speed infoflow)",
    )
    parser.add_argument(
        "--ratios",
        type=comma_list(number("--ratios", least=0)),
        metavar="X,X",
        help="shares of tokens to compute again (default 0.05,0.15,0.3; for --speed 0.15)",
    )
    add_integer(parser, "--chunk-tokens", 1024, "tokens per chunk for --speed", least=16)
    add_integer(parser, "--question-tokens", 64, "tokens of question for --speed")
    add_integer(
        parser, "--answer-tokens", 16, "tokens of each answer that are compared, or with --answers said"
    )
    add_integer(parser, "--rounds", 5, "turns in which everything is timed")
    add_integer(parser, "--minutes", None, "begin no further question after this time")
    add_integer(parser, "--num", None, "the first N questions only")
    add_device(parser)
    parser.add_argument(
        "--out",
        type=output_file("--out", ".json"),
        metavar="FILE",
        help="the results; questions that stand there already are not measured again",
    )
    add_plot(parser, "for --questions: draw divergence against ratio")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _bench_retrieval(arguments: argparse.Namespace) -> int:
    for ratio in arguments.ratios or ():
        if ratio > 1:
            wrong("--ratios", "lie between 0 and 1", ratio)
    for name in arguments.models:
        if name not in _MODELS and not Path(name).is_dir():
            wrong("--models", f"be any of {', '.join(_MODELS)}, or folders", repr(name))
    if arguments.plot and (arguments.speed or arguments.answers):
        rule = "be given with `--questions`, and without `--answers`"
        wrong("--plot", rule, str(arguments.plot))
    if arguments.speed:
        if arguments.answers:
            wrong("--answers", "be given with `--questions`", "`--speed`")
        return _speed(arguments)
    return _ask(arguments)


def _speed(arguments: argparse.Namespace) -> int:
    device = chosen_device(arguments.device)
    with retrieval_told():
        from benchmarks import retrieval_speed
        from nearfield.cli import machine

        lengths = arguments.lengths or (cases.LENGTHS if device.type == "cuda" else (cases.EMBEDDED_LENGTH,))
        wanted = [
            retrieval_speed.SpeedCase(
                model, length, arguments.chunk_tokens, arguments.question_tokens, ratio, selector
            )
            for model in arguments.models
            for length in lengths
            for selector in arguments.selectors or ["infoflow"]
            for ratio in arguments.ratios or [0.15]
        ]
        if arguments.dry_run:
            return list_measurements(wanted, device)
        note_load(device.type)
        facts = machine.facts()
        with Bar(len(wanted), "cases") as bar:
            measured = retrieval_speed.run_all(wanted, device, arguments.rounds, bar.show)
            results, is_whole = collect(measured, lambda some: _speed_document(some, facts), arguments.out)
    if not is_whole:
        print(f"interrupted; {len(results)} of {len(wanted)} were measured")
    print(retrieval_speed.table(results))
    written = write_reports(_speed_document(results, facts), arguments.out)
    return verdict(results, written) if is_whole else INTERRUPTED


def _speed_document(results: Sequence[Any], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "command": "bench retrieval --speed",
        "machine": facts,
        "results": [result.as_record() for result in results],
    }


def _ask(arguments: argparse.Namespace) -> int:
    questions = _questions(arguments)
    selectors, ratios = arguments.selectors or cases.SELECTORS, arguments.ratios or cases.RATIOS
    if len(arguments.models) != 1 or arguments.models[0] in cases.ARCHITECTURES:
        wrong("--models", "be one model with weights", ",".join(arguments.models))
    if arguments.dry_run:
        print(f"{len(questions)} questions, {', '.join(selectors)} at {', '.join(map(str, ratios))}")
        return OK
    if arguments.out is None:
        wrong("--out", "be given with `--questions`", None, "A run that is stopped goes on from it.")
    require_reports("--plot", arguments.plot, arguments.out)
    with retrieval_told():
        from benchmarks.retrieval_answers import AnswerEvaluation
        from benchmarks.retrieval_fidelity import FidelityEvaluation

        model, tokenizer, name = _model(arguments)
        evaluation = (AnswerEvaluation if arguments.answers else FidelityEvaluation)(
            model,
            tokenizer,
            arguments.out,
            name=name,
            selectors=selectors,
            ratios=ratios,
            num_tokens=arguments.answer_tokens,
        )
        with Bar(len(questions), "questions") as bar:
            done = evaluation.run(questions, time_for(arguments.minutes), bar.show)
    document = evaluation.document()
    print(evaluation.table())
    if not done:
        print("time is up; the same command goes on", file=sys.stderr)
    if arguments.plot:
        from nearfield_lab.plots.lines import fidelity_lines

        title = f"{name}, {len(document['questions'])} questions"
        fidelity_lines(arguments.plot, document["results"], title)
        print(f"wrote {arguments.plot}")
    print(f"wrote {arguments.out}")
    return OK


def _questions(arguments: argparse.Namespace) -> list[Any]:
    import json

    if not arguments.questions.is_file():
        wrong("--questions", "name a file that is there", repr(str(arguments.questions)))
    with retrieval_told():
        from benchmarks.retrieval_questions import read_questions

        try:
            found = read_questions(arguments.questions)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"`--questions` must hold a list of objects with `question` and `passages`; got {error!r}."
            ) from None
    chosen = found[: arguments.num]
    if arguments.answers and not all(question.answer for question in chosen):
        wrong("--questions", "have an `answer` each for `--answers`", repr(str(arguments.questions)))
    return chosen


def _model(arguments: argparse.Namespace) -> tuple[Any, Any, str]:
    import torch

    from nearfield.retrieval.embedded import NAME, load_embedded, load_folder

    device = chosen_device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    (wanted,) = arguments.models
    if wanted == cases.EMBEDDED:
        return (*load_embedded(device, dtype), NAME)
    return (*load_folder(wanted, device, dtype), Path(wanted).name)
