"""The words of `Handle.summary`."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nearfield.diffusers.merged_blocks import Block
from nearfield.diffusers.models.spec import Move
from nearfield.diffusers.region import Region
from nearfield.diffusers.steps import SchedulerState
from nearfield.methods import Composition, Memory
from nearfield.ops import ReadStats, explain_choice
from nearfield.parallel import Shapes, SplitLayer
from nearfield.session import Pairs, TokenLayout, TokenState, has_dense_steps

_NAMED = 4


def summary(
    models: Sequence[nn.Module],
    regions: Sequence[Region],
    places: Sequence[TokenLayout | None],
    method: Composition,
    steps: SchedulerState,
    origin: str,
) -> str:
    """All of it. `places` are the tokens to tell about, region by region, and `origin` says where they come from."""
    if not models:
        return "nearfield: removed; nothing is changed"
    lines = [f"nearfield: {method.label}"]
    for model in models:
        mine = [
            (region, place)
            for region, place in zip(regions, places, strict=True)
            if region.part.root is model
        ]
        lines += [type(model).__name__, *(f"  {line}" for line in _model_lines(mine, method, steps, origin))]
    return "\n".join(lines)


def _model_lines(
    parts: Sequence[tuple[Region, TokenLayout | None]],
    method: Composition,
    steps: SchedulerState,
    origin: str,
) -> list[str]:
    regions = [region for region, _ in parts]
    lines = [
        _changed_words(regions),
        *_layer_lines(regions),
        *_block_lines(regions),
        _step_words(method, steps),
        *_lora_lines(regions, method, steps),
        *_refresh_lines(method, steps),
        *_map_lines(method, steps),
        *_dense_call_lines(regions),
    ]
    known = [(region, place) for region, place in parts if place is not None]
    if not known:
        return [*lines, "geometry: not known before the first call; ask with summary(height=..., width=...)"]
    return lines + _geometry_lines(known, method, steps, origin)


def _lora_lines(regions: Sequence[Region], method: Composition, steps: SchedulerState) -> list[str]:
    has_lora = any(region.part.lora is not None for region in regions)
    rests = steps.scheduler is not None and has_dense_steps(method)
    return ["LoRA: rests in dense steps"] if has_lora and rests else []


def _changed_words(regions: Sequence[Region]) -> str:
    changed = sum(layer.is_ours for region in regions for layer in region.layers)
    places: dict[str, list[str]] = {"enter": [], "leave": []}
    for move in regions[0].part.spec.moves:
        places[move.way].append(_place_words(move))
    number = (
        f" of each of {len(regions)} {regions[0].part.spec.region}" if regions[0].part.spec.region else ""
    )
    enter, leave = (", ".join(names) for names in places.values())
    return f"changed: {changed} attention processors; tokens enter at {enter} and leave at {leave}{number}"


def _place_words(move: Move) -> str:
    if isinstance(move.what, str):
        return f"{move.place}({move.what})" if move.place else move.what
    return move.place if move.what is None else f"{move.place}[{move.what}]"


def _layer_lines(regions: Sequence[Region]) -> list[str]:
    layers = [layer for region in regions for layer in region.layers]
    sparse = sum(layer.is_sparse for layer in layers)
    lines = [f"attention: {sparse} sparse, {len(layers) - sparse} dense"]
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        if layer.dense is not None:
            reasons.setdefault(layer.dense, []).append(layer.name)
    for reason, names in reasons.items():
        lines.append(f"  dense, {reason}: {_some(names)}")
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _block_lines(regions: Sequence[Region]) -> list[str]:
    """Which blocks run on merged tokens."""
    mergers = [(region, region.merger) for region in regions if region.merger is not None]
    blocks = [(region, block) for region, merger in mergers for block in merger.blocks]
    if not blocks:
        return []
    merged = sum(block.group is not None for _, block in blocks)
    groups = sum(merger.num_groups for _, merger in mergers)
    lines = [f"blocks: {merged} on merged tokens, which share {groups} maps; {len(blocks) - merged} on all"]
    others = [region.part.path(block.name) for region, block in blocks if block.group is None]
    lines += [f"  on all tokens, skip_blocks: {_some(others)}"] if others else []
    parts = dict.fromkeys(part for _, block in blocks for part in block.parts)
    return lines + ([f"  merged one by one, after norms: {', '.join(parts)}"] if parts else [])


def _map_lines(method: Composition, steps: SchedulerState) -> list[str]:
    """When tokens are merged anew."""
    if method.merge is None:
        return []
    destinations, shares = method.merge.refresh
    if steps.scheduler is None:
        return ["maps: made anew in every call; without a scheduler nothing says that a loop goes on"]
    return [
        f"maps: destinations made anew every {destinations} steps, shares every {shares},"
        f" for each branch of guidance ({type(steps.scheduler).__name__})"
    ]


def _step_words(method: Composition, steps: SchedulerState) -> str:
    scheduler = steps.scheduler
    if not has_dense_steps(method):
        return "steps: all merged" if method.attention is None else "steps: all sparse"
    if scheduler is None:
        return "steps: all sparse; without a scheduler no step is known to be a first or last one (pass `scheduler=`)"
    total = steps.total()
    if total is None:
        return f"steps: some dense; how many there are is not known yet ({type(scheduler).__name__})"
    return f"steps: {_ends(*method.num_dense_steps(total))} of {total} dense ({type(scheduler).__name__})"


def _ends(first: int, last: int) -> str:
    words = [f"the {where} {number}" for where, number in (("first", first), ("last", last)) if number]
    return " and ".join(words) or "none"


def _refresh_lines(method: Composition, steps: SchedulerState) -> list[str]:
    """When a stateful method decides anew."""
    total = steps.total() if method.is_stateful else None
    if total is None:
        return []
    first, last = method.num_dense_steps(total)
    # Where it is due in a dense step, the next sparse one does it.
    due = {max(step, first) for step in method.refreshes(total)}
    places = sorted(step for step in due if step < total - last)
    return [
        f"  lists are made at {_counted(places)} of {total}, by full attention, for each branch of guidance"
    ]


def _counted(places: Sequence[int]) -> str:
    return f"step{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}" if places else "none"


def _dense_call_lines(regions: Sequence[Region]) -> list[str]:
    calls = sum((region.calls.dense for region in regions), Counter[str]())
    return [f"dense calls: {count}, {reason}" for reason, count in calls.items()]


def _geometry_lines(
    known: Sequence[tuple[Region, TokenLayout]], method: Composition, steps: SchedulerState, origin: str
) -> list[str]:
    lines = list[str]()
    prepared: list[tuple[Region, TokenState]] = []
    shown: set[TokenLayout] = set()
    choice = ""
    for region, layout in known:
        device = torch.device("cpu") if region.device.type == "meta" else region.device
        is_last = region.state is not None and region.state.layout == layout
        state = region.state if is_last and region.state else region.session.make(layout, device)
        prepared.append((region, state))
        geometry = region.session.geometry(layout)
        if layout not in shown:
            words = method.describe(geometry, device=device)
            lines += f"{origin}: {words}".splitlines()
            lines += _split_lines(region, state)
            shown.add(layout)
        choice = choice or _choice_words(region, state)
    pairs = Pairs.sum(region.session.pairs(state) for region, state in prepared)
    stats = [stats for region, _ in known if region.state for stats in region.state.stats]
    return [
        *lines,
        *_memory_lines(prepared),
        *_achieved_lines(stats, method),
        *_speed_lines(pairs, method, steps),
        *_work_lines(prepared),
        *filter(None, [choice]),
    ]


def _split_lines(region: Region, state: TokenState) -> list[str]:
    """Who holds which tokens, and what this rank sends."""
    ranks = region.part.ranks
    splits = [attention for attention in state.attentions if isinstance(attention, SplitLayer)]
    if ranks is None or not splits or not isinstance(state.dense_attention, SplitLayer):
        return []
    sparse = [
        attention
        for attention, layer in zip(state.attentions, region.layers, strict=True)
        if isinstance(attention, SplitLayer) and layer.is_sparse
    ]
    merged = [
        attention
        for attention, layer in zip(state.weighing, region.layers, strict=True)
        if isinstance(attention, SplitLayer) and layer.group is not None and state.regions is not None
    ]
    words = [
        f"{_mean_sent(region, state, some):.3g} MiB per {kind} layer"
        for kind, some in (("sparse", sparse), ("dense", [state.dense_attention]), ("merged dense", merged))
        if some
    ]
    origin = "  ranks are those of enable_parallelism, whose own split rests until remove()"
    return [
        f"split: {state.dense_attention.route.traffic.queries}",
        *([origin] if region.suspended.is_anything else []),
        f"  rank {ranks.index} sends {', '.join(words)} (forward, one sample)",
    ]


def _mean_sent(region: Region, state: TokenState, splits: Sequence[SplitLayer]) -> float:
    layer = next(layer for layer in region.layers if layer.is_ours)
    dtype = region.dtype or next(layer.attention.parameters()).dtype
    shapes = Shapes(1, layer.heads, layer.heads, layer.head_dim, dtype)
    geometry = region.session.geometry(state.layout)
    # Layers whose tiles lie alike have one plan, and need be counted but once.
    sizes = dict[int, int]()
    for attention in splits:
        has_bias = region.part.method.weighs and attention.plan.num_keys < geometry.num_tokens
        if id(attention.plan) not in sizes:
            sent = attention.bytes_sent(shapes._replace(has_bias=has_bias)).forward
            sizes[id(attention.plan)] = sent[attention.ranks.index]
    return sum(sizes[id(attention.plan)] for attention in splits) / len(splits) / 2**20


def _work(region: Region, state: TokenState) -> Iterator[tuple[float, float, float, float]]:
    """Multiplications in blocks that can merge: by weights as it is and with all tokens, in attention likewise."""
    if region.merger is None:
        return
    image, text = state.layout.num_image_tokens, state.layout.text
    for block in region.merger.blocks:
        full = left = _products(block, text, image, image)
        if state.regions is not None and block.group is not None:
            left = _products(block, text, image, state.regions.num_merged)
        yield left, full, 0, 0
    for layer, attention in zip(region.layers, state.attentions, strict=True):
        if layer.index is not None:
            tokens = region.session.geometry(state.layout, layer.sees_text).num_tokens
            known = state.num_read(layer, attention)
            read = state.num_pairs(layer) if known is None else known
            each = 2 * layer.heads * layer.head_dim  # a query times a key, a weight times a value
            yield 0, 0, read * each, tokens**2 * each


def _products(block: Block, text: int, image: int, merged: int) -> int:
    """Multiplications by weights in a block, for its tokens of text and image, some of which are merged."""
    facts, total = block.facts, 0
    for name, module in block.module.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        tokens = merged if not block.parts or _is_part(name, block.parts) else image
        tokens += text if facts.kind == "single" else 0
        if _is_part(name, facts.text_parts):
            tokens = text
        elif _is_part(name, facts.once_parts):
            tokens = 1
        total += module.weight.numel() * tokens
    return total


def _is_part(name: str, parts: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


def _work_lines(prepared: Sequence[tuple[Region, TokenState]]) -> list[str]:
    works = [work for region, state in prepared for work in _work(region, state)]
    if not works:
        return []
    products, all_products, attention, all_attention = (sum(each) for each in zip(*works, strict=True))
    whole, left = all_products + all_attention, products + attention
    return [
        f"matrix products of all blocks: {products / all_products:.1%}; with the pairs {left / whole:.1%} of the"
        f" operations, at most {whole / left:.2f}x faster"
    ]


def _memory_lines(prepared: Sequence[tuple[Region, TokenState]]) -> list[str]:
    """What a stateful method will take, and what it has taken."""
    memories = [memory for region, state in prepared for memory in _memories(region, state)]
    if not memories:
        return []
    num_bytes, limit = sum(memory.as_bits for memory in memories), memories[0].limit
    bound = "no bound" if limit is None else f"at most {limit:g} GiB on the device"
    line = (
        f"memory: {_size_words(num_bytes)} as bits, up to {_size_words(32 * num_bytes)} as lists, for each sample and"
        f" branch of guidance ({len(memories)} layers); {bound} (memory={limit})"
    )
    last = [memory for region, _ in prepared if region.state for memory in _memories(region, region.state)]
    taken = sum((memory.taken for memory in last), Counter[str]())
    words = ", ".join(f"{_size_words(size)} as {form}" for form, size in taken.items())
    return [line, *([f"  taken: {words}"] if words else [])]


def _memories(region: Region, state: TokenState) -> Iterator[Memory]:
    """What is kept in each layer."""
    for layer, attention in zip(region.layers, state.attentions, strict=True):
        memory = None if attention is None else attention.memory(layer.heads)
        if memory is not None:
            yield memory


def _size_words(num_bytes: float) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def _achieved_lines(found: Sequence[ReadStats], method: Composition) -> list[str]:
    full, sparse = sum(stats.num_full for stats in found), sum(stats.num_sparse for stats in found)
    if not full + sparse:
        return []
    is_cached = method.is_stateful
    since = "last generation" if is_cached else "calls so far"
    words = f"{full} of {full + sparse} attention calls full" if is_cached else f"{sparse} attention calls"
    if sparse:
        kept, dropped = (
            sum(getattr(stats, name) * stats.num_sparse for stats in found if stats.num_sparse) / sparse
            for name in ("kept", "dropped")
        )
        how = "measured when lists were made" if is_cached else "estimated by means"
        words += f"{', the others' if is_cached else ''} kept {kept:.1%} of the keys and dropped {dropped:.2%} of the"
        words += f" weights ({how})"
    return [f"{since}: {words}"]


def _speed_lines(pairs: Pairs, method: Composition, steps: SchedulerState) -> list[str]:
    if not pairs.there:
        return ["pairs: every layer is dense"]
    if pairs.read is None or pairs.kept is None:
        return ["pairs: chosen at calls by queries and keys, so not known before them"]
    share = pairs.read / pairs.there
    where = "sparse" if method.merge is None else "sparse and merged"
    lines = [
        f"pairs: {share:.1%} in {where} layers; attention at most {1 / share:.2f}x faster there,"
        f" {1 / pairs.kept:.2f}x with the dense layers"
    ]
    total = _total(method, steps)
    kept = pairs.kept_over(total, method)
    if total is not None and kept is not None:
        lines.append(f"  with dense steps {1 / kept:.2f}x over all {total} steps")
    return lines


def pairs_kept(regions: Sequence[Region], method: Composition, steps: SchedulerState) -> float | None:
    """The share of all pairs that calls like the last one read, over all layers and steps; None before the first."""
    states = [(region, region.state) for region in regions if region.state is not None]
    if len(states) < len(regions):
        return None
    pairs = Pairs.sum(region.session.pairs(state) for region, state in states)
    return pairs.kept_over(_total(method, steps), method)


def _total(method: Composition, steps: SchedulerState) -> int | None:
    """The number of steps, where some of them are dense and it is known."""
    return steps.total() if has_dense_steps(method) else None


def _choice_words(region: Region, state: TokenState) -> str:
    for layer, attention in zip(region.layers, state.attentions, strict=True):
        for plan in () if attention is None else attention.plans_like(state.device):
            heads = layer.heads
            dtype = region.dtype or next(layer.attention.parameters()).dtype
            query = torch.empty(1, plan.num_queries, heads, layer.head_dim, dtype=dtype, device=state.device)
            query = query.transpose(1, 2)
            choice = explain_choice(query, query, plan, impl=region.part.impl)
            return f"attend: {choice.impl}, {choice.reason}"
    return ""
