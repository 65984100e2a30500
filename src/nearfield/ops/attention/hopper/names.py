"""The names of Gluon that drift between Triton versions, in one place.

Gluon is Triton's lower-level language and still experimental. `nearfield.ops._triton` lists the versions these names
were compiled with (KNOWN_GLUON); with any other the library runs its plain Triton kernels and says so.
"""

from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language.core import _aggregate as aggregate
from triton.runtime.jit import constexpr_function

__all__ = [
    "aggregate",
    "constexpr_function",
    "gather_load",
    "tma_load",
    "tma_store",
]

# Triton 3.9 renamed the copies.
if hasattr(tma, "async_load"):
    tma_load = tma.async_load
    tma_store = tma.async_store
    gather_load = async_copy.async_load
else:
    tma_load = tma.async_copy_global_to_shared
    tma_store = tma.async_copy_shared_to_global
    gather_load = async_copy.async_copy_global_to_shared
