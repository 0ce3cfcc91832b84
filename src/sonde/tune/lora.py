"""Statistics of low-rank adapters while they train: the product B·A, without ever computing it.

The small matrices AAᵀ and BᵀB determine the norm and all singular values of B·A. They are computed on the adapter's
device; the rest is done on the writer thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from sonde.read.tensors.analysis.spectra import Spectrum, effective_rank
from sonde.reduce.transfer import HostTransfer
from sonde.schema.records import ScalarsRecord
from sonde.schema.sketch import Array
from sonde.session import Session
from sonde.session.inspect.lora import Adapter, find_adapters

STATS: Final = ("a_norm", "b_norm", "norm", "rank", "drift", "change", "dead")


@dataclass(slots=True)
class _Followed:
    """One adapter and its state: its factors at the last measurement, and the norm of its frozen weight."""

    adapter: Adapter
    site: str
    scale: float
    base_norm: Tensor | None = None
    before: tuple[Tensor, Tensor] | None = None
    num_measured: int = 0


@dataclass(slots=True)
class AdapterRecorder:
    """Call `record` after an optimizer step; scalars are named `unit/<module>/adapter_<stat>`."""

    session: Session
    followed: list[_Followed] = field(default_factory=list)

    def follow(self, model: nn.Module) -> int:
        """Find the adapters in the watched models; returns their number."""
        scales = _scales(model)
        for watching in self.session.steps.models:
            for adapter in find_adapters(watching.names):
                b = adapter.b()
                scale = 1.0 if b is None else scales.get(id(b), 1.0)
                self.followed.append(_Followed(adapter, _site(adapter), scale))
        return len(self.followed)

    def record(self, step: int) -> None:
        """Never waits."""
        began_s = time.perf_counter()
        with torch.no_grad():
            for device, group in self._by_device().items():
                self._send(device, group, step)
        self.session.steps.training.governing.meter.add("inspect", time.perf_counter() - began_s)

    def _by_device(self) -> dict[torch.device, list[tuple[_Followed, tuple[Tensor, Tensor, Tensor]]]]:
        groups: dict[torch.device, list[tuple[_Followed, tuple[Tensor, Tensor, Tensor]]]] = {}
        for followed in self.followed:
            tensors = followed.adapter.tensors()
            if tensors is not None:
                groups.setdefault(tensors[1].device, []).append((followed, tensors))
        return groups

    def _send(self, device: torch.device, group: list[Any], step: int) -> None:
        pieces: list[Tensor] = []
        shapes: list[tuple[int, float, str, int]] = []
        for followed, (a, b, base) in group:
            pieces += _grams(followed, a, b, base)
            shapes.append((a.shape[0], followed.scale, followed.site, followed.num_measured))
            followed.num_measured += 1
        transfer = HostTransfer(pieces)
        ids = {
            (site, stat): self.session.recording.writer.scalar_id(f"unit/{site}/adapter_{stat}")
            for _, _, site, _ in shapes
            for stat in STATS
        }

        def resolve() -> ScalarsRecord:
            numbers = iter(transfer.open())
            found: dict[int, float] = {}
            for rank, scale, site, num_before in shapes:
                parts = [next(numbers) for _ in range(3)]
                for stat, value in measure(parts, rank, scale, num_before).items():
                    found[ids[site, stat]] = value
            columns = np.array(list(found), np.int32), np.array(list(found.values()))
            count = len(found)
            return ScalarsRecord(columns[0], np.full(count, step, np.int64), np.full(count, time.time()), columns[1])

        self.session.recording.writer.put(resolve, 64 * len(ids), step=step, stream="scalars")


def _grams(followed: _Followed, a: Tensor, b: Tensor, base: Tensor) -> list[Tensor]:
    """From the current factors and those at the last measurement side by side: [A; A'][A; A']ᵀ, [B B']ᵀ[B B']; the norm
    of W."""
    dtype = torch.float32 if a.device.type == "mps" else torch.float64
    a, b = a.detach(), b.detach()
    before_a, before_b = followed.before if followed.before is not None else (a, b)
    right = torch.cat([a, before_a]).to(dtype)
    left = torch.cat([b, before_b], dim=1).to(dtype)
    followed.before = a.clone(), b.clone()
    if followed.base_norm is None:
        weight = base.detach()
        is_plain = weight.is_floating_point()  # packed to four bits it has no norm
        followed.base_norm = torch.linalg.vector_norm(weight, dtype=torch.float32) if is_plain else a.new_tensor(np.nan)
    return [right @ right.T, left.T @ left, followed.base_norm]


def measure(parts: list[Array], rank: int, scale: float, num_before: int) -> dict[str, float]:
    """The statistics from the small matrices. The eigenvalues of (BᵀB)(AAᵀ) are the squared singular values of B·A."""
    both_a, both_b = (part.reshape(2 * rank, 2 * rank) for part in parts[:2])
    gram_a, gram_b = both_a[:rank, :rank], both_b[:rank, :rank]
    product = gram_b @ gram_a
    squares = np.linalg.eigvals(product).real.clip(0) if np.isfinite(product).all() else np.full(1, np.nan)
    values = np.sqrt(np.sort(squares)[::-1])
    norm, base = float(np.sqrt(squares.sum())), float(parts[2][0])
    found = {
        "a_norm": float(np.sqrt(np.trace(gram_a))),
        "b_norm": float(np.sqrt(np.trace(gram_b))),
        "norm": abs(scale) * norm,
        "rank": 0.0 if norm == 0 else effective_rank(Spectrum(values, norm, is_complete=True)),
        "drift": abs(scale) * norm / base if base > 0 else float("nan"),
    }
    if num_before:
        # B·A − B'·A' is [B −B'] times [A; A'].
        sign = np.repeat([1.0, -1.0], rank)
        moved = float(np.sqrt(max((both_a * both_b * np.outer(sign, sign)).sum(), 0.0)))
        has_moved = any(np.ptp(both[:rank, :rank] - both[:rank, rank:]) for both in (both_a, both_b))
        found["change"] = moved / norm if norm > 0 else 0.0
        found["dead"] = float(norm == 0.0 or not has_moved)
    return found


def _site(adapter: Adapter) -> str:
    """The module of both factors: `layers.0.q_proj` for `layers.0.q_proj.lora_A.default.weight`."""
    a, b = adapter.a_name.split("."), adapter.b_name.split(".")
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return ".".join(a[:shared]) or adapter.b_name


def _scales(model: nn.Module) -> dict[int, float]:
    """id of B -> the factor of its product, if the module has one."""
    found: dict[int, float] = {}
    for module in model.modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, Mapping):
            for name, scale in scaling.items():
                for child in ("lora_B", "lora_embedding_B"):
                    inner = getattr(module, child, {})
                    if name in inner:
                        found[id(getattr(inner[name], "weight", inner[name]))] = float(scale)
        elif isinstance(scaling, int | float):
            found.update({id(parameter): float(scaling) for parameter in module.parameters()})
    return found
