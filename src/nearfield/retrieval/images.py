"""An image as chunks: the cells of a k x k grid, each of which sees only the text before the image and itself.

Keys are computed at the model's own positions of rows and columns, so they are not moved. Rows are then scored,
selected and recomputed as in any context.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield._types import Positions
from nearfield.ops import attend
from nearfield.plan import builders as planning
from nearfield.retrieval.chunks import Context, cache_of
from nearfield.retrieval.reading import run
from nearfield.retrieval.rotary import check_model, check_window


class _Captured(Exception):
    pass


@torch.no_grad()
def read_image(model: Any, inputs: Mapping[str, Tensor], cells: int = 2) -> tuple[Context, Tensor]:
    """The context of a prompt up to the end of its image, and the tokens `[N]` that follow it.

    Args:
        model: of the Qwen2-VL or Qwen2.5-VL classes.
        inputs: what the model's processor gives for one prompt with one image.
        cells: cells per side of the grid; 1 is full prefill.

    To generate, give `generate` the whole prompt's `input_ids` and `attention_mask`, and the context's cache: the
    model remembers the positions of the image it saw last, which is this one.
    """
    check_model(model, is_moved=False)
    check_int("cells", cells, at_least=1)
    tokens, first, last = _image_span(model, inputs)
    check_window(model, last)
    embeddings, angles = _decoder_inputs(model, inputs)
    owner = torch.zeros(last, dtype=torch.long, device=tokens.device)
    owner[first:last] = 1 + _cell_of(model, inputs["image_grid_thw"][0], cells).to(tokens.device)
    cache = _Cells(len(model.get_decoder().layers))
    for index in owner.unique().tolist():  # the text first: the cells read it
        rows = torch.nonzero(owner == index)[:, 0]
        run(model, tokens[rows], angles[:, rows], cache.entered(rows), embeddings[rows])
    counts = torch.bincount(owner)
    context = Context(
        tokens[:last],
        torch.arange(last, device=tokens.device),
        owner,
        _places(owner),
        tuple(counts.tolist()),
        cache.in_order(),
        angles[:, :last],
        embeddings[:last],
    )
    return context, tokens[last:]


def _image_span(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int, int]:
    """All token ids, and where those of the image begin and end."""
    for name in ("input_ids", "pixel_values", "image_grid_thw"):
        if name not in inputs:
            wrong_value("inputs", f"hold `{name}`", ", ".join(inputs), "Use the model's processor.")
    if len(inputs["input_ids"]) != 1 or len(inputs["image_grid_thw"]) != 1:
        shapes = f"{len(inputs['input_ids'])} and {len(inputs['image_grid_thw'])}"
        wrong_value("inputs", "hold one prompt with one image", shapes)
    tokens = inputs["input_ids"][0].to(model.device)
    rows = torch.nonzero(tokens == model.config.image_token_id)[:, 0]
    if not len(rows) or int(rows[0]) == 0:
        wrong_value("inputs", "hold text, then an image", "no text before an image")
    if int(rows[-1]) + 1 == len(tokens):
        wrong_value("inputs", "end in text", "an image at the end")
    return tokens, int(rows[0]), int(rows[-1]) + 1


def _decoder_inputs(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Embeddings `[T, hidden]` and positions `[axes, T]` as the model itself makes them for its decoder."""
    found: dict[str, Tensor] = {}

    def capture(module: Any, args: Any, options: dict[str, Any]) -> None:
        found.update(embeddings=options["inputs_embeds"], positions=options["position_ids"])
        if "deepstack_visual_embeds" in options:
            name = type(model).__name__
            raise NotImplementedError(f"`model` must see images at its first layer alone; got {name}.")
        raise _Captured

    hook = model.get_decoder().register_forward_pre_hook(capture, with_kwargs=True)
    try:
        model(**inputs, use_cache=False)
    except _Captured:
        pass
    finally:
        hook.remove()
    positions = found["positions"]
    if positions is None:
        wrong_value(
            "inputs", "hold what positions are made of", ", ".join(inputs), "Use the model's processor."
        )
    embeddings: Tensor = found["embeddings"][0]
    return embeddings, positions[-3:, 0]  # the first of four rows would be places in the sequence


def _cell_of(model: Any, grid: Tensor, cells: int) -> Tensor:
    """The cell of each of an image's tokens, which stand line by line."""
    merged = int(model.config.vision_config.spatial_merge_size)
    frames, height, width = int(grid[0]), int(grid[1]) // merged, int(grid[2]) // merged
    if cells > min(height, width):
        wrong_value("cells", f"be at most {min(height, width)}, the image's shorter side in tokens", cells)
    lines, columns = torch.arange(height) * cells // height, torch.arange(width) * cells // width
    return (lines[:, None] * cells + columns).flatten().repeat(frames)


def _places(owner: Tensor) -> Tensor:
    """The place of each row among those of its chunk."""
    places = torch.zeros_like(owner)
    for index in owner.unique().tolist():
        own = owner == index
        places[own] = torch.arange(int(own.sum()), device=owner.device)
    return places


class _Cells:
    """Keeps keys and values of the parts that ran. Every part reads the first part, and itself causally."""

    def __init__(self, num_layers: int) -> None:
        self._parts: list[Tensor] = []
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def entered(self, rows: Tensor) -> "_Cells":
        """Prepare for the part that consists of these rows."""
        self._parts.append(rows)
        readable = rows if len(self._parts) == 1 else torch.cat([self._parts[0], rows])
        self._positions = Positions(rows[None], readable[None])
        self._plan = planning.full(len(rows), len(readable), device=rows.device)
        return self

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        kept = self._kept[layer]
        kept.append((key, value))
        if len(kept) > 1:
            key, value = torch.cat([kept[0][0], key], 2), torch.cat([kept[0][1], value], 2)
        if layer == len(self._kept) - 1:
            return None
        return attend(query, key, value, self._plan, positions=self._positions, scale=scale).out

    def in_order(self) -> Any:
        """A cache with all rows where they stand in the prompt."""
        order = torch.cat(self._parts).argsort()
        layers = [
            [torch.cat(sides, 2)[0][:, order] for sides in zip(*kept, strict=True)] for kept in self._kept
        ]
        return cache_of(*zip(*layers, strict=True))
