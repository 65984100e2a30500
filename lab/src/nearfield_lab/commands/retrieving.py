"""`nearfield rag`: an answer from a folder of texts whose keys and values are computed once and kept."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nearfield.cli import (
    FAILED,
    OK,
    Bar,
    UsageError,
    add_device,
    add_integer,
    add_json,
    add_number,
    add_plot,
    as_usage,
    command,
    machine,
    write_reports,
    wrong,
)
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.commands.further import add_choice, add_path, add_switch
from nearfield_lab.commands.launched import chosen_device
from nearfield_lab.plots.lines import fidelity_lines

if TYPE_CHECKING:  # which imports transformers
    from nearfield.retrieval import Answer, Compared, Reuse, Teacher

_ENDINGS = (".txt", ".md", ".rst")
_PLOTTED = (0.05, 0.15, 0.3, 0.6)
_COMPARED_TOKENS = 16
SELECTORS = ("none", "random", "epic", "cacheblend", "infoflow")
NAMES = (*SELECTORS, "all")
_FIXED = ("none", "all")


def add_commands(commands: Any) -> None:
    parser = command(
        commands,
        "rag",
        _rag,
        "answer a question from a folder of texts, reusing the keys and values of each text",
        "  nearfield rag --docs notes/ --ask 'Who wrote the first report?'\n"
        "  nearfield rag --docs notes/ --ask '...' --store cache/ --compare --plot fidelity.png\n"
        "  nearfield rag --docs notes/ --ask '...' --model my-llama/ --ratio 0.3 --reorder --json answer.json",
    )
    add_path(parser, "--docs", "DIR", f"texts: {', '.join(_ENDINGS)}", required=True)
    parser.add_argument("--ask", required=True, metavar="TEXT", help="the question")
    small = "default: SmolLM2-135M-Instruct, where its package is installed"
    add_path(parser, "--model", "DIR", f"a folder of transformers ({small})")
    parser.add_argument(
        "--store", metavar="PLACE", help="a folder or fsspec URL to keep chunks in (default: memory)"
    )
    add_integer(parser, "--chunk-tokens", 512, "tokens per chunk, at most", least=16)
    add_integer(parser, "--top", 8, "chunks to answer from; those that share most words with the question")
    add_integer(parser, "--max-new-tokens", 64, "tokens of the answer, at most")
    add_number(parser, "--ratio", 0.15, "share of the tokens to compute again")
    add_choice(parser, "--selector", NAMES, "infoflow", "which tokens those are")
    add_switch(parser, "--reorder", "put the chunks that the question attends to most last")
    add_switch(parser, "--compare", "compare all selectors with full prefill")
    add_device(parser)
    add_json(parser, "write everything and machine facts")
    add_plot(parser, "draw fidelity against ratio for all selectors")


def _rag(arguments: argparse.Namespace) -> int:
    if arguments.ratio > 1:
        wrong("--ratio", "lie between 0 and 1", arguments.ratio)
    if not arguments.ask.strip():
        wrong("--ask", "hold a question", repr(arguments.ask))
    require_reports("--plot", arguments.plot, arguments.json)
    texts = read_texts(arguments.docs)
    with retrieval_told():
        print("loading the model", file=sys.stderr)
        reuse = opened(arguments.model, chosen_device(arguments.device), arguments.store)
        parts = chosen_parts(reuse, texts, arguments.ask, arguments.chunk_tokens, arguments.top)
        with Bar(len(parts), "chunks") as bar:
            identities = added(reuse, parts, bar.show)
        answer = reuse.answer(
            arguments.ask,
            list(identities),
            arguments.ratio,
            arguments.selector,
            arguments.reorder,
            max_new_tokens=arguments.max_new_tokens,
        )
        print("full prefill, for comparison", file=sys.stderr)
        cases = _cases(arguments)
        with Bar(len(cases), "comparisons") as bar:
            teacher, rows, _ = compared(reuse, answer, arguments.ask, cases, bar.show)
    names = [identities[identity] for identity in answer.report.chunks]
    print(f"{answer.text.strip()}\n")
    for index, name in enumerate(names):
        again, length = answer.report.selected[index], answer.report.lengths[index]
        place = f", rank {answer.report.ranks[index] + 1}" if answer.report.ranks else ""
        print(f"  {name}: {length} tokens, {again} computed again{place}")
    print(f"{answer.report}\n\n{table(teacher.seconds, rows)}")
    document = _document(arguments, answer, teacher, rows, names)
    if arguments.plot:
        fidelity_lines(arguments.plot, document["compared"], arguments.ask)
        print(f"wrote {arguments.plot}")
    return OK if write_reports(document, arguments.json) else FAILED


def read_texts(folder: Path) -> dict[str, str]:
    """The texts of a folder and the folders in it, by their names there."""
    if not folder.is_dir():
        wrong("--docs", "name a folder that is there", repr(str(folder)))
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
    found = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            wrong("--docs", "hold texts in UTF-8", repr(str(path)))
        if text:
            found[path.relative_to(folder).as_posix()] = text
    if not found:
        wrong("--docs", f"hold texts that end in {', '.join(_ENDINGS)}", repr(str(folder)))
    return found


@contextmanager
def retrieval_told() -> Iterator[None]:
    """A missing package, and a model or value that cannot be used, are matters of usage."""
    absent = [name for name in ("transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if absent:
        raise UsageError(
            f"Retrieval needs {' and '.join(absent)}. Install with `pip install 'nearfield[retrieval]'`."
        )
    from nearfield.retrieval import MissingModel

    try:
        with as_usage(NotImplementedError):
            yield
    except MissingModel as error:
        raise UsageError(f"{error} Option: `--model`.") from None


def opened(folder: Path | None, device: torch.device, store: str | None = None) -> "Reuse":
    """A model that answers: out of a folder, or the small one of its own package; checked before it is trusted."""
    from nearfield.retrieval import ChunkStore, Reuse, load_embedded, load_folder, verify

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = load_embedded(device, dtype) if folder is None else load_folder(folder, device, dtype)
    verify(model)
    return Reuse(model, tokenizer, ChunkStore(store))


def chosen_parts(
    reuse: "Reuse", texts: Mapping[str, str], question: str, chunk_tokens: int, top: int
) -> dict[str, Tensor]:
    """Parts of the texts, by name: those most about the question, in the order of the folder."""
    from nearfield.retrieval import rank, token_ids

    parts: dict[str, Tensor] = {}
    for name, text in texts.items():
        pieces = reuse.split(text, chunk_tokens)
        for index, piece in enumerate(pieces):
            parts[name if len(pieces) == 1 else f"{name}, part {index + 1}"] = piece
    best = rank(token_ids(reuse.tokenizer, question), list(parts.values()))[:top]
    names = list(parts)
    return {names[index]: parts[names[index]] for index in sorted(best)}


def added(
    reuse: "Reuse", parts: Mapping[str, Tensor], on_part: Callable[[int], None] = lambda _: None
) -> dict[str, str]:
    """Compute the parts that the store does not have; the name of each by its identity in the store."""
    identities = {}
    for index, (name, part) in enumerate(parts.items()):
        on_part(index)
        identities[reuse.add(part)] = name
    return identities


def compared(
    reuse: "Reuse",
    answer: "Answer",
    question: str,
    cases: Sequence[tuple[Any, float]],
    on_case: Callable[[int], None] | None = None,
) -> tuple["Teacher", list["Compared"], Tensor]:
    """Full prefill of the prompt of an answer, selectors and ratios compared with it, and the tokens of the context."""
    from nearfield.retrieval import assemble, compare, question_ids, teacher_of

    chunks = reuse.chunks(answer.report.chunks)
    tokens = assemble(reuse.model, chunks).tokens
    asked = question_ids(reuse.tokenizer, reuse.prompt, question).to(tokens.device)
    teacher = teacher_of(reuse.model, tokens, asked, _COMPARED_TOKENS)
    return teacher, compare(reuse.model, chunks, teacher, cases, on_case), tokens


def _cases(arguments: argparse.Namespace) -> list[tuple[Any, float]]:
    """Selectors and ratios to compare; those with a ratio of their own come once."""
    if not arguments.compare and not arguments.plot:
        return [(arguments.selector, arguments.ratio)]
    ratios = sorted({arguments.ratio, *(_PLOTTED if arguments.plot else ())})
    alone = [(name, 0.0) for name in NAMES if name in _FIXED]
    return alone + [(name, ratio) for name in NAMES if name not in _FIXED for ratio in ratios]


def table(full_seconds: float, rows: Sequence["Compared"]) -> str:
    """Seconds to the first token, and how near each selector comes to full prefill."""
    steps = ("assemble", "score", "select", "recompute")
    lines = [f"{'':18}" + "".join(f"{name:>10}" for name in (*steps, "first", "speed-up", "KL", "same top"))]
    lines.append(f"{'full prefill':18}{'':40}{full_seconds:9.2f}s{1:9.2f}x{0:10.4f}{1:10.0%}")
    for row in rows:
        figures = "".join(f"{row.seconds[step]:9.2f}s" for step in steps)
        found = row.fidelity
        lines.append(
            f"{row.selector:12} {row.ratio:4.0%} {figures}{row.first_token:9.2f}s"
            f"{full_seconds / row.first_token:9.2f}x{found.divergence:10.4f}{found.agreement:10.0%}"
        )
    return "\n".join(lines)


def _document(
    arguments: argparse.Namespace,
    answer: "Answer",
    teacher: "Teacher",
    rows: Sequence["Compared"],
    names: Sequence[str],
) -> dict[str, Any]:
    settings = ("ask", "ratio", "selector", "reorder", "chunk_tokens", "top", "max_new_tokens")
    return {
        "format": 1,
        "command": "rag",
        "machine": machine.facts(),
        "settings": {name: getattr(arguments, name) for name in settings}
        | {"model": str(arguments.model) if arguments.model else "embedded"},
        "answer": answer.text,
        "chunks": list(names),
        "report": answer.report.as_dict(),
        "full_prefill_seconds": teacher.seconds,
        "compared": [row.as_dict() for row in rows],
    }
