"""What an installed nearfield can do without its checkout: `python package_smoke.py path/of/the/command [version ...]`.

A program, run with nothing of the checkout on the path, in environments that `make package` and `make smoke` build. The
versions, `name==version`, say what such an environment must have: one that quietly has others proves nothing.
"""

import contextlib
import importlib.metadata
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests import command_line as cli
from torch.nn.functional import scaled_dot_product_attention

import nearfield
from nearfield_lab.embedded.autoencoder import Autoencoder

_SHOWN = ("torch", "diffusers", "huggingface-hub", "transformers", "peft", "pillow", "matplotlib")


def main(command: str, *pins: str) -> None:
    folder = Path(nearfield.__file__).parent
    assert not (folder.parents[1] / "pyproject.toml").exists(), f"{folder} is the checkout"
    assert (folder / "py.typed").exists()
    assert importlib.metadata.version("nearfield") == nearfield.__version__
    for name, version in (pin.split("==") for pin in pins):
        assert _release(_version(name)) == _release(version), f"{name} is {_version(name)}, not {version}"
    torch.set_num_threads(1)  # small work: threads would mostly wait for each other
    check_attend()
    check_apply()
    check_command(command)
    print(f"nearfield {nearfield.__version__} works with", *(f"{name} {_version(name)}" for name in _SHOWN))


def _version(name: str) -> str:
    """Without the label of a build, such as +cpu."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _release(version: str) -> str:
    """0.39 and 0.39.0 are one release."""
    while version.endswith(".0"):
        version = version.removesuffix(".0")
    return version


def check_attend() -> None:
    geometry = nearfield.Geometry((8, 8), text=5)
    query, key, value = (torch.randn(1, 2, geometry.num_tokens, 16) for _ in range(3))
    plan = nearfield.Hilbert(tiles=4).plan(geometry)
    masked = scaled_dot_product_attention(query, key, value, plan.to_mask())
    assert torch.allclose(nearfield.attend(query, key, value, plan).out, masked, atol=1e-5)
    assert Autoencoder().encode(torch.rand(1, 3, 16, 16)).shape == (1, 32, 2, 2)


def check_apply() -> None:
    """FLUX.1: with everything read it is the stock model, with tiles it is not, and removed it is again."""
    model, inputs = _tiny_flux()
    everything = nearfield.Hilbert(tiles=1, shared="none", far=None, dense_layers=0, dense_steps=0)
    tiles = nearfield.Hilbert(tiles=4, shared="none", far=None, dense_layers=0, dense_steps=0)
    with torch.no_grad():
        stock = model(**inputs)[0]
        for method, is_stock in ((everything, True), (tiles, False)):
            with nearfield.apply(model, method):
                changed = model(**inputs)[0]
            assert torch.allclose(changed, stock, atol=1e-4) == is_stock, method
        assert torch.equal(model(**inputs)[0], stock)


def _tiny_flux() -> tuple[Any, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    )
    for parameter in model.parameters():  # a new model has zeros, which hide what attention does
        torch.nn.init.normal_(parameter, std=0.3)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(12), indexing="ij")
    inputs = {
        "hidden_states": torch.randn(1, 96, 4),
        "encoder_hidden_states": torch.randn(1, 7, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.full((1,), 0.5),
        "img_ids": torch.stack([torch.zeros(96), rows.flatten(), columns.flatten()], 1),
        "txt_ids": torch.zeros(7, 3),
        "return_dict": False,
    }
    return model.eval(), inputs


def check_command(command: str) -> None:
    """The installed script examines itself; in this process, to import once, it draws and makes a picture."""
    doctor = subprocess.run([command, "doctor"], capture_output=True, text=True, check=True)
    assert nearfield.__version__ in doctor.stdout
    assert "cats.safetensors: CC-BY-NC-4.0" in doctor.stdout
    assert "CC-BY-NC-4.0" in importlib.metadata.metadata("nearfield")["License-Expression"]
    generate = "generate --recipe cats-close --size 64 --steps 2 --num 1 --device cpu"
    with tempfile.TemporaryDirectory() as elsewhere:
        for words, picture in (("show --grid 16x16", "show.png"), (generate, "cats.png")):
            path = Path(elsewhere) / picture
            with contextlib.redirect_stdout(io.StringIO()) as said:
                assert cli.main([*words.split(), "--out", str(path)]) == 0
            assert f"wrote {path}" in said.getvalue()
            assert path.stat().st_size > 1000


if __name__ == "__main__":
    main(*sys.argv[1:])
