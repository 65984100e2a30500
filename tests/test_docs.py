"""The pages show code that runs and print what they say, and the examples run."""

import argparse
import ast
import contextlib
import importlib
import io
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.__main__ import BENCHMARKS
from benchmarks.__main__ import _add as add_benchmarks
from tests import command_line as cli

import nearfield
from nearfield import Hilbert, Merge
from nearfield.methods import registry
from nearfield.methods.composition import DENSE_FID

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ("commands.md", "support.md")
NOTES = sorted((ROOT / "benchmarks").glob("**/*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A Python block, the line it starts at, and the text block right below it (None if there is none)."""

    line: int
    code: str
    expected: str | None


def python_blocks(text: str) -> list[Block]:
    fences = list(FENCE.finditer(text))
    blocks = []
    for index, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        expected = None
        if index + 1 < len(fences):
            following = fences[index + 1]
            if following[1] == "text" and not text[fence.end() : following.start()].strip():
                expected = following[2]
        blocks.append(Block(text.count("\n", 0, fence.start()) + 2, fence[2], expected))
    return blocks


def run_blocks(blocks: list[Block], page: str) -> None:
    """Run a page from top to bottom in one namespace; errors name the line of the page."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
        if block.expected is not None:
            assert printed.getvalue() == block.expected, f"{page}:{block.line} prints something else"


@pytest.fixture(autouse=True)
def _own_folder_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What examples and pages define is not known to later tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))
    torch.manual_seed(0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs_and_prints_what_it_says(page: Path) -> None:
    run_blocks(python_blocks(page.read_text(encoding="utf-8")), page.name)


def test_pages_have_blocks() -> None:
    """So that a change of their fences does not pass for silence."""
    with_blocks = {page.name for page in PAGES if python_blocks(page.read_text(encoding="utf-8"))}
    assert {"README.md", "attend.md", "curves.md", "plan.md"} <= with_blocks


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebook_runs(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells from top to bottom in one namespace, as a kernel would. What it showed is not committed."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    document = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for cell in cells:
            exec(compile("".join(cell["source"]), f"{notebook.name}:{cell['id']}", "exec"), namespace)
        assert len(pyplot.get_fignums()) >= 2
    finally:
        pyplot.close("all")
    assert capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5
    assert len(NOTEBOOKS) >= 1


def test_readme_lists_every_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in [*EXAMPLES, *NOTEBOOKS]:
        assert f"](examples/{path.name})" in readme


def test_every_result_says_how_it_was_made() -> None:
    """By its name, or as `name, -2, -3`."""
    listed = set[str]()
    for names in re.findall(
        r"^\| ([a-z][\w-]*(?:, -\d)*) \|", (ROOT / "benchmarks/README.md").read_text(), re.M
    ):
        first, *others = names.split(", ")
        listed |= {first, *(re.sub(r"-\d$", "", first) + number for number in others)}
    assert listed - {"file"} == {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}


def test_index_lists_every_page_once() -> None:
    """The tables are also the site's navigation."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[[^]]+\]\((\w+\.md)\)", index, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES[1:] if page.name != "index.md")


def commands(parser: argparse.ArgumentParser, before: str = "nearfield") -> Iterator[str]:
    """`nearfield doctor`, `nearfield train demo` ...: every command that runs something."""
    families = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not families:
        yield before
    for family in families:
        for name, child in family.choices.items():
            yield from commands(child, f"{before} {name}")


COMMANDS = [*commands(cli.parser()), *(f"python -m benchmarks {name}" for name in BENCHMARKS)]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_where_users_look(command: str) -> None:
    """A section of its page; and its name in the README and in the changelog, with or without what stands before it."""
    headings = re.findall(
        r"^## .*", (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert re.search(rf"`{command}[ `]", "\n".join(headings)), "docs/commands.md has no section"
    named = re.compile(rf"`(?:nearfield |python -m )?(?:\w+ )?{command.split()[-1]}[ `]")
    for page in ("README.md", "CHANGELOG.md"):
        assert named.search((ROOT / page).read_text(encoding="utf-8")), page


def shown_commands(page: str) -> list[list[str]]:
    """The words of each command of this project in blocks of shell, without comments; lines may be continued."""
    blocks = [fence[2].replace("\\\n", " ") for fence in FENCE.finditer(page) if fence[1] == "sh"]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words for words in lines if words and (words[0] == "nearfield" or "benchmarks" in words)]


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_can_be_read(page: Path) -> None:
    """Every option and value is one that the command has; files and folders that it names are there."""
    for words in shown_commands(page.read_text(encoding="utf-8")):
        make_files(words)
        if words[0] == "nearfield":
            cli.parser().parse_args(words[1:])
        else:
            assert words[:3] == ["python", "-m", "benchmarks"]
            family = argparse.ArgumentParser().add_subparsers()
            add_benchmarks(words[3:], family)
            family.choices[words[3]].parse_args(words[4:])


def make_files(words: list[str]) -> None:
    """What options name, empty, in the folder of the test: files by their suffix, all else as folders."""
    for option, value in pairwise(words):
        path = Path(value.rpartition("=")[2] if option == "--option" else value)
        if option.startswith("--") and not value.startswith("-") and not path.is_absolute():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix:
                path.touch()
            elif option in ("--data", "--docs", "--images", "--photographs", "--model", "--language-model"):
                path.mkdir(parents=True, exist_ok=True)


def test_commands_are_found() -> None:
    page = "```sh\nnearfield a \\\n    --b 'c d'  # e\npip install x\n```\n"
    assert shown_commands(page) == [["nearfield", "a", "--b", "c d"]]


PAGE = """
```python
x = 3
```

```python
print(x)
```

```text
3
```

Prose.

```text
not printed
```
"""


def test_blocks_are_read_and_checked() -> None:
    blocks = python_blocks(PAGE)
    assert blocks == [Block(3, "x = 3\n", None), Block(7, "print(x)\n", "3\n")]
    run_blocks(blocks, "page")
    with pytest.raises(AssertionError, match="page:7 prints something else"):
        run_blocks([blocks[0], blocks[1]._replace(expected="4\n")], "page")
    with pytest.raises(NameError):
        run_blocks(blocks[1:], "page")


def test_a_model_is_few_lines() -> None:
    """The entry on the page of models is that of the module."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (entry,) = (fence[2] for fence in FENCE.finditer(page) if fence[2].startswith("UNET = define("))
    module = (ROOT / "src" / "nearfield" / "diffusers" / "models" / "pixart.py").read_text(encoding="utf-8")
    assert entry in module
    assert len(entry.splitlines()) <= 20


def test_a_method_is_few_lines() -> None:
    """The class of the example, without what tries it."""
    example = (ROOT / "examples" / "own_method.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(example).body if isinstance(node, ast.ClassDef)]
    lines = [line for node in classes for line in ast.unparse(node).splitlines() if line.strip()]
    assert len(lines) <= 16


def results_of(name: str) -> list[dict[str, Any]]:
    document = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return document["results"]


def test_first_table_of_the_readme_is_what_was_measured() -> None:
    """Speed and quality of one setting in one row; the whole call is computed from steps."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = ("model-h200-5.json", "model-h200-6.json")
    steps = {row["pixels"]: row["speed_up"] for file in files for row in results_of(file)}
    assert list(steps) == ["1024", "2048", "4096"]
    dense, last = Hilbert().num_dense_steps(16)
    assert (dense, last) == (3, 0)
    whole = [16 / (dense + (16 - dense) / step) for step in steps.values()]
    calls = {row["case"]: row["speed_up"] for row in results_of("hilbert-h200-7.json")}
    one, two, four = (calls[f"{pixels}-default"] for pixels in steps)
    rows = results_of("quality-campaign-cats512.json")
    fids = {(row["pattern"], row["samples"]): f"{row['fid']:.1f}" for row in rows}
    sparse = f"{fids['around', 5000]} | {fids['dense', 5000]}"
    tuned = fids["around, tuned: LoRA of rank 4, 400 steps", 5000]
    for row in (
        f"one step | {' | '.join(f'{step:.2f}x' for step in steps.values())} | {sparse} | {tuned} |",
        f"computed | {' | '.join(f'{all_steps:.2f}x' for all_steps in whole)} | "
        f"{fids['around, first 3 steps dense', 1500]} | {fids['dense', 1500]} | not measured |",
        f"kernel only | {one:.2f}x | {two:.1f}x | {four:.1f}x | {sparse} | {tuned} |",
        f"| {fids['16 tiles', 1500]} | {fids['dense', 1500]} | not measured |",
        f"FID {Merge.fids[0.5]}, dense {DENSE_FID} (500 pictures)",
    ):
        assert row in readme


def test_tables_of_results_are_what_the_files_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pages and in the log; every table that can be made is on one."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import result_tables

    used = set()
    for path in result_tables.pages():
        page = path.read_text(encoding="utf-8")
        assert result_tables.written(page) == page, f"{path.name} is older than its files: run `make docs`"
        used |= set(re.findall(r"^<!-- ([\w ]+) -->$", page, re.MULTILINE))
    assert used - {"end"} == set(result_tables.TABLES)


def words_of(page: str) -> int:
    """Words of a page but for tables that a program makes."""
    return len(re.sub(r"<!-- ([\w ]+) -->\n.*?<!-- end -->", "", page, flags=re.DOTALL).split())


def test_pages_are_short() -> None:
    """All together, but for generated pages and the list of limits; and the page of results by itself."""
    pages = [page for page in PAGES[1:] if page.name not in (*GENERATED, "limits.md")]
    assert sum(words_of(page.read_text(encoding="utf-8")) for page in pages) <= 30_000
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(results.splitlines()) <= 150


LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: str) -> set[str]:
    """What a link to a heading may be called, as on GitHub."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


TOP_PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")]
LINKED = [*TOP_PAGES, *PAGES[1:], *NOTES, *sorted((ROOT / "lab").glob("src/**/*.md"))]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings of this repository; other sites are not asked, but must be named by https."""
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if ":" in link:
            assert link.startswith("https://"), link
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


def test_links_are_read() -> None:
    page = "# One: `two`\n\n```sh\n# not a heading\n```\n## With [a link](x.md)\n"
    assert anchors(page) == {"one-two", "with-a-link"}
    assert LINK.findall("[a](b.md#c), ![d](e.png)") == ["b.md#c", "e.png"]


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in LINKED)
    shown = set(re.findall(r"images/([\w-]+\.(?:png|jpg))\)", pages))
    assert shown == {path.name for path in (ROOT / "docs" / "images").iterdir() if path.suffix != ".md"}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.name)
def test_formulas_are_drawn_without_a_network(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every formula becomes MathML that is well formed."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    from formulas import mathml

    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for block, inline in re.findall(r"\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)\$", text, re.DOTALL):
        drawn = mathml(block or inline, bool(block))
        assert ElementTree.fromstring(drawn).tag == "math"
        assert "\\" not in drawn


def test_formulas_say_what_they_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    from formulas import mathml

    assert (
        mathml(r"\frac{a_i}{2}") == "<math><mfrac><msub><mi>a</mi><mi>i</mi></msub><mn>2</mn></mfrac></math>"
    )
    assert "<mtext>size of\N{NO-BREAK SPACE}</mtext>" in mathml(r"\text{size of } x \tag{3}", is_block=True)
    with pytest.raises(ValueError, match=r"got \\unknown"):
        mathml(r"\unknown{x}")
    with pytest.raises(ValueError, match="must close every brace"):
        mathml(r"\frac{a}{b")


def test_api_pages_name_public_names_alone() -> None:
    """Each name, as its heading shows it, can be imported, and what the package exports is there."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (nearfield[\w.]*)(?:\n {4}options:\n {6}heading: (\S+))?", page, re.MULTILINE)
    for source, name in listed:
        parent, _, last = (name or source).rpartition(".")
        assert "._" not in (name or source)
        assert hasattr(importlib.import_module(parent), last), name or source
    exported = {f"nearfield.{name}" for name in set(nearfield.__all__) - {"__version__", "methods"}}
    assert exported <= {name or source for source, name in listed}


METHOD_PAGES = ("hilbert.md", "loglinear.md", "fine.md", "merging.md", "retrieval.md")


@pytest.mark.parametrize("name", METHOD_PAGES)
def test_pages_of_methods_have_one_form(name: str) -> None:
    """Paper, formula and picture, code of at most 40 lines, what was measured, what differs from the paper."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    introduction, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    assert re.search(r"Paper: \*[\w\s-]+\*,\s\[arXiv (\d+\.\d+)\]\(https://arxiv\.org/abs/\1\)", introduction)
    places = [titles.index(title) for title in ("Use", "Measured", "What differs from the paper")]
    assert places == sorted(places)
    before_use = introduction + "".join(sections[: places[0]])
    assert "$$" in before_use
    picture = re.search(r"!\[[^]]+\]\((images/[\w-]+\.png)\)", before_use)
    assert picture is not None
    assert (ROOT / "docs" / picture[1]).is_file()
    programs = [fence[2] for fence in FENCE.finditer(text) if fence[1] in ("python", "py")]
    assert programs
    assert max(len(program.splitlines()) for program in programs) <= 40


def test_pictures_of_plans_are_those_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be drawn, each on its page; the sum that one of them shows is what `attend` gives."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import plan_pictures

    plan_pictures.write(tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) == 7
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in drawn:
        assert f"](images/{name})" in pages
        assert (ROOT / "docs" / "images" / name).is_file()
