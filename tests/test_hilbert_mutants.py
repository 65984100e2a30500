"""Mutants of the Hilbert method that the suite must kill: one expression changed, one named statement that then fails.

A mutant is a copy of a module with an expression replaced, under the name of the original until the test ends. All
modules of the method are then made anew around it, since they keep their plans: none that a mutant made may outlive it.
test_hilbert.py runs the same statements on the method as it is; that copying alone changes nothing is tested below.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from tests.mutants import PACKAGE, changed
from tests.test_mutants import load
from tests.tiles import STATEMENTS

from nearfield.methods import registry

TILING, TOKENMAP = "layout/tiling.py", "layout/ordering.py"
LAYOUT, AROUND, PLANS, FAR_FIELD = (
    f"methods/hilbert/{name}.py" for name in ("layout", "around", "plans", "far_field")
)
LAYERS = "methods/layers.py"
# In the order in which they import each other.
MODULES = (
    TILING,
    TOKENMAP,
    LAYERS,
    LAYOUT,
    AROUND,
    PLANS,
    FAR_FIELD,
    "methods/hilbert/describe.py",
    "methods/hilbert/__init__.py",
)


class Mutant(NamedTuple):
    """See `tests.mutants.changed` for the first four."""

    module: str
    function: str
    old: str
    new: str
    statement: str


MUTANTS = {
    "the tiles do not slide": Mutant(
        LAYOUT,
        "Layout.cuts",
        "(phase, cycle)",
        "(0, cycle)",
        "plan_is_the_papers_pattern",
    ),
    "the tiles slide the other way": Mutant(
        TILING,
        "cuts",
        "torch.arange(tiles, device='cpu') * cycle + phase",
        "torch.arange(tiles, device='cpu') * cycle - phase",
        "plan_is_the_papers_pattern",
    ),
    "the tile that wraps loses its second piece": Mutant(
        TILING,
        "tile_spans",
        "last - n",
        "first - n",
        "plan_is_the_papers_pattern",
    ),
    "the queries of the wrap stay where they were": Mutant(
        TILING,
        "tile_at",
        "torch.where(positions < begins[0], positions + n, positions)",
        "positions.clamp(min=int(begins[0]))",
        "plan_is_the_papers_pattern",
    ),
    "tokens enter by the inverse permutation": Mutant(
        TOKENMAP,
        "Ordering.enter",
        "self.order",
        "self.inverse",
        "tiles_are_squares_of_the_image",
    ),
    "tokens enter by the inverse permutation, seen in the steps": Mutant(
        TOKENMAP,
        "Ordering.enter",
        "self.order",
        "self.inverse",
        "neighbours_on_the_ring_are_neighbours_in_the_image",
    ),
    "the tokens stay in raster order": Mutant(
        TILING,
        "segments_of",
        "curve_order(grid, curve)",
        "curves.raster(grid)",
        "tiles_are_squares_of_the_image",
    ),
    "shared tokens are not read": Mutant(
        PLANS,
        "near_plan",
        "[geometry.text_span, *(segment.shared for segment in layout.segments)]",
        "[geometry.text_span]",
        "plan_is_the_papers_pattern",
    ),
    "shared tokens do not read": Mutant(
        PLANS,
        "_reads_all",
        "everything[slice(*segment.shared)] = True",
        "everything[slice(*segment.shared)] = False",
        "plan_is_the_papers_pattern",
    ),
    "the text does not read": Mutant(
        PLANS,
        "_reads_all",
        "pattern.text_reads == 'all'",
        "False",
        "plan_is_the_papers_pattern",
    ),
    "the text reads all whatever the field says": Mutant(
        PLANS,
        "_reads_all",
        "pattern.text_reads == 'all'",
        "True",
        "text_reads_images_in_summary",
    ),
    "text is near some of the image": Mutant(
        AROUND,
        "_nearest",
        "nearest.masked_fill_(is_text[:, None, None], 0)",
        "nearest",
        "text_reads_images_in_summary",
    ),
    "shared tokens read the first tile": Mutant(
        PLANS,
        "_tile_spans",
        "segment.places",
        "segment.places * 0",
        "shared_tokens_read_their_own_tile",
    ),
    "the farthest is read, not what is around": Mutant(
        AROUND,
        "_nearest",
        "distance.argsort(dim=1, stable=True)",
        "distance.argsort(dim=1, stable=True, descending=True)",
        "what_is_around_is_read",
    ),
    "the nearest is where another order has it": Mutant(
        TILING,
        "coordinates",
        "segment.order",
        "segment.order.sort().values",
        "what_is_around_is_read",
    ),
    "a row does not read itself": Mutant(
        AROUND,
        "_nearest",
        "-torch.inf",
        "1000000000.0",
        "what_is_around_is_read",
    ),
    "stretches cut windows in two": Mutant(
        AROUND,
        "spans_around",
        "k_block if pattern.far is None else math.lcm(k_block, pattern.far)",
        "k_block",
        "every_token_counts_once",
    ),
    "the far field holds the own tile, too": Mutant(
        FAR_FIELD,
        "far_field_of",
        "near.block_counts()[0, 0].index_select(1, starts // k_block) == 0",
        "near.block_counts()[0, 0].index_select(1, starts // k_block) >= 0",
        "every_token_counts_once",
    ),
    "windows run into the block of a neighbour": Mutant(
        FAR_FIELD,
        "far_spans",
        "[(start, head), (head, tail), (tail, stop)]",
        "[(start, stop)]",
        "every_token_counts_once",
    ),
    "cuts fall inside windows": Mutant(
        LAYOUT,
        "layout_of",
        "q_block if pattern.far is None else math.lcm(q_block, pattern.far)",
        "q_block",
        "every_token_counts_once",
    ),
    "a summary counts once": Mutant(
        FAR_FIELD,
        "far_field_of",
        "sizes.double().log()",
        "sizes.double().log().mul(0)",
        "far_field_is_its_formula",
    ),
    "short windows are divided by the long size": Mutant(
        LAYERS,
        "FarField.pooled",
        "window_means(x, self.starts, self.sizes, self.window, impl)",
        "window_means(x, self.starts, self.sizes, self.window, impl) * (self.sizes / self.window)[:, None]",
        "far_field_is_its_formula",
    ),
    "the far field forgets its bias": Mutant(
        LAYERS,
        "FarField.part",
        "KeyValuePart(self.pooled(key, impl), self.pooled(value, impl), self.plan, self.bias)",
        "KeyValuePart(self.pooled(key, impl), self.pooled(value, impl), self.plan, None)",
        "far_field_is_its_formula",
    ),
}


def written(mutant: Mutant, folder: Path) -> Path:
    path = folder / Path(mutant.module).name
    path.write_text(changed(mutant.module, mutant.function, mutant.old, mutant.new), encoding="utf-8")
    return path


def copied_method(patch: pytest.MonkeyPatch, module: str = "", path: Path | None = None) -> ModuleType:
    """A copy of the method with caches of its own, made with another file in the place of one of its modules."""
    patch.setitem(registry._CLASSES, "hilbert", registry._CLASSES["hilbert"])  # the copy takes its place
    for file in MODULES:
        name = ".".join(("nearfield", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
        package, _, attribute = name.rpartition(".")
        original = sys.modules[name]
        copy = load(name, path if path and file == module else PACKAGE / file, patch)
        patch.setattr(sys.modules[package], attribute, copy)
        room = sys.modules[".".join(name.split(".")[:2])]
        for public, value in list(vars(room).items()):  # others take its names from the room
            if getattr(original, public, None) is value and hasattr(copy, public):
                patch.setattr(room, public, getattr(copy, public))
    return copy


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    method = copied_method(monkeypatch, mutant.module, written(mutant, tmp_path))
    with pytest.raises(AssertionError):
        STATEMENTS[mutant.statement](method)


@pytest.mark.parametrize("statement", sorted({mutant.statement for mutant in MUTANTS.values()}))
def test_statement_holds_without_mutants(statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = copied_method(monkeypatch)
    STATEMENTS[statement](method)
    kept = method.near_plan, method.ordering_of
    assert any(function.cache_info().currsize for function in kept)  # the copy's own


def test_coming_back_does_not_prove_locality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving undoes entering for the inverse permutation as well: only the places of the tokens tell."""
    path = written(MUTANTS["tokens enter by the inverse permutation"], tmp_path)
    path.write_text(changed(str(path), "Ordering.leave", "self.inverse", "self.order"), encoding="utf-8")
    method = copied_method(monkeypatch, TOKENMAP, path)
    geometry = method.Geometry((64, 64))
    ordering = method.Hilbert().ordering(geometry)
    tokens = method.torch.arange(4096)[None, :, None]
    assert method.torch.equal(ordering.leave(ordering.enter(tokens)), tokens)
    with pytest.raises(AssertionError):
        STATEMENTS["tiles_are_squares_of_the_image"](method)
