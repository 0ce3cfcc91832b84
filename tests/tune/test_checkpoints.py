"""What a checkpoint holds, which ones are kept, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sonde
from sonde.errors import CorruptError, RunNotFoundError, UsageError
from sonde.read.run.checkpoints import Checkpoint, list_checkpoints, verify_checkpoint
from sonde.schema.records import sign_document
from sonde.tune import CheckpointManager, StorageBackend


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def steps(manager: CheckpointManager) -> list[int]:
    return [found.step for found in manager.list()]


def test_weights_are_plain_safetensors_under_the_users_names(folder):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapped = torch.nn.DataParallel(net)
    saved = CheckpointManager(folder, model=wrapped).save(5)
    tensors = load_file(saved.path / "model.safetensors")
    assert tensors.keys() == net.state_dict().keys()
    assert torch.equal(tensors["0.weight"], net[0].weight)
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    CheckpointManager(folder, model=other).restore()
    assert torch.equal(other[0].weight, net[0].weight)


def test_optimizer_tensors_are_named_after_their_parameters(training, folder):
    run = training()
    run.train(1)
    saved = run.manager(folder).save(1)
    names = load_file(saved.path / "optimizer.safetensors").keys()
    assert {"0.weight.exp_avg", "0.weight.step", "4.bias.max_exp_avg_sq"} <= names


def test_tied_weights_are_kept_once_and_stay_tied(folder):
    net, other = Tied(), Tied()
    manager = CheckpointManager(folder, model=net)
    saved = manager.save(1)
    assert list(load_file(saved.path / "model.safetensors")) == ["embed.weight"]
    CheckpointManager(folder, model=other).restore()
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, net.head.weight)


def test_views_of_one_memory_are_kept_apart(folder):
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = torch.arange(8.0)
            self.register_buffer("a", memory[:4])
            self.register_buffer("b", memory[2:6])
            self.register_buffer("t", memory.reshape(2, 4).T)

    manager = CheckpointManager(folder, model=Views())
    manager.save(1)
    tensors = manager.load().tensors["model"]
    assert tensors["b"].tolist() == [2, 3, 4, 5]
    assert tensors["t"].tolist() == Views().t.tolist()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.bool, torch.complex64],
)
def test_every_type_comes_back_bit_by_bit(folder, dtype):
    net = nn.Module()
    net.register_buffer("x", torch.randn(7, 3).to(dtype))
    net.register_buffer("scalar", torch.tensor(3.0).to(dtype))
    net.register_buffer("none", torch.empty(0, 3).to(dtype))
    manager = CheckpointManager(folder, model=net)
    manager.save(1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for value in net.buffers():
        value.reshape(-1).view(torch.uint8).zero_()
    manager.restore()
    for name, value in net.state_dict().items():
        assert value.shape == before[name].shape
        assert torch.equal(value.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8))


def test_optimizer_state_keeps_its_own_type_and_values_that_are_no_tensors(folder):
    """bfloat16 weights with float32 moments: torch would cast the moments."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"moment": torch.full((2,), 1 / 3), "count": 5, "words": ["a", None], "by": {1: 2.5}}

    def build() -> tuple[nn.Module, Odd]:
        net = nn.Linear(2, 1, dtype=torch.bfloat16)
        return net, Odd(net.parameters(), lr=0.1)

    net, optimizer = build()
    optimizer.step()
    CheckpointManager(folder, model=net, optimizer=optimizer).save(1)
    net, again = build()
    CheckpointManager(folder, model=net, optimizer=again).restore()
    state = again.state[net.weight]
    assert state["moment"].dtype == torch.float32
    assert torch.equal(state["moment"], torch.full((2,), 1 / 3))
    assert (state["count"], state["words"], state["by"]) == (5, ["a", None], {1: 2.5})


def test_several_models_optimizers_and_extra_objects(folder):
    def build() -> dict:
        torch.manual_seed(0)
        nets = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
        optimizers = [torch.optim.Adam(net.parameters()) for net in nets.values()]
        extra = {"ema": torch.optim.swa_utils.AveragedModel(nets["g"]), "order": np.random.default_rng(3)}
        return {"model": nets, "optimizer": optimizers, "extra": extra}

    made = build()
    for net, optimizer in zip(made["model"].values(), made["optimizer"], strict=True):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    made["extra"]["ema"].update_parameters(made["model"]["g"])
    made["extra"]["order"].random(5)
    saved = CheckpointManager(folder, **made).save(1)
    assert {"model.g.safetensors", "model.d.safetensors"} <= {path.name for path in saved.path.iterdir()}
    fresh = build()
    CheckpointManager(folder, **fresh).restore()
    assert torch.equal(fresh["model"]["d"].weight, made["model"]["d"].weight)
    assert int(fresh["extra"]["ema"].n_averaged) == 1
    assert fresh["extra"]["order"].random() == made["extra"]["order"].random()
    assert fresh["optimizer"][1].state[fresh["model"]["d"].weight]["step"] == 1


def test_adapters_only_leaves_frozen_weights_out_and_knows_its_base(folder):
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[0].requires_grad_(False)
        return net

    net = build(0)
    net[1].weight.data.fill_(0.5)
    saved = CheckpointManager(folder, model=net, adapters_only=True).save(1)
    assert load_file(saved.path / "model.safetensors").keys() == {"1.weight", "1.bias"}
    same = build(0)
    CheckpointManager(folder, model=same, adapters_only=True).restore()
    assert torch.equal(same[1].weight, net[1].weight)
    with pytest.raises(UsageError, match=r'"0\.weight" is not the one these adapters were trained on'):
        CheckpointManager(folder, model=build(1), adapters_only=True).restore()


# -------------------------------------------------------------------------------------------------- which ones are kept


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"keep_last": 2}, [7, 8]),
        ({"keep_best": 2}, [3, 6, 8]),
        ({"keep_best": 1, "mode": "max"}, [1, 8]),
        ({"keep_every": 4}, [4, 8]),
        ({"keep_last": 2, "keep_best": 1, "keep_every": 5}, [3, 5, 7, 8]),
        ({"keep_best": 3, "metric": "accuracy"}, [8]),
    ],
)
def test_retention(folder, rules, kept):
    manager = CheckpointManager(folder, model=nn.Linear(1, 1), interval=1, **rules)
    for step, loss in enumerate([9.0, 5.0, 1.0, math.nan, 4.0, 2.0, 3.0, 8.0], start=1):
        manager.step(step, {"eval_loss": torch.tensor(loss, requires_grad=True)})
    assert steps(manager) == kept
    assert manager.latest().step == 8


def test_best_is_asked_for_by_name(folder):
    net = nn.Linear(1, 1)
    manager = CheckpointManager(folder, model=net, interval=1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        net.weight.data.fill_(step)
        manager.step(step, {"eval_loss": loss})
    assert manager.best().step == 2
    assert manager.restore("best") == 2
    assert net.weight.item() == 2
    manager.delete(2)
    assert steps(manager) == [1, 3]
    with pytest.raises(RunNotFoundError, match=r"no checkpoint 2 .* Available: 1, 3"):
        manager.restore(2)


def test_a_step_saved_again_replaces_the_older_one(folder):
    net = nn.Linear(1, 1)
    manager = CheckpointManager(folder, model=net)
    for value in (1.0, 2.0):
        net.weight.data.fill_(value)
        manager.save(7)
    net.weight.data.fill_(0.0)
    manager.restore()
    assert net.weight.item() == 2.0
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["step-000000007-2"]


def test_steps_without_a_number_count_themselves(folder):
    manager = CheckpointManager(folder, model=nn.Linear(1, 1), interval=3)
    for _ in range(7):
        manager.step()
    assert steps(manager) == [3, 6]


def test_inside_a_run_they_are_stored_in_its_folder(tmp_path):
    with sonde.init(project="p", name="n", dir=tmp_path) as session:
        manager = CheckpointManager(model=nn.Linear(1, 1), interval=1)
        manager.step(1, {"eval_loss": 0.5})
    assert manager.list()[0].path.parent == session.path / "checkpoints"
    table = sonde.open(session.path).checkpoints().to_pylist()
    assert [(row["step"], dict(row["metrics"]), row["problem"]) for row in table] == [(1, {"eval_loss": 0.5}, "")]


def test_a_disabled_session_saves_nothing(monkeypatch):
    monkeypatch.setenv("SONDE_MODE", "disabled")
    with sonde.init(project="p"):
        manager = CheckpointManager(model=nn.Linear(1, 1), interval=1)
        assert manager.step(1) is None
        assert manager.list() == []


def test_without_a_run_a_folder_is_needed(tmp_path):
    sonde.init(project="p", dir=tmp_path).finish()
    with pytest.raises(UsageError, match="pass a folder"):
        CheckpointManager(model=nn.Linear(1, 1))


def test_another_backend_is_one_class(folder):
    class Memory(StorageBackend):
        def __init__(self) -> None:
            self.kept: dict[str, tuple] = {}

        def save_checkpoint(self, checkpoint, metadata):
            tensors = {stem: {n: t.clone() for n, t in found.items()} for stem, found in checkpoint.tensors.items()}
            name = f"at-{metadata['step']}"
            entry = Checkpoint(Path(name), metadata["step"], metadata["time"], metadata["metrics"], 0, {})
            self.kept[name] = entry, type(checkpoint)(tensors, json.loads(json.dumps(checkpoint.state)))
            return entry

        def load_checkpoint(self, checkpoint_id):
            return self.kept[checkpoint_id][1]

        def list_checkpoints(self):
            return [entry for entry, _ in self.kept.values()]

        def delete_checkpoint(self, checkpoint_id):
            del self.kept[checkpoint_id]

    net = nn.Linear(1, 1)
    manager = CheckpointManager(folder, model=net, storage=Memory(), interval=1, keep_last=2)
    for step in (1, 2, 3):
        net.weight.data.fill_(step)
        manager.step(step)
    manager.restore(2)
    assert net.weight.item() == 2
    assert steps(manager) == [2, 3]
    assert not folder.exists()


# ----------------------------------------------------------------------------------------------------- what is refused


def test_a_damaged_one_is_refused_and_the_next_good_one_named(folder):
    net = nn.Linear(2, 2)
    manager = CheckpointManager(folder, model=net, interval=1)
    for step in (1, 2, 3):
        manager.step(step)
    path = folder / "step-000000003" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = net.weight.clone()
    with pytest.raises(CorruptError, match=r"does not match its sha256.*step-000000002: restore\(2\)"):
        manager.restore()
    assert torch.equal(net.weight, before)
    assert manager.verify() == {3: ["model.safetensors does not match its sha256"]}
    assert manager.restore(2) == 2


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"])
def test_every_flipped_or_missing_byte_is_noticed(folder, training, name):
    run = training()
    run.train(1)
    saved = run.manager(folder).save(1)
    file = saved.path / name
    data = file.read_bytes()
    for position in range(0, len(data), max(len(data) // 40, 1)):
        file.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        assert verify_checkpoint(saved.path), position
        file.write_bytes(data[:position])
        assert verify_checkpoint(saved.path), position
    file.unlink()
    assert verify_checkpoint(saved.path)
    file.write_bytes(data)
    assert not verify_checkpoint(saved.path)


OTHERS = b'{"models": {"": {"ties": {}, "base": {}, "others": %s}}}'


class Boom:
    def __reduce__(self):
        return (Path("/").joinpath("boom").touch, ())


def forge(folder: Path, name: str, content: bytes) -> None:
    """A checkpoint whose hashes are right over a hostile file."""
    import hashlib

    from sonde.schema.checkpoints import Manifest, StoredFile, encode_manifest

    path = folder / "step-000000001"
    (path / name).write_bytes(content)
    files = {
        file.name: StoredFile(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    (path / "manifest.json").write_bytes(encode_manifest(Manifest(step=1, time=0.0, files=files)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", pickle.dumps(Boom())),
        ("model.safetensors", b"\xff" * 8 + b"{}"),
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
        ("state.json", pickle.dumps(Boom())),
        ("state.json", b"[" * 200_000),
        ("state.json", b"[1]"),
        ("state.json", b'{"models": {"": 3}}'),
        ("state.json", OTHERS % b'{"$": "code", "value": "x"}'),
        ("state.json", OTHERS % b'{"$": "tensor", "name": "no"}'),
        ("state.json", OTHERS % b'{"$": "array", "dtype": "O", "shape": [1], "value": ""}'),
    ],
)
def test_hostile_files_are_refused(folder, name, content):
    net = nn.Linear(2, 2)
    manager = CheckpointManager(folder, model=net)
    manager.save(1)
    forge(folder, name, content)
    before = net.weight.clone()
    with pytest.raises(CorruptError):
        manager.restore()
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/passwd", "model.pt", "a/b.json", ".hidden.json"])
def test_a_manifest_cannot_lead_out_of_its_folder(folder, name):
    manager = CheckpointManager(folder, model=nn.Linear(1, 1))
    path = manager.save(1).path / "manifest.json"
    text = path.read_text()
    content = json.loads(text[: text.rindex(", ")] + "}")
    content["files"][name] = {"bytes": 0, "sha256": "0" * 64}
    path.write_text(sign_document(json.dumps(content)))
    (found,) = list_checkpoints(folder)
    assert "not a valid checkpoint file name" in found.problem
    with pytest.raises(CorruptError):
        manager.load(1)


def test_a_link_to_elsewhere_is_not_followed(folder, tmp_path):
    manager = CheckpointManager(folder, model=nn.Linear(1, 1))
    path = manager.save(1).path / "model.safetensors"
    shutil.move(path, tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CorruptError, match="leads out of the run folder"):
        manager.load(1)


def test_pickles_of_others_are_named_and_not_opened(folder):
    path = folder / "step-000000001"
    path.mkdir(parents=True)
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Boom()))
    with pytest.raises(CorruptError, match=r"pytorch_model.bin may be a pickle"):
        CheckpointManager(folder, model=nn.Linear(1, 1)).restore(1)


@pytest.mark.parametrize("step", [-1, "x"])
def test_a_step_that_no_list_would_show_is_refused(folder, step):
    manager = CheckpointManager(folder, model=torch.nn.Linear(2, 1), interval=1)
    with pytest.raises(UsageError, match="step= must be"):
        manager.save(step)
    assert manager.step(-1) is None
    assert manager.list() == []


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_holds_no_state_is_refused(folder, what):
    with pytest.raises(UsageError, match=rf"{what}= must be an object with a state_dict\(\).*got 3"):
        CheckpointManager(folder, **{what: 3})


def test_another_model_or_optimizer_is_refused_before_anything_changes(folder):
    net = nn.Linear(2, 2)
    CheckpointManager(folder, model=net, optimizer=torch.optim.SGD(net.parameters())).save(1)
    other = nn.Sequential(OrderedDict(weight=nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"it lacks weight.bias, weight.weight; this model has no bias, weight"):
        CheckpointManager(folder, model=other).restore()
    with pytest.raises(UsageError, match=r"\(2, 2\) of torch.float32 in the checkpoint and \(3, 2\) of torch.float32"):
        CheckpointManager(folder, model=nn.Linear(2, 3)).restore()
    before = net.weight.clone()
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    manager = CheckpointManager(folder, model=net, optimizer=torch.optim.SGD(groups))
    with pytest.raises(UsageError, match=r"groups of \[1, 1\] parameters, but the checkpoint has \[2\]"):
        manager.restore()
    assert torch.equal(net.weight, before)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(net.parameters()))
    with pytest.raises(UsageError, match=r"no scheduler ''; it has none"):
        CheckpointManager(folder, model=net, scheduler=scheduler).restore()


def test_what_cannot_be_saved_is_said_at_the_start(folder):
    class Bad:
        def state_dict(self) -> dict:
            return {"inner": [1, object()]}

    with pytest.raises(UsageError, match=r'"extra.bad.inner.1" is a object'):
        CheckpointManager(folder, model=nn.Linear(1, 1), extra={"bad": Bad()})
    with pytest.raises(UsageError, match="ResumableLoader"):
        CheckpointManager(folder, dataloader=torch.utils.data.DataLoader([1, 2]))
    with pytest.raises(UsageError, match="interval"):
        CheckpointManager(folder, interval=0)
    with pytest.raises(UsageError, match="keep_last"):
        CheckpointManager(folder, keep_last=0)


def test_a_file_that_may_not_grow_does_not_end_training(folder):
    """As on a full disk: safetensors has its own error for that."""
    resource = pytest.importorskip("resource")
    manager = CheckpointManager(folder, model=nn.Linear(100, 100), interval=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match=r"could not be saved: .*model.safetensors: .*File too large"):
            assert manager.step(1) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert manager.step(2).step == 2
    assert manager.verify() == {}


def test_a_disk_that_fails_does_not_end_training(folder, monkeypatch):
    manager = CheckpointManager(folder, model=nn.Linear(1, 1), interval=1)
    manager.step(1)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.warns(RuntimeWarning, match="could not be saved.*No space left"):
            assert manager.step(2) is None
        with pytest.raises(OSError, match="No space left"):
            manager.save(2)
    assert steps(manager) == [1]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["step-000000001"]
    manager.step(3)
    assert steps(manager) == [1, 3]


def test_a_run_tells_of_checkpoints_it_saved_elsewhere(folder, tmp_path):
    with sonde.init(project="p", name="n", dir=tmp_path / "runs") as session:
        CheckpointManager(folder, model=nn.Linear(1, 1), interval=1).step(3, {"eval_loss": 0.5})
    (row,) = sonde.open(session.path).checkpoints().to_pylist()
    assert (row["step"], dict(row["metrics"]), row["path"]) == (3, {"eval_loss": 0.5}, str(folder / "step-000000003"))
    assert "another folder" in row["problem"]


def test_other_ranks_save_nothing_and_restore(folder, monkeypatch):
    net = nn.Linear(1, 1)
    CheckpointManager(folder, model=net).save(1)
    monkeypatch.setenv("RANK", "1")
    other = nn.Linear(1, 1)
    manager = CheckpointManager(folder, model=other)
    assert manager.save(2) is None
    assert manager.restore() == 1
    assert torch.equal(other.weight, net.weight)
    assert steps(manager) == [1]


def test_a_compiled_model_and_a_plain_one_share_checkpoints(folder):
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    CheckpointManager(folder, model=torch.compile(net)).save(1)
    CheckpointManager(folder, model=other).restore()
    assert torch.equal(other.weight, net.weight)
