"""`apply` on tiny models of the real classes: what it computes, and that it leaves no trace.

The oracle knows nothing of hooks, processors or moved tokens: it runs the stock model in raster order and hides, in
every call of `scaled_dot_product_attention`, the pairs that the method's plan of that layer does not list.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import tiny_models
from tests.tiles import paper
from tests.tiny_models import MODELS, TEXT, Grid, Inputs, first
from torch import Tensor, nn
from torch.nn import functional

import nearfield
from nearfield import Geometry, Hilbert, PlanMethod
from nearfield.session import grids
from nearfield.session.grids import image_grids

EVERYTHING = paper(tiles=1, dense_layers=0, dense_steps=0)
SPARSE = paper(tiles=4, shared="none", dense_layers=0, dense_steps=0)
DEFAULT = Hilbert(dense_steps=0)
# Rotary tables are float32 in every precision, so a difference of the last bit in float64 can become one of float32.
TOLERANCE = 1e-6

References = tuple[Grid, ...]


def double(value: Any) -> Any:
    """The same inputs in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: double(item) for name, item in value.items()}
    return [double(item) for item in value] if isinstance(value, list) else value


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return first(model(**inputs))


def geometries(name: str, grid: Grid, batch: int, references: References) -> dict[int, Geometry]:
    """The layouts a model attends over, by length."""
    joint = Geometry(grid, TEXT, references=references)
    if name == "sd3":
        layouts = [Geometry(grid, TEXT, text_first=False), Geometry(grid, text_first=False)]
    elif name in ("pixart", "sdxl"):
        layouts = [Geometry(grid)]
    elif name == "z_image":
        padding = -grid[0] * grid[1] % 32
        caption = 32 if batch == 1 else 64
        layouts = [Geometry(grid, text, text_first=False) for text in (padding, padding + caption)]
    else:
        layouts = [joint]
    return {layout.num_tokens: layout for layout in layouts}


def raster_places(method: PlanMethod, geometry: Geometry) -> Tensor:
    """Where each token in raster order stands in the method's, `[N]`; the text stays."""
    inverse = method.ordering(geometry).inverse
    place = torch.arange(geometry.num_tokens)
    start = geometry.image_spans[0][0]
    place[start : start + len(inverse)] = start + inverse
    return place


def raster_mask(method: PlanMethod, geometry: Geometry, layer: int, heads: int) -> Tensor:
    """Who reads whom among tokens in raster order, `[1, heads or 1, N, N]`."""
    place = raster_places(method, geometry)
    mask = method.layer(geometry, layer, heads=heads).near.to_mask()
    return mask[:, :, place][:, :, :, place]


def summarised_attention(method: Hilbert, layouts: dict[int, Geometry]) -> Callable[..., Tensor]:
    """Tokens in raster order are put in the method's, read, and put back. What a far field is, others test."""
    dense_attention = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **kwargs: Any) -> Tensor:
        geometry = layouts.get(query.shape[2])
        if geometry is None or key.shape[2] != query.shape[2]:
            return dense_attention(query, key, value, attn_mask, **kwargs)
        place, bias = raster_places(method, geometry), None
        order = place.argsort()
        if attn_mask is not None:
            assert attn_mask.shape[1:3] == (1, 1)
            bias = torch.where(attn_mask[:, :, 0], 0.0, -torch.inf)[:, :, order]
        moved = [x[:, :, order] for x in (query, key, value)]
        found = method.layer(geometry).attend(*moved, key_bias=bias, scale=kwargs.get("scale"))
        return found.out[:, :, place]

    return attention


def masked_attention(
    method: PlanMethod, layouts: dict[int, Geometry], dense_layers: tuple[int, ...] = ()
) -> Callable[..., Tensor]:
    dense_attention = functional.scaled_dot_product_attention
    layer = 0

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **kwargs: Any) -> Tensor:
        nonlocal layer
        geometry = layouts.get(query.shape[2])
        if geometry is None or key.shape[2] != query.shape[2]:
            return dense_attention(query, key, value, attn_mask, **kwargs)
        mask = raster_mask(method, geometry, layer, query.shape[1])
        if layer in dense_layers:
            mask = torch.ones_like(mask)
        layer += 1
        if attn_mask is not None:
            assert attn_mask.dtype == torch.bool
            mask = mask & attn_mask
        return dense_attention(query, key, value, mask, **kwargs)

    return attention


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    def masked(
        model: nn.Module, inputs: Inputs, method: Hilbert, layouts: dict[int, Geometry], **kwargs: Any
    ) -> Tensor:
        with monkeypatch.context() as patch:
            attention = masked_attention(method, layouts, **kwargs)
            patch.setattr(functional, "scaled_dot_product_attention", attention)
            return run(model, inputs)

    return masked


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def assert_differ(found: Tensor, other: Tensor) -> None:
    """So that the comparisons above them mean something."""
    assert (found - other).abs().max() > 100 * TOLERANCE * other.abs().max()


# -- what is computed ----------------------------------------------------------------------------------------------

SIZES: list[tuple[Grid, int]] = [((12, 10), 1), ((9, 14), 2)]


@pytest.mark.parametrize(("grid", "batch"), SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_reading_everything_is_the_stock_model(name: str, grid: Grid, batch: int) -> None:
    make, inputs_of = MODELS[name]
    model, inputs = make().double(), double(inputs_of(grid, batch))
    stock = run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, inputs), stock)


@pytest.mark.parametrize(("grid", "batch"), SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_sparse_is_the_masked_stock_model(
    name: str, grid: Grid, batch: int, oracle: Callable[..., Tensor]
) -> None:
    make, inputs_of = MODELS[name]
    model, inputs = make().double(), double(inputs_of(grid, batch))
    expected = oracle(model, inputs, SPARSE, geometries(name, grid, batch, ()))
    with nearfield.apply(model, SPARSE):
        found = run(model, inputs)
    assert_same(found, expected)
    assert_differ(found, run(model, inputs))


@pytest.mark.parametrize(("grid", "batch"), SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_the_default_is_read_in_its_order(
    name: str, grid: Grid, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, inputs_of = MODELS[name]
    model, inputs = make().double(), double(inputs_of(grid, batch))
    stock = run(model, inputs)
    with monkeypatch.context() as patch:
        attention = summarised_attention(DEFAULT, geometries(name, grid, batch, ()))
        patch.setattr(functional, "scaled_dot_product_attention", attention)
        expected = run(model, inputs)
    with nearfield.apply(model, DEFAULT):
        assert_same(run(model, inputs), expected)
    assert_differ(expected, stock)
    assert torch.equal(run(model, inputs), stock)


@pytest.mark.parametrize("name", ["flux", "flux2", "qwen"])
def test_reference_images_keep_curves_of_their_own(name: str, oracle: Callable[..., Tensor]) -> None:
    make, inputs_of = MODELS[name]
    references: References = ((7, 11), (4, 4))
    model, inputs = make().double(), double(inputs_of((9, 8), 2, references))
    stock = run(model, inputs)
    expected = oracle(model, inputs, SPARSE, geometries(name, (9, 8), 2, references))
    with nearfield.apply(model, SPARSE):
        found = run(model, inputs)
    assert_same(found, expected)
    assert_differ(found, stock)


def with_residuals(name: str, model: Any, inputs: Inputs) -> Inputs:
    """ControlNet residuals, in raster order as they arrive."""
    width = tiny_models.HEADS * tiny_models.HEAD_DIM
    if name == "z_image":
        tokens = 9 * 14 + -9 * 14 % 32 + 64
        return inputs | {
            "controlnet_block_samples": {1: tiny_models.randn(2, tokens, width, seed=5).double()}
        }
    residuals = [tiny_models.randn(2, 9 * 14, width, seed=seed).double() for seed in range(2)]
    if name == "sd3":
        return inputs | {"block_controlnet_hidden_states": residuals}
    if name == "flux":
        inputs = inputs | {"controlnet_single_block_samples": tuple(residuals[1:])}
    return inputs | {"controlnet_block_samples": residuals}


@pytest.mark.parametrize("name", ["flux", "qwen", "sd3", "z_image"])
def test_controlnet_residuals_meet_their_tokens(name: str, oracle: Callable[..., Tensor]) -> None:
    make, inputs_of = MODELS[name]
    model = make().double()
    plain = double(inputs_of((9, 14), 2))
    inputs = with_residuals(name, model, plain)
    expected = oracle(model, inputs, SPARSE, geometries(name, (9, 14), 2, ()))
    with nearfield.apply(model, SPARSE):
        found = run(model, inputs)
        assert_differ(found, run(model, plain))
    assert_same(found, expected)


@pytest.mark.parametrize("size", [(19, 22), (23, 17)])
def test_unet_of_odd_latents(size: Grid) -> None:
    model = tiny_models.sdxl().double()
    inputs = double(tiny_models.sdxl_inputs((1, 1)))
    inputs["sample"] = tiny_models.randn(1, 4, *size).double()
    stock = run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, inputs), stock)


def test_unet_that_projects_by_convolution(oracle: Callable[..., Tensor]) -> None:
    """As those of SD 1.5 do."""
    model, inputs = tiny_models.sdxl(linear=False).double(), double(tiny_models.sdxl_inputs((9, 14)))
    expected = oracle(model, inputs, SPARSE, geometries("sdxl", (9, 14), 1, ()))
    with nearfield.apply(model, SPARSE):
        assert_same(run(model, inputs), expected)


def test_heads_that_no_kernel_takes_stay_dense() -> None:
    model, inputs = tiny_models.sdxl(width=320), tiny_models.sdxl_inputs((9, 14))
    stock = run(model, inputs)
    with nearfield.apply(model, SPARSE) as handle:
        assert (run(model, inputs) - stock).abs().max() <= 1e-5 * stock.abs().max()
        assert "dense, head dimension 160 is above 128: down_blocks.1.attentions.0" in handle.summary()


@pytest.mark.parametrize("fields", [{"zero_cond_t": True}, {"use_layer3d_rope": True}])
def test_qwen_that_edits_or_makes_layers(fields: dict[str, bool], oracle: Callable[..., Tensor]) -> None:
    """With another timestep for references, or other positions for layers."""
    references: References = ((9, 8), (7, 6))
    model, inputs = (
        tiny_models.qwen(**fields).double(),
        double(tiny_models.qwen_inputs((9, 8), 2, references)),
    )
    expected = oracle(model, inputs, SPARSE, geometries("qwen", (9, 8), 2, references))
    with nearfield.apply(model, SPARSE):
        assert_same(run(model, inputs), expected)


@pytest.mark.parametrize("grid", [(1, 1), (1, 40), (3, 5), (33, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_small_and_thin_images_with_default_fields(name: str, grid: Grid) -> None:
    """Fewer tokens than blocks or tiles: still every token reads something, and comes back to its place."""
    make, inputs_of = MODELS[name]
    model, inputs = make().double(), double(inputs_of(grid))
    stock = run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, inputs), stock)
    for method in (paper(), Hilbert(), DEFAULT):
        with nearfield.apply(model, method):
            assert run(model, inputs).isfinite().all()


def test_dense_layers_are_stock(oracle: Callable[..., Tensor]) -> None:
    model, inputs = tiny_models.flux().double(), double(tiny_models.flux_inputs((9, 14)))
    layouts = geometries("flux", (9, 14), 1, ())
    method = paper(tiles=4, shared="none", dense_layers=(1, -1), dense_steps=0)
    expected = oracle(model, inputs, method, layouts, dense_layers=(1, 4))
    with nearfield.apply(model, method):
        assert_same(run(model, inputs), expected)
        kinds = [type(block.attn.processor).__name__ for block in model.transformer_blocks]
    assert kinds == ["SparseFluxAttnProcessor", "FluxAttnProcessor"]


@pytest.mark.parametrize(
    "method",
    [
        paper(tiles=4, shared="centre", share="keys", dense_layers=0, dense_steps=0),
        paper(tiles=4, interleave=True, dense_layers=0, dense_steps=0),
        paper(tiles=4, shared="distributed", cycle=3, curve="morton", dense_layers=0, dense_steps=0),
        paper(tiles=4, near="around", dense_layers=0, dense_steps=0),
    ],
)
def test_any_fields_of_the_method(method: Hilbert, oracle: Callable[..., Tensor]) -> None:
    model, inputs = tiny_models.flux().double(), double(tiny_models.flux_inputs((16, 18)))
    expected = oracle(model, inputs, method, geometries("flux", (16, 18), 1, ()))
    with nearfield.apply(model, method, impl="reference"):
        assert_same(run(model, inputs), expected)


def test_far_field_is_read() -> None:
    """In one layer, with its pooled keys and all, against the reader itself on tokens that a test put in order."""
    method = paper(tiles=4, shared="none", far=8, dense_layers=0, dense_steps=0)
    model, inputs = tiny_models.pixart(1).double(), double(tiny_models.pixart_inputs((12, 10)))
    geometry = Geometry((12, 10))
    with nearfield.apply(model, SPARSE):
        near_only = run(model, inputs)
    seen: list[Tensor] = []
    attention = model.transformer_blocks[0].attn1
    with nearfield.apply(model, method):
        hook = attention.to_out[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        tokens: list[Tensor] = []
        second = attention.register_forward_pre_hook(
            lambda module, args, kwargs: tokens.append(args[0]), with_kwargs=True
        )
        assert_differ(run(model, inputs), near_only)
        hook.remove()
        second.remove()
    query, key, value = (
        projection(tokens[0]).unflatten(-1, (2, -1)).transpose(1, 2)
        for projection in (attention.to_q, attention.to_k, attention.to_v)
    )
    expected = method.layer(geometry, 0, device="cpu").attend(query, key, value).out
    assert_same(seen[0], expected.transpose(1, 2).flatten(2))


def test_sizes_may_change_from_call_to_call(oracle: Callable[..., Tensor]) -> None:
    model = tiny_models.flux().double()
    sizes: list[Grid] = [(9, 14), (14, 9), (6, 21), (9, 14)]
    calls = [double(tiny_models.flux_inputs(grid)) for grid in sizes]
    expected = [
        oracle(model, inputs, SPARSE, geometries("flux", grid, 1, ()))
        for grid, inputs in zip(sizes, calls, strict=True)
    ]
    with nearfield.apply(model, SPARSE):
        for inputs, wanted in zip(calls, expected, strict=True):
            assert_same(run(model, inputs), wanted)


def test_ids_that_were_written_to_are_read_again(oracle: Callable[..., Tensor]) -> None:
    model = tiny_models.flux().double()
    inputs = double(tiny_models.flux_inputs((9, 14)))
    with nearfield.apply(model, SPARSE):
        run(model, inputs)
        inputs["img_ids"].copy_(tiny_models.image_ids((14, 9)))
        found = run(model, inputs)
    assert_same(found, oracle(model, inputs, SPARSE, geometries("flux", (14, 9), 1, ())))


@pytest.mark.parametrize(
    ("images", "dtype"),
    [
        (((9, 14),), torch.float32),
        (((9, 14), (9, 14), (3, 14), (1, 1)), torch.int64),
        (((300, 20), (20, 300)), torch.bfloat16),
        (((1, 7), (7, 1)), torch.float16),
    ],
)
def test_grids_are_read_from_ids(images: tuple[Grid, ...], dtype: torch.dtype) -> None:
    ids = torch.cat([tiny_models.image_ids(grid, number) for number, grid in enumerate(images)]).to(dtype)
    assert image_grids(ids) == images
    assert image_grids(ids.expand(2, -1, -1)) == images


def test_images_of_one_index_are_told_apart_by_their_rows() -> None:
    ids = torch.cat([tiny_models.image_ids((9, 14)), tiny_models.image_ids((5, 14))])
    assert image_grids(ids) == ((9, 14), (5, 14))


@pytest.mark.parametrize("offset", [(0, 6), (4, 6), (2, 0)])
def test_images_of_one_index_are_told_apart_by_their_places(offset: Grid) -> None:
    """SideStream, at the corner, and over each other."""
    second = tiny_models.image_ids((3, 6)) + torch.tensor([0, *offset])
    ids = torch.cat([tiny_models.image_ids((4, 6)), second])
    assert image_grids(ids) == ((4, 6), (3, 6))


LAYOUTS: list[tuple[Grid, ...]] = [((9, 14),), ((14, 9),), ((4, 14), (5, 14)), ((126, 1),), ((1, 126),)]


@pytest.mark.parametrize("images", LAYOUTS)
def test_ids_are_compared_with_a_layout(images: tuple[Grid, ...]) -> None:
    """Which says what reading says, and waits for nothing."""
    layout = grids.Layout(images, torch.device("cpu"))
    for other in LAYOUTS:
        ids = torch.cat([tiny_models.image_ids(grid, number) for number, grid in enumerate(other)])
        assert layout.fits(ids) == (images == other)
        assert layout.fits(ids.expand(2, -1, -1)) == (images == other)
    assert not layout.fits(torch.zeros(126, 3))


def test_ids_without_a_grid_are_dense() -> None:
    assert image_grids(torch.zeros(24, 3)) is None
    disorder = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert image_grids(tiny_models.image_ids((4, 6))[disorder]) is None
    ragged = tiny_models.image_ids((4, 6))
    assert image_grids(ragged[ragged[:, 1] + ragged[:, 2] < 6]) is None
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    inputs["img_ids"] = torch.zeros(9 * 14, 3)
    stock = run(model, inputs)
    with nearfield.apply(model, SPARSE) as handle:
        assert torch.equal(run(model, inputs), stock)
        assert "dense calls: 1, `img_ids` describe no grid" in handle.summary()


class Loop:
    """A scheduler as far as grids are concerned."""

    step_index: int | None = None
    timesteps = range(4)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("is_far", [False, True])
def test_ids_are_read_once(monkeypatch: pytest.MonkeyPatch, is_far: bool, is_inference: bool) -> None:
    """Reading values waits for a device that is far: not in every step, also where a step makes new ids."""
    read: list[Tensor] = []
    monkeypatch.setattr(grids, "image_grids", lambda ids: (read.append(ids), image_grids(ids))[1])
    monkeypatch.setattr(grids, "_has_to_be_waited_for", lambda ids: is_far)
    model, loop = tiny_models.flux(), Loop()
    with nearfield.apply(model, SPARSE, scheduler=loop), torch.inference_mode(is_inference):
        for number, grid in enumerate([(9, 14), (14, 9)]):
            for step in range(4):
                loop.step_index = step or None
                run(model, tiny_models.flux_inputs(grid))
                assert len(read) == number + 1
        if is_far:
            with pytest.raises(RuntimeError, match="`img_ids` must describe the same grids in all steps"):
                run(model, tiny_models.flux_inputs((9, 14)))


def test_the_same_ids_are_not_even_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    with nearfield.apply(model, SPARSE):
        run(model, inputs)
        monkeypatch.setattr(grids, "image_grids", None)
        monkeypatch.setattr(grids.Layout, "fits", None)
        run(model, inputs)


def test_inputs_may_be_positional(oracle: Callable[..., Tensor]) -> None:
    model, inputs = tiny_models.sd3().double(), double(tiny_models.sd3_inputs((9, 14)))
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    expected = oracle(model, inputs, SPARSE, geometries("sd3", (9, 14), 1, ()))
    with nearfield.apply(model, SPARSE), torch.no_grad():
        assert_same(model(*(inputs[name] for name in names)).sample, expected)


def test_inputs_are_not_written_to() -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    with nearfield.apply(model, SPARSE):
        run(model, inputs)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


def test_z_image_of_several_sizes_runs_dense_and_says_so() -> None:
    model, inputs = tiny_models.z_image().double(), double(tiny_models.z_image_inputs((8, 8), 2))
    inputs["x"][1] = inputs["x"][1][:, :, :12]

    def run_list() -> list[Tensor]:
        with torch.no_grad():
            return list(model(**inputs)[0])

    stock = run_list()
    with nearfield.apply(model, SPARSE) as handle:
        for found, expected in zip(run_list(), stock, strict=True):
            assert torch.equal(found, expected)
        assert "dense calls: 1, images of different sizes in one batch" in handle.summary()
        # The next call is sparse again.
        assert_differ(run(model, double(tiny_models.z_image_inputs((8, 8), 2)))[0], stock[0])


def test_geometry_is_that_of_the_last_call() -> None:
    model = tiny_models.flux()
    with nearfield.apply(model, SPARSE) as handle:
        assert handle.geometry() is None
        for grid in ((8, 8), (6, 10)):
            run(model, tiny_models.flux_inputs(grid))
            assert handle.geometry() == Geometry(grid, TEXT)
    assert handle.geometry() is None


@pytest.mark.parametrize("name", MODELS)
def test_summary_of_a_size_is_that_of_a_call_of_this_size(name: str) -> None:
    make, inputs_of = MODELS[name]
    model = make()
    with nearfield.apply(model, paper(tiles=4)) as handle:
        asked = handle.summary(height=9 * 16 + 5, width=14 * 16, text=TEXT)
        run(model, inputs_of((9, 14)))
        told = handle.summary()
    tokens = next(reversed(geometries(name, (9, 14), 1, ()).values())) if name != "sd3" else "9x14 + 7 text"
    assert f"last call: {tokens}: " in told
    assert asked == told.replace("last call:", f"{9 * 16 + 5}x{14 * 16} pixels:")


# -- and taken back ------------------------------------------------------------------------------------------------


def trace(model: nn.Module) -> dict[str, Any]:
    """Everything about a model's modules that could betray a visitor."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = {
            key: value
            if not isinstance(value, dict)
            else (list(value), [id(item) for item in value.values()])
            for key, value in vars(module).items()
        }
    return found


@pytest.mark.parametrize("name", MODELS)
def test_remove_leaves_no_trace(name: str) -> None:
    make, inputs_of = MODELS[name]
    model, inputs = make(), inputs_of((12, 10), 2)
    stock, before = run(model, inputs), trace(model)
    handle = nearfield.apply(model, SPARSE)
    assert trace(model) != before
    assert not torch.equal(run(model, inputs), stock)
    handle.remove()
    handle.remove()
    assert trace(model) == before
    assert torch.equal(run(model, inputs), stock)
    assert handle.summary() == "nearfield: removed; nothing is changed"


def test_the_context_manager_removes_also_after_an_error() -> None:
    model = tiny_models.flux()
    before = trace(model)
    with pytest.raises(RuntimeError, match="inside"), nearfield.apply(model, SPARSE):
        raise RuntimeError("inside")
    assert trace(model) == before


@pytest.mark.parametrize("name", MODELS)
def test_remove_without_a_handle(name: str) -> None:
    model = MODELS[name][0]()
    before = trace(model)
    nearfield.remove(model)  # nothing to do
    handle = nearfield.apply(model, SPARSE)
    nearfield.remove(model)
    assert trace(model) == before
    assert repr(handle).startswith("Handle(nothing: removed; ")
    with nearfield.apply(model, SPARSE):
        adapted = trace(model)
        handle.remove()  # has nothing to do with the second one
        assert trace(model) == adapted


def test_a_removed_handle_keeps_no_model_alive() -> None:
    model = tiny_models.flux()
    handles = [nearfield.apply(model, SPARSE)]
    run(model, tiny_models.flux_inputs((9, 14)))
    handles[0].remove()
    handles.append(nearfield.apply(model, SPARSE))
    nearfield.remove(model)
    assert "removed" in handles[1].summary()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_applying_again_after_remove() -> None:
    model, inputs = tiny_models.flux().double(), double(tiny_models.flux_inputs((9, 14)))
    with nearfield.apply(model, SPARSE):
        once = run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        pass
    with nearfield.apply(model, SPARSE):
        assert torch.equal(run(model, inputs), once)


def test_other_models_of_the_class_are_untouched() -> None:
    models, inputs = [tiny_models.flux(), tiny_models.flux()], tiny_models.flux_inputs((9, 14))
    stock = run(models[1], inputs)
    with nearfield.apply(models[0], SPARSE):
        assert torch.equal(run(models[1], inputs), stock)
        assert not torch.equal(run(models[0], inputs), stock)


def test_two_models_with_different_methods(oracle: Callable[..., Tensor]) -> None:
    models = [tiny_models.flux().double(), tiny_models.flux().double()]
    inputs = [double(tiny_models.flux_inputs(grid)) for grid in ((9, 14), (16, 8))]
    methods = [SPARSE, paper(tiles=2, shared="none", cycle=2, dense_layers=0, dense_steps=0)]
    expected = [
        oracle(model, call, method, geometries("flux", grid, 1, ()))
        for model, call, method, grid in zip(models, inputs, methods, ((9, 14), (16, 8)), strict=True)
    ]
    with nearfield.apply(models[0], methods[0]), nearfield.apply(models[1], methods[1]):
        for _ in range(2):
            for model, call, wanted in zip(models, inputs, expected, strict=True):
                assert_same(run(model, call), wanted)
