"""What packing in 8 bits costs the embedded model, whose unpacked weights were not kept.

    python benchmarks/packing_noise.py noisy.safetensors
    nearfield bench errors --photographs cats512-00.tar --num 4 --at 1,8,13 --patterns noisy.json

Every packed weight is moved by what rounding could have moved it by: at random, by up to half of its scale. So the
packed model is to the result what the unpacked one is to the packed. Beside the model's file, which holds weights as
they are, lies a file with the pattern that `bench errors` and others read it by: every layer dense.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nearfield._files import write_json
from nearfield.demo.model import EMBEDDED, SCALE, load_model, packed, save_model


def with_noise(weights: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Weights moved as packing moves them."""
    generator = torch.Generator().manual_seed(seed)
    stored = packed(weights)
    moved = dict(weights)
    for name, tensor in weights.items():
        if (scale := stored.get(name + SCALE)) is not None:
            reach = scale.float().repeat_interleave(tensor.shape[1] // scale.shape[1], dim=1)
            moved[name] = tensor + reach * (torch.rand(tensor.shape, generator=generator) - 0.5)
    return moved


def change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """How far matrices have moved, as a share of their norm."""
    matrices = [name for name, tensor in before.items() if tensor.dim() == 2]
    moved = sum(float((after[name] - before[name]).square().sum()) for name in matrices)
    return float((moved / sum(float(before[name].square().sum()) for name in matrices)) ** 0.5)


def main(out: Path) -> None:
    model, _ = load_model(EMBEDDED)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    noisy = with_noise(weights)
    model.load_state_dict(noisy)
    save_model(out, model, packing="none")
    layers = model.config.joint_blocks + model.config.single_blocks
    pattern = {"name": "noise of packing", "fields": {"dense_layers": layers}, "weights": str(out)}
    write_json(out.with_suffix(".json"), [pattern])
    print(f"wrote {out} and {out.with_suffix('.json')}: matrices moved by {change(weights, noisy):.2%}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
