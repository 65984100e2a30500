"""Takes methods, of which the library knows nothing but their file, through all that knows methods: `walk NAME ...`.

It runs in a process of its own, where `nearfield` is a copy into whose `methods/` the files were dropped.
"""

import contextlib
import io
import json
import runpy
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from docs import support
from tests import tiny_models
from tests.test_adapters import double, run
from tests.test_comfy import NODES, all_inputs
from torch.nn import functional

import nearfield
from nearfield import Geometry, Merge, SelfAttention, attend_with, recipes
from nearfield.diffusers import all_specs
from nearfield.methods import Composition, MergeMethod, fields, method_class, own_methods
from nearfield.methods.recipes import Recipe
from nearfield_lab.studio import fields as studio

GRID = (12, 14)
GEOMETRY = Geometry(GRID, tiny_models.TEXT)


def walk(name: str) -> None:
    kind = method_class(name)
    assert kind in own_methods()
    assert getattr(nearfield, kind.__name__) is kind
    method = kind(**kind.example)
    everything = replace(method, **kind.everything)
    known = fields.fields_of(kind)

    # Commands: what it is, what its fields mean, and what it comes to.
    said = explained("explain", "--method", name)
    assert all(field.name in said and field.help[:20] in said for field in known), said
    assert f"method    {kind.__name__}()" in explained("explain", "--method", name, "cpu-small")
    record = json.loads(explained("explain", "--method", name, "--grid", "12x14", "--text", "7", "--json"))
    assert record["label"] == f"{kind.__name__}()"
    assert record["description"]

    # Recipes, alone and behind a method that merges; texts of fields.
    for each in (method, Merge(0.25) | method):
        document = json.loads(json.dumps(Recipe(each).as_document()))
        assert recipes.read(document).method == each
        assert fields.made(fields.name_of(each), fields.texts_of(each)) == each

    # The studio's boxes, and the node for ComfyUI.
    assert [box.field.name for box in studio.boxes(name)] == [field.name for field in known]
    assert studio.method_of(*studio.filled_in(method)) == method
    node = f"Nearfield{kind.__name__}"
    assert list(all_inputs(node)) == ["model", *(field.name for field in known)]
    assert NODES.NODE_CLASS_MAPPINGS[node].kind is kind

    # A user's own tensors and layers, with gradients.
    tensors = [torch.randn(2, 2, GEOMETRY.num_tokens, 8, requires_grad=True) for _ in range(3)]
    dense = functional.scaled_dot_product_attention(*tensors)
    sparse = attend_with(method, *tensors, GEOMETRY)
    assert not torch.allclose(sparse, dense, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(sparse.sum(), tensors))
    torch.testing.assert_close(attend_with(everything, *tensors, GEOMETRY), dense)
    layer = SelfAttention(16, 2, method)
    assert layer(torch.randn(1, GEOMETRY.num_tokens, 16), GEOMETRY).isfinite().all()

    # A model: dense where everything is read, compiled, merged; what `summary` says.
    model, inputs = tiny_models.flux().double(), double(tiny_models.flux_inputs(GRID))
    stock = run(model, inputs)
    with nearfield.apply(model, everything):
        torch.testing.assert_close(run(model, inputs), stock, rtol=0, atol=1e-9)
    with nearfield.apply(model, Merge(0.5, region_size=16, skip_blocks=(0, 0)) | method):
        assert run(model, inputs).isfinite().all()
    with nearfield.apply(model, method) as handle:
        expected = run(model, inputs)
        assert method.label in handle.summary()
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        torch.testing.assert_close(run(model, inputs), expected, rtol=0, atol=1e-9)
    assert not torch.allclose(expected, stock, rtol=0, atol=1e-6)

    # The support matrix.
    (flux,) = (spec for spec in all_specs() if spec.model == "FluxTransformer2DModel")
    assert support.tried(flux, support.all_methods()[kind.__name__]) == "exact"

    # Ranks: where the geometry decides, tokens may be split over them.
    assert Composition.of(method).can_split == method.can_split
    assert not issubclass(kind, MergeMethod)


def explained(*words: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    sys.argv = ["nearfield", *words]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module("nearfield", run_name="__main__")
    return out.getvalue()


if __name__ == "__main__":
    copy, *names = sys.argv[1:]
    assert Path(nearfield.__file__).is_relative_to(copy), nearfield.__file__
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    for each in names:
        walk(each)
        print(f"{each}: walked")
