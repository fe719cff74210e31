#!/usr/bin/env bash
# wheelhouse.sh FOLDER EXTRAS: puts wheels of this commit and of all that it needs into a folder, for machines without a
# network, in the versions of requirements.lock. EXTRAS may be empty, for an image that has torch, beside a Megatron.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(realpath -m "$1")
extras=$2

rm -f "$folder"/megatron_recover-*  # pip cannot tell which of two labelled versions is newer
wheel=$(scripts/dist.sh "$folder")
echo "Collecting the wheels that ${extras:-an image} needs ..." >&2
.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --wheel-dir "$folder" \
    --constraint requirements.lock "$wheel${extras:+[$extras]}" >&2
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1), are in $folder. Install there:"
echo "    pip install --no-index --find-links $folder 'megatron-recover${extras:+[$extras]}'"
