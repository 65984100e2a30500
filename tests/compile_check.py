"""Compile kernels for sm_90 without a GPU: `python tests/compile_check.py [--all]`.

Gluon is experimental and its names drift; this tells, in seconds, whether an installed Triton still takes every variant
of the Hopper kernel. Of the plain kernels it takes those that choose blocks and keys, in which much is decided while
compiling, and those of merged blocks: the interpreter, being Python, cannot judge that.
"""

import os
import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from nearfield.ops.attention import hopper
from nearfield.ops.attention.hopper.kernel import forward_kernel
from nearfield.ops.attention.triton import backward, forward, pair, partials
from nearfield.ops.lists.triton import order, pack, transpose
from nearfield.ops.merge.triton import destinations, regions
from nearfield.ops.pool_select.triton import pool, select
from nearfield.ops.predict.triton import columns
from nearfield.ops.rotary.triton import keys as turn
from nearfield.ops.rotary.triton import rotate
from nearfield.ops.windows import triton as windows

_POINTERS = {
    "key": "*bf16",
    "value": "*bf16",
    "lse": "*fp32",
    "key_bias": "*fp32",
    "offsets": "*i32",
    "blocks": "*i32",
    "order": "*i32",
    "counter": "*i32",
    "far_offsets": "*i32",
    "far_boxes": "*i32",
    "far_bias": "*fp32",
}


def compile_forward(
    dim: int,
    q_block: int,
    k_block: int,
    has_bias: bool,
    is_ragged: bool,
    *,
    has_more: bool = False,
    has_far: bool = False,
) -> str:
    """Compile one variant and return its PTX."""
    launch = hopper.launch_for(q_block, k_block, dim)
    constants = hopper.constants(
        launch, dim, q_block, k_block, is_ragged=is_ragged, has_order=is_ragged, has_bias=has_bias, has_more=has_more,
        has_far=has_far,
    )  # fmt: skip
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
        is_far = name.startswith("more_") and constants["HAS_FAR"]
        rows = box if name.endswith(("k_desc", "v_desc")) and not is_far else 64
        return f"tensordesc<bf16[1, 1, {rows}, {dim}],{hopper.shared_layout(rows, dim, torch.bfloat16)!r}>"
    return _POINTERS.get(name, "fp32" if name == "scale" else "i32")


def compile_pool(dim: int, has_upper: bool, keeps_sums: bool) -> str:
    constants = {
        "BLOCK": 16, "ROWS": 16, "UNROLLED": 16, "DIM": dim, "PAD": dim, "HAS_UPPER": has_upper,
        "KEEPS_SUMS": keeps_sums, "ARE_SEVERAL": True, "stride_sd": 1, "stride_md": 1,
    }  # fmt: skip
    tensors = [f"{rank}{name}" for rank in ("", "second_", "third_") for name in ("source", "means")]
    return _compile_plain(pool._pool_kernel, constants, dict.fromkeys(tensors, "*bf16") | {"sums": "*fp32"})


def compile_select(merged: int) -> str:
    """Among 128 candidates, as LogLinear does below its top level."""
    constants = {
        "BLOCK": 16, "CANDIDATES": 128, "ROWS": 16, "SLOTS": 8, "DIM": 64, "PAD": 64, "HAS_PARENTS": True,
        "KEEP_OWN": False, "PRECISION": "tf32", "PACK": merged, "MULTIPLE": 4, "stride_qd": 1, "stride_kd": 1,
    }  # fmt: skip
    pointers = {"query": "*bf16", "key": "*bf16"} | dict.fromkeys(
        ("parents", "chosen", "bounds", "packed"), "*i32"
    )
    return _compile_plain(select._select_kernel, constants, pointers)


def compile_window_means(dim: int) -> str:
    constants = {"WINDOW": 16, "ROWS": 16, "DIM": dim, "PAD": dim}
    pointers = {"source": "*bf16", "means": "*bf16", "starts": "*i64", "sizes": "*i32"}
    return _compile_plain(windows._means_kernel, constants, pointers)


def compile_window_sums(dim: int) -> str:
    constants = {"WINDOW": 16, "ROWS": 16, "DIM": dim, "PAD": dim}
    pointers = {"source": "*bf16", "sums": "*fp32", "starts": "*i64", "sizes": "*i32"}
    return _compile_plain(windows._sums_kernel, constants, pointers)


def compile_weighted_windows(dim: int) -> str:
    constants = {"WINDOW": 16, "TOKENS": 16, "DIM": dim, "PAD": dim, "stride_kd": 1, "stride_vd": 1}
    pointers = dict.fromkeys(("key", "value", "keys", "values"), "*bf16")
    pointers |= dict.fromkeys(("moments", "biases"), "*fp32") | {"starts": "*i64", "sizes": "*i32"}
    return _compile_plain(windows._weighted_kernel, constants, pointers, num_warps=1)


def compile_weighted_gradients(dim: int) -> str:
    constants = {"WINDOWS": 4, "WINDOW": 16, "TOKENS": 16, "DIM": dim, "PAD": dim}
    constants |= dict.fromkeys(("stride_gkd", "stride_gvd", "stride_gbn", "stride_kd", "stride_vd"), 1)
    halves = ("grad_keys", "grad_values", "key", "value", "grad_key", "grad_value")
    pointers = dict.fromkeys(halves, "*bf16") | dict.fromkeys(("grad_bias", "moments", "partials"), "*fp32")
    pointers |= {"starts": "*i64", "sizes": "*i32"}
    return _compile_plain(windows._weighted_gradient_kernel, constants, pointers, num_warps=1)


def compile_merging(is_entering: bool) -> str:
    """Regions of 64 tokens, of which 32 are left; the way back adds what changed."""
    way = (
        {"ROWS": 32, "COLUMNS": 64, "stride_mk": 1}
        if is_entering
        else {"ROWS": 64, "COLUMNS": 32, "stride_mn": 1}
    )
    flags = dict.fromkeys(("HAS_MINUS", "HAS_ONTO"), not is_entering)
    pointers = dict.fromkeys(("matrix", "x", "minus", "onto", "out"), "*bf16")
    return _compile_plain(
        regions._multiply_kernel, {**way, **flags, "CHANNELS": 128, "PRECISION": "tf32"}, pointers
    )


def compile_rotate(dim: int) -> str:
    constants = {"HEADS": 4, "TOKENS": 16, "DIM": dim, "PAD": dim}
    pointers = {"x": "*bf16", "out": "*bf16", "cos": "*fp32", "sin": "*fp32"}
    return _compile_plain(rotate._rotate_kernel, constants, pointers)


def compile_destinations() -> str:
    """Destinations among the tokens of a whole image."""
    pointers = {"similarity": "*fp32", "transposed": "*fp32"} | dict.fromkeys(
        ("lengths", "counts", "chosen"), "*i32"
    )
    return _compile_plain(destinations._choose_many_kernel, {"SIDE": 4096}, pointers)


def compile_turn(dim: int, size: int) -> str:
    constants = {"SIZE": size, "DIM": dim, "PAD": dim, "ROWS": 16, "HEADS": 16}
    pointers = {"source": "*bf16", "target": "*bf16", "cos": "*fp32", "sin": "*fp32", "partner": "*i64"}
    return _compile_plain(turn._turn_kernel, constants, pointers)


def compile_partials(dim: int) -> str:
    constants = {"ROWS": 8, "DIM": dim, "PAD": dim}
    pointers = {"out": "*bf16", "merged": "*bf16", "lse": "*fp32", "merged_lse": "*fp32"}
    return _compile_plain(partials._merge_kernel, constants, pointers)


_PLAIN = {
    "DIM": 64, "PAD": 64, "Q_BLOCK": 16, "K_BLOCK": 16, "TILE_Q": 16, "TILE_K": 64, "PARTS": 1, "RAGGED": False,
    "COPY_ENGINE": False, "HAS_ORDER": False, "HAS_BIAS": False, "HAS_POSITIONS": False, "CONTINUES": False,
    "PRECISION": "tf32", "PACK": 1, "CHUNK": 0, "BIAS_GRADIENT": False, "POOL": 16, "LEVELS": 0,
}  # fmt: skip
_PACKED: dict[str, Any] = {"Q_BLOCK": 64, "TILE_Q": 64, "PACK": 4}
_PACKED_KEYS: dict[str, Any] = {"K_BLOCK": 64, "TILE_Q": 64, "PACK": 4}
_EXTRAS: dict[str, Any] = dict.fromkeys(
    ("RAGGED", "HAS_ORDER", "HAS_BIAS", "BIAS_GRADIENT", "HAS_POSITIONS", "CONTINUES"), True
)
_PLAIN_POINTERS = (
    _POINTERS
    | dict.fromkeys(("query", "out", "grad_out", "far_key", "far_value"), "*bf16")
    | dict.fromkeys(("k_desc", "v_desc", "q_desc", "g_desc", "grad_query", "grad_key", "grad_value"), "*bf16")
    | dict.fromkeys(("query_positions", "key_positions", "far_blocks", "bounds", "packed"), "*i32")
    | dict.fromkeys(("cells", "ordered", "rows"), "*i32")
    | dict.fromkeys(("lse_log2", "delta", "grad_lse", "grad_bias", "maxima", "masses"), "*fp32")
    | dict.fromkeys(("key_partials", "value_partials", "bias_partials", "mean_keys", "mean_values"), "*fp32")
)


def plain_variants(every: bool) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Kernels over lists of 16 queries and 16 keys, as LogLinear has them, and what each is compiled for.

    Without `every`, extras (which differ little from kernel to kernel) are left to one variant of each.
    """
    for name, packed in (("rows", {}), ("packed rows", _PACKED)):
        extras_of_rows = {} if packed else _EXTRAS
        for extras in ({}, _EXTRAS | {"HAS_ORDER": not packed}) if every else (extras_of_rows,):
            yield f"forward, {name}", forward._forward_kernel, packed | extras
            yield f"query gradient, {name}", backward._query_gradient_kernel, packed | extras
    by_engine: dict[str, Any] = {"COPY_ENGINE": True, "Q_BLOCK": 128, "CHUNK": 32, "HAS_BIAS": True}
    rows_of_keys = {
        "rows": {"TILE_K": 16, "TILE_Q": 64},
        "packed rows": _PACKED_KEYS,
        "packed single keys": {"K_BLOCK": 16, "TILE_K": 16, "TILE_Q": 64, "PACK": 16},
    }
    for name, packed in rows_of_keys.items():
        for extras in ({"LEVELS": 2}, _EXTRAS | {"CHUNK": 32}, by_engine) if every else (by_engine,):
            yield f"key gradients, {name}", backward._key_gradient_kernel, packed | extras
        yield "chunks", backward._join_chunks_kernel, packed | by_engine
    far = {"FAR_Q_BLOCK": 128, "FAR_K_BLOCK": 16, "FAR_RAGGED": False, "HAS_FAR_BIAS": True}
    yield "a pair of parts", pair._pair_kernel, _PACKED | far
    yield "query gradient of a pair", pair._pair_query_gradient_kernel, _PACKED | far
    for more, engine in ((0, False), (64, True)):
        tiles = {"Q_BLOCK": 128 + more, "TILE_Q": 128, "MORE_Q": more, "K_BLOCK": 8, "STEPS": 64}
        yield f"statistics of {128 + more} queries", columns._column_kernel, tiles | {"COPY_ENGINE": engine}
    for packed_rows in (4, 16):
        yield "packing", pack._pack_kernel, {"PACK": packed_rows, "MULTIPLE": 4, "GROUPS": 32}
    yield "ordering", order._order_kernel, {"OWN": 32, "OTHERS": 256}
    for kernel in (transpose._cells_kernel, transpose._lists_kernel):
        yield "transposing", kernel, {"TILE": 1024, "HALVINGS": 10}


def compile_plain(kernel: Any, constants: dict[str, Any]) -> str:
    known = {name: value for name, value in (_PLAIN | constants).items() if name in kernel.arg_names}
    ones = [name for name in kernel.arg_names if re.fullmatch("stride_[a-z]{1,2}d", name)]
    return _compile_plain(kernel, known | dict.fromkeys(ones, 1), _PLAIN_POINTERS)


def _compile_plain(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], num_warps: int = 4
) -> str:
    names = kernel.arg_names
    others = {name: pointers.get(name, "fp32" if name.endswith("scale") else "i32") for name in names}
    if constants.get("COPY_ENGINE"):
        others |= {name: "tensordesc<bf16[1, 1, 64, 64]>" for name in names if name.endswith("_desc")}
    signature = others | dict.fromkeys(constants, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    # As the launcher finds for tensors of ours; 16-byte loads need to know.
    aligned = [
        name
        for name in names
        if name not in constants
        and (others[name].startswith("*") or name.startswith("stride_") or name in ("num_channels", "n"))
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    return str(compiled.asm["ptx"])


def hopper_variants(every: bool) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Head dimension, blocks of queries and of keys, bias, and ragged ends; without `every`, each way once."""
    if every:
        for dim, q_block, k_block in product((64, 128), (64, 128, 192), (1, 16, 32, 64, 128)):
            for has_bias, is_ragged in ((False, False), (True, True)) if q_block == 192 else ((False, True),):
                yield dim, q_block, k_block, has_bias, is_ragged
        return
    yield 128, 64, 16, False, True
    yield 128, 128, 128, False, True
    yield 128, 192, 1, False, False
    yield 128, 192, 64, True, True
    yield 64, 128, 64, False, True
    yield 64, 128, 32, False, True
    yield 64, 192, 1, True, True


def main(every: bool) -> int:
    # Triton 3.9 wants this said; it is what every earlier version did.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    print(f"Triton {triton.__version__}: compiling for sm_90; the plain kernels")
    for first, second in product((False, True), repeat=2) if every else ((True, True),):
        if "ld.global.v4" not in compile_pool(64, first, second):
            print(f"no 16-byte loads in pooling: {first=} {second=}", file=sys.stderr)
            return 1
    compile_window_means(128)
    compile_window_sums(128)
    if "bar.sync" in compile_weighted_windows(128):
        print("weighted windows of 128 channels wait for other warps", file=sys.stderr)
        return 1
    if "ld.global.v4" not in compile_weighted_gradients(128):
        print("no 16-byte loads in the gradients of weighted windows", file=sys.stderr)
        return 1
    if "ld.global.v4" not in compile_destinations():
        print("no 16-byte loads in choosing among many tokens", file=sys.stderr)
        return 1
    merging = {
        "merging": compile_merging(True),
        "parting": compile_merging(False),
        "rows": compile_rotate(128),
    }
    for name, ptx in merging.items():
        if "st.global.v4" not in ptx:
            print(f"no 16-byte stores in a kernel of merged blocks: {name}", file=sys.stderr)
            return 1
    for size in (64, 128):
        if "ld.global.v4" not in compile_turn(128, size):
            print(f"no 16-byte loads in turning: {size=}", file=sys.stderr)
            return 1
    compile_partials(128)
    for merged in (1, 4):
        compile_select(merged)
    for name, kernel, wanted in plain_variants(every):
        ptx = compile_plain(kernel, wanted)
        if wanted.get("TURNED") and "wgmma" not in ptx:
            print(f"no wgmma in a plain kernel: {name} {wanted}", file=sys.stderr)
            return 1
        multiplies = name not in ("chunks", "packing", "ordering", "transposing")
        if multiplies and not any(instruction in ptx for instruction in ("mma.sync", "wgmma")):
            print(f"no tensor cores in a plain kernel: {name} {wanted}", file=sys.stderr)
            return 1
        print(f"  {name}, {'with' if wanted.get('HAS_BIAS') else 'without'} extras")
    print("the Hopper kernels")
    for dim, q_block, k_block, has_bias, is_ragged in hopper_variants(every):
        ptx = compile_forward(dim, q_block, k_block, has_bias, is_ragged)
        copies = "cp.async.cg" if k_block == 1 else "cp.async.bulk.tensor"
        if "wgmma.mma_async" not in ptx or copies not in ptx:
            print(f"missing wgmma or {copies}: {dim=} {q_block=} {k_block=}", file=sys.stderr)
            return 1
        if (q_block, k_block) == (128, 128):  # and with keys in two places
            compile_forward(dim, q_block, k_block, has_bias, is_ragged, has_more=True)
        if k_block >= 16:  # and with a far part
            compile_forward(dim, q_block, k_block, has_bias, is_ragged, has_far=True)
        print(
            f"  head dim {dim:3d}, blocks {q_block:3d} x {k_block:2d}, bias {has_bias!s:5}, ragged {is_ragged}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(every="--all" in sys.argv[1:]))
