"""Keras 3, the real one, on each of its back-ends. The back-end is chosen when Keras is imported: each runs in a
separate process, which trains everything once and prints what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("keras")

SCRIPT = Path(__file__).with_name("keras_script.py")


def run_script(backend: str, folder: Path, *what: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "SONDE_BUDGET_SECONDS": "3600",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, str(script), str(folder), *what], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module", params=["torch", "jax", "tensorflow"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip(request.param)
    done = run_script(request.param, tmp_path_factory.mktemp("keras"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "a measurement failed" not in done.stderr, done.stderr[-4000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts | {"backend": request.param}


@pytest.fixture(scope="module", params=["torch", "jax", "tensorflow"])
def bits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip(request.param)
    done = run_script(request.param, tmp_path_factory.mktemp("bits"), script=SCRIPT.with_name("keras_bits.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_does_not_change_by_a_bit(bits):
    """Losses, weights, statistics of norms, seeds and the optimizer's state, after 54 steps that were all recorded."""
    bits = {name: seen for name, seen in bits.items() if name != "snapshots"}
    models = {"dense", "dropout", "conv", "norm", "lstm", "embedding", "mixed", "counting", "adam", "eager"}
    assert models <= bits.keys()
    for name, seen in bits.items():
        assert (seen["losses"], seen["variables"]) == ([], []), name
        assert seen["recorded"] == seen["steps"], name
        assert seen["acts"], name
    assert all(bits[name]["steps"] == 54 for name in models)


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestSnapshots:
    """Against the same `fit` without sonde, whose variables are read before each step."""

    def test_variables_and_states_are_those_before_the_step_bit_by_bit(self, bits):
        seen = bits["snapshots"]
        assert seen["steps"] == [[0, 1, 2, 3, 4], [0, 2, 3, 4]]
        # TensorFlow and JAX create the optimizer's state in their own order: each step has the same set of bytes.
        assert (seen["variables"], seen["adam"]) == ([True] * 5, True)
        assert seen["warnings"] == []

    def test_gradients_are_those_that_were_applied(self, bits):
        """Up to the rounding of the update itself."""
        assert bits["snapshots"]["update"] < 1e-5

    def test_outputs_and_inputs_are_those_of_the_batch(self, bits):
        seen = bits["snapshots"]
        assert seen["act"] < 1e-5
        assert seen["batch"]

    def test_no_variable_changes_by_a_bit(self, bits):
        assert bits["snapshots"]["same"] == [True, True]

    def test_on_request_with_other_kinds(self, bits):
        assert {"act/first", "act/last", "act/dropout"} <= set(bits["snapshots"]["asked"])


@pytest.mark.slow
class TestEachBackEnd:
    def test_sketches_agree_with_the_specification(self, found):
        assert found["sketches"] == []

    def test_gradients_are_those_of_a_loop_by_hand(self, found):
        """For every trainable variable, at every step."""
        wanted, seen = found["by hand"]["wanted"], found["by hand"]["seen"]
        assert list(seen) == list(wanted)
        for name, norms in wanted.items():
            assert seen[name] == pytest.approx(norms, rel=1e-4), name
        assert found["by hand"]["loss"] == pytest.approx(found["by hand"]["wanted loss"], rel=1e-4)

    @pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed", "recurrent"])
    def test_no_loss_changes_by_a_bit(self, found, kind):
        assert len(found[kind]["plain"]) == 6
        assert found[kind]["recorded"] == found[kind]["plain"]

    @pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed", "recurrent"])
    def test_every_trainable_variable_has_its_gradient(self, found, kind):
        sites, num = found[kind]["sites"], found[kind]["variables"]
        assert len(sites["grad"]) == num
        assert sorted(sites["param"]) == sorted(sites["update"]) == sorted(sites["grad"])
        assert len(sites["optim"]) >= 2 * num  # Adam
        assert set(found[kind]["steps"]) == {6}

    @pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed", "recurrent"])
    def test_updates_are_what_the_optimizer_did(self, found, kind):
        """Adam moves everything that has a gradient, at every step."""
        assert found[kind]["still"] == []

    def test_names_are_the_same_in_every_process_and_model(self, found):
        dense = ["dense.bias", "dense.kernel", "out.bias", "out.kernel"]
        assert found["functional"]["sites"]["grad"] == dense
        assert found["sequential"]["sites"]["grad"] == [name.replace("out", "dense_1") for name in dense]
        assert found["subclassed"]["sites"]["grad"] == [
            *(f"block{end}.dense.{name}" for end in ("", "_1") for name in ("bias", "kernel")),
            "scale",
        ]

    def test_activations_are_those_of_real_batches(self, found):
        assert {"dense", "dropout", "out", "model"} <= set(found["functional"]["sites"]["act"])
        assert found["functional"]["act steps"] == [0, 1, 2, 3, 4, 5]
        assert {"block", "block.dense", "block_1.dense"} <= set(found["subclassed"]["sites"]["act"])
        assert found["by hand"]["act"] == pytest.approx(found["by hand"]["wanted act"], rel=1e-4)

    def test_numbers_of_the_logs(self, found):
        assert found["functional"]["val"] == [2, 5]
        assert found["functional"]["rate"] == pytest.approx([0.01] * 6)

    def test_nothing_of_ours_is_left(self, found):
        left = [found[kind]["left"] for kind in ("functional", "sequential", "subclassed", "recurrent")]
        assert left == [[]] * 4
        assert [found["ends"][how]["left"] for how in found["ends"]] == [[]] * len(found["ends"])

    def test_the_end_is_reported_truthfully(self, found):
        assert found["functional"]["status"] == "finished"
        statuses = {how: end["status"] for how, end in found["ends"].items()}
        assert statuses == {
            "raises in a step": "crashed",
            "raises in a callback": "crashed",
            "raises in the data": "crashed",
            "interrupted": "interrupted",
        }
        assert "broken on purpose" in found["ends"]["raises in a callback"]["reason"]

    def test_another_fit_continues_the_same_run(self, found):
        assert found["again"]["runs"] == 1
        assert found["again"]["steps"] == [0, 1, 2, 3, 4, 5]
        assert found["again"]["status"] == "finished"

    @pytest.mark.parametrize("how", ["same callback", "another process", "backup first", "backup last"])
    def test_a_restored_optimizer_returns_to_its_step(self, found, how):
        seen = found["returns"][how]
        assert seen["first step"] == 6
        assert seen["steps"] == list(range(9))
        assert seen["loss"][:6] == seen["before"][:6]
        assert seen["loss"][6] == pytest.approx(seen["made"][0], rel=1e-6)
        assert seen["earlier"] == seen["before"]
        assert seen["loss"][6:] != seen["before"][6:]

    def test_a_schedule(self, found):
        assert found["schedule"]["steps"] == [0, 2, 4]
        assert found["schedule"]["same"]

    def test_several_steps_in_one_execution(self, found):
        if found["backend"] == "torch":
            pytest.skip("Keras refuses it on torch")
        assert found["execution"]["steps"] == [0, 2, 4]  # the first of each two
        assert found["execution"]["same"]

    def test_histograms_come_as_often_as_those_of_torch(self, found):
        assert found["by hand"]["histograms"] == [0]  # one step in ten

    def test_gradients_are_as_used_and_their_norm_before_clipping_is_known_too(self, found):
        plain = found["clipped"].pop("not")
        assert plain["norm_preclip"] == plain["norm"]
        for how, seen in found["clipped"].items():
            assert seen["norm_preclip"] == pytest.approx(plain["norm"], rel=1e-5), how
        assert sum(norm**2 for norm in found["clipped"]["all"]["norm"]) == pytest.approx(0.01, rel=1e-5)
        assert found["clipped"]["values"]["max_abs"] == pytest.approx([0.01, 0.01], rel=1e-5)
        found["clipped"]["not"] = plain

    @pytest.mark.parametrize(
        ("fault", "rules"), [("vanishing", ["vanishing_gradients"]), ("dead", ["dead_relu"]), ("healthy", [])]
    )
    def test_rules_that_need_the_model_speak_of_planted_faults_only(self, found, fault, rules):
        assert found["faults"][fault]["rules"] == rules

    def test_the_model_is_described(self, found):
        dead = found["faults"]["dead"]
        assert dead["order"] == ["dense", "dense_1", "dense_2", "dense_3"]
        assert dead["kinds"] == {"model": "container", **dict.fromkeys(dead["order"], "linear")}
        assert dead["fan in"] == {"dense.kernel": 8, **{f"dense_{i}.kernel": 16 for i in (1, 2, 3)}}
        assert dead["parameters"] == 8 * 16 + 16 + 2 * (16 * 16 + 16) + 17
        group = dead["optimizer"]["groups"][0]
        assert (dead["optimizer"]["type"], group["lr"], group["num_params"]) == ("Adam", pytest.approx(0.01), 8)

    def test_the_budget_thins_out_what_the_schedule_asks_for(self, found):
        small, none = found["governed"]["small"], found["governed"]["none"]
        assert small["steps"][0] == 0
        assert 3 <= len(small["steps"]) < 10  # enough to know what a recorded step costs
        assert none["steps"] == list(range(0, 90, 2))
        assert small["events"][0].endswith("of the steps that `when` selects")
        assert none["events"] == []
        assert small["same"]
        assert none["same"]

    def test_what_it_took_is_known_or_said_to_be_unknown(self, found):
        overheads = [found["governed"][name]["overhead"] for name in ("small", "none")]
        assert all(0 < overhead["fraction"] < 1 for overhead in overheads)
        assert [overhead["stride"] > 1 for overhead in overheads] == [True, False]
        short = found["governed"]["short"]
        if found["backend"] == "torch":
            assert short["fraction"] > 0  # it is seen there, and compared elsewhere
        else:
            assert short["fraction"] is None
            assert "without recording" in short["unknown"]

    def test_the_numbers_of_the_optimizer(self, found):
        settings = found["settings"]
        assert settings["optim/lr"] == [list(range(6)), pytest.approx([0.1 * 0.5**step for step in range(6)])]
        assert settings["optim/weight_decay"] == [[0], [0.01]]
        assert settings["optim/beta2"] == [[0], [0.95]]
        assert settings["groups"] == [[0.01, 1], [0.0, 1]]
        assert settings["of"] == {"out.kernel": [0, 0], "out.bias": [0, 1]}

    def test_the_numbers_of_a_second_optimizer(self, found):
        if found["backend"] == "jax":
            pytest.skip("a training step of two optimizers is the user's own there")
        two = found["settings"]["two"]
        assert two["optim/lr"] == pytest.approx([0.01] * 6)
        assert two["optim/1/lr"] == pytest.approx([0.05] * 6)
        assert (two["optim/beta1"], two["optim/1/momentum"]) == ([0.9], [0.9])
        assert found["settings"]["two of"] == {
            "dense.kernel": 0,
            "dense.bias": 0,
            "dense_1.kernel": 1,
            "dense_1.bias": 1,
        }

    def test_python_code_in_a_compiled_step_is_called_once_for_each_step(self, found):
        if found["backend"] != "tensorflow":
            pytest.skip("tf.py_function")
        assert found["python"] == {"calls": 6, "logs": 6, "grads": 0}

    def test_scaled_losses_give_gradients_as_they_are(self, found):
        assert found["scaled"]["seen"] == pytest.approx(found["scaled"]["wanted"], rel=1e-2)

    @pytest.mark.parametrize("how", ["a model", "a function", "a class"])
    def test_record(self, found, how):
        assert found["record"][how] == {"status": "finished", "grads": 2, "odd": [], "left": []}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("interrupt", "interrupted"), ("raise", "crashed")])
def test_a_program_that_ends_inside_fit(tmp_path, how, status):
    """No one catches it: the run knows all the same."""
    import sonde

    pytest.importorskip("jax")
    done = run_script("jax", tmp_path, how)
    assert done.returncode != 0
    run = sonde.open("latest", dir=tmp_path)
    assert run.status == status
    assert run.stats("grad/dense.kernel/norm").num_rows == 2


def test_without_keras_the_line_that_installs_it():
    code = (
        "import sys; sys.modules['keras'] = None\n"
        "from sonde.errors import MissingPackageError\n"
        "try:\n    import sonde.adapters.keras\nexcept MissingPackageError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'sonde-ml[keras]'" in done.stdout
