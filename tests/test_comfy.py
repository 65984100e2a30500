"""The nodes for ComfyUI, against a stand-in that calls them as ComfyUI does, and against ComfyUI itself.

The latter where `NEARFIELD_COMFYUI` names its folder, and what it needs is installed.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import comfy_standin as standin
from tests.remembering import Remembering, registered
from tests.tiles import paper
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nearfield import Geometry, Hilbert
from nearfield.methods import MergeMethod, own_methods
from nearfield.methods.fields import fields_of
from nearfield.session import TokenLayout

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "comfy"
SIGMAS = torch.linspace(1, 0, 6)
FIELDS: dict[str, Any] = {
    "tiles": "4",
    "tile_size": "none",
    "near": "tile",
    "cycle": 4,
    "shared": "centre",
    "share": "two-way",
    "shared_tokens": "none",
    "curve": "auto",
    "far": "none",
    "summary": "mean",
    "text_reads": "all",
    "dense_layers": "1",
    "dense_steps": "0.0",
    "interleave": False,
}


def load() -> Any:
    """The folder as ComfyUI loads it: by its path, under a name that is not its own."""
    name = "nearfield_nodes_for_comfyui"
    spec = importlib.util.spec_from_file_location(
        name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


NODES = load()
PATCHING = sys.modules["nearfield_nodes_for_comfyui.patching"]


@pytest.fixture(autouse=True)
def _comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def patched(model: Any, **fields: Any) -> Any:
    node = NODES.NODE_CLASS_MAPPINGS["NearfieldHilbert"]()
    (result,) = getattr(node, node.FUNCTION)(model, **FIELDS | fields)
    return result


def method_of(model: Any) -> Hilbert:
    """What a patched model reads by."""
    (wrapper,) = model.wrappers[standin.APPLY_MODEL]["nearfield"]
    method: Hilbert = wrapper.method
    return method


class Case:
    """A model, what it is called with, and the sequences of its attention calls in their order."""

    def __init__(
        self, kind: Callable[[], Any], size: tuple[int, ...], calls: list[Geometry], **conditions: Any
    ) -> None:
        torch.manual_seed(0)
        self.patcher = standin.ModelPatcher(standin.BaseModel(kind()).double())
        self.latent = torch.randn(2, 4, *size, dtype=torch.float64)
        self.text = torch.randn(2, 7, 8, dtype=torch.float64)
        self.calls, self.conditions = calls, conditions

    def run(self, patcher: Any, step: int = 0) -> Tensor:
        return standin.sample(patcher, self.latent, self.text, SIGMAS, step, **self.conditions)


def latent(*size: int) -> Tensor:
    return torch.randn(2, 4, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


JOINED = Geometry((11, 13), text=7)
EDITED = Geometry((11, 13), text=7, references=((6, 8), (4, 4)))
CASES: dict[str, Callable[[], Case]] = {
    "FLUX": lambda: Case(standin.Flux, (21, 26), [JOINED] * 5),
    "FLUX with references": lambda: Case(
        standin.Flux, (21, 26), [EDITED] * 5, ref_latents=[latent(12, 16), latent(8, 8)]
    ),
    "SD3": lambda: Case(
        standin.OpenAISignatureMMDITWrapper,
        (22, 26),
        [JOINED, Geometry((11, 13)), JOINED, Geometry((11, 13)), JOINED],
    ),
    "Qwen-Image": lambda: Case(standin.QwenImageTransformer2DModel, (1, 22, 26), [JOINED] * 4),
    "Qwen-Image with references": lambda: Case(
        standin.QwenImageTransformer2DModel,
        (1, 22, 26),
        [EDITED] * 4,
        ref_latents=[latent(1, 12, 16), latent(1, 8, 8)],
    ),
    "Wan": lambda: Case(standin.WanModel, (3, 16, 20), [Geometry((3, 8, 10))] * 3),
    "Wan with frames behind": lambda: Case(
        standin.WanModel, (3, 16, 20), [Geometry((5, 8, 10))] * 3, time_dim_concat=latent(2, 16, 20)
    ),
    "Wan, one frame": lambda: Case(standin.WanModel, (1, 22, 26), [Geometry((11, 13))] * 3),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.mark.parametrize("near", ["tile", "around"])
def test_model_reads_what_the_plans_say(case: Case, near: str) -> None:
    sparse = case.run(patched(case.patcher, near=near))
    masked = standin.Masked(paper(tiles=4, near=near), case.calls)
    reference = case.patcher.clone()
    reference.model_options["transformer_options"]["optimized_attention_override"] = masked
    expected = case.run(reference)
    assert not masked.left
    assert torch.allclose(sparse, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(sparse, case.run(case.patcher), rtol=0, atol=1e-6)


def test_one_tile_is_dense(case: Case) -> None:
    whole = patched(case.patcher, tiles=1, shared="none", dense_layers=0)
    assert torch.allclose(case.run(whole), case.run(case.patcher), rtol=0, atol=1e-12)


def test_original_is_not_touched(case: Case) -> None:
    before = case.run(case.patcher)
    clone = patched(case.patcher)
    case.run(clone)
    assert clone is not case.patcher
    assert case.patcher.wrappers == {}
    assert case.patcher.model_options == {"transformer_options": {}}
    assert torch.equal(case.run(case.patcher), before)
    assert not torch.equal(case.run(clone), before)


def test_second_node_replaces_the_first() -> None:
    case = CASES["FLUX"]()
    twice = patched(patched(case.patcher, tiles=9), tiles=4)
    assert torch.equal(case.run(twice), case.run(patched(case.patcher, tiles=4)))
    assert len(twice.wrappers[standin.APPLY_MODEL]["nearfield"]) == 1


@pytest.mark.parametrize(
    "fields",
    [{"share": "keys"}, {"shared": "distributed"}, {"far": 0}, {"near": "around"}, {"summary": "weighted"}],
    ids=str,
)
def test_fields_change_what_is_read(fields: dict[str, Any]) -> None:
    case = CASES["Wan"]()
    one, other = (patched(case.patcher, **{"far": 16} | change) for change in (fields, {}))
    assert not torch.allclose(case.run(one), case.run(other))


def is_dense(method: Hilbert, level: Tensor) -> bool:
    found: bool = PATCHING.is_dense_step(method, PATCHING.moment_of(level, SIGMAS))
    return found


def test_first_steps_are_dense() -> None:
    """Two of five; and what lies between two steps belongs to the later one."""
    case = CASES["Qwen-Image"]()
    clone = patched(case.patcher, dense_steps=0.4)
    same = [torch.equal(case.run(clone, step), case.run(case.patcher, step)) for step in range(5)]
    assert same == [True, True, False, False, False]
    levels = torch.tensor([1.0, 0.9, 0.8, 0.8 * (1 - 1e-6), 0.7, 0.6])
    dense = [is_dense(Hilbert(dense_steps=0.4), level.expand(2)) for level in levels]
    assert dense == [True, True, True, True, False, False]
    assert PATCHING.moment_of(levels[:1], None) is None


def test_less_noise_than_in_the_last_step_belongs_to_it() -> None:
    level = SIGMAS[-2:-1] / 2
    assert not is_dense(Hilbert(dense_steps=0.4), level)
    assert is_dense(Hilbert(dense_steps=(0, 1)), level)
    assert not is_dense(Hilbert(dense_steps=(0, 1)), SIGMAS[:1])


def test_dense_layers_are_the_first() -> None:
    case = CASES["Qwen-Image"]()
    assert torch.equal(case.run(patched(case.patcher, dense_layers=4)), case.run(case.patcher))
    assert not torch.equal(case.run(patched(case.patcher, dense_layers=3)), case.run(case.patcher))


def key_mask(dims: int, hides_image: bool = True) -> Tensor:
    keys = torch.arange(JOINED.num_tokens) >= 3  # some text is padding, and part of the image is hidden
    if hides_image:
        keys[40:75] = False
    return keys.reshape((1,) * (dims - 1) + (-1,))


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("is_bool", [True, False])
def test_masks_of_keys_hide_keys(dims: int, is_bool: bool) -> None:
    mask = key_mask(dims)
    if not is_bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    case = CASES["FLUX"]()
    case.conditions["attention_mask"] = mask
    whole = patched(case.patcher, tiles=1, shared="none", dense_layers=0)
    masked = case.run(whole)
    assert torch.allclose(masked, case.run(case.patcher), rtol=0, atol=1e-12)
    del case.conditions["attention_mask"]
    assert not torch.allclose(masked, case.run(whole))


def test_masks_of_pairs_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["FLUX"]()
    case.conditions["attention_mask"] = torch.ones(JOINED.num_tokens, JOINED.num_tokens).tril().bool()
    with caplog.at_level(logging.INFO, "nearfield.comfyui"):
        assert torch.equal(case.run(patched(case.patcher)), case.run(case.patcher))
    told = "nearfield: 7 text + 11x13: 5 calls dense, a mask that differs between queries"
    assert caplog.messages == [told]


@pytest.mark.parametrize("fields", [{}, {"near": "around", "summary": "weighted"}], ids=["tile", "around"])
@pytest.mark.parametrize("is_bool", [True, False])
def test_masks_of_text_go_with_a_far_field(
    is_bool: bool, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    mask = key_mask(2, hides_image=False)
    if not is_bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    case = CASES["FLUX"]()
    case.conditions["attention_mask"] = mask
    model = patched(case.patcher, far=16, shared="none", dense_layers=0, **fields)
    with caplog.at_level(logging.INFO, "nearfield.comfyui"):
        masked = case.run(model)
    assert "5 calls sparse" in caplog.messages[0]
    del case.conditions["attention_mask"]
    assert not torch.allclose(masked, case.run(model))


def test_masks_of_image_stay_dense_with_a_far_field(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["FLUX"]()
    case.conditions["attention_mask"] = key_mask(2)
    with caplog.at_level(logging.INFO, "nearfield.comfyui"):
        assert torch.equal(case.run(patched(case.patcher, far=16)), case.run(case.patcher))
    assert (
        "5 calls dense, a mask that hides image tokens, of which summaries of a far field know nothing"
        in caplog.messages[0]
    )


def test_says_once_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["Wan"]()
    clone = patched(case.patcher)
    with caplog.at_level(logging.INFO, "nearfield.comfyui"):
        case.run(clone)
        case.run(clone)
    assert caplog.messages == ["nearfield: 3x8x10: 1 calls dense, dense_layers=1; 2 calls sparse"]


def test_says_where_nothing_was_sparse(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens that another node added: which of them are the image cannot be known."""
    case = CASES["FLUX"]()
    clone = patched(case.patcher)
    with_more = standin.Flux.tokens
    flux = case.patcher.model.diffusion_model
    flux.tokens = lambda x, image: torch.cat([with_more(flux, x, image)] * 2, 1)
    assert torch.equal(case.run(clone), case.run(case.patcher))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no attention call had the tokens of 7 text + 11x13" in record.message


def test_video_as_long_as_its_text_stays_dense() -> None:
    """A length could not tell self-attention from cross-attention."""
    case = CASES["Wan, one frame"]()
    case.text = torch.randn(2, 11 * 13, 8, dtype=torch.float64)
    assert torch.equal(case.run(patched(case.patcher)), case.run(case.patcher))
    case.text = case.text[:, 1:]
    assert not torch.equal(case.run(patched(case.patcher)), case.run(case.patcher))


def test_options_of_the_caller_are_not_written_to() -> None:
    """Else the override of one call would be found by the next."""
    case = CASES["FLUX"]()
    clone = patched(case.patcher)
    options = {"wrappers": clone.wrappers}
    clone.model.apply_model(case.latent, SIGMAS[:1], c_crossattn=case.text, transformer_options=options)
    assert list(options) == ["wrappers"]


def test_other_overrides_serve_the_dense_calls() -> None:
    case = CASES["Wan"]()
    seen = []

    def other(attention: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(args[1].shape[1])
        return attention(*args, **kwargs)

    case.patcher.model_options["transformer_options"]["optimized_attention_override"] = other
    case.run(patched(case.patcher))
    assert seen == [240, 7, 7, 7], "the dense first layer, and cross-attention"


def sparse_call(method: Hilbert, geometry: Geometry, layers: int) -> Any:
    """The attention of a model all of whose layers see the text."""
    session = PATCHING.session_of(method, [True] * layers)
    return PATCHING.SparseCall(method, session, TokenLayout(geometry.images, geometry.text))


def test_heads_stay_apart_if_asked() -> None:
    """`skip_output_reshape`, and a `scale` of one's own."""
    geometry = Geometry((8, 8), text=5)
    query, key, value = (torch.randn(1, 2, 69, 16, dtype=torch.float64) for _ in range(3))
    call = sparse_call(Hilbert(tiles=1, shared="none", dense_layers=0), geometry, 1)
    options = {"skip_reshape": True, "skip_output_reshape": True, "scale": 0.3}
    out = call(standin.optimized_attention, query, key, value, 2, **options)
    assert torch.allclose(out, scaled_dot_product_attention(query, key, value, scale=0.3), rtol=0, atol=1e-12)


def test_more_calls_than_the_model_has_layers_stay_dense() -> None:
    """Those of another node: which layer they are cannot be known."""
    geometry = Geometry((8, 8), text=5)
    inputs = [torch.randn(1, 69, 32, dtype=torch.float64) for _ in range(3)]
    call = sparse_call(paper(tiles=4, dense_layers=0), geometry, 1)
    first, second = (call(standin.optimized_attention, *inputs, 2) for _ in range(2))
    dense = standin.optimized_attention(*inputs, 2)
    assert not torch.allclose(first, dense)
    assert torch.equal(second, dense)
    assert call.summary() == "5 text + 8x8: 1 calls sparse; 1 calls dense, more than the model has layers"


class UNetModel(torch.nn.Module):
    pass


class VaceWanModel(standin.WanModel):
    pass


SUPPORTED = (
    "`model` must be one of FLUX (Flux), Qwen-Image (QwenImageTransformer2DModel), Stable Diffusion 3"
    " (OpenAISignatureMMDITWrapper), Wan (WanModel); got {}. Leave the node out for other models."
)


@pytest.mark.parametrize("kind", [UNetModel, VaceWanModel])
def test_unknown_models_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError) as error:
        patched(standin.ModelPatcher(standin.BaseModel(kind())))
    assert str(error.value) == SUPPORTED.format(kind.__name__)


def test_wrong_fields_are_refused_by_the_method() -> None:
    with pytest.raises(ValueError) as error:
        patched(CASES["FLUX"]().patcher, far="1")
    assert str(error.value) == "`far` must be at least 2; got 1."
    with pytest.raises(ValueError) as error:
        patched(CASES["FLUX"]().patcher, tiles="many")
    assert str(error.value) == "`tiles` must be an integer, numbers between commas or none; got 'many'."


def all_inputs(node: str) -> dict[str, Any]:
    """In the order in which ComfyUI shows them."""
    inputs: dict[str, Any] = NODES.NODE_CLASS_MAPPINGS[node].INPUT_TYPES()["required"]
    return inputs


def test_every_method_that_reads_has_a_node() -> None:
    """But for those that are there to compare with: all of their fields, in their order."""
    own = {f"Nearfield{kind.__name__}": kind for kind in own_methods() if not kind.is_baseline}
    mergers = {name for name, kind in own.items() if issubclass(kind, MergeMethod)}
    nodes = NODES.NODE_CLASS_MAPPINGS
    kinds = {name: node.kind for name, node in nodes.items()}
    assert set(nodes) == set(NODES.NODE_DISPLAY_NAME_MAPPINGS) >= set(own) - mergers
    assert not any(kind.is_baseline or issubclass(kind, MergeMethod) for kind in kinds.values())
    assert list(all_inputs("NearfieldHilbert")) == ["model", *FIELDS]
    for name, node in nodes.items():
        known = fields_of(kinds[name])
        inputs = all_inputs(name)
        assert list(inputs) == ["model", *(field.name for field in known)]
        for field in known:
            kind, options = inputs[field.name]
            assert options["tooltip"] == field.help
            assert (
                kind == list(field.choices)
                if field.choices
                else kind in ("BOOLEAN", "INT", "FLOAT", "STRING")
            )
            assert kind not in ("INT", "FLOAT") or options["min"] <= options["default"] <= options["max"]
        assert "Quality is not free" in node.DESCRIPTION


@pytest.mark.parametrize("name", NODES.NODE_CLASS_MAPPINGS)
def test_a_new_node_is_the_default_of_the_method(name: str) -> None:
    """What the page fills in for a node that somebody adds."""
    shown = {field: options["default"] for field, (_, options) in list(all_inputs(name).items())[1:]}
    case, node = CASES["FLUX"](), NODES.NODE_CLASS_MAPPINGS[name]()
    (model,) = node.patch(case.patcher, **shown)
    assert method_of(model) == node.kind()
    for step in range(5):
        sparse, dense = (case.run(each, step=step) for each in (model, case.patcher))
        assert sparse.isfinite().all()
    if name == "NearfieldHilbert":
        assert not torch.allclose(sparse, dense, rtol=0, atol=1e-6)
        assert torch.equal(case.run(model), case.run(case.patcher)), "the first step of five is dense"


def test_layers_remember_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are made by full attention at some steps, and serve until the next; another picture makes its own."""
    case, node = CASES["FLUX"](), NODES.nodes.node_of(registered(Remembering, monkeypatch))()
    (model,) = node.patch(case.patcher, refresh="0,0.6", least="1.5")
    first, *later = (case.run(model, step) for step in range(5))
    dense = [case.run(case.patcher, step) for step in range(5)]
    same = [torch.allclose(*pair, rtol=0, atol=1e-9) for pair in zip([first, *later], dense, strict=True)]
    assert same == [True, False, False, True, False]
    (wrapper,) = model.wrappers[standin.APPLY_MODEL]["nearfield"]
    attentions = wrapper.session.state.attentions
    assert len(attentions) == 5
    before = [dict(attention.known) for attention in attentions]
    assert torch.equal(case.run(model, 0), first)
    assert wrapper.session.state.attentions is attentions
    for attention, old in zip(attentions, before, strict=True):
        assert old.keys() == attention.known.keys()
        assert all(attention.known[key] is not made for key, made in old.items())


def test_what_must_know_its_step_stays_dense_where_nobody_says_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, node = CASES["FLUX"](), NODES.nodes.node_of(registered(Remembering, monkeypatch))()
    (model,) = node.patch(case.patcher)
    with caplog.at_level(logging.INFO, "nearfield.comfyui"):
        options = {"wrappers": model.wrappers}
        model.model.apply_model(case.latent, SIGMAS[:1], c_crossattn=case.text, transformer_options=options)
    assert "5 calls dense, the sampler does not say at which step it is" in caplog.messages[0]


def test_no_number_of_tiles_suits_the_size() -> None:
    case = CASES["FLUX"]()
    assert method_of(patched(case.patcher, tiles="none")).tiles is None
    none, sixteen = (patched(case.patcher, tiles=tiles) for tiles in ("none", "16"))
    assert torch.equal(case.run(none), case.run(sixteen))
    around, quarter = (patched(case.patcher, tiles=tiles, near="around") for tiles in ("none", "4"))
    assert torch.equal(case.run(around), case.run(quarter)), "a quarter of a small image"


# -- the workflow --------------------------------------------------------------------------------------------------

WORKFLOW = json.loads((FOLDER / "workflows" / "flux_hilbert.json").read_text(encoding="utf-8"))


def test_workflow_holds_together() -> None:
    """Links join slots that exist, from both sides and of one type, and the node's values are those of its fields."""
    nodes = {node["id"]: node for node in WORKFLOW["nodes"]}
    for link, source, source_slot, target, target_slot, kind in WORKFLOW["links"]:
        out, into = nodes[source]["outputs"][source_slot], nodes[target]["inputs"][target_slot]
        assert link in out["links"]
        assert into["link"] == link
        assert out["type"] == into["type"] == kind
    (ours,) = (node for node in nodes.values() if node["type"] in NODES.NODE_CLASS_MAPPINGS)
    inputs = all_inputs(ours["type"])
    assert [entry["name"] for entry in ours["inputs"]] == ["model"]
    fields = dict(zip(list(inputs)[1:], ours["widgets_values"], strict=True))
    assert method_of(patched(CASES["FLUX"]().patcher, **fields)) == Hilbert()
    assert all(fields[name] in kind for name, (kind, *_) in inputs.items() if isinstance(kind, list))


# -- ComfyUI itself ------------------------------------------------------------------------------------------------


needs_comfyui = pytest.mark.skipif(
    "NEARFIELD_COMFYUI" not in os.environ, reason="needs NEARFIELD_COMFYUI=folder"
)


def run_program(name: str, *arguments: str) -> str:
    """In a process of its own: ComfyUI's `comfy` has the name of the folder that holds the nodes."""
    command = [sys.executable, str(ROOT / "tests" / name), os.environ["NEARFIELD_COMFYUI"], *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.rstrip()


@needs_comfyui
@pytest.mark.parametrize("model", ["flux", "sd3", "qwen", "wan"])
def test_models_of_comfyui(model: str) -> None:
    assert run_program("comfy_models.py", model).endswith("as the plans say")


@needs_comfyui
def test_whole_comfyui() -> None:
    assert run_program("comfy_server.py").endswith("a whole ComfyUI samples with the node")


def test_graphs_end_at_attention() -> None:
    """What is traced is tensors alone: a break where plans are made, and nothing recompiled for later layers."""
    geometry = Geometry((8, 8), text=5)
    query, key, value = (torch.randn(1, 69, 32, dtype=torch.float64) for _ in range(3))
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def block(call: Any) -> Tensor:
        return call(standin.optimized_attention, query * 2, key, value, 2).sum()

    def call() -> Any:
        return sparse_call(paper(tiles=4), geometry, 4)

    torch._dynamo.reset()
    compiled, one, other = torch.compile(block, backend=backend), call(), call()
    for _ in range(4):
        assert torch.equal(compiled(one), block(other))
    assert one.calls == other.calls
    assert len(graphs) == 2, "before attention and behind it"
