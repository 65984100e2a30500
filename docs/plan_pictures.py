"""Pictures of what the methods choose, and of the three nouns: `write(folder)` draws them from the library's own plans.

The tokens are patches of a made-up scene: three discs before a gradient, so that some are alike.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield import Geometry, Hilbert, LogLinear, Merge, attend, curves, planning
from nearfield.methods import loglinear
from nearfield.ops.predict import api as predict
from nearfield.plan.plan import Plan
from nearfield.retrieval.recomputing import plan_up_to
from nearfield_lab.plots.cells import canvas_of, draw_cells, draw_curve_lines
from nearfield_lab.plots.masks import draw_reads, draw_shares
from nearfield_lab.plots.panels import Drawing, draw_weights, side_by_side
from nearfield_lab.plots.style import BAR_COLOURS, FAINT, FAR, SHADE, SHARED_KEYS, rgb

GRID = (32, 32)
BLUE = BAR_COLOURS[0]
_GEOMETRY = Geometry(GRID)
_INKS = ((0.1, 0.45, 0.5), (0.6, 0.35, 0.05), (0.35, 0.05, 0.5))  # what each takes of red, green and blue
_DISCS = ((0.3, 0.3, 0.2), (0.62, 0.55, 0.26), (0.25, 0.75, 0.14))  # row, column, radius


def write(folder: Path) -> None:
    scene = _scene()
    move(folder / "concept-move.png")
    choose(folder / "concept-choose.png", scene)
    sum_up(folder / "concept-attend.png", scene)
    log_linear(folder / "loglinear-plan.png")
    fine(folder / "fine-plan.png", scene)
    merging(folder / "merging-plan.png", scene)
    retrieval(folder / "retrieval-plan.png")


def _picture(grid: tuple[int, int]) -> Tensor:
    """Rows, columns and the three discs, `[N, 5]` in raster order."""
    rows, columns = torch.meshgrid(*(torch.linspace(0, 1, side) for side in grid), indexing="ij")
    discs = [
        torch.sigmoid((radius - ((rows - row) ** 2 + (columns - column) ** 2).sqrt()) * 60)
        for row, column, radius in _DISCS
    ]
    return torch.stack([rows, columns, *discs], -1).flatten(0, 1)


def _scene(grid: tuple[int, int] = GRID) -> Tensor:
    """Features `[1, 1, N, 32]` of the tokens, in raster order: alike where the picture is."""
    generator = torch.Generator().manual_seed(0)
    angles = (
        _picture(grid) * torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0]) @ torch.randn(5, 32, generator=generator)
    )
    angles = angles + 6.28 * torch.rand(32, generator=generator)
    return 1.6 * (angles.cos() + 0.25 * torch.randn(angles.shape, generator=generator))[None, None]


def _along_curve(scene: Tensor, grid: tuple[int, int] = GRID) -> Tensor:
    return scene[:, :, curves.hilbert(grid)]


def _on_grid(values: Tensor, grid: tuple[int, int] = GRID) -> Tensor:
    """Values of tokens along the curve, in raster order."""
    return values[curves.inverse(curves.hilbert(grid))]


def _picked(grid: tuple[int, int] = GRID) -> int:
    """A block of 16 tokens along the curve that lies on the largest disc: its reading is shown on the picture."""
    cell = round(0.62 * grid[0]) * grid[1] + round(0.55 * grid[1])
    return int(curves.inverse(curves.hilbert(grid))[cell]) // 16


def _reads(plan: Plan) -> Tensor:
    return plan.block_counts()[0, 0] > 0


def _colours(kinds: Tensor, *names: str) -> Tensor:
    return torch.stack([rgb(name) for name in names])[kinds]


def _mask(title: str, plan: Plan, before: str = "") -> Drawing:
    words = f"{before}{plan.density:.1%} of the pairs"
    return Drawing(title, words, 1.0, lambda axis: draw_reads(axis, _reads(plan)))


def _cells(title: str, subtitle: str, colours: Tensor, label: Tensor | None = None) -> Drawing:
    label = torch.zeros(len(colours)) if label is None else label
    side = round(len(colours) ** 0.5)
    canvas = canvas_of((side, side))
    return Drawing(title, subtitle, 1.0, lambda axis: draw_cells(axis, colours, label, canvas))


# -- the three nouns ---------------------------------------------------------------------------------------------------


def move(path: Path) -> None:
    """The same run of the sequence, once in raster order and once along the curve."""
    orders = {
        "As they come: a run is a strip": curves.raster(GRID),
        "Moved: a run is a patch": curves.hilbert(GRID),
    }
    drawings = []
    for title, order in orders.items():
        is_run = torch.zeros(len(order), dtype=torch.long)
        is_run[order[448:576]] = 1
        colours = _colours(is_run, FAINT, FAR)

        def draw(
            axis: Any, order: Tensor = order, colours: Tensor = colours, is_run: Tensor = is_run
        ) -> None:
            draw_cells(axis, colours, is_run, canvas_of(GRID))
            draw_curve_lines(axis, order, canvas_of(GRID))

        drawings.append(Drawing(title, "tokens 448 to 575 of 1,024", 1.0, draw))
    side_by_side(path, drawings)


def choose(path: Path, scene: Tensor) -> None:
    """Plans of four kinds, one noun."""
    tokens = _along_curve(scene)
    drawings = [
        _mask("Dense: everything", planning.full(1024, 1024, q_block=16, k_block=16)),
        _mask("Hilbert: own tile", Hilbert(tiles=8, near="tile", far=None).plan(_GEOMETRY, 1)),
        _mask("LogLinear: chosen blocks", _chosen(tokens).near),
        _mask("A few keys at a time", _fine_plan(tokens)),
    ]
    side_by_side(path, drawings)


def sum_up(path: Path, scene: Tensor) -> None:
    """The list of one row of a plan, and the weights of one of its queries over what is read and over everything."""
    tokens, picked = _along_curve(scene), _picked()
    plan = _chosen(tokens).near
    keys = _reads(plan)[picked].repeat_interleave(16)
    query = tokens[0, 0, picked * 16 + 8]
    scores = tokens[0, 0] @ query / tokens.shape[-1] ** 0.5
    dense, sparse = scores.softmax(0), scores.masked_fill(~keys, float("-inf")).softmax(0)
    out, _ = attend(tokens, tokens, tokens, plan)
    assert torch.allclose(out[0, 0, picked * 16 + 8], sparse @ tokens[0, 0], atol=1e-4)
    rows = _reads(plan)
    colours = _colours((torch.arange(len(rows)) == picked).long(), SHADE, FAR)

    def weights(axis: Any) -> None:
        draw_weights(axis, dense, sparse, keys)

    side_by_side(
        path,
        [
            Drawing("A plan, and one row of it", f"row {picked}: a list of {int(rows[picked].sum())} blocks of keys",
                    1.0, lambda axis: draw_reads(axis, rows, colours)),
            Drawing("The sum over that list", "weights of one query; grey: what dense attention gives", 2.2, weights),
        ],
    )  # fmt: skip


# -- the methods -------------------------------------------------------------------------------------------------------


def _chosen(tokens: Tensor) -> loglinear.Chosen:
    return loglinear.choose(LogLinear(block=16, topk=6), tokens, tokens, tokens)


def _fine_plan(tokens: Tensor) -> Plan:
    blocks = predict.Blocks(32, 4, *2 * (_GEOMETRY.num_tokens,))
    lse = (tokens @ tokens.mT / tokens.shape[-1] ** 0.5).logsumexp(-1)
    return blocks.plan(predict.by_weights(tokens, tokens, lse, blocks, 8 / 1024).keep, compact=True)


def log_linear(path: Path) -> None:
    grid = (64, 64)
    chosen, picked = _chosen(_along_curve(_scene(grid), grid)), _picked(grid)
    assert chosen.far is not None
    exact = _reads(chosen.near)[picked].repeat_interleave(16)
    far = _reads(chosen.far)[picked * 16 // chosen.far.q_block].repeat_interleave(chosen.far.k_block)
    kinds = far[: 4096 // 16].long().repeat_interleave(16)  # level 1 stands first, and the top is read whole
    kinds[exact] = 2
    kinds[16 * picked : 16 * picked + 16] = 3
    colours = _colours(_on_grid(kinds, grid), FAINT, SHARED_KEYS, BLUE, FAR)
    side_by_side(
        path,
        [
            _mask("Read exactly", chosen.near),
            _mask("Read in summary", chosen.far, "256 and 16 means; "),
            _cells("What 16 queries read (red)", "blue: tokens; grey: means of 16; light: of 256", colours),
        ],
    )


def fine(path: Path, scene: Tensor) -> None:
    plan = _fine_plan(_along_curve(scene))
    row = _picked() * 16 // plan.q_block
    kinds = _reads(plan)[row].long().repeat_interleave(plan.k_block)
    kinds[row * plan.q_block : (row + 1) * plan.q_block] += 2
    colours = _colours(_on_grid(kinds), "#ffffff", BLUE, "#e7c3c5", FAR)
    side_by_side(
        path,
        [
            _mask("Lists of 32 queries", plan),
            _cells(
                "What 32 queries read (red)", "blue: kept keys, four at a time", colours, _on_grid(kinds // 2)
            ),
        ],
    )


def merging(path: Path, scene: Tensor) -> None:
    method = Merge(ratio=0.75, region_size=64)
    ordering = method.ordering(_GEOMETRY)
    made = method.merging(ordering.enter(scene[0]), _GEOMETRY)
    shares = made.enter(torch.eye(1024)[None])[0] * made.sizes[0, :, None]
    picture = _picture(GRID)
    before = 0.95 - 0.25 * picture[:, :1] - picture[:, 2:] @ torch.tensor(_INKS)
    after = ordering.leave(made.leave(made.enter(ordering.enter(before[None]))))[0]
    regions = ordering.leave((torch.arange(1024) // 64)[None])[0]
    side_by_side(
        path,
        [
            _cells("1,024 tokens", "runs of 64 tokens of a curve", before, regions),
            _cells("Composition and parted", "into 256, 16 of each run", after, regions),
            Drawing("The map of one run", "64 tokens into 16; dark: a large share", 1.0,
                    lambda axis: draw_shares(axis, shares[:16, :64])),
        ],
    )  # fmt: skip


def retrieval(path: Path) -> None:
    """Rows that are computed again read the cache up to their own positions; the first chunk is exact as it is."""
    lengths = (160, 160, 160, 160)
    num = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    rows = (160 + torch.randperm(num - 160, generator=generator)[: num * 15 // 100]).sort().values
    plan = plan_up_to(rows, num)
    visible = plan.to_mask()[0, 0] & (torch.arange(num)[None] <= rows[:, None])
    colours = _colours(rows // 160, "#ffffff", *BAR_COLOURS[:3])
    side_by_side(
        path,
        [
            Drawing(
                f"{len(rows)} rows computed again read the cache",
                "four chunks of 160 tokens; colour: the chunk of the row; here rows are drawn by lot",
                2.0,
                lambda axis: draw_reads(axis, visible, colours, borders=(160, 320, 480)),
            )
        ],
    )
