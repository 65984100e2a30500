"""Time the shapes a kernel may be launched with, in turns with dense attention. Needs a GPU; for those who tune.

    PYTHONPATH=src python benchmarks/sweep.py flux-2048 --grain 16
    PYTHONPATH=src python benchmarks/sweep.py flux-2048 --impl triton --q-block 128
    PYTHONPATH=src python benchmarks/sweep.py flux-2048 --impl query-gradient

Forward candidates are checked against float64 first, as in `nearfield bench attend`; a wrong one gets no figure. What
comes out belongs into `launch_for` (hopper.py) or the tables of launch.py, and a line into docs/performance.md.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nearfield._types import Attended
from nearfield.bench import layouts
from nearfield.bench.attend import random_inputs
from nearfield.bench.check import check_forward, poisoned_memory
from nearfield.bench.presets import PRESETS
from nearfield.bench.timing import Effort, measure
from nearfield.kernels import backward, forward, hopper
from nearfield.kernels.launch import Tiles
from nearfield.plan import Plan

HOPPER_COPY = [hopper.Launch(tile, stages, 0, 160, 24) for tile, stages in ((64, 3), (64, 4))]
HOPPER_GATHER = [
    hopper.Launch(64, stages, 4, *split) for stages in (3, 4) for split in ((152, 56), (144, 80))
]
TILES = [
    Tiles(own, other, warps, stages, registers)
    for own, other, warps, registers in (
        (128, 64, 4, None),
        (128, 64, 8, 128),
        (64, 64, 4, None),
        (128, 128, 8, None),
        (32, 64, 4, None),
        (32, 64, 2, None),
        (16, 128, 4, None),
        (16, 64, 4, None),
        (16, 64, 2, None),
        (16, 64, 1, None),
    )
    for stages in (2, 3)
]
Variant = tuple[str, Callable[[], object]]


def forward_variants(impl: str, inputs: tuple[torch.Tensor, ...], plan: Plan) -> Iterator[Variant]:
    scale = inputs[0].shape[-1] ** -0.5
    if impl == "gluon":
        launches = HOPPER_COPY if plan.k_block >= 8 else HOPPER_GATHER
        for launch in launches:
            yield str(tuple(launch)), partial(hopper.attend_forward, *inputs, plan, None, None, scale, launch)
        return
    for tiles in _fitting(plan.q_block, plan.k_block):
        yield str(tuple(tiles)), partial(forward.attend_forward, *inputs, plan, None, None, scale, tiles)


def gradient_variants(impl: str, inputs: tuple[torch.Tensor, ...], plan: Plan) -> Iterator[Variant]:
    scale = inputs[0].shape[-1] ** -0.5
    grad_out = torch.randn_like(inputs[0])
    out, lse = forward.attend_forward(*inputs, plan, None, None, scale)
    delta, lse_log2 = backward.row_statistics(grad_out, torch.zeros_like(lse), out, lse)
    walks_plan = impl == "query-gradient"
    gradient = backward.query_gradient if walks_plan else backward.key_gradient
    blocks = (plan.q_block, plan.k_block) if walks_plan else (plan.k_block, plan.q_block)
    for tiles in _fitting(*blocks):
        arguments = (grad_out, delta, lse_log2, *inputs, plan, None, None, scale, tiles)
        yield str(tuple(tiles)), partial(gradient, *arguments)


def _fitting(own: int, other: int) -> Iterable[Tiles]:
    return (
        tiles for tiles in TILES if own % tiles.own == 0 and (other % tiles.other == 0 or other < tiles.other)
    )


def is_right(inputs: tuple[torch.Tensor, ...], plan: Plan, function: Callable[[], object]) -> bool:
    with poisoned_memory():
        result = function()
    return not isinstance(result, Attended) or check_forward(inputs, plan, *result).passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--grain", type=int, default=64)
    parser.add_argument("--q-block", type=int, default=192)
    implementations = ("gluon", "triton", "query-gradient", "key-gradient")
    parser.add_argument("--impl", choices=implementations, default="gluon")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("`torch` must see a GPU; got none. The interpreter's times mean nothing.")
    device, preset = torch.device("cuda"), PRESETS[options.preset]
    inputs = random_inputs(preset, device, torch.bfloat16)
    plan = layouts.random_lists(preset, options.grain, options.q_block, device)
    variants = gradient_variants if "gradient" in options.impl else forward_variants
    functions = {"dense forward": lambda: scaled_dot_product_attention(*inputs)}
    for name, function in variants(options.impl, inputs, plan):
        if is_right(inputs, plan, function):
            functions[name] = function
        else:
            print(f"{name}: wrong")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        timings = measure(functions, device, Effort.of(device, quick=False))
    for name, timing in sorted(timings.items(), key=lambda item: item[1].median):
        print(f"{timing.median:9.4f} ms  ({timing.low:.4f} - {timing.high:.4f})  {name}")


if __name__ == "__main__":
    main()
