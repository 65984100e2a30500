"""Nodes for ComfyUI. Link this folder into ComfyUI's `custom_nodes`; see README.md in it."""

from .nodes import all_nodes

NODE_CLASS_MAPPINGS = all_nodes()
NODE_DISPLAY_NAME_MAPPINGS = {
    name: f"Nearfield {node.kind.__name__}" for name, node in NODE_CLASS_MAPPINGS.items()
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
