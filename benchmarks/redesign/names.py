"""Every name of nearfield that the comparison uses. A step that renames something edits this file and no other here.

This folder serves the redesign alone, and goes away with its last commit.
"""

from typing import Any

import torch
from torch import Tensor

import nearfield
from nearfield import Geometry, Plan, curves, methods, planning
from nearfield.ops import Positions, attend_pooled, find_boxes
from nearfield.ops import merge_attended as merge
from nearfield.ops.attention import partials_reference
from nearfield.ops.attention.operators import Pooling
from nearfield.ops.merge import api as merging
from nearfield.ops.pool_select import api as pyramid
from nearfield.ops.predict import api as predict
from nearfield.ops.rotary.reference import keys as turn_reference
from nearfield.ops.rotary.reference import rotate as rotate_reference
from nearfield.ops.windows import api as windows

PACKAGE = nearfield.__file__
attend = nearfield.attend
apply = nearfield.apply

__all__ = [
    "Geometry",
    "KeyValuePart",
    "Plan",
    "Pooling",
    "Positions",
    "attend",
    "attend_parts",
    "curves",
    "merge",
    "planning",
]


def KeyValuePart(
    key: Tensor,
    value: Tensor,
    plan: Plan,
    key_bias: Tensor | None = None,
    positions: Any = None,
    similar_rows: bool = False,
) -> Any:
    """A part as it was: who reads whom said nothing of rows that are alike."""
    if similar_rows:
        sizes = plan.q_block, plan.k_block, plan.num_queries, plan.num_keys
        plan = Plan.of_known(plan.offsets, plan.blocks, *sizes, uniform=plan.uniform, similar_rows=True)
    return nearfield.ops.KeyValuePart(key, value, plan, key_bias, positions)


def attend_parts(query: Tensor, parts: Any, *, pooling: Any = None, once: bool = False, **more: Any) -> Any:
    if once:
        for part in parts:
            part.plan.prepared.transposes_later = True
    if pooling is not None:
        return attend_pooled(query, *parts, *pooling, **more)
    return nearfield.ops.attend_parts(query, parts, **more)


def hilbert_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: Geometry,
    layer: int,
    *,
    method: Any = None,
    **more: Any,
) -> Tensor:
    return nearfield.attend_with(method or methods.Hilbert(), query, key, value, geometry, layer, **more)


def log_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, geometry: Any = None, *, method: Any = None, **more: Any
) -> Tensor:
    return nearfield.attend_with(method or methods.LogLinear(), query, key, value, geometry, **more)


# -- plans -------------------------------------------------------------------------------------------------------------


def transpose(plan: Plan) -> Plan:
    return plan.transpose()


def start_order(plan: Plan, batch: int, heads: int) -> Tensor | None:
    return plan.longest_first(batch, heads)


def boxes(plan: Plan) -> tuple[Tensor, Tensor]:
    found = find_boxes(plan)
    return found.offsets, found.boxes


# -- methods -----------------------------------------------------------------------------------------------------------


def method(name: str, **fields: Any) -> Any:
    """A method by today's names of its class and fields."""
    renamed = _FIELDS | (_BLOCKS if name == "BlockTopK" else {})
    return getattr(methods, name)(**{renamed.get(field, field): value for field, value in fields.items()})


_FIELDS = {"mass": "top_p", "guard": "min_similarity"}
_BLOCKS = {"query_block": "q_block", "grain": "k_block"}


def merged(merge_method: Any, attention: Any) -> Any:
    return merge_method | attention if attention is not None else methods.Composition(merge_method)


def layer_of(method: Any, geometry: Geometry, index: int, heads: int, device: torch.device) -> Any:
    return method.layer(geometry, index, heads=heads, device=device)


def order_of(method: Any, geometry: Geometry) -> Tensor:
    order: Tensor = method.ordering(geometry).order
    return order


def set_step(layer: Any, index: int, total: int, branch: str = "") -> None:
    layer.set_step(methods.Moment(index, total, branch))


def set_num_layers(layer: Any, number: int) -> None:
    layer.set_num_layers(number)


def read_share(layer: Any) -> tuple[int, int, float, float]:
    """Of a layer that counts what it reads: full calls, sparse calls, the shares read and not read."""
    return layer.stats.num_full, layer.stats.num_sparse, layer.stats.kept, layer.stats.dropped


def self_attention(method: Any, dim: int, heads: int) -> torch.nn.Module:
    return _Named(dim, heads, method)


class _Named(nearfield.SelfAttention):
    """Its parameters by the names that they had at the start."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        found = super().named_parameters(*args, **kwargs)
        renamed = [(name.removeprefix("extra."), parameter) for name, parameter in found]
        return sorted(renamed, key=lambda pair: "." in pair[0])  # those of the module itself came first


# -- sums --------------------------------------------------------------------------------------------------------------

window_means = windows.window_means
weighted_windows = windows.weighted_windows
query_sums = windows.query_sums
pool = pyramid.pool


def pool_and_select(*call: Any, turned: bool = False, packing: Any = None, **more: Any) -> Any:
    del packing  # the operation decides
    return pyramid.pool_and_select(*call, negate_scores=turned, **more)


select_blocks = pyramid.select_blocks
chosen_blocks = pyramid.chosen_blocks
Blocks = predict.Blocks
by_weights = predict.by_weights
by_means = predict.by_means
pack_mask = predict.packed
unpack_mask = predict.unpacked
Regions = merging.Regions
merging_of = merging.merging_of
rotate = rotate_reference.rotate
merge_partials = partials_reference.merge_partials
rerotate_keys = turn_reference.turn


def kernels_of(name: str) -> Any:
    """The module with the kernels of `rotate`, `partials` or `turn`."""
    import importlib

    places = {
        "rotate": "rotary.triton.rotate",
        "partials": "attention.triton.partials",
        "turn": "rotary.triton.keys",
    }
    return importlib.import_module(f"nearfield.ops.{places[name]}")


# -- models ------------------------------------------------------------------------------------------------------------


def tiny_models() -> Any:
    from tests import tiny_models

    return tiny_models


def tiny_language_models() -> Any:
    from tests import tiny_language_models

    return tiny_language_models


def faster_interpreter() -> None:
    from tests.interpreter import patch_once_per_launch

    patch_once_per_launch()


def reuse(model: Any, tokenizer: Any) -> Any:
    from nearfield.retrieval import Reuse

    return Reuse(model, tokenizer)


def recomputed_keys(
    made: Any, chunks: list[str], question: Tensor, ratio: float, selector: Any = None
) -> Any:
    """Scores of the context's tokens, the rows that are computed again, and the keys and values after that."""
    from nearfield import retrieval

    context = retrieval.assemble(made.model, made.chunks(chunks))
    scores = retrieval.score(made.model, context, question, selector or retrieval.InfoFlow())
    rows = retrieval.select(context, scores, ratio)
    retrieval.recompute(made.model, context, rows)
    return scores, rows, [(layer.keys, layer.values) for layer in context.cache.layers]


def embedded_pipeline(device: torch.device) -> Any:
    from nearfield_lab.embedded import model, sampler

    return sampler.DemoPipeline.load(model.EMBEDDED, device)
