"""Mutants of the Hilbert method that the suite must kill: one line changed, one named statement that then fails.

A mutant is a copy of a module with a text replaced, under the name of the original until the test ends. All modules of
the method are then made anew around it, since they keep their plans: none that a mutant made may outlive it.
test_hilbert.py runs the same statements on the method as it is; that copying alone changes nothing is tested below.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from tests.test_mutants import PACKAGE, load
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
    module: str
    old: str
    new: str
    statement: str


MUTANTS = {
    "the tiles do not slide": Mutant(
        PLANS,
        "(phase, pattern.cycle), layout.unit",
        "(0, pattern.cycle), layout.unit",
        "plan_is_the_papers_pattern",
    ),
    "the tiles slide the other way": Mutant(
        TILING,
        'device="cpu") * cycle + phase)',
        'device="cpu") * cycle - phase)',
        "plan_is_the_papers_pattern",
    ),
    "the tile that wraps loses its second piece": Mutant(
        TILING,
        "(first - n).clamp(min=0), (last - n).clamp(min=0)",
        "(first - n).clamp(min=0), (first - n).clamp(min=0)",
        "plan_is_the_papers_pattern",
    ),
    "the queries of the wrap stay where they were": Mutant(
        TILING,
        "torch.where(positions < begins[0], positions + n, positions)",
        "positions.clamp(min=int(begins[0]))",
        "plan_is_the_papers_pattern",
    ),
    "tokens enter by the inverse permutation": Mutant(
        TOKENMAP,
        'self._moved("x", x, dim, self.order)',
        'self._moved("x", x, dim, self.inverse)',
        "tiles_are_squares_of_the_image",
    ),
    "tokens enter by the inverse permutation, seen in the steps": Mutant(
        TOKENMAP,
        'self._moved("x", x, dim, self.order)',
        'self._moved("x", x, dim, self.inverse)',
        "neighbours_on_the_ring_are_neighbours_in_the_image",
    ),
    "the tokens stay in raster order": Mutant(
        TILING,
        "        order = curve_order(grid, curve)\n",
        "        order = curves.raster(grid)\n",
        "tiles_are_squares_of_the_image",
    ),
    "shared tokens are not read": Mutant(
        PLANS,
        "always = [geometry.text_span, *(segment.shared for segment in layout.segments)]",
        "always = [geometry.text_span]",
        "plan_is_the_papers_pattern",
    ),
    "shared tokens do not read": Mutant(
        PLANS,
        "everything[slice(*segment.shared)] = True",
        "everything[slice(*segment.shared)] = False",
        "plan_is_the_papers_pattern",
    ),
    "the text does not read": Mutant(
        PLANS,
        'everything[slice(*geometry.text_span)] = pattern.text_reads == "all"',
        "everything[slice(*geometry.text_span)] = False",
        "plan_is_the_papers_pattern",
    ),
    "the text reads all whatever it was told": Mutant(
        PLANS,
        'everything[slice(*geometry.text_span)] = pattern.text_reads == "all"',
        "everything[slice(*geometry.text_span)] = True",
        "text_reads_images_in_summary",
    ),
    "text is near some of the image": Mutant(
        AROUND,
        "return nearest.masked_fill_(is_text[:, None, None], 0)",
        "return nearest",
        "text_reads_images_in_summary",
    ),
    "shared tokens read the first tile": Mutant(
        PLANS,
        "tiling.tile_at(segment.places, begins) + 1",
        "tiling.tile_at(segment.places * 0, begins) + 1",
        "shared_tokens_read_their_own_tile",
    ),
    "the farthest is read, not what is around": Mutant(
        AROUND,
        "distance.argsort(dim=1, stable=True)",
        "distance.argsort(dim=1, stable=True, descending=True)",
        "what_is_around_is_read",
    ),
    "the nearest is where another order has it": Mutant(
        TILING,
        "torch.unravel_index(segment.order, sides)",
        "torch.unravel_index(segment.order.sort().values, sides)",
        "what_is_around_is_read",
    ),
    "a row does not read itself": Mutant(
        AROUND,
        "distance.masked_fill_(is_own, -torch.inf)",
        "distance.masked_fill_(is_own, 1e9)",
        "what_is_around_is_read",
    ),
    "stretches cut windows in two": Mutant(
        AROUND,
        "k_block if pattern.far is None else math.lcm(k_block, pattern.far)",
        "k_block",
        "every_token_counts_once",
    ),
    "the far field holds the own tile, too": Mutant(
        FAR_FIELD,
        ".index_select(1, starts // k_block) == 0",
        ".index_select(1, starts // k_block) >= 0",
        "every_token_counts_once",
    ),
    "windows run into the block of a neighbour": Mutant(
        FAR_FIELD,
        "pieces += [(start, head), (head, tail), (tail, stop)]",
        "pieces += [(start, stop)]",
        "every_token_counts_once",
    ),
    "cuts fall inside windows": Mutant(
        LAYOUT,
        "q_block if pattern.far is None else math.lcm(q_block, pattern.far)",
        "q_block",
        "every_token_counts_once",
    ),
    "a summary counts once": Mutant(
        FAR_FIELD, "sizes.double().log()", "sizes.double().log().mul(0)", "far_field_is_its_formula"
    ),
    "short windows are divided by the long size": Mutant(
        LAYERS,
        "return window_means(x, self.starts, self.sizes, self.window, impl)",
        "return window_means(x, self.starts, self.sizes, self.window, impl) * (self.sizes / self.window)[:, None]",
        "far_field_is_its_formula",
    ),
    "the far field forgets its bias": Mutant(
        LAYERS, "self.far.plan, bias, ", "self.far.plan, None, ", "far_field_is_its_formula"
    ),
}


def changed(mutant: Mutant, folder: Path) -> Path:
    source = (PACKAGE / mutant.module).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.module} has changed; write this mutant anew"
    path = folder / Path(mutant.module).name
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
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
    method = copied_method(monkeypatch, mutant.module, changed(mutant, tmp_path))
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
    mutant = MUTANTS["tokens enter by the inverse permutation"]
    source = (PACKAGE / TOKENMAP).read_text(encoding="utf-8")
    both = source.replace(mutant.old, mutant.new).replace(
        'self._moved("y", y, dim, self.inverse)', 'self._moved("y", y, dim, self.order)'
    )
    path = tmp_path / "tokenmap.py"
    path.write_text(both, encoding="utf-8")
    method = copied_method(monkeypatch, TOKENMAP, path)
    geometry = method.Geometry((64, 64))
    ordering = method.Hilbert().ordering(geometry)
    tokens = method.torch.arange(4096)[None, :, None]
    assert method.torch.equal(ordering.leave(ordering.enter(tokens)), tokens)
    with pytest.raises(AssertionError):
        STATEMENTS["tiles_are_squares_of_the_image"](method)
