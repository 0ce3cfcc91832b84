"""The built front-end: a fixed list of files, read once. Requests select from the list and never form a path."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde.distribution import DISTRIBUTION

FOLDER: Final = Path(__file__).parent / "static"
_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}
_MAX_BYTES: Final = 16 << 20
_MISSING: Final = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>sonde</title>
<h1>The front-end is not built</h1>
<p>sonde was installed without its web pages. Build them with <code>make web</code> in a checkout, or install a
released wheel: <code>pip install --force-reinstall --no-deps {DISTRIBUTION}</code>. The API under /api works.</p>
</html>
""".encode()


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    gzipped: bytes
    media: str
    etag: str


def load_assets(folder: Path = FOLDER) -> dict[str, Asset]:
    """Files by the name under which they are served (`app.js`); if none are built, a page that says so."""
    found: dict[str, Asset] = {}
    if folder.is_dir():
        for path in sorted(folder.rglob("*")):
            media = _MEDIA.get(path.suffix)
            if media and path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_BYTES:
                found[path.relative_to(folder).as_posix()] = make_asset(path.read_bytes(), media)
    if "index.html" not in found:
        found["index.html"] = make_asset(_MISSING, _MEDIA[".html"])
    return found


def make_asset(body: bytes, media: str) -> Asset:
    return Asset(body, gzip.compress(body, 9, mtime=0), media, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
