"""Numbers and findings forwarded to another tracker, and the words of wandb.watch."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

import sonde
from sonde.errors import UnknownNameError, UsageError
from sonde.schema.joined import JOINED
from sonde.schema.stats import STATS
from sonde.session.entry import current
from sonde.session.observers.mirror import Mirror, name_of


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


def train(tmp_path, num=25, *, adam=False, at_end=lambda: None, finish_deadline_s=30.0, live_rules=True, **watch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.01)
    settings = {"finish_deadline_s": finish_deadline_s, "live_rules": live_rules, "verbose": False}
    with sonde.init(project="mirror", name="m", dir=tmp_path, config={"lr": 0.01}, **settings) as session:
        session.watch(model, optimizer, **watch)
        for _ in range(num):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            session.log({"loss": loss})
            optimizer.step()
            optimizer.zero_grad()
        at_end()
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


def rows_of(run, patterns):
    """Series and step -> value, as the run has them."""
    table = run.stats(patterns).to_pandas()
    return {(f"{r.kind}/{r.site}/{r.stat}", r.step): r.value for r in table.itertuples()}


def sent(sink):
    found = {}
    for step, values in sink.rows:
        for name, value in values.items():
            assert (name, step) not in found, "sent twice"
            found[name, step] = value
    return found


def test_every_stat_can_be_forwarded(tmp_path):
    """Also those that need two sites, such as `ratio`, and those that need the histogram."""
    sink = Kept()
    kinds = dict.fromkeys(("params", "grads", "updates", "optim", "activations", "activation_grads"), True)
    patterns = [f"*/*/{stat}" for stat in (*STATS, *JOINED)]
    run = train(tmp_path, adam=True, mirror=Mirror(to=sink, stats=patterns, scalars="loss", every=1), **kinds)
    found = {key: value for key, value in sent(sink).items() if key[0] != "loss"}
    assert found == pytest.approx(rows_of(run, patterns), rel=0, abs=0, nan_ok=True)
    seen = {tuple(name.split("/"))[::2] for name, _ in found}
    assert {stat for _, stat in seen} == {*STATS, *JOINED}
    assert {kind for kind, _ in seen} == {"param", "grad", "update", "optim", "act", "actgrad"}


@pytest.mark.parametrize("pattern", ["update/*/ratio", "update/0.weight/grad_cosine", "*/*/norm", "param/1.*/abs_q50"])
def test_patterns_mean_what_they_mean_to_a_run(tmp_path, pattern):
    sink = Kept()
    run = train(tmp_path, mirror=Mirror(to=sink, stats=[pattern], scalars="none", every=2))
    wanted = {key: value for key, value in rows_of(run, pattern).items() if key[1] % 2 == 0}
    assert sent(sink) == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
    assert wanted


def test_one_pattern_needs_no_list():
    assert list(Mirror(to=Kept(), stats="grad/*/norm").stats) == ["grad/*/norm"]


def test_numbers_for_the_rules_are_forwarded_when_they_are_asked_for(tmp_path):
    sink = Kept()
    run = train(tmp_path, mirror=Mirror(to=sink, stats=[], scalars="data/input/*"))
    table = run.scalars("data/input/std").to_pandas()
    assert sink.series("data/input/std") == list(zip(table.step, table.value, strict=True))
    assert len(table)


def delivered(run):
    return json.loads((run.path / "run.json").read_text())["facts"]["mirrors"]


def test_a_sink_that_fails_is_reported_once_and_the_run_is_whole(tmp_path, capfd):
    run = train(tmp_path, mirror=Kept(fails=True))
    assert run.status == "finished"
    assert run.scalars("loss").num_rows == 25
    said = capfd.readouterr().err
    assert said.count("the server is gone") == 1
    (mirror,) = delivered(run)
    assert mirror["delivered"] == 0
    events = run.sql("select message from events where type = 'mirror'")["message"].to_pylist()
    assert f"0 of {mirror['of']} values delivered" in events[-1]


def test_a_failure_that_passes_costs_what_was_sent_meanwhile(tmp_path, capfd):
    class Shaky(Kept):
        def numbers(self, step, values):
            if step in (7, 8):
                raise ConnectionError("no route")
            super().numbers(step, values)

    sink = Shaky()
    train(tmp_path, mirror=Mirror(to=sink, every=1000))
    assert [step for step, _ in sink.series("loss")] == [step for step in range(25) if step not in (7, 8)]
    assert capfd.readouterr().err.count('the mirror "Shaky"') == 1


@pytest.mark.parametrize("error", [OSError("no store"), SystemExit("no key")])
def test_a_sink_that_does_not_start_is_one_warning(tmp_path, capfd, error):
    class Closed(Kept):
        def begin(self, run):
            raise error

    run = train(tmp_path, mirror=Closed())
    said = capfd.readouterr().err
    assert said.count("mirror") == 1
    assert f'the mirror "Closed": it did not start: {type(error).__name__}: {error}' in said
    assert delivered(run)[0]["delivered"] == 0
    assert run.scalars("loss").num_rows == 25


def test_what_was_recorded_before_a_sink_was_ready_is_delivered(tmp_path, capfd):
    over = threading.Event()

    class Late(Kept):
        def begin(self, run):
            over.wait(60)
            super().begin(run)

    sink = Late()
    watch = {"inspect": False, "activations": False}
    run = train(tmp_path, 400, mirror=Mirror(to=sink, every=1), at_end=over.set, live_rules=False, **watch)
    assert [step for step, _ in sink.series("loss")] == list(range(400))
    (mirror,) = delivered(run)
    assert mirror["delivered"] == mirror["of"] == sum(len(values) for _, values in sink.rows)
    assert "mirror" not in capfd.readouterr().err


def test_a_sink_that_never_answers_does_not_keep_the_end_of_a_run_waiting(tmp_path, capfd):
    release = threading.Event()

    class Stuck(Kept):
        def numbers(self, step, values):
            release.wait(60)

    run = train(tmp_path, mirror=[Mirror(to=Stuck(), every=1), Mirror(to=Stuck(), every=2)], finish_deadline_s=1.0)
    release.set()
    said = capfd.readouterr().err
    assert run.status == "finished"
    assert run.scalars("loss").num_rows == 25
    totals = [mirror["of"] for mirror in delivered(run)]
    assert [f"0 of {total} values delivered" in said for total in totals] == [True, True]


def test_a_sink_that_is_too_slow_loses_values_and_says_how_many(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("sonde.session.observers.delivery.MAX_WAITING", 40)
    over = threading.Event()

    class Slow(Kept):
        def numbers(self, step, values):
            over.wait(60)
            super().numbers(step, values)

    def everything_is_handed_over() -> None:
        session = current.active_session()
        assert session is not None
        assert session.flush()
        over.set()

    sink = Slow()
    run = train(tmp_path, mirror=Mirror(to=sink, every=1), at_end=everything_is_handed_over)
    (mirror,) = delivered(run)
    assert 0 < mirror["delivered"] == sum(len(values) for _, values in sink.rows) < mirror["of"]
    assert f"{mirror['delivered']} of {mirror['of']} values delivered" in capfd.readouterr().err
    assert run.scalars("loss").num_rows == 25


def test_a_finding_is_forwarded_once(tmp_path):
    sink = Kept()
    run = train(tmp_path, 60, mirror=sink)
    rows = run.sql("select anomaly_type, severity from anomalies").to_pylist()
    found = [(finding.rule, finding.severity) for finding in sink.findings]
    assert sorted(found) == sorted((row["anomaly_type"], row["severity"]) for row in rows)
    assert rows


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
def test_a_run_has_a_unique_name_elsewhere(name, called):
    assert name_of({"name": name, "id": "a1b2"}) == called


def test_several_at_once(tmp_path):
    sinks = [Kept(), Kept()]
    train(tmp_path, 3, mirror=sinks)
    assert [len(sink.series("loss")) for sink in sinks] == [3, 3]


def test_a_mirror_of_two_models_gets_each_value_once(tmp_path):
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
    with pytest.raises(UnknownNameError, match='Did you mean "ratio"'):
        Mirror(to="wandb", stats=["update/*/rato"])
    with pytest.raises(UnknownNameError, match='Did you mean "grad"'):
        Mirror(to="wandb", stats=["grads/*/norm"])


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
