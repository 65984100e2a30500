"""Answers from documents whose keys and values were computed before: all steps in one call, with a report."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from nearfield._checks import check_int, wrong_type, wrong_value
from nearfield.retrieval.chunks import Chunk, Context, assemble, check_tokens, prefill_chunk
from nearfield.retrieval.clock import Clock
from nearfield.retrieval.fingerprint import Fingerprints, chunk_id
from nearfield.retrieval.prompt import (
    Prompt,
    chat_prompt,
    check_tokenizer,
    prefix_ids,
    question_ids,
    token_ids,
)
from nearfield.retrieval.recomputing import recompute
from nearfield.retrieval.rotary import check_model
from nearfield.retrieval.selectors import (
    InfoFlow,
    Selector,
    SelectorName,
    best_last,
    check_ratio,
    chunk_shares,
    score,
    select,
    selector_of,
)
from nearfield.retrieval.store import ChunkStore, DamagedChunk, MissingChunk

_CHANGED = "The model has changed since the document was added."
_ONE_ANSWER = ("num_beams", "num_return_sequences")
_OURS = ("input_ids", "inputs", "inputs_embeds", "attention_mask", "position_ids", "past_key_values")


@dataclass(frozen=True, eq=False)
class Report:
    """How an answer was made, and what it cost.

    Args:
        selector, ratio: how rows were selected, and the share of rows that was allowed.
        chunks: ids in the order of the prompt.
        lengths, selected: the number of tokens of each chunk, and of its recomputed ones.
        ranks: the rank of each chunk by the share of its tokens among the best scores, 0 for the best; empty where
            there are no scores.
        rows: the rows of the context that were recomputed.
        question_tokens: the number of tokens after the documents.
        context_tokens: the number of tokens before them, with the prefix.
        seconds: the time of each step. In a batch "load", "assemble" and "generate" are times of all questions.
        loaded_bytes, cache_bytes: the size of the chunks, and of the cache that generation began with.
        rebuilt: by id, why chunks were computed anew.
    """

    selector: str
    ratio: float
    chunks: tuple[str, ...]
    lengths: tuple[int, ...]
    selected: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: Tensor
    question_tokens: int
    context_tokens: int
    seconds: Mapping[str, float]
    loaded_bytes: int
    cache_bytes: int
    rebuilt: Mapping[str, str]

    @property
    def reused_tokens(self) -> int:
        """The number of rows of the context that were not recomputed."""
        return self.context_tokens - len(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"rows": self.rows.tolist(), "reused_tokens": self.reused_tokens}

    def __str__(self) -> str:
        share = self.reused_tokens / self.context_tokens
        lines = [
            f"{len(self.chunks)} chunks, {self.context_tokens} tokens, {share:.0%} reused, {len(self.rows)} computed"
            f" again ({self.selector}); {self.question_tokens} tokens of question",
            "seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items()),
            f"bytes: {self.loaded_bytes:,} loaded, {self.cache_bytes:,} in the cache",
        ]
        lines += [f"rebuilt {identity}: {reason}" for identity, reason in self.rebuilt.items()]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Answer:
    """What the model answers, with a report."""

    text: str
    report: Report


class Reuse:
    """A model that answers from documents whose keys and values are kept.

    Args:
        model: a decoder of Hugging Face transformers with rotary positions; check it with `verify`.
        store: where chunks are kept; by default in memory.
        prompt: the texts around documents and question; by default those of the tokenizer's chat template.
        separator: the end of every document that is given as text.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        store: ChunkStore | None = None,
        *,
        prompt: Prompt | None = None,
        separator: str = "\n\n",
    ) -> None:
        check_model(model)
        check_tokenizer(tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.store = ChunkStore() if store is None else store
        self.prompt = chat_prompt(tokenizer) if prompt is None else prompt
        self.separator = separator
        self.prefix = prefix_ids(tokenizer, self.prompt)
        self._documents: dict[str, Tensor] = {}
        self._fingerprints = Fingerprints()
        self._fingerprints.of(model, self.prefix)

    @property
    def facts(self) -> dict[str, str]:
        """The fingerprint of the model as it is now; weights are read again where they have changed."""
        return self._fingerprints.of(self.model, self.prefix)

    # -- documents -----------------------------------------------------------------------------------------------

    def add(self, document: str | Tensor) -> str:
        """Compute a document's keys and values, unless the store has them; returns the id of its chunk.

        Where a chunk cannot be stored, as on a full disk, this warns, and answers compute the document anew.

        Args:
            document: a text, or token ids as `split` gives them.
        """
        tokens = self._tokens(document)
        facts = self.facts
        identity = chunk_id(facts, tokens)
        if identity not in self.store:
            _, failure = self._stored(identity, tokens, facts)
            if failure:
                warnings.warn(f"{identity}{failure}", RuntimeWarning, stacklevel=2)
        self._documents[identity] = tokens
        return identity

    def split(self, document: str, length: int) -> list[Tensor]:
        """Cut a long document into parts of at most `length` token ids, as equal as possible, to be added one by one.

        Because ids are cut and not text, the parts together are the document's tokens.
        """
        check_int("length", length, at_least=1)
        tokens = self._tokens(document)
        return list(tokens.tensor_split(-(-len(tokens) // length)))

    def chunks(self, identities: Sequence[str]) -> list[Chunk]:
        """The chunks of some ids. Missing, damaged and outdated ones are computed anew."""
        return self._chunks(identities, {})

    def _tokens(self, document: str | Tensor) -> Tensor:
        if isinstance(document, str):
            ended = document if document.endswith(self.separator) else document + self.separator
            document = token_ids(self.tokenizer, ended)
        elif not isinstance(document, Tensor):
            wrong_type("document", "be a text or token ids", type(document).__name__)
        check_tokens(self.model, "document", document)
        return document.cpu().long()

    def _stored(self, identity: str, tokens: Tensor, facts: Mapping[str, str]) -> tuple[Chunk, str]:
        """Compute and store a chunk. Returns it, and why it could not be stored, which is no reason to fail."""
        device = self.model.device
        chunk = prefill_chunk(self.model, tokens.to(device), self.prefix.to(device))
        try:
            self.store.put(identity, chunk, facts)
        except OSError as error:
            return chunk, f" could not be stored: {error}."
        return chunk, ""

    def _chunks(self, identities: Sequence[str], rebuilt: dict[str, str]) -> list[Chunk]:
        if isinstance(identities, str):
            wrong_type("chunks", "be a list of ids", "one string", "Write [id].")
        facts = self.facts
        return [self._chunk(identity, facts, rebuilt) for identity in identities]

    def _chunk(self, identity: str, facts: Mapping[str, str], rebuilt: dict[str, str]) -> Chunk:
        """The chunk of a document for the present model. `identity` may be from before the model changed."""
        tokens = self._documents.get(identity)
        current = identity if tokens is None else chunk_id(facts, tokens)
        try:
            return self.store.get(current, facts)
        except (DamagedChunk, MissingChunk) as error:
            if tokens is None:
                raise
            is_outdated = current != identity and isinstance(error, MissingChunk)
            rebuilt[identity] = _CHANGED if is_outdated else str(error)
        chunk, failure = self._stored(current, tokens, facts)
        rebuilt[identity] += failure and f" It{failure}"
        return chunk

    # -- answers -------------------------------------------------------------------------------------------------

    def answer(
        self,
        question: str,
        chunks: Sequence[str],
        ratio: float = 0.15,
        selector: Selector | SelectorName = "infoflow",
        reorder: bool = False,
        **generate_kwargs: Any,
    ) -> Answer:
        """Answer a question from chunks.

        Args:
            chunks: ids, in the order of the prompt.
            ratio: the share of tokens that may be recomputed.
            selector: decides which tokens are recomputed.
            reorder: put the chunks that the question attends to most last, next to the question. For passages that
                do not depend on each other's order.
            generate_kwargs: options of the model's `generate`. By default it is greedy, with at most 64 tokens.
        """
        return self.answers([question], chunks, ratio, selector, reorder, **generate_kwargs)[0]

    def answers(
        self,
        questions: Sequence[str],
        chunks: Sequence[str],
        ratio: float = 0.15,
        selector: Selector | SelectorName = "infoflow",
        reorder: bool = False,
        **generate_kwargs: Any,
    ) -> list[Answer]:
        """Answer several questions from the same chunks, which are loaded and put together once.

        Each question has its own recomputed rows, and so its own copy of the cache.
        """
        check_ratio(ratio)
        _check_options(generate_kwargs)
        if isinstance(questions, str) or not len(questions):
            wrong_value("questions", "be a list of at least one question", repr(questions))
        chosen = selector_of(selector)
        asked = [question_ids(self.tokenizer, self.prompt, question) for question in questions]
        asked = [ids.to(self.model.device) for ids in asked]
        clock = Clock(self.model.device)
        rebuilt: dict[str, str] = {}
        with clock.step("load"):
            loaded = self._chunks(chunks, rebuilt)
        with clock.step("assemble"):
            plain = assemble(self.model, loaded)
        copies = [plain if reorder else plain.copy() for _ in asked[1:]]
        made = [
            self._prepared(loaded, context, ids, ratio, chosen, reorder)
            for context, ids in zip([*copies, plain], asked, strict=True)
        ]
        cache_bytes = sum(one.context.num_bytes for one in made)
        with clock.step("generate"):
            texts = self._generated([one.context for one in made], asked, generate_kwargs)
        before = {name: clock.seconds[name] for name in ("load", "assemble")}
        return [
            Answer(
                text,
                Report(
                    selector=type(chosen).__name__,
                    ratio=one.ratio,
                    chunks=tuple(chunks[index] for index in one.order),
                    lengths=one.context.lengths,
                    selected=one.selected,
                    ranks=one.ranks,
                    rows=one.rows,
                    question_tokens=len(ids),
                    context_tokens=one.context.num_tokens,
                    seconds=before | one.seconds | {"generate": clock.seconds["generate"]},
                    loaded_bytes=sum(chunk.num_bytes for chunk in loaded),
                    cache_bytes=cache_bytes,
                    rebuilt=rebuilt,
                ),
            )
            for text, one, ids in zip(texts, made, asked, strict=True)
        ]

    def _prepared(
        self,
        chunks: list[Chunk],
        context: Context,
        question: Tensor,
        ratio: float,
        selector: Selector,
        reorder: bool,
    ) -> "_Prepared":
        """The context of one question, ready to generate from."""
        clock, order = Clock(self.model.device), list(range(len(chunks)))
        if reorder:
            with clock.step("reorder"):
                order = self._order(chunks, question, ratio, selector)
                context = assemble(self.model, [chunks[index] for index in order])
        if selector.fixed_ratio is not None:
            ratio = selector.fixed_ratio
        with clock.step("score"):
            scores = score(self.model, context, question, selector)
        with clock.step("select"):
            rows = select(context, scores, ratio)
        with clock.step("recompute"):
            recompute(self.model, context, rows)
        ranks: tuple[int, ...] = ()
        if selector.fixed_ratio is None:
            best_first = best_last(chunk_shares(context, scores, ratio))[::-1]
            ranks = tuple(best_first.index(index) for index in range(len(chunks)))
        counts = torch.bincount(context.owner[rows], minlength=len(chunks)).tolist()
        return _Prepared(context, ratio, order, rows.cpu(), tuple(counts), ranks, clock.seconds)

    def _order(self, chunks: list[Chunk], question: Tensor, ratio: float, selector: Selector) -> list[int]:
        """The order of chunks by the question's attention under local positions."""
        local = assemble(self.model, chunks, geometry="local")
        judge = selector if isinstance(selector, InfoFlow) else InfoFlow()
        return best_last(chunk_shares(local, score(self.model, local, question, judge), ratio))

    def _generated(
        self, contexts: list[Context], questions: list[Tensor], options: dict[str, Any]
    ) -> list[str]:
        """Generate in one batch, of which every row is context, padding, question. Padding is masked."""
        model, device = self.model, self.model.device
        longest = max(map(len, questions))
        pad = model.generation_config.pad_token_id
        filler = pad if pad is not None else int(questions[0][0])
        rows, masks = [], []
        for context, question in zip(contexts, questions, strict=True):
            padding = torch.full((longest - len(question),), filler, device=device)
            rows.append(torch.cat([context.tokens, padding, question]))
            masks.append(torch.ones_like(rows[-1]))
            masks[-1][context.num_tokens :][: len(padding)] = 0
        prompt, mask = torch.stack(rows), torch.stack(masks)
        options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": filler} | options
        if options.get("max_length") is not None:
            options.pop("max_new_tokens")
        cache = contexts[0].cache if len(contexts) == 1 else _stacked(contexts)
        output = model.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
        sequences = getattr(output, "sequences", output)[:, prompt.shape[1] :]
        return [str(text) for text in self.tokenizer.batch_decode(sequences, skip_special_tokens=True)]


class _Prepared(NamedTuple):
    """What was done for one question; for the fields see `Report`."""

    context: Context
    ratio: float
    order: list[int]
    rows: Tensor
    selected: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: dict[str, float]


def _stacked(contexts: Sequence[Context]) -> Any:
    layers = zip(*(context.cache.layers for context in contexts), strict=True)
    return DynamicCache(
        [
            (torch.cat([one.keys for one in layer]), torch.cat([one.values for one in layer]))
            for layer in layers
        ]
    )


def _check_options(options: Mapping[str, Any]) -> None:
    for name in _OURS:
        if name in options:
            wrong_value("generate_kwargs", f"leave `{name}` to nearfield", name)
    for name in _ONE_ANSWER:
        if options.get(name) not in (None, 1):
            wrong_value(name, "be 1", options[name], "A question gets one answer.")
