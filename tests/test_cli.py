"""The commands: what they print, write and return, and what they say when they cannot."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests import command_line as cli

import nearfield_lab
from nearfield import Geometry, Hilbert, PlanMethod, curves, recipes
from nearfield._types import Attended, Impl
from nearfield.cli import arguments as choices
from nearfield.cli import explain, presets
from nearfield.cli import main as nearfield_main
from nearfield.cli.main import LAB, main
from nearfield.methods import Composition, MergeMethod, PlanLayer, method_classes
from nearfield.methods.fields import fields_of, shown, texts_of
from nearfield.ops import _triton as kernels
from nearfield.ops._triton import launch
from nearfield.ops.attention.api import attend

ROOT = Path(__file__).resolve().parents[1]

BENCH = ["bench", "attention", "--quick", "--cases", "cpu-small-random-64"]


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine everywhere: no GPU, and no kernels in Triton's slow interpreter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(kernels, "missing", lambda _: "switched off by the test")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err + captured.out
    return captured.out


# -- help and errors ---------------------------------------------------------------------------------------------------


COMMANDS = [
    "",
    "doctor",
    "explain",
    "bench",
    "bench attention",
    "bench step",
    "bench pareto",
    "bench pictures",
    "studio",
]


@pytest.mark.parametrize("command", [name.split() for name in COMMANDS])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    is_benchmark = command[:1] == ["bench"]
    assert text.startswith("usage: python -m benchmarks" if is_benchmark else "usage: nearfield")
    if command != ["bench"]:
        assert "examples:\n  " in text
        assert "exit codes: 0 done" in text


def test_choices_are_those_of_the_library() -> None:
    """Written out in the command line, which imports nothing to read its arguments."""
    assert get_args(Impl) == choices.IMPLS


def test_help_names_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "--help"])
    assert set(presets.PRESETS) <= set(capsys.readouterr().out.replace(",", " ").split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("nearfield 0.")


PRESET_NAMES = (
    "flux-1024, flux-2048, flux-4096, wan-480p, pixel-128, pixel-256, cpu-flux-1024, cpu-pixel-64, cpu-small"
)
BAD_CALLS = {
    "explain flux-1024 --grid 0x7": "`--grid` must be one to three positive sides joined by x; got '0x7'. "
    "Example: --grid 90x160",
    "explain flux-1024 --grid 2048x2048": "`--grid` must hold at most 262,144 tokens; got 4,194,304.",
    "explain flux-1024 --text 9000": "`--text` must be at most 8,192; got 9,000.",
    "explain flux-1024 --set tiles=many": "`tiles` must be an integer, numbers between commas or none; got 'many'.",
    "explain flux-1024 --set tiles": "`--set` must be FIELD=VALUE; got 'tiles'. Example: --set dense_steps=0",
    "explain flux-1024 --layer -1": "`--layer` must be an integer of at least 0; got '-1'.",
    "explain flux-1024 --set dense_layers=57,": "`dense_layers` must hold indices from -57 to 56; got 57.",
    "explain flux-1024 --device sofa": "`--device` must name a device; got 'sofa'. Example: --device cuda:1",
    "explain --method dense": "`--method` must be sparse; got dense.",
    "explain flux-1024 --method fast": "`--method` must be one of METHODS; got 'fast'.",
    "explain flux-3": f"`PRESET` must be one of {PRESET_NAMES}; got 'flux-3'.",
    "explain --colour": "unrecognized arguments: --colour. See `nearfield --help`.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(call.split()) == 2
    captured = capsys.readouterr()
    told = BAD_CALLS[call].replace("METHODS", ", ".join(method_classes()))  # other tests define some, too
    assert captured.err == f"nearfield: error: {told}\n"
    assert captured.out == ""


@pytest.mark.parametrize(("command", "name"), [([], "nearfield"), (["bench"], "python -m benchmarks")])
def test_without_a_command_the_help_is_shown(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"usage: {'python -m benchmarks' if command else 'nearfield'} [-h]")
    assert captured.out == ""


def commands_of(parser: argparse.ArgumentParser) -> set[str]:
    (family,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return set(family.choices)


def test_without_the_lab_its_commands_say_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["nearfield.cli.main"], "entry_points", lambda group: [])
    for name in LAB:
        assert main([name, "--compare"]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert line.startswith(
            f"nearfield: error: `nearfield {name}` comes with nearfield-lab. Run `pip install nearfield-lab`"
        )
        assert captured.out == ""
    assert main(["explain", "cpu-small"]) == 0


def test_the_commands_of_the_lab_are_known() -> None:
    assert commands_of(cli.parser()) == {"bench", "doctor", "explain", *LAB}


def test_output_must_be_named_and_its_directory_writable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cli.main([*BENCH, "--json", ""]) == 2
    assert "`--json` must name a file; got ''." in capsys.readouterr().err
    assert cli.main([*BENCH, "--json", "x" * 300]) == 2
    assert "`--json` must be a usable path; got 'xxx" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cli.main([*BENCH, "--json", str(tmp_path / "new" / "a.json")]) == 2
    assert f"where {tmp_path} takes none. Example: " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_missing_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*BENCH, "--plot", "never.png"]) == 2
    assert "Install it with `pip install nearfield-lab`." in capsys.readouterr().err


PLOTTING = (
    "bench attention",
    "bench pareto",
    "bench pictures",
    "bench scaling",
    "bench retrieval",
    "rag --docs a --ask b",
    "tune",
)


@pytest.mark.parametrize("call", PLOTTING)
def test_pictures_are_asked_for_by_one_name(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = call.split(" --")[0].split()
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    assert "--plot FILE" in capsys.readouterr().out
    assert cli.main([*call.split(), "--plot", "picture.gif"]) == 2
    assert "`--plot` must end in .png" in capsys.readouterr().err


def test_doctor_says_which_extra_brings_what_is_missing() -> None:
    from nearfield.cli import doctor

    report = doctor.examine()
    report["machine"]["versions"] |= {"diffusers": None, "transformers": "5.0", "nearfield-lab": None}
    lines = doctor.text(report).splitlines()
    assert "diffusers     not installed (extra diffusers: `apply`)" in lines
    assert "transformers  5.0" in lines
    assert any(line.startswith("nearfield-lab not installed (pip install nearfield-lab: ") for line in lines)


def test_interrupt_ends_cleanly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nearfield.cli.doctor.examine", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nnearfield: interrupted\n"


def test_interrupt_during_an_import_ends_cleanly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "nearfield.cli.explain":
                raise KeyboardInterrupt

    import nearfield.cli.explain

    monkeypatch.delitem(sys.modules, "nearfield.cli.explain")
    monkeypatch.delattr(nearfield.cli, "explain")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert cli.main(["explain", "cpu-small"]) == 130
    assert capsys.readouterr().err == "\nnearfield: interrupted\n"


def program(
    *arguments: str, shell: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with its output sent where `shell` says."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "error", "-m", "nearfield", *arguments]
    return subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} {shell}"],
        env=os.environ | {"PYTHONPATH": path} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_runs_as_a_program() -> None:
    done = program("explain", "flux-9")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("nearfield: error: `PRESET` must be one of")


def test_missing_characters_are_replaced() -> None:
    done = program("explain", "cpu-small", environment={"PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0, done.stderr
    assert "          ?" in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("shell", "message"),
    [("> /dev/full", "[Errno 28] No space left on device"), (">&-", "stdout is closed")],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_one_line(shell: str, message: str, unbuffered: str) -> None:
    done = program("--help", shell=shell, environment={"PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    assert done.stderr == f"nearfield: error: {message}\n"


def test_closed_stderr_keeps_the_exit_code() -> None:
    done = program("explain", "flux-9", shell="2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


# -- doctor and explain ------------------------------------------------------------------------------------------------


def test_doctor_reports_versions_choices_and_a_passed_check(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "doctor", "--json"))
    assert report["ok"] is True
    assert report["machine"]["versions"]["torch"] == str(torch.__version__)
    cpu = report["devices"]["cpu"]
    assert cpu["forward"]["impl"] == "grouped"
    assert set(cpu["forward"]["others"]) == {"gluon", "triton", "reference"}
    assert cpu["self_check"]["relative_error"] < 1e-5


def slow_machine(**change: Any) -> list[str]:
    """What is said of an idle Hopper machine on which one thing is otherwise."""
    from nearfield.cli.doctor import slow_reasons

    choice = {"impl": change.get("impl", "gluon"), "others": change.get("others", {})}
    gpus = [{"capability": change.get("capability", "9.0")}]
    facts = {
        "versions": {"cuda": change.get("cuda", "13.0"), "triton": change.get("triton", "3.6.0")},
        "cpu": {"cores": 16, "threads": change.get("threads", 8)},
        "gpus": change.get("gpus", gpus),
        "load": change.get("load", 0.5),
    }
    devices = {"cuda:0": {"forward": choice, "dense": change.get("dense", "cudnn_attention")}}
    return slow_reasons(facts, devices, change.get("has_gpu", True))


FLOAT32 = "In float32 kernels do without tensor cores: load models with `torch_dtype=torch.bfloat16`."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"triton": None, "impl": None}, "Triton is not installed"),
        ({"impl": "triton", "others": {"gluon": "Triton 3.5 is unknown"}}, "(Triton 3.5 is unknown)"),
        ({"dense": "flash_attention"}, "cuda:0: torch's dense attention is FlashAttention-2"),
        ({"dense": "math"}, "cuda:0: torch's dense attention is not fused"),
        ({"threads": 4}, "torch uses 4 threads of 16 cores"),
        ({"load": 40.0}, "a load of 40 on 16 cores"),
    ],
)
def test_doctor_explains_what_is_slow(change: dict[str, Any], words: str) -> None:
    told = slow_machine(**change)
    assert [words in line for line in told].count(True) == 1
    assert len(told) == 2
    assert FLOAT32 in told


def test_doctor_is_silent_where_nothing_is_slow() -> None:
    assert slow_machine() == [FLOAT32]
    assert slow_machine(
        capability="8.9", impl="triton", others={"gluon": "Hopper"}, dense="flash_attention"
    ) == [FLOAT32]
    assert slow_machine(load=None) == [FLOAT32]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"has_gpu": False}, "There is no GPU"),
        ({"cuda": None}, "this torch was built without CUDA"),
        ({}, "built for CUDA 13.0, cannot use: the driver may be too old"),
    ],
)
def test_doctor_explains_why_no_gpu_is_used(change: dict[str, Any], words: str) -> None:
    (told,) = slow_machine(gpus=[], **change)
    assert words in told


def test_doctor_text_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "doctor")
    assert "grouped runs: " in text
    assert "not triton: the tensors are not on a GPU" in text
    assert "(impl='triton' with TRITON_INTERPRET=1 in the environment)" in text
    assert "self-check passed" in text
    assert "\nWhat may be slow here:\n  There is " in text


def test_doctor_lists_the_weights_with_their_licences(capsys: pytest.CaptureFixture[str]) -> None:
    package = Path(nearfield_lab.__file__).parent
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.safetensors")}
    assert len(files) == 5
    listed = json.loads(run(capsys, "doctor", "--json"))["weights"]
    assert {f"{record['folder']}/{record['file']}" for record in listed} == files
    text = run(capsys, "doctor")
    assert "weights       cats.safetensors: CC-BY-NC-4.0, not for commercial use\n" in text
    assert all(f"{record['file']}: {record['licence']}, {record['use']}\n" in text for record in listed)


def test_doctor_fails_when_the_answer_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*tensors: torch.Tensor, impl: str) -> Attended:
        out, lse = attend(*tensors, impl=impl)
        return Attended(out * (1.001 if impl == "auto" else 1.0), lse)

    monkeypatch.setattr("nearfield.cli.doctor.attend", broken)
    assert cli.main(["doctor"]) == 1
    assert "self-check FAILED: relative error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("grid", "text", "tokens"), [("90x160", 512, 14912), ("21x30x52", 0, 32760), ("1x7", 0, 7), ("5", 3, 8)]
)
def test_explain_any_grid(grid: str, text: int, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "flux-1024", "--grid", grid, "--text", str(text), "--layer", "1"]
    report = json.loads(run(capsys, *arguments, "--json"))
    assert report["shape"]["N"] == tokens
    assert 0 < report["density"] <= 1
    assert report["bound_over_dense"] == pytest.approx(1 / report["density"])
    assert report["pairs"] <= report["dense_pairs"]
    assert report["forward"]["impl"] == "grouped"
    assert str(curves.choose(tuple(map(int, grid.split("x"))))) in report["description"]


def test_explain_prints_a_preview_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "explain", "flux-1024", "--heads", "2")
    assert "flux-1024: batch 1, 2 heads, 4,608 tokens, head dimension 128 (grid 64x64, 512 text)" in text
    assert "method    Hilbert()\n" in text
    assert "around: 512 tokens, those nearest to each block of 128" in text
    assert "the first 3 and the last 0 are dense" in text
    assert text.count("│") == 48
    assert "forward and backward: grouped runs: " in text


def test_what_is_explained_is_what_the_method_reads(capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs of the layers, of all layers, and of all steps, from the method's own layers."""
    words = (
        "explain cpu-small --set near=tile --set tiles=2,4 --set dense_layers=1 --set dense_steps=0.25 --json"
    )
    report = json.loads(run(capsys, *words.split()))
    method = Hilbert(near="tile", tiles=(2, 4), dense_layers=1, dense_steps=0.25)
    geometry = Geometry((24, 24), text=64)
    density = [method.layer(geometry, layer, heads=2).num_pairs / 640**2 for layer in range(4)]
    assert [layer["density"] for layer in report["layers"]] == density
    assert report["pairs"] == round(density[0] * 640**2) * 2
    assert report["dense_layers"] == {"0": "dense_layers=1"}
    over_layers = (1 + sum(density[1:])) / 4
    assert report["density_over_layers"] == pytest.approx(over_layers)
    assert report["dense_steps"] == [5, 0]
    assert report["bound_over_dense_over_steps"] == pytest.approx(1 / (0.25 + 0.75 * over_layers))
    assert report["fields"]["tiles"] == "2,4"
    assert report["description"] == method.describe(geometry)


@pytest.mark.parametrize("kind", method_classes().values(), ids=lambda kind: kind.name)
def test_every_method_is_explained(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name alone, and on a preset; without text where it takes none."""
    words = ["explain", "--method", kind.name, "--grid", "16x16"]
    report = json.loads(run(capsys, *words, "--json"))
    assert report["method"] == kind.name
    assert report["text"] == (512 if kind.takes_text else 0)
    assert set(report["fields"]) == {field.name for field in fields_of(kind)}
    pairs = Composition.of(kind()).shortened(Geometry((16, 16), text=report["text"])).num_tokens ** 2
    assert report["pairs"] is None or 0 < report["pairs"] <= 24 * pairs
    text = run(capsys, *words)
    assert f"fields of {kind.name}:\n" in text
    for field in fields_of(kind):
        assert f"\n  {field.name}={shown(field.default)}" in text


def test_a_method_that_merges_is_explained_with_one_that_reads(capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain cpu-small --method merge+hilbert --set ratio=0.5 --json"
    report = json.loads(run(capsys, *words.split()))
    assert report["label"] == "Merge() | Hilbert()"
    assert report["tokens_left"] < 64 + 576
    alone = json.loads(run(capsys, "explain", "cpu-small", "--method", "merge", "--json"))
    assert report["pairs"] < alone["pairs"] == 2 * alone["tokens_left"] ** 2


def test_explain_alone_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "explain")
    for name in (*presets.PRESETS, *method_classes()):
        assert f"\n  {name} " in text
    found = json.loads(run(capsys, "explain", "--json"))
    assert set(found["presets"]) == set(presets.PRESETS)
    assert all(found["methods"].values())


def test_explain_takes_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "explain", "cpu-flux-1024", "--recipe", "cats-close", "--json"))
    assert report["fields"] == texts_of(recipes.read("cats-close").method)


def num_options(parser: argparse.ArgumentParser) -> int:
    return sum(
        bool(action.option_strings) and action.help != argparse.SUPPRESS
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    )


def leaves(
    parser: argparse.ArgumentParser, name: str = "nearfield"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    families = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not families:
        yield name, parser
    for family in families:
        for each, child in family.choices.items():
            yield from leaves(child, f"{name} {each}")


@pytest.mark.parametrize(("name", "parser"), list(leaves(cli.parser())), ids=lambda value: str(value)[:30])
def test_every_command_has_few_options_and_each_has_help(name: str, parser: argparse.ArgumentParser) -> None:
    assert num_options(parser) <= 15, name
    for action in parser._actions:
        assert action.help, f"{name} {action.option_strings or action.dest}"
    further = parser.epilog or ""
    if "--option" in {word for action in parser._actions for word in action.option_strings}:
        listed = further.partition("\n\n")[0]
        assert listed.startswith("further options, each as --option NAME=VALUE:\n  ")
        for entry in re.findall(r"^  (\S+)=\S+ +(.*)$", listed, re.MULTILINE):
            assert len(entry[1]) > 3, (name, entry)


def test_explain_makes_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for them is small, and shaped and aligned so that the kernels take it."""
    shape = presets.PRESETS["flux-4096"].shape
    stand_in = explain._stand_in(shape, torch.bfloat16, "cpu")
    assert stand_in.shape == shape
    assert stand_in.untyped_storage().nbytes() < 2**21
    monkeypatch.setattr(launch, "is_interpreted", lambda: True)
    assert launch.suits_copy_engine(stand_in)


def test_the_page_of_commands_is_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/command_tables.py` writes it, with a section for every command."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import command_tables

    page = command_tables.page()
    assert command_tables.PAGE.read_text(encoding="utf-8") == page, "run `make docs`"
    named = set(re.findall(r"^## `(nearfield [\w ]+)`$", page, re.MULTILINE))
    assert named == {name for name, _ in leaves(cli.parser())}


# -- one call of a method ----------------------------------------------------------------------------------------------


def nearfield_bench(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """`nearfield bench`, which is not `python -m benchmarks`."""
    assert nearfield_main(["bench", "cpu-small", "--quick", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code != 2 else captured.err


def test_a_call_of_the_method_is_timed_and_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    text = nearfield_bench(
        capsys, "--set", "near=tile", "--set", "tiles=8", "--layer", "1", "--json", str(path)
    )
    assert "float32, kernel only\n" in text
    assert "method    Hilbert(tiles=8, near='tile'), layer 1\n" in text
    assert "check     relative error " in text
    assert "grouped runs: " in text
    found = json.loads(path.read_text())
    layer = Hilbert(near="tile", tiles=8).layer(Geometry((24, 24), text=64), 1)
    assert found["density"] == layer.num_pairs / 640**2
    median = found["milliseconds"]["median"]
    assert found["speed_up"] == pytest.approx(found["dense_milliseconds"]["sdpa"]["median"] / median)
    assert found["fraction_of_dense_rate"] == pytest.approx(found["speed_up"] * found["density"])
    assert (found["status"], found["check"]["passed"], found["host_microseconds"]) == ("ok", True, None)
    assert found["fields"]["tiles"] == "8"
    assert found["choices"][0]["forward"]["impl"] == "grouped"
    assert {"versions", "cpu", "gpus"} <= set(found["machine"])


@pytest.mark.parametrize(
    "broken",
    [lambda out: out * 1.001, lambda out: out.index_fill(2, torch.tensor([100]), float("nan"))],
    ids=["wrong", "not finite"],
)
def test_a_wrong_call_gets_no_figure(
    broken: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = PlanLayer.attend

    def wrong(*arguments: Any, **options: Any) -> Attended:
        out, lse = right(*arguments, **options)
        return Attended(broken(out), lse)

    monkeypatch.setattr(PlanLayer, "attend", wrong)
    path = tmp_path / "bench.json"
    text = nearfield_bench(capsys, "--json", str(path), code=1)
    assert "no figures: the answer is wrong\n" in text
    found = json.loads(path.read_text())
    assert found["status"] == "check failed"
    for figure in ("milliseconds", "dense_milliseconds", "speed_up", "density", "fraction_of_dense_rate"):
        assert found[figure] is None


@pytest.mark.parametrize(
    "kind",
    [kind for kind in method_classes().values() if not issubclass(kind, MergeMethod)],
    ids=lambda each: each.name,
)
def test_every_method_that_reads_can_be_timed(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those whose result depends on earlier steps; what no plan says is not said to be checked."""
    words = ["--grid", "12x12", *(() if kind.takes_text else ("--text", "0"))]
    text = nearfield_bench(capsys, "--method", kind.name, *words)
    assert f"method    {kind.__name__}(), layer 0\n" in text
    assert "x as fast as sdpa" in text
    assert " kept, at most " in text
    is_known = issubclass(kind, PlanMethod)
    assert ("check     relative error " in text) == is_known
    assert ("no plan says beforehand who reads whom" in text) != is_known
    assert ("note: queries and keys are random" in text) != is_known


BAD_BENCHES = {
    "--method merge": "`--method` must be one that says who reads whom; got 'merge'. What merging saves shows in a "
    "whole step: `nearfield bench --model`.",
    "--method dense": "`--method` must be sparse; got dense.",
    "--method gatedblocks": "`geometry` must ",
    "--impl triton": "`impl` must be able to run this call; got 'triton'. ",
}


@pytest.mark.parametrize("words", BAD_BENCHES)
def test_calls_that_cannot_be_timed_say_why(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = nearfield_bench(capsys, *words.split(), code=2)
    assert error.splitlines()[-1].startswith(f"nearfield: error: {BAD_BENCHES[words]}")


# -- pictures ----------------------------------------------------------------------------------------------------------


def is_a_picture(path: Path) -> bool:
    """Whether the file decodes and shows more than a few colours."""
    from matplotlib.image import imread

    pixels = torch.from_numpy(imread(path))[..., :3]
    colours = pixels.flatten(0, 1).mul(255).round().unique(dim=0)
    return min(pixels.shape[:2]) > 100 and len(colours) > 8
