"""Softmax and fused attention in one pass: entropy by head and the largest logit, from a sample of queries.

While the model runs only the sample is taken. The computation that follows takes some sixty small operations, launched
once for all attention layers of one shape: otherwise a GPU would wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor

from sonde.display import print_line
from sonde.flow.fetch import Gathered
from sonde.probe.guards import protected, quiet
from sonde.probe.loss.functional import CallTap
from sonde.probe.model import ModelNames, ModuleRef
from sonde.reduce.inspect.attention import Logits, Sample, entropy_by_head, fused_logits, sample_explicit, sample_of

MAX_HELD: Final = 1 << 24
"""Total size of the logits held, 64 MiB. Above that, results are computed at once."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The samples of one attention layer."""

    entropy_by_head: list[float]
    logit_max: float


class AttentionCalls:
    """A context that collects while it is open. Uses no random numbers and changes no output."""

    def __init__(self, names: ModelNames, num_heads: int | None, *, is_full: bool = False) -> None:
        """`is_full`: use every query of every sample, instead of a few."""
        self.num_heads, self.is_full = num_heads or 1, is_full
        self.seen: dict[str, Seen] = {}
        self.errors: list[Exception] = []
        self._taken: dict[str, Logits | Sample] = {}
        self._num_held = 0
        self._order: dict[str, None] = {}
        """Every observed attention layer, in the order of the first pass."""
        self._asked: list[tuple[list[str], Gathered]] = []
        self._tap = CallTap(names, self, self._failed, only=("softmax", "attention"))
        self._ask_one = protected(self._ask_alike, self._failed, "attention")

    def __enter__(self) -> Self:
        self._tap.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self._tap.close()

    def _failed(self, _: str, error: Exception) -> None:
        self.errors.append(error)

    def ask(self) -> None:
        """Compute results from the samples, layers of one shape together. Does not wait."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, taken in self._taken.items():
            groups.setdefault(_kind(taken), []).append(name)
        for names in groups.values():
            self._ask_one(names)
        self._taken.clear()
        self._num_held = 0

    def _ask_alike(self, names: list[str]) -> None:
        with quiet():
            per_head, logits, _ = entropy_by_head(_stacked([self._taken[name] for name in names]))
            largest = logits.abs().amax((-4, -3, -2, -1))
            self._asked.append((names, Gathered([per_head.nan_to_num(0.0), largest])))

    def resolve(self) -> None:
        """Turn the results into numbers."""
        found: dict[str, Seen] = {}
        for names, gathered in self._asked:
            entropies, largest = gathered.numbers()
            num = len(entropies) // len(names)
            for i, name in enumerate(names):
                found[name] = Seen(entropies[i * num : (i + 1) * num], largest[i])
        self.seen = {name: found[name] for name in self._order if name in found}
        self._asked.clear()
        for error in self.errors[:1]:  # the analysis continues without the layer that it could not read
            print_line(f"sonde: warning: cannot inspect an attention layer ({type(error).__name__}: {error})")

    def of(self, layer: str) -> Seen | None:
        """The observations in this module, in a submodule, or in its parent."""
        inside = (seen for name, seen in self.seen.items() if name == layer or name.startswith(f"{layer}."))
        return next(inside, self.seen.get(layer.rpartition(".")[0]))

    def function_called(
        self, name: str, place: ModuleRef, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        taken = self._take(name, args, kwargs, out)
        if taken is None:
            return
        self._order[place.name] = None
        self._taken[place.name] = taken
        self._num_held += _logits(taken).numel()
        if self._num_held > MAX_HELD:
            self.ask()

    def _take(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Logits | Sample | None:
        if name == "attention":
            given = (
                dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
            )
            return fused_logits(
                given["query"],
                given["key"],
                mask=given.get("attn_mask"),
                is_causal=bool(given.get("is_causal", False)),
                scale=given.get("scale"),
                num_heads=self.num_heads,
                is_full=self.is_full,
            )
        logits = args[0] if args else kwargs.get("input")
        if name != "softmax" or not isinstance(logits, Tensor) or not isinstance(out, Tensor) or out.ndim < 3:
            return None
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if dim not in (-1, out.ndim - 1) or out.shape[-1] < 2:
            return None
        sample = sample_explicit(logits, out, self.num_heads if out.ndim == 3 else 1, is_full=self.is_full)
        # Copies: a view would keep all the attention's logits, and a model may change them in place.
        return replace(sample, logits=sample.logits.clone(), probabilities=sample.probabilities.clone())


def _logits(taken: Logits | Sample) -> Tensor:
    return taken.values if isinstance(taken, Logits) else taken.logits


def _kind(taken: Logits | Sample) -> tuple[object, ...]:
    """The properties that samples computed together must share."""
    logits = _logits(taken)
    how = (taken.is_causal, taken.query_step) if isinstance(taken, Logits) else ()
    return type(taken), how, logits.shape, logits.device


def _stacked(taken: Sequence[Logits | Sample]) -> Sample:
    """Stacked into one sample, with the layers as the first dimension."""
    first, logits = taken[0], torch.stack([_logits(one) for one in taken])
    if isinstance(first, Logits):
        return sample_of(replace(first, values=logits))
    probabilities = [one.probabilities for one in taken if isinstance(one, Sample)]
    return replace(first, logits=logits, probabilities=torch.stack(probabilities))
