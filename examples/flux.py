"""One call makes a FLUX pipeline sparse: what was changed, how much is saved, and the way back.

It needs the extra `diffusers`: `pip install '.[diffusers]'` in a checkout.
"""

import time

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

import nearfield

WEIGHTS = None  # such as "black-forest-labs/FLUX.1-dev", on a GPU; without, a tiny random model on the CPU
SIZE = 2048 if WEIGHTS else 1024


def load() -> tuple[FluxPipeline, dict]:
    if WEIGHTS:
        pipe = FluxPipeline.from_pretrained(WEIGHTS, torch_dtype=torch.bfloat16).to("cuda")
        return pipe, {"prompt": "a lighthouse on a cliff, seen from the sea", "num_inference_steps": 28}
    torch.manual_seed(0)
    encoders = dict.fromkeys(["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
    pipe = FluxPipeline(
        transformer=FluxTransformer2DModel(
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=64,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(16, 24, 24),
        ),
        vae=AutoencoderKL(block_out_channels=(4, 4, 4, 4), norm_num_groups=1, latent_channels=16),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **encoders,
    )
    embeddings = {"prompt_embeds": torch.randn(1, 64, 16), "pooled_prompt_embeds": torch.randn(1, 16)}
    return pipe, embeddings | {"num_inference_steps": 3, "output_type": "latent"}


def generate(pipe: FluxPipeline, call: dict) -> tuple[object, float]:
    pipe.set_progress_bar_config(disable=True)
    start = time.perf_counter()
    images = pipe(**call, height=SIZE, width=SIZE, generator=torch.Generator().manual_seed(1)).images
    return images, time.perf_counter() - start


pipe, call = load()
dense, dense_time = generate(pipe, call)

# Every token reads what is around it, the text, and the rest of the image in summary. The first 15 % of the steps stay
# dense.
with nearfield.apply(pipe, nearfield.Hilbert()) as handle:
    sparse, sparse_time = generate(pipe, call)
    print(handle.summary())
print(f"dense {dense_time:.2f} s, sparse {sparse_time:.2f} s")

# Outside the block nothing is left of it.
again, _ = generate(pipe, call)
if WEIGHTS:
    dense[0].save("dense.png")
    sparse[0].save("sparse.png")
else:
    assert torch.equal(again, dense)
    assert not torch.equal(sparse, dense)
