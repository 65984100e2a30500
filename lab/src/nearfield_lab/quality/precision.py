"""Networks that measure run in full precision: a GPU would round the factors of products to ten bits (TF32)."""

from contextlib import AbstractContextManager

import torch


def full_precision() -> AbstractContextManager[None]:
    """Inside, convolutions on a GPU multiply float32 as such."""
    context: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return context
