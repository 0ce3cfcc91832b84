"""The front-end comes with the package: built once, found in sdist and wheel, served after an install without Node.
So does the native kernel: built where there is a compiler, and a wheel that has it says for which platform it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = {"app.js", "app.css", "index.html", "icon.svg", ".stamp"}
STATIC = "sonde/show/web/static/"
KERNEL = "sonde/reduce/cpu/_native.so"
SKETCH_ONE = """
import sonde, torch
from sonde.reduce.cpu import native
from sonde.reduce.torch import Reducer, resolve_all
reducer = Reducer()
reducer.add(1, torch.arange(1000.0))
_, rows, _, _ = resolve_all(reducer.take())
print(sonde.__file__, native.kernel() is not None, rows[0, 4])
"""


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return json.loads((ROOT / "web" / "package-lock.json").read_text("utf-8"))["packages"]


def test_every_platform_binding_in_the_lock_exists(lock: dict[str, Any]) -> None:
    # npm leaves out of the lock, without a word, what the registry does not have.
    wanted = {name for package in lock.values() for name in package.get("optionalDependencies", {})}
    assert len([name for name in wanted if name.startswith("@rolldown/binding-")]) >= 12
    missing = [name for name in wanted if "integrity" not in lock.get(f"node_modules/{name}", {})]
    assert not missing


def test_lock_names_no_download_host_and_hashes_everything(lock: dict[str, Any]) -> None:
    packages = {name: package for name, package in lock.items() if name}
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert not [name for name, package in packages.items() if not package.get("integrity", "").startswith("sha512-")]


def test_versions_of_the_front_end_are_exact() -> None:
    package = json.loads((ROOT / "web" / "package.json").read_text("utf-8"))
    versions = {**package["dependencies"], **package["devDependencies"], **package["overrides"]}
    assert not [name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)]


def test_stamp_changes_with_any_source_and_with_no_tool(tmp_path: Path, hatch_build: Any) -> None:
    web = tmp_path / "web"
    (web / "src").mkdir(parents=True)
    (web / "package.json").write_text("{}")
    (web / "src" / "main.ts").write_text("1")
    before = hatch_build.stamp_of(web)
    (web / "node_modules").mkdir()
    (web / "node_modules" / "tool.js").write_text("x")
    assert hatch_build.stamp_of(web) == before
    (web / "src" / "main.ts").write_text("2")
    assert hatch_build.stamp_of(web) != before


def test_sources_without_a_stamp_are_stale_and_no_sources_never(tmp_path: Path, hatch_build: Any) -> None:
    assert not hatch_build.is_stale(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "package.json").write_text("{}")
    assert hatch_build.is_stale(tmp_path)
    static = tmp_path / hatch_build.STATIC
    static.mkdir(parents=True)
    (static / ".stamp").write_text(hatch_build.stamp_of(tmp_path / "web") + "\n")
    assert not hatch_build.is_stale(tmp_path)


def test_a_failed_build_leaves_the_old_one(tmp_path: Path, hatch_build: Any) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "package.json").write_text("not a package")
    old = tmp_path / hatch_build.STATIC / "app.js"
    old.parent.mkdir(parents=True)
    old.write_text("old")
    if hatch_build.system_node() is None and hatch_build.packaged_node() is None:
        pytest.skip("no Node")
    with pytest.raises(RuntimeError, match="SONDE_SKIP_WEB=1"):
        hatch_build.build(tmp_path)
    assert old.read_text() == "old"


@pytest.mark.slow
def test_front_end_has_no_type_errors_and_no_warnings(node_modules: Path, hatch_build: Any) -> None:
    node, _ = hatch_build.find_node()
    script = node_modules / "svelte-check" / "bin" / "svelte-check"
    words = [str(node), str(script), "--tsconfig", "./tsconfig.json", "--fail-on-warnings"]
    done = subprocess.run(words, cwd=ROOT / "web", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_unit_tests_of_the_front_end(node_modules: Path, hatch_build: Any) -> None:
    node, _ = hatch_build.find_node()
    done = subprocess.run([str(node), "tests/run.mjs"], cwd=ROOT / "web", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory, front_end: Path) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    _hatchling("sdist", ROOT, folder, dict(os.environ))
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


@pytest.mark.slow
def test_wheel_from_sdist_has_the_assets_and_serves_them(tmp_path: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert {name.rpartition("/")[2] for name in names if f"src/{STATIC}" in name} >= ASSETS
    assert not [name for name in names if "node_modules" in name or KERNEL in name]
    # Where neither Node nor a compiler can be found.
    wheel = _wheel(sdist, tmp_path, {**os.environ, "PATH": "/nowhere", "CC": ""})
    with zipfile.ZipFile(wheel) as archive:
        assert {name.removeprefix(STATIC) for name in archive.namelist() if name.startswith(STATIC)} >= ASSETS
        assert KERNEL not in archive.namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    target = _install(wheel, tmp_path)
    _serve_and_look(target, tmp_path)
    assert _sketch_one(target, tmp_path) == ["False", "499500.0"]


@pytest.mark.slow
def test_wheel_with_the_native_kernel_is_for_one_platform_and_uses_it(tmp_path: Path, sdist: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    wheel = _wheel(sdist, tmp_path, {**os.environ, "CC": "cc"})
    with zipfile.ZipFile(wheel) as archive:
        assert KERNEL in archive.namelist()
        (tags,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(tags).decode()
    assert re.search(r"-py3-none-(linux|macosx)_\w+\.whl$", wheel.name)
    assert _sketch_one(_install(wheel, tmp_path), tmp_path) == ["True", "499500.0"]


def _hatchling(kind: str, source: Path, folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _wheel(sdist: Path, folder: Path, environment: dict[str, str]) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    _hatchling("wheel", source, folder, environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _install(wheel: Path, folder: Path) -> Path:
    target = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return target


def _environment(target: Path) -> dict[str, str]:
    """The wheel's own files, not the checkout's, are imported."""
    return {**os.environ, "PYTHONPATH": str(target), "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}


def _sketch_one(target: Path, folder: Path) -> list[str]:
    """Whether the kernel is used, and a sum."""
    command = [sys.executable, "-c", SKETCH_ONE]
    done = subprocess.run(command, cwd=folder, env=_environment(target), capture_output=True, text=True, check=True)
    where, *found = done.stdout.split()
    assert Path(where).is_relative_to(target)
    return found


def _serve_and_look(target: Path, folder: Path) -> None:
    (folder / "runs").mkdir()
    command = [sys.executable, "-m", "sonde.cli.main", "ui", str(folder / "runs"), "--no-open", "--port", "0"]
    server = subprocess.Popen(
        command, cwd=folder, env=_environment(target), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if "#token=" in line), "")
        base = re.search(r"http://[^/]+", line)
        assert base, "the server printed no address"
        for name in ("app.js", "app.css"):
            with urllib.request.urlopen(f"{base.group()}/static/{name}") as answer:
                assert answer.read() == (target / STATIC / name).read_bytes()
        with urllib.request.urlopen(f"{base.group()}/") as answer:
            assert b"/static/app.js" in answer.read()
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()
