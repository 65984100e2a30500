"""Cases of whole models: `apply` on tiny diffusers models and pipelines, answers from documents, the embedded model.

This folder serves the redesign alone, and goes away with its last commit.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import names
import torch
from ground import Ground, Results, case, never, plain
from torch import Tensor

NOT_INTERPRETED = ("cpu", "cuda")
EVERYWHERE = ("cpu", "interpreter", "cuda")
IMAGE, VIDEO = (12, 10), (3, 6, 8)
ALL_DENSE_OFF = {"dense_layers": 0, "dense_steps": 0}


def method(name: str, **fields: Any) -> Callable[[], Any]:
    return lambda: names.method(name, **fields)


def merging(attention: Callable[[], Any] | None = None, **fields: Any) -> Callable[[], Any]:
    fields = {"region_size": 16, "skip_blocks": (0, 0)} | fields
    if attention is None:
        return lambda: names.method("Merge", **fields)
    return lambda: names.merged(names.method("Merge", **fields), attention())


HILBERT = method("Hilbert", tile_size=24, far=4, **ALL_DENSE_OFF)
TILES = method("Hilbert", near="tile", tiles=4, far=None, **ALL_DENSE_OFF)
METHODS: dict[str, Callable[[], Any]] = {
    "hilbert default": method("Hilbert"),
    "hilbert": HILBERT,
    "tiles": TILES,
    "tiles far shared": method(
        "Hilbert", near="tile", tiles=4, far=8, shared="centre", shared_tokens=12, **ALL_DENSE_OFF
    ),
    "interleaved": method("Hilbert", near="tile", tiles=4, far=4, interleave=True, **ALL_DENSE_OFF),
    "some dense": method("Hilbert", tile_size=24, far=4, dense_layers=(0, -1)),
    "loglinear": method("LogLinear", block=4, topk=2),
    "online": method("FineGrained", query_block=16, grain=2, predict="online", mass=0.7, guard=0.2),
    "blocks": method("BlockTopK", query_block=16, grain=8, **ALL_DENSE_OFF),
    "strided": method("StridedKeys", **ALL_DENSE_OFF),
    "merge": merging(),
    "merge modules": merging(placement="module"),
    "merge windows": merging(region="window", size_bias=True),
    "merge bipartite": method("BipartiteMerge", skip_blocks=(0, 0)),
    "merge hilbert": merging(method("Hilbert", tile_size=16, far=4, **ALL_DENSE_OFF)),
    "merge loglinear": merging(method("LogLinear", block=4, topk=2), ratio=0.3),
}


def moved(inputs: Any, ground: Ground) -> Any:
    """Inputs where the model is."""
    if isinstance(inputs, Tensor):
        is_wide = ground.is_exact and inputs.is_floating_point()
        return (inputs.double() if is_wide else inputs).to(ground.device)
    if isinstance(inputs, dict):
        return {name: moved(value, ground) for name, value in inputs.items()}
    if isinstance(inputs, list):
        return [moved(value, ground) for value in inputs]
    return inputs


@cache
def model_of(kind: str, device: torch.device, is_exact: bool = False) -> Any:
    made, _ = kinds()[kind]
    return (made().double() if is_exact else made()).to(device)


def kinds() -> dict[str, Any]:
    tiny = names.tiny_models()
    return tiny.MODELS | tiny.VIDEO_MODELS | {"qwen_edit": (tiny.qwen_edit, tiny.qwen_edit_inputs)}


def impl_of(ground: Ground) -> str:
    return "auto" if ground.impl == "grouped" else ground.impl


def forward(
    ground: Ground, kind: str, make: Callable[[], Any], grid: tuple[int, ...] = (), batch: int = 1
) -> Results:
    """The stock model, the model with a method, and the stock model once more."""
    is_video = kind in names.tiny_models().VIDEO_MODELS
    model = model_of(kind, ground.device)
    inputs = moved(kinds()[kind][1](grid or (VIDEO if is_video else IMAGE), batch), ground)
    first = names.tiny_models().first
    results: Results = {}
    with torch.no_grad():
        results["stock"] = first(model(**inputs))
        with names.apply(model, make(), impl=impl_of(ground)):
            results["out"] = first(model(**inputs))
            results["again"] = first(model(**inputs))
        results["removed"] = first(model(**inputs))
    return results


def trained(ground: Ground, make: Callable[[], Any]) -> Results:
    """Gradients of inputs and weights through a FLUX with a method."""
    model = model_of("flux", ground.device, ground.is_exact)
    inputs = moved(kinds()["flux"][1](IMAGE, 2), ground)
    weights = dict(list(model.named_parameters())[::9])
    leaves = {"hidden_states": inputs["hidden_states"].requires_grad_()} | weights
    for weight in weights.values():
        weight.requires_grad_()
    try:
        with names.apply(model, make(), impl=impl_of(ground)):
            (out,) = model(**inputs)
        grad = ground.normal(*out.shape, seed=90).to(out.dtype)
        found = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    finally:
        model.requires_grad_(False)
    with torch.no_grad(), names.apply(model, make(), impl=impl_of(ground)):
        before = model(**inputs)[0]
    grads = {f"grad {name}": x for name, x in zip(leaves, found, strict=True) if x is not None}
    return {"plain out": before, "out": out.detach()} | grads


for _name, _make in METHODS.items():
    case(f"models/flux {_name}", partial(forward, kind="flux", make=_make), devices=NOT_INTERPRETED)
case("models/flux batch", partial(forward, kind="flux", make=HILBERT, batch=2), devices=NOT_INTERPRETED)
case("models/flux odd", partial(forward, kind="flux", make=HILBERT, grid=(9, 7)), devices=NOT_INTERPRETED)
case(
    "models/flux kernels", partial(forward, kind="flux", make=HILBERT, grid=(6, 8)), devices=("interpreter",)
)
for _kind in ("flux2", "sd3", "pixart", "qwen", "qwen_edit", "z_image", "sdxl"):
    _names = ["hilbert", "tiles"] + ["merge"] * (_kind != "z_image")
    _names += ["loglinear"] * (_kind in ("sd3", "qwen", "z_image"))
    _names += ["merge hilbert"] * (_kind in ("sd3", "qwen"))
    for _name in _names:
        _batch = 2 if _name in ("hilbert", "tiles") else 1
        case(
            f"models/{_kind} {_name}",
            partial(forward, kind=_kind, make=METHODS[_name], batch=_batch),
            devices=NOT_INTERPRETED,
        )
for _kind in ("wan", "wan_i2v", "wan_ti2v", "hunyuan", "hunyuan_i2v", "ltx", "ltx_i2v"):
    case(f"models/{_kind} hilbert", partial(forward, kind=_kind, make=HILBERT), devices=NOT_INTERPRETED)
case(
    "models/wan gated",
    partial(forward, kind="wan", make=method("GatedBlocks", block=16, topk=3)),
    devices=NOT_INTERPRETED,
)
case(
    "models/wan linear",
    partial(forward, kind="wan", make=method("SparseLinear", block=16, topk=3)),
    devices=NOT_INTERPRETED,
)
for _name, _apart in (("hilbert", plain), ("tiles", never), ("loglinear", plain), ("merge", never)):
    case(
        f"models/flux trained {_name}",
        partial(trained, make=METHODS[_name]),
        apart=_apart,
        devices=NOT_INTERPRETED,
    )


# -- pipelines ---------------------------------------------------------------------------------------------------------


def sampled(ground: Ground, make: Callable[[], Any], is_guided: bool = False) -> Results:
    """Five steps of a pipeline, where methods know the step."""
    tiny = names.tiny_models()
    pipe = (tiny.sd3_pipeline if is_guided else tiny.flux_pipeline)().to(ground.device)
    call = tiny.guided_call if is_guided else tiny.flux_call
    results = {}
    with names.apply(pipe, make(), impl=impl_of(ground)):
        for attempt in range(2):
            results[f"out {attempt}"] = pipe(**call()).images
    return results


FINE = method("FineGrained", query_block=16, grain=2, threshold="1/N", refresh=(0.0, 0.5))
_STEPPED: dict[str, tuple[Callable[[], Any], bool]] = {
    "hilbert default": (METHODS["hilbert default"], False),
    "hilbert ends": (method("Hilbert", tile_size=24, far=4, dense_steps=(1, 0.2)), False),
    "fine": (FINE, False),
    "fine guided": (FINE, True),
    "fine guided shared": (
        method("FineGrained", query_block=16, grain=4, threshold="1/N", share_branches=True),
        True,
    ),
    "hilbert guided": (HILBERT, True),
    "merge": (merging(refresh=(3, 2)), False),
    "merge guided": (merging(refresh=(3, 2)), True),
    "merge fine": (merging(FINE, refresh=(3, 2)), False),
    "merge hilbert": (merging(HILBERT, refresh=(2, 1)), False),
}
for _name, (_make, _guided) in _STEPPED.items():
    case(f"pipelines/{_name}", partial(sampled, make=_make, is_guided=_guided), devices=NOT_INTERPRETED)


# -- documents ---------------------------------------------------------------------------------------------------------


def answered(ground: Ground, name: str) -> Results:
    """Answers of a tiny language model from stored documents, and the keys and values behind one."""
    tiny = names.tiny_language_models()
    model = tiny.language_model(name, torch.float32, vocab_size=160).to(ground.device)
    made = names.reuse(model, tiny.tiny_tokenizer())
    chunks = [made.add(text) for text in tiny.DOCUMENTS]
    options = {"max_new_tokens": 8, "suppress_tokens": list(range(6))}
    question = "Which river flows through Bern?"
    results: Results = {}
    for ratio, reorder in ((0.0, False), (0.3, False), (0.3, True), (1.0, False)):
        found = made.answer(question, chunks, ratio=ratio, reorder=reorder, **options)
        report = found.report
        facts = report.lengths, report.selected, report.ranks, report.question_tokens, report.context_tokens
        results[f"answer {ratio}{' reordered' * reorder}"] = (found.text, facts, report.rows.tolist())
    asked = tiny.random_tokens(9).to(ground.device)
    scores, rows, layers = names.recomputed_keys(made, chunks, asked, 0.4)
    results |= {"scores": scores, "rows": rows}
    for number, (keys, values) in enumerate(layers):
        results |= {f"keys {number}": keys, f"values {number}": values}
    return results


for _name in ("llama", "llama-llama3", "qwen3", "mistral", "gemma3", "glm4"):
    case(f"retrieval/{_name}", partial(answered, name=_name), devices=NOT_INTERPRETED)


# -- the embedded model ------------------------------------------------------------------------------------------------


def embedded(ground: Ground, make: Callable[[], Any] | None) -> Results:
    """Two denoising steps at 128 pixels."""
    pipeline = names.embedded_pipeline(ground.device)
    if make is None:
        return {"latents": pipeline.sample(range(1), size=128, steps=2)}
    with names.apply(pipeline, make(), impl=impl_of(ground)):
        return {"latents": pipeline.sample(range(1), size=128, steps=2)}


case("embedded/stock", partial(embedded, make=None), devices=NOT_INTERPRETED)
case("embedded/hilbert", partial(embedded, make=HILBERT), devices=NOT_INTERPRETED)
case("embedded/merge", partial(embedded, make=METHODS["merge hilbert"]), devices=NOT_INTERPRETED)
