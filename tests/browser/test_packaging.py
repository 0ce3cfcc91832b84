"""Packaging of the front-end (included in sdist and wheel, served after an install without Node) and of the native
kernel (built if there is a compiler, in a wheel tagged for its platform); first steps with nothing but the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

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
    # npm silently omits packages from the lock file that the registry does not have.
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


def test_stamp_depends_on_sources_but_not_on_tools(tmp_path: Path, hatch_build: Any) -> None:
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


def test_sources_without_a_stamp_are_stale(tmp_path: Path, hatch_build: Any) -> None:
    assert not hatch_build.is_stale(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "package.json").write_text("{}")
    assert hatch_build.is_stale(tmp_path)
    static = tmp_path / hatch_build.STATIC
    static.mkdir(parents=True)
    (static / ".stamp").write_text(hatch_build.stamp_of(tmp_path / "web") + "\n")
    assert not hatch_build.is_stale(tmp_path)


def test_failed_build_keeps_the_old_one(tmp_path: Path, hatch_build: Any) -> None:
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


@pytest.mark.parametrize(
    ("target", "machine", "tag"),
    [
        ("11.0", "arm64", "macosx_11_0_arm64"),
        ("10.13", "x86_64", "macosx_10_13_x86_64"),
        ("14", "arm64", "macosx_14_0_arm64"),
    ],
)
def test_wheel_for_a_mac_is_for_the_oldest_system_that_was_asked_for(
    target: str, machine: str, tag: str, hatch_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
    monkeypatch.setattr(hatch_build.sys, "platform", "darwin")
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: machine)
    assert hatch_build.platform_tag() == tag


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
    # Without Node and without a compiler.
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_only_the_wheel_runs_readme_quickstart_and_dashboard(tmp_path: Path, sdist: Path) -> None:
    wheel = _wheel(sdist, tmp_path, dict(os.environ))
    python = fresh_environment(tmp_path / "fresh", wheel)
    # `pip install sonde-ml`, as both pages say, finds this wheel and fails if its metadata asks for more than is there.
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}
    command = [str(python), str(ROOT / "scripts" / "first_steps.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "dashboard: " in done.stdout
    doctor = [str(python.with_name("sonde")), "doctor", "--json"]
    checks = json.loads(subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)[
        "checks"
    ]
    assert {check["name"]: check["level"] for check in checks}["sonde-ml"] == "ok"


@pytest.mark.parametrize(
    ("relative", "absolute"),
    [
        ("see [all](docs/README.md)", "see [all](https://host/blob/v1/docs/README.md)"),
        ("[three](docs/how-it-works.md#guarantees)", "[three](https://host/blob/v1/docs/how-it-works.md#guarantees)"),
        ("![a run](docs/a.png)", "![a run](https://host/raw/v1/docs/a.png)"),
        ("[here](#overhead), [there](https://other/a.md)", "[here](#overhead), [there](https://other/a.md)"),
    ],
)
def test_links_of_the_long_description_are_absolute(relative: str, absolute: str, hatch_build: Any) -> None:
    assert hatch_build.with_absolute_links(relative, "https://host/{}/v1") == absolute


@pytest.mark.slow
def test_package_index_gets_a_readme_without_relative_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        (name,) = [name for name in archive.getnames() if name.endswith("PKG-INFO")]
        member = archive.extractfile(name)
        assert member is not None
        text = member.read().decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "(https://github.com/sonde-ml/sonde/raw/v" in text
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text.partition("\n\n")[2]) == []


def fresh_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with torch and what the wheel requires, linked from this one; returns its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(info)])
    for package in needed(Distribution.at(folder / info), distribution("torch")):
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(package.locate_file(name))
    return folder / "bin" / "python"


def needed(*wanted: Distribution) -> Iterator[Distribution]:
    """Everything installed here that distributions require, directly or not; torch itself included."""
    yield from (package for package in wanted if package.name == "torch")
    waiting, seen = [(package, frozenset[str]()) for package in wanted], set()
    while waiting:
        package, extras = waiting.pop()
        for requirement in map(Requirement, package.requires or ()):
            is_asked = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
            )
            key = (requirement.name, frozenset(requirement.extras))
            if is_asked and key not in seen:
                seen.add(key)
                found = distribution(requirement.name)
                yield found
                waiting.append((found, key[1]))


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
    """Environment variables that import the installed wheel instead of the checkout."""
    return {**os.environ, "PYTHONPATH": str(target), "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}


def _sketch_one(target: Path, folder: Path) -> list[str]:
    """Sketch one tensor with the installed wheel; returns whether the kernel was used, and the sum."""
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
        assert base, "the server printed no URL"
        for name in ("app.js", "app.css"):
            with urllib.request.urlopen(f"{base.group()}/static/{name}") as answer:
                assert answer.read() == (target / STATIC / name).read_bytes()
        with urllib.request.urlopen(f"{base.group()}/") as answer:
            assert b"/static/app.js" in answer.read()
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()
