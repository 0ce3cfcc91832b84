"""Files for `sonde train`: every key known, every value checked, nothing loaded to say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sonde.errors import SettingsError, UsageError
from sonde.tune import EXAMPLE
from sonde.tune.config import MethodConfig, TuneConfig, checked, load_config
from sonde.tune.train.ahead import check_ahead
from sonde.tune.train.data import generate, texts_of
from sonde.tune.train.files import read_texts
from sonde.tune.train.from_config import split_data


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tune.yaml"
    path.write_text(EXAMPLE)
    return path


def test_the_example_is_a_configuration(file):
    config = load_config(file)
    assert config.model.architecture == "llama"
    assert config.model.options["hidden_size"] == 64
    assert config.method.r == 8
    assert config.checkpoints.interval == 20


def test_overrides_go_over_the_file(file):
    config = load_config(
        file, ["training.learning_rate=1e-3", "method.name=full", "model.hidden_size=32", "run.tags=[a, b]"]
    )
    assert config.training.learning_rate == 1e-3
    assert (config.method.name, config.model.options["hidden_size"], config.run.tags) == ("full", 32, ["a", "b"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lerning_rate=1", r'no key "training.lerning_rate". Did you mean "learning_rate"\? Known: arguments'),
        ("trainning.batch_size=1", r'no key "trainning". Did you mean "training"\?'),
        ("training.batch_size=0", r'"training.batch_size": it should be at least 1; got 0'),
        ("method.r=much", r'"method.r": it should be an integer; got \'much\''),
        ("data.path=x.txt", r"set either data.path for a file or data.generate"),
        ("model.name=gpt2", r"set either model.name for a saved model or model.architecture"),
        ("data.generate=poetry", r"'counting', 'copying' or 'sorting'"),
    ],
)
def test_a_wrong_value_is_named(file, override, message):
    with pytest.raises(SettingsError, match=message):
        load_config(file, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate", "an override must be key=value"),
        ("=3", "an override must be key=value"),
        ("output_dir.x=1", '"output_dir" is a value'),
        ("training.batch_size=[1", r""""training.batch_size": '\[1' is not a valid YAML value"""),
        ("learning_rate=1", r'no key "learning_rate". Did you mean "training.learning_rate"\?'),
    ],
)
def test_a_wrong_override_is_named(file, override, message):
    with pytest.raises(UsageError, match=message):
        load_config(file, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.name=loar"], r'no training method "loar". Did you mean "lora"\?'),
        (["data.generate=null", "data.path=gone.txt"], "data.path: no file gone.txt"),
        (["data.retained_path=gone.txt"], "data.retained_path: no file gone.txt"),
    ],
)
def test_what_is_wrong_is_known_ahead(file, overrides, message):
    check_ahead(load_config(file))
    with pytest.raises(UsageError, match=message):
        check_ahead(load_config(file, overrides))


def test_a_file_that_is_not_a_config(tmp_path):
    with pytest.raises(UsageError, match="--example"):
        load_config(tmp_path / "no.yaml")
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(SettingsError, match="has no keys"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "object.yaml").write_text("model: !!python/object/apply:os.system ['true']")
    with pytest.raises(SettingsError, match="not YAML"):
        load_config(tmp_path / "object.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(SettingsError, match='"model" is missing'):
        load_config(tmp_path / "empty.yaml")


def test_a_part_alone_is_checked_too():
    with pytest.raises(SettingsError, match=r'no key "method.rank".*Known: alpha'):
        checked(MethodConfig, {"rank": 3}, "method")


def test_texts_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\nthree\n")
    assert read_texts(tmp_path / "a.txt") == [{"text": "one two"}, {"text": "three"}]
    (tmp_path / "b.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"messages": [{"role": "user", "content": "c"}]}\n'
    )
    assert list(texts_of(read_texts(tmp_path / "b.jsonl"))) == ["a", "b", "c"]
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UsageError, match=r"c.jsonl, line 2: not JSON"):
        read_texts(tmp_path / "c.jsonl")


@pytest.mark.parametrize("kind", ["counting", "copying", "sorting"])
def test_made_up_texts_are_the_same_for_the_same_seed(kind):
    assert generate(kind, 20, seed=1) == generate(kind, 20, seed=1)
    assert generate(kind, 20, seed=1) != generate(kind, 20, seed=2)


def test_held_out_texts_are_not_trained_on(file):
    data = load_config(file).data
    rows, held_out = split_data(data, 0)
    assert (len(rows), len(held_out)) == (450, 50)
    assert split_data(data, 0) == (rows, held_out)


def test_reading_a_configuration_imports_neither_torch_nor_transformers(file):
    code = f"""
import sys
from sonde.cli.main import main
try:
    main(["train", {str(file)!r}, "--check"])
except SystemExit as exit:
    assert not exit.code
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert TuneConfig.model_validate_json(done.stdout).output_dir == Path("checkpoints")
