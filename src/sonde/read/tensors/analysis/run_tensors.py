"""`run.tensors`: the snapshots of a run, its whole tensors, and their analyses, which read block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sonde.errors import CorruptError, UsageError
from sonde.read.run.folder import find_run, inside
from sonde.read.run.sharded import open_state
from sonde.read.run.state import RunState
from sonde.read.run.steps import Steps
from sonde.read.run.structure import structure_of
from sonde.read.table import Table
from sonde.read.tensors.analysis import tables
from sonde.read.tensors.analysis.blocks import BLOCK, BlockRef, Rows, Tracked, store_at, track
from sonde.read.tensors.analysis.distribution import MAX_SAMPLE, NUM_BINS
from sonde.read.tensors.analysis.evolution import evolution_columns
from sonde.read.tensors.analysis.lora import adapter_pairs, adapter_scales, delta_spectrum
from sonde.read.tensors.analysis.representations import representation_pairs, representation_row
from sonde.read.tensors.analysis.similarity import cosines, mean_cosine, same_turns
from sonde.read.tensors.analysis.spectra import effective_rank, stable_rank
from sonde.read.tensors.analysis.tables import over_steps, split_names
from sonde.read.tensors.analysis.tasks import (
    distribution_rows,
    evolution_block,
    gram_block,
    spectrum_at,
    spread,
    standing_row,
)
from sonde.read.tensors.lazy import LazyTensors
from sonde.read.tensors.stores import open_local_tensor_store, open_tensor_store
from sonde.read.tensors.tensors import find_step, num_snapshots, snapshot_table, snapshot_tensors, tensor_over_steps
from sonde.read.tensors.view import SnapshotView
from sonde.schema.sketch import Array

if TYPE_CHECKING:
    import xarray

Pattern = str | Sequence[str]


class RunTensors:
    """The whole tensors of one run. Patterns are globs over names: "param/*", "grad/layers.3.*".

        run.tensors.snapshots()  # table of the snapshots
        run.tensors.snapshot(500)["param/layers.3.mlp.weight"]
        run.tensors.evolution("param/*").to_pandas()

    Analyses take `cluster`, a Dask client; an active one is used automatically.
    """

    def __init__(
        self,
        run: Path,
        version: Mapping[str, str] | None = None,
        attempt: int | None = None,
        *,
        state: Callable[[], RunState] | None = None,
    ) -> None:
        self._run, self._version, self._attempt = run, tuple(sorted((version or {}).items())), attempt
        self._state = state or (lambda: open_state(run, attempt))

    def __repr__(self) -> str:
        return f"<whole tensors of {self._run}: evolution, distribution, spectra, similarity, standing, cka, lora>"

    # -------------------------------------------------------------------------------------------------------- snapshots

    @property
    def num_snapshots(self) -> int:
        """Number of visible snapshots; 0 if the catalog is damaged (see `run.warnings`)."""
        try:
            return num_snapshots(self._state())
        except CorruptError:
            return 0

    def snapshots(self) -> Table:
        """Table (step, time, reason, num_tensors, bytes, stored_bytes, ratio, attempt) of the snapshots."""
        return Table(snapshot_table(self._state(), self.store()))

    def snapshot(self, step: int | str = "latest", pattern: str = "*") -> LazyTensors:
        """The tensors of one snapshot by name, loaded lazily; a negative step counts from the last.

        If a step was repeated, this is the snapshot of the last attempt that covers it; `run.attempt(0)` has others.
        """
        return snapshot_tensors(self.store(), step, pattern)

    def get(self, name: str, *, steps: Steps = None) -> xarray.DataArray:
        """One whole tensor over all snapshots that contain it, loaded lazily; its dims are step, d0, d1, …

        run.tensors.get("param/layers.3.mlp.weight").sel(step=500)
        """
        self._require_attempts()
        return tensor_over_steps(partial(_open_store, self._run, dict(self._version), self._attempt), name, steps)

    def store(self, *, local: bool = False) -> SnapshotView:
        """The snapshot store: steps, documents, tensors and slices of tensors. `local`: only those on this disk."""
        self._require_attempts()
        if local:
            inside(self._run, "tensors")
            return open_local_tensor_store(self._run, attempt=self._attempt)
        return _open_store(self._run, dict(self._version), self._attempt)

    def version(self, *, branch: str | None = None, tag: str | None = None, commit: str | None = None) -> RunTensors:
        """The tensors at a version: run.tensors.version(tag="best").snapshot("latest").

        Only snapshots stored in an Icechunk repository have branches, tags and commits.
        """
        asked = {"branch": branch, "tag": tag, "commit": commit}
        version = {key: value for key, value in asked.items() if value is not None}
        return RunTensors(self._run, version, self._attempt, state=self._state)

    def _require_attempts(self) -> None:
        """Require the catalog of a run with several attempts: only it says which snapshots are abandoned."""
        state = self._state()
        if state.manifest.heartbeat.attempt > 0:
            state.catalog.require()

    # --------------------------------------------------------------------------------------------------------- analyses

    def place(self) -> BlockRef:
        """The location of the tensors, for one query."""
        self._require_attempts()
        return BlockRef(str(self._run), self._version, self._attempt)

    def evolution(self, pattern: Pattern = "param/*", *, steps: Steps = None, cluster: Any = None) -> Table:
        """How tensors move: norm, distance from the first and the previous snapshot, cosines, relative change.

        Cost: every snapshot of the tensors is read once; each task needs three blocks of 8 MiB in memory.
        """
        place = self.place()
        found = track(store_at(place), pattern, steps)
        sums = self._summed(place, evolution_block, found, cluster)
        rows = ((tracked, evolution_columns(total)) for tracked, total in zip(found, sums, strict=True))
        return Table(over_steps(tables.EVOLUTION, rows))

    def distribution(
        self,
        pattern: Pattern = "param/*",
        *,
        steps: Steps = None,
        bins: int = NUM_BINS,
        max_sample: int = MAX_SAMPLE,
        cluster: Any = None,
    ) -> Table:
        """Distribution of values: quantiles, histograms on common bins, KL and Wasserstein-1 to the first and previous.

        Tensors larger than `max_sample` are sampled evenly and at the same positions; `num_sampled` has the size.
        """
        place = self.place()
        found = track(store_at(place), pattern, steps)
        calls = [(place, tracked, bins, max_sample) for tracked in found]
        rows = (row for answer in spread(distribution_rows, calls, cluster) for row in answer)
        return Table(pa.Table.from_pylist(list(rows), schema=tables.DISTRIBUTION))

    def spectra(
        self,
        pattern: Pattern = "param/*",
        *,
        steps: Steps = None,
        k: int | None = 8,
        exact: bool | None = None,
        seed: int = 0,
        cluster: Any = None,
    ) -> Table:
        """Singular values of matrices (convolutions by output channel): the k largest, ranks, and the tail exponent.

        Exact up to a smaller side of 1,024; larger ones randomised, without effective rank and alpha, unless `exact`.
        `k=None` returns all exact singular values, and the 64 largest of a randomised matrix.
        """
        place = self.place()
        found = track(store_at(place), pattern, steps)
        calls = [
            (place, tracked.name, step, k, exact, seed)
            for tracked in found
            for step, shape in zip(tracked.steps, tracked.shapes, strict=True)
            if len(shape) > 1
        ]
        answers = spread(spectrum_at, calls, cluster)
        rows = [
            {"step": step, **split_names(name), **row}
            for (_, name, step, *_), row in zip(calls, answers, strict=True)
            if row
        ]
        return Table(pa.Table.from_pylist(rows, schema=tables.SPECTRA))

    def similarity(self, pattern: Pattern = "grad/*", *, steps: Steps = None, cluster: Any = None) -> Table:
        """Cosine of each tensor with itself at every later step, e.g. whether gradients agree from step to step."""
        place = self.place()
        found = [tracked for tracked in track(store_at(place), pattern, steps) if len(tracked.steps) > 1]
        sums = self._summed(place, gram_block, found, cluster, lambda t: BLOCK * 4 // len(t.steps))
        rows = []
        for tracked, total in zip(found, sums, strict=True):
            cosine = cosines(total)
            rows += [
                {**split_names(tracked.name), "step_a": a, "step_b": b, "cosine": cosine[i, j]}
                for i, a in enumerate(tracked.steps)
                for j, b in enumerate(tracked.steps)
                if i < j
            ]
        return Table(pa.Table.from_pylist(rows, schema=tables.SIMILARITY))

    def layer_similarity(self, pattern: Pattern = "grad/*", *, steps: Steps = None, cluster: Any = None) -> Table:
        """Similarity of layers: the mean cosine of those with one shape, and whether they turn at the same steps."""
        place = self.place()
        found = track(store_at(place), pattern, steps)
        sums = self._summed(place, gram_block, found, cluster, lambda t: BLOCK * 4 // len(t.steps))
        turns = [cosines(total) for total in sums]
        pairs = [(i, j) for i in range(len(found)) for j in range(i + 1, len(found)) if found[i].kind == found[j].kind]
        rows = []
        for i, j in pairs:
            common = sorted(set(found[i].steps) & set(found[j].steps))
            a, b = (_at(turns[n], found[n].steps, common) for n in (i, j))
            rows.append(
                {
                    "kind": found[i].kind,
                    "site_a": found[i].site,
                    "site_b": found[j].site,
                    "cosine": self._mean_cosine(place, found[i], found[j], common),
                    "same_turns": same_turns(a, b),
                    "num_steps": len(common),
                }
            )
        return Table(pa.Table.from_pylist(rows, schema=tables.LAYERS))

    def standing(
        self,
        pattern: Pattern = "param/*",
        *,
        step: int | str = "latest",
        spectra: bool = True,
        on_tensor: Callable[[int, int], None] | None = None,
        cluster: Any = None,
    ) -> Table:
        """The state of each tensor in one snapshot, most moved first: one row of `evolution` and `spectra` each.

        Reads the first, this and the previous snapshot. `on_tensor(done, total)` is called after each tensor.
        """
        place = self.place()
        at = find_step(store_at(place), step)
        calls = []
        for tracked in track(store_at(place), pattern, slice(None, at + 1)):
            if tracked.steps[-1] == at:
                steps = tuple(dict.fromkeys((tracked.steps[0], *tracked.steps[-2:])))
                calls.append((place, tracked.name, steps, spectra))
        rows = []
        for row in spread(standing_row, calls, cluster):
            rows.append(row)
            if on_tensor is not None:
                on_tensor(len(rows), len(calls))
        rows.sort(key=lambda row: -(row["relative_from_first"] or 0.0))
        return Table(pa.Table.from_pylist(rows, schema=tables.STANDING))

    def cka(
        self,
        pattern: Pattern = "probe/*",
        *,
        other: Any = None,
        steps: Steps = None,
        unbiased: bool = True,
        per_position: bool = False,
        check: bool = True,
        cluster: Any = None,
    ) -> Table:
        """Linear CKA of activations: each step against every later one, or each common step against another run's.

        With `unbiased`, unbiased HSIC is averaged over batches of 256 examples. Activations of different batches cannot
        be compared; if the batches were stored they are checked, unless `check` is off.
        """
        place = self.place()
        theirs = None if other is None else _place_of(other)
        task = partial(representation_row, unbiased=unbiased, per_position=per_position, check=check)
        calls = representation_pairs(place, theirs, track(store_at(place), pattern, steps))
        answers = list(spread(task, calls, cluster))
        if theirs is not None and not answers:
            raise UsageError(
                f"{theirs.run} has no snapshot of a tensor that matches {pattern!r} at any step of this run. "
                "run.tensors.snapshots() lists the steps of each run."
            )
        return Table(pa.Table.from_pylist(answers, schema=tables.CKA))

    def lora(self, *, steps: Steps = None, scale: float | None = None) -> Table:
        """Low-rank adapters: norm and ranks of ΔW = scale · B · A, and its size relative to the weight.

        The scale (alpha / rank, or alpha / √rank) is taken from the model. If unknown, 1 is used unless you give it.
        """
        place = self.place()
        found = {tracked.name: tracked for tracked in track(store_at(place), "param/*", steps)}
        pairs = adapter_pairs(found)
        if not pairs:
            raise UsageError("the snapshots have no pair of tensors named …lora_A… and …lora_B….")
        known = adapter_scales(structure_of(self._run)) if scale is None else {}
        rows = []
        for pair in pairs:
            base = _base(pair.module, found)
            module = pair.module.partition("/")[2]
            factor = known.get((module, pair.adapter), 1.0) if scale is None else scale
            for step in sorted(set(found[pair.a].steps) & set(found[pair.b].steps)):
                a, b = (store_at(place).read(step, name) for name in (pair.a, pair.b))
                delta = delta_spectrum(a, b, factor)
                rows.append(
                    {
                        "step": step,
                        "module": module,
                        "adapter": pair.adapter,
                        "rank": a.shape[0],
                        "scale": factor,
                        "norm": delta.frobenius,
                        "spectral_norm": float(delta.values[0]),
                        "stable_rank": stable_rank(delta),
                        "effective_rank": effective_rank(delta),
                        "relative": self._relative(place, delta.frobenius, base, step),
                        "singular_values": delta.values,
                    }
                )
        return Table(pa.Table.from_pylist(rows, schema=tables.LORA))

    def _relative(self, place: BlockRef, norm: float, base: Tracked | None, step: int) -> float | None:
        """The norm relative to the frozen weight, which the closest earlier snapshot may have."""
        if base is None:
            return None
        at = max((known for known in base.steps if known <= step), default=base.steps[0])
        weight = float(np.linalg.norm(store_at(place).read(at, base.name).astype(np.float64)))
        return norm / weight if weight > 0 else None

    def _summed(
        self,
        place: BlockRef,
        task: Callable[[BlockRef, Tracked, Rows], Array],
        found: Sequence[Tracked],
        cluster: Any,
        size: Callable[[Tracked], int] = lambda _: BLOCK,
    ) -> list[Array]:
        """Sum the results of a task over all blocks of each tensor."""
        blocks = [tracked.blocks(size(tracked)) for tracked in found]
        calls = [(place, tracked, rows) for tracked, own in zip(found, blocks, strict=True) for rows in own]
        answers = spread(task, calls, cluster)
        return [sum((next(answers) for _ in own[1:]), start=next(answers)) for own in blocks]

    def _mean_cosine(self, place: BlockRef, a: Tracked, b: Tracked, steps: Sequence[int]) -> float | None:
        if {*a.shapes} != {*b.shapes} or len({*a.shapes}) > 1:
            return None
        store = store_at(place)
        return mean_cosine([(store.read(step, a.name), store.read(step, b.name)) for step in steps])


def _open_store(path: Path, at: Mapping[str, str], attempt: int | None) -> SnapshotView:
    return open_tensor_store(path, attempt=attempt, branch=at.get("branch"), tag=at.get("tag"), commit=at.get("commit"))


def _place_of(other: Any) -> BlockRef:
    """The tensors of another run, given as a run, a name or a folder."""
    tensors = getattr(other, "tensors", None)
    return tensors.place() if isinstance(tensors, RunTensors) else BlockRef(str(find_run(other)))


def _at(cosine: Array, steps: Sequence[int], common: Sequence[int]) -> Array:
    places = [steps.index(step) for step in common]
    return cosine[np.ix_(places, places)]


def _base(module: str, found: dict[str, Tracked]) -> Tracked | None:
    names = (f"{module}.base_layer.weight", f"{module}.weight", f"{module}.base.weight")
    return next((found[name] for name in names if name in found), None)
