"""What any host needs around a method, in plain torch: sessions, layouts of tokens, layers and steps."""

from nearfield.session.counts import Pairs
from nearfield.session.grids import GridReader
from nearfield.session.layers import Layer, attention_modules, find
from nearfield.session.session import Session
from nearfield.session.steps import StepTracker, has_dense_steps, is_dense_step
from nearfield.session.tokens import TokenLayout, TokenState, key_bias

__all__ = [
    "GridReader",
    "Layer",
    "Pairs",
    "Session",
    "StepTracker",
    "TokenLayout",
    "TokenState",
    "attention_modules",
    "find",
    "has_dense_steps",
    "is_dense_step",
    "key_bias",
]
