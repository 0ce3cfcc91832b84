"""A watched model stays the user's: nothing on it, nothing that keeps it alive, nothing left after `finish`."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, Dataset

import sonde
from awkward import Awkward, Block
from sonde.session import NullSession


def hooks_of(model: nn.Module) -> list[Any]:
    names = [name for name in vars(model) if name.endswith("hooks") or "hook" in name]
    return [(name, dict(getattr(m, name) or {})) for m in model.modules() for name in names if hasattr(m, name)]


def world() -> dict[str, Any]:
    """Everything global that sonde touches."""
    return {
        "forward": list(torch_module._global_forward_hooks),
        "pre": list(torch_module._global_forward_pre_hooks),
        "optimizer pre": list(torch_optimizer._global_optimizer_pre_hooks),
        "optimizer post": list(torch_optimizer._global_optimizer_post_hooks),
        "clip": (nn.utils.clip_grad._clip_grads_with_norm_, nn.utils.clip_grad_value_),
        "warnings": list(warnings.filters),
    }


def train_a_little(model: Awkward, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 11, (2, 3)))["logits"].sum().backward()
        optimizer.step()


def test_finish_leaves_no_trace_on_model_optimizer_or_torch(begin: Any) -> None:
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters())
    before = (hooks_of(model), set(vars(optimizer)), {k: set(vars(m)) for k, m in model.named_modules()}, world())
    session = begin().watch(model, optimizer, activations=True, activation_grads=True)
    during = (hooks_of(model), {k: set(vars(m)) for k, m in model.named_modules()})
    train_a_little(model, optimizer)
    session.finish()
    after = (hooks_of(model), set(vars(optimizer)), {k: set(vars(m)) for k, m in model.named_modules()}, world())
    assert during == (before[0], before[2])
    assert after[0] == before[0]
    assert after[2:] == before[2:]
    assert not any(p._backward_hooks for p in model.parameters())
    assert not [name for name in after[1] - before[1] if "hook" in name]


def test_a_watched_model_and_optimizer_are_freed(begin: Any) -> None:
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters())
    begin().watch(model, optimizer, activations=True, activation_grads=True)
    train_a_little(model, optimizer)
    alive = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.head.weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_watching_a_thousand_times_does_not_grow(begin: Any) -> None:
    model = Block(4)
    session = begin()
    session.watch(model)
    session.flush()
    gc.collect()
    before = len(gc.get_objects()), len(world()["forward"]), len(warnings.filters)
    for _ in range(1000):
        session.watch(model)
    session.flush()
    gc.collect()
    after = len(gc.get_objects()), len(world()["forward"]), len(warnings.filters)
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 200


def test_copies_of_a_watched_model_are_not_recorded(begin: Any, reopen: Any) -> None:
    model = Awkward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer, activations=True)
    twin = copy.deepcopy(model)
    twin(torch.randint(0, 11, (50, 3)))
    train_a_little(model, optimizer, steps=1)
    assert reopen().stats("act/head/n").column("value").to_pylist() == [2 * 3 * 11]


def test_the_optimizer_can_be_copied_and_pickled_while_watched(begin: Any) -> None:
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters())
    begin().watch(model, optimizer)
    train_a_little(model, optimizer)
    assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == optimizer.state_dict().keys()
    assert copy.deepcopy(optimizer).state_dict().keys() == optimizer.state_dict().keys()


def test_a_session_in_another_process_does_nothing(begin: Any) -> None:
    session = begin()
    assert isinstance(pickle.loads(pickle.dumps(session)), NullSession)


class Numbers(Dataset[int]):
    """Logs from the workers too, as a careless dataset would."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        self.session.log({"from a worker": index})
        return index


def test_data_loader_workers_record_nothing_and_end(begin: Any, reopen: Any) -> None:
    session = begin()
    for method in ("fork", "spawn") if __name__ == "__main__" else ("fork",):
        loader = DataLoader(Numbers(session), num_workers=2, multiprocessing_context=method)
        assert sum(int(x) for x in loader) == 64 * 63 // 2
    session.log({"loss": 1.0})
    run = reopen()
    assert run.scalars().column("name").unique().to_pylist() == ["loss"]
    assert run.status == "finished"


def test_two_sessions_watch_two_models_side_by_side(begin: Any, tmp_path: Any) -> None:
    from sonde.config import Settings
    from sonde.session import begin as open_session

    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    settings = Settings.load(dir=tmp_path / "both", verbose=False)
    sessions = [
        open_session(settings, name=f"run{i}").watch(m, o)
        for i, (m, o) in enumerate(zip(models, optimizers, strict=True))
    ]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    paths = [session.path for session in sessions]
    for session in sessions:
        session.finish()
    for path in paths:
        assert sonde.open(path).stats("grad/0.weight/n").num_rows == 3
