"""Numbers and findings forwarded to another tracker, and the words of wandb.watch."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import sonde
from sonde.errors import UnknownNameError, UsageError
from sonde.session.mirror import Mirror, name_of


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self, delay_s: float = 0.0, fails: bool = False) -> None:
        self.delay_s, self.fails = delay_s, fails
        self.rows, self.findings, self.ends, self.runs = [], [], [], []

    def begin(self, run):
        self.runs.append(run)

    def numbers(self, step, values):
        if self.fails:
            raise ConnectionError("the server is gone")
        time.sleep(self.delay_s)
        self.rows.append((step, values))

    def finding(self, found):
        self.findings.append(found)

    def close(self, status):
        self.ends.append(status)

    def series(self, name):
        return [(step, values[name]) for step, values in self.rows if name in values]


def train(tmp_path, num=25, **watch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.init(project="mirror", name="m", dir=tmp_path, config={"lr": 0.01}, verbose=False) as session:
        session.watch(model, optimizer, **watch)
        for _ in range(num):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            session.log({"loss": loss})
            optimizer.step()
            optimizer.zero_grad()
    return sonde.open(session.path)


def test_what_is_forwarded_is_what_is_recorded(tmp_path):
    sink = Kept()
    run = train(tmp_path, mirror=Mirror(to=sink, stats=["grad/*/norm"], every=5))
    table = run.stats("grad/0.weight/norm").to_pandas()
    assert sink.series("grad/0.weight/norm") == [
        (s, v) for s, v in zip(table.step, table.value, strict=True) if s % 5 == 0
    ]
    assert [step for step, _ in sink.series("loss")] == list(range(25))
    assert sink.ends == ["finished"]
    assert sink.runs[0]["config"] == {"lr": 0.01}
    assert not any(name.startswith(("data/", "unit/", "param/")) for _, values in sink.rows for name in values)


def test_a_sink_that_fails_is_told_once_and_the_run_is_whole(tmp_path, capfd):
    run = train(tmp_path, mirror=Kept(fails=True))
    assert run.status == "finished"
    assert run.scalars("loss").num_rows == 25
    assert capfd.readouterr().err.count("the server is gone") == 1


def test_a_slow_sink_keeps_nobody_waiting(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("sonde.session.mirror.MAX_WAITING", 4)
    monkeypatch.setattr("sonde.session.mirror.CLOSE_S", 0.2)
    release = threading.Event()

    class Stuck(Kept):
        def numbers(self, step, values):
            release.wait(20)

    run = train(tmp_path, mirror=Mirror(to=Stuck(), every=1))
    release.set()
    assert run.scalars("loss").num_rows == 25
    assert "mirror Stuck" in capfd.readouterr().err


class CometLike:
    def __init__(self):
        self.logged = []

    def log_metrics(self, values, step=None):
        self.logged.append((step, values))


def test_anything_with_log_metrics(tmp_path):
    experiment = CometLike()
    train(tmp_path, mirror=experiment)
    assert [step for step, values in experiment.logged if "loss" in values] == list(range(25))


@pytest.mark.parametrize(("name", "called"), [("a1b2", "a1b2"), ("baseline", "baseline-a1b2"), (None, "a1b2")])
def test_a_run_has_a_name_of_its_own_elsewhere(name, called):
    assert name_of({"name": name, "id": "a1b2"}) == called


def test_several_at_once(tmp_path):
    sinks = [Kept(), Kept()]
    train(tmp_path, 3, mirror=sinks)
    assert [len(sink.series("loss")) for sink in sinks] == [3, 3]


def test_a_mirror_of_two_models_is_told_once(tmp_path):
    """A generator and its critic, each watched with the same words."""
    sink = Kept()
    models = {"g.": torch.nn.Linear(2, 2), "c.": torch.nn.Linear(2, 1)}
    with sonde.init(dir=tmp_path, verbose=False) as session:
        for prefix, model in models.items():
            session.watch(model, prefix=prefix, mirror=Mirror(to=sink))
        session.log({"loss": 1.0})
    assert (len(sink.runs), sink.series("loss")) == (1, [(0, 1.0)])


def test_an_unknown_mirror_is_refused_at_once(tmp_path):
    with pytest.raises(UnknownNameError, match="wandb"):
        train(tmp_path, mirror="wandbb")
    with pytest.raises(UsageError, match="log_metrics"):
        train(tmp_path, mirror=3)
    with pytest.raises(UsageError, match="kind/site/stat"):
        Mirror(to="wandb", stats=["norm"])


class TestWordsOfWandb:
    def test_gradients_only_and_now_and_then(self, tmp_path):
        run = train(tmp_path, log="gradients", log_freq=10, criterion=None, idx=0, log_graph=False, activations=False)
        assert run.stats(["param/*/norm", "update/*/norm"]).num_rows == 0
        assert run.stats("grad/0.weight/norm")["step"].to_pylist() == [0, 10, 20]

    def test_the_criterion_in_the_second_place(self, tmp_path):
        """`wandb.watch(model, criterion, log="all")`, as in all of its examples."""
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with sonde.init(dir=tmp_path, verbose=False) as session:
            session.watch(model, torch.nn.MSELoss(), log="all", log_freq=1)
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        assert sonde.open(session.path).stats("grad/weight/norm").num_rows == 1

    def test_all(self, tmp_path):
        assert {"grad", "param", "update"} <= set(train(tmp_path, 2, log="all").sites()["kind"].to_pylist())

    @pytest.mark.parametrize("given", [{"log": "everything"}, {"log_freq": 0}])
    def test_what_wandb_would_not_know_either(self, tmp_path, given):
        with pytest.raises(UsageError, match="log"):
            train(tmp_path, **given)

    def test_a_slip_of_the_pen(self, tmp_path):
        with pytest.raises(UnknownNameError, match="activations"):
            train(tmp_path, activation=True)
