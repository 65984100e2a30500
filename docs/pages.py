"""What the site needs besides the pages of this folder: a hook of mkdocs.

The pages are written to be read in the repository, too, so they link to files beside this folder. Those that are pages
become pages of the site; programs and data are shown as they are. The order of the pages is that of the table in
index.md.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# mkdocs takes a README for the index of its folder, and index.md is that already.
ROOT_PAGES = {"start.md": "README.md", "results.md": "benchmarks/README.md"} | {
    name: name for name in ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
}
SITE_NAMES = {source: name for name, source in ROOT_PAGES.items()}
SHOWN = ("examples/*.py", "examples/*.ipynb", "LICENSE")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
ROW = re.compile(r"^\| \[([^]]+)\]\(([^)]+\.md)\)", re.MULTILINE)


def on_config(config: Any) -> Any:
    """The table of index.md is the table of contents."""
    rows = ROW.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    config.nav = [{"Home": "index.md"}] + [{title: Path(page).name} for title, page in rows]
    config.nav += [{"Readme": "start.md"}, {"Results": "results.md"}, {"Changes": "CHANGELOG.md"}]
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, source in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as the site has them: one folder of pages, programs as pages of their own."""
    return LINK.sub(lambda match: f"]({_on_site(match[1])}", markdown)


def _on_site(link: str) -> str:
    link = link.removeprefix("../").removeprefix("docs/")
    if link in SITE_NAMES:
        return SITE_NAMES[link]
    if link.startswith("benchmarks/results"):
        return "performance.md"  # where the results are tables and pictures
    is_shown = any(Path(link).match(pattern) for pattern in SHOWN)
    return f"{link}.md" if is_shown else link
