"""A real tiny Llama, tuned with the real transformers, TRL and PEFT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.errors import SettingsError, UnknownNameError, UsageError
from sonde.read.run.link import linked_run
from sonde.tune import EXAMPLE, CheckpointAnalyzer, CheckpointManager, FineTuningMethod, TrainingWrapper
from sonde.tune.config import ModelConfig
from sonde.tune.train.data import generate

pytestmark = [pytest.mark.slow]

TINY = ModelConfig(
    architecture="llama",
    options={
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_dropout": 0.1,
    },
)
QUICK = {"learning_rate": 1e-2, "batch_size": 4, "max_length": 24, "arguments": {"disable_tqdm": True}}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(Path.cwd() / "cache"))


def wrapper(kind: str | FineTuningMethod = "lora", **options: Any) -> TrainingWrapper:
    return TrainingWrapper(model=TINY, training_method=kind, **{**QUICK, **options})


def values(run: Any, name: str) -> list[float]:
    return run.scalars(name)["value"].to_pylist()


def trained(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_the_command_trains_records_and_can_be_restored(tmp_path):
    Path("tune.yaml").write_text(EXAMPLE)
    command = [sys.executable, "-m", "sonde.cli.main"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train", "tune.yaml", "training.batch_size=16", "--json"],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["steps"] == 29
    assert answer["checkpoints"] == [20, 29]
    run = sonde.open(answer["run"])
    assert run.status == "finished"
    assert values(run, "loss")[-1] < values(run, "loss")[0]
    ranks = values(run, "unit/model.layers.0.self_attn.q_proj/adapter_rank")
    assert 1.0 < ranks[-1] <= 8.0
    assert len(run.scalars("unit/*/adapter_norm").group_by("name").aggregate([])) == 14
    assert "lora_B" in run.stats("grad/*lora_B*/norm")["site"][0].as_py()
    done = subprocess.run(
        [*command, "analyze", "checkpoints", "-o", "report.html", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["adapters"]["facts"]["dead"] == 0
    assert "Weight evolution" in Path("report.html").read_text()
    assert Path(answer["merged"]) == Path("checkpoints/merged").resolve()
    assert (Path("checkpoints/merged/model.safetensors")).is_file()
    final = json.loads(Path("checkpoints/final/adapter_config.json").read_text())
    assert final["r"] == 8
    done = subprocess.run(
        [*command, "train", "tune.yaml", "training.batch_size=16", "training.num_epochs=2", "--resume", "--json"],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = json.loads(done.stdout)
    assert (Path(resumed["run"]), resumed["steps"]) == (Path(answer["run"]).resolve(), 58)
    assert sonde.open(resumed["run"]).scalars("loss")["step"].to_pylist() == list(range(58))


def test_training_resumes_bit_by_bit_where_it_was_interrupted(tmp_path, monkeypatch):
    data, held_out = generate("counting", 60), generate("counting", 12, seed=5)

    def train(folder: str, **options: Any) -> Any:
        made = wrapper(checkpoint_interval=4, run={"name": folder, "dir": tmp_path / "runs"})
        return made.train(data, folder, 1, eval_dataset=held_out, **options)

    straight = train("straight")
    from sonde.tune.train.trainer import RecordingCallback

    def interrupt(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RecordingCallback, "on_step_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train("parts")
    assert sonde.open(linked_run(Path("parts"))).status == "interrupted"
    resumed = train("parts", resume=True)
    assert resumed.run == linked_run(Path("parts"))
    assert torch.equal(trained(resumed.model), trained(straight.model))
    assert resumed.metrics["eval_loss"] == straight.metrics["eval_loss"]
    first, second = sonde.open(straight.run), sonde.open(resumed.run)
    assert second.scalars("loss")["step"].to_pylist() == list(range(15))
    assert values(second, "loss") == values(first, "loss")
    assert second.stats("grad/*/norm").to_pylist() == first.stats("grad/*/norm").to_pylist()
    assert [c.step for c in resumed.checkpoints] == [4, 8, 12, 15]
    assert resumed.train_loss == straight.train_loss == pytest.approx(sum(values(first, "loss")) / 15)
    assert values(second, "train_loss") == [resumed.train_loss]
    assert train("parts", resume=True).train_loss == resumed.train_loss  # nothing was left to do
    with pytest.raises(UsageError, match="overwrite"):
        train("parts")
    with pytest.raises(UsageError, match=r"saved with method.name = 'lora', but it is now 'full'"):
        wrapper("full").train(data, "parts", 1, resume=True)
    assert sonde.open(resumed.run).status == "finished"


def test_a_checkpoint_restores_the_adapters_of_a_new_process(tmp_path):
    made = wrapper(checkpoint_interval=5)
    result = made.train(generate("counting", 40), "out", 1)
    base = wrapper()
    model, _ = base._prepare(base.training.model_copy(update={"seed": 0}), generate("counting", 40))
    manager = CheckpointManager("out", model=model, adapters_only=True)
    assert not torch.equal(trained(model), trained(result.model))
    assert manager.restore() == 10
    assert torch.equal(trained(model), trained(result.model))
    size = {path.name: path.stat().st_size for path in manager.latest().path.iterdir()}
    assert size["model.safetensors"] < 4 * trained(model).numel() + 8192  # the base model is not in it


def test_losses_are_those_of_the_trainer_alone(tmp_path):
    import trl
    from transformers import set_seed

    from sonde.tune.train.arguments import trainer_arguments
    from sonde.tune.train.data import as_dataset

    data = generate("counting", 40)
    made = wrapper(seed=3)
    result = made.train(data, "out", 1)
    alone = wrapper(seed=3)
    model, tokenizer = alone._prepare(alone.training, as_dataset(data))
    set_seed(3)
    arguments = trainer_arguments(Path("alone"), made.training, made.keep, made.record, has_eval=False)
    arguments.save_strategy, arguments.num_train_epochs = "no", 1
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=as_dataset(data), processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert values(sonde.open(result.run), "loss") == losses
    assert torch.equal(trained(result.model), trained(model))


@pytest.mark.parametrize("method", ["full", "dora", "ia3", "prefix", "prompt"])
def test_methods(method, tmp_path):
    result = wrapper(method, checkpoint_interval=5, method={"r": 2}).train(generate("copying", 24), "out", 1)
    assert result.num_steps == 6
    run = sonde.open(result.run)
    trainable = [name for name, p in result.model.named_parameters() if p.requires_grad]
    assert trainable
    assert len(set(run.stats("grad/*/norm")["site"].to_pylist())) == len(trainable)
    assert max(run.stats("update/*/norm")["value"].to_pylist()) > 0
    assert CheckpointManager("out").verify() == {}


def test_bitfit_trains_biases_or_says_there_are_none(tmp_path):
    with pytest.raises(UsageError, match=r'has no biases to train. Use training_method="ia3"'):
        wrapper("bitfit").train(generate("copying", 8), "out", 1)
    gpt2 = ModelConfig(architecture="gpt2", options={"n_embd": 16, "n_layer": 1, "n_head": 2})
    result = TrainingWrapper(model=gpt2, training_method="bitfit", **QUICK).train(generate("copying", 8), "out", 1)
    names = [name for name, p in result.model.named_parameters() if p.requires_grad]
    assert names
    assert all(name.endswith("bias") for name in names)


@pytest.mark.parametrize(("method", "message"), [("qlora", "bitsandbytes"), ("unsloth", "unsloth")])
def test_methods_that_cannot_work_here_name_another(method, message):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=rf'{message}.*training_method="lora"'):
        TrainingWrapper("some/model", training_method=method)


@pytest.mark.parametrize(("method", "package"), [("qlora", "bitsandbytes"), ("unsloth", "unsloth")])
def test_a_package_that_cannot_be_imported_is_named_with_the_reason(method, package, monkeypatch):
    Path(f"{package}.py").write_text("raise RuntimeError('no driver was found.\\nLong advice')")
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(
        UsageError, match=rf"{package}, which is installed but cannot be imported here \(no driver was "
    ):
        TrainingWrapper("some/model", training_method=method)


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "package"), [("qlora", "bitsandbytes"), ("unsloth", "unsloth")])
def test_methods_of_a_gpu_train_where_their_package_is_installed(method, package):
    pytest.importorskip(package, exc_type=Exception)
    wrapper("full", checkpoint_interval=5).train(generate("copying", 24), "base", 1)
    made = TrainingWrapper("base/final", training_method=method, **QUICK)
    result = made.train(generate("copying", 24), "out", 1)
    run = sonde.open(result.run)
    assert result.num_steps == 6
    assert "lora_B" in run.stats("grad/*lora_B*/norm")["site"][0].as_py()
    assert CheckpointManager("out").verify() == {}


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_merged_model_loads_alone_and_answers_the_same(method):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = wrapper(method, method={"r": 2, "merge": True}).train(generate("copying", 24), "out", 1)
    merged = AutoModelForCausalLM.from_pretrained("out/merged").eval()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert any("lora" in name for name, _ in result.model.named_parameters()) == (method == "lora")
    tokens = AutoTokenizer.from_pretrained("out/merged")("one two three", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(merged(**tokens).logits, result.model.eval()(**tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_method_that_cannot_merge_says_so_before_it_trains():
    with pytest.raises(UsageError, match=r"what prompt trains cannot be merged"):
        wrapper("prompt", method={"merge": True}).train(generate("copying", 24), "out", 1)
    assert not Path("runs").exists()


def test_unknown_method_and_model():
    with pytest.raises(UnknownNameError, match='Did you mean "lora"'):
        wrapper("loar")
    with pytest.raises(UsageError, match="pass either model_name= for a saved model or model= for one you have built"):
        TrainingWrapper()
    bad = ModelConfig(architecture="llama", options={"hiden_size": 3})
    with pytest.raises(UnknownNameError, match='Did you mean "hidden_size"'):
        TrainingWrapper(model=bad).train(generate("copying", 8), "out", 1)
    with pytest.raises(UnknownNameError, match=r'no architecture "lama".*llama'):
        TrainingWrapper(model=ModelConfig(architecture="lama")).train(generate("copying", 8), "out", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some/model", r'no folder "some/model", and the Hugging Face Hub returned no .*model.architecture'),
        ("./gone", r"no folder ./gone; expected a saved model"),
        ("empty", r"empty is not a saved model: it has no config.json"),
        ("adapters", r"adapters contains only adapters"),
        ("broken", r"cannot load the model in broken"),
    ],
)
def test_a_model_that_is_not_there_names_what_to_give(name, message, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for folder, file in (("empty", "readme"), ("adapters", "adapter_config.json"), ("broken", "config.json")):
        Path(folder).mkdir()
        (Path(folder) / file).write_text("{}")
    with pytest.raises(UsageError, match=message):
        TrainingWrapper(name, **QUICK).train(generate("copying", 8), "out", 1)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "cosin"}, "cosin is not a valid SchedulerType"),
        ({"arguments": {"optim": "adamm"}}, "adamm is not a valid OptimizerNames"),
        ({"arguments": {"optimm": "adam"}}, r'no key "training.arguments.optimm". Did you mean "optim"'),
    ],
)
def test_arguments_the_trainer_refuses_are_reported_before_a_run_begins(options, message):
    with pytest.raises(SettingsError, match=message):
        wrapper(**options).train(generate("copying", 8), "out", 1)
    assert not Path("runs").exists()


def test_options_that_make_no_model_are_reported():
    odd = ModelConfig(architecture="llama", options={"hidden_size": 15, "num_attention_heads": 4})
    with pytest.raises(UsageError, match=r"cannot build a llama model with these options: .*multiple of"):
        TrainingWrapper(model=odd).train(generate("copying", 8), "out", 1)


def test_texts_longer_than_the_model_has_positions_for_are_cut_and_counted(capfd):
    short = ModelConfig(
        architecture="gpt2", options={"n_embd": 16, "n_layer": 1, "n_head": 2, "max_position_embeddings": 12}
    )
    texts = ["one two " * 40] * 4 + ["one"] * 4
    TrainingWrapper(model=short, training_method="prompt", **{**QUICK, "max_length": 99}).train(texts, "out", 1)
    assert "4 of them reach max_length=4 tokens" in capfd.readouterr().err  # eight are the prompt's


def test_an_adapter_that_is_passed_by_is_found(tmp_path):
    from sonde.tune.methods.lora import Method

    class PassedBy(Method):
        def prepare(self, model: Any, config: Any) -> Any:
            prepared = super().prepare(model, config)
            idle = prepared.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
            idle.forward = idle.base_layer.forward
            return prepared

    data = generate("counting", 100)
    healthy, faulty = (wrapper(method).train(data, f"out-{n}", 1) for n, method in enumerate(("lora", PassedBy())))
    dead = [f for f in sonde.open(faulty.run).findings() if f.rule == "lora_zero_init"]
    assert [f.message.split(":")[0] for f in dead] == ["1 of 14 adapters is dead (model.layers.1.mlp.up_proj)"]
    assert "Dead: model.layers.1.mlp.up_proj." in CheckpointAnalyzer("out-1").generate_standard_report().text
    assert "lora_zero_init" not in {f.rule for f in sonde.open(healthy.run).findings()}


def test_a_method_of_your_own_makes_the_steps(tmp_path):
    class OnlyNorms(FineTuningMethod):
        num_steps = 0

        def setup_training(self, model, config):
            self.model = model.requires_grad_(False)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("norm" in name)
            return model

        def train_step(self, batch):
            self.num_steps += 1
            loss = self.model(**batch).loss
            loss.backward()
            return loss.detach()

        def save_checkpoint(self, path):
            Path(path).mkdir(parents=True)
            (Path(path) / "mine.txt").write_text("saved")

    method = OnlyNorms()
    result = wrapper(method).train(generate("copying", 16), "out", 1)
    assert (method.num_steps, result.num_steps) == (4, 4)
    assert Path("out/final/mine.txt").read_text() == "saved"
    sites = set(sonde.open(result.run).stats("grad/*/norm")["site"].to_pylist())
    assert sites
    assert all("norm" in site for site in sites)


def test_memorising_is_found_and_reported(tmp_path):
    data, held_out = generate("copying", 8), generate("copying", 40, seed=9)
    made = wrapper("full", checkpoint_interval=20, eval_interval=10)
    made.train(data, "out", 60, eval_dataset=held_out)
    report = CheckpointAnalyzer("out").generate_standard_report(save_to="report.json")
    assert "training beyond that step does not generalise" in report.overfitting.verdict
    assert "overfitting" in {finding["rule"] for finding in report.findings}
    assert json.loads(Path("report.json").read_text())["convergence"]["verdict"] == report.convergence.verdict


def test_whole_gradients_are_exported_where_they_were_recorded(tmp_path):
    wrapper(run={"snapshots": 2}).train(generate("copying", 16), "out", 1)
    found = CheckpointAnalyzer("out").export_raw_gradients("gradients.npz", pattern="*q_proj*")
    assert found.is_whole
    steps, arrays = found["model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    assert arrays[0].shape == (16, 8)
    assert steps[0] == 0


def test_forgetting_is_watched_from_before_the_first_step(tmp_path):
    made = wrapper("full", checkpoint_interval=20, eval_interval=10, learning_rate=2e-2)
    model, tokenizer = made._prepare(made.training, generate("counting", 50) + generate("copying", 50))
    old = generate("counting", 40)
    known = TrainingWrapper(model=model, tokenizer=tokenizer, training_method="full", **QUICK)
    known.train(old, "first", 6)
    result = TrainingWrapper(model=model, tokenizer=tokenizer, training_method="full", eval_interval=5, **QUICK).train(
        generate("copying", 40), "second", 4, retained_dataset=old[:20]
    )
    run = sonde.open(result.run)
    losses = values(run, "eval_retained_loss")
    assert losses[0] < 1.5
    assert losses[-1] > 1.1 * losses[0]
    assert "forgetting" in {finding.rule for finding in run.findings()}


def test_weights_and_biases_gets_the_same_numbers(tmp_path, monkeypatch, offline_wandb):
    monkeypatch.setenv("WANDB_PROJECT", "before")
    wrapper(wandb_project="mine").train(generate("copying", 8), "out", 1)
    assert os.environ["WANDB_PROJECT"] == "mine"
    offline_wandb.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_a_saved_model_is_loaded_by_name(tmp_path):
    wrapper("full").train(generate("counting", 16), "first", 1)
    result = TrainingWrapper(model_name="first/final", training_method="lora", checkpoint_interval=2, **QUICK).train(
        dataset=generate("counting", 16), output_dir="second", num_epochs=1
    )
    assert [checkpoint.step for checkpoint in result.checkpoints] == [2, 4]
    assert "lora_A" in " ".join(sonde.open(result.run).sites("grad/*")["site"].to_pylist())


def test_accumulation_half_precision_and_gradient_checkpointing(tmp_path):
    made = wrapper(gradient_accumulation=2, precision="bfloat16", gradient_checkpointing=True, checkpoint_interval=3)
    result = made.train(generate("counting", 48), "out", 1)
    assert result.num_steps == 6
    run = sonde.open(result.run)
    assert run.last_step == 5
    assert len(values(run, "loss")) == 6
    assert run.warnings == []
