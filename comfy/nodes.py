"""The nodes: one for each method, made from its fields. A method that is installed has a node, too."""

from typing import Any, ClassVar

from nearfield.methods import Composition, Method, fields, method_classes

from .models import KNOWN, known_model
from .patching import SparseModel

KEY = "nearfield"
"""Of the wrapper among others; a second node replaces the first."""

_MOST = 2**20


class Node:
    """A model whose image tokens read what a method says, not everything."""

    CATEGORY = "advanced/model"
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    kind: ClassVar[type[Method]]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The fields in their order: workflows of the page hold values by position, so new fields come last."""
        found = {field.name: _input(field) for field in fields.fields_of(cls.kind)}
        return {"required": {"model": ("MODEL",)} | found}

    def patch(self, model: Any, **values: Any) -> tuple[Any]:
        """A clone that reads sparsely; the model itself is not touched."""
        from comfy.patcher_extension import WrappersMP  # ComfyUI's, not this folder

        known_model(model.get_model_object("diffusion_model"))
        method = fields.made(self.kind.name, values)
        patched = model.clone()
        patched.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
        patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, SparseModel(method))
        return (patched,)


def _input(field: fields.Field) -> tuple[Any, dict[str, Any]]:
    """What ComfyUI shows of a field: its kind, and how it is filled in."""
    shown = {"default": field.default, "tooltip": field.help}
    bounds: dict[str, Any] = {"min": 0, "max": _MOST}
    if field.kind == "choice":
        return list(field.choices), shown
    if field.kind == "flag":
        return "BOOLEAN", shown
    if field.kind == "integer":
        return "INT", shown | bounds
    if field.kind == "number":
        return "FLOAT", shown | bounds | {"step": 0.01}
    return "STRING", shown | {"default": fields.shown(field.default)}


def node_of(kind: type[Method]) -> type[Node]:
    """The node of a method."""
    introduction = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    description = (
        f"Faster attention at high resolution. {introduction} For {', '.join(known.title for known in KNOWN)}."
        " Quality is not free: compare with the node bypassed. In fields of text, none stands for no value."
    )
    return type(f"Nearfield{kind.__name__}", (Node,), {"kind": kind, "DESCRIPTION": description})


def all_nodes() -> dict[str, type[Node]]:
    """Of every method that says who reads whom and is not there to compare with. Merging goes around blocks of a model,
    where ComfyUI has no place for it."""
    kinds = [kind for kind in method_classes().values() if not kind.is_baseline]
    nodes = [node_of(kind) for kind in kinds if Composition.of(kind()).attention is not None]
    return {node.__name__: node for node in nodes}
