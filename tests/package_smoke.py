"""What the installed packages can do without their checkout: `python package_smoke.py WHAT COMMAND [version ...]`.

WHAT is "library" (nearfield alone) or "lab" (nearfield-lab, too); COMMAND is the path of the installed `nearfield`. A
program, run with nothing of the checkout on the path, in environments that `make package` and `make smoke` build. The
versions, `name==version`, say what such an environment must have: one that quietly has others proves nothing.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import nearfield

_SHOWN = ("torch", "diffusers", "huggingface-hub", "transformers", "peft", "pillow", "matplotlib")


def main(what: str, command: str, *pins: str) -> None:
    folder = Path(nearfield.__file__).parent
    assert not (folder.parents[1] / "pyproject.toml").exists(), f"{folder} is the checkout"
    assert (folder / "py.typed").exists()
    assert importlib.metadata.version("nearfield") == nearfield.__version__
    for name, version in (pin.split("==") for pin in pins):
        assert _release(_version(name)) == _release(version), f"{name} is {_version(name)}, not {version}"
    torch.set_num_threads(1)  # small work: threads would mostly wait for each other
    {"library": check_library, "lab": check_lab}[what](command)
    print(f"{what} {nearfield.__version__} works with", *(f"{name} {_version(name)}" for name in _SHOWN))


def check_library(command: str) -> None:
    """Nothing of the lab is there, and nothing but its commands needs it."""
    assert importlib.util.find_spec("nearfield_lab") is None
    assert _version("nearfield-lab") == "none"
    check_attend()
    check_apply()
    assert nearfield.__version__ in _said_by_doctor(command)
    for words in (["generate", "--compare"], ["train"], ["tune"]):
        failed = subprocess.run([command, *words], capture_output=True, text=True)
        assert failed.returncode == 2, failed
        (line,) = failed.stderr.splitlines()
        assert "pip install nearfield-lab" in line
        assert not failed.stdout


def check_lab(command: str) -> None:
    """Its weights say their licence; in this process, to import once, it draws and makes a picture."""
    from nearfield.cli import main as nearfield_command
    from nearfield_lab.embedded.autoencoder import Autoencoder

    assert importlib.metadata.version("nearfield-lab") == nearfield.__version__
    assert "cats.safetensors: CC-BY-NC-4.0" in _said_by_doctor(command)
    assert "CC-BY-NC-4.0" in importlib.metadata.metadata("nearfield-lab")["License-Expression"]
    assert importlib.metadata.metadata("nearfield")["License-Expression"] == "Apache-2.0"
    assert Autoencoder().encode(torch.rand(1, 3, 16, 16)).shape == (1, 32, 2, 2)
    generate = "generate --recipe cats-close --size 64 --steps 2 --num 1 --option device=cpu"
    with tempfile.TemporaryDirectory() as elsewhere:
        for words, picture in (
            ("explain --grid 16x16 --plot", "show.png"),
            (f"{generate} --out", "cats.png"),
        ):
            path = Path(elsewhere) / picture
            with contextlib.redirect_stdout(io.StringIO()) as said:
                assert nearfield_command([*words.split(), str(path)]) == 0
            assert f"wrote {path}" in said.getvalue()
            assert path.stat().st_size > 1000


def _said_by_doctor(command: str) -> str:
    return subprocess.run([command, "doctor"], capture_output=True, text=True, check=True).stdout


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


if __name__ == "__main__":
    main(*sys.argv[1:])
