"""Models and tokenizers: saved ones by name, new ones by architecture without a download."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sonde.errors import UnknownNameError, UsageError
from sonde.schema.packages import require
from sonde.tune.config import MethodConfig, ModelConfig
from sonde.tune.method import FineTuningMethod

_SPECIAL: Final = ("<pad>", "<unk>", "<eos>")


def load_model(config: ModelConfig, method: FineTuningMethod, options: MethodConfig, tokenizer: Any) -> Any:
    """The base model, before the method changes it."""
    transformers = _transformers()
    extra = method.load_options(options)
    if config.name is not None:
        with _loading(config.name):
            own = method.load_model(config.name, options)
            if own is not None:
                return own
            return transformers.AutoModelForCausalLM.from_pretrained(config.name, **extra)
    assert config.architecture is not None
    try:
        kind = transformers.AutoConfig.for_model(config.architecture)
    except ValueError:
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        raise UnknownNameError("architecture", config.architecture, _near(config.architecture, known)) from None
    unknown = [key for key in config.options if not hasattr(kind, key)]
    if unknown:
        raise UnknownNameError(f"{config.architecture} option", unknown[0], _near(unknown[0], kind.to_dict()))
    given = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **config.options,
    }
    if given["vocab_size"] < len(tokenizer):
        raise UsageError(f"vocab_size {given['vocab_size']} is less than the {len(tokenizer)} tokens of the tokenizer.")
    try:
        built = transformers.AutoConfig.for_model(config.architecture, **given)
        return transformers.AutoModelForCausalLM.from_config(built)
    except Exception as error:
        raise UsageError(f"cannot build a {config.architecture} model with these options: {_short(error)}") from error


def load_tokenizer(config: ModelConfig, texts: Iterable[str]) -> Any:
    """The model's own tokenizer, another by name, or one that is learned word by word from the texts."""
    transformers = _transformers()
    name = config.tokenizer or config.name
    if name is None:
        return learn_tokenizer(texts, config.vocab_size)
    with _loading(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Clear errors for a saved model: those of transformers are about caches and repository names."""
    _check_folder(name)
    try:
        yield
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise UsageError(f"cannot load the model in {name}: {_short(error)}") from error
        raise UsageError(
            f'no folder "{name}", and the Hugging Face Hub returned no model of that name: {_short(error)} '
            "Without a network, pass the folder of a model that you have downloaded, or build a small one: "
            'model.architecture in a file, model=ModelConfig(architecture="llama") in Python.'
        ) from error


def _check_folder(name: str) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise UsageError(
                f"{name} contains only adapters. Pass the model they belong to, or merge them into it with peft's "
                "merge_and_unload() and save the result."
            )
        if not (folder / "config.json").is_file():
            raise UsageError(f"{name} is not a saved model: it has no config.json.")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(f"no folder {name}; expected a saved model.")


def _short(error: BaseException) -> str:
    """The first line of its message, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if not line.endswith(":")), type(error).__name__)
    return first[:300] + ("" if first.endswith((".", "…")) else ".")


def learn_tokenizer(texts: Iterable[str], vocab_size: int = 8192) -> Any:
    """One token for each word and each punctuation mark."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))  # noqa: S106  not a secret
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pad, unknown, end = _SPECIAL
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown, eos_token=end
    )


def _near(name: str, known: Iterable[str]) -> list[str]:
    """A few of hundreds, the nearest first."""
    import difflib

    names = sorted(known)
    return difflib.get_close_matches(name, names, n=8, cutoff=0.4) or names[:8]


def _transformers() -> Any:
    return require("transformers", "tune", "fine-tuning")
