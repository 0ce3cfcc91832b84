from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import sonde
from sonde.write.folder import create_run
from sonde.write.secrets import MASK, is_secret_name, mask_command, mask_config, mask_text

SECRET = "s3cr3t" + "Value" * 5
FORMS = [
    "hf_" + "aB3" * 10, "sk-proj-" + "aB3" * 10, "ghp_" + "aB3" * 12, "github_pat_" + "aB3" * 12, "AKIA" + "A1B2" * 4,
    "glpat-" + "aB3" * 8, "xoxb-123456789012-abcdef", "AIza" + "aB3" * 12,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSM",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "OPENAI_API_KEY", "--token", "hf_token", "HF_TOKEN", "hub.token", "password", "db-password",
     "aws_secret_access_key", "secret", "private_key", "auth_token", "wandb_key", "connectionString", "client-secret"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "num_tokens", "max_tokens", "pad_token", "eos_token", "mask_token", "tokens_per_batch",
     "token_dropout", "key", "image_key", "sort_key", "num_keys", "author", "secretary", "max_new_tokens",
     "additional_special_tokens", "key_dim", "password_hint_model", "tokens"],
)  # fmt: skip
def test_names_of_machine_learning_are_not_secrets(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_known_by_their_form(form):
    assert form not in mask_text(f"failed with {form}, try again")
    assert mask_command(["train.py", form]) == ["train.py", MASK]
    assert form not in json.dumps(mask_config({"notes": {"a": [form]}}))


@pytest.mark.parametrize(
    "words",
    [["--api-key", SECRET], [f"--api-key={SECRET}"], [f"--token={SECRET}"], ["-token", SECRET],
     [f"wandb.api_key={SECRET}"], [f"+hub.token={SECRET}"], [f"s3://me:{SECRET}@host/bucket"], [f"https://host/x?X-Amz-Signature={SECRET}&a=1"]],
)  # fmt: skip
def test_secrets_of_a_command_line_are_masked(words):
    masked = mask_command(["train.py", "--lr", "0.1", *words, "--epochs", "3"])
    assert SECRET not in " ".join(masked)
    assert masked[:3] == ["train.py", "--lr", "0.1"]
    assert masked[-2:] == ["--epochs", "3"]


def test_other_values_are_stored_as_they_are():
    config = {"lr": 0.1, "max_tokens": 512, "eos_token": "</s>", "layers": (1, 2), "path": "s3://bucket/key", "x": None}
    assert mask_config(config) == config
    command = ["train.py", "--tokenizer", "gpt2", "--max-tokens", "512", "--token", "--verbose"]
    assert mask_command(command) == command


@dataclass
class Config:
    lr: float
    api_key: str


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 0.1, "api_key": SECRET},
        Config(0.1, SECRET),
        {"a": {"b": [{"password": SECRET}]}},
        {"args": Config(0.1, SECRET)},
    ],
)
def test_no_file_of_a_run_contains_a_secret(tmp_path, monkeypatch, config):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", SECRET])
    with sonde.init(dir=tmp_path, config=config, verbose=False) as session:
        sonde.log({"loss": 1.0})
    files = [path for path in Path(session.path).rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert MASK in json.dumps(dict(sonde.open(session.path).config))


def test_masking_can_be_turned_off(tmp_path, monkeypatch):
    monkeypatch.setenv("SONDE_MASK_SECRETS", "false")
    with sonde.init(dir=tmp_path, config={"token": SECRET}, verbose=False) as session:
        sonde.log({"loss": 1.0})
    assert sonde.open(session.path).config == {"token": SECRET}


def test_the_mask_is_written_and_the_config_of_the_caller_unchanged(tmp_path):
    config = {"nested": {"token": SECRET}}
    create_run(tmp_path, project="p", config=config)
    assert config == {"nested": {"token": SECRET}}
