"""Whether a method can be deleted: `python tests/deletion_walk.py [--run TEST ...]`.

It copies the tree and deletes all that is a method's own: its module, its page, its tests, and its lines in lists of
pages. It prints what else names the method. Then all tests are collected, and a short choice of them is run.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

NAMES = re.compile(r"FineGrained|FineLayer|finegrained", re.IGNORECASE)
OWN = (
    "src/nearfield/methods/finegrained.py",
    "docs/fine.md",
    "tests/test_fine.py",
    "tests/test_fine_models.py",
    "tests/test_benchmarks_fine.py",
    "benchmarks/special/finegrained.py",
)
"""The method's own files. Its operation, `ops/predict`, serves every method in which content decides."""
DATA = ("benchmarks/results/", "benchmarks/redesign/", "benchmarks/notes/", "docs/result_tables.py")
"""What was measured, and what has been: nothing of it runs."""
STATIC = "src/nearfield/methods/__init__.py"
"""Names the methods for type checkers."""
SHORT = (
    "tests/test_layers.py", "tests/test_imports.py", "tests/test_fields.py", "tests/test_commands.py",
    "tests/test_predict.py", "tests/test_select_method.py", "tests/test_adapters_moments.py", "tests/test_comfy.py",
    "tests/test_studio.py", "tests/test_support.py",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--run", nargs="*", default=list(SHORT), metavar="TEST", help="what is run (default: a choice)"
    )
    parser.add_argument("--types", action="store_true", help="check types, too (minutes)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copied(tree)
        deleted(tree)
        named = still_named(tree)
        for line in named:
            print(f"still named: {line}")
        failed = [step for step in steps(options.run, options.types) if not passes(tree, *step)]
    print(f"{len(named)} places name it; {len(failed)} steps failed")
    return bool(named or failed)


def copied(tree: Path) -> None:
    """The files of the working tree that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)


def deleted(tree: Path) -> None:
    for name in OWN:
        (tree / name).unlink(missing_ok=True)
    static = tree / STATIC
    lines = static.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [re.sub(r'"FineGrained", ', "", line) for line in lines if "import FineGrained" not in line]
    static.write_text("".join(kept), encoding="utf-8")
    # Pages name every method in lists and link to its page; a line of prose about it goes with it.
    for page in [*tree.glob("*.md"), *tree.glob("*/*.md"), tree / "mkdocs.yml"]:
        text = page.read_text(encoding="utf-8")
        page.write_text(
            "".join(line for line in text.splitlines(keepends=True) if not _is_about(line)), encoding="utf-8"
        )


def _is_about(line: str) -> bool:
    return bool(NAMES.search(line) or "fine.md" in line)


def still_named(tree: Path) -> list[str]:
    """Lines of code that name the method."""
    found = []
    for path in sorted(tree.rglob("*.py")):
        name = path.relative_to(tree).as_posix()
        if name.startswith(DATA) or name == "tests/deletion_walk.py":
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [
            f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if NAMES.search(line)
        ]
    return found


def steps(tests: list[str], with_types: bool) -> list[tuple[str, ...]]:
    """Commands, by what they are for."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "300")
    return [
        ("the support matrix is made anew", "docs/support.py"),
        *([("types", "-m", "mypy")] if with_types else []),
        ("all tests can be collected", *pytest, "--collect-only"),
        *([("a choice of tests", *pytest, *tests)] if tests else []),
    ]


def passes(tree: Path, purpose: str, *command: str) -> bool:
    places = os.pathsep.join(map(str, (tree / "src", tree / "lab" / "src", tree)))
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    last = (ran.stdout.strip() or ran.stderr.strip()).splitlines()
    print(f"{purpose}: {'yes' if ran.returncode == 0 else 'NO'}; {last[-1] if last else ''}", flush=True)
    if ran.returncode:
        print("\n".join(line for line in last if re.match("ERROR|FAILED|E  ", line) or "error:" in line))
        print(ran.stderr[-2000:])
    return ran.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
