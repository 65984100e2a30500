"""Sparse attention in a ComfyUI model, through two places that ComfyUI offers for that.

A wrapper around the call of a model (`WrappersMP.APPLY_MODEL`) sees the latent and so knows the grid. It hands the
model an `optimized_attention_override`, which takes over the attention calls of that one call. Tokens are put in order
inside each of them: a wrapper sees latents only, models make their positions inside, and other nodes expect tokens in
raster order between the layers.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield import Geometry, Method, Ordering
from nearfield.methods import Composition, Moment
from nearfield.session import (
    Layer,
    Session,
    TokenLayout,
    attention_modules,
    has_dense_steps,
    is_dense_step,
    key_bias,
)

from .models import known_model, layout_of

OVERRIDE = "optimized_attention_override"
_SAME_SIGMA = 1 + 1e-4  # schedules step much wider than they are rounded
_log = logging.getLogger("nearfield.comfyui")


class SparseModel:
    """The wrapper: every call of the model reads as the method says, in one session."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.session: Session | None = None
        self._told: set[str] = set()

    def __call__(
        self,
        executor: Any,
        latent: Tensor,
        sigma: Tensor,
        c_concat: Any = None,
        c_crossattn: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **conditions: Any,
    ) -> Any:
        options = dict(transformer_options or {})
        model = executor.class_obj.diffusion_model
        known, spec = known_model(model)
        if self.session is None:
            found = attention_modules(model, known.layers, known.image_only)
            self.session = session_of(self.method, [sees_text for _, _, sees_text in found])
        layout = layout_of(spec, model, latent, c_crossattn, conditions)
        step = self._step(sigma, options)
        call = SparseCall(self.method, self.session, layout, step, options.get(OVERRIDE))
        options[OVERRIDE] = call
        out = executor(latent, sigma, c_concat, c_crossattn, control, options, **conditions)
        self._tell(call)
        return out

    def _step(self, sigma: Tensor, options: Mapping[str, Any]) -> Moment | None:
        """Where the loop stands, where the method asks for it."""
        if not self.method.is_stateful and not has_dense_steps(self.method):
            return None
        return moment_of(sigma, options.get("sample_sigmas"), str(options.get("cond_or_uncond", "")))

    def _tell(self, call: "SparseCall") -> None:
        """What a call was like, once for each kind of call."""
        words = call.summary()
        if words in self._told:
            return
        self._told.add(words)
        _log.log(logging.INFO if call.calls else logging.WARNING, "nearfield: %s", words)


def session_of(method: Method, sees_text: Sequence[bool]) -> Session:
    """A session for layers that see the text, or do not. ComfyUI says only in calls how many heads they have."""
    layers = [
        Layer(index, 0, sees, method.dense_layer_reason(index, len(sees_text)), None)
        for index, sees in enumerate(sees_text)
    ]
    return Session(Composition.of(method), layers, is_ordered_once=False)


class SparseCall:
    """The attention of one call of a model.

    Args:
        layout: the tokens to be read sparsely; None where nothing is.
        step: where the denoising loop stands; None where nobody asks or nobody knows.
        before: an override that was there already; it serves the dense calls.
    """

    def __init__(
        self,
        method: Method,
        session: Session,
        layout: TokenLayout | None,
        step: Moment | None = None,
        before: Callable[..., Tensor] | None = None,
    ) -> None:
        self.method, self.session, self.layout = method, session, layout
        self.step, self.before = step, before
        self.geometries: dict[int, Geometry] = {}
        """The sequences of layers, by length; every other call is left alone."""
        for layer in session.layers if layout is not None else ():
            geometry = session.geometry(layout, layer.sees_text)
            self.geometries[geometry.num_tokens] = geometry
        self.calls: Counter[str] = Counter()
        self._left = iter(session.layers)
        self._is_prepared = False
        self._mask: Tensor | None = None
        self._mask_hides_image = False

    @torch.compiler.disable  # plans are made here, and calls counted: nothing for a graph of tensors
    def __call__(self, attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        call = Attention.of(*args, **kwargs)
        geometry = self.geometries.get(call.num_queries) if call.num_queries == call.num_keys else None
        if geometry is not None:
            index = self._next(geometry)
            reason = self._dense_reason(call, geometry, index)
            self.calls[reason or "sparse"] += 1
            if reason is None and index is not None:
                return self._sparse(call, geometry, index)
        if self.before is not None:
            return self.before(attention, *args, **kwargs)
        return attention(*args, **kwargs)

    def _next(self, geometry: Geometry) -> int | None:
        """The next layer with such a sequence; None where none is left."""
        assert self.layout is not None
        sees_text = geometry == self.session.geometry(self.layout)
        return next((layer.index for layer in self._left if layer.sees_text == sees_text), None)

    def _dense_reason(self, call: "Attention", geometry: Geometry, index: int | None) -> str | None:
        if index is None:
            return "dense, more than the model has layers"
        if is_dense_step(self.method, self.step):
            return f"dense, dense_steps={self.method.dense_steps}"
        if self.method.is_stateful and self.step is None:
            return "dense, the sampler does not say at which step it is"
        if call.has_own_masks:
            return "dense, a mask that differs between queries"
        if not self.method.weighs_image_keys and self._hides_image(call.mask, geometry):
            return "dense, a mask that hides image tokens, of which summaries of a far field know nothing"
        if call.has_shared_heads:
            return "dense, heads share keys"
        reason = self.session.layers[index].dense
        return reason and f"dense, {reason}"

    def _hides_image(self, mask: Tensor | None, geometry: Geometry) -> bool:
        """Whether more than text is hidden. Waits for the device, once for all layers that have the same mask."""
        if mask is None:
            return False
        if mask is not self._mask:
            start, stop = geometry.text_span
            image = torch.cat([mask[..., :start], mask[..., stop:]], dim=-1)
            self._mask = mask
            self._mask_hides_image = bool((~image if image.dtype == torch.bool else image != 0).any())
        return self._mask_hides_image

    def _sparse(self, call: "Attention", geometry: Geometry, index: int) -> Tensor:
        if not self._is_prepared:
            assert self.layout is not None
            self.session.set_heads(call.heads)
            self.session.prepare(self.layout, call.query.device, len(call.query))
            if self.step is not None:
                self.session.begin(self.step)
            self._is_prepared = True
        state = self.session.state
        assert state is not None
        attention, images = state.attentions[index], state.orders[self.session.layers[index].sees_text]
        assert attention is not None
        assert isinstance(images, Ordering)
        order = _behind_text(images, geometry.text)
        query, key, value = (call.entered(x, order) for x in (call.query, call.key, call.value))
        bias = call.key_bias(order)
        return call.left(attention.attend(query, key, value, key_bias=bias, scale=call.scale).out, order)

    def summary(self) -> str:
        if not self.calls:
            expected = " or ".join(map(str, self.geometries.values())) or "an image larger than its text"
            return (
                f"no attention call had the tokens of {expected}, so nothing was sparse. Another node may have added"
                " tokens or taken the attention over, or this ComfyUI is older than `optimized_attention_override`."
            )
        largest = max(self.geometries.items())[1]
        return f"{largest}: " + "; ".join(f"{count} calls {words}" for words, count in self.calls.items())


class Attention(NamedTuple):
    """The arguments of one of ComfyUI's attention functions.

    `query`, `key`, `value` are `[B, N, H * D]` or `[B, N, H, D]`, and where `is_split` `[B, H, N, D]`. The result is
    `[B, N, H * D]`, and where `leaves_split` `[B, H, N, D]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    heads: int
    mask: Tensor | None
    is_split: bool
    leaves_split: bool
    scale: float | None
    has_shared_heads: bool

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> "Attention":
        return cls(q, k, v, heads, mask, skip_reshape, skip_output_reshape, scale, enable_gqa)

    @property
    def num_queries(self) -> int:
        return self.query.shape[2 if self.is_split else 1]

    @property
    def num_keys(self) -> int:
        return self.key.shape[2 if self.is_split else 1]

    @property
    def has_own_masks(self) -> bool:
        return self.mask is not None and self.mask.shape[-2:] != (1, self.num_keys)

    def key_bias(self, ordering: Ordering) -> Tensor | None:
        """A mask that is the same for all queries, as a bias on the keys in their order, `[B, H or 1, M]`."""
        if self.mask is None:
            return None
        mask = ordering.enter(self.mask, dim=-1)
        # ComfyUI's masks are [1, M], with a batch [B, 1, M], with heads [B, H, 1, M].
        return key_bias(mask if mask.dim() == 4 else mask.reshape(-1, 1, 1, mask.shape[-1]))

    def entered(self, x: Tensor, ordering: Ordering) -> Tensor:
        """Tokens in order, heads apart."""
        if self.is_split:
            return ordering.enter(x, dim=2)
        # SD3 passes values whose heads are apart already.
        return ordering.enter(x, dim=1).flatten(2).unflatten(2, (self.heads, -1)).transpose(1, 2)

    def left(self, out: Tensor, ordering: Ordering) -> Tensor:
        """Tokens in raster order; heads as ComfyUI wants them, in the same copy."""
        if self.leaves_split:
            return ordering.leave(out, dim=2)
        return ordering.leave(out.transpose(1, 2), dim=1).flatten(2)


def moment_of(sigma: Tensor, schedule: Tensor | None, branch: str = "") -> Moment | None:
    """The step of a schedule in which a noise level lies. Waits for the device, once per call.

    Samplers that call a model between two steps have then left the earlier one.
    """
    if schedule is None:
        return None
    steps = schedule[:-1]
    step = int((steps > sigma.max().to(steps) * _SAME_SIGMA).sum())
    step = min(step, len(steps) - 1)  # less noise than in the last step still belongs to it
    return Moment(step, len(steps), branch)


@lru_cache(maxsize=64)
def _behind_text(images: Ordering, text: int) -> Ordering:
    """The order of a whole sequence: the text stays where it is."""
    with torch.inference_mode(False):
        return Ordering.joined([torch.arange(text, device=images.order.device), images.order])
