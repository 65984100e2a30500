"""README's install line and README's code, in an environment that has what the line brings and nothing else.

A program, run by `make readme`: `python readme_smoke.py install README.md` prints the line without Triton, which is
for Linux alone and large; `python readme_smoke.py run README.md` runs the code. FLUX is a tiny pipeline of random parts
in a folder: the name of the model, the device and the size are all that is changed in the block.
"""

import contextlib
import io
import re
import string
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"^(pip install '\.\[)([\w,]+)(\]')$", re.MULTILINE)
SIZE = 256  # tokens enough that `Hilbert` reads less than all


def install_line(readme: str) -> str:
    """The first line that installs, without the extra `triton`."""
    found = INSTALL.search(readme)
    assert found is not None, "README has no line that installs a checkout with extras"
    extras = found[2].split(",")
    extras.remove("triton")
    return f"{found[1]}{','.join(extras)}{found[3]}"


def run(readme: str) -> None:
    blocks: list[str] = BLOCK.findall(readme)
    is_flux = ["FluxPipeline.from_pretrained" in block for block in blocks]
    assert is_flux.count(True) == 1, "README has one block that runs FLUX"
    assert len(blocks) > 1
    for block, flux in zip(blocks, is_flux, strict=True):
        if flux:
            run_flux(block)
        else:
            exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    check_modules()


def run_flux(block: str) -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        tiny_flux().save_pretrained(folder)
        changes = {
            '"black-forest-labs/FLUX.1-dev"': repr(folder),
            '.to("cuda")': '.to("cpu")',
            "height=2048, width=2048": f"height={SIZE}, width={SIZE}",
        }
        for old, new in changes.items():
            assert block.count(old) == 1, f"README's block has {old} {block.count(old)} times"
            block = block.replace(old, new)
        names: dict[str, Any] = {"__name__": "readme"}
        torch.manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(block, "README.md", "exec"), names)
    assert "Hilbert" in said.getvalue(), said.getvalue()
    assert names["image"].size == (SIZE, SIZE)
    check_pictures(names["pipe"], names["image"], re.findall(r'pipe\("(.*?)"', block))


def check_pictures(pipe: Any, sparse: Any, prompts: list[str]) -> None:
    """The block's attention was sparse, its prompt was read, and the pipeline runs with its weights offloaded."""
    import torch

    def picture(prompt: str) -> Any:
        torch.manual_seed(0)
        return pipe(prompt, height=SIZE, width=SIZE).images[0]

    (prompt,) = prompts
    dense = picture(prompt)
    assert len(dense.getcolors(SIZE * SIZE)) > 100, "the picture is empty"
    assert dense != sparse, "with apply the picture is the same"
    assert dense != picture("two dogs in the snow"), "the prompt changes nothing"
    pipe.enable_model_cpu_offload(device="cpu")
    assert dense == picture(prompt)


def tiny_flux() -> Any:
    """All parts of FLUX.1 with random weights, the tokenizers with single letters."""
    import torch
    import transformers
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    letters = list(string.ascii_lowercase)
    ends = ["<|startoftext|>", "<|endoftext|>"]
    words = [*ends, *letters, *(f"{letter}</w>" for letter in letters)]
    clip_words = {word: number for number, word in enumerate(words)}
    t5_words = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((letter, -2.0) for letter in ["▁", *letters]),
    ]
    t5_words += [(f"<extra_id_{number}>", 0.0) for number in range(100)]
    clip = transformers.CLIPTextConfig(
        vocab_size=len(clip_words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    t5 = transformers.T5Config(
        vocab_size=len(t5_words), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=0.4,
    )
    parts = {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": transformers.CLIPTextModel(clip),
        "text_encoder_2": transformers.T5EncoderModel(t5),
    }
    generator = torch.Generator().manual_seed(0)
    for part in parts.values():
        for parameter in part.parameters():  # small ones of a new model would hide what the prompt does
            scale = max(1, parameter[0].numel()) ** -0.5
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return FluxPipeline(
        **parts,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=transformers.CLIPTokenizer(clip_words, [], model_max_length=77),
        tokenizer_2=transformers.T5TokenizerFast(t5_words, model_max_length=512),
    )


def check_modules() -> None:
    """Every module is Python's own or of this environment, nearfield included."""
    here, python = Path(sys.prefix).resolve(), Path(sysconfig.get_path("stdlib")).resolve()
    files = {Path(file).resolve() for module in list(sys.modules.values()) if (file := _file(module))}
    foreign = {
        file
        for file in files - {Path(__file__).resolve()}
        if not file.is_relative_to(here)
        and ("site-packages" in file.parts or not file.is_relative_to(python))
    }
    assert not foreign, f"not of this environment: {sorted(map(str, foreign))}"
    assert "nearfield" in sys.modules


def _file(module: Any) -> str | None:
    file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
    return file if isinstance(file, str) and Path(file).exists() else None


if __name__ == "__main__":
    text = Path(sys.argv[2]).read_text(encoding="utf-8")
    if sys.argv[1] == "install":
        print(install_line(text))
    else:
        run(text)
        print("README's code runs with what its install line brings")
