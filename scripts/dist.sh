#!/usr/bin/env bash
# dist.sh FOLDER: builds wheel and source distribution of the commit at HEAD into a folder, and prints the wheel's path.
# A commit with the tag of its version is a release. Any other gets a label behind its version.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(realpath -m "$1")
refuse() { echo "make dist: $1" >&2; exit 2; }

commit=$(git rev-parse --short HEAD 2>/dev/null) || refuse "a commit is built, and $PWD is no git repository with one"
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git archive HEAD | tar -x -C "$source"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$source/megatron_recover/__init__.py")
tags=$(git tag --points-at HEAD 'v*')
if [ -z "$tags" ]; then
    label=$version+g$commit
    sed -i "s/^__version__ = .*/__version__ = \"$label\"/" "$source/megatron_recover/__init__.py"
    echo "$commit has no tag v$version, so this is no release but $label" >&2
elif [ "$tags" != "v$version" ]; then
    refuse "$commit has the tag ${tags//$'\n'/ and }, but megatron_recover/__init__.py has the version $version; correct one of them"
elif ! grep -q "^## $version\b" "$source/CHANGELOG.md"; then
    refuse "CHANGELOG.md has no section $version; rename Unreleased, commit, and tag that commit"
fi
[ -z "$(git status --porcelain)" ] || echo "changes that are not committed are not in it" >&2

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
if ! .venv/bin/python -m build --no-isolation --outdir "$source/built" "$source" >"$source/log" 2>&1; then
    cat "$source/log" >&2
    refuse "the build failed (its output is above)"
fi
mkdir -p "$out"
cp "$source"/built/* "$out"
echo "$out/$(basename "$source"/built/*.whl)"
