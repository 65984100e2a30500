"""The project's own papers agree with each other and speak of nothing but the project."""

import ast
import fnmatch
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import nearfield
from nearfield.cli import weights

ROOT = Path(__file__).resolve().parents[1]

# `make x` in a code span, or a line of a code block that starts with it; prose such as "make sure" is neither.
MAKE_COMMAND = re.compile(r"(?:`|^\s*(?:\$ )?)make ([a-z][a-z-]*)(?=[`\s]|$)", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

# Folders that exist on somebody's machine, and places packages were fetched from.
FORBIDDEN = {
    "machine path": re.compile(r"(?<![\w.~>}\])-])/(?:work|home|root|Users|mnt|scratch)/\w"),
    "package index": re.compile(
        r"--(?:extra-)?index-url[= ]|^\s*(?:extra-)?index-url\s*=|https?://[^\s\"')]*/simple\b"
        r"|https?://(?:localhost|10\.|192\.168\.)|file:///\w",
        re.MULTILINE | re.IGNORECASE,
    ),
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def make_commands(text: str) -> set[str]:
    spans = set(re.findall(r"`make ([a-z][a-z-]*)", text))
    blocks = "\n".join(FENCED.findall(text))
    return spans | set(MAKE_COMMAND.findall(blocks))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_named_make_targets_exist(name: str) -> None:
    assert make_commands(read(name)) <= make_targets()


def test_readme_says_how_to_start() -> None:
    assert {"demo", "test"} <= make_commands(read("README.md"))


def test_make_commands_are_found() -> None:
    text = "Run `make demo` and make sure.\n\n```sh\n$ make test\nmake docs  # pages\n```\n"
    assert make_commands(text) == {"demo", "test", "docs"}


def test_versions_agree() -> None:
    changelog = re.search(r"^## \[?(\d+\.\d+\.\d+)", read("CHANGELOG.md"), re.MULTILINE)
    project = re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)
    assert changelog is not None
    assert project is not None
    lab = read("lab/pyproject.toml")
    assert changelog[1] == project[1] == nearfield.__version__
    assert f'\nversion = "{project[1]}"\n' in lab
    assert f"nearfield[diffusers,retrieval]=={project[1]}" in lab


def project_files() -> list[Path]:
    """Files in the repository or about to be: tracked, or new and not ignored."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_files_name_no_machine() -> None:
    found = []
    for path in project_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        text = content.decode("utf-8")
        for kind, pattern in FORBIDDEN.items():
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {kind}: {match[0].strip()}")
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("machine path", "see {0}home{0}someone"),
        ("machine path", "cd {0}work{0}main"),
        ("machine path", "path='{0}root{0}x'"),
        ("package index", "pip install --{1}-url https:{0}{0}a.b"),
        ("package index", "https:{0}{0}mirror.example{0}pypi{0}simple{0}"),
        ("package index", "file:{0}{0}{0}wheels"),
    ],
)
def test_machine_facts_are_found(kind: str, text: str) -> None:
    # Filled in here so that this file does not contain what it forbids.
    assert FORBIDDEN[kind].search(text.format("/", "index"))


def data_files() -> list[Path]:
    """Weights, pictures and whatever else is no text; all of the results and of the data of tests."""
    folders = (ROOT / "benchmarks" / "results", ROOT / "tests" / "data")
    return [
        path
        for path in project_files()
        if path.name != "README.md"
        and (b"\0" in path.read_bytes() or any(folder in path.parents for folder in folders))
    ]


def test_data_files_are_found() -> None:
    found = {path.relative_to(ROOT).parent.as_posix() for path in data_files()}
    lab = {f"lab/src/nearfield_lab/{name}/weights" for name in ("embedded", "quality")}
    assert found == lab | {"tests/data", "tests/data/cats", "docs/images", "benchmarks/results"}


def test_each_data_file_has_a_note_with_its_licence() -> None:
    """In the README of its folder: the first row whose pattern is its name; and no row is of no file."""
    unused = set()
    for folder in {path.parent for path in data_files()}:
        assert (folder / "README.md").exists(), f"{folder} has no README that says what its files are"
        patterns = list(weights.notes(folder / "README.md"))
        assert all(all(record.values()) for record in patterns), f"{folder}: a cell is empty"
        unused |= {(folder.name, record["file"]) for record in patterns}
        for path in (path for path in data_files() if path.parent == folder):
            found = [record["file"] for record in patterns if fnmatch.fnmatchcase(path.name, record["file"])]
            assert found, f"{path.relative_to(ROOT)} is in no row of its folder's README"
            unused.discard((folder.name, found[0]))
    assert not unused


def launches(file: Path) -> set[str]:
    """What a module launches: `name[grid](...)` as a statement."""
    calls = (
        node.value.func
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    return {ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_sanitizer_knows_every_kernel() -> None:
    """By its name: a kernel that is called otherwise would not be looked at."""
    command = subprocess.run(
        ["make", "--dry-run", "sanitize-gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    launched = set().union(*map(launches, (ROOT / "src/nearfield/ops").rglob("*.py")))
    assert {"_forward_kernel", "forward_kernel"} < launched
    assert set(re.findall(r"--kernel-name kns=(\S+)", command)) == launched
