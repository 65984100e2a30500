"""Models whose tokens are split over ranks: what each rank does in the tests of `apply(..., mesh=)`."""

import contextlib
import io
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import torch
from tests import command_line as cli
from tests import tiny_models
from tests.tiles import paper
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nearfield import Geometry, Hilbert, LogLinear, Merge, apply
from nearfield.methods import BipartiteMerge, hilbert
from nearfield.methods.hilbert.layout import block_sizes
from nearfield.parallel import Ranks, Shapes
from nearfield.parallel.cuts import even_split
from nearfield.parallel.model import SplitModel

GRID = (10, 12)
VIDEO = (3, 6, 8)
METHODS = {
    "two-way": paper(tiles=4, shared_tokens=16, dense_layers=1, dense_steps=0),
    "keys": paper(tiles=6, shared_tokens=16, share="keys", dense_layers=0, dense_steps=0),
    "nothing shared": paper(tiles=8, shared="none", dense_layers=(0, -1), dense_steps=0),
    "far": paper(tiles=6, shared_tokens=16, far=4, dense_layers=0, dense_steps=0),
    "tiles by layer": paper(tiles=(2, 6, 4), shared_tokens=16, far=4, dense_layers=0, dense_steps=0),
    "around": paper(tiles=6, shared_tokens=16, far=4, near="around", dense_layers=0, dense_steps=0),
    "weighted": paper(tiles=6, shared_tokens=16, far=4, summary="weighted", dense_layers=0, dense_steps=0),
    "the default's": Hilbert(far=4, dense_steps=0),
    "text in summary": Hilbert(far=4, text_reads="summary", dense_steps=0),
    "around, merged": Merge(0.5, region_size=8, skip_blocks=(0, 1))
    | paper(tiles=4, shared_tokens=16, far=4, near="around", dense_layers=1, dense_steps=0),
    "the default's, merged": Merge(0.5, region_size=8, skip_blocks=(0, 1))
    | Hilbert(shared="centre", shared_tokens=16, far=4, dense_steps=0),
    "far, interleaved": paper(
        tiles=5, shared_tokens=16, share="keys", far=6, interleave=True, dense_layers=1, dense_steps=0
    ),
    "merged": Merge(region_size=16, skip_blocks=(0, 0)),
    "merged, weighed": Merge(0.4, region_size=9, region="window", skip_blocks=(1, 0), size_bias=True),
    "merged and sparse": Merge(0.5, region_size=8, skip_blocks=(0, 1), size_bias=True)
    | paper(tiles=4, shared_tokens=16, dense_layers=1, dense_steps=0),
    "merged, with a far field": Merge(0.5, region_size=8, skip_blocks=(0, 1))
    | paper(tiles=4, shared_tokens=16, far=4, dense_layers=1, dense_steps=0),
    "interleaved": paper(tiles=4, shared_tokens=16, interleave=True, dense_layers=0, dense_steps=0),
}


class Ran(NamedTuple):
    outs: list[Tensor]
    summary: str
    bytes_sent: int


def model_of(dtype: torch.dtype = torch.float64) -> Any:
    return tiny_models.flux().to(dtype)


def inputs_of(batch: int = 2, references: tuple[tuple[int, int], ...] = (), seed: int = 0) -> dict[str, Any]:
    inputs = tiny_models.flux_inputs(GRID, batch, references)
    inputs["hidden_states"] = inputs["hidden_states"] + seed
    return {
        name: x.double() if isinstance(x, Tensor) and "ids" not in name else x for name, x in inputs.items()
    }


def run(mesh: DeviceMesh | None, name: str, references: tuple[tuple[int, int], ...] = ()) -> Ran:
    """Two calls: the second finds everything ready. Then without nearfield."""
    model, inputs = model_of(), inputs_of(references=references)
    with torch.no_grad():
        with apply(model, METHODS[name], mesh=mesh) as handle:
            outs = [model(**inputs)[0] for _ in range(2)]
            summary = handle.summary()
            sent = handle.ranks.bytes_sent if handle.ranks else 0
        outs.append(model(**inputs)[0])
    return Ran(outs, summary, sent)


@contextlib.contextmanager
def blocks_as_on_a_gpu() -> Iterator[None]:
    """As large as tiles allow: on a CPU those of all layers are small, however few tiles there are."""

    def sizes(*call: Any) -> tuple[int, int]:
        return block_sizes(*call[:-1], "cuda")

    with mock.patch.object(hilbert, "block_sizes", sizes):
        yield


def run_in_large_blocks(mesh: DeviceMesh | None, name: str) -> Tensor:
    with blocks_as_on_a_gpu():
        return run(mesh, name).outs[0]


def gradients_in_large_blocks(mesh: DeviceMesh | None, name: str) -> list[Tensor]:
    with blocks_as_on_a_gpu():
        return gradients(mesh, False, name)


def run_kind(
    mesh: DeviceMesh | None, kind: str, dtype: torch.dtype = torch.float32, method: str = "two-way"
) -> Tensor:
    """One call of another class of models."""
    model, inputs = kind_of(kind, dtype)
    with torch.no_grad(), apply(model, METHODS[method], mesh=mesh):
        return tiny_models.first(model(**inputs))


def kind_of(kind: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A model and what it is called with."""
    if kind in tiny_models.VIDEO_MODELS:
        make, make_inputs = tiny_models.VIDEO_MODELS[kind]
        model, inputs = make(), make_inputs(VIDEO, batch=2)
    else:
        model, inputs = getattr(tiny_models, kind)(), getattr(tiny_models, f"{kind}_inputs")(GRID, batch=2)
    for name in ("hidden_states", "encoder_hidden_states"):
        inputs[name] = inputs[name].to(dtype)
    return model.to(dtype), inputs


def loop(mesh: DeviceMesh | None) -> list[Tensor]:
    """Denoising steps on merged tokens: first a dense one, then sparse ones, with maps that serve for two steps."""
    model, inputs = model_of(), inputs_of()
    schedule = diffusers.FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(4)
    merge = Merge(0.5, region_size=8, refresh=(2, 1), skip_blocks=(0, 0), size_bias=True)
    method = merge | paper(tiles=4, shared_tokens=16, dense_layers=0, dense_steps=1)
    outs = []
    with apply(model, method, scheduler=schedule, mesh=mesh), torch.no_grad():
        for timestep in schedule.timesteps:
            outs.append(model(**inputs)[0])
            step = schedule.step(outs[-1], timestep, inputs["hidden_states"], return_dict=False)
            inputs["hidden_states"] = step[0].double()
    return outs


def gradients(mesh: DeviceMesh | None, is_checkpointed: bool, name: str = "two-way") -> list[Tensor]:
    model = model_of().train().requires_grad_()
    if is_checkpointed:
        model.enable_gradient_checkpointing()
    with apply(model, METHODS[name], mesh=mesh):
        return gradients_of(model, mesh)


def gradients_of(model: Any, mesh: DeviceMesh | None) -> list[Tensor]:
    """Of all parameters, averaged over ranks as data parallelism does it."""
    (out,) = model(**inputs_of())
    target = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out - target).square().sum().backward()
    found = []
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if mesh is not None:
            torch.distributed.all_reduce(grad, group=mesh.get_group())
            grad = grad / mesh.size()
        found.append(grad)
    return found


class Counted(NamedTuple):
    """Bytes of one layer with a far field, forward and backward, and what was counted for them; how many summaries it
    has; and what came of the tokens that a rank holds: output, `lse`, and gradients of query, key and value."""

    sent: tuple[int, int]
    counted: tuple[int, int]
    summaries: int
    held: Tensor
    results: list[Tensor]


HEADS = 4
SUMMARISED = Geometry(GRID, text=7)


def summarised(
    mesh: DeviceMesh, name: str, key_heads: int = HEADS, dtype: torch.dtype = torch.float64
) -> Counted:
    """One rank's part of a layer. Rows that all hold belong to the loss of rank 0."""
    ranks, method = Ranks(mesh), METHODS[name]
    assert isinstance(method, Hilbert)
    model = SplitModel(even_split(method, SUMMARISED, ranks.size, 16), 16, ranks)
    whole = method.layer(SUMMARISED, 1)
    reader = model.layer(whole)
    assert whole.far is not None
    assert reader.num_pairs == whole.num_pairs
    held = model.split.held(ranks.index)
    is_counted = (model.split.owners[held] == ranks.index) | (ranks.index == 0)
    leaves, grads = _layer_inputs(key_heads, dtype)
    leaves = [x[:, :, held].requires_grad_() for x in leaves]
    grads = [grads[0][:, :, held] * is_counted[:, None], grads[1][:, :, held] * is_counted]
    result = reader.attend(*leaves)
    forward = ranks.bytes_sent
    found = torch.autograd.grad(tuple(result), leaves, grads)
    counted = reader.bytes_sent(Shapes(2, HEADS, key_heads, 8, dtype))
    sent = forward, ranks.bytes_sent - forward
    expected = counted.forward[ranks.index], counted.backward[ranks.index]
    return Counted(sent, expected, len(whole.far.sizes), held, [*(x.detach() for x in result), *found])


def summarised_by_one(name: str, key_heads: int = HEADS) -> list[Tensor]:
    """The same of one process."""
    leaves, grads = _layer_inputs(key_heads, torch.float64)
    leaves = [x.requires_grad_() for x in leaves]
    method = METHODS[name]
    assert isinstance(method, Hilbert)
    result = method.layer(SUMMARISED, 1).attend(*leaves)
    return [*(x.detach() for x in result), *torch.autograd.grad(tuple(result), leaves, grads)]


def _layer_inputs(key_heads: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Query, key and value of the whole sequence, and gradients of output and `lse`. Queries have a mean, and keys
    differ, so that it matters which queries the summaries are weighted for."""
    torch.manual_seed(0)
    tokens = SUMMARISED.num_tokens
    query = 1 + torch.randn(2, HEADS, tokens, 8)
    query += torch.linspace(-1, 1, tokens)[:, None]
    key, value = (2 * torch.randn(2, key_heads, tokens, 8) for _ in range(2))
    grads = torch.randn(2, HEADS, tokens, 8), torch.randn(2, HEADS, tokens)
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(dtype) for x in (query, key, value)], [grads[0].to(dtype), grads[1].to(wide)]


def disagreeing(mesh: DeviceMesh, about: str) -> None:
    """Ranks that were started with different things."""
    is_odd = mesh.get_local_rank() % 2
    model = tiny_models.flux(layers=1 + is_odd if about == "target" else 1)
    tiles = 4 + is_odd if about == "method" else 4
    handle = apply(model, paper(tiles=tiles, dense_steps=0), mesh=mesh)
    inputs = tiny_models.flux_inputs((8, 8 + 2 * is_odd) if about == "tokens" else (8, 8))
    if about == "hidden_states":
        inputs["hidden_states"] = inputs["hidden_states"] + is_odd
    with handle, torch.no_grad():
        model(**inputs)


def cached(mesh: DeviceMesh) -> None:
    """A cache that looks at the tokens a rank has."""
    model = model_of()
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    with apply(model, METHODS["two-way"], mesh=mesh), torch.no_grad(), model.cache_context("cond"):
        model(**inputs_of())


def refused(mesh: DeviceMesh) -> list[str]:
    """Messages of what cannot be split; no rank sends anything for it."""
    messages = []
    for model, method in (
        (tiny_models.sdxl(), paper()),
        (tiny_models.flux(), LogLinear()),
        (tiny_models.flux(), BipartiteMerge()),
        (tiny_models.flux(), Merge(region="global")),
        (tiny_models.flux(), Merge() | LogLinear()),
    ):
        try:
            apply(model, method, mesh=mesh)
        except ValueError as error:
            messages.append(str(error))
    return messages


def command(mesh: DeviceMesh, *words: str) -> tuple[int, str]:
    """The command line on every rank: its exit code, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = cli.main([word.replace("RANK", str(mesh.get_local_rank())) for word in words])
    return code, printed.getvalue()


def started_by_torchrun(rank: int, size: int, port: int, words: list[str]) -> None:
    """The command line in an environment as torchrun makes it."""
    torch.set_num_threads(1)
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": 1,
    }
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    sys.exit(cli.main(words))


def started_and_lost(rank: int, size: int, port: int, words: list[str], folder: str, sends: int) -> None:
    """The same, writing stderr to a file; the last rank is killed in the middle of a step, before it sends again."""
    file = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(file, "w", buffering=1)
    send, count = Ranks.send, itertools.count(1)

    def send_or_die(self: Ranks, *call: Any) -> Any:
        if rank == size - 1 and next(count) == sends:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, *call)

    with mock.patch.object(Ranks, "send", send_or_die):
        started_by_torchrun(rank, size, port, words)
