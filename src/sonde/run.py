"""The viewing side, composed: `open` a run, list `runs`, `compare` two. Composes `read`; computes nothing itself.

Everything that shows a run is built on this file: what views need of `read` is a method of `Run`, or in `__all__` here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa

from sonde.diagnose.diagnosis import Diagnosis, all_required_series, diagnose
from sonde.diagnose.finding import Finding
from sonde.errors import CorruptError, RunError, SondeError, UsageError
from sonde.read.compare.divergence import Divergence
from sonde.read.compare.runs import Comparison, compare_states
from sonde.read.compare.weights import WeightComparison, compare_weights
from sonde.read.run.attempts import attempt_table, check_attempt
from sonde.read.run.catalog import Catalog, Segment
from sonde.read.run.checkpoints import (
    Checkpoint,
    checkpoint_list_table,
    checkpoints_folder,
    list_checkpoints,
    run_checkpoints,
    verify_checkpoint,
)
from sonde.read.run.folder import default_dir, find_run, inside, open_inside, read_manifest, run_folders
from sonde.read.run.link import linked_run
from sonde.read.run.manifest import Manifest
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState, open_state
from sonde.read.run.status import Status, true_status
from sonde.read.run.steps import ALL_STEPS, Steps, parse_steps
from sonde.read.run.structure import read_structure
from sonde.read.run.tables import event_table, finding_table, health_table, site_table, system_table
from sonde.read.series.close_up import Histogram, SiteRow, newest_row, read_histogram
from sonde.read.series.columns import read_lines
from sonde.read.series.cut import by_series, thin
from sonde.read.series.follow import Update, follow
from sonde.read.series.heatmap import Heat, HeatQuestion
from sonde.read.series.live_cells import LiveCells
from sonde.read.series.pyramid import make_columns, read_overview
from sonde.read.series.scalars import read_named, read_scalars
from sonde.read.series.sql import DEFAULT_LIMIT, run_query
from sonde.read.series.stats import read_stats
from sonde.read.series.summary import Summary, as_rich, summarize
from sonde.read.series.sums import Sums, read_sums
from sonde.read.series.window import read_merged_window, read_window
from sonde.read.tensors.analysis.difference import difference
from sonde.read.tensors.analysis.run_tensors import RunTensors
from sonde.read.tensors.check import damaged_snapshots
from sonde.read.tensors.files.formats import is_tensor_file, open_tensors
from sonde.read.tensors.lazy import LazyTensors, TensorSpec, of_kind
from sonde.read.tensors.readers import TensorStore
from sonde.read.tensors.stores import open_local_tensor_store, open_tensor_store, upload_warnings
from sonde.read.tensors.tensors import num_snapshots, snapshot_table, snapshot_tensors, tensor_over_steps
from sonde.read.tensors.view import SnapshotView
from sonde.schema.layout import RunStatus
from sonde.schema.old_names import current_scalar, current_stat
from sonde.schema.records import flatten
from sonde.schema.window import Column, Window

if TYPE_CHECKING:
    import xarray

# What a view needs to name: it imports from here, never from `read`.
__all__ = [
    "Checkpoint",
    "Comparison",
    "Divergence",
    "Heat",
    "LazyTensors",
    "LiveCells",
    "Manifest",
    "Run",
    "Segment",
    "SnapshotView",
    "TensorSpec",
    "TensorStore",
    "WeightComparison",
    "broken_runs",
    "by_series",
    "checkpoints_folder",
    "compare",
    "compare_weights",
    "difference",
    "find_run",
    "linked_run",
    "list_checkpoints",
    "open",
    "open_inside",
    "open_weights",
    "read_head",
    "read_manifest",
    "run_folders",
    "runs",
    "snapshot_tensors",
    "verify_checkpoint",
    "weights_of",
]


def open(path: str | os.PathLike[str] = "latest", *, dir: str | os.PathLike[str] | None = None) -> Run:
    """Open a run by folder, id, "project/name", a unique prefix, or "latest"; "RUN@attempt=0" is one of its attempts.

    run = sonde.open("runs/latest")
    run.stats("grad/*/norm")
    """
    name, _, number = os.fspath(path).rpartition("@attempt=")
    if name and number.removeprefix("-").isdigit():
        return open(name, dir=dir).attempt(int(number))
    return Run(find_run(path, None if dir is None else Path(dir)))


def runs(dir: str | os.PathLike[str] | None = None, project: str | None = None) -> list[Run]:
    """Every run in a folder of runs, newest first. Folders that cannot be opened are left out; see `broken_runs`."""
    found = [run for run in map(_try_open, run_folders(_dir(dir))) if isinstance(run, Run)]
    wanted = [run for run in found if project is None or run.project == project]
    return sorted(wanted, key=lambda run: (run.created, run.path.name), reverse=True)


def broken_runs(dir: str | os.PathLike[str] | None = None) -> dict[Path, SondeError]:
    """Run folders that cannot be opened, and why."""
    tried = {folder: _try_open(folder) for folder in run_folders(_dir(dir))}
    return {folder: result for folder, result in tried.items() if isinstance(result, SondeError)}


def read_head(folder: Path) -> tuple[Manifest, Status]:
    """A run's run.json and its true status, without opening the rest."""
    manifest = read_manifest(folder)
    return manifest, true_status(folder, manifest, manifest.heartbeat.step)


@overload
def compare(a: Run, b: Run, *, stats: str | Sequence[str] = ..., tolerance: float | None = ...) -> Comparison: ...
@overload
def compare(
    a: str | os.PathLike[str] | Run,
    b: str | os.PathLike[str] | Run,
    *,
    stats: str | Sequence[str] = ...,
    tolerance: float | None = ...,
    kind: str = ...,
) -> Comparison | WeightComparison: ...
def compare(
    a: str | os.PathLike[str] | Run,
    b: str | os.PathLike[str] | Run,
    *,
    stats: str | Sequence[str] = "*/*/norm",
    tolerance: float | None = None,
    kind: str = "param",
) -> Comparison | WeightComparison:
    """What differs between two runs, or between the tensors of two files or snapshots ("RUN@500").

        sonde.compare("gpt/eager", "gpt/compiled").first_divergence  # step, site, both values, what rounding explains
        sonde.compare("a.safetensors", "gpt/warmup@500").tensors

    Without a tolerance, what rounding explains is told by the types of the recorded tensors, and tensors are compared
    element by element. Beside a file a run is its last snapshot; `kind` says which tensors of snapshots are meant.
    Other frameworks' layers are found by their shapes.
    """
    weights = [open_weights(source, kind=kind) for source in (a, b)]
    if any(found is not None for found in weights):
        ours, theirs = (
            found if found is not None else weights_of(source if isinstance(source, Run) else open(source), kind)
            for source, found in zip((a, b), weights, strict=True)
        )
        return compare_weights(ours, theirs, tolerance=tolerance)
    first, second = (run if isinstance(run, Run) else open(run) for run in (a, b))
    return compare_states((first._now, second._now), (first._label, second._label), stats, tolerance)


def open_weights(
    source: str | os.PathLike[str] | Run, *, dir: Path | None = None, kind: str = "param"
) -> LazyTensors | None:
    """The tensors of a file of weights or of a snapshot, "RUN@500" or "RUN@latest"; None when it names a run."""
    if isinstance(source, Run):
        return None
    text = os.fspath(source)
    name, _, step = text.rpartition("@")
    if name and (step == "latest" or step.removeprefix("-").isdigit()):
        return weights_of(open(name, dir=dir), kind, step if step == "latest" else int(step))
    if is_tensor_file(text):
        return open_tensors(text)
    if name and _names_a_run(name, dir) and not _names_a_run(text, dir):
        raise UsageError(f'"{step}" is no step of {name}: a snapshot is RUN@STEP, as {name}@500, or {name}@latest.')
    return None


def weights_of(run: Run, kind: str = "param", step: int | str = "latest") -> LazyTensors:
    """The tensors of one kind of a snapshot, under the names that a file of weights has for them."""
    return of_kind(run.snapshot(step), kind, f"{run.project}/{run.name}")


def _names_a_run(name: str, dir: Path | None) -> bool:
    try:
        open(name, dir=dir)
    except SondeError:
        return False
    return True


def _dir(dir: str | os.PathLike[str] | None) -> Path:
    return default_dir() if dir is None else Path(dir)


def _try_open(folder: Path) -> Run | SondeError:
    try:
        return Run(folder)
    except RunError as error:
        return error


def _open_tensor_store(path: Path, at: Mapping[str, str], attempt: int | None) -> SnapshotView:
    return open_tensor_store(path, attempt=attempt, branch=at.get("branch"), tag=at.get("tag"), commit=at.get("commit"))


def _view(name: str) -> Any:
    """A picture of a run. Views stand above this room and are plugged in: the entry points `sonde.views`."""
    for entry in entry_points(group="sonde.views", name=name):
        return entry.load()
    raise UsageError(
        f'no view "{name}" is installed. Install sonde anew:  pip install --force-reinstall --no-deps sonde'
    )


class Run:
    """A recorded run. Every answer is as new as the files; nothing is ever written.

    `damage` collects what readers find damaged, by file; a viewer that opens a run several times may share it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        version: Mapping[str, str] | None = None,
        attempt: int | None = None,
        damage: dict[str, str] | None = None,
    ) -> None:
        self.path = Path(path).resolve()
        self._state = open_state(self.path, attempt)
        if damage is not None:
            self._state.damage = damage
        self._version, self._attempt = dict(version or {}), attempt
        self._is_held = False

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, last_step={self.last_step})"

    @property
    def _now(self) -> RunState:
        if not self._is_held:
            self._state.refresh()
        return self._state

    @contextmanager
    def hold(self) -> Iterator[Run]:
        """Inside the block every answer is of one moment: the files are checked for news once, at its beginning.

        with run.hold():
            run.last_step, run.scalars("loss")
        """
        was_held = self._is_held
        if not was_held:
            self._state.refresh()
        self._is_held = True
        try:
            yield self
        finally:
            self._is_held = was_held

    @property
    def manifest(self) -> Manifest:
        """All of run.json."""
        return self._now.manifest

    @property
    def id(self) -> str:
        return self._state.manifest.id

    @property
    def name(self) -> str:
        return self._state.manifest.name

    @property
    def project(self) -> str:
        return self._state.manifest.project

    @property
    def status(self) -> RunStatus:
        """`running`, `finished`, `crashed` or `interrupted`: the truth, even after kill -9."""
        return self._now.status().status

    @property
    def reason(self) -> str:
        """Why the run ended, in words; empty when it finished by itself or still runs."""
        return self._now.status().reason

    @property
    def config(self) -> Mapping[str, Any]:
        return self._state.manifest.config

    @property
    def tags(self) -> tuple[str, ...]:
        return self._state.manifest.tags

    @property
    def notes(self) -> str:
        return self._state.manifest.notes

    @property
    def environment(self) -> Mapping[str, Any]:
        return self._now.manifest.environment

    @property
    def git(self) -> Mapping[str, Any] | None:
        return self._now.manifest.git

    @property
    def created(self) -> datetime:
        """When the run began, in UTC."""
        try:
            return datetime.fromtimestamp(self._state.manifest.created_time, UTC)
        except (OverflowError, OSError, ValueError):  # a year that no calendar has
            return datetime.fromtimestamp(0, UTC)

    @property
    def last_step(self) -> int:
        """The last recorded step; -1 before the first."""
        return self._now.last_step()

    @property
    def catalog(self) -> Catalog:
        """Sites and scalars by their ids, sealed files and attempts. `require()` raises where it is damaged."""
        return self._now.catalog

    @property
    def num_rows(self) -> int:
        """Number of sketches in sealed files: how much there is to read."""
        return sum(segment.num_rows for segment in self._now.segments_of("stats"))

    @property
    def num_files(self) -> int:
        """Number of sealed files that hold sketches."""
        return len(self._now.segments_of("stats"))

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots that are shown; 0 where the catalog is damaged, which `warnings` says."""
        try:
            return num_snapshots(self._now)
        except CorruptError:
            return 0

    @property
    def revision(self) -> tuple[object, ...]:
        """Changes whenever the run has more to tell, so that answers can be kept by it."""
        state, catalog = self._now, self._now.catalog
        counts = len(catalog.segments), len(catalog.sites), len(catalog.attempts)
        return state.last_step(), state.status().status, *counts

    @property
    def _label(self) -> str:
        """The name of the run, and of the attempt where it is not the last by default."""
        suffix = "" if self._attempt is None else f"@attempt={self._attempt}"
        return f"{self.project}/{self.name}{suffix}"

    @property
    def num_attempts(self) -> int:
        """Number of attempts: 1 unless training was resumed or returned to an earlier step."""
        return max(len(self._now.catalog.attempts), 1)

    def attempts(self) -> pa.Table:
        """Table (attempt, first_step, last_step, started, reason). The last attempt that covers a step is shown."""
        return attempt_table(self._now)

    def attempt(self, number: int) -> Run:
        """The run as it was at the end of this attempt, including the steps that a later one abandoned.

        run.attempt(0).scalars("loss")
        """
        return Run(self.path, version=self._version, attempt=check_attempt(self._now, number))

    @property
    def warnings(self) -> list[str]:
        """Damage, unfinished tails, dropped rows, uploads that wait: what to know before trusting this run."""
        return [*self._now.warnings(), *upload_warnings(self.path, is_live=self._now.is_held)]

    def stats(self, pattern: str | Sequence[str], *, steps: Steps = None) -> pa.Table:
        """Long table (step, kind, site, stat, value) of the series that patterns name.

            run.stats("grad/*/norm", steps=slice(-100, None)).to_pandas()

        Damaged files are left out and named in `warnings`; when nothing else holds what was asked, CorruptError.
        """
        state = self._now
        return read_stats(state, pattern, parse_steps(steps, state.last_step()))

    def overview(self, pattern: str | Sequence[str], *, steps: Steps = None, points: int = 1000) -> pa.Table:
        """Like `stats`, thinned for drawing: lowest and highest of about `points` stretches of each series.

        Where that would be millions of rows, steps are merged by fours; the metadata says how many make a row.
        """
        state = self._now
        return read_overview(state, pattern, parse_steps(steps, state.last_step()), points)

    def lines(
        self, pattern: str | Sequence[str], *, steps: Steps = None, points: int | None = None
    ) -> dict[str, Column]:
        """Series by name, each as arrays of steps and values; with `points`, thinned as by `overview`.

        steps, values = run.lines("grad/*/norm")["grad/0.weight/norm"]
        """
        table = (
            self.stats(pattern, steps=steps) if points is None else self.overview(pattern, steps=steps, points=points)
        )
        return by_series(table, ("kind", "site", "stat"))

    def site_lines(
        self, stat: str, sites: Sequence[int], steps: range, *, max_rows: int
    ) -> tuple[dict[int, Column], bool]:
        """One stat of some sites by their ids, and whether steps are merged because there were more than `max_rows`."""
        return read_lines(self._now, current_stat(stat), sites, Span(steps.start, steps.stop - 1), max_rows)

    def heat(self, stat: str, sites: Sequence[int]) -> Heat:
        """The cells of a heat map of one stat, a row for each of these sites, read file by file."""
        return Heat(self._now, HeatQuestion.of(self._now, current_stat(stat), sites))

    def sums(self, group_of: Mapping[int, int], num_groups: int, steps: range, *, columns: int) -> Sums:
        """Sketches of sites, by id, merged into groups and into at most `columns` columns of steps."""
        state = self._now
        return read_sums(state, group_of, num_groups, make_columns(state, steps.start, steps.stop - 1, columns))

    def histogram(self, site: int, steps: range, *, columns: int) -> Histogram:
        """The exponents of one site, by id, in at most `columns` columns of steps."""
        state = self._now
        return read_histogram(state, site, make_columns(state, steps.start, steps.stop - 1, columns))

    def newest_row(self, site: int, step: int, stats: Sequence[str]) -> SiteRow | None:
        """The last sketch of one site, by id, up to a step; None where there is none."""
        return newest_row(self._now, site, step, [current_stat(stat) for stat in stats])

    def scalars(self, pattern: str | Sequence[str] = "*", *, steps: Steps = None, exact: bool = False) -> pa.Table:
        """Table (step, name, value, time) of logged numbers, in order of (name, step).

        `exact`: the names are plain names, not patterns; those that were never logged are left out.
        """
        state = self._now
        filter = parse_steps(steps, state.last_step())
        if not exact:
            return read_scalars(state, pattern, filter)
        wanted = set(map(current_scalar, [pattern] if isinstance(pattern, str) else pattern))
        return read_named(state, {i: n for i, n in state.catalog.require().scalar_names.items() if n in wanted}, filter)

    def scalar_lines(
        self, pattern: str | Sequence[str] = "*", *, steps: Steps = None, exact: bool = False, points: int | None = None
    ) -> dict[str, Column]:
        """Logged numbers by name, each as arrays of steps and values; with `points`, thinned for drawing."""
        table = self.scalars(pattern, steps=steps, exact=exact)
        return by_series(table if points is None else thin(table, points), ("name",))

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of all logged numbers, in the order in which they were first logged."""
        return tuple(self._now.catalog.require().scalar_names.values())

    def sites(self, pattern: str = "*") -> pa.Table:
        """Table (kind, site, shape, dtype, owner, module_type, aliases) of the places that were measured."""
        return site_table(self._now, pattern)

    def events(self) -> pa.Table:
        """Table (time, step, type, severity, message, details) of what happened once."""
        return event_table(self._now)

    def system(self) -> pa.Table:
        """Table (time, step, name, value) of readings of the machine."""
        return system_table(self._now)

    def sql(self, query: str, limit: int = DEFAULT_LIMIT) -> pa.Table:
        """The answer to one SELECT over the tables `stats, scalars, events, sites, system, runs`, and LayerClaw's.

        run.sql("select site, max(norm) from stats where kind = 'grad' group by site")
        """
        return run_query(self._now, query, limit)

    def follow(
        self, stats: str | Sequence[str] = (), scalars: str | Sequence[str] = "*", *, poll_s: float = 0.25
    ) -> Iterator[Update]:
        """New rows as they are written, from the first on; ends when the run does."""
        return follow(self._state, stats, scalars, poll_s=poll_s)

    def structure(self) -> Mapping[str, Any]:
        """What the model is made of: modules, parameters, optimizers, loss, as in model.json; {} when unknown."""
        return read_structure(self._now)

    def window(self, patterns: Sequence[str] | None = None, *, max_rows: int | None = None) -> Window:
        """The run as rules see it: the series of these patterns (else of all rules), every scalar, what is known.

        `max_rows`: of a longer run, steps are merged until about this many rows are left, and scalars are left out.
        """
        from sonde.diagnose.check import required_series

        wanted = required_series() if patterns is None else patterns
        if max_rows is not None:
            return read_merged_window(self._now, wanted, self.structure(), max_rows)
        return read_window(self._now, wanted, self.structure())

    def findings(self) -> list[Finding]:
        """What is wrong, where, since when and what to do; the most likely root first.

        Worked out anew from what was recorded, so an old run is judged by today's rules. A rule that fails is named in
        `warnings` and skipped.
        """
        return list(self.diagnosis().findings)

    def health(self) -> pa.Table:
        """Table (step, site, score): 0 to 100 for each layer, and for the run as a whole under the site "".

        docs/diagnose.md has the formula. Neither the scale of the loss nor the size of the model moves a score.
        """
        found = self.diagnosis().health
        return health_table(found.steps, found.sites, found.scores)

    def diagnosis(self) -> Diagnosis:
        """Findings and health of one reading, and what could not be checked because it was not recorded."""

        def skipped(name: str, error: Exception) -> None:
            self._state.damage[f"rule {name}"] = f"the rule {name} failed and was skipped: {error!r}"

        return diagnose(self.window(all_required_series()), on_error=skipped)

    def live_findings(self) -> pa.Table:
        """Table (id, time, rule, severity, confidence, step, last_step, sites, …) of what was found during training."""
        return finding_table(self._now)

    def checkpoints(self) -> pa.Table:
        """Table (step, time, path, metrics, num_bytes, problem) of the checkpoints that the run saved."""
        return checkpoint_list_table(run_checkpoints(self._now))

    def tensor(self, name: str, *, steps: Steps = None) -> xarray.DataArray:
        """One whole tensor over the snapshots that have it, read when its values are asked for: dims step, d0, d1, …

        run.tensor("param/layers.3.mlp.weight").sel(step=500)
        """
        self._require_attempts()
        return tensor_over_steps(partial(_open_tensor_store, self.path, self._version, self._attempt), name, steps)

    def snapshot(self, step: int | str = "latest", pattern: str = "*") -> LazyTensors:
        """The tensors of one snapshot by name, each read when asked for; a negative step counts from the last.

        Of a step that was made again, the snapshot of the last attempt that covers it; `run.attempt(0)` has the others.
        """
        return snapshot_tensors(self.tensor_store(), step, pattern)

    def snapshots(self) -> pa.Table:
        """Table (step, time, reason, num_tensors, bytes, stored_bytes, ratio, attempt) of the snapshots."""
        return snapshot_table(self._now, self.tensor_store())

    def tensor_store(self, *, local: bool = False) -> SnapshotView:
        """The snapshots themselves, as they are kept: steps, documents, tensors and parts of tensors. `local`: only
        those that are on this disk."""
        self._require_attempts()
        if local:
            inside(self.path, "tensors")
            return open_local_tensor_store(self.path, attempt=self._attempt)
        return _open_tensor_store(self.path, self._version, self._attempt)

    lake = tensor_store  # its earlier name

    def _require_attempts(self) -> None:
        """Without the catalog of a run with several attempts no one can tell which snapshots are abandoned."""
        state = self._now
        if state.manifest.heartbeat.attempt > 0:
            state.catalog.require()

    def version(self, *, branch: str | None = None, tag: str | None = None, commit: str | None = None) -> Run:
        """The same run with its whole tensors as they were there: run.version(tag="best").snapshot("latest").

        Branches, tags and commits belong to snapshots that are kept in an Icechunk repository.
        """
        asked = {"branch": branch, "tag": tag, "commit": commit}
        version = {key: value for key, value in asked.items() if value is not None}
        return Run(self.path, version=version, attempt=self._attempt)

    @property
    def tensors(self) -> RunTensors:
        """What whole tensors tell: evolution, distribution, spectra, similarity, CKA, low-rank updates.

        run.tensors.evolution("param/*").to_pandas()
        """
        self._require_attempts()
        return RunTensors(self.path, self._version, self._attempt)

    def verify(self) -> list[str]:
        """Hash every sealed file, read every log and every snapshot on this disk: what is damaged, in words.

        Empty when all is as it was written.
        """
        return [*self._now.verify(), *damaged_snapshots(self.path, is_live=self._now.is_held)]

    def coverage(self) -> Mapping[str, Any]:
        """What the recorder said about the sites it could and could not see; empty when it said nothing."""
        coverage = self._now.manifest.facts.get("coverage")
        return coverage if isinstance(coverage, Mapping) else {}

    def plot(self, pattern: str | Sequence[str], **options: Any) -> Any:
        """A matplotlib figure of series (`grad/*/rms`) or scalars (`loss`): lines while there are few, else a heatmap.

            run.plot("grad/*/rms").savefig("gradients.svg")

        Options: `steps`, `style` ("lines", "heatmap"), `log`, `title`, `size` in inches. docs/report.md has pictures.
        """
        return _view("plot")(self, pattern, **options)

    def _summary(self) -> Summary:
        state = self._now
        status, last = state.status(), state.last_step()
        facts: list[tuple[str, object]] = [
            ("status", f"{status.status}: {status.reason}" if status.reason else status.status),
            ("id", self.id),
            ("created", f"{self.created:%Y-%m-%d %H:%M:%S} UTC"),
            ("last step", f"{last:,}" if last >= 0 else "none"),
            ("sites", f"{len(state.catalog.sites):,}" if state.catalog.sites else ""),
            ("tags", ", ".join(self.tags)),
            ("notes", self.notes),
            ("config", ", ".join(f"{key}={value}" for key, value in flatten(self.config).items())),
            ("path", self.path),
        ]
        try:
            scalars = self.scalars()
        except CorruptError:  # named in the warnings, which are shown
            scalars = read_scalars(state, (), ALL_STEPS)
        return summarize(f"{self.project}/{self.name}", facts, scalars, self.warnings)

    def __rich__(self) -> Any:
        return as_rich(self._summary())

    def _repr_html_(self) -> str:
        return str(_view("card")(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """A card in a notebook."""
        return dict(_view("bundle")(self))
