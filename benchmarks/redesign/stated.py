"""What the tests state: every test, identity, error message, result and parametrised case.

    python benchmarks/redesign/stated.py write     writes stated.txt
    python benchmarks/redesign/stated.py check     prints which statements have no successor, and how many are new

The tests are read, not run. Below the name of its file a line is `owner kind: text`, where the owner is a test, or a
table of the file. The cases of one test share a line.

    test      the test is there; the text is the first line of its docstring
    identity  a function that a table of functions hands to tests; its text is the same
    error     a message that is expected: in `pytest.raises(..., match=)`, beside an exception in a table, or compared
              with what was raised
    result    a constant that a test compares something with; of texts those of several words
    case      an id of a parametrised test

A statement has a successor where its test (or identity) has its name in any file, its error stands anywhere with the
same text, or its result or case stands in a test or table of the same name. What is gone on purpose, as a test of a
private name, is looked through by a person, who then writes the list anew.

This folder serves the redesign alone, and goes away with its last commit.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
LIST = HERE / "stated.txt"
TRIVIAL = {"0", "1", "2", "None", "True", "False", "''", "[]", "()", "{}", "set()"}
CASES = " | "
"""Between the cases of one test, which share a line."""


class Line(NamedTuple):
    """One statement."""

    file: str
    owner: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.owner} {self.kind}: {self.text}".rstrip()

    @property
    def key(self) -> tuple[str, ...]:
        """What a successor has in common with it."""
        if self.kind in ("test", "identity"):
            return self.kind, self.owner
        if self.kind == "error":
            return self.kind, self.text
        return self.kind, self.owner, self.text


def written(lines: list[Line]) -> str:
    """All lines, file by file."""
    rows = []
    for file, own in groupby(lines, key=lambda line: line.file):
        rows.append(f"# {file}")
        for (owner, kind), some in groupby(own, key=lambda line: (line.owner, line.kind)):
            texts = [line.text for line in some]
            joined = [CASES.join(texts)] if kind == "case" else texts
            rows += [f"{owner} {kind}: {text}".rstrip() for text in joined]
    return "\n".join(rows) + "\n"


def parsed(text: str) -> list[Line]:
    """What `written` wrote."""
    found, file = [], ""
    for row in text.splitlines():
        if row.startswith("# "):
            file = row.removeprefix("# ")
            continue
        head, _, said = row.partition(":")
        owner, _, kind = head.partition(" ")
        texts = said.split(CASES) if kind == "case" else [said]
        found += [Line(file, owner, kind, text.strip()) for text in texts]
    return found


def lines(tests: Path = TESTS) -> list[Line]:
    return sorted({line for path in sorted(tests.rglob("*.py")) for line in _lines_of(path, tests)})


def _lines_of(path: Path, tests: Path) -> Iterator[Line]:
    file = path.relative_to(tests).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tables = dict(_tables(tree))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, table in tables.items():
        for message in _errors_in_rows(table):
            yield Line(file, name, "error", message)
        for node in ast.walk(table):
            if isinstance(node, ast.Tuple | ast.List | ast.Dict):
                items = node.values if isinstance(node, ast.Dict) else node.elts
                for item in items:
                    function = functions.get(item.id) if isinstance(item, ast.Name) else None
                    if function is not None and "assert" in ast.unparse(function):
                        yield Line(file, function.name, "identity", _first_line(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Line(file, node.name, "test", _first_line(node))
            yield from (Line(file, node.name, *found) for found in set(_stated_in(node, tables)))


def _tables(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Module-level names and what they are given."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _stated_in(test: ast.FunctionDef, tables: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """(kind, text) of everything that one test states."""
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
            yield from (("case", text) for text in _ids(decorator, tables))
            yield from (("error", text) for text in _errors_in_rows(decorator))
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("raises", "warns")):
            for keyword in node.keywords:
                if keyword.arg == "match" and (text := _text(keyword.value)) is not None:
                    yield "error", text
        elif isinstance(node, ast.Assert):
            yield from _compared(node.test)
        elif isinstance(node, ast.Tuple):
            yield from (("error", text) for text in _errors_in_row(node))


def _compared(condition: ast.expr) -> Iterator[tuple[str, str]]:
    """Constants that something is compared with."""
    for node in ast.walk(condition):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        raised = any("raised" in ast.unparse(side) or "error" in ast.unparse(side).lower() for side in sides)
        for side in sides:
            text = _text(side)
            if text is not None:
                if " " in text.strip():
                    yield ("error" if raised or "` must " in text else "result"), text
            elif _is_constant(side) and ast.unparse(side) not in TRIVIAL:
                yield "result", " ".join(ast.unparse(side).split())


def _ids(decorator: ast.Call, tables: dict[str, ast.expr]) -> Iterator[str]:
    """What the cases of a test are called, as far as the source says it."""
    given = {keyword.arg: keyword.value for keyword in decorator.keywords}
    values = given.get("ids") or (decorator.args[1] if len(decorator.args) > 1 else None)
    if isinstance(values, ast.Name):
        values = tables.get(values.id)
    if isinstance(values, ast.Dict):
        items: list[ast.expr] = [key for key in values.keys if key is not None]
    else:
        items = list(values.elts) if isinstance(values, ast.List | ast.Tuple) else []
    for item in items:
        if _is_constant(item) and ast.unparse(item) not in TRIVIAL:
            yield " ".join(ast.unparse(item).split()).replace(CASES, "|")


def _errors_in_rows(table: ast.AST) -> Iterator[str]:
    for node in ast.walk(table):
        if isinstance(node, ast.Tuple | ast.List | ast.Call):
            yield from _errors_in_row(node)


def _errors_in_row(row: ast.Tuple | ast.List | ast.Call) -> Iterator[str]:
    """The texts that stand beside an exception, or are written as the project writes messages."""
    items = (
        [*row.args, *(keyword.value for keyword in row.keywords)] if isinstance(row, ast.Call) else row.elts
    )
    names = [item.id if isinstance(item, ast.Name) else getattr(item, "attr", "") for item in items]
    has_exception = not isinstance(row, ast.Call) and any(
        name.endswith(("Error", "Exception")) for name in names
    )
    for item in items:
        text = _text(item)
        if text is not None and (has_exception or ("` must " in text and "; got" in text)) and " " in text:
            yield text


def _text(node: ast.expr) -> str | None:
    """A text on one line; what is put into it stands in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        ]
        return " ".join("".join(parts).split())
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.escape" and node.args:
        return _text(node.args[0])
    return None


def _is_constant(node: ast.expr) -> bool:
    """Made of constants alone, with or without arithmetic."""
    kinds = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp
    others = ast.expr_context | ast.operator | ast.unaryop
    return all(isinstance(part, kinds | others) for part in ast.walk(node))


def _first_line(function: ast.FunctionDef) -> str:
    return (ast.get_docstring(function) or "").partition("\n")[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("write", "check"))
    if parser.parse_args().action == "write":
        found = lines()
        LIST.write_text(written(found), encoding="utf-8")
        kinds = Counter(line.kind for line in found)
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        print(f"{len(found)} statements ({counts}), {LIST.stat().st_size:,} bytes")
        return 0
    known = parsed(LIST.read_text(encoding="utf-8"))
    # As many tests of a name as there were: two files may each have one.
    now = lines()
    left = Counter(line.key for line in now if line.kind in ("test", "identity"))
    keys = {line.key for line in now}
    gone = []
    for line in known:
        is_there = left[line.key] > 0 if line.kind in ("test", "identity") else line.key in keys
        left[line.key] -= 1
        if not is_there:
            gone.append(line)
            print(f"{line.file}::{line}")
    fresh = len(keys - {line.key for line in known})
    print(f"{len(gone) or 'none'} of {len(known)} statements gone, {fresh} new")
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main())
