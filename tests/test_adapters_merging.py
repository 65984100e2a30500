"""`apply` with merged tokens, on tiny models of the real classes.

The oracle knows nothing of hooks, maps or processors. It runs the stock blocks in raster order, one sample at a time:
tokens are merged by loops over regions, the block is given the rotary rows of the destinations as an ordinary argument,
and what it adds is handed back token by token.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny_models
from tests.attending import NEEDS_TRITON, assert_budget
from tests.test_adapters import assert_differ, assert_same, double, geometries, run
from tests.tiles import paper
from tests.tiny_models import MODELS, TEXT, Grid
from torch import Tensor, nn
from torch.nn import functional

import nearfield
from nearfield import Geometry, Merge
from nearfield.methods import BipartiteMerge, Composition
from nearfield.methods.baselines import shortening as peers
from nearfield.ops.merge.reference import destinations as reference

NAMES = ("flux", "flux2", "sd3", "qwen", "sdxl", "pixart")
HARD = Merge(sharpness=math.inf, region_size=16, skip_blocks=(1, 1))
ALL = Merge(region_size=16, skip_blocks=(0, 0))
SPARSE = paper(tiles=4, shared_tokens=16, dense_layers=0, dense_steps=0)


# -- the oracle ----------------------------------------------------------------------------------------------------


def blocks_of(name: str, model: Any) -> list[tuple[str, list[nn.Module]]]:
    """Blocks of each kind, in the order they run; a UNet has a list for every transformer."""
    if name == "sdxl":
        parts = [model.down_blocks, [model.mid_block], model.up_blocks]
        transformers = [
            transformer
            for part in parts
            for block in part
            for transformer in getattr(block, "attentions", None) or []
        ]
        return [("plain", list(transformer.transformer_blocks)) for transformer in transformers]
    kinds = [("plain" if name == "pixart" else "joint", list(model.transformer_blocks))]
    if name.startswith("flux"):
        kinds.append(("single", list(model.single_transformer_blocks)))
    return kinds


class Oracle:
    """Stock blocks on tokens that were merged by hand."""

    def __init__(self, name: str, method: Composition, whole: Geometry) -> None:
        self.name, self.method, self.merge, self.whole = name, method, method.merge, whole
        order, lengths = method.ordering(whole).order, list(method.regions(whole).lengths)
        self.regions = list(zip(order.split(lengths), method.regions(whole).counts, strict=True))
        self.maps: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.sizes: Tensor | None = None
        self.layer = 0

    def map_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Destinations, and which part of every token goes to which: `[merged]` and `[merged, tokens]`."""
        if isinstance(self.merge, BipartiteMerge):
            return self.matched(tokens)
        chosen, shares = [], []
        for ids, count in self.regions:
            mine = tokens[ids]
            picked = reference.choose_destinations(
                mine[None, None], torch.tensor([len(ids)]), torch.tensor([count]), count
            )
            destinations = ids[picked[0, 0].long()]
            cosines = functional.cosine_similarity(tokens[destinations][:, None], mine[None], dim=-1)
            if count == len(ids):  # a region that keeps all its tokens is left alone
                part = (ids[:, None] == ids).to(tokens.dtype)
            elif math.isinf(self.merge.sharpness):
                for row, destination in enumerate(destinations):
                    cosines[row, ids == destination] = 2.0
                part = functional.one_hot(cosines.argmax(0), count).T.to(tokens.dtype)
            else:
                part = (self.merge.sharpness * cosines).softmax(0)
            everywhere = torch.zeros(count, len(tokens), dtype=tokens.dtype)
            everywhere[:, ids] = part
            chosen.append(destinations)
            shares.append(everywhere)
        return torch.cat(chosen), torch.cat(shares)

    def matched(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Image by image, the pairs of a token and the destination it is most like, best pairs first."""
        owner = list(range(len(tokens)))
        destinations = peers._random_destinations(self.whole.images, self.merge.stride, self.merge.seed)
        for ids, count in self.regions:
            targets = [int(id_) for id_ in ids if destinations[id_]]
            pairs = []
            for source in ids.tolist():
                if source not in targets:
                    likeness = functional.cosine_similarity(tokens[source], tokens[targets], dim=-1)
                    pairs.append((-float(likeness.max()), source, targets[int(likeness.argmax())]))
            for _, source, target in sorted(pairs)[: len(ids) - count]:
                owner[source] = target
        kept = sorted(set(owner))
        shares = torch.zeros(len(kept), len(tokens), dtype=tokens.dtype)
        for token, target in enumerate(owner):
            shares[kept.index(target), token] = 1
        return torch.tensor(kept), shares

    def block(
        self, block: nn.Module, forward: Callable[..., Any], key: tuple[int, int] | None, layer: int
    ) -> Any:
        names = inspect.signature(type(block).forward)

        def one(arguments: dict[str, Any], sample: int) -> Any:
            tokens = arguments["hidden_states"][0]
            text = TEXT if len(tokens) > self.whole.num_image_tokens else 0
            assert key is not None
            if (*key, sample) not in self.maps:
                self.maps[(*key, sample)] = self.map_of(tokens[text:].detach())
            destinations, shares = self.maps[(*key, sample)]
            self.sizes = shares.sum(1)
            parts = self.on_merged(block, forward, arguments, destinations, shares)
            self.sizes = None
            return parts

        def merged(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(names.bind(block, *args, **kwargs).arguments)
            del arguments["self"]
            self.layer = layer
            if key is None:
                return forward(**arguments)
            batch = len(arguments["hidden_states"])
            samples = [
                one(
                    {
                        name: value[sample : sample + 1] if isinstance(value, Tensor) else value
                        for name, value in arguments.items()
                    },
                    sample,
                )
                for sample in range(batch)
            ]
            text, image = (
                None if parts[0] is None else torch.cat(parts) for parts in zip(*samples, strict=True)
            )
            is_single_result = self.name in ("sdxl", "pixart") or (self.name == "flux2" and text is None)
            return image if is_single_result else (text, image)

        return merged

    def on_merged(
        self,
        block: Any,
        forward: Callable[..., Any],
        arguments: dict[str, Any],
        destinations: Tensor,
        shares: Tensor,
    ) -> list[Any]:
        """The block among merged tokens; what it adds goes back to all. Returns text (or None) and image."""
        del block
        tokens = arguments["hidden_states"]
        short = enter_by_hand(tokens, shares)
        extra = self.rows(arguments, destinations)
        output = forward(**arguments | {"hidden_states": short} | extra)
        parts = list(output) if isinstance(output, tuple) else [None, output]
        text = tokens.shape[1] - shares.shape[1]
        added = leave_by_hand(parts[1] - short, shares)
        parts[1] = torch.cat([parts[1][:, :text], (tokens + added)[:, text:]], dim=1)
        return parts

    def rows(self, arguments: dict[str, Any], destinations: Tensor) -> dict[str, Any]:
        """The rotary argument of merged tokens, if there is one."""
        rotary = arguments.get("image_rotary_emb")
        if rotary is None:
            return {}
        if self.name == "qwen":
            return {"image_rotary_emb": (rotary[0][destinations], rotary[1])}
        rows = torch.cat([torch.arange(TEXT), TEXT + destinations])
        return {"image_rotary_emb": tuple(table[rows] for table in rotary)}

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **kwargs: Any
    ) -> Tensor:
        """Sizes as a bias, and the pairs that the method lists: among merged tokens, or all."""
        bias = torch.zeros(1, 1, 1, key.shape[2], dtype=torch.float64)
        if attn_mask is not None:
            bias = (
                bias.masked_fill(~attn_mask, -torch.inf)
                if attn_mask.dtype == torch.bool
                else bias + attn_mask
            )
        if query.shape[2] == key.shape[2]:
            if self.sizes is not None and self.merge.size_bias:
                start = 0 if self.name == "sd3" else key.shape[2] - len(self.sizes)
                bias = bias.clone()
                bias[..., start : start + len(self.sizes)] += self.sizes.log()
            if self.method.attention is not None:
                geometry = self.whole
                if self.sizes is not None:
                    geometry = self.method.shortened(geometry)
                layer = self.method.attention.layer(geometry, self.layer, heads=query.shape[1])
                mask = layer.near.to_mask()
                if self.sizes is None:  # among all tokens, which are here in raster order
                    place = torch.arange(geometry.num_tokens)
                    start = geometry.image_spans[0][0]
                    inverse = self.method.ordering(geometry).inverse
                    place[start : start + len(inverse)] = start + inverse
                    mask = mask[:, :, place][:, :, :, place]
                bias = bias.masked_fill(~mask, -torch.inf)
        return DENSE(query, key, value, bias.to(query.dtype), **kwargs)


def enter_by_hand(x: Tensor, shares: Tensor) -> Tensor:
    """Of `[1, text and tokens, C]` the tokens are merged."""
    text = x.shape[1] - shares.shape[1]
    return torch.cat([x[0, :text], shares @ x[0, text:] / shares.sum(1, keepdim=True)])[None]


def leave_by_hand(x: Tensor, shares: Tensor) -> Tensor:
    text = x.shape[1] - shares.shape[0]
    return torch.cat([x[0, :text], shares.T @ x[0, text:]])[None]


class ModuleOracle(Oracle):
    """As the paper places it: what was normalised and modulated is merged before the projections of attention, and
    parted before that of the result; in the single blocks of FLUX.1 around attention and MLP; in UNets also around
    the MLP."""

    def on_merged(
        self,
        block: Any,
        forward: Callable[..., Any],
        arguments: dict[str, Any],
        destinations: Tensor,
        shares: Tensor,
    ) -> list[Any]:
        extra = self.rows(arguments, destinations)

        def merging(stock: Any) -> Any:
            return lambda x, *args, **kwargs: stock(enter_by_hand(x, shares), *args, **kwargs)

        def parting_before(stock: Any) -> Any:
            return lambda x: stock(leave_by_hand(x, shares))

        def parting_after(stock: Any) -> Any:
            return lambda x: leave_by_hand(stock(x), shares)

        def attending(stock: Any) -> Any:
            def attend(hidden_states: Tensor, **kwargs: Any) -> Any:
                return stock(hidden_states=enter_by_hand(hidden_states, shares), **kwargs | extra)

            return attend

        def rotating(stock: Any) -> Any:
            return lambda **kwargs: stock(**kwargs | extra)

        def normalising(stock: Any) -> Any:
            def normalise(x: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
                normed, gate = stock(x, emb=emb)
                return enter_by_hand(normed, shares), gate

            return normalise

        changes: list[tuple[nn.Module, Any]] = []
        if self.name == "flux" and hasattr(block, "proj_mlp"):
            changes = [(block.norm, normalising), (block.attn, rotating), (block.proj_out, parting_after)]
        else:
            for name in ("attn", "attn1", "attn2"):
                attention = getattr(block, name, None)
                if attention is not None:
                    out = attention.to_out
                    changes.append((attention, attending))
                    changes.append((out[0] if isinstance(out, nn.ModuleList) else out, parting_before))
            if self.name in ("sdxl", "pixart"):
                changes += [(block.ff, merging), (block.ff.net[-1], parting_after)]
        stocks = [module.forward for module, _ in changes]
        for (module, change), stock in zip(changes, stocks, strict=True):
            module.forward = change(stock)
        try:
            output = forward(**arguments)
        finally:
            for module, _ in changes:
                del module.forward
        return list(output) if isinstance(output, tuple) else [None, output]


DENSE = functional.scaled_dot_product_attention


@contextmanager
def by_hand(name: str, model: Any, method: Any, whole: Geometry) -> Iterator[None]:
    """The stock model with blocks on tokens that are merged by hand."""
    method = method if isinstance(method, Composition) else Composition(method)
    kind = ModuleOracle if getattr(method.merge, "placement", "block") == "module" else Oracle
    oracle = kind(name, method, whole)
    changed, layer = [], 0
    for kind_number, (kind, blocks) in enumerate(blocks_of(name, model)):
        for place, block in enumerate(blocks):
            group = method.merge.block_group(kind, place)
            key = None if group is None else (kind_number, group)
            block.forward = oracle.block(block, block.forward, key, layer)
            changed.append(block)
            layer += 1
    functional.scaled_dot_product_attention = oracle.attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = DENSE
        for block in changed:
            del block.forward


def geometry_of(name: str, grid: Grid, references: tuple[Grid, ...] = ()) -> Geometry:
    return max(geometries(name, grid, 1, references).values(), key=lambda layout: layout.num_tokens)


def check(name: str, method: Any, grid: Grid, batch: int, references: tuple[Grid, ...] = ()) -> None:
    make, inputs_of = MODELS[name]
    extra = (references,) if references else ()
    model, inputs = make().double(), double(inputs_of(grid, batch, *extra))
    stock = run(model, inputs)
    with by_hand(name, model, method, geometry_of(name, grid, references)):
        expected = run(model, inputs)
    with nearfield.apply(model, method):
        found = run(model, inputs)
    assert_same(found, expected)
    assert_differ(found, stock)


# -- what is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_hard_assignment_is_that_made_by_hand(name: str) -> None:
    check(name, HARD, (9, 14), 2)


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_matched_tokens_are_those_matched_by_hand(name: str) -> None:
    references: tuple[Grid, ...] = ((4, 5),) if name == "flux" else ()
    check(name, BipartiteMerge(0.6, skip_blocks=(1, 1), size_bias=True), (7, 8), 2, references)


@pytest.mark.parametrize("name", ["flux", "sd3", "sdxl"])
def test_soft_shares_and_sizes_are_those_made_by_hand(name: str) -> None:
    check(name, Merge(0.4, region="window", region_size=16, skip_blocks=(0, 1), size_bias=True), (12, 10), 2)


def test_groups_of_blocks_have_maps_of_their_own() -> None:
    check("flux", Merge(region="global", groups=2, skip_blocks=(0, 0)), (6, 8), 1)


@pytest.mark.parametrize("name", ["flux", "flux2", "qwen"])
def test_reference_images_are_merged_by_themselves(name: str) -> None:
    check(name, HARD, (9, 8), 2, ((7, 11), (4, 4)))


@pytest.mark.parametrize("name", NAMES)
def test_ratio_zero_is_the_stock_model(name: str) -> None:
    """In another order of tokens, whose sums differ in the last bits; in the same order, bit for bit."""
    make, inputs_of = MODELS[name]
    model, inputs = make(), inputs_of((9, 14), 2)
    stock = run(model, inputs)
    with nearfield.apply(model, Merge(ratio=0, skip_blocks=(0, 0))):
        assert (run(model, inputs) - stock).abs().max() <= 1e-5 * stock.abs().max()
    with nearfield.apply(model, Merge(ratio=0, region="global", skip_blocks=(0, 0))):
        assert torch.equal(run(model, inputs), stock)
    with nearfield.apply(model, ALL):
        assert_differ(run(model, inputs), stock)


@pytest.mark.parametrize("name", ["flux", "sd3", "sdxl"])
def test_samples_do_not_see_each_other(name: str) -> None:
    make, inputs_of = MODELS[name]
    model, two = make().double(), double(inputs_of((9, 8), 2))
    with nearfield.apply(model, HARD):
        together = run(model, two)
        for sample in range(2):
            one = {
                key: value[sample : sample + 1]
                if isinstance(value, Tensor) and key not in ("img_ids", "txt_ids")
                else value
                for key, value in two.items()
            }
            if "added_cond_kwargs" in two:
                one["added_cond_kwargs"] = {
                    key: value[sample : sample + 1] for key, value in two["added_cond_kwargs"].items()
                }
            assert_same(run(model, one), together[sample : sample + 1])


def test_equal_tokens_of_an_image_lose_nothing() -> None:
    """Every token is like its neighbours, so merging them changes nothing but where they are."""
    model = tiny_models.sd3(dual=()).double()
    inputs = double(tiny_models.sd3_inputs((8, 8)))
    inputs["hidden_states"] = torch.ones_like(inputs["hidden_states"])
    model.pos_embed.pos_embed.zero_()
    stock = run(model, inputs)
    with nearfield.apply(model, Merge(0.75, region_size=16, skip_blocks=(0, 0), size_bias=True)):
        assert_same(run(model, inputs), stock)


# -- module by module ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_merged_as_by_hand(name: str) -> None:
    check(name, replace(HARD, placement="module"), (9, 14), 2)


@pytest.mark.parametrize("name", ["flux", "flux2", "sd3", "sdxl"])
def test_modules_with_soft_shares_and_sizes_are_those_made_by_hand(name: str) -> None:
    method = Merge(0.4, "window", 16, skip_blocks=(0, 1), size_bias=True, placement="module")
    check(name, method, (12, 10), 2)


@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_modules_read_along_the_shorter_curve(name: str) -> None:
    merge = Merge(0.5, region_size=16, skip_blocks=(1, 1), size_bias=True, placement="module")
    check(name, merge | SPARSE, (12, 14), 2)


def test_modules_of_reference_images_are_merged_by_themselves() -> None:
    check("flux", replace(HARD, placement="module"), (9, 8), 2, ((7, 11), (4, 4)))


@pytest.mark.parametrize("name", NAMES)
def test_modules_at_ratio_zero_are_the_stock_model(name: str) -> None:
    make, inputs_of = MODELS[name]
    model, inputs = make(), inputs_of((9, 14), 2)
    stock = run(model, inputs)
    whole = Merge(ratio=0, region="global", skip_blocks=(0, 0), placement="module")
    with nearfield.apply(model, whole):
        assert torch.equal(run(model, inputs), stock)
    with nearfield.apply(model, replace(ALL, placement="module")):
        by_module = run(model, inputs)
    with nearfield.apply(model, ALL):
        assert_differ(run(model, inputs), by_module)
    assert torch.equal(run(model, inputs), stock)


# -- with sparse attention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "qwen", "sdxl"])
@pytest.mark.parametrize("share", ["two-way", "keys"])
def test_attention_reads_along_the_shorter_curve(name: str, share: Any) -> None:
    attention = paper(tiles=4, shared_tokens=16, share=share, dense_layers=0, dense_steps=0)
    check(name, Merge(0.5, region_size=16, skip_blocks=(1, 1), size_bias=True) | attention, (12, 14), 2)


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["flux", "flux2"])
def test_kernels_merge_part_and_rotate_as_plain_torch_does(
    name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    from nearfield.ops.merge.triton import regions
    from nearfield.ops.rotary.triton import rotate

    calls: Counter[str] = Counter()
    for module, function in ((regions, "multiply_into"), (rotate, "rotate")):
        right = getattr(module, function)

        def counted(*call: Any, right: Any = right, function: str = function) -> Any:
            calls[function] += 1
            return right(*call)

        monkeypatch.setattr(module, function, counted)
    make, inputs_of = MODELS[name]
    model = make().to(device)
    inputs = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in inputs_of((4, 6), 1).items()}
    found = {}
    for impl in ("grouped", "triton"):
        with nearfield.apply(model, ALL, impl=impl):
            found[impl] = run(model, inputs)
        assert bool(calls) == (impl == "triton")
    blocks = sum(len(some) for _, some in blocks_of(name, model))
    # There and back, in regions of 16 and of 8; queries and keys.
    assert calls == {"multiply_into": 4 * blocks, "rotate": 2 * blocks}
    with nearfield.apply(model.double(), ALL):
        exact = run(model, double(inputs))
    assert_budget("output", found["triton"], exact, found["grouped"])
