"""Settings: default < YAML file < SONDE_* variable < keyword. Each value records its origin; a typo is an error."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as EnvSyntaxError

from sonde.display import print_line
from sonde.errors import SettingsError, UnknownNameError, expectation, nearest
from sonde.schema.mutes import Mute, parse_mutes
from sonde.schema.old_names import REMOVED_SETTINGS, SETTING_VALUES, SETTINGS

PREFIX: Final = "SONDE_"
DEFAULT_FILE: Final = "sonde.yaml"
FILE_VARIABLE: Final = "SONDE_CONFIG"
# Variables that are read elsewhere: settings files, tracebacks, the native kernel, parts to build during installation,
# and the browser that prints PDFs.
_OTHER_VARIABLES: Final = (
    FILE_VARIABLE, "SONDE_DEBUG", "SONDE_NATIVE", "SONDE_SKIP_WEB", "SONDE_SKIP_NATIVE", "SONDE_CHROMIUM",
)  # fmt: skip
_MAPS: Final = ("record.snapshots", "record.sites")
"""Settings whose value may be a map."""
_TEST_PREFIX: Final = "SONDE_TEST_"
_noticed: Final[set[str]] = set()
"""Old names that were already reported in this process."""


BASIC: Final = (
    "dir", "project", "mode", "budget", "budget_seconds", "verbose", "live_rules", "check_finite", "system_metrics",
)  # fmt: skip
"""The settings that users set first, in this order. All others are advanced."""


class WriterSettings(BaseModel):
    """Settings of the writer thread: when it flushes and seals, and how much it buffers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flush_interval_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Seconds between flushes to disk: the most that is lost if the machine fails."""
    flush_mib: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Amount of waiting data, in MiB, that also triggers a flush."""
    seal_steps: int = Field(default=1024, ge=1)
    """Number of steps after which the log is sealed into a Parquet segment."""
    seal_mib: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    """Size of the log, in MiB, at which it is also sealed."""
    queue_mib: float = Field(default=64.0, gt=0, allow_inf_nan=False)
    """MiB that may wait for the writer. Beyond that, rows are dropped and counted; training is never blocked."""
    heartbeat_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Seconds between heartbeats in run.json."""
    system_interval_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds between readings of CPU, memory, disk and GPU."""


class RecordSettings(BaseModel):
    """The keywords of `watch`, for models that are watched without them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    when: Any = None
    """Schedule of every kind that has no other one: `every(10)`, `first(100) | every(500)`, a number, true or false."""
    params: Any = None
    """Schedule of parameters."""
    grads: Any = None
    """Schedule of gradients."""
    updates: Any = None
    """Schedule of updates."""
    optim: Any = None
    """Schedule of the optimizer's state."""
    activations: Any = None
    """Schedule of activations, or `in-graph`."""
    activation_grads: Any = None
    """Schedule of the gradients of activations."""
    inspect: Any = None
    """Schedule of the measurements that rules need."""
    sites: Any = None
    """A glob, or a list of them; with `!` in front, what to leave out."""
    snapshots: Any = None
    """Whole tensors: true, a schedule, or a map with `when`, `kinds`, `sites`, `store`, `options`, `on_finding` and
    `at_once`."""
    mirror: Any = None
    """wandb, tensorboard, mlflow or trackio, or a list of them."""

    @field_validator("*", mode="before")
    @classmethod
    def _parse_text(cls, value: Any) -> Any:
        """A variable or an option is YAML: a number, a map, or plain text."""
        if not isinstance(value, str):
            return value
        import yaml

        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:  # a glob such as "*.weight" or "!head.*" is not YAML
            return value

    @field_validator("*", mode="after")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Text and maps are read when a run starts, by what knows schedules and snapshots."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and info.field_name in ("sites", "mirror"):
            raise PydanticCustomError("text", "it should be a name or a list of names")
        if is_number and value < 1:
            raise PydanticCustomError("schedule", "it should be every(10), first(100), true, false or at least 1")
        return value


class RecordingSettings(TypedDict, total=False):
    """The settings as keywords, without those that `sonde.init` takes by position. A test compares them to `Settings`,
    which documents them."""

    mode: Literal["enabled", "disabled"]
    budget: float | None
    budget_seconds: float
    memory_high: float
    memory_critical: float
    hist_every: int
    hist_samples: int
    activation_rows: int | None
    live_rules: bool
    verbose: bool
    mute: str | Sequence[str | Mapping[str, Any] | Mute]
    check_finite: bool
    max_errors: int
    exit_deadline_s: float
    finish_deadline_s: float
    system_metrics: bool
    mask_secrets: bool
    snapshot_mib: float | None
    snapshot_wait_s: float
    record: RecordSettings | Mapping[str, Any]
    writer: WriterSettings | Mapping[str, Any]


class SettingKeywords(RecordingSettings, total=False):
    """Every setting as a keyword."""

    dir: str | os.PathLike[str]
    project: str


class Setting(NamedTuple):
    """A setting as shown by `sonde doctor --settings`."""

    name: str
    value: Any
    origin: str
    meaning: str
    is_advanced: bool
    """Whether few users need to set it."""


class Settings(BaseSettings):
    """All settings, frozen.

    >>> Settings.load(budget=0.02).origin("budget")
    'keyword'
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        validate_default=False,
    )

    dir: Path = Path("runs")
    """Folder in which runs are stored."""
    project: str = Field(default="default", min_length=1)
    """Project of the run: the subfolder that groups related runs."""
    mode: Literal["enabled", "disabled"] = "enabled"
    """"disabled" makes every call do nothing."""
    budget: float | None = Field(default=0.01, gt=0, le=1, allow_inf_nan=False)
    """Fraction of the time that recording may add to a run, in addition to `budget_seconds`; none means no limit."""
    budget_seconds: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Seconds that recording may add to any run. While most of them are left, everything is recorded as scheduled."""
    memory_high: float = Field(default=0.95, gt=0, le=1)
    """Fraction of host or GPU memory in use above which sonde records less."""
    memory_critical: float = Field(default=0.98, gt=0, le=1)
    """Fraction of memory in use above which sonde records only gradients."""
    hist_every: int = Field(default=10, ge=1)
    """Record a histogram every n steps."""
    hist_samples: int = Field(default=512, ge=1)
    """Number of elements of a tensor that a histogram samples."""
    activation_rows: int | None = Field(default=None, ge=1)
    """Number of rows (along the last dimension) of an activation to read, different ones each step; none means all."""
    live_rules: bool = True
    """Run the rules during training, in a separate process and for at most 0.3 % of the time."""
    verbose: bool = True
    """Print a line at the start, at the end, and for each kind of problem found: on stderr, in a notebook on stdout."""
    mute: str | Sequence[str | Mapping[str, Any] | Mute] = ()
    """Findings not to report: rules (`gradient_noise`, `dead_relu:layers.3.*`) or maps of rule, sites, until and
    reason."""
    check_finite: bool = True
    """Check the forward pass for NaN and infinity at every step, and name the module where one first appeared."""
    max_errors: int = Field(default=10, ge=1)
    """Number of internal errors after which sonde turns itself off and says so."""
    exit_deadline_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Longest time, in seconds, that an exiting process waits for the writer."""
    finish_deadline_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Longest time, in seconds, that `finish` waits for the writer; for snapshots, the longest without progress."""
    system_metrics: bool = True
    """Record readings of CPU, memory, disk and GPU."""
    mask_secrets: bool = True
    """Store *** instead of passwords and access tokens found in `config` and in the command line."""
    snapshot_mib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Host memory, in MiB, for snapshots waiting to be written; none means a quarter of what is free at the start."""
    snapshot_wait_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Longest time, in seconds, that training waits for this memory before it skips a snapshot."""
    record: RecordSettings = RecordSettings()
    """What `sonde.watch` records unless it is called with other keywords; also of models that are found."""
    writer: WriterSettings = WriterSettings()
    """Settings of the writer thread."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, known: Settings | None = None, /, **keywords: Unpack[SettingKeywords]) -> None:
        values: dict[str, Any] = {} if known is None else known.model_dump()
        origins: dict[str, str] = {} if known is None else dict(known._origins)
        sources = (*_file_layers(), _environment_layer(type(self))) if known is None else ()
        for given in (*sources, _keyword_layer({**keywords})):
            layer = _with_current_names(given)
            _refuse_unknown(type(self), layer)
            _merge_into(values, layer.values)
            origins.update({name: layer.origin_of(name) for name in _leaves(layer.values)})
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(_explain(error, origins)) from None
        self._origins = origins

    @classmethod
    def load(cls, **keywords: Unpack[SettingKeywords]) -> Settings:
        """Load settings from files and environment variables; keywords override both."""
        return cls(**keywords)

    def changed(self, **keywords: Unpack[SettingKeywords]) -> Settings:
        """A copy with other values. Files and variables are not read again: the working folder may have changed.

        >>> Settings.load(hist_every=5).changed(budget=0.5).hist_every
        5
        """
        return type(self)(self, **keywords)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `__init__` has already merged all sources and recorded the origin of each value

    @field_validator("dir", mode="after")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return _expanded(value, variable_of("dir"))

    @field_validator("mode", mode="before")
    @classmethod
    def _yaml_reads_on_as_true(cls, value: Any) -> Any:
        return {True: "enabled", False: "disabled"}[value] if isinstance(value, bool) else value

    @field_validator("mute", mode="before")
    @classmethod
    def _parse_mutes(cls, value: Any) -> Any:
        return parse_mutes(value)

    @field_validator("budget", "snapshot_mib", "activation_rows", mode="before")
    @classmethod
    def _none_in_words(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() in ("none", "null", "off") else value

    def origin(self, field: str) -> str:
        """The origin of a value: "default", "file <path>", "env SONDE_X" or "keyword".

        Nested settings are named with a dot: `settings.origin("writer.flush_mib")`.
        """
        field, names = SETTINGS.get(field, field), list(_names(type(self)))
        inside = [name for name in names if name == field or name.startswith(f"{field}.")]
        if not inside:
            raise UnknownNameError("setting", field, names)
        return ", ".join(sorted({self._origins.get(name, "default") for name in inside}))

    def explain(self) -> list[Setting]:
        """Every setting with its value, origin and meaning; those that users set first come first."""
        return [
            Setting(name, _get(self, name), self.origin(name), _meaning(type(self), name), name not in BASIC)
            for name in ordered_names()
        ]


class _Layer(NamedTuple):
    """The values from one source, and a description of that source."""

    values: dict[str, Any]
    origin: str
    is_environment: bool = False
    old_names: Mapping[str, str] = {}
    """Old names that this source uses, by new name."""

    def origin_of(self, name: str) -> str:
        return f"env {variable_of(self.old_names.get(name, name))}" if self.is_environment else self.origin


def _file_layers() -> Iterator[_Layer]:
    named = os.environ.get(FILE_VARIABLE, "")
    paths = [_expanded(Path(part), FILE_VARIABLE) for part in named.split(os.pathsep) if part]
    if not paths and Path(DEFAULT_FILE).is_file():
        paths = [Path(DEFAULT_FILE)]
    for path in paths:
        yield _Layer(_read_yaml(path), f"file {path.absolute()}")


def _expanded(path: Path, variable: str) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no HOME, and the system does not know this user, as in many containers
        raise SettingsError(
            f"cannot expand ~ in {path}: HOME is not set. Write the full path, or set {variable} to one."
        ) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"{FILE_VARIABLE} is set to {path}, which does not exist. Create the file, or unset {FILE_VARIABLE}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the settings file {path}: {error}.") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f'{path} contains a {type(content).__name__}. Write settings as "name: value" lines.')
    return {str(key): value for key, value in content.items()}


def _environment_layer(cls: type[Settings]) -> _Layer:
    old = {variable_of(name): name for name in (*SETTINGS, *REMOVED_SETTINGS)}
    groups = {name.partition(".")[0] for name in _names(cls) if "." in name}
    known = {variable_of(name): name for name in (*_names(cls), *groups)}
    for variable in sorted(os.environ):
        name = variable.upper()
        is_ours = name.startswith(PREFIX) and not name.startswith(_TEST_PREFIX)
        if is_ours and not any(name in names for names in (known, old, _OTHER_VARIABLES)):
            raise SettingsError(_unknown(variable, "the environment", [*known, *_OTHER_VARIABLES]))
    renamed = {old[name.upper()]: value for name, value in os.environ.items() if name.upper() in old and value}
    try:
        return _Layer(EnvSettingsSource(cls)() | renamed, "", is_environment=True)
    except EnvSyntaxError:
        raise SettingsError(
            f"{variable_of('writer')} is not a JSON object. Write {variable_of('writer.flush_mib')}=2, "
            f"""or {variable_of("writer")}='{{"flush_mib": 2}}'."""
        ) from None


def _keyword_layer(keywords: dict[str, Any]) -> _Layer:
    plain = {key: value.model_dump() if isinstance(value, BaseModel) else value for key, value in keywords.items()}
    return _Layer(plain, "keyword")


def _with_current_names(layer: _Layer) -> _Layer:
    """The layer with current names and values. If a source gives both names, the new one wins."""
    values, old_names = dict(layer.values), {}
    for old, new in SETTINGS.items():
        if old not in values:
            continue
        value = values.pop(old)
        if new not in values:
            values[new], old_names[new] = value, old
        _notice_renamed(*((variable_of(old), variable_of(new)) if layer.is_environment else (old, new)), layer)
    for old, instead in REMOVED_SETTINGS.items():
        if old in values:
            del values[old]
            names = (variable_of(old), variable_of(instead)) if layer.is_environment else (old, instead)
            _notice(names[0], f"no longer has an effect. Use {names[1]} instead.", layer)
    for name, current in SETTING_VALUES.items():
        given = values.get(name)
        if isinstance(given, str) and given in current:
            values[name] = current[given]
            label = variable_of(name) if layer.is_environment else name
            _notice_renamed(f"{label}={given}", f"{label}={current[given]}", layer)
    return layer._replace(values=values, old_names=old_names)


def _notice_renamed(old: str, new: str, layer: _Layer) -> None:
    _notice(old, f"is now called {new}. The old name still works.", layer)


def _notice(old: str, what: str, layer: _Layer) -> None:
    """Print one line, once per process. A filter could turn `warnings` into exceptions, so print instead."""
    is_other_rank = os.environ.get("RANK", "0") not in ("", "0")
    if old in _noticed or is_other_rank:
        return
    _noticed.add(old)
    where = f" (in {layer.origin.removeprefix('file ')})" if layer.origin.startswith("file ") else ""
    print_line(f"sonde: the setting {old}{where} {what}")


def _refuse_unknown(cls: type[Settings], layer: _Layer) -> None:
    known = list(_names(cls))
    groups = {name.partition(".")[0] for name in known if "." in name}
    for name in _leaves(layer.values):
        if name not in known and name not in groups:
            place = "the environment" if layer.is_environment else layer.origin.removeprefix("file ")
            shown = variable_of(name) if layer.is_environment else name
            raise SettingsError(_unknown(shown, place, map(variable_of, known) if layer.is_environment else known))


def _unknown(name: str, place: str, known: Iterable[str]) -> str:
    where = "given as a keyword" if place == "keyword" else f"in {place}"
    names = sorted(known)
    hint = nearest(name, names) or f" Known: {', '.join(names)}."
    return f'no setting "{name}" ({where}).{hint} `sonde doctor --settings` lists them all.'


def _merge_into(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        else:
            target[key] = dict(value) if isinstance(value, Mapping) else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in _MAPS:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def ordered_names() -> list[str]:
    """The names of all settings: the basic ones, then the advanced ones."""
    return [*BASIC, *(name for name in _names(Settings) if name not in BASIC)]


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def variable_of(name: str) -> str:
    """The environment variable of a setting.

    >>> variable_of("writer.flush_mib")
    'SONDE_WRITER__FLUSH_MIB'
    """
    return PREFIX + name.replace(".", "__").upper()


def _get(settings: BaseModel, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _meaning(model: type[BaseModel], name: str) -> str:
    head, _, rest = name.partition(".")
    field = model.model_fields[head]
    if rest and isinstance(field.annotation, type):
        return _meaning(field.annotation, rest)
    return " ".join(_docstrings(model).get(head, "").split())


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field; empty without source. pydantic's option reads them whenever sonde is imported."""
    try:
        (found,) = ast.parse(inspect.getsource(model)).body
    except OSError:
        return {}
    assert isinstance(found, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(found.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One sentence per invalid value: where it was given, the value, and what is allowed."""
    sentences = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        given = problem["input"]
        wanted = expectation(problem["msg"])
        choices = [part.strip("' ") for part in str(problem.get("ctx", {}).get("expected", "")).split(" or ") if part]
        hint = nearest(given, choices) if isinstance(given, str) else ""
        sentences.append(f"{_place_of(name, origins)} is {given!r}: {wanted}.{hint}")
    return " ".join(sentences)


def _place_of(name: str, origins: Mapping[str, str]) -> str:
    """The setting as its source names it; `budget=` for a keyword, which the command line turns into its option."""
    kind, _, rest = origins.get(name, "default").partition(" ")
    return {"keyword": f"{name}=", "env": rest, "file": f"{name} in {rest}"}.get(kind, name)
