"""Kind `attn`: attention wherever it is computed, by a softmax over a batched product or by torch's fused function."""

from __future__ import annotations

import weakref
from typing import Any, Final

from torch import Tensor

from sonde.probe.model import ModuleRef
from sonde.probe.outputs import floating_tensors
from sonde.reduce.inspect.attention import Sample, attention_numbers, sample_explicit, sample_fused
from sonde.session.inspect.units import Values, readable

# Operations that may occur between a query-key product and its softmax: scaling, masks, caps, casts, views.
_PASSED: Final = frozenset({
    "Div", "Mul", "Add", "Sub", "MaskedFill", "Where", "ToCopy", "UnsafeView", "View", "ReshapeAlias", "Expand",
    "Clone", "Unsqueeze", "Squeeze", "Tanh", "Clamp", "Transpose", "Permute", "Slice", "Select", "Alias", "AsStrided",
    "Copy", "Cat", "Neg", "ConstantPadNd",
})  # fmt: skip
_MAX_NODES: Final = 24


class AttentionInspection:
    """Fills `values`; keeps nothing between steps."""

    def __init__(self) -> None:
        self._outputs: list[tuple[weakref.ref[Tensor], str]] = []

    def begin(self) -> None:
        self._outputs.clear()

    def softmax_called(
        self, values: Values, place: ModuleRef, site: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        logits = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(logits, Tensor) or not readable(logits) or not readable(out) or logits.shape != out.shape:
            return
        if out.ndim < 3 or dim not in (-1, out.ndim - 1) or out.shape[-1] < 2 or not _is_product(logits):
            return
        self._note(values, site, sample_explicit(logits, out, _num_heads(place, out)))
        self._outputs.append((weakref.ref(out), site))

    def fused_called(
        self, values: Values, place: ModuleRef, site: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = {
            **dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)),
            **kwargs,
        }
        query, key, mask = given.get("query"), given.get("key"), given.get("attn_mask")
        if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not readable(query) or not readable(key):
            return
        if query.ndim < 3 or key.shape[-2] < 2:
            return
        sample = sample_fused(
            query,
            key,
            mask=mask,
            is_causal=bool(given.get("is_causal", False)),
            scale=given.get("scale"),
            num_heads=_num_heads(place, query),
        )
        self._note(values, site, sample)

    def root_called(self, values: Values, output: Any) -> None:
        """The model's own output is its prediction, not attention."""
        returned = [tensor for _, tensor in floating_tensors(output)]
        for ref, site in self._outputs:
            out = ref()
            if out is not None and any(tensor is out for tensor in returned):
                for name in [name for name in values if name.startswith(f"attn/{site}/")]:
                    del values[name]
        self._outputs.clear()

    def _note(self, values: Values, site: str, sample: Sample) -> None:
        for stat, value in attention_numbers(sample).items():
            values[f"attn/{site}/{stat}"] = value


def _num_heads(place: ModuleRef, tensor: Tensor) -> int:
    """Three dimensions hold the heads in the first one, if the module says how many there are."""
    heads = getattr(place.ref(), "num_heads", 1)
    return heads if isinstance(heads, int) and heads > 0 and tensor.shape[0] % heads == 0 else 1


def _is_product(logits: Tensor) -> bool:
    """Whether these come from a batched product, as query-key scores do and a layer's output does not."""
    if logits.grad_fn is None:  # inside a reentrant checkpoint there is no graph to check
        return logits.shape[-1] == logits.shape[-2]
    nodes = [logits.grad_fn]
    for _ in range(_MAX_NODES):
        if not nodes:
            return False
        node = nodes.pop(0)
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        if name in ("Bmm", "Baddbmm"):
            return True
        if name in _PASSED:
            nodes += [above for above, _ in node.next_functions if above is not None]
    return False
