"""Reuse of document caches: compute the keys and values of a text once, and put prompts together from such texts."""

from nearfield.retrieval import clock, embedded, fidelity, prompt
from nearfield.retrieval.chunks import Chunk, Context, assemble, prefill_chunk
from nearfield.retrieval.embedded import (
    MissingModel,
    check_embedded,
    check_folder,
    load_embedded,
    load_folder,
)
from nearfield.retrieval.fidelity import Compared, Teacher, compare, teacher_of
from nearfield.retrieval.gate import Verification, verify
from nearfield.retrieval.images import read_image
from nearfield.retrieval.prompt import Prompt, chat_prompt, question_ids, token_ids
from nearfield.retrieval.ranking import rank
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
    SelectorName,
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
    "Compared",
    "Context",
    "DamagedChunk",
    "Epic",
    "ForeignChunk",
    "InfoFlow",
    "MissingChunk",
    "MissingModel",
    "Nothing",
    "Prompt",
    "Random",
    "Report",
    "Reuse",
    "Selector",
    "SelectorName",
    "SharedContext",
    "Teacher",
    "Verification",
    "assemble",
    "best_last",
    "chat_prompt",
    "check_embedded",
    "check_folder",
    "chunk_shares",
    "clock",
    "compare",
    "embedded",
    "fidelity",
    "first_logits",
    "load_embedded",
    "load_folder",
    "prefill_chunk",
    "prompt",
    "question_ids",
    "rank",
    "read_image",
    "recompute",
    "score",
    "select",
    "teacher_of",
    "token_ids",
    "unsupported",
    "verify",
]
