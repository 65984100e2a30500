"""A LoRA for sparse attention rests in dense steps."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests import tiny_models
from tests.cats import lively_model
from tests.test_adapters import double, run
from tests.test_adapters_features import TARGETS, Schedule
from tests.tiles import paper

import nearfield
from nearfield.diffusers.lora import loras_in
from nearfield.methods.recipes import Recipe
from nearfield_lab.embedded.lora import lora_on
from nearfield_lab.embedded.sampler import DemoPipeline
from nearfield_lab.training.distill import save_lora

METHOD = paper(tiles=4, dense_layers=0, dense_steps=(1, 2))
EVERY_STEP = replace(METHOD, dense_steps=0)
DENSE, SPARSE = (0, 4, 5), (1, 3)  # of the schedule's six


def tuned(*names: str) -> Any:
    """A model with adapters that change also what lies before the tokens enter and behind where they leave."""
    model = tiny_models.flux(1, 2).double()
    for name in names:
        load(model, name)
    if names:
        model.set_adapters(list(names))
    return model


def load(model: Any, name: str, **fields: Any) -> None:
    torch.manual_seed(len(name))
    config = peft.LoraConfig(
        r=2, lora_alpha=2, target_modules=TARGETS["flux"], init_lora_weights=False, **fields
    )
    model.add_adapter(config, adapter_name=name)
    model.double()


def scales(model: Any) -> list[tuple[str, float]]:
    """Of all adapters in all layers."""
    return [item for module in model.modules() for item in getattr(module, "scaling", {}).items()]


@pytest.fixture
def call() -> dict[str, Any]:
    return double(tiny_models.flux_inputs((9, 14)))


def steps(model: Any, call: dict[str, Any], schedule: Schedule, numbers: tuple[int, ...]) -> Iterator[Any]:
    for step in numbers:
        schedule.step_index = step or None
        yield run(model, call)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "blocks compiled"])
def test_it_rests_in_dense_steps_alone_and_others_do_not(call: dict[str, Any], is_compiled: bool) -> None:
    model, with_style, schedule = tuned("style", "sparse"), tuned("style"), Schedule()
    both = run(model, call)
    with nearfield.apply(model, EVERY_STEP):
        sparse = run(model, call)
    dense = run(with_style, call)
    if is_compiled:
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse") as handle:
        for found in steps(model, call, schedule, DENSE):
            torch.testing.assert_close(found, dense)
        for found in steps(model, call, schedule, SPARSE):
            torch.testing.assert_close(found, sparse)
        (last,) = steps(model, call, schedule, DENSE[-1:])
        torch.testing.assert_close(last, dense)
        assert {scale for name, scale in scales(model) if name == "sparse"} == {1.0}, (
            "between calls it is there"
        )
        assert "LoRA: rests in dense steps" in handle.summary()
    torch.testing.assert_close(run(model, call), both)
    assert (both - dense).norm() > 0.01 * dense.norm()


def test_it_is_always_on_where_no_step_is_dense(call: dict[str, Any]) -> None:
    model = tuned("sparse")
    with nearfield.apply(model, EVERY_STEP):
        sparse = run(model, call)
    for method, scheduler in ((EVERY_STEP, Schedule()), (METHOD, None)):
        with nearfield.apply(model, method, scheduler=scheduler, lora="sparse") as handle:
            torch.testing.assert_close(run(model, call), sparse)
            assert "LoRA" not in handle.summary()


def test_the_embedded_models_own_rests_too(tmp_path: Path) -> None:
    changed = lively_model()
    config = peft.LoraConfig(r=2, target_modules=["to_v"], init_lora_weights=False)
    changed.transformer.add_adapter(config, adapter_name="nearfield")
    path = tmp_path / "lora.safetensors"
    save_lora(path, changed.transformer, {"recipe": Recipe(METHOD).as_document()})
    pipeline = DemoPipeline(lively_model())
    x, level = torch.randn(1, 32, 8, 8), torch.tensor([0.5])
    with torch.no_grad():
        stock = pipeline.model(x, level)
        pipeline.scheduler.set_timesteps(6)
        with lora_on(pipeline, path) as lora, nearfield.apply(pipeline, METHOD, lora=lora):
            found = []
            for step in range(6):
                pipeline.scheduler.set_begin_index(step)
                found.append(pipeline.model(x, level))
        differences = [float((one - stock).abs().max()) for one in found]
        assert max(differences[step] for step in DENSE) < 1e-5 < 1e-2 < min(differences[1:4])
        assert torch.equal(pipeline.model(x, level), stock)


def test_it_may_be_scaled_unloaded_and_loaded_in_between(call: dict[str, Any]) -> None:
    model, plain, schedule = tuned("sparse"), tuned(), Schedule()
    dense = run(plain, call)
    with nearfield.apply(plain, EVERY_STEP):
        untuned = run(plain, call)

    def sparse_after_dense() -> Any:
        for found in steps(model, call, schedule, DENSE[-2:]):
            torch.testing.assert_close(found, dense)
        return next(steps(model, call, schedule, SPARSE))

    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        full = sparse_after_dense()
        next(steps(model, call, schedule, DENSE))
        model.set_adapters(["sparse"], [0.5])
        half = sparse_after_dense()
        model.delete_adapters("sparse")
        torch.testing.assert_close(sparse_after_dense(), untuned)
        load(model, "sparse")
        torch.testing.assert_close(sparse_after_dense(), full)
    assert min((half - full).norm(), (half - untuned).norm()) > 0.01 * full.norm()


def test_a_call_that_raises_leaves_it_on(call: dict[str, Any]) -> None:
    model, schedule = tuned("sparse"), Schedule()

    def fail(*_: Any) -> None:
        assert {scale for _, scale in scales(model)} == {0.0}
        raise RuntimeError("in the middle")

    model.norm_out.register_forward_hook(fail)
    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        with pytest.raises(RuntimeError, match="in the middle"):
            run(model, call)
        assert {scale for _, scale in scales(model)} == {1.0}


def interrupted(model: Any, call: dict[str, Any]) -> None:
    """A dense call that Ctrl-C ends: torch tells no hook of it."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.norm_out.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, call)
    hook.remove()
    assert {scale for _, scale in scales(model)} == {0.0}


def failed_backward(model: Any, call: dict[str, Any]) -> None:
    """Of a dense call, with checkpoints."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model.train()
    model.enable_gradient_checkpointing()
    tokens = call["hidden_states"].clone().requires_grad_()
    out = model(**call | {"hidden_states": tokens})[0]
    hook = model.transformer_blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        out.sum().backward()
    hook.remove()
    assert {scale for _, scale in scales(model)} == {0.0}


@pytest.mark.parametrize("end", [interrupted, failed_backward])
@pytest.mark.parametrize("step", [DENSE[-1], SPARSE[0]], ids=["dense", "sparse"])
def test_the_next_call_brings_it_back(end: Any, step: int, call: dict[str, Any]) -> None:
    model, plain, schedule = tuned("sparse"), tuned(), Schedule()
    with nearfield.apply(model, EVERY_STEP):
        sparse = run(model, call)
    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        end(model, call)
        found = next(steps(model, call, schedule, (step,)))
        assert {scale for _, scale in scales(model)} == {1.0}
    torch.testing.assert_close(found, sparse if step in SPARSE else run(plain, call))


@pytest.mark.parametrize("end", [interrupted, failed_backward])
@pytest.mark.parametrize("step", [DENSE[-1], SPARSE[0], None], ids=["dense", "sparse", "no call"])
def test_what_was_scaled_since_a_call_failed_stays_so(
    end: Any, step: int | None, call: dict[str, Any]
) -> None:
    """And rests in dense steps, too."""
    model, plain, schedule = tuned("sparse"), tuned(), Schedule()
    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        end(model, call)
        model.set_adapters(["sparse"], [0.5])
        if step is not None:
            found = next(steps(model, call, schedule, (step,)))
    assert {scale for _, scale in scales(model)} == {0.5}
    if step in DENSE:
        torch.testing.assert_close(found, run(plain, call))


@pytest.mark.parametrize("end", [interrupted, failed_backward])
def test_what_was_deleted_since_a_call_failed_does_not_come_back(end: Any, call: dict[str, Any]) -> None:
    model, schedule = tuned("sparse"), Schedule()
    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        end(model, call)
        model.delete_adapters("sparse")
        next(steps(model, call, schedule, SPARSE))
        assert scales(model) == []
    with pytest.raises(ValueError, match="`lora` must be the name of an adapter that the model has loaded"):
        nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse")


@pytest.mark.parametrize("step", [DENSE[0], SPARSE[0]], ids=["dense", "sparse"])
def test_what_is_computed_again_for_gradients_is_computed_as_before(step: int, call: dict[str, Any]) -> None:
    """Blocks that are checkpointed, after a call of the other kind."""
    model, schedule = tuned("sparse"), Schedule()
    model.train()
    tokens = call["hidden_states"].requires_grad_()

    def gradient() -> Any:
        schedule.step_index = step or None
        loss = model(**call)[0].square().sum()
        for other in (*DENSE[:1], *SPARSE[:1]):
            if other != step:
                next(steps(model, call, schedule, (other,)))
        return torch.autograd.grad(loss, tokens)[0]

    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        wanted = gradient()
        model.enable_gradient_checkpointing()
        torch.testing.assert_close(gradient(), wanted)
        assert {scale for _, scale in scales(model)} == {1.0}


@pytest.mark.parametrize("step", [DENSE[0], SPARSE[0]], ids=["dense", "sparse"])
def test_layers_behind_the_last_transformer_are_computed_again_as_before(step: int) -> None:
    """Of a UNet: gradients reach them before any transformer."""
    model, schedule = tiny_models.sdxl().double(), Schedule()
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["conv1", "conv2"], init_lora_weights=False)
    model.add_adapter(config, adapter_name="sparse")
    model.double().train()
    call = double(tiny_models.sdxl_inputs((8, 8)))
    weight = model.up_blocks[-1].resnets[-1].conv2.base_layer.weight.requires_grad_()
    other = SPARSE[0] if step in DENSE else DENSE[0]

    def gradient() -> Any:
        schedule.step_index = step or None
        loss = model(**call)[0].square().sum()
        next(steps(model, call, schedule, (other,)))
        return torch.autograd.grad(loss, weight)[0]

    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        wanted = gradient()
        model.enable_gradient_checkpointing()
        torch.testing.assert_close(gradient(), wanted, rtol=1e-9, atol=0)
        assert {scale for _, scale in scales(model)} == {1.0}


def test_of_two_models_one_may_have_it(call: dict[str, Any]) -> None:
    first, second = tuned("sparse"), tuned()
    found = loras_in([first, second], "sparse")
    assert [one is None for one in found] == [False, True]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("other", r"`lora` must be the name of an adapter that the model has loaded; got 'other'\. Load it"),
        (3, r"`lora` must be the name of an adapter, or have a method `switch`; got int"),
    ],
)
def test_what_is_no_lora_is_refused_and_nothing_changes(
    lora: Any, message: str, call: dict[str, Any]
) -> None:
    model = tuned("sparse")
    before = run(model, call)
    with pytest.raises((TypeError, ValueError), match=message):
        nearfield.apply(model, METHOD, scheduler=Schedule(), lora=lora)
    assert torch.equal(run(model, call), before)


def test_dora_is_refused() -> None:
    model = tuned()
    load(model, "sparse", use_dora=True)
    with pytest.raises(ValueError, match="`lora` must be a plain LoRA; got 'sparse', which is a DoRA"):
        nearfield.apply(model, METHOD, scheduler=Schedule(), lora="sparse")


@pytest.mark.parametrize("field", [{"modules_to_save": ["proj_out"]}, {"bias": "lora_only"}, {"bias": "all"}])
def test_what_brings_more_than_a_scale_is_refused(field: dict[str, Any]) -> None:
    model = tuned()
    targets = [name for name in TARGETS["flux"] if name != "proj_out"]
    model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, **field), adapter_name="sparse")
    ((name, setting),) = field.items()
    message = f"`lora` must be a plain LoRA; got 'sparse' with {name}={setting!r}. That does not go away"
    with pytest.raises(ValueError, match=re.escape(message)):
        nearfield.apply(model, METHOD, scheduler=Schedule(), lora="sparse")


def test_a_fused_one_is_refused() -> None:
    model = tuned("sparse")
    model.fuse_lora()
    with pytest.raises(ValueError, match="`lora` must not be fused into the weights; got 'sparse'"):
        nearfield.apply(model, METHOD, scheduler=Schedule(), lora="sparse")


def test_whole_models_cannot_be_compiled_with_one(call: dict[str, Any]) -> None:
    model, schedule = tuned("sparse"), Schedule()
    with nearfield.apply(model, METHOD, scheduler=schedule, lora="sparse"):
        run(model, call)
        with pytest.raises(Exception, match="`lora` must be None where torch"):
            torch.compile(model, fullgraph=True, backend="eager")(**call)
    torch._dynamo.reset()
