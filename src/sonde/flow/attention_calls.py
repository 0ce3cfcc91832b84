"""What softmax and fused attention did in one pass: entropy by head and the largest logit, on a sample of queries."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final, Self

from torch import Tensor

from sonde.flow.fetch import fetch
from sonde.probe.functional import CallTap
from sonde.probe.model import ModelNames, Place
from sonde.reduce.inspect_attention import Sample, entropy_by_head, sample_explicit, sample_fused

_log: Final = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one attention."""

    entropy_by_head: list[float]
    logit_max: float


class AttentionCalls:
    """A context: collects while it is open. Uses no random numbers and changes no output."""

    def __init__(self, names: ModelNames, num_heads: int | None) -> None:
        self.num_heads = num_heads or 1
        self.seen: dict[str, Seen] = {}
        self._tensors: dict[str, tuple[Tensor, Tensor]] = {}
        """Entropy by head and the largest logit, until all are there: waiting for each would stall a GPU each time."""
        self.errors: list[Exception] = []
        self._tap = CallTap(names, self, lambda _, error: self.errors.append(error), only=("softmax", "attention"))

    def __enter__(self) -> Self:
        self._tap.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self._tap.close()

    def resolve(self) -> None:
        """Make numbers of what was seen."""
        fetched = fetch([tensor for pair in self._tensors.values() for tensor in pair])
        for name, entropy, (largest,) in zip(self._tensors, fetched[::2], fetched[1::2], strict=True):
            self.seen[name] = Seen(entropy, largest)
        self._tensors.clear()
        for error in self.errors[:1]:  # the analysis goes on without what it could not read
            _log.warning("the inside of an attention could not be read (%s: %s)", type(error).__name__, error)

    def of(self, layer: str) -> Seen | None:
        """What was seen in this module, in one it holds, or in the one that holds it."""
        inside = (seen for name, seen in self.seen.items() if name == layer or name.startswith(f"{layer}."))
        return next(inside, self.seen.get(layer.rpartition(".")[0]))

    def function_called(self, name: str, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        sample = self._sample(name, args, kwargs, out)
        if sample is not None:
            self._tensors[place.name] = _summary(sample)

    def _sample(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Sample | None:
        if name == "attention":
            given = (
                dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
            )
            return sample_fused(
                given["query"],
                given["key"],
                mask=given.get("attn_mask"),
                is_causal=bool(given.get("is_causal", False)),
                scale=given.get("scale"),
                num_heads=self.num_heads,
            )
        logits = args[0] if args else kwargs.get("input")
        if name != "softmax" or not isinstance(logits, Tensor) or not isinstance(out, Tensor) or out.ndim < 3:
            return None
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if dim not in (-1, out.ndim - 1) or out.shape[-1] < 2:
            return None
        return sample_explicit(logits, out, self.num_heads if out.ndim == 3 else 1)


def _summary(sample: Sample) -> tuple[Tensor, Tensor]:
    per_head, logits, _ = entropy_by_head(sample)
    return per_head.nan_to_num(0.0), logits.abs().amax()
