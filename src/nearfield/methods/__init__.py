"""The methods: each decides who reads whom, and nothing else. Frozen dataclasses; the fields are the configuration.

A method is one module of this folder, or one folder. Defining its class makes it known, so this module only imports
them all; type checkers and editors, which cannot follow that, know the names at the end.
"""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from nearfield._types import Moment
from nearfield.methods import fields, recipes
from nearfield.methods.base import Method, PlanMethod, Section
from nearfield.methods.borders import Borders
from nearfield.methods.composition import Composition, Kind, MergeMethod
from nearfield.methods.dense_parts import DenseSteps, stays_dense
from nearfield.methods.layers import FarField, LayerAttention, Memory, PlanLayer, Summary, full_layer
from nearfield.methods.recipes import Recipe
from nearfield.methods.registry import default_method, method_class, method_classes
from nearfield.methods.select import SelectLayer, SelectMethod, Summaries
from nearfield.methods.self_attention import Projections, SelfAttention, attend_with
from nearfield.methods.view import View

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
    "SelectLayer",
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

if TYPE_CHECKING:
    from nearfield.methods.baselines import BipartiteMerge, BlockTopK, GatedBlocks, SparseLinear, StridedKeys
    from nearfield.methods.finegrained import FineGrained
    from nearfield.methods.hilbert import Hilbert
    from nearfield.methods.loglinear import LogLinear
    from nearfield.methods.merge import Merge

    __all__ += ["BipartiteMerge", "BlockTopK", "GatedBlocks", "SparseLinear", "StridedKeys"]
    __all__ += ["FineGrained", "Hilbert", "LogLinear", "Merge"]
