#!/usr/bin/env bash
# Makes .venv with everything that megatron-recover needs, or says what is missing. Does nothing when .venv is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.installed
wanted=$(cat setup.py pyproject.toml requirements.lock | sha256sum | cut -d' ' -f1)

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

if [ -n "${PYTHON:-}" ]; then
    if ! python=$(command -v "$PYTHON"); then
        echo "PYTHON=$PYTHON: there is no such program. Name a Python 3.12 or newer, or leave PYTHON out." >&2
        exit 2
    elif ! fits "$python"; then
        echo "PYTHON=$PYTHON is $("$python" --version 2>&1). Name a Python 3.12 or newer, or leave PYTHON out." >&2
        exit 2
    elif there=$(.venv/bin/python --version 2>/dev/null) && [ "$there" != "$("$python" --version)" ]; then
        echo "PYTHON=$PYTHON is $("$python" --version), but .venv has $there. Leave PYTHON out, or remove .venv first: make clean" >&2
        exit 2
    fi
fi
# The console script names its interpreter by its whole path, which is another one when the checkout was moved.
starts() { [ -x "$(sed -n '1s/^#!//p' .venv/bin/megatron-recover 2>/dev/null)" ]; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null && starts; then
    exit 0
fi

find_python() {
    local root found
    for found in python3.12 python3.13 python3; do
        command -v "$found" >/dev/null && fits "$found" && { command -v "$found"; return; }
    done
    if root=$(pyenv root 2>/dev/null); then
        for found in "$root"/versions/3.12.*/bin/python3.12 "$root"/versions/3.13.*/bin/python3.13; do
            [ -x "$found" ] && fits "$found" && { echo "$found"; return; }
        done
    fi
    return 1
}

if [ -z "${PYTHON:-}" ] && ! python=$(find_python); then
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

failed() {
    [ -s .venv/pip.log ] && cat .venv/pip.log >&2
    echo "Setting up .venv failed: $1. $(df -h --output=avail . | tail -1 | tr -d ' ') of disk are free here, 5 GB are needed." >&2
    if grep -qiE 'connection|timed? ?out|resol|proxy|certificate|HTTP error|no matching distribution' .venv/pip.log 2>/dev/null; then
        echo "The packages could not be reached: look at the network, or point pip at a mirror (pip config set global.index-url ...)." >&2
    fi
    echo "Then run make again." >&2
    exit 2
}
trap 'echo "Set-up was interrupted; run make again to finish it." >&2; exit 130' INT TERM

echo "Setting up .venv with $python (first time: about 2 minutes and 5 GB of disk) ..."
# A half-made .venv (an interrupted set-up, a full disk) has no pip: make it anew.
if ! { [ -x .venv/bin/python ] && fits .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
    echo "  making the virtual environment"
    "$python" -m venv --clear .venv || failed "no virtual environment could be made"
fi
# The constraints hold in the environment in which packages are built, too: by the first name before pip 25.3, by the second since.
export PIP_CONSTRAINT=$PWD/requirements.lock PIP_BUILD_CONSTRAINT=$PWD/requirements.lock
# Of what pip says, the packages of a megabyte and more: they are what takes the time.
.venv/bin/python -m pip install --progress-bar off --disable-pip-version-check -e '.[train,plot,tensorboard,metrics,dev]' 2>.venv/pip.log |
    sed -un -e 's/^ *\(Downloading\|Using cached\) \([^ ]*\) (\([0-9.]* [MG]B\)).*/  \1 \2 (\3)/p' \
        -e 's/^Installing collected packages.*/  installing all packages/p' ||
    failed "a package could not be installed (pip's words are above)"
echo "$wanted" >"$stamp"
echo "  done"
