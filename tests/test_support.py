"""The committed support matrix is what its generator makes, and the generator can tell."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
from docs import support

from nearfield import Hilbert
from nearfield.diffusers import all_specs
from nearfield.methods import MergeMethod, method_classes

COMMITTED = (Path(__file__).resolve().parents[1] / "docs" / "support.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made() -> str:
    return support.page()


def cells(page: str, title: str) -> dict[str, dict[str, str]]:
    """A table by its first column and its header."""
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    header, _, *rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*", section, re.M)
    ]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def test_committed_page_is_up_to_date(made: str) -> None:
    assert made == COMMITTED, "run `make docs`"


def test_every_method_works_or_is_refused_by_rule(made: str) -> None:
    """Some methods know images only; merging needs blocks that add to their tokens."""
    kinds = {kind.__name__: kind for kind in method_classes(installed=False).values()}
    table = cells(made, "Models and methods")
    assert list(table) == [spec.model for spec in all_specs()]
    for spec in all_specs():
        row = table[spec.model]
        assert set(row) == set(kinds)
        for name, kind in kinds.items():
            is_merging = issubclass(kind, MergeMethod)
            refused = (spec.text and not kind.takes_text) or (is_merging and not spec.blocks)
            works = "runs" if kind.everything is None else "exact"
            assert row[name] == ("-" if refused else works), (name, spec.model)


def test_features_come_from_the_tests() -> None:
    table = cells(COMMITTED, "Models and features")
    assert table["ZImageTransformer2DModel"]["ControlNet"] == "yes"
    assert table["PixArtTransformer2DModel"]["LoRA"] == ""
    assert table["WanTransformer3DModel"]["gradients"] == "yes"
    for spec in all_specs():
        assert (table[spec.model]["references"] == "yes") == spec.takes_references


def test_trying_tells_wrong_from_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that changes nothing, one that breaks the model, and one whose whole is not the stock model."""
    (flux,) = (spec for spec in all_specs() if spec.model == "FluxTransformer2DModel")
    sparse = Hilbert(tiles=4, shared="none", dense_layers=0, dense_steps=0)
    assert support.tried(flux, support.Tried(sparse, {"tiles": 1})) == "exact"
    assert support.tried(flux, support.Tried(sparse, {"tiles": 3})) == "wrong"
    assert support.tried(flux, support.Tried(Hilbert(tiles=1, dense_layers=0))) == "wrong"
    monkeypatch.setattr(support, "_applied", lambda *_: torch.tensor(float("nan")))
    assert support.tried(flux, support.Tried(sparse)) == "wrong"
