"""The command line as tests call it: `nearfield` with the commands of the lab, and `python -m benchmarks`."""

import argparse
from collections.abc import Sequence

import pytest
from benchmarks.__main__ import main as benchmarks

from nearfield import cli
from nearfield.cli.main import parser_of
from nearfield_lab import commands as lab


def main(words: Sequence[str]) -> int:
    """The exit code of a command; the word `bench` stands for `python -m benchmarks`."""
    if words and words[0] == "bench":
        return benchmarks(words[1:])
    return cli.main(words, others=[lab.add_commands])


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of `nearfield` with the commands of the lab."""
    return parser_of([lab.add_commands], words)


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What a command prints; on stderr where it is to fail. Texts are cut into words, anything else is one word."""
    cut = [part for word in words for part in (word.split() if isinstance(word, str) else [str(word)])]
    capsys.readouterr()
    got, captured = main(cut), capsys.readouterr()
    assert got == code, captured.err + captured.out
    return captured.err if code else captured.out
