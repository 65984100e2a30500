"""How many names cross the library's rooms.

    python benchmarks/redesign/crossings.py [--names] [--all]

A name crosses where a module of one room imports it from a module of another: `from room.module import name`, or
`module.name` where the module itself was imported. It is counted once, as (module that defines it, name), however many
modules import it, and whether they got it from there or from an `__init__` that passes it on. A module that is imported
and passed on as a whole counts as a name of its own. Every import counts, also inside functions and for annotations.

Rooms are those of the library (`ROOMS`). What is the lab's is not looked at, neither as importer nor as source: the
embedded model, training, quality, the studio, plots, engines, tuning, the benchmarks, and the commands of all these.
`shared` is no room: its modules are there for everyone (`--all` counts them, too). Nor is the public
`nearfield/__init__`, which only gathers names.

A step that moves modules edits `ROOMS`, and nothing else here.

This folder serves the redesign alone, and goes away with its last commit.
"""

import argparse
import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "nearfield"

SHARED = "shared"
ROOMS = {
    SHARED: "_checks _files _types _memo",
    "layout": "layout",
    "plan": "plan planning",
    "ops": "ops",
    "methods": "methods",
    "session": "session",
    "parallel": "parallel",
    "diffusers": "diffusers",
    "retrieval": "retrieval",
    "cli": "__main__ cli",
}
"""Each room's modules and folders of today; the longest match decides."""
ROOM_OF = {place: room for room, places in ROOMS.items() for place in places.split()}


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """All modules by their names inside the package; a folder stands for its `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str | None:
    """The room of a module; None for what is the lab's, and for the package itself."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ROOM_OF[prefix] for prefix in prefixes if prefix in ROOM_OF), None)


class Source:
    """One module: what it imports, and which attributes of imported modules it uses."""

    def __init__(self, name: str, path: Path, known: dict[str, Path]) -> None:
        self.name, self.known = name, known
        self.is_package = path.name == "__init__.py"
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imported: dict[str, tuple[str, str]] = {}
        """By local name: the module and the name in it, which is empty for the module itself."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                self._take_from(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("nearfield."):
                        module = alias.name.removeprefix("nearfield.")
                        self.imported[alias.asname or alias.name] = (module, "")

    def _take_from(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.name.split(".") if self.name else []
            climb = node.level - 1 if self.is_package else node.level
            base = ".".join(["nearfield", *parts[: len(parts) - climb], *([base] if base else [])])
        if base != "nearfield" and not base.startswith("nearfield."):
            return
        base = base.removeprefix("nearfield").removeprefix(".")
        for alias in node.names:
            module = f"{base}.{alias.name}".removeprefix(".")
            found = (module, "") if module in self.known else (base, alias.name)
            self.imported[alias.asname or alias.name] = found

    def uses(self) -> set[tuple[str, str]]:
        """(module, name) of everything it has from elsewhere in the package."""
        used = set()
        attributes: dict[str, set[str]] = {}
        bare: Counter[str] = Counter()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                attributes.setdefault(ast.unparse(node.value), set()).add(node.attr)
            elif isinstance(node, ast.Name):
                bare[node.id] += 1
        for local, (module, name) in self.imported.items():
            if name:
                used.add((module, name))
            else:
                own = {attr for attr in attributes.get(local, ()) if f"{module}.{attr}" not in self.known}
                used |= {(module, attr) for attr in own} or {(module, "")}
        return used


def crossings(
    package: Path = PACKAGE, with_shared: bool = False
) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """By arrow (importing room, room of the definition): the names that cross."""
    known = modules(package)
    sources = {name: Source(name, path, known) for name, path in known.items()}
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for name, source in sources.items():
        here = room_of(name)
        if here is None:
            continue
        for use in source.uses():
            module, what = _defined(use, sources)
            there = room_of(module)
            if there in (None, here) or (there == SHARED and not with_shared) or here == SHARED:
                continue
            found.setdefault((here, str(there)), set()).add((module, what))
    return found


def _defined(use: tuple[str, str], sources: dict[str, Source]) -> tuple[str, str]:
    """Where a name is defined that an `__init__`, or another module, passes on."""
    seen = set()
    while use not in seen and use[1] and use[1] in sources[use[0]].imported:
        seen.add(use)
        use = sources[use[0]].imported[use[1]]
    return use


def folder_pairs(package: Path = PACKAGE) -> int:
    """(module, name) pairs that an import statement takes from another folder, the lab's included."""
    known = modules(package)

    def folder(module: str) -> str:
        is_folder = bool(module) and known[module].name == "__init__.py"
        return module.partition(".")[0] if "." in module or is_folder else ""

    pairs = set()
    for name, path in known.items():
        imported = Source(name, path, known).imported.values()
        pairs |= {use for use in imported if folder(use[0]) != folder(name)}
    return len(pairs)


def public_names(package: Path = PACKAGE) -> int:
    """Functions and classes at the top of modules whose names have no underscore in front."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules(package).values()]
    nodes = [node for tree in trees for node in tree.body]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return sum(isinstance(node, kinds) and not node.name.startswith("_") for node in nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", action="store_true", help="print the names, too")
    parser.add_argument("--all", action="store_true", help="count what is there for everyone, too")
    options = parser.parse_args()
    found = crossings(with_shared=options.all)
    for (here, there), names in sorted(found.items()):
        print(f"{here} reads {there}: {len(names)}")
        for module, name in sorted(names) if options.names else ():
            print(f"    {module}.{name}".rstrip("."))
    print(
        f"{len(set().union(*found.values()))} names cross rooms; {sum(map(len, found.values()))} counted by arrow"
    )
    print(f"{folder_pairs()} (module, name) pairs are imported from another folder, the lab's included")
    print(f"{public_names()} functions and classes without an underscore")


if __name__ == "__main__":
    main()
