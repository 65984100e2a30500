"""Compile kernels for sm_90 without a GPU: `python -m nearfield.kernels.compile_check`.

Gluon is experimental and its names drift; this tells, in seconds, whether an installed Triton still takes every variant
of the Hopper kernel. Of the plain kernels it takes those that the interpreter, being Python, cannot judge: they compute
with constants of compile time.
"""

import os
import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from nearfield.kernels import forward, hopper, pool, windows
from nearfield.kernels.hopper_kernel import forward_kernel

_POINTERS = {
    "key": "*bf16",
    "value": "*bf16",
    "lse": "*fp32",
    "key_bias": "*fp32",
    "offsets": "*i32",
    "blocks": "*i32",
    "order": "*i32",
    "counter": "*i32",
}


def compile_forward(dim: int, q_block: int, k_block: int, has_bias: bool, is_ragged: bool) -> str:
    """Compile one variant and return its PTX."""
    launch = hopper.launch_for(q_block, k_block, dim)
    constants = hopper.constants(
        launch, dim, q_block, k_block, is_ragged=is_ragged, has_order=is_ragged, has_bias=has_bias
    )
    names = forward_kernel.arg_names
    signature = {name: _type_of(name, dim, launch.box(k_block), constants) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    # The launcher finds out by itself that pointers and strides are multiples of 16; cp.async needs to know.
    aligned = [
        name for name in names if name in ("key", "value") or name.startswith(("stride_k", "stride_v"))
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(forward_kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return str(compiled.asm["ptx"])


def _type_of(name: str, dim: int, box: int, constants: dict[str, object]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith("_desc"):
        rows = box if name in ("k_desc", "v_desc") else 64
        return f"tensordesc<bf16[1, 1, {rows}, {dim}],{hopper.shared_layout(rows, dim, torch.bfloat16)!r}>"
    return _POINTERS.get(name, "fp32" if name == "scale" else "i32")


def compile_pool(dim: int, has_upper: bool, keeps_sums: bool) -> str:
    constants = {
        "BLOCK": 16, "ROWS": 16, "UNROLLED": 16, "DIM": dim, "PAD": dim, "HAS_UPPER": has_upper,
        "KEEPS_SUMS": keeps_sums, "IS_THREE": True, "stride_sd": 1, "stride_md": 1,
    }  # fmt: skip
    tensors = [f"{rank}{name}" for rank in ("", "second_", "third_") for name in ("source", "means")]
    return _compile_plain(pool._pool_kernel, constants, dict.fromkeys(tensors, "*bf16") | {"sums": "*fp32"})


def compile_window_means(dim: int) -> str:
    constants = {"WINDOW": 16, "ROWS": 16, "DIM": dim, "PAD": dim}
    pointers = {"source": "*bf16", "means": "*bf16", "starts": "*i64", "sizes": "*i32"}
    return _compile_plain(windows._means_kernel, constants, pointers)


def compile_plain_forward(dim: int, has_extras: bool, continues: bool) -> str:
    """With bias, positions and ragged rows in an order, or with none of them."""
    constants = {
        "DIM": dim, "PAD": dim, "Q_BLOCK": 16, "K_BLOCK": 16, "TILE_Q": 16, "TILE_K": 64, "PARTS": 1,
        "RAGGED": has_extras, "COPY_ENGINE": False, "HAS_ORDER": has_extras, "HAS_BIAS": has_extras,
        "HAS_POSITIONS": has_extras, "CONTINUES": continues, "PRECISION": "tf32",
    }  # fmt: skip
    tensors = dict.fromkeys(("query", "k_desc", "v_desc", "out"), "*bf16")
    positions = dict.fromkeys(("query_positions", "key_positions"), "*i32")
    return _compile_plain(forward._forward_kernel, constants, _POINTERS | tensors | positions)


def _compile_plain(kernel: Any, constants: dict[str, Any], pointers: dict[str, str]) -> str:
    names = kernel.arg_names
    others = {name: pointers.get(name, "fp32" if name == "scale" else "i32") for name in names}
    signature = others | dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    # As the launcher finds for tensors of ours; 16-byte loads need to know.
    aligned = [
        name for name in names if name not in constants and (name in pointers or name.startswith("stride_"))
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return str(compiled.asm["ptx"])


def main() -> int:
    # Triton 3.9 wants this said; it is what every earlier version did.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    print(f"Triton {triton.__version__}: compiling for sm_90; the plain kernels")
    for first, second in product((False, True), repeat=2):
        compile_pool(64, first, second)
        if "mma" not in compile_plain_forward(64, first, second):
            print(f"no tensor cores in the plain kernel: {first=} {second=}", file=sys.stderr)
            return 1
    compile_window_means(128)
    print("the Hopper kernels")
    for dim, q_block, k_block in product((64, 128), (64, 128, 192), (1, 16, 64, 128)):
        for has_bias, is_ragged in ((False, False), (True, True)) if q_block == 192 else ((False, True),):
            ptx = compile_forward(dim, q_block, k_block, has_bias, is_ragged)
            copies = "cp.async.cg" if k_block == 1 else "cp.async.bulk.tensor"
            if "wgmma.mma_async" not in ptx or copies not in ptx:
                print(f"missing wgmma or {copies}: {dim=} {q_block=} {k_block=}", file=sys.stderr)
                return 1
            print(
                f"  head dim {dim:3d}, blocks {q_block:3d} x {k_block:2d}, bias {has_bias!s:5}, ragged {is_ragged}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
