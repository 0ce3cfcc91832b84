"""Settings: default < YAML file < SONDE_* variable < keyword. Every value knows its origin; a typo is an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as EnvSyntaxError

from sonde.errors import SettingsError, UnknownNameError, nearest
from sonde.schema.old_names import SETTING_VALUES, SETTINGS

PREFIX: Final = "SONDE_"
DEFAULT_FILE: Final = "sonde.yaml"
FILE_VARIABLE: Final = "SONDE_CONFIG"
# Read elsewhere: which files to read, whether errors show tracebacks, whether the native kernel is used, what an
# install builds, which browser prints.
_OTHER_VARIABLES: Final = (
    FILE_VARIABLE, "SONDE_DEBUG", "SONDE_NATIVE", "SONDE_SKIP_WEB", "SONDE_SKIP_NATIVE", "SONDE_CHROMIUM",
)  # fmt: skip
_TEST_PREFIX: Final = "SONDE_TEST_"
_noticed: Final[set[str]] = set()
"""Old names that were reported in this process."""


class WriterSettings(BaseModel):
    """How the writer thread collects, keeps and seals what it is given."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    flush_interval_s: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Seconds between two flushes to disk; at most this much is lost with the machine."""
    flush_mib: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """A flush also happens when this much waits."""
    seal_steps: int = Field(default=1024, ge=1)
    """Steps after which the log is sealed into a Parquet segment."""
    seal_mib: float = Field(default=64.0, gt=0, allow_inf_nan=False)
    """The log is also sealed when it is this large."""
    queue_mib: float = Field(default=64.0, gt=0, allow_inf_nan=False)
    """What may wait for the writer; beyond it rows are dropped and counted, training is never blocked."""
    heartbeat_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Seconds between two signs of life in run.json."""
    system_interval_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds between two readings of processor, memory, disk and GPU."""


class Setting(NamedTuple):
    """One setting, as `sonde info --settings` shows it."""

    name: str
    value: Any
    origin: str
    meaning: str


class Settings(BaseSettings):
    """Everything that can be set, frozen.

    >>> Settings.load(budget=0.02).origin("budget")
    'keyword'
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        use_attribute_docstrings=True,
        validate_default=False,
    )

    dir: Path = Path("runs")
    """Where runs are kept."""
    project: str = Field(default="default", min_length=1)
    """The folder of runs that belong together."""
    mode: Literal["enabled", "disabled"] = "enabled"
    """"disabled" turns every call into one that does nothing."""
    budget: float | None = Field(default=0.01, gt=0, le=1, allow_inf_nan=False)
    """The share of a step's time sonde may take once the free steps are over; none: no limit."""
    free_steps: int = Field(default=1000, ge=0)
    """The first steps are always recorded as scheduled, whatever the budget."""
    memory_high: float = Field(default=0.95, gt=0, le=1)
    """The share of the host's or the GPU's memory in use from which recording is thinned out."""
    memory_critical: float = Field(default=0.98, gt=0, le=1)
    """The share of memory in use from which nothing but gradients is recorded."""
    hist_every: int = Field(default=10, ge=1)
    """A histogram is taken at every n-th step."""
    hist_samples: int = Field(default=512, ge=1)
    """How many elements of a tensor a histogram looks at."""
    activation_rows: int | None = Field(default=None, ge=1)
    """How many rows (the last dimension) of an activation are read, others at every step; none: all of them."""
    live_rules: bool = True
    """Check the run with the rules while it trains, on the writer thread and for at most 0.3 % of the time."""
    verbose: bool = True
    """One line on stderr at the start, one at the end, and one for each kind of fault that the rules find."""
    check_finite: bool = True
    """Check every output of every module in every step for NaN and infinity."""
    max_errors: int = Field(default=10, ge=1)
    """After this many failures of its own sonde switches itself off and says so."""
    exit_deadline_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """The longest a dying process waits for the writer."""
    finish_deadline_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """The longest `finish` waits for the writer; for snapshots, the longest without anything being written."""
    system_metrics: bool = True
    """Record readings of processor, memory, disk and GPU."""
    snapshot_mib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Host memory for snapshots that are on their way to disk; none: a quarter of what is free when they begin."""
    snapshot_wait_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """The longest that training waits for this memory while earlier snapshots are written; then one is skipped."""
    writer: WriterSettings = WriterSettings()
    """How the writer thread collects, keeps and seals what it is given."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, known: Settings | None = None, /, **keywords: Any) -> None:
        values: dict[str, Any] = {} if known is None else known.model_dump()
        origins: dict[str, str] = {} if known is None else dict(known._origins)
        sources = (*_file_layers(), _environment_layer(type(self))) if known is None else ()
        for given in (*sources, _keyword_layer(keywords)):
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
    def load(cls, **keywords: Any) -> Settings:
        """Read files and variables, then let the keywords win."""
        return cls(**keywords)

    def changed(self, **keywords: Any) -> Settings:
        """The same with other values. Nothing is read again: the program may be in another folder by now.

        >>> Settings.load(free_steps=5).changed(budget=0.5).free_steps
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
        return (init_settings,)  # `__init__` has merged all sources already, and knows which gave what

    @field_validator("dir", mode="after")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return _expanded(value, _variable("dir"))

    @field_validator("mode", mode="before")
    @classmethod
    def _yaml_reads_on_as_true(cls, value: Any) -> Any:
        return {True: "enabled", False: "disabled"}[value] if isinstance(value, bool) else value

    @field_validator("budget", "snapshot_mib", "activation_rows", mode="before")
    @classmethod
    def _none_in_words(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() in ("none", "null", "off") else value

    def origin(self, field: str) -> str:
        """Where a value came from: "default", "file <path>", "env SONDE_X" or "keyword".

        Nested settings are named with a dot: `settings.origin("writer.flush_mib")`.
        """
        field, names = SETTINGS.get(field, field), list(_names(type(self)))
        inside = [name for name in names if name == field or name.startswith(f"{field}.")]
        if not inside:
            raise UnknownNameError("setting", field, names)
        return ", ".join(sorted({self._origins.get(name, "default") for name in inside}))

    def explain(self) -> list[Setting]:
        """Every setting with its value, origin and meaning."""
        return [
            Setting(name, _get(self, name), self.origin(name), _meaning(type(self), name))
            for name in _names(type(self))
        ]


class _Layer(NamedTuple):
    """What one source says, and the words for where it says so."""

    values: dict[str, Any]
    origin: str
    is_environment: bool = False
    old_names: Mapping[str, str] = {}
    """By the new name: the old one under which this source gives a setting."""

    def origin_of(self, name: str) -> str:
        return f"env {_variable(self.old_names.get(name, name))}" if self.is_environment else self.origin


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
            f"cannot tell what ~ stands for in {path}: HOME is not set. Write the whole path, or set {variable} to one."
        ) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"{FILE_VARIABLE} names {path}, which does not exist. Create it, or unset {FILE_VARIABLE}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the settings file {path}: {error}.") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f'{path} holds a {type(content).__name__}; settings are written as "name: value" lines.')
    return {str(key): value for key, value in content.items()}


def _environment_layer(cls: type[Settings]) -> _Layer:
    old = {_variable(name): name for name in SETTINGS}
    known = {_variable(name): name for name in _names(cls)} | {_variable("writer"): "writer"}
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
            f"{_variable('writer')} is not a JSON object. Write {_variable('writer.flush_mib')}=2, "
            f"""or {_variable("writer")}='{{"flush_mib": 2}}'."""
        ) from None


def _keyword_layer(keywords: dict[str, Any]) -> _Layer:
    plain = {key: value.model_dump() if isinstance(value, BaseModel) else value for key, value in keywords.items()}
    return _Layer(plain, "keyword")


def _with_current_names(layer: _Layer) -> _Layer:
    """The same, under the names and with the values of today. Where a source gives both names, the new one counts."""
    values, old_names = dict(layer.values), {}
    for old, new in SETTINGS.items():
        if old not in values:
            continue
        value = values.pop(old)
        if new not in values:
            values[new], old_names[new] = value, old
        _notice(*((_variable(old), _variable(new)) if layer.is_environment else (old, new)), layer)
    for name, current in SETTING_VALUES.items():
        given = values.get(name)
        if isinstance(given, str) and given in current:
            values[name] = current[given]
            label = _variable(name) if layer.is_environment else name
            _notice(f"{label}={given}", f"{label}={current[given]}", layer)
    return layer._replace(values=values, old_names=old_names)


def _notice(old: str, new: str, layer: _Layer) -> None:
    """One line on stderr, once in a process. Not the warnings module: a filter may turn warnings into exceptions."""
    is_other_rank = os.environ.get("RANK", "0") not in ("", "0")
    if old in _noticed or is_other_rank or sys.stderr is None:
        return
    _noticed.add(old)
    where = f" (in {layer.origin.removeprefix('file ')})" if layer.origin.startswith("file ") else ""
    try:
        print(f"sonde: the setting {old}{where} is now called {new}. The old name still works.", file=sys.stderr)
    except (OSError, ValueError):  # stderr is closed: no one to tell
        return


def _refuse_unknown(cls: type[Settings], layer: _Layer) -> None:
    known = list(_names(cls))
    groups = {name.partition(".")[0] for name in known if "." in name}
    for name in _leaves(layer.values):
        if name not in known and name not in groups:
            place = "the environment" if layer.is_environment else layer.origin.removeprefix("file ")
            shown = _variable(name) if layer.is_environment else name
            raise SettingsError(_unknown(shown, place, map(_variable, known) if layer.is_environment else known))


def _unknown(name: str, place: str, known: Iterable[str]) -> str:
    where = "given as a keyword" if place == "keyword" else f"in {place}"
    names = sorted(known)
    hint = nearest(name, names) or f" Known: {', '.join(names)}."
    return f'no setting "{name}" ({where}).{hint} `sonde info --settings` shows them all.'


def _merge_into(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        else:
            target[key] = dict(value) if isinstance(value, Mapping) else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _variable(name: str) -> str:
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
    return field.description or ""


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One sentence per bad value: which, from where, what was given, what is wanted."""
    sentences = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        given = problem["input"]
        wanted = problem["msg"].replace("Input should", "it should")
        choices = [part.strip("' ") for part in str(problem.get("ctx", {}).get("expected", "")).split(" or ") if part]
        hint = nearest(given, choices) if isinstance(given, str) else ""
        origin = origins.get(name, "")
        source = f" ({origin})" if origin else ""
        sentences.append(f'setting "{name}"{source} is {given!r}: {wanted}.{hint}')
    return " ".join(sentences)
