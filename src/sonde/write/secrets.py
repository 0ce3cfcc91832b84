"""Recognition of passwords and access tokens in configurations, command lines and messages, to store a mask instead.

A value is a secret because of its name (`api_key`, `--token`) or its form (`hf_…`, `sk-…`, a password in a URL). Names
from machine learning that merely sound alike (`num_tokens`, `pad_token`, `tokenizer`) are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

MASK: Final = "***"
_SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:api_?keys?|access_?keys?(?:_id)?|secret_?keys?|private_?keys?|account_?keys?|secrets?|passwords?|passwd|"
    r"passphrase|credentials?|token|api_?tokens|auth|authorization|bearer|cookie|connection_?string|dsn|"
    r"(?:wandb|openai|anthropic|hf|huggingface|comet|neptune|mlflow|aws|azure|gcp|s3|storage)_key)$"
)
_MODEL_TOKEN: Final = re.compile(
    r"(?:^|_)(?:num|max|min|new|n|pad|padding|eos|bos|unk|sep|cls|mask|masked|start|end|stop|decoder_start|image|video|"
    r"audio|special|additional_special|extra|added|boundary|vision|user|assistant|system|trigger|placeholder|"
    r"instance|class|fim|prefix|suffix|middle)_tokens?$"
)
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_TOKEN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|"
    r"glpat-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|"
    r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|wandb_v\d_[A-Za-z0-9_]{16,}|"
    r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]*)?)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
_IN_URL: Final = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)@")
_SIGNATURE: Final = re.compile(r"(?i)([?&](?:sig|signature|x-amz-signature|token|access_token|api_key|key)=)[^&\s]+")
_ASSIGNMENT: Final = re.compile(r"^([-+~]*)([A-Za-z][\w.\-]*)=(.+)$", re.DOTALL)


def mask_text(text: str) -> str:
    """Mask the tokens of well-known forms, and passwords in URLs.

    >>> mask_text("cannot push with hf_abcdefghijklmnopqrstuv to https://me:pass@host/x")
    'cannot push with *** to https://me:***@host/x'
    """
    text = _IN_URL.sub(rf"\1:{MASK}@", _TOKEN.sub(MASK, text))
    return _SIGNATURE.sub(rf"\1{MASK}", text) if "://" in text else text


def mask_config(value: Any, name: str = "") -> Any:
    """A copy of nested values, with those masked that are secrets by their name or form.

    >>> mask_config({"lr": 0.1, "wandb": {"api_key": "abc123"}, "max_tokens": 512, "pad_token": "<pad>"})
    {'lr': 0.1, 'wandb': {'api_key': '***'}, 'max_tokens': 512, 'pad_token': '<pad>'}
    """
    if isinstance(value, Mapping):
        return {key: mask_config(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("utf-8", "replace")
        masked = MASK if text and is_secret_name(name) else mask_text(text)
        return value if masked == text else masked
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(mask_config(inner, name) for inner in value)
    return value


def mask_command(words: Sequence[str]) -> list[str]:
    """A command line, with the values of secret options masked.

    >>> mask_command(["train.py", "--api-key", "abc123", "--token=xyz", "sort.key=1", "--lr", "0.1"])
    ['train.py', '--api-key', '***', '--token=***', 'sort.key=1', '--lr', '0.1']
    """
    masked = list(words[:1])
    for before, word in pairwise(words):
        found = _ASSIGNMENT.match(word)
        if found and is_secret_name(found[2]):
            masked.append(f"{found[1]}{found[2]}={MASK}")
        elif before.startswith("-") and "=" not in before and is_secret_name(before) and not word.startswith("--"):
            masked.append(MASK)
        else:
            masked.append(mask_text(word))
    return masked


def is_secret_name(name: str) -> bool:
    """Whether a value of this name is a secret.

    >>> [n for n in ("hf_token", "apiKey", "pad_token", "num_tokens", "tokenizer") if is_secret_name(n)]
    ['hf_token', 'apiKey']
    """
    words = "_".join(word for word in _WORDS.split(name) if word).lower()
    return bool(_SECRET_NAME.search(words)) and not _MODEL_TOKEN.search(words)
