"""What the site needs besides the pages of this folder: a hook of mkdocs.

The pages are written to be read in the repository, too, so they link to files outside this folder. Those that are pages
become pages of the site; programs and data are shown as they are. The navigation is that of the tables in index.md.
"""

import html
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from formulas import mathml  # noqa: E402

# mkdocs takes a README for the index of its folder, and index.md is that already.
ROOT_PAGES = {
    "start.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "rivals.md": "benchmarks/rivals/README.md",
} | {name: name for name in ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")}
NOTES = "benchmarks/notes"
SITE_NAMES = {source: name for name, source in ROOT_PAGES.items()}
SHOWN = ("examples/*.py", "examples/*.ipynb", "tests/newcomers/*.py", "LICENSE")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
GROUP = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| \[([^]]+)\]\(([^)]+\.md)\)", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """The tables of index.md are the navigation, a group for each."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    groups: dict[str, list[dict[str, str]]] = {}
    for title, section in GROUP.findall(index):
        pages = [{name: _on_site(os.path.normpath(f"docs/{page}"))} for name, page in ROW.findall(section)]
        if pages:
            groups[title] = pages
    groups["Start"] = [{"Home": "index.md"}, {"Readme": "start.md"}, *groups["Start"]]
    config.nav = [{title: pages} for title, pages in groups.items()]
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, source in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted((ROOT / NOTES).glob("*.md")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            content = path.read_text(encoding="utf-8")
            content = _notebook(content) if path.suffix == ".ipynb" else _program(name, path.suffix, content)
            files.append(File.generated(config, f"{name}.md", content=content))
    return files


def _program(name: str, suffix: str, text: str) -> str:
    language = "python" if suffix == ".py" else "text"
    return f"# {name}\n\n```{language}\n{text}\n```\n"


def _notebook(text: str) -> str:
    """Its words and its code; it has no outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{cell}\n```" if kind == "code" else cell for kind, cell in cells)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links as the site has them."""
    place = page.file.src_uri
    source = Path(place if place.startswith(NOTES) else ROOT_PAGES.get(place, f"docs/{place}"))

    def on_site(match: re.Match[str]) -> str:
        target = _on_site(os.path.normpath(source.parent / match[1]))
        return f"]({os.path.relpath(target, Path(place).parent)}"

    return LINK.sub(on_site, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, and tables in a box of their own, which scrolls where the screen is narrow."""
    content = FORMULA.sub(lambda match: mathml(html.unescape(match[3]), match[2] == "["), content)
    return re.sub(
        r"<table>(.*?)</table>", r'<div class="wide"><table>\1</table></div>', content, flags=re.DOTALL
    )


def _on_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in SITE_NAMES:
        return SITE_NAMES[path]
    if path.startswith("benchmarks/results"):
        return "benchmarks.md"  # which says how each file was made
    is_shown = any(Path(path).match(pattern) for pattern in SHOWN)
    return f"{path}.md" if is_shown else path.removeprefix("docs/")
