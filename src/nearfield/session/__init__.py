"""What any host needs around a method, in plain torch: sessions, token layouts, layers, steps, and how much is read."""

from nearfield.session.counts import Pairs, count_pairs, num_pairs, num_read, read_stats
from nearfield.session.layers import CROSS_ATTENTION, Layer, attention_modules, find
from nearfield.session.session import Session
from nearfield.session.steps import Now, StepTracker, has_dense_steps, is_dense_step
from nearfield.session.tokens import TokenLayout, TokenOrder, TokenState, key_bias

__all__ = [
    "CROSS_ATTENTION",
    "Layer",
    "Now",
    "Pairs",
    "Session",
    "StepTracker",
    "TokenLayout",
    "TokenOrder",
    "TokenState",
    "attention_modules",
    "count_pairs",
    "find",
    "has_dense_steps",
    "is_dense_step",
    "key_bias",
    "num_pairs",
    "num_read",
    "read_stats",
]
