"""Nodes for ComfyUI. Link this folder into ComfyUI's `custom_nodes`; see README.md beside it."""

from .nodes import NearfieldHilbert

NODE_CLASS_MAPPINGS = {"NearfieldHilbert": NearfieldHilbert}
NODE_DISPLAY_NAME_MAPPINGS = {"NearfieldHilbert": "Nearfield Hilbert"}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
