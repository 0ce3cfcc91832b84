"""What `sonde train` is told, and what `TrainingWrapper` fills in: every key is known, every value checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sonde.errors import SettingsError, UsageError, nearest


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(_Part):
    """A model of the hub or of a folder by `name`, or a new one by `architecture`."""

    name: str | None = None
    """A folder with a saved model, or its name on the Hugging Face Hub."""
    architecture: str | None = None
    """A kind of model, built anew with random weights: `llama`, `gpt2`, `qwen2`, …; nothing is downloaded."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the architecture: `hidden_size`, `num_hidden_layers`, …"""
    tokenizer: str | None = None
    """Another tokenizer than the model's own; a model built anew learns one, word by word, from the data."""
    vocab_size: int = Field(default=8192, ge=8)
    """Words such a tokenizer knows at most."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        """`model: {architecture: llama, hidden_size: 64}`: what is not ours is the architecture's."""
        if not isinstance(values, Mapping) or "architecture" not in values:
            return values
        own = {key: value for key, value in values.items() if key in cls.model_fields}
        theirs = {key: value for key, value in values.items() if key not in cls.model_fields}
        return {**own, "options": {**theirs, **(own.get("options") or {})}}

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.name is None) == (self.architecture is None):
            raise ValueError(
                "give model.name for a saved model or model.architecture for a new one, and not both: "
                "model.architecture=null takes away the one in the file"
            )
        return self


class DataConfig(_Part):
    """Where texts come from: a file, or a generator."""

    path: Path | None = None
    """A .txt file with one text per line; a .jsonl, .json, .csv, .tsv or .parquet file with `text`, `prompt` and
    `completion`, or `messages`; a folder that datasets' `save_to_disk` wrote."""
    eval_path: Path | None = None
    """Held-out texts; without it, a share of the others is held out."""
    retained_path: Path | None = None
    """Texts the model can do already: whether it forgets them is watched."""
    generate: Literal["counting", "copying", "sorting"] | None = None
    """Made-up texts, for trying things out."""
    num_samples: int = Field(default=1000, ge=2)
    """Texts that are generated."""
    eval_share: float = Field(default=0.1, ge=0.0, lt=1.0)
    """How many are held out where no `eval_path` is given."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.path is None) == (self.generate is None):
            raise ValueError(
                "give data.path for a file or data.generate for made-up texts, and not both: "
                "data.generate=null takes away the one in the file"
            )
        return self


class MethodConfig(_Part):
    """How the model is changed. Which options count depends on the method."""

    name: str = "lora"
    r: int = Field(default=8, ge=1)
    """Rank of an adapter."""
    alpha: float = Field(default=16.0, gt=0)
    """Its scale is alpha / r."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: str | list[str] | None = None
    """Names or a pattern of modules; without, all linear layers, or what is usual for the model."""
    num_virtual_tokens: int = Field(default=8, ge=1)
    """Of prefix and prompt tuning."""


class TrainingConfig(_Part):
    """The loop. What is not here goes to `arguments`, which are those of transformers' `TrainingArguments`."""

    num_epochs: float = Field(default=3.0, gt=0)
    max_steps: int = -1
    """Ends training earlier, if positive."""
    learning_rate: float = Field(default=2e-4, gt=0)
    batch_size: int = Field(default=8, ge=1)
    gradient_accumulation: int = Field(default=1, ge=1)
    max_length: int = Field(default=512, ge=2)
    """Tokens of one text; longer ones are cut."""
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    scheduler: str = "linear"
    max_grad_norm: float = Field(default=1.0, ge=0)
    eval_interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations; without, as often as checkpoints."""
    logging_interval: int = Field(default=1, ge=1)
    seed: int = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the forward pass computes in."""
    gradient_checkpointing: bool = False
    arguments: dict[str, Any] = Field(default_factory=dict)


class KeepConfig(_Part):
    """Which checkpoints are saved and stay."""

    interval: int = Field(default=100, ge=1)
    keep_last: int | None = Field(default=None, ge=1)
    keep_best: int | None = Field(default=None, ge=1)
    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"
    background: bool = False


class RecordConfig(_Part):
    """The run that is recorded."""

    project: str = "tune"
    name: str | None = None
    dir: Path | None = None
    tags: list[str] = Field(default_factory=list)
    notes: str = ""
    wandb_project: str | None = None
    snapshots: int | None = Field(default=None, ge=1)
    """Whole gradients and weights every so many steps, for `export_raw_gradients`."""
    adapters: int = Field(default=10, ge=1)
    """Steps between measurements of each adapter's product."""


class TuneConfig(_Part):
    """A whole file for `sonde train`."""

    model: ModelConfig
    data: DataConfig
    method: MethodConfig = MethodConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoints: KeepConfig = KeepConfig()
    run: RecordConfig = RecordConfig()
    output_dir: Path = Path("checkpoints")


def load_config(path: Path, overrides: Iterable[str] = ()) -> TuneConfig:
    """A YAML file with `key=value` put over it: `training.learning_rate=1e-3`."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise UsageError(f"no file {path}. `sonde train --example` prints one to start from.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds no keys: it begins with model:, data:, …")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(f'an override is key=value, as in training.learning_rate=1e-3; got "{override}".')
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UsageError(f'"{key}": {text!r} is not a value in YAML.') from None
        _put(content, key.split("."), value, key)
    loaded: TuneConfig = checked(TuneConfig, content)
    return loaded


def checked(kind: type[Any], content: Mapping[str, Any], prefix: str = "") -> Any:
    """The part of a configuration, or SettingsError that names the key and the nearest one that exists."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise SettingsError(" ".join(_sentence(kind, found, prefix) for found in error.errors()[:3])) from None


def _put(content: dict[str, Any], parts: list[str], value: Any, key: str) -> None:
    for part in parts[:-1]:
        inner = content.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f'"{key}": "{part}" is a value, not a group of keys.')
        content = inner
    content[parts[-1]] = value


def _sentence(kind: type[BaseModel], found: Any, prefix: str) -> str:
    place = [str(part) for part in found["loc"]]
    key = ".".join([*([prefix] if prefix else []), *place]) or "the configuration"
    if found["type"] == "extra_forbidden":
        known = _fields(kind, place[:-1])
        hint = _elsewhere(kind, place) or nearest(place[-1], known)
        return f'no key "{key}".{hint} Known: {", ".join(sorted(known))}.'
    if found["type"] == "missing":
        return f'"{key}" is missing.'
    message = found["msg"].removeprefix("Value error, ")
    return f'"{key}": {message}; got {found["input"]!r}.' if place else f"{message}."


def _elsewhere(kind: type[BaseModel], place: list[str]) -> str:
    """` Did you mean "training.learning_rate"?` of a key that is one of a group."""
    groups = [name for name in kind.model_fields if place[-1] in _fields(kind, [name])] if len(place) == 1 else []
    return f' Did you mean "{groups[0]}.{place[-1]}"?' if groups else ""


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        inner = kind.model_fields[part].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)
