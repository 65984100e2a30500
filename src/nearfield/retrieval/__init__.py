"""Reuse of document caches: compute the keys and values of a text once, and put prompts together from such texts."""

from nearfield.retrieval.chunks import Chunk, Context, assemble, prefill_chunk
from nearfield.retrieval.gate import Verification, verify
from nearfield.retrieval.images import read_image
from nearfield.retrieval.prompt import Prompt, chat_prompt
from nearfield.retrieval.recomputing import first_logits, recompute
from nearfield.retrieval.reuse import Answer, Report, Reuse
from nearfield.retrieval.rotary import unsupported
from nearfield.retrieval.selectors import (
    All,
    CacheBlend,
    Epic,
    InfoFlow,
    Nothing,
    Random,
    Selector,
    best_last,
    chunk_shares,
    score,
    select,
)
from nearfield.retrieval.sharing import SharedContext
from nearfield.retrieval.store import ChunkStore, DamagedChunk, ForeignChunk, MissingChunk

__all__ = [
    "All",
    "Answer",
    "CacheBlend",
    "Chunk",
    "ChunkStore",
    "Context",
    "DamagedChunk",
    "Epic",
    "ForeignChunk",
    "InfoFlow",
    "MissingChunk",
    "Nothing",
    "Prompt",
    "Random",
    "Report",
    "Reuse",
    "Selector",
    "SharedContext",
    "Verification",
    "assemble",
    "best_last",
    "chat_prompt",
    "chunk_shares",
    "first_logits",
    "prefill_chunk",
    "read_image",
    "recompute",
    "score",
    "select",
    "unsupported",
    "verify",
]
