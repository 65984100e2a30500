"""One context over many ranks: each computes and keeps its own chunks; only scores and selected rows travel.

The question runs on every rank and reads the chunks there. Ranks exchange the outputs and their `lse`, as many as the
question has tokens. A selected row is computed on the rank that holds it: its queries go to the ranks before, and
partial results come back.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nearfield._checks import wrong_value
from nearfield._types import Attended, Positions
from nearfield.ops import attend, merge_attended
from nearfield.parallel import Ranks
from nearfield.plan import builders as planning
from nearfield.retrieval.chunks import Chunk, Context, cache_of, check_tokens, joined
from nearfield.retrieval.reading import run
from nearfield.retrieval.rotary import Turn, check_model, check_window
from nearfield.retrieval.selectors import InfoFlow, head_weights, select


class SharedContext:
    """Chunks of all ranks, one after another in the order of the ranks. Every call is made by all ranks alike.

    Args:
        chunks: this rank's own, at least one, all behind the same prefix. The first rank keeps the prefix.
        mesh: the ranks, in one dimension.

    Attributes:
        tokens, positions, cache: of the rows this rank holds.
        owner, lengths: of all rows and chunks.
    """

    def __init__(self, model: Any, chunks: Sequence[Chunk], mesh: DeviceMesh) -> None:
        check_model(model)
        if not len(chunks):
            wrong_value("chunks", "hold at least one chunk on every rank", "none")
        self.model, self.ranks = model, Ranks(mesh)
        prefix = chunks[0].tokens[: chunks[0].prefix_length]
        self.ranks.agree(prefix=prefix.tolist(), precision=model.dtype, layers=len(chunks[0].keys))
        everyones = self._everyones_lengths(chunks)
        sizes = [sum(lengths) for lengths in everyones]
        sizes[0] += len(prefix)
        check_window(model, sum(sizes))
        self.starts = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
        self.lengths = tuple(length for lengths in everyones for length in lengths)
        counts = torch.tensor(self.lengths, device=model.device)
        counts[0] += len(prefix)
        self.owner = torch.arange(len(counts), device=model.device).repeat_interleave(counts)
        self._hold(chunks, len(prefix))

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @property
    def bytes_sent(self) -> int:
        """By this rank, to others, so far."""
        return self.ranks.bytes_sent

    def score(self, question: Tensor, selector: InfoFlow | None = None) -> Tensor:
        """Scores `[T]` of all rows for a question, the same on every rank."""
        check_tokens(self.model, "question", question)
        selector = selector or InfoFlow()
        layers = selector.layers(len(self.cache.layers))
        reader = _Asking(self, len(question), layers, 2 if selector.norm == "l2" else 1)
        run(self.model, question.to(self.model.device), reader.places, reader)
        return self._whole(reader.scores / len(layers))

    def select(self, scores: Tensor, ratio: float = 0.15) -> Tensor:
        """The rows to recompute, as `select` chooses them."""
        return select(self, scores, ratio)

    def recompute(self, rows: Tensor) -> None:
        """Compute rows of the whole context again, each on the rank that holds it."""
        rows = rows.unique().to(self.model.device)
        if len(rows):
            reader = _Overwriting(self, rows)
            # Models do not run without a token, so a rank without selected rows runs one, and drops its result.
            here = reader.own if len(reader.own) else torch.zeros(1, dtype=torch.long, device=rows.device)
            run(self.model, self.tokens[here], self.positions[here], reader)

    def next_logits(self, question: Tensor) -> Tensor:
        """Logits `[vocabulary]` of the token after the question, on every rank. The cache is not changed."""
        check_tokens(self.model, "question", question)
        reader = _Asking(self, len(question), range(0), 2)
        logits = run(self.model, question.to(self.model.device), reader.places, reader, with_logits=True)
        assert logits is not None
        return logits

    def gather(self) -> Context:
        """The whole context on every rank, to generate from. No other call sends the cache itself."""
        layers = self.cache.layers
        keys = [self._whole(layer.keys[0], 1) for layer in layers]
        values = [self._whole(layer.values[0], 1) for layer in layers]
        positions = torch.arange(self.num_tokens, device=self.model.device)
        tokens, offset = self._whole(self.tokens), self._whole(self._offset)
        return Context(tokens, positions, self.owner, offset, self.lengths, cache_of(keys, values))

    def _whole(self, part: Tensor, dim: int = 0) -> Tensor:
        """Every rank's rows, one rank after another."""
        sizes = [stop - start for start, stop in pairwise(self.starts)]
        return torch.cat(self.ranks.all_gather(part, sizes, dim), dim)

    # -- what this rank holds ------------------------------------------------------------------------------------

    def _hold(self, chunks: Sequence[Chunk], prefix: int) -> None:
        """Move this rank's texts to their places."""
        device, index = self.model.device, self.ranks.index
        kept = [chunk.prefix_length for chunk in chunks]
        self._offset = torch.cat([torch.arange(chunk.length) for chunk in chunks]).to(device)
        source = prefix + self._offset
        if index == 0:  # its first chunk brings the prefix, which stands where it was made
            kept[0] = 0
            self._offset = torch.cat([self._offset.new_zeros(prefix), self._offset])
            source = torch.cat([torch.arange(prefix, device=device), source])
        texts = [chunk.tokens[start:] for chunk, start in zip(chunks, kept, strict=True)]
        self.tokens = torch.cat(texts).to(device)
        self.positions = torch.arange(self.starts[index], self.starts[index + 1], device=device)
        self.cache = cache_of(*joined(chunks, kept, Turn(self.model, source, self.positions), device))

    def _everyones_lengths(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        own = torch.tensor([chunk.length for chunk in chunks], device=self.model.device)
        counts = torch.cat(self.ranks.all_gather(own.new_tensor([len(own)]))).tolist()
        return [lengths.tolist() for lengths in self.ranks.all_gather(own, counts)]


class _Asking:
    """The question reads the rows of this rank, then what the other ranks read, then itself."""

    def __init__(self, shared: SharedContext, length: int, layers: range, order: int) -> None:
        device = shared.model.device
        self.places = shared.num_tokens + torch.arange(length, device=device)
        self.scores = torch.zeros(len(shared.tokens), device=device)
        self._shared, self._layers, self._order = shared, layers, order
        self._far = planning.full(length, len(shared.tokens), device=device)
        self._near = planning.full(length, length, device=device)
        self._own = Positions(self.places[None], self.places[None])

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        cached = self._shared.cache.layers[layer]
        here = attend(query, cached.keys, cached.values, self._far, scale=scale)
        itself = attend(query, key, value, self._near, positions=self._own, scale=scale)
        outs, logs = map(self._shared.ranks.all_gather, here)
        whole = reduce(merge_attended, [*map(Attended, outs, logs), itself])
        if layer in self._layers:
            weights = head_weights(query, cached.keys, scale, whole.lse)
            self.scores = self.scores + torch.linalg.vector_norm(weights, self._order, dim=0)
        if self._layers and layer == self._layers[-1]:
            return None
        return whole.out


class _Overwriting:
    """Recomputes selected rows: each rank writes its own, and reads its keys for the ranks after it."""

    def __init__(self, shared: SharedContext, rows: Tensor) -> None:
        self._shared = shared
        starts, index = shared.starts, shared.ranks.index
        own = (rows >= starts[index]) & (rows < starts[index + 1])
        self.own = rows[own] - starts[index]
        bounds = torch.searchsorted(rows, torch.tensor(starts, device=rows.device)).tolist()
        self._counts = [stop - start for start, stop in pairwise(bounds)]
        self._readers = rows[bounds[index] :]  # rows of this rank and of those after it
        self._positions = Positions(self._readers[None], shared.positions[None])
        keys = len(shared.tokens)
        self._plan = (
            planning.full(len(self._readers), keys, device=rows.device) if len(self._readers) else None
        )

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        count, cached = len(self.own), self._shared.cache.layers[layer]
        cached.keys.index_copy_(2, self.own, key[:, :, :count].to(cached.keys))
        cached.values.index_copy_(2, self.own, value[:, :, :count].to(cached.values))
        if layer == len(self._shared.cache.layers) - 1:
            return None
        queries = self._queries(query[:, :, :count])
        if self._plan is not None:
            here = attend(
                queries, cached.keys, cached.values, self._plan, positions=self._positions, scale=scale
            )
        else:  # neither this rank nor one after it has a row
            here = Attended(queries, queries[..., 0])
        out = self._returned(here)
        return out if count else torch.zeros_like(query)

    def _queries(self, query: Tensor) -> Tensor:
        """Queries of this rank and of those after it."""
        ranks, index = self._shared.ranks, self._shared.ranks.index
        outgoing = [query if rank <= index else query[:, :, :0] for rank in range(ranks.size)]
        shapes = [
            (*query.shape[:2], count * (rank >= index), query.shape[3])
            for rank, count in enumerate(self._counts)
        ]
        return torch.cat(ranks.all_to_all(outgoing, shapes), 2)

    def _returned(self, read: Attended) -> Tensor:
        """Send results to later ranks, and merge the results of earlier ranks for this one."""
        ranks, index = self._shared.ranks, self._shared.ranks.index
        sides = []
        for side in read:
            outgoing = [side[:, :, :0]] * index + list(side.split(self._counts[index:], 2))
            own = outgoing[index]
            shapes = [own.shape if rank <= index else own[:, :, :0].shape for rank in range(ranks.size)]
            sides.append(ranks.all_to_all(outgoing, shapes)[: index + 1])
        return reduce(merge_attended, map(Attended, *sides)).out
