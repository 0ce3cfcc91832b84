"""Files of weights are read as torch, numpy, Keras and safetensors wrote them, and never run."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sonde.errors import CorruptError, MissingPackageError, SondeError, UsageError
from sonde.read.tensors.files.formats import is_tensor_file, open_tensors
from sonde.read.tensors.lazy import NoSuchTensorError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        str(dtype).removeprefix("torch."): (torch.randn(3, 4, generator=generator) * 3).to(dtype) for dtype in DTYPES
    }
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}


def same_bits(array: np.ndarray, tensor: torch.Tensor) -> bool:
    theirs = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tuple(array.shape) == tuple(tensor.shape) and np.ascontiguousarray(array).tobytes() == theirs


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_every_type_is_bit_exact(ending: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / f"model.{ending}"
    save_file(tensors, path) if ending == "safetensors" else torch.save(tensors, path)
    found = open_tensors(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name
        assert found.specs[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert found[name].dtype.name == found.specs[name].dtype


def test_views_parameters_and_shared_storage_of_torch_are_read(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "row": base[1],
        "every": base[::2, 1::2],
        "parameter": torch.nn.Parameter(base[2:]),
        "expanded": torch.ones(1, 3).expand(4, 3),
    }
    torch.save(state, tmp_path / "a.pt")
    found = open_tensors(tmp_path / "a.pt")
    for name, tensor in state.items():
        assert found[name].tolist() == tensor.tolist(), name


class Settings:
    """A class that the reader does not know."""

    def __init__(self) -> None:
        self.lr = 0.1


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_weights_are_found_in_a_training_state(key: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    state = {key: model.state_dict(), "optimizer": optimizer.state_dict(), "settings": Settings(), "epoch": 3}
    torch.save(state, tmp_path / "a.ckpt")
    found = open_tensors(tmp_path / "a.ckpt")
    assert list(found) == list(model.state_dict())
    assert same_bits(found["0.weight"], model[0].weight.detach())


def test_pickle_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"x": torch.ones(2), "evil": Evil()}, tmp_path / "a.pt")
    assert open_tensors(tmp_path / "a.pt")["x"].tolist() == [1.0, 1.0]
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # the trap was a real one


def test_view_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:8] if name.endswith("/data/0") else content)
    with pytest.raises(CorruptError, match='"x" reaches beyond its data'):
        open_tensors(tmp_path / "b.pt")


def test_compressed_archive_is_read(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(4)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as archive,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as b,
    ):
        for info in archive.infolist():
            b.writestr(info.filename, archive.read(info))
    assert open_tensors(tmp_path / "b.pt")["x"].tolist() == [0, 1, 2, 3]


def test_plain_pickle_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(pickle.dumps({"x": [1.0]}))
    with pytest.raises(UsageError, match=r"safetensors\.torch\.save_file"):
        open_tensors(tmp_path / "a.bin")


def test_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"layers/0": np.ones((2, 3), np.float16), "x": np.arange(3)})
    found = open_tensors(tmp_path / "a.npz")
    assert found.specs["layers/0"].shape == (2, 3)
    assert found["x"].tolist() == [0, 1, 2]


def test_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}, None], dtype=object))
    assert "x" not in open_tensors(tmp_path / "a.npz")


def test_sharded_folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert is_tensor_file(tmp_path)
    found = open_tensors(tmp_path)
    assert set(found) == set(tensors)
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


def test_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"x": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="not a file next to it"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("cut", [4, 20, -5])
def test_cut_safetensors_is_refused(cut: int, tmp_path: Path) -> None:
    save_file({"x": torch.ones(100)}, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:cut])
    with pytest.raises(CorruptError):
        open_tensors(tmp_path / "a.safetensors")


def test_size_that_is_not_the_shapes_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CorruptError, match="has 8 bytes, but its shape needs 16"):
        open_tensors(tmp_path / "a.safetensors")


def test_any_hdf5_is_read_by_its_paths_and_links_are_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["block/w"] = np.ones((2, 2), np.float32)
        file["outside"] = h5py.ExternalLink("/etc/passwd", "/")
    assert list(open_tensors(tmp_path / "a.h5")) == ["block/w"]


def test_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    save_file({"layers.0.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(NoSuchTensorError, match=r'Did you mean "layers\.0\.weight"'):
        _ = open_tensors(tmp_path / "a.safetensors")["layers.0.wieght"]


def test_bfloat16_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.ones(1, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'sonde-ml\[tensors\]'"):
        _ = open_tensors(tmp_path / "a.safetensors")["x"]


def test_other_endings_are_refused(tmp_path: Path) -> None:
    assert not is_tensor_file("runs/latest")
    with pytest.raises(UsageError, match=r"\.safetensors"):
        open_tensors(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError):
        open_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("ending", ["safetensors", "pt", "npz", "h5"])
def test_damage_is_one_kind_of_error_whatever_was_hit(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    if ending == "safetensors":
        save_file({"a": torch.randn(8, 4), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    elif ending == "pt":
        torch.save({"a": torch.randn(8, 4), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    elif ending == "npz":
        np.savez(path, a=np.ones((3, 4)), b=np.arange(5))
    else:
        with h5py.File(path, "w") as file:
            file["layers/dense/vars/0"] = np.ones((3, 4))
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), rng.integers(1, 8)):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(bytes(damaged[: rng.integers(1, len(content))] if rng.random() < 0.2 else damaged))
        try:
            found = open_tensors(path)
            for name in found:
                _ = found[name]
        except SondeError:
            num_refused += 1
    assert num_refused > 5
