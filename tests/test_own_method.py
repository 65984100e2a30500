"""A method that the package has never heard of works wherever one of its own does: it is a class with `plan`.

What it computes is compared with the stock model, or torch's own attention, under its plan written out as a mask.
"""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny_models
from tests.newcomers.radial import Radial
from tests.test_adapters import (
    assert_differ,
    assert_same,
    double,
    geometries,
    masked_attention,
    raster_mask,
    run,
)
from tests.test_adapters_merging import check
from tests.tiny_models import MODELS
from tests.worlds import world_of
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import nearfield
from nearfield import Geometry, Merge, PlanMethod, SelfAttention, attend_with, recipes
from nearfield.methods import Composition, Method, method_class, method_classes, registry
from nearfield.methods.recipes import Recipe
from nearfield.parallel.cuts import even_split
from nearfield.parallel.model import check_splittable

METHOD = Radial()
GRID, BATCH = (12, 14), 2
GEOMETRY = Geometry(GRID, tiny_models.TEXT)
del registry._CLASSES["radial"]  # other tests ask for all methods


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_CLASSES", {**registry._CLASSES, "radial": Radial})


@contextmanager
def as_masked(name: str, **options: Any) -> Iterator[None]:
    """The stock model's attention hides what the plans do not list."""
    dense = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = masked_attention(
        METHOD, geometries(name, GRID, BATCH, ()), **options
    )
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = dense


def model_and_inputs(name: str) -> tuple[Any, dict[str, Any]]:
    make, inputs_of = MODELS[name]
    return make().double(), double(inputs_of(GRID, BATCH))


def mask_of(layer: int, geometry: Geometry = GEOMETRY) -> Tensor:
    return METHOD.plan(geometry, layer, q_block=16, k_block=16).to_mask()


# -- the class ---------------------------------------------------------------------------------------------------------


def test_a_method_is_its_name_its_fields_and_a_plan() -> None:
    lines = [line for line in inspect.getsource(Radial).splitlines() if line.strip()]
    assert len(lines) < 35
    own = {name for name, value in vars(Radial).items() if inspect.isfunction(value)}
    assert {name for name in own if not name.startswith("_")} == {"plan"}


def test_plans_are_made_once_and_repeat_with_the_period() -> None:
    for index in range(6):
        layer = METHOD.layer(GEOMETRY, index)
        assert torch.equal(layer.near.to_mask(), mask_of(index))
        assert layer is METHOD.layer(GEOMETRY, index % 4)
        assert layer.num_pairs == int(mask_of(index).sum())
    assert not torch.equal(mask_of(0), mask_of(1))
    assert 0.3 < mask_of(0).double().mean() < 0.7


def test_description_and_label() -> None:
    share = float(mask_of(0).double().mean())
    assert METHOD.describe(GEOMETRY) == (
        f"7 text + 12x14: 175 tokens\n  pairs kept: {share:.1%} (at most {1 / share:.2f}x faster than dense)"
    )
    assert Radial(reach=2).label == "Radial(reach=2)"


def test_borders_are_where_neighbours_do_not_read_each_other() -> None:
    masks = torch.cat([raster_mask(METHOD, GEOMETRY, layer, 1)[0] for layer in range(4)]).double()
    read = ((masks + masks.mT) / 2).mean(0)[7:, 7:]
    token = torch.arange(12 * 14).view(GRID)
    found = METHOD.borders(GEOMETRY)
    assert found is not None
    torch.testing.assert_close(found.right, 1 - read[token[:, :-1], token[:, 1:]])
    torch.testing.assert_close(found.below, 1 - read[token[:-1], token[1:]])
    assert found.below.any()
    first = METHOD.borders(GEOMETRY, layers=[0])
    assert first is not None
    assert not torch.equal(first.below, found.below)


# -- in models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "sd3", "pixart"])
def test_a_model_reads_what_the_plan_says(name: str) -> None:
    model, inputs = model_and_inputs(name)
    stock = run(model, inputs)
    with as_masked(name):
        expected = run(model, inputs)
    with nearfield.apply(model, METHOD):
        assert_same(run(model, inputs), expected)
    assert_differ(expected, stock)
    with nearfield.apply(model, Radial(reach=100)):
        assert_same(run(model, inputs), stock)


def test_dense_layers_and_what_the_summary_says() -> None:
    model, inputs = model_and_inputs("flux")
    with as_masked("flux", dense_layers=(0, 4)):
        expected = run(model, inputs)
    with nearfield.apply(model, Radial(dense_layers=(0, -1))) as handle:
        assert_same(run(model, inputs), expected)
        summary = handle.summary()
    assert "nearfield: Radial(dense_layers=(0, -1))\n" in summary
    assert "attention: 3 sparse, 2 dense" in summary
    share = sum(float(mask_of(layer).double().mean()) for layer in (1, 2, 3)) / 3
    assert f"pairs: {share:.1%} in sparse layers" in summary


def test_dense_steps_are_asked_of_the_scheduler() -> None:
    class Schedule:
        step_index = 0
        timesteps = range(4)

    model, inputs = model_and_inputs("flux")
    stock = run(model, inputs)
    with nearfield.apply(model, Radial(dense_steps=0.25), scheduler=Schedule()) as handle:
        assert_same(run(model, inputs), stock)
        Schedule.step_index = 1
        assert_differ(run(model, inputs), stock)
        assert "dense_steps=0.25" in handle.summary()


def test_gradients_of_a_model_are_those_under_the_mask() -> None:
    model, inputs = model_and_inputs("flux")
    tokens = inputs["hidden_states"].requires_grad_()

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(model(**inputs)[0].square().sum(), tokens)
        return found

    with as_masked("flux"):
        expected = gradient()
    with nearfield.apply(model, METHOD):
        assert_same(gradient(), expected)


@pytest.mark.parametrize("is_whole", [False, True])
def test_compiled_without_breaks(is_whole: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, call = tiny_models.flux(1, 1), tiny_models.flux_inputs(GRID)
    stock = run(model, call)
    with nearfield.apply(model, METHOD) as handle:
        expected = run(model, call)
    with nearfield.apply(model, METHOD) as handle:
        handle.prepare(height=12 * 16, width=14 * 16, text=tiny_models.TEXT)
        if is_whole:
            model = torch.compile(model, fullgraph=True, backend="eager")
        else:
            model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert torch.equal(run(model, call), expected)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    torch._dynamo.reset()
    assert_differ(expected, stock)


# -- with other parts of the library -----------------------------------------------------------------------------------


def test_merged_tokens_read_as_it_says() -> None:
    merge = Merge(0.5, region_size=16, skip_blocks=(1, 1), size_bias=True)
    check("flux", merge | METHOD, GRID, BATCH)
    method = merge | METHOD
    assert isinstance(method, Composition)
    assert method.label.endswith(" | Radial()")
    assert "pairs kept: " in method.describe(GEOMETRY)


def test_recipes_name_it() -> None:
    for method in (Radial(reach=2, dense_layers=(0, -1)), Merge(0.25) | Radial(reach=3)):
        document = json.loads(json.dumps(Recipe(method, model="FluxTransformer2DModel").as_document()))
        assert recipes.read(document) == Recipe(method, model="FluxTransformer2DModel")
    short = type("RadialSpokes", (Radial,), {"name": "spokes"})  # recipes go by the class
    assert type(recipes.read(Recipe(short()).as_document()).method) is short
    document = Recipe(METHOD).as_document()
    assert document["method"] == "Radial"
    document["fields"]["range"] = 2
    with pytest.raises(ValueError, match=r"fields of Radial \(dense_layers, dense_steps, reach\); got range"):
        recipes.read(document)
    model, inputs = model_and_inputs("flux")
    with nearfield.apply(model, Recipe(METHOD)) as handle:
        run(model, inputs)
        assert "nearfield: Radial()" in handle.summary()


def test_tensors_of_ones_own() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 175, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    found = attend_with(METHOD, *leaves, GEOMETRY, layer=2)
    twins = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = functional.scaled_dot_product_attention(*twins, attn_mask=mask_of(2))
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    gradients = (
        torch.autograd.grad((out * weights).sum(), given)
        for out, given in ((found, leaves), (expected, twins))
    )
    torch.testing.assert_close(*gradients)


def test_a_layer_of_ones_own() -> None:
    torch.manual_seed(0)
    layer = SelfAttention(24, 3, METHOD, layer=1).double()
    assert layer.extra is None
    x = torch.randn(2, 175, 24, dtype=torch.float64)
    query, key, value = layer.to_qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    read = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_of(1))
    expected = layer.to_out(read.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, GEOMETRY), expected)


# -- over ranks --------------------------------------------------------------------------------------------------------


def split_run(mesh: DeviceMesh | None, method: Method) -> Tensor:
    model, inputs = model_and_inputs("flux")
    with nearfield.apply(model, method, mesh=mesh):
        return run(model, inputs)


def test_tokens_are_split_over_ranks() -> None:
    check_splittable(Composition.of(METHOD))
    split = even_split(METHOD, GEOMETRY, 2, 16)
    assert split.owned == (((7, 96),), ((96, 175),))  # the image alone, cut where a block ends
    methods = METHOD, Radial(dense_layers=1), Merge(region_size=8, skip_blocks=(0, 1)) | METHOD
    with world_of(2) as world:
        for method in methods:
            expected = split_run(None, method)
            for out in world.run(split_run, method):
                assert torch.allclose(out, expected, rtol=1e-9, atol=1e-9)


# -- the registry ------------------------------------------------------------------------------------------------------


def test_it_is_found_by_its_name() -> None:
    assert method_class("radial") is Radial
    assert method_class("Radial") is Radial
    assert method_classes()["radial"] is Radial
    assert Radial not in nearfield.methods.own_methods()
    with pytest.raises(ValueError, match=r"^`method` must be one of .*, radial, .*; got 'spiral'"):
        method_class("spiral")


def test_a_name_belongs_to_one_class() -> None:
    expected = (
        r"^`name` must be one that no other method has; got 'radial'\."
        r" tests\.newcomers\.radial\.Radial has it\.$"
    )
    for called, module in (("Spokes", Radial.__module__), ("Radial", "another_package")):
        with pytest.raises(ValueError, match=expected):
            type(called, (Radial,), {"name": "radial", "__module__": module})
    assert method_class("radial") is Radial
    cell = {"name": "radial", "__module__": Radial.__module__}  # as a cell of a notebook that is run twice
    again = type("Radial", (Radial,), cell)
    assert method_class("radial") is again


def test_a_class_without_a_name_is_not_registered() -> None:
    known = method_classes()
    nameless = type("Nameless", (PlanMethod,), {"plan": Radial.plan})
    heir = type("Heir", (Radial,), {})  # the name is its base's
    assert method_classes() == known
    assert nameless not in known.values()
    assert heir not in known.values()


@pytest.mark.parametrize("name", ["Radial", "two words", "one-two", "3d"])
def test_a_name_is_an_identifier_in_lower_case(name: str) -> None:
    expected = f"^`name` must be an identifier in lower case; got '{name}'. Rename the method Named.$"
    known = method_classes()
    with pytest.raises(ValueError, match=expected):
        type("Named", (Radial,), {"name": name})
    assert method_classes() == known


def test_installed_packages_bring_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their entry points are loaded once, when somebody asks for all methods."""
    loads: list[str] = []

    class Entry:
        def load(self) -> Any:
            loads.append("spokes")
            return type("Spokes", (Radial,), {"name": "spokes"})

    def entries(*, group: str) -> list[Entry]:
        assert group == "nearfield.methods"
        return [Entry()]

    monkeypatch.setattr(registry, "entry_points", entries)
    monkeypatch.setattr(registry, "_loaded_others", False)
    assert "spokes" not in method_classes(installed=False)
    assert not loads
    assert method_class("spokes").__name__ == "Spokes"
    assert recipes.read(Recipe(replace(METHOD)).as_document()).method == METHOD
    assert loads == ["spokes"]
