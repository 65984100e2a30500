"""What an installed nearfield can do without its checkout: `python package_smoke.py path/of/the/command`.

A program, run with nothing of the checkout on the path: `make package` runs it in an environment of its own.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import nearfield
from nearfield.demo.autoencoder import Autoencoder


def main(command: str) -> None:
    folder = Path(nearfield.__file__).parent
    assert not (folder.parents[1] / "pyproject.toml").exists(), f"{folder} is the checkout"
    assert (folder / "py.typed").exists()
    assert importlib.metadata.version("nearfield") == nearfield.__version__

    geometry = nearfield.Geometry((8, 8), text=5)
    query, key, value = (torch.randn(1, 2, geometry.num_tokens, 16) for _ in range(3))
    plan = nearfield.Hilbert(tiles=4).plan(geometry)
    masked = scaled_dot_product_attention(query, key, value, plan.to_mask())
    assert torch.allclose(nearfield.attend(query, key, value, plan).out, masked, atol=1e-5)
    assert Autoencoder().encode(torch.rand(1, 3, 16, 16)).shape == (1, 32, 2, 2)

    with tempfile.TemporaryDirectory() as elsewhere:
        doctor = [command, "doctor"]
        said = subprocess.run(doctor, cwd=elsewhere, capture_output=True, text=True, check=True).stdout
    assert nearfield.__version__ in said
    print(f"nearfield {nearfield.__version__} in {folder}: works")


if __name__ == "__main__":
    main(sys.argv[1])
