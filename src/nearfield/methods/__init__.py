"""The methods: each decides who reads whom, and nothing else. Frozen dataclasses; the fields are the configuration.

A method is one module of this folder, or one folder. Defining its class makes it known, so this module only imports
them all; the names under TYPE_CHECKING are for editors and type checkers.
"""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from nearfield._types import Moment
from nearfield.methods import fields, recipes
from nearfield.methods.base import Method, PlanMethod, Section
from nearfield.methods.blockwise import Kind
from nearfield.methods.borders import Borders
from nearfield.methods.composition import Composition, MergeMethod
from nearfield.methods.dense_parts import DenseSteps, stays_dense
from nearfield.methods.layers import FarField, LayerAttention, Memory, PlanLayer, Summary, full_layer
from nearfield.methods.recipes import Recipe
from nearfield.methods.registry import default_method, method_class, method_classes
from nearfield.methods.select import SelectMethod, Summaries
from nearfield.methods.self_attention import Projections, SelfAttention, attend_with
from nearfield.methods.view import View

if TYPE_CHECKING:
    from nearfield.methods.baselines.blocks import BlockTopK as BlockTopK
    from nearfield.methods.baselines.branches import GatedBlocks as GatedBlocks
    from nearfield.methods.baselines.branches import SparseLinear as SparseLinear
    from nearfield.methods.baselines.shortening import BipartiteMerge as BipartiteMerge
    from nearfield.methods.baselines.shortening import StridedKeys as StridedKeys
    from nearfield.methods.finegrained import FineGrained as FineGrained
    from nearfield.methods.hilbert import Hilbert as Hilbert
    from nearfield.methods.loglinear import LogLinear as LogLinear
    from nearfield.methods.merge import Merge as Merge

for _found in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")


def own_methods() -> tuple[type[Method], ...]:
    """Those of this folder, in the order of names."""
    known = method_classes(installed=False).values()
    return tuple(kind for kind in known if kind.__module__.startswith(f"{__name__}."))


globals().update({kind.__name__: kind for kind in own_methods()})

DEFAULT: Method = default_method()
"""What `apply` takes where no method is given."""

__all__ = [
    "DEFAULT",
    "Borders",
    "Composition",
    "DenseSteps",
    "FarField",
    "Kind",
    "LayerAttention",
    "Memory",
    "MergeMethod",
    "Method",
    "Moment",
    "PlanLayer",
    "PlanMethod",
    "Projections",
    "Recipe",
    "Section",
    "SelectMethod",
    "SelfAttention",
    "Summaries",
    "Summary",
    "View",
    "attend_with",
    "fields",
    "full_layer",
    "method_class",
    "method_classes",
    "own_methods",
    "recipes",
    "stays_dense",
    *(kind.__name__ for kind in own_methods()),
]
