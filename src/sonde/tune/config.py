"""The configuration of `sonde train` and `TrainingWrapper`: every key is known, every value checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sonde.errors import SettingsError, UsageError, expectation, nearest


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(_Part):
    """A model from the hub or a folder by `name`, or a new one by `architecture`."""

    name: str | None = None
    """A folder with a saved model, or its name on the Hugging Face Hub."""
    architecture: str | None = None
    """A type of model, created with random weights: `llama`, `gpt2`, `qwen2`, …; nothing is downloaded."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the architecture: `hidden_size`, `num_hidden_layers`, …"""
    tokenizer: str | None = None
    """A tokenizer other than the model's own; for a new model, one is learned, word by word, from the data."""
    vocab_size: int = Field(default=8192, ge=8)
    """Maximum vocabulary of such a tokenizer."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        """`model: {architecture: llama, hidden_size: 64}`: keys that are not ours belong to the architecture."""
        if not isinstance(values, Mapping) or "architecture" not in values:
            return values
        own = {key: value for key, value in values.items() if key in cls.model_fields}
        theirs = {key: value for key, value in values.items() if key not in cls.model_fields}
        return {**own, "options": {**theirs, **(own.get("options") or {})}}

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.name is None) == (self.architecture is None):
            raise ValueError(
                "set either model.name for a saved model or model.architecture for a new one, not both "
                "(model.architecture=null removes the one in the file)"
            )
        return self


class DataConfig(_Part):
    """The source of texts: a file, or a generator."""

    path: Path | None = None
    """A .txt file with one text per line; a .jsonl, .json, .csv, .tsv or .parquet file with `text`, `prompt` and
    `completion`, or `messages`; a folder that datasets' `save_to_disk` wrote."""
    eval_path: Path | None = None
    """Held-out texts; without it, a fraction of the others is held out."""
    retained_path: Path | None = None
    """Texts that the model already knows, to detect forgetting."""
    generate: Literal["counting", "copying", "sorting"] | None = None
    """Synthetic texts, for trying things out."""
    num_samples: int = Field(default=1000, ge=2)
    """Number of texts to generate."""
    eval_share: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Number of texts to hold out if there is no `eval_path`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.path is None) == (self.generate is None):
            raise ValueError(
                "set either data.path for a file or data.generate for synthetic texts, not both "
                "(data.generate=null removes the one in the file)"
            )
        return self


class MethodConfig(_Part):
    """How the model is changed. The options that apply depend on the method."""

    name: str = "lora"
    r: int = Field(default=8, ge=1)
    """Rank of an adapter."""
    alpha: float = Field(default=16.0, gt=0)
    """Its scale is alpha / r."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: str | list[str] | None = None
    """Names or a pattern of modules; by default all linear layers, or the usual ones for the model."""
    num_virtual_tokens: int = Field(default=8, ge=1)
    """For prefix and prompt tuning."""
    merge: bool = False
    """Also save the whole model with the adapters merged in, to `merged` in the output folder."""


class TrainingConfig(_Part):
    """The training loop. Further options go to `arguments`, which are those of transformers' `TrainingArguments`."""

    num_epochs: float = Field(default=3.0, gt=0)
    max_steps: int = -1
    """Ends training earlier, if positive."""
    learning_rate: float = Field(default=2e-4, gt=0)
    batch_size: int = Field(default=8, ge=1)
    gradient_accumulation: int = Field(default=1, ge=1)
    max_length: int = Field(default=512, ge=2)
    """Maximum tokens of one text; longer ones are truncated."""
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    scheduler: str = "linear"
    max_grad_norm: float = Field(default=1.0, ge=0)
    eval_interval: int | None = Field(default=None, ge=1)
    """Steps between evaluations; by default as often as checkpoints."""
    logging_interval: int = Field(default=1, ge=1)
    seed: int = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """The precision of the forward pass."""
    gradient_checkpointing: bool = False
    arguments: dict[str, Any] = Field(default_factory=dict)


class KeepConfig(_Part):
    """The checkpoints to save and to keep."""

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
    """Steps between snapshots of whole gradients and weights, for `export_raw_gradients`."""
    adapters: int = Field(default=10, ge=1)
    """Steps between measurements of each adapter's product."""


class TuneConfig(_Part):
    """A complete file for `sonde train`."""

    model: ModelConfig
    data: DataConfig
    method: MethodConfig = MethodConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoints: KeepConfig = KeepConfig()
    run: RecordConfig = RecordConfig()
    output_dir: Path = Path("checkpoints")


def load_config(path: Path, overrides: Iterable[str] = ()) -> TuneConfig:
    """Load a YAML file with `key=value` overrides: `training.learning_rate=1e-3`."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise UsageError(f"no file {path}. `sonde train --example` prints one to start from.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path} has no keys; it should have model:, data:, …")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UsageError(f'an override must be key=value, such as training.learning_rate=1e-3; got "{override}".')
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UsageError(f'"{key}": {text!r} is not a valid YAML value.') from None
        _put(content, key.split("."), value, key)
    loaded: TuneConfig = checked(TuneConfig, content)
    return loaded


def checked(kind: type[Any], content: Mapping[str, Any], prefix: str = "") -> Any:
    """The part of a configuration, or a SettingsError that names the key and the nearest existing one."""
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
    message = expectation(found["msg"].removeprefix("Value error, "))
    return f'"{key}": {message}; got {found["input"]!r}.' if place else f"{message}."


def _elsewhere(kind: type[BaseModel], place: list[str]) -> str:
    """` Did you mean "training.learning_rate"?` for a key that belongs to a group."""
    groups = [name for name in kind.model_fields if place[-1] in _fields(kind, [name])] if len(place) == 1 else []
    return f' Did you mean "{groups[0]}.{place[-1]}"?' if groups else ""


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        inner = kind.model_fields[part].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)
