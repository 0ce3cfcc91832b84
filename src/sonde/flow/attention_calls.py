"""What softmax and fused attention did in one pass: entropy by head and the largest logit, on a sample of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from sonde.probe.functional import CallTap
from sonde.probe.model import ModelNames, Place
from sonde.reduce.inspect_attention import Sample, entropy_by_head, sample_explicit, sample_fused


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one attention. Tensors until they are asked for: waiting for each would stall a GPU at every layer."""

    entropy: Tensor
    largest: Tensor

    @property
    def entropy_by_head(self) -> list[float]:
        return [float(value) for value in self.entropy.tolist()]

    @property
    def logit_max(self) -> float:
        return float(self.largest)


class AttentionCalls:
    """A context: collects while it is open. Uses no random numbers and changes no output."""

    def __init__(self, names: ModelNames, num_heads: int | None) -> None:
        self.num_heads = num_heads or 1
        self.seen: dict[str, Seen] = {}
        self.errors: list[Exception] = []
        self._tap = CallTap(names, self, lambda _, error: self.errors.append(error))

    def __enter__(self) -> Self:
        self._tap.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self._tap.close()

    def of(self, layer: str) -> Seen | None:
        """What was seen in this module, in one it holds, or in the one that holds it."""
        inside = (seen for name, seen in self.seen.items() if name == layer or name.startswith(f"{layer}."))
        return next(inside, self.seen.get(layer.rpartition(".")[0]))

    def function_called(self, name: str, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        sample = self._sample(name, args, kwargs, out)
        if sample is not None:
            self.seen[place.name] = _summary(sample)

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


def _summary(sample: Sample) -> Seen:
    per_head, logits, _ = entropy_by_head(sample)
    return Seen(per_head.nan_to_num(0.0), logits.abs().amax())
