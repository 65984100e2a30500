"""Blocks of a model that torch.compile makes faster, for a while.

Blocks are compiled, not the model: all layers of a kind share their graphs, which are small, and the entrance of a
model stays plain, where plans are looked up.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nearfield._checks import wrong_value

# Of one block's code: dense and sparse, in training and not, each with tokens that lie close or with gaps. Torch stops
# at 8 and, for a block that has to be whole, raises.
_MOST_GRAPHS = 32


@contextmanager
def compiled_blocks(model: Any, *, is_one_size: bool = True, backend: str = "inductor") -> Iterator[None]:
    """The repeated blocks of a diffusers model compiled, each as one graph; as it was, afterwards.

    Everything this process has compiled is forgotten at both ends: no graph of one method is tried for another, and
    their number counts anew.

    Args:
        is_one_size: whether all calls have the same sizes. Graphs are then for these alone, and a little faster: else
            what differs, be it how tokens lie in memory, becomes a symbol.
    """
    names = getattr(model, "_repeated_blocks", None)
    if not names:
        rule = "have blocks that diffusers can compile (`compile_repeated_blocks`)"
        wrong_value("model", rule, type(model).__name__)
    torch.compiler.reset()
    model.compile_repeated_blocks(fullgraph=True, dynamic=False if is_one_size else None, backend=backend)
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS), warnings.catch_warnings():
            # It looks for gradients of what a block is given, and torch then warns of looking.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        for module in model.modules():
            if type(module).__name__ in names:
                module._compiled_call_impl = None
        torch.compiler.reset()
