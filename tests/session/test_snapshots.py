"""Whole tensors while a model trains: what is kept is what was there, when asked, whole or not at all."""

from __future__ import annotations

import _thread
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.errors import RunError, UnknownNameError, UsageError
from sonde.write.tensors.store import open_store
from sonde.write.tensors.stores.memory import MemoryStore

ALL = ("param", "grad", "act", "optim", "batch")


class Net(nn.Module):
    """Batch norm, in-place activation, dropout, a buffer that is not saved, and a large one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(40, 3)
        self.register_buffer("table", torch.arange(300_000.0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.last(self.drop(self.act(self.norm(self.first(x)))))
        return y if scale is None else y * scale


SITES = ("first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias")
ALL_NAMES = {
    *(f"{kind}/{site}" for kind in ("param", "grad") for site in SITES),
    *(f"optim/{site}.{key}" for site in SITES for key in ("exp_avg", "exp_avg_sq", "step")),
    *(f"param/norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    *(f"{kind}/{name}" for kind in ("act", "probe") for name in ("first", "norm", "act", "drop", "last", "model")),
    *("param/table", "batch/input.0", "batch/input.scale"),
}
"""What a snapshot of `Net` under AdamW holds."""


class Trained:
    """A model, its optimizer, and a clone of everything as the optimizer found it at each step."""

    def __init__(self, optimizer: Any = None) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters()) if optimizer else torch.optim.AdamW(self.model.parameters())
        self.seen: list[dict[str, Tensor]] = []

    def step(self, *, set_to_none: bool = True) -> None:
        x = torch.randn(8, 6)
        self.model(x, scale=torch.ones(3)).square().mean().backward()
        self.seen.append({**self.now(), "batch/input.0": x, "batch/input.scale": torch.ones(3)})
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def now(self) -> dict[str, Tensor]:
        names = {id(p): n for n, p in self.model.named_parameters()}
        found = {f"param/{n}": t for n, t in self.model.state_dict().items()}
        found |= {f"grad/{n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        found |= {
            f"optim/{names[id(p)]}.{key}": t
            for p, state in self.optimizer.state.items()
            for key, t in state.items()
            if isinstance(t, Tensor)
        }
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def kept(session: Any) -> MemoryStore:
    assert session.flush(30)
    store = session.steps.snapshots._writer._store
    assert isinstance(store, MemoryStore)
    return store


def assert_same(store: Any, step: int, expected: dict[str, Tensor], *, attempt: int = 0) -> None:
    tensors = store.read(step, attempt=attempt).tensors
    assert {name for name in tensors if not name.startswith(("act/", "probe/"))} == set(expected)
    for name, tensor in expected.items():
        assert tensors[name].shape == tuple(tensor.shape), name
        assert np.array_equal(tensors[name].values(), tensor.numpy(), equal_nan=True), name


def plan(**options: Any) -> sonde.Snapshots:
    return sonde.Snapshots(**{"store": "memory", "when": sonde.every(2), **options})


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A store that does not answer until the event is set."""
    event = threading.Event()
    write = MemoryStore.write

    def wait(self: MemoryStore, snapshot: Any) -> Any:
        assert event.wait(30)
        return write(self, snapshot)

    monkeypatch.setattr(MemoryStore, "write", wait)
    yield event
    event.set()


# --------------------------------------------------------------------------------------------------- what is kept


def test_what_is_kept_is_what_the_optimizer_found(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(kinds=ALL))
    for _ in range(5):
        trained.step()
    store = kept(session)
    assert store.steps() == [0, 2, 4]
    for step in store.steps():
        assert_same(store, step, trained.seen[step])
    assert session.recording.breaker.num_errors == 0


def test_one_word_keeps_parameters_in_zarr(begin: Any, tmp_path: Path) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=sonde.every(3))
    for _ in range(4):
        trained.step()
    session.finish()
    store = open_store("zarr", session.path)
    try:
        assert store.steps() == [0, 3]
        assert_same(store, 3, {n: t for n, t in trained.seen[3].items() if n.startswith("param/")})
    finally:
        store.close()


def test_activations_are_those_of_the_first_batch_before_anything_changes_them_in_place(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(kinds=("act",)))
    seen: dict[str, Tensor] = {}

    def remember(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.setdefault(name, output.detach().clone())

    named = [(name, module) for name, module in trained.model.named_modules() if name]
    handles = [module.register_forward_hook(partial(remember, name)) for name, module in named]
    torch.manual_seed(1)
    trained.model(torch.randn(8, 6)).mean().backward()
    trained.step()
    for handle in handles:
        handle.remove()
    tensors = kept(session).read(0).tensors
    assert set(tensors) == {f"act/{name}" for name in seen} | {"act/model"}
    assert (seen["norm"] < 0).any(), "the in-place activation after it would have removed these"
    for name, tensor in seen.items():
        assert np.array_equal(tensors[f"act/{name}"].values(), tensor.numpy()), name


def test_the_probe_batch_stays_the_same_and_runs_in_evaluation_mode(begin: Any) -> None:
    trained, session = Trained(), begin()
    probe = torch.randn(5, 6)
    given = probe.clone()
    session.watch(trained.model, trained.optimizer, snapshots=plan(kinds=("param",), probe=probe))
    expected = {}
    for step in range(3):
        frozen = {n: t.clone() for n, t in trained.model.state_dict().items()}
        trained.step()
        copy = Net()
        # As the optimizer found it: parameters from before the step, statistics from after the forward pass.
        copy.load_state_dict({n: trained.seen[step][f"param/{n}"] for n in frozen})
        with torch.no_grad():
            expected[step] = copy.eval()(given)
        probe.zero_()  # what becomes of the original does not matter
    store = kept(session)
    for step in (0, 2):
        assert np.array_equal(store.read(step).tensors["probe/model"].values(), expected[step].numpy())
    assert trained.model.training


def test_all_that_is_asked_for_once_is_the_probe_too(begin: Any) -> None:
    trained, session = Trained(), begin()
    probe = torch.randn(5, 6)
    session.watch(trained.model, trained.optimizer, snapshots=plan(kinds=("param",), probe=probe, when=False))
    session.snapshot("all")
    trained.step()
    assert {name.partition("/")[0] for name in kept(session).read(0).tensors} >= {"param", "grad", "act", "probe"}


def test_a_probe_batch_the_model_cannot_take_is_said_once_and_left_out(begin: Any, capfd: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(probe=torch.randn(5, 7), when=sonde.every(1)))
    for _ in range(3):
        trained.step()
    assert [len(kept(session).read(step).tensors) for step in range(3)] == [len(trained.model.state_dict())] * 3
    assert capfd.readouterr().err.count("probe batch") == 1
    assert session.recording.breaker.num_errors == 0


def test_sites_choose(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(kinds=ALL, sites=["first*", "last.bias"]))
    trained.step()
    assert set(kept(session).read(0).tensors) == {
        "act/first", "param/first.weight", "param/first.bias", "param/last.bias",
        "grad/first.weight", "grad/first.bias", "grad/last.bias", "batch/input.0", "batch/input.scale",
    }  # fmt: skip


FORMS: dict[str, tuple[Any, set[str]]] = {
    "glob": ("norm*", {"norm"}),
    "list of globs": (["first*", "last.bias", "!*.weight"], {"first.bias", "first", "last.bias"}),
    "regular expression": (re.compile(r"^(first|norm)(\.|$)"), {"first", "norm"}),
    "module type": (nn.BatchNorm1d, {"norm"}),
    "tuple of module types": ((nn.BatchNorm1d, nn.Linear), {"first", "norm", "last"}),
    "list of both": ([nn.BatchNorm1d, "last.*", "!*.bias"], {"norm", "last.weight"}),
    "function": (lambda name, module: isinstance(module, nn.Linear) and "bias" not in name, {"first", "last"}),
}


def expected_names(form: Any, named: set[str]) -> set[str]:
    """What is named, and all that belongs to a module that is named, as far as the form does not exclude it."""
    sites = {name.partition("/")[2] for name in ALL_NAMES}
    inside = {site for site in sites if any(site == name or site.startswith(f"{name}.") for name in named)}
    if form in ("function", "list of both"):
        inside = {site for site in inside if "bias" not in site}
    if form == "list of globs":
        inside = {site for site in inside if "weight" not in site}
    return {name for name in ALL_NAMES if name.partition("/")[2] in inside or name.startswith("batch/")}


@pytest.mark.parametrize("is_of_the_plan", [True, False], ids=["Snapshots", "watch"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_sites_chooses_every_kind(begin: Any, form: str, is_of_the_plan: bool) -> None:
    sites, named = FORMS[form]
    trained, session = Trained(), begin()
    kinds = {"kinds": "all", "when": sonde.every(1), "probe": torch.randn(4, 6)}
    if is_of_the_plan:
        session.watch(trained.model, trained.optimizer, snapshots=plan(**kinds, sites=sites))
    else:
        session.watch(trained.model, trained.optimizer, sites=sites, snapshots=plan(**kinds))
    trained.step()
    trained.step()
    assert set(kept(session).read(1).tensors) == expected_names(form, named)


def test_a_shared_parameter_is_chosen_by_any_of_its_modules(begin: Any) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    session = begin()
    session.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), snapshots=plan(sites=nn.Linear))
    session.snapshot()
    session.finish()
    assert set(session.steps.snapshots._writer._store.read(0).tensors) == {"param/0.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_every_bit_of_every_type_is_kept(dtype: torch.dtype, begin: Any) -> None:
    bits = torch.randint(0, 2, (70_000,), dtype=torch.uint8)
    value = bits.bool() if dtype is torch.bool else torch.randint(0, 256, (4 * 70_000,), dtype=torch.uint8)[
        : 70_000 * torch.empty(0, dtype=dtype).element_size() // 1
    ].view(dtype)  # fmt: skip
    model = nn.Linear(2, 1)
    model.register_buffer("odd", value[:70_000].reshape(100, -1).t())  # strided, too
    session = begin()
    session.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), snapshots=plan())
    model(torch.randn(3, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    session.step()
    tensor = kept(session).read(0).tensors["param/odd"]
    odd: Any = model.odd
    assert tensor.shape == tuple(odd.shape)
    assert tensor.flat().tobytes() == odd.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_parameter_that_cannot_be_copied_is_named_and_the_rest_is_kept(begin: Any, capfd: Any) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    optimizer, session = torch.optim.SGD(model.parameters(), lr=0.1), begin()
    session.watch(model, optimizer, snapshots=plan())
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    assert set(kept(session).read(0).tensors) == {"param/weight", "param/bias"}
    assert "param/sparse is left out of snapshots" in capfd.readouterr().err


def test_two_models_make_one_snapshot(begin: Any) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    session = begin()
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        session.watch(model, optimizer, snapshots=plan(), prefix=f"m{number}.")
    before = [model.weight.detach().clone() for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    tensors = kept(session).read(0).tensors
    assert set(tensors) == {f"param/m{number}.{name}" for number in (0, 1) for name in ("weight", "bias")}
    for number, weight in enumerate(before):
        assert np.array_equal(tensors[f"param/m{number}.weight"].values(), weight.numpy())


def test_a_closure_makes_its_gradients_inside_the_step(begin: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer, session = torch.optim.LBFGS(model.parameters(), max_iter=1), begin()
    session.watch(model, optimizer, snapshots=plan(kinds=("param", "grad")))
    before, x = model.weight.detach().clone(), torch.randn(4, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    tensors = kept(session).read(0).tensors
    assert np.array_equal(tensors["param/weight"].values(), before.numpy())
    assert model.weight.grad is not None
    assert np.array_equal(tensors["grad/weight"].values(), model.weight.grad.numpy())


def test_gradients_that_a_fused_optimizer_has_still_to_unscale_are_kept_unscaled(begin: Any) -> None:
    model, session = nn.Linear(4, 4), begin()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session.watch(model, optimizer, snapshots=plan(kinds=("grad",)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.randn(2, 4)).square().sum()).backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    scaled = model.weight.grad.clone()
    scaler.step(optimizer)
    assert np.array_equal(kept(session).read(0).tensors["grad/weight"].values(), (scaled / 1024).numpy())


def test_loops_without_a_torch_optimizer_keep_what_is_there_at_step(begin: Any) -> None:
    model, session = nn.Linear(2, 1), begin()
    session.watch(model, snapshots=plan(kinds=("param", "grad")))
    model(torch.randn(4, 2)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1  # their own update
    session.step()
    assert np.array_equal(kept(session).read(0).tensors["param/weight"].values(), model.weight.detach().numpy())


# ------------------------------------------------------------------------------------------------- when it is kept


def test_asked_from_code_the_next_step_is_kept(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=False))
    trained.step()
    trained.step()
    assert sonde.snapshot(("param", "grad")) == 2
    trained.step()
    trained.step()
    store = kept(session)
    assert store.steps() == [2]
    expected = {n: t for n, t in trained.seen[2].items() if n.startswith(("param/", "grad/"))}
    assert_same(store, 2, expected)
    assert store.read(2).reason == "asked"


def test_asked_in_the_middle_of_a_step_it_is_that_one(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=False))
    trained.step()
    trained.model(torch.randn(8, 6)).sum().backward()
    expected = trained.now()
    assert session.snapshot() == 1
    trained.optimizer.step()
    store = kept(session)
    assert store.steps() == [1]
    assert_same(store, 1, {n: t for n, t in expected.items() if n.startswith("param/")})


def test_asked_after_the_last_step_it_is_taken_by_finish(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=False))
    trained.step()
    assert session.snapshot() == 1
    session.finish()
    store = session.steps.snapshots._writer._store
    assert_same(store, 1, {n: t for n, t in trained.now().items() if n.startswith("param/")})


def test_asked_by_a_thread_that_does_not_train_the_one_that_does_takes_it(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=False))
    trained.step()
    thread = threading.Thread(target=session.snapshot)
    thread.start()
    thread.join()
    assert session.steps.snapshots.draft is None
    trained.step()
    trained.step()
    assert kept(session).steps() == [1]


def test_a_schedule_that_raises_costs_snapshots_and_nothing_else(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=lambda step: 1 / (step - 2) > 0))
    for _ in range(5):
        trained.step()
    assert kept(session).steps() == [0, 3, 4]
    assert (session.recording.breaker.num_errors, session.step_number) == (1, 4)


def test_a_run_without_snapshots_keeps_one_when_asked(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer)
    trained.step()
    session.snapshot()
    trained.step()
    session.finish()
    assert (session.path / "tensors" / "step-000000001.zarr.zip").is_file()


def test_asking_wrongly_warns_and_never_raises(begin: Any, capfd: Any) -> None:
    session = begin()
    assert session.snapshot() is None
    trained = Trained()
    session.watch(trained.model, trained.optimizer)
    assert session.snapshot("parm") is None
    session.finish()
    assert session.snapshot() is None
    said = capfd.readouterr().err
    for words in ("needs a watched model", 'Did you mean "param"?', "after finish"):
        assert words in said


def test_the_first_critical_finding_of_a_rule_is_worth_a_snapshot(begin: Any) -> None:
    trained, session = Trained(torch.optim.SGD), begin(writer={"flush_interval_s": 0.02})
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=False))
    for _ in range(5):
        trained.step()
    with torch.no_grad():
        trained.model.first.weight.fill_(float("nan"))
    end = time.monotonic() + 240  # the rules run in a process, which starts slowly on a machine with a busy disk
    while not session.steps.snapshots.ledger.counts["taken"] and time.monotonic() < end:
        trained.step()
        session.flush(10)
    store = kept(session)
    assert store.read(store.steps()[0]).reason == "finding nan_inf"


def test_a_request_file_is_answered(begin: Any) -> None:
    trained, session = Trained(), begin(writer={"flush_interval_s": 0.01, "heartbeat_s": 0.02})
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=False))
    folder = session.path / "requests"
    folder.mkdir()
    requests = {
        "00000000aa": '{"what": "snapshot", "kinds": ["param"]}',
        "00000000bb": '{"what": "snapshot", "kinds": ["parm"]}',
        "00000000cc": "not json",
        "00000000dd": '{"what": "reboot"}',
    }
    for name, text in requests.items():  # whole or not at all, as `sonde snapshot` writes them
        (folder / f"{name}.part").write_text(text)
        (folder / f"{name}.part").rename(folder / f"{name}.json")
    answers: dict[str, Any] = {}
    end = time.monotonic() + 60
    while answers.get("00000000aa", {}).get("state") != "taken":
        assert time.monotonic() < end, answers
        trained.step()
        session.flush(10)
        answers = {p.name.partition(".")[0]: json.loads(p.read_text()) for p in folder.glob("*.answer.json")}
    assert set(answers) == {"00000000aa", "00000000bb", "00000000dd"}
    assert answers["00000000aa"]["nbytes"] > 0
    assert 'Did you mean "param"?' in answers["00000000bb"]["why"]
    assert not [path for path in folder.iterdir() if not path.name.endswith(".answer.json")]


# --------------------------------------------------------------------------------------------- whole or not at all


def test_a_slow_disk_costs_no_snapshot_that_fits_in_memory(begin: Any, blocked: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1), kinds=ALL))
    for _ in range(12):
        trained.step()
    blocked.set()
    store = kept(session)
    assert store.steps() == list(range(12))
    for step in store.steps():
        assert_same(store, step, trained.seen[step])
    assert session.steps.snapshots.ledger.counts == {"taken": 12, "skipped": 0, "failed": 0}


def test_with_memory_for_one_training_waits_and_every_snapshot_is_taken(begin: Any, blocked: Any) -> None:
    """The store writes when training waits for memory, and then stops again: a disk that is slower than training."""
    trained = Trained()
    nbytes = sum(t.nbytes for t in trained.model.state_dict().values())
    session = begin(snapshot_mib=1.5 * nbytes / 2**20)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    staging, has_ended = session.steps.snapshots._memory(), threading.Event()

    def let_go() -> None:
        while not has_ended.wait(0.002):
            blocked.set() if staging._freed._waiters else blocked.clear()
        blocked.set()

    disk = threading.Thread(target=let_go)
    disk.start()
    for _ in range(6):
        trained.step()
    has_ended.set()
    disk.join()
    store = kept(session)
    assert store.steps() == list(range(6))
    for step in store.steps():
        assert_same(store, step, {n: t for n, t in trained.seen[step].items() if n.startswith("param/")})
    assert session.steps.snapshots.ledger.counts == {"taken": 6, "skipped": 0, "failed": 0}


def test_a_disk_that_has_stopped_is_waited_for_once_and_every_skip_says_why(
    begin: Any, blocked: Any, capfd: Any
) -> None:
    trained = Trained()
    nbytes = sum(t.nbytes for t in trained.model.state_dict().values())
    session = begin(snapshot_mib=1.5 * nbytes / 2**20, snapshot_wait_s=0.2)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    for _ in range(5):
        trained.step()
    waited = [event["details"] for event in events(session, "snapshot_skipped")]
    assert ["training waited" in json.loads(details)["why"] for details in waited] == [True, False, False, False]
    blocked.set()
    assert kept(session).steps() == [0]
    trained.step()
    assert kept(session).steps() == [0, 5]
    assert session.steps.snapshots.ledger.counts == {"taken": 2, "skipped": 4, "failed": 0}
    session.finish()
    assert capfd.readouterr().err.count("was skipped") == 1
    run = sonde.open(session.path)
    skips = [warning for warning in run.warnings if "was skipped" in warning]
    assert len(skips) == 4
    assert all("earlier snapshots that are still being written hold" in skip for skip in skips)
    facts = json.loads((session.path / "run.json").read_text())["facts"]["snapshots"]
    assert (facts["taken"], facts["skipped"]) == (2, 4)


def events(session: Any, type: str) -> list[dict[str, Any]]:
    assert session.recording.writer.flush(30)
    return [event for event in sonde.open(session.path).events().to_pylist() if event["type"] == type]


def test_staging_memory_is_bounded_and_used_again(begin: Any, blocked: Any) -> None:
    trained = Trained()
    nbytes = sum(t.nbytes for t in trained.model.state_dict().values())
    session = begin(snapshot_mib=2.5 * nbytes / 2**20, snapshot_wait_s=0.0)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    staging = session.steps.snapshots._memory()
    for _ in range(4):
        trained.step()
        assert staging.held_bytes <= staging.limit_bytes
    assert session.steps.snapshots.ledger.counts["skipped"] == 2
    blocked.set()
    session.flush(30)
    held = staging.held_bytes
    for _ in range(4):
        trained.step()
        session.flush(30)
    assert staging.held_bytes == held
    assert staging.used_bytes == 0
    assert kept(session).steps() == [0, 1, 4, 5, 6, 7]


def test_activations_that_do_not_fit_cost_the_whole_snapshot(begin: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer, session = torch.optim.SGD(model.parameters(), lr=0.1), begin(snapshot_mib=0.1)
    session.watch(model, optimizer, snapshots=plan(kinds=("param", "act"), when=sonde.every(1)))
    for rows in (8, 8000, 8):
        model(torch.randn(rows, 4)).sum().backward()
        optimizer.step()
    store = kept(session)
    assert store.steps() == [0, 2]
    assert session.steps.snapshots.ledger.counts["skipped"] == 1
    assert session.steps.snapshots._memory().used_bytes == 0
    (skip,) = events(session, "snapshot_skipped")  # training did not wait for what can never come
    assert re.search(r"it needs more than .* MiB, but snapshot_mib allows 0\.1 MiB\. Allow more:", skip["message"])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RunError("No space left on device.")])
def test_a_full_disk_costs_the_snapshot_and_not_the_training(
    error: Exception, begin: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    trained, session = Trained(), begin(max_errors=1)
    write, calls = MemoryStore.write, []

    def full(self: MemoryStore, snapshot: Any) -> Any:
        calls.append(snapshot.step)
        if len(calls) == 1:
            raise error
        return write(self, snapshot)

    monkeypatch.setattr(MemoryStore, "write", full)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    for _ in range(3):
        trained.step()
    assert kept(session).steps() == [1, 2]
    assert session.steps.snapshots.ledger.counts == {"taken": 2, "skipped": 0, "failed": 1}
    assert session.recording.breaker.num_errors == 0
    assert capfd.readouterr().err.count("No space left on device. Training continues.") == 1


def test_a_store_that_fails_oddly_opens_the_breaker_in_the_end_and_training_continues(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, session = Trained(), begin(max_errors=3)
    monkeypatch.setattr(MemoryStore, "write", lambda self, snapshot: 1 / 0)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    for _ in range(6):
        trained.step()
        session.flush(10)
    assert session.recording.breaker.is_open
    assert session.steps.snapshots.ledger.counts["failed"] == 3


# ------------------------------------------------------------------------------------------- start-up and the end


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: sonde.Snapshots(kinds=("parm",)), UnknownNameError, 'Did you mean "param"'),
        (lambda: sonde.Snapshots(kinds=()), UsageError, "empty"),
        (lambda: sonde.Snapshots(kinds=("probe",)), UsageError, "probe=batch"),
        (lambda: sonde.Snapshots(on_finding="info"), UsageError, "critical"),  # type: ignore[arg-type]
        (lambda: sonde.Snapshots(when="often"), UsageError, "when="),
    ],
)
def test_a_wrong_plan_is_refused_when_it_is_made(make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_model_that_cannot_fit_is_refused_before_training(begin: Any) -> None:
    session = begin(snapshot_mib=0.01)
    model = nn.Linear(100, 100)
    with pytest.raises(UsageError, match=r"snapshot_mib="):
        session.watch(model, snapshots=plan())
    assert session.steps.models == []


ADAM_NET = {"param": 1, "grad": 1, "optim": 2}
"""Copies of all parameters in a snapshot of each kind."""


@pytest.mark.parametrize("kind", ADAM_NET)
@pytest.mark.parametrize("fits", [True, False])
def test_what_can_never_fit_is_refused_whatever_kind_it_is_and_what_fits_is_taken(
    begin: Any, kind: str, fits: bool
) -> None:
    model = nn.Linear(1000, 256, bias=False)  # 1,000 KiB
    optimizer = torch.optim.AdamW(model.parameters())
    session = begin(snapshot_mib=(ADAM_NET[kind] * 1000 + (12 if fits else -12)) / 1024)
    chosen = plan(kinds=(kind,), when=sonde.every(1))
    if not fits:
        with pytest.raises(UsageError, match=rf"{kind} .* reserved for them\. Allow more: .*snapshot_mib="):
            session.watch(model, optimizer, snapshots=chosen)
        assert session.steps.models == []
        return
    session.watch(model, optimizer, snapshots=chosen)
    for _ in range(3):
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        session.flush(30)
    assert kept(session).steps() == ([1, 2] if kind == "optim" else [0, 1, 2])  # at step 0 there is no state


def test_two_models_that_do_not_fit_together_are_refused(begin: Any) -> None:
    session = begin(snapshot_mib=1.5)
    first, second = nn.Linear(1000, 256), nn.Linear(1000, 256)
    session.watch(first, snapshots=plan())
    with pytest.raises(UsageError, match=r"param 2\.0 MiB"):
        session.watch(second, prefix="second", snapshots=plan())


def test_an_optimizer_that_is_not_known_at_the_start_is_skipped_with_the_reason(begin: Any) -> None:
    model = nn.Linear(1000, 256)
    session = begin(snapshot_mib=1.5)
    session.watch(model, snapshots=plan(kinds=("param", "optim"), when=sonde.every(1)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
    assert kept(session).steps() == [0]
    for skip in events(session, "snapshot_skipped"):
        assert "it needs more than 2.9 MiB, but snapshot_mib allows 1.5 MiB. Allow more:" in skip["message"]


def test_a_run_has_one_store(begin: Any) -> None:
    session = begin()
    session.watch(nn.Linear(1, 1), snapshots=plan())
    with pytest.raises(UsageError, match="one store"):
        session.watch(nn.Linear(1, 1), snapshots=sonde.Snapshots(store="zarr"))


def test_a_step_that_is_made_again_in_a_continued_run_has_both_snapshots(begin: Any, own_folder: Path) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=sonde.every(2))
    for _ in range(3):
        trained.step()
    session.finish("crashed", "on purpose")
    again = begin(resume=True)
    assert again.path == session.path
    assert again.rewind(1)
    second = Trained()
    again.watch(second.model, second.optimizer, snapshots=sonde.every(2))
    for _ in range(4):
        second.step()
    again.finish()
    assert again.steps.snapshots.ledger.counts == {"taken": 2, "skipped": 0, "failed": 0}
    store = open_store("zarr", session.path)
    try:
        assert (store.steps(), store.steps(1)) == ([0, 2], [2, 4])
        assert_same(store, 2, {n: t for n, t in trained.seen[2].items() if n.startswith("param/")})
        for step in (2, 4):
            made = second.seen[step - 1]
            assert_same(store, step, {n: t for n, t in made.items() if n.startswith("param/")}, attempt=1)
    finally:
        store.close()


def test_finish_waits_for_what_is_on_its_way(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, session = Trained(), begin()
    write = MemoryStore.write

    def slow(self: MemoryStore, snapshot: Any) -> Any:
        threading.Event().wait(0.15)
        return write(self, snapshot)

    monkeypatch.setattr(MemoryStore, "write", slow)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    for _ in range(3):
        trained.step()
    session.finish()
    assert session.steps.snapshots.ledger.counts["taken"] == 3


def test_finish_waits_as_long_as_something_is_written(begin: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Longer than the deadline, which is for a disk that has stopped."""
    trained, session = Trained(), begin(finish_deadline_s=0.9, verbose=True)
    write = MemoryStore.write

    def slow(self: MemoryStore, snapshot: Any) -> Any:
        for _ in range(8):
            threading.Event().wait(0.2)
            self.written_bytes = getattr(self, "written_bytes", 0) + (1 << 20)  # type: ignore[attr-defined]
        return write(self, snapshot)

    monkeypatch.setattr(MemoryStore, "write", slow)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    trained.step()
    trained.step()
    session.finish()
    assert session.steps.snapshots.ledger.counts == {"taken": 2, "skipped": 0, "failed": 0}
    assert "sonde: writing 2 more snapshots (" in capfd.readouterr().err
    assert sonde.open(session.path).warnings == []


def test_an_interrupt_while_finish_waits_ends_the_run_and_says_what_is_lost(begin: Any, blocked: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    trained.step()
    threading.Timer(1.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        session.finish()
    run = sonde.open(session.path)
    assert run.status == "finished"
    assert any("1 snapshot was lost" in warning for warning in run.warnings)


def test_what_cannot_be_written_in_time_is_said_to_be_lost(begin: Any, blocked: Any, capfd: Any) -> None:
    trained, session = Trained(), begin(finish_deadline_s=0.7)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    trained.step()
    trained.step()
    session.finish()
    assert "2 snapshots were lost" in capfd.readouterr().err
    assert session.steps.snapshots.ledger.counts["failed"] == 2
    assert sonde.open(session.path).status == "finished"


def test_an_exception_still_writes_what_is_staged(begin: Any) -> None:
    trained, session = Trained(), begin()

    def train() -> None:
        with session:
            session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
            trained.step()
            trained.model(torch.randn(8, 6))
            raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        train()
    assert session.steps.snapshots._writer._store.steps() == [0]
    assert session.steps.snapshots.ledger.counts == {"taken": 1, "skipped": 0, "failed": 0}


def test_a_forked_child_takes_no_snapshots_and_leaves_the_parents_alone(begin: Any) -> None:
    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    trained.step()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            trained.step()
            code = 0 if session.steps.snapshots.draft is None and session.snapshot() is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    trained.step()
    assert kept(session).steps() == [0, 1]


def test_nothing_of_the_model_is_kept_alive(begin: Any) -> None:
    import gc
    import weakref

    trained, session = Trained(), begin()
    session.watch(trained.model, trained.optimizer, snapshots=plan(kinds=ALL, when=sonde.every(1)))
    for _ in range(2):
        trained.step()
    session.finish()
    refs = [weakref.ref(p) for p in trained.model.parameters()]
    del trained
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []


def test_the_time_it_takes_is_counted_apart_and_thins_out_nothing(begin: Any) -> None:
    trained, session = Trained(), begin(budget=0.0001, budget_seconds=0)
    session.watch(trained.model, trained.optimizer, snapshots=plan(when=sonde.every(1)))
    for _ in range(40):
        trained.step()
        session.flush(10)
    assert kept(session).steps() == list(range(40))
    session.finish()
    facts = json.loads((session.path / "run.json").read_text())["facts"]["overhead"]
    assert facts["snapshots_s"] > 0
