"""Images as chunks on tiny Qwen-VL models: beside full prefill, and beside the same rule written out with a mask."""

from typing import Any

import pytest
import torch
import transformers
from tests.tiny_language_models import SIZES
from torch import Tensor

from nearfield.retrieval import (
    CacheBlend,
    InfoFlow,
    first_logits,
    prefill_chunk,
    read_image,
    recompute,
    score,
    select,
)

IMAGE, START, END = 90, 91, 92
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TEXT = SIZES | {"num_hidden_layers": 4, "rope_parameters": ROPE}
VISION = {
    "Qwen2VL": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
    "Qwen2_5_VL": {
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4},
        **{"intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [0]},
    },
}
HEIGHT, WIDTH = 6, 8  # tokens of the image
every_class = pytest.mark.parametrize("family", VISION)


def vision_model(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(
        text_config=dict(TEXT),
        vision_config=VISION[family],
        image_token_id=IMAGE,
        video_token_id=93,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.flatten(1).shape[-1] ** -0.5 * 1.5)
    return model.double().eval()


def prompt() -> dict[str, Tensor]:
    """What a processor gives: text, an image of 6 x 8 tokens, text."""
    generator = torch.Generator().manual_seed(1)
    before = torch.randint(3, 80, (7,), generator=generator)
    after = torch.randint(3, 80, (9,), generator=generator)
    image = torch.full((HEIGHT * WIDTH,), IMAGE)
    ids = torch.cat([before, torch.tensor([START]), image, torch.tensor([END]), after])[None]
    patches = torch.randn(4 * HEIGHT * WIDTH, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 2 * HEIGHT, 2 * WIDTH]]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def layers_of(cache: Any) -> list[Tensor]:
    return [side for layer in cache.layers for side in (layer.keys, layer.values)]


def full_prefill(model: Any, length: int) -> list[Tensor]:
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(**prompt(), past_key_values=cache, use_cache=True)
    return [side[:, :, :length] for side in layers_of(cache)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((one - two).norm() / two.norm()) for one, two in zip(found, expected, strict=True))


@every_class
def test_one_cell_is_full_prefill(family: str) -> None:
    model = vision_model(family)
    context, rest = read_image(model, prompt(), cells=1)
    assert worst(layers_of(context.cache), full_prefill(model, context.num_tokens)) < 1e-10
    assert torch.equal(torch.cat([context.tokens, rest]), prompt()["input_ids"][0])


@every_class
def test_cells_are_the_rule_with_a_mask(family: str) -> None:
    """The stock decoder on the same embeddings and positions, with every visible pair written out."""
    model = vision_model(family)
    context, _ = read_image(model, prompt(), cells=2)
    line, column = torch.arange(HEIGHT)[:, None], torch.arange(WIDTH)
    cell = 1 + ((line // 3) * 2 + column // 4).flatten()
    owner = torch.cat([torch.zeros(8, dtype=torch.long), cell])
    assert torch.equal(context.owner, owner)
    assert context.lengths == (8, 12, 12, 12, 12)
    mask = torch.ones(56, 56).tril().bool() & ((owner == 0) | (owner == owner[:, None]))
    cache = transformers.DynamicCache()
    assert context.embeddings is not None
    assert context.angles is not None
    with torch.no_grad():
        model.get_decoder()(
            inputs_embeds=context.embeddings[None],
            position_ids=context.angles[:, None],
            attention_mask={"full_attention": mask[None, None]},
            past_key_values=cache,
        )
    assert worst(layers_of(context.cache), layers_of(cache)) < 1e-10
    assert worst(layers_of(context.cache), full_prefill(model, 56)) > 0.05


@every_class
def test_what_follows_is_read_with_the_rows(family: str) -> None:
    """All rows and the text behind the image in one pass are full prefill."""
    model = vision_model(family)
    inputs = prompt()
    with torch.no_grad():
        expected = model(**inputs).logits[0, -1]
    context, rest = read_image(model, inputs, cells=2)
    logits = first_logits(model, context, torch.arange(context.num_tokens), rest)
    assert worst([logits], [expected]) < 1e-10
    assert worst(layers_of(context.cache), full_prefill(model, len(inputs["input_ids"][0]))) < 1e-10


@every_class
def test_everything_recomputed_is_full_prefill_and_generates_the_same(family: str) -> None:
    model = vision_model(family)
    inputs = prompt()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    context, _ = read_image(model, inputs, cells=2)
    recompute(model, context, select(context, torch.zeros(56, dtype=torch.float64), 1))
    assert worst(layers_of(context.cache), full_prefill(model, 56)) < 1e-10
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    found = model.generate(**ids, past_key_values=context.cache, **options)
    assert torch.equal(found, expected)


@every_class
def test_question_is_scored_by_the_models_own_weights(family: str) -> None:
    model = vision_model(family)
    context, rest = read_image(model, prompt(), cells=2)
    model.set_attn_implementation("eager")
    start = context.next_position
    assert start == int(torch.tensor([HEIGHT, WIDTH]).max()) + 8  # text goes on after the longer side
    with torch.no_grad():
        weights = (
            model.get_decoder()(
                input_ids=rest[None],
                position_ids=torch.arange(start, start + len(rest)).expand(3, 1, -1),
                past_key_values=context.copy().cache,
                output_attentions=True,
            )
            .attentions[1][0]
            .double()
        )
    model.set_attn_implementation("sdpa")
    found = score(model, context, rest, InfoFlow(depth=(0.25, 0.5)))
    torch.testing.assert_close(found.double(), weights.mean(0)[:, :56].norm(dim=0), rtol=1e-5, atol=1e-8)
    rows = select(context, found, 0.15)
    assert len(rows) == 8
    assert (rows >= 8).all()
    before = [side.clone() for side in layers_of(context.cache)]
    recompute(model, context, rows)
    others = torch.ones(56, dtype=torch.bool)
    others[rows] = False
    for one, two in zip(layers_of(context.cache), before, strict=True):
        assert torch.equal(one[:, :, others], two[:, :, others])
    assert not torch.equal(layers_of(context.cache)[-1], before[-1])


def test_deviation_of_cells() -> None:
    model = vision_model("Qwen2_5_VL")
    context, rest = read_image(model, prompt(), cells=2)
    difference = full_prefill(model, 56)[5] - layers_of(context.cache)[5]
    found = score(model, context, rest, CacheBlend(layer=2))
    torch.testing.assert_close(found, difference.square().sum((0, 1, 3)), rtol=1e-6, atol=1e-9)


def test_bad_images() -> None:
    model, inputs = vision_model("Qwen2_5_VL"), prompt()
    with pytest.raises(
        ValueError, match="`cells` must be at most 6, the image's shorter side in tokens; got 7"
    ):
        read_image(model, inputs, cells=7)
    with pytest.raises(ValueError, match="`inputs` must hold `pixel_values`; got input_ids"):
        read_image(model, {"input_ids": inputs["input_ids"]})
    short = inputs | {"input_ids": inputs["input_ids"][:, :56]}
    with pytest.raises(ValueError, match="`inputs` must end in text; got an image at the end"):
        read_image(model, short)
    with pytest.raises(ValueError, match=r"Its positions have several axes \(M-RoPE\): see `read_image`"):
        prefill_chunk(model, torch.arange(5))


def test_features_at_later_layers_are_refused() -> None:
    """Qwen3-VL adds what it sees to several layers, which cells do not know."""
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 8},
        vision_config=vision | {"intermediate_size": 24, "deepstack_visual_indexes": [0]},
        image_token_id=IMAGE,
        video_token_id=93,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).double().eval()
    with pytest.raises(
        NotImplementedError, match="`model` must see images at its first layer alone; got Qwen3VL"
    ):
        read_image(model, prompt())
