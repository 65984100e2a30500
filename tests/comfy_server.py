"""The node in a whole ComfyUI, by its HTTP interface: `python comfy_server.py FOLDER`.

ComfyUI's server starts without a GPU, loads the nodes as it loads any others, and samples a tiny FLUX with random
weights: its own loader, patcher, guidance, samplers and LoRA. Everything that is written lies in a temporary folder.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NODES = Path(__file__).resolve().parents[1] / "comfy"
TEXT_DIM, POOLED_DIM, HIDDEN = 64, 32, 256
FIELDS = {
    "tiles": "4",
    "tile_size": "none",
    "near": "tile",
    "cycle": 4,
    "shared": "none",
    "share": "two-way",
    "shared_tokens": "none",
    "curve": "auto",
    "far": "16",
    "summary": "mean",
    "text_reads": "all",
    "dense_layers": "1",
    "dense_steps": "0",
    "interleave": False,
}
ALL = FIELDS | {"tiles": "1", "far": "none", "dense_layers": "0"}
PATIENCE = 180.0  # seconds, for the start and for each prompt

# A text encoder has gigabytes; its place is taken by a node that knows random texts.
TEXTS = f"""
import torch


class RandomText:
    CATEGORY, FUNCTION, RETURN_TYPES = "tests", "encode", ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"seed": ("INT", {{}}), "tokens": ("INT", {{}})}}}}

    def encode(self, seed, tokens):
        made = torch.Generator().manual_seed(seed)
        pooled = torch.randn(1, {POOLED_DIM}, generator=made)
        return ([[torch.randn(1, tokens, {TEXT_DIM}, generator=made), {{"pooled_output": pooled}}]],)


NODE_CLASS_MAPPINGS = {{"RandomText": RandomText}}
"""


def write_models(folder: str, base: Path) -> None:
    """A FLUX whose size ComfyUI reads off its weights, and a LoRA for one of its layers."""
    sys.path.insert(0, folder)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.flux.model import Flux

    model = Flux(
        in_channels=16,
        out_channels=16,
        vec_in_dim=POOLED_DIM,
        context_in_dim=TEXT_DIM,
        hidden_size=HIDDEN,
        mlp_ratio=4.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=2,
        axes_dim=[16, 56, 56],
        theta=10000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=True,
        txt_ids_dims=[],
        operations=comfy.ops.disable_weight_init,
    )
    torch.manual_seed(0)
    weights = {name: random_weight(name, value.shape) for name, value in model.state_dict().items()}
    layer = "single_blocks.1.linear1"
    rows, columns = weights[f"{layer}.weight"].shape
    lora = {
        f"diffusion_model.{layer}.lora_up.weight": torch.randn(rows, 4) / 8,
        f"diffusion_model.{layer}.lora_down.weight": torch.randn(4, columns) / 8,
    }
    for kind, tensors in (("diffusion_models", weights), ("loras", lora)):
        (base / "models" / kind).mkdir(parents=True)
        save_file(tensors, base / "models" / kind / "tiny.safetensors")


def random_weight(name: str, shape: Any) -> Tensor:
    """Norms of queries and keys are large, so that some keys weigh much, and it matters which are read."""
    return torch.full(shape, 3.0) if "_norm" in name else torch.randn(shape) * shape[-1] ** -0.5


@contextmanager
def server(folder: str, base: Path) -> Iterator[str]:
    """Its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--cpu",
        "--base-directory",
        str(base),
        "--port",
        str(port),
        "--database-url",
        "sqlite:///:memory:",
    ]
    command = [
        sys.executable,
        str(Path(folder) / "main.py"),
        *options,
        "--disable-auto-launch",
        "--disable-api-nodes",
    ]
    with (base / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(lambda: answered(f"{address}/system_stats"), process)
            yield address
        finally:
            process.terminate()
            process.wait(30)


def wait_for(condition: Any, process: Any = None) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process is not None and process.poll() is not None:
            raise AssertionError("ComfyUI did not start")
        found = condition()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError("ComfyUI did not answer in time")


def answered(url: str, sent: Any = None) -> Any:
    """What comes back, or None where nobody listens yet."""
    body = None if sent is None else json.dumps(sent).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
    except OSError:
        return None


def graph(name: str, fields: dict[str, Any] | None, sampler: str, has_lora: bool) -> dict[str, Any]:
    """A prompt in ComfyUI's form: loader, LoRA, node, sampler, file."""
    nodes: dict[str, Any] = {}

    def add(kind: str, **inputs: Any) -> list[Any]:
        nodes[str(len(nodes))] = {"class_type": kind, "inputs": inputs}
        return [str(len(nodes) - 1), 0]

    model = add("UNETLoader", unet_name="tiny.safetensors", weight_dtype="default")
    if has_lora:
        model = add("LoraLoaderModelOnly", model=model, lora_name="tiny.safetensors", strength_model=1.0)
    if fields is not None:
        model = add("NearfieldHilbert", model=model, **fields)
    sampled = add(
        "KSampler",
        model=model,
        positive=add("RandomText", seed=1, tokens=7),
        negative=add("RandomText", seed=2, tokens=9),
        latent_image=add("EmptySD3LatentImage", width=208, height=176, batch_size=2),
        seed=3,
        steps=4,
        cfg=3.0,
        sampler_name=sampler,
        scheduler="simple",
        denoise=1.0,
    )
    add("SaveLatent", samples=sampled, filename_prefix=name)
    return nodes


class Sampling:
    """Latents that a server makes."""

    def __init__(self, address: str, base: Path) -> None:
        self.address, self.base, self.made = address, base, 0

    def run(self, fields: dict[str, Any] | None, sampler: str = "euler", has_lora: bool = False) -> Tensor:
        self.made += 1
        name = f"latent{self.made}"
        sent = {"prompt": graph(name, fields, sampler, has_lora)}
        key = answered(f"{self.address}/prompt", sent)["prompt_id"]
        told = wait_for(lambda: answered(f"{self.address}/history/{key}"))[key]["status"]
        assert told["status_str"] == "success", told
        (file,) = (self.base / "output").glob(f"{name}_*.latent")
        return load_file(file)["latent_tensor"]


def check(sampling: Sampling, sampler: str, has_lora: bool) -> str:
    """Sparse first, so that what it left behind would be seen in the dense latents."""
    sparse = sampling.run(FIELDS, sampler, has_lora)
    dense, whole = (sampling.run(fields, sampler, has_lora) for fields in (None, ALL))
    assert dense.isfinite().all()
    changed, wrong = (float((each - dense).abs().max()) for each in (sparse, whole))
    words = (
        f"{sampler}{', LoRA' if has_lora else ''}: one tile is wrong by {wrong:.1e}, four by {changed:.1e}"
    )
    assert wrong < 1e-3 * changed, words
    return words


def main(folder: str) -> None:
    folder = str(Path(folder).resolve())
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        (base / "custom_nodes").mkdir()
        (base / "custom_nodes" / "nearfield").symlink_to(NODES)
        (base / "custom_nodes" / "texts.py").write_text(TEXTS, encoding="utf-8")
        write_models(folder, base)
        try:
            with server(folder, base) as address:
                sampling = Sampling(address, base)
                for sampler, has_lora in (("euler", False), ("heun", False), ("euler", True)):
                    print(check(sampling, sampler, has_lora))
                lora = sampling.run(None, has_lora=True) - sampling.run(None)
                assert lora.abs().max() > 1e-3, "the LoRA changes nothing"
                refused(sampling)
        except AssertionError:
            print((base / "log").read_text(encoding="utf-8"))
            raise
        log = (base / "log").read_text(encoding="utf-8")
    assert "7 text + 11x13: 1 calls dense, dense_layers=1; 2 calls sparse" in log, log
    print("a whole ComfyUI samples with the node")


def refused(sampling: Sampling) -> None:
    """A field that the method refuses ends the prompt with its words."""
    with pytest.raises(AssertionError, match=r"`far` must be at least 2; got 1\."):
        sampling.run(FIELDS | {"far": "1"})


if __name__ == "__main__":
    main(*sys.argv[1:])
