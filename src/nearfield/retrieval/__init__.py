"""Reuse of document caches: compute the keys and values of a text once, and put prompts together from such texts."""

from nearfield.retrieval.chunks import Chunk, Context, assemble, prefill_chunk
from nearfield.retrieval.gate import Verification, verify
from nearfield.retrieval.recomputing import recompute
from nearfield.retrieval.rotary import unsupported

__all__ = [
    "Chunk",
    "Context",
    "Verification",
    "assemble",
    "prefill_chunk",
    "recompute",
    "unsupported",
    "verify",
]
