#!/usr/bin/env bash
# Makes .venv with everything that megatron-recover needs, or says what is missing. Does nothing when .venv is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.installed
wanted=$(cat setup.py pyproject.toml requirements.lock | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

find_python() {
    local candidates=("${PYTHON:-}" python3.12 python3.13 python3) root found
    for found in "${candidates[@]}"; do
        [ -n "$found" ] && command -v "$found" >/dev/null && fits "$found" && { command -v "$found"; return; }
    done
    if root=$(pyenv root 2>/dev/null); then
        for found in "$root"/versions/3.12.*/bin/python3.12 "$root"/versions/3.13.*/bin/python3.13; do
            [ -x "$found" ] && fits "$found" && { echo "$found"; return; }
        done
    fi
    return 1
}

if ! python=$(find_python); then
    cat >&2 <<'MESSAGE'
megatron-recover needs Python 3.12 or newer (megatron-core 0.19 does), and none was found on PATH or under pyenv.
Install one and run make again, for example:
    apt-get install python3.12 python3.12-venv      (Debian, Ubuntu)
    pyenv install 3.12
or name one:  make PYTHON=/path/to/python3.12 ...
MESSAGE
    exit 2
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$python has no venv module. Install it (apt-get install python3.12-venv) or name another: make PYTHON=..." >&2
    exit 2
fi

echo "Setting up .venv with $python (first time: about 2 minutes and 5 GB of disk) ..."
[ -x .venv/bin/python ] && fits .venv/bin/python || "$python" -m venv --clear .venv
if ! .venv/bin/python -m pip install -q --disable-pip-version-check -c requirements.lock -e '.[dev]' 2>.venv/pip.log; then
    cat .venv/pip.log >&2
    echo "Installing failed (above). With no network, point pip at a mirror (pip config set global.index-url ...) and run make again." >&2
    exit 2
fi
echo "$wanted" >"$stamp"
