"""A real Ray of this machine. One test, for a cluster takes seconds to start and tests may run in several processes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests import command_line as cli

from nearfield_lab.commands import many
from nearfield_lab.embedded.pictures import packed


def painting(mark: Path) -> type[many.Job]:
    """A job that loads no model, which takes long: every picture has the colour of its number.

    The batch that begins with 2 ends its worker where it is tried for the first time. The class travels by value: it
    is made here, and workers cannot import the tests.
    """

    class Painting(many.Job):
        def __call__(self) -> Callable[[range], list[bytes]]:
            def paint(numbers: range) -> list[bytes]:
                if numbers[0] == 2 and not mark.exists():
                    mark.touch()
                    os._exit(1)
                return [packed(torch.full((8, 8, 3), number, dtype=torch.uint8)) for number in numbers]

            return paint

    return Painting


def test_a_cluster_whose_worker_dies_makes_every_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray")
    mark, report = tmp_path / "died", tmp_path / "ray.json"
    monkeypatch.setattr(many, "Job", painting(mark))
    words = ["generate", "--num", "5"]
    for option in ("batch=2", "engine=ray", "workers=1", "device=cpu"):
        words += ["--option", option]
    code = cli.main([*words, "--images", str(tmp_path), "--json", str(report)])
    assert code == 0, capsys.readouterr().err
    assert mark.exists()
    colours = [Image.open(path).getpixel((0, 0)) for path in sorted((tmp_path / "hilbert").glob("*.png"))]
    assert colours == [(number, number, number) for number in range(5)]
    record = json.loads(report.read_text())
    assert (record["engine"], record["workers"], record["pictures_of_this_run"]) == ("ray", 1, 5)
    assert (record["missing"], record["retries"], record["failures"]) == (0, 1, [])
    assert not ray.is_initialized()  # what the command has started it has ended
