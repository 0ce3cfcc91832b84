"""The reading API: `open` a run, list `runs`, `compare` two. Composes `read`; computes nothing itself.

Every view is built on this file: what views need from `read` is a method of `Run` or listed in `__all__` here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, overload

from sonde.config import Settings
from sonde.diagnose.diagnosis import Diagnosis, all_required_series, diagnose
from sonde.diagnose.finding import Finding
from sonde.diagnose.findings import Findings
from sonde.display import Results, html_of, load_view, visible
from sonde.errors import CorruptError, RunError, SondeError, UnknownNameError, UsageError
from sonde.read.compare.divergence import Divergence
from sonde.read.compare.runs import Comparison, compare_states
from sonde.read.compare.weights import WeightComparison, compare_weights
from sonde.read.run.catalog import Catalog, Segment
from sonde.read.run.checkpoints import (
    Checkpoint,
    checkpoint_list_table,
    checkpoints_folder,
    list_checkpoints,
    run_checkpoints,
    verify_checkpoint,
)
from sonde.read.run.folder import default_dir, find_run, newest_first, open_inside, read_manifest, run_folders
from sonde.read.run.link import linked_run
from sonde.read.run.manifest import Manifest
from sonde.read.run.segments import Span
from sonde.read.run.sharded import open_state
from sonde.read.run.state import RunState
from sonde.read.run.status import Status, true_status
from sonde.read.run.steps import ALL_STEPS, Steps, parse_steps, step_slice
from sonde.read.run.structure import read_structure
from sonde.read.run.tables import (
    attempt_table,
    check_attempt,
    event_table,
    finding_table,
    health_table,
    site_table,
    system_table,
)
from sonde.read.series.by_rank import rank_table, stats_by_rank
from sonde.read.series.close_up import Histogram, SiteRow, newest_row, read_histogram
from sonde.read.series.columns import read_lines
from sonde.read.series.cut import by_series, thin
from sonde.read.series.follow import Update, follow
from sonde.read.series.heatmap import Heat, HeatQuestion, LiveCells
from sonde.read.series.pyramid import make_columns, read_overview
from sonde.read.series.scalars import read_named, read_scalars
from sonde.read.series.sql import DEFAULT_LIMIT, run_query
from sonde.read.series.stats import read_stats
from sonde.read.series.summary import Summary, as_rich, summarize
from sonde.read.series.sums import Sums, read_sums
from sonde.read.series.window import read_merged_window, read_window
from sonde.read.table import Table
from sonde.read.tensors.analysis.difference import difference
from sonde.read.tensors.analysis.run_tensors import RunTensors
from sonde.read.tensors.check import damaged_snapshots
from sonde.read.tensors.exports import open_export
from sonde.read.tensors.files.formats import is_tensor_file, open_tensors
from sonde.read.tensors.lazy import LazyTensors, TensorSpec, of_kind
from sonde.read.tensors.readers import TensorStore
from sonde.read.tensors.stores import upload_warnings
from sonde.read.tensors.tensors import snapshot_tensors
from sonde.read.tensors.view import SnapshotView
from sonde.read.text import aligned, cell, is_number, shown_rows, terminal_width
from sonde.schema.layout import RunStatus
from sonde.schema.losses import training_loss
from sonde.schema.mutes import parse_mutes
from sonde.schema.old_names import current_scalar, current_stat
from sonde.schema.records import flatten
from sonde.schema.window import Column, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sonde.diagnose.explanation import Explanation

# Names for views, which import from here and never from `read`.
__all__ = [
    "Checkpoint",
    "Comparison",
    "Divergence",
    "Heat",
    "LazyTensors",
    "LiveCells",
    "Manifest",
    "Run",
    "Runs",
    "Segment",
    "SnapshotView",
    "Steps",
    "Table",
    "TensorSpec",
    "TensorStore",
    "WeightComparison",
    "by_series",
    "checkpoints_folder",
    "compare",
    "compare_weights",
    "difference",
    "find_run",
    "is_number",
    "linked_run",
    "list_checkpoints",
    "open",
    "open_export",
    "open_inside",
    "open_weights",
    "read_head",
    "read_manifest",
    "run_folders",
    "runs",
    "shown_rows",
    "snapshot_tensors",
    "step_slice",
    "verify_checkpoint",
    "weights_of",
]

_MAX_RUNS: Final = 20
"""Number of runs shown in a list of runs."""


def open(path: str | os.PathLike[str] = "latest", *, dir: str | os.PathLike[str] | None = None) -> Run:
    """Open a run by folder, id, "project/name", a unique prefix, or "latest"; "RUN@attempt=0" opens one attempt.

    run = sonde.open("runs/latest")
    run.stats("grad/*/norm")
    """
    name, _, number = os.fspath(path).rpartition("@attempt=")
    if name and number.removeprefix("-").isdigit():
        return open(name, dir=dir).attempt(int(number))
    return Run(find_run(path, None if dir is None else Path(dir)))


def runs(
    dir: str | os.PathLike[str] | None = None,
    project: str | None = None,
    *,
    status: RunStatus | None = None,
    tag: str | None = None,
    limit: int | None = None,
) -> Runs:
    """All runs in a folder of runs, or those of a project, with a status or with a tag; newest first.

    With a limit, only the folders of the newest runs are opened. Those that cannot be opened are left out; `broken` has
    their errors.
    """
    if status is not None and status not in get_args(RunStatus):
        raise UnknownNameError("status", status, get_args(RunStatus))
    found: list[Run] = []
    broken: dict[Path, SondeError] = {}
    num_left = 0
    folders = newest_first(run_folders(_dir(dir)))
    for number, folder in enumerate(folders):
        if limit is not None and len(found) == limit:
            num_left = len(folders) - number
            break
        run = _try_open(folder)
        if not isinstance(run, Run):
            broken[folder] = run
        elif project in (None, run.project) and (tag is None or tag in run.tags) and status in (None, run.status):
            found.append(run)
    return Runs(sorted(found, key=lambda run: (run.created, run.path.name), reverse=True), broken, num_left)


def read_head(folder: Path) -> tuple[Manifest, Status]:
    """Read a run's run.json and its true status, without opening the rest."""
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
    dir: str | os.PathLike[str] | None = ...,
) -> Comparison | WeightComparison: ...
def compare(
    a: str | os.PathLike[str] | Run,
    b: str | os.PathLike[str] | Run,
    *,
    stats: str | Sequence[str] = "*/*/norm",
    tolerance: float | None = None,
    kind: str = "param",
    dir: str | os.PathLike[str] | None = None,
) -> Comparison | WeightComparison:
    """Compare two runs, or the tensors of two files or snapshots ("RUN@500").

        sonde.compare("gpt/eager", "gpt/compiled").first_divergence  # step, site, both values, the tolerance
        sonde.compare("a.safetensors", "gpt/warmup@500").tensors

    Without a tolerance, runs are compared up to rounding, as derived from the dtypes of the recorded tensors, and files
    element by element. When compared with a file, a run means its last snapshot; `kind` selects the tensors of a
    snapshot. Layers of other frameworks are matched by their shapes.
    """
    weights = [open_weights(source, dir=dir, kind=kind) for source in (a, b)]
    if any(found is not None for found in weights):
        ours, theirs = (
            found
            if found is not None
            else weights_of(source if isinstance(source, Run) else open(source, dir=dir), kind)
            for source, found in zip((a, b), weights, strict=True)
        )
        return compare_weights(ours, theirs, tolerance=tolerance)
    first, second = (run if isinstance(run, Run) else open(run, dir=dir) for run in (a, b))
    return compare_states((first._now, second._now), (first._label, second._label), stats, tolerance)


def open_weights(
    source: str | os.PathLike[str] | Run, *, dir: str | os.PathLike[str] | None = None, kind: str = "param"
) -> LazyTensors | None:
    """Open the tensors of a weights file or of a snapshot, "RUN@500" or "RUN@latest"; None if it names a run."""
    if isinstance(source, Run):
        return None
    text = os.fspath(source)
    name, _, step = text.rpartition("@")
    if name and (step == "latest" or step.removeprefix("-").isdigit()):
        return weights_of(open(name, dir=dir), kind, step if step == "latest" else int(step))
    if is_tensor_file(text):
        return open_tensors(text)
    if name and _names_a_run(name, dir) and not _names_a_run(text, dir):
        raise UsageError(
            f'invalid step "{step}" of {name}: name a snapshot as RUN@STEP, e.g. {name}@500 or {name}@latest.'
        )
    return None


def weights_of(run: Run, kind: str = "param", step: int | str = "latest") -> LazyTensors:
    """The tensors of one kind in a snapshot, under the names used in weights files."""
    return of_kind(run.tensors.snapshot(step), kind, f"{run.project}/{run.name}")


def _names_a_run(name: str, dir: str | os.PathLike[str] | None) -> bool:
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


class Runs(Results["Run"]):
    """Runs, newest first; a list that shows itself."""

    def __init__(
        self, runs: Iterable[Run] = (), broken: Mapping[Path, SondeError] | None = None, num_left: int = 0
    ) -> None:
        super().__init__(runs)
        self.broken = dict(broken or {})
        """The folders that cannot be opened, each with its error."""
        self.num_left = num_left
        """The number of older folders that were not opened because of the limit."""

    def __repr__(self) -> str:
        if not self:
            return "No runs"
        columns = ["status", "run", "id", "steps", "loss", "started (UTC)"]
        rows = [_run_cells(run) for run in self[:_MAX_RUNS]]
        lines, _ = aligned(columns, rows, [name in ("steps", "loss") for name in columns], terminal_width())
        more = [f"and {len(self) - _MAX_RUNS:,} more"] if len(self) > _MAX_RUNS else []
        return "\n".join([f"{len(self):,} run{'' if len(self) == 1 else 's'}", *lines, *more])


def _run_cells(run: Run) -> list[str]:
    name = f"{visible(run.project)}/{visible(run.name)}"
    return [run.status, name, run.id, f"{run.last_step + 1:,}", cell(_last_loss(run)), f"{run.created:%Y-%m-%d %H:%M}"]


def _last_loss(run: Run) -> float | None:
    """The last training loss; None if there is none or it cannot be read."""
    try:
        name = training_loss(run.scalar_names)
        found = {} if name is None else run.scalar_lines(name, exact=True)
    except CorruptError:
        return None
    return next((float(values[-1]) for _, values in found.values()), None)


MOVED_TO_TENSORS: Final = {
    "lake": "store",
    "num_snapshots": "num_snapshots",
    "snapshot": "snapshot",
    "snapshots": "snapshots",
    "tensor": "get",
    "tensor_store": "store",
    "version": "version",
}
"""Old names of methods of `Run`, and their names in `run.tensors`."""


class Run:
    """A recorded run, read-only. Every result reflects the current files.

    `damage` collects descriptions of damaged files, by file; a viewer that opens a run several times may share it.
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
        """Freeze the view of the run inside the block: files are checked for new data once, at its start.

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
        """The contents of run.json."""
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
        """`running`, `finished`, `crashed` or `interrupted`; correct even after kill -9."""
        return self._now.status().status

    @property
    def reason(self) -> str:
        """Why the run ended, in words; empty if it finished normally or is still running."""
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
        """Start time of the run, in UTC."""
        try:
            return datetime.fromtimestamp(self._state.manifest.created_time, UTC)
        except (OverflowError, OSError, ValueError):  # not a valid date
            return datetime.fromtimestamp(0, UTC)

    @property
    def last_step(self) -> int:
        """The last recorded step; -1 before the first."""
        return self._now.last_step()

    @property
    def catalog(self) -> Catalog:
        """The catalog: sites and scalars by id, sealed files, attempts. Its `require()` raises if it is damaged."""
        return self._now.catalog

    @property
    def num_rows(self) -> int:
        """Number of sketches in sealed files."""
        return sum(segment.num_rows for segment in self._now.segments_of("stats"))

    @property
    def num_files(self) -> int:
        """Number of sealed files that hold sketches."""
        return len(self._now.segments_of("stats"))

    @property
    def revision(self) -> tuple[object, ...]:
        """A value that changes whenever the run has new data; use it as a cache key."""
        state, catalog = self._now, self._now.catalog
        counts = len(catalog.segments), len(catalog.sites), len(catalog.attempts)
        return state.last_step(), state.status().status, *counts

    @property
    def _label(self) -> str:
        """The name of the run, with the attempt if one was selected."""
        suffix = "" if self._attempt is None else f"@attempt={self._attempt}"
        return f"{self.project}/{self.name}{suffix}"

    @property
    def num_attempts(self) -> int:
        """Number of attempts: 1 unless training was resumed or returned to an earlier step."""
        return max(len(self._now.catalog.attempts), 1)

    def attempts(self) -> Table:
        """Table (attempt, first_step, last_step, started, reason). The last attempt that covers a step counts."""
        return Table(attempt_table(self._now))

    def attempt(self, number: int) -> Run:
        """The run as it was at the end of this attempt, including the steps that a later one abandoned.

        run.attempt(0).scalars("loss")
        """
        return Run(self.path, version=self._version, attempt=check_attempt(self._now, number))

    @property
    def warnings(self) -> list[str]:
        """Problems with the recording: damaged files, incomplete logs, dropped rows, pending uploads."""
        return [*self._now.warnings(), *upload_warnings(self.path, is_live=self._now.is_held)]

    def stats(self, pattern: str | Sequence[str], *, steps: Steps = None, by_rank: bool = False) -> Table:
        """Long table (step, kind, site, stat, value) of the series that match the patterns.

            run.stats("grad/*/norm", steps=slice(-100, None)).to_pandas()

        Damaged files are left out and listed in `warnings`. Raises CorruptError if no other file has the data.
        `by_rank` adds a column `rank`: what each rank recorded of a sharded model, instead of the whole tensors.
        """
        state = self._now
        read = stats_by_rank if by_rank else read_stats
        return Table(read(state, pattern, parse_steps(steps, state.last_step())))

    def ranks(self) -> Table:
        """Table (rank, host, pid, status, last_step, silent_s, loss, grad_norm, nonfinite) of the ranks that recorded:
        all of a sharded model, otherwise the first. `grad_norm` is the norm of the rank's own parts."""
        return Table(rank_table(self._now))

    def overview(self, pattern: str | Sequence[str], *, steps: Steps = None, points: int = 1000) -> Table:
        """Like `stats`, downsampled for plotting: minimum and maximum of about `points` intervals of each series.

        If that would be millions of rows, steps are merged by fours; the metadata says how many make a row.
        """
        state = self._now
        return Table(read_overview(state, pattern, parse_steps(steps, state.last_step()), points))

    def lines(
        self, pattern: str | Sequence[str], *, steps: Steps = None, points: int | None = None
    ) -> dict[str, Column]:
        """Series by name, each as arrays of steps and values; with `points`, downsampled like `overview`.

        steps, values = run.lines("grad/*/norm")["grad/0.weight/norm"]
        """
        table = (
            self.stats(pattern, steps=steps) if points is None else self.overview(pattern, steps=steps, points=points)
        )
        return by_series(table, ("kind", "site", "stat"))

    def site_lines(
        self, stat: str, sites: Sequence[int], steps: range, *, max_rows: int
    ) -> tuple[dict[int, Column], bool]:
        """One stat of the given sites, by id, and whether steps were merged because there were more than `max_rows`."""
        return read_lines(self._now, current_stat(stat), sites, Span(steps.start, steps.stop - 1), max_rows)

    def heat(self, stat: str, sites: Sequence[int]) -> Heat:
        """The cells of a heatmap of one stat, one row per given site, read file by file."""
        return Heat(self._now, HeatQuestion.of(self._now, current_stat(stat), sites))

    def sums(self, group_of: Mapping[int, int], num_groups: int, steps: range, *, columns: int) -> Sums:
        """Sketches of sites, by id, merged into groups and at most `columns` columns of steps."""
        state = self._now
        return read_sums(state, group_of, num_groups, make_columns(state, steps.start, steps.stop - 1, columns))

    def histogram(self, site: int, steps: range, *, columns: int) -> Histogram:
        """The histogram of exponents of one site, by id, in at most `columns` columns of steps."""
        state = self._now
        return read_histogram(state, site, make_columns(state, steps.start, steps.stop - 1, columns))

    def newest_row(self, site: int, step: int, stats: Sequence[str]) -> SiteRow | None:
        """The last sketch of one site, by id, up to a step; None if there is none."""
        return newest_row(self._now, site, step, [current_stat(stat) for stat in stats])

    def scalars(self, pattern: str | Sequence[str] = "*", *, steps: Steps = None, exact: bool = False) -> Table:
        """Table (step, name, value, time) of logged numbers, ordered by (name, step).

        With `exact`, the names are plain names rather than patterns; names that were never logged are left out.
        """
        state = self._now
        filter = parse_steps(steps, state.last_step())
        if not exact:
            return Table(read_scalars(state, pattern, filter))
        wanted = set(map(current_scalar, [pattern] if isinstance(pattern, str) else pattern))
        names = {i: n for i, n in state.catalog.require().scalar_names.items() if n in wanted}
        return Table(read_named(state, names, filter))

    def scalar_lines(
        self, pattern: str | Sequence[str] = "*", *, steps: Steps = None, exact: bool = False, points: int | None = None
    ) -> dict[str, Column]:
        """Logged numbers by name, each as arrays of steps and values; with `points`, downsampled for plotting."""
        table = self.scalars(pattern, steps=steps, exact=exact)
        return by_series(table if points is None else thin(table, points), ("name",))

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of all logged numbers, in the order in which they were first logged."""
        return tuple(self._now.catalog.require().scalar_names.values())

    def sites(self, pattern: str = "*") -> Table:
        """Table (kind, site, shape, dtype, owner, module_type, aliases) of all recorded sites."""
        return Table(site_table(self._now, pattern))

    def events(self) -> Table:
        """Table (time, step, type, severity, message, details) of events."""
        return Table(event_table(self._now))

    def system(self) -> Table:
        """Table (time, step, name, value) of system readings: CPU, memory, disk, GPU."""
        return Table(system_table(self._now))

    def sql(self, query: str, limit: int = DEFAULT_LIMIT) -> Table:
        """Run one SELECT over the tables `stats, scalars, events, sites, system, runs`, and LayerClaw's.

        run.sql("select site, max(norm) from stats where kind = 'grad' group by site")
        """
        return Table(run_query(self._now, query, limit))

    def follow(
        self, stats: str | Sequence[str] = (), scalars: str | Sequence[str] = "*", *, poll_s: float = 0.25
    ) -> Iterator[Update]:
        """Yield rows as they are written, starting with the first; ends when the run does."""
        return follow(self._state, stats, scalars, poll_s=poll_s)

    def structure(self) -> Mapping[str, Any]:
        """The structure of the model as in model.json: modules, parameters, optimizers, loss; {} if unknown."""
        return read_structure(self._now)

    def window(self, patterns: Sequence[str] | None = None, *, max_rows: int | None = None) -> Window:
        """The run as the rules see it: the series of these patterns (default: of all rules), all scalars, and facts.

        With `max_rows`, steps of a longer run are merged to about that many rows, and scalars are left out.
        """
        from sonde.diagnose.check import required_series

        wanted = required_series() if patterns is None else patterns
        if max_rows is not None:
            return read_merged_window(self._now, wanted, self.structure(), max_rows)
        return read_window(self._now, wanted, self.structure())

    def findings(self) -> Findings:
        """Findings: what went wrong, where, since which step, and how to fix it; most likely root cause first.

        Computed from the recorded data, so an old run is checked with the current rules. A rule that fails is skipped
        and listed in `warnings`.
        """
        return Findings.of(self.diagnosis())

    def health(self) -> Table:
        """Table (step, site, score): 0 to 100 for each layer, and for the whole run under the site "".

        docs/diagnose.md has the formula. Scores do not depend on the scale of the loss or the size of the model.
        """
        found = self.diagnosis().health
        return Table(health_table(found.steps, found.sites, found.scores))

    def diagnosis(self) -> Diagnosis:
        """Findings, health, and what could not be checked because it was not recorded.

        The mutes of the run apply, and those of `sonde.yaml` and `SONDE_MUTE` here: see `muted` of the result.
        """

        def skipped(name: str, error: Exception) -> None:
            self._state.damage[f"rule {name}"] = f"the rule {name} failed and was skipped: {error!r}"

        mutes = parse_mutes(Settings.load().mute)
        return diagnose(self.window(all_required_series()), on_error=skipped, mutes=mutes)

    def explain(self, finding: Finding | str | int = 1) -> Explanation:
        """Why a finding was made: evidence, the rules that were considered and what rejected them, what to record.

            run.explain(run.findings()[0])

        A finding is also named by its rule or its number, from 1.
        """
        from sonde.diagnose.explanation import explain

        found = self.diagnosis()
        findings = Findings.of(found)
        if isinstance(finding, Finding):
            same = [one for one in findings if (one.rule, one.sites) == (finding.rule, finding.sites)]
            return explain(found, next(iter(same), finding))
        if isinstance(finding, int):
            if not 1 <= finding <= len(findings):
                raise UsageError(f"no finding {finding}: the run has {len(findings)}.")
            return explain(found, findings[finding - 1])
        chosen = next((one for one in findings if one.rule == finding), None)
        if chosen is None:
            raise UnknownNameError("finding", finding, {one.rule for one in findings})
        return explain(found, chosen)

    def live_findings(self) -> Table:
        """Table (id, time, rule, severity, confidence, step, last_step, sites, …) of findings made during training."""
        return Table(finding_table(self._now))

    def checkpoints(self) -> Table:
        """Table (step, time, path, metrics, num_bytes, problem) of the checkpoints that the run saved."""
        return Table(checkpoint_list_table(run_checkpoints(self._now)))

    @property
    def tensors(self) -> RunTensors:
        """Snapshots and whole tensors, and their analyses: evolution, distribution, spectra, similarity, CKA.

        run.tensors.snapshot("latest")["param/0.weight"]
        run.tensors.evolution("param/*").to_pandas()
        """
        return RunTensors(self.path, self._version, self._attempt, state=lambda: self._now)

    if not TYPE_CHECKING:  # type checkers would take every name for one that moved

        def __getattr__(self, name: str) -> Any:
            """The methods that moved to `run.tensors`, under their old names."""
            if name not in MOVED_TO_TENSORS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            new = MOVED_TO_TENSORS[name]
            warnings.warn(f"run.{name} is now run.tensors.{new}", DeprecationWarning, stacklevel=2)
            return self._at_version if name == "version" else getattr(self.tensors, new)

    def _at_version(self, **asked: str | None) -> Run:
        version = {key: value for key, value in asked.items() if value is not None}
        return Run(self.path, version=version, attempt=self._attempt)

    def verify(self) -> list[str]:
        """Check every sealed file, log and snapshot on this disk; returns a description of each problem.

        The list is empty if everything is intact.
        """
        return [*self._now.verify(), *damaged_snapshots(self.path, is_live=self._now.is_held)]

    def coverage(self) -> Mapping[str, Any]:
        """The recorder's account of the sites it could and could not record; empty if it gave none."""
        coverage = self._now.manifest.facts.get("coverage")
        return coverage if isinstance(coverage, Mapping) else {}

    def plot(
        self,
        pattern: str | Sequence[str],
        *,
        steps: Steps = None,
        style: Literal["auto", "lines", "heatmap", "evolution", "spectra"] = "auto",
        log: bool | None = None,
        title: str | None = None,
        size: tuple[float, float] | str | None = None,
    ) -> Figure:
        """Plot series (`grad/*/rms`) or scalars (`loss`) with matplotlib: lines for a few series, otherwise a heatmap.

            run.plot("grad/*/rms").savefig("gradients.svg")
            run.plot("param/0.weight", style="evolution")  # of whole tensors over snapshots; also "spectra"

        `size` is in inches, also as "6.4x3.2". Examples: docs/report.md.
        """
        figure: Figure = load_view("plot")(self, pattern, steps=steps, style=style, log=log, title=title, size=size)
        return figure

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
        except CorruptError:  # listed in the warnings, which are shown
            scalars = read_scalars(state, (), ALL_STEPS)
        return summarize(f"{self.project}/{self.name}", facts, scalars, self.warnings)

    def __rich__(self) -> Any:
        return as_rich(self._summary())

    def _repr_html_(self) -> str:
        return html_of(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Show the run as a card in a notebook."""
        return {"text/html": html_of(self), "text/plain": repr(self)}
