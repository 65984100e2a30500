"""Whether the library still computes what it computed before the redesign, bit for bit.

    PYTHONPATH=src python benchmarks/redesign/compare.py check [FOLDER] [--device cpu|interpreter|cuda] [--only TEXT]
    PYTHONPATH=src python benchmarks/redesign/compare.py record [FOLDER] [--device ...]

`record` runs every case at the commit from which the redesign starts (it knows that commit by its source) and writes
`expected-<device>.json` into FOLDER, by default this one. `check` runs the cases again and prints each that differs.

A result is kept as the first 10 digits of a sha256 of its type, shape and bytes. What a call gives without gradients
("plain ...") is left out where it is what it gives with them. Gradients that are made of several parts apart today may
change within an error budget: see `budget.py`.

This folder serves the redesign alone, and goes away with its last commit.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE = "6d04c2e"
BASE_SOURCE = "e4cf83e8059675a0"
"""`source_of` the library at BASE."""


def main() -> int:
    options = _options()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    if options.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.path.insert(0, str(ROOT))  # for the tests' tiny models
    ground = _ground(options.device)
    path = Path(options.folder) / f"expected-{options.device}.json"
    if (refusal := _refusal(options, path)) is not None:
        print(refusal)
        return 2
    return record(ground, path, options) if options.action == "record" else check(ground, path, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("folder", nargs="?", default=str(HERE), metavar="FOLDER")
    parser.add_argument("--device", choices=("cpu", "interpreter", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name has this in it")
    parser.add_argument(
        "--values", metavar="FILE", help="record: write all tensors; check: say how far they are off"
    )
    parser.add_argument(
        "--slowest", type=int, default=0, metavar="N", help="print the N cases that take longest"
    )
    return parser.parse_args()


def _ground(device: str) -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
    import ground
    import names

    if device == "interpreter":
        names.faster_interpreter()
    import cases_attend  # noqa: F401
    import cases_methods  # noqa: F401
    import cases_models  # noqa: F401
    import cases_sums  # noqa: F401

    return ground.Ground(torch.device("cuda" if device == "cuda" else "cpu"), "")


# -- what results depend on --------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, str]:
    """Everything outside the library that bits depend on."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    kernels = {"cpu": (), "interpreter": ("triton", "numpy"), "cuda": ("triton",)}[device]
    for package in ("diffusers", "transformers", *kernels):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def processor() -> str:
    """Its model, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def source_of(package: Path) -> str:
    """A digest of all source of the library."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _refusal(options: argparse.Namespace, path: Path) -> str | None:
    """Why nothing can be recorded or compared, in a line."""
    import names
    import torch

    package = Path(names.PACKAGE).resolve().parent
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda needs a GPU; torch sees none."
    if options.action == "record":
        if source_of(package) != BASE_SOURCE:
            return f"record must run on the source of {BASE}; PYTHONPATH gives another: {package}."
        return "record must run every case; got --only." if options.only else None
    if package != ROOT / "src" / "nearfield":
        return f"PYTHONPATH must name this tree's `src`; nearfield comes from {package}."
    if not path.exists():
        return f"FOLDER must hold {path.name}; record it on the source of {BASE} first."
    known = json.loads(path.read_text(encoding="utf-8"))["machine"]
    mine = machine(options.device)
    differing = [
        f"{name} {known[name]}, here {mine.get(name)}" for name in known if known[name] != mine.get(name)
    ]
    return f"check must run with what was recorded: {'; '.join(differing)}." if differing else None


# -- running -----------------------------------------------------------------------------------------------------------


def digest_of(value: Any) -> str:
    """Of a tensor's type, shape and bytes; of anything else, its text."""
    import torch

    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()[:10]
    x = value.detach().cpu().contiguous()
    head = f"{x.dtype} {list(x.shape)} ".encode()
    return hashlib.sha256(head + x.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:10]


def results_of(case: Any, ground: Any, exact: bool = False) -> dict[str, Any]:
    """What a case gives. That an implementation refuses it, or a package is missing, is a result, too."""
    from dataclasses import replace

    mine = replace(ground, impl=case.impl)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case.run(mine.exact() if exact else mine)
        except (NotImplementedError, ModuleNotFoundError) as error:
            return {"refused": type(error).__name__}
        except Exception as error:
            raise RuntimeError(f"{case.name} ends in {type(error).__name__}: {error}") from error


def record(ground: Any, path: Path, options: argparse.Namespace) -> int:
    import budget
    import torch
    from ground import cases

    digests, budgets, values, seconds = {}, {}, {}, {}
    for case in cases(options.device):
        began = time.perf_counter()
        results = results_of(case, ground)
        found = {name: digest_of(value) for name, value in results.items()}
        digests[case.name] = {
            name: digest for name, digest in found.items() if found.get(_partner(name)) != digest
        }
        if case.apart:
            budgets[case.name] = budget.recorded(results, results_of(case, ground, exact=True), case.name)
        values[case.name] = results
        seconds[case.name] = time.perf_counter() - began
    facts = {"base": BASE, "machine": machine(options.device), "model of the processor": processor()}
    _write(path, facts, digests, budgets)
    if options.values:
        torch.save(values, options.values)
    print(
        f"{len(digests)} cases in {sum(seconds.values()):.0f} s: {path.name}, {path.stat().st_size:,} bytes"
    )
    _print_slowest(seconds, options.slowest)
    return 0


def _partner(name: str) -> str | None:
    """Of what a call gives without gradients, what it gives with them."""
    return name.removeprefix("plain ") if name.startswith("plain ") else None


def _write(path: Path, facts: dict[str, Any], digests: dict[str, Any], budgets: dict[str, Any]) -> None:
    """A case to a line, so that git shows which changed."""
    lines = [f'"{name}": {json.dumps(value)},' for name, value in facts.items()]
    for title, table in (("digests", digests), ("budgets", budgets)):
        rows = [f"{json.dumps(name)}: {json.dumps(table[name], separators=(',', ':'))}" for name in table]
        lines.append(f'"{title}": {{\n' + ",\n".join(rows) + ("\n}," if title == "digests" else "\n}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + "\n".join(lines) + "\n}\n", encoding="utf-8")


def check(ground: Any, path: Path, options: argparse.Namespace) -> int:
    import torch
    from ground import cases

    expected = json.loads(path.read_text(encoding="utf-8"))
    known = {name for name in expected["digests"] if options.only in name}
    values = torch.load(options.values) if options.values else {}
    mine = [case for case in cases(options.device) if options.only in case.name]
    differing, seconds = 0, dict[str, float]()
    for case in mine:
        began = time.perf_counter()
        if case.name not in known:
            reasons = ["was not recorded"]
        else:
            reasons = _differences(case, ground, expected, values.get(case.name, {}))
        seconds[case.name] = time.perf_counter() - began
        differing += bool(reasons)
        for reason in reasons:
            print(f"{case.name}: {reason}", flush=True)
    for name in sorted(known - {case.name for case in mine}):
        print(f"{name}: is gone")
        differing += 1
    if (made_on := expected["model of the processor"]) != processor():
        print(f"recorded on {made_on}; here is {processor()}, where sums may differ in the last bit")
    print(f"{len(mine)} cases in {sum(seconds.values()):.0f} s: {differing or 'none'} differ")
    _print_slowest(seconds, options.slowest)
    return int(differing > 0 or not mine)


def _differences(case: Any, ground: Any, expected: dict[str, Any], values: dict[str, Any]) -> list[str]:
    import budget

    wanted = dict(expected["digests"][case.name])
    try:
        results = results_of(case, ground)
    except RuntimeError as error:
        return [str(error).removeprefix(f"{case.name} ").partition("\n")[0]]
    for name in results:
        if _partner(name) in wanted:
            wanted.setdefault(name, wanted[_partner(name)])
    found = []
    for name in [*wanted, *(name for name in results if name not in wanted)]:
        if name not in results or name not in wanted:
            found.append(f"`{name}` {'is new' if name in results else 'is gone'}")
        elif (got := digest_of(results[name])) != wanted[name]:
            allowed = [wanted[f"plain {name}"]] if case.apart and f"plain {name}" in wanted else []
            if case.apart and name in expected["budgets"][case.name]:
                reason = budget.excess(results[name], expected["budgets"][case.name][name])
            else:
                reason = None if got in allowed else f"was {wanted[name]}, is {got}"
            if reason is not None:
                found.append(f"`{name}` {reason}{_how_far(results[name], values.get(name))}")
    return found


def _how_far(got: Any, before: Any) -> str:
    import torch

    if not isinstance(before, torch.Tensor) or not isinstance(got, torch.Tensor) or got.shape != before.shape:
        return ""
    apart = (got.detach().double() - before.double()).abs().nan_to_num(0.0)
    return f"; off by {float(apart.max()) if apart.numel() else 0.0:.3g} at most"


def _print_slowest(seconds: dict[str, float], number: int) -> None:
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:number]:
        print(f"  {seconds[name]:6.2f} s  {name}")


if __name__ == "__main__":
    sys.exit(main())
