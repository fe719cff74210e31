"""Checks the data flags of a command line: each data set exists and each split in use has data.

Upstream searches for a sample of an empty split for ever, and raises where a split that it needs
has no share. Reads only the first bytes of a data set's files, and the lists that
`--data-args-path` and `--per-split-data-args-path` name.
"""

from __future__ import annotations

import json
import os
import re
import struct
from argparse import Namespace
from collections.abc import Sequence
from typing import Final

import msgspec

_INDEX_MAGIC: Final = b"MMIDIDX\x00\x00"
_INDEX_HEADER: Final = struct.Struct("<9sQBQQ")
"""Header of an `.idx` file: magic, version, type of a token, number of sequences, number of
documents plus one."""
_DEFAULT_SPLIT: Final = "969, 30, 1"
"""Upstream's value of `--split` where `--data-path` is given alone."""
_SPLITS: Final = {"train": "training", "valid": "validation", "test": "testing"}


class _Blend(msgspec.Struct, frozen=True):
    """A list of data sets that upstream mixes, given by a flag or by a file."""

    flag: str
    """The flag, followed by the file's name if a file lists the data sets."""
    split: str | None
    """The split that reads the data sets (a key of `_SPLITS`); None: `--split` cuts each data
    set."""
    words: Sequence[str]
    """The words of the list: prefixes, or weights and prefixes in turn."""

    def prefixes(self) -> list[str]:
        """Return the prefixes of the data sets: the words without weights."""
        weights = self.words[::2] if len(self.words) % 2 == 0 else []
        return [*self.words[1::2]] if weights and all(map(is_number, weights)) else [*self.words]


def mistakes(args: Namespace) -> list[str]:
    """Return one line per mistake, each with the flag and the remedy; none with `--mock-data`.

    The files of a prefix with `://` are not checked. While the lists or `--split` are wrong, no
    data set is checked.
    """
    if args.mock_data:
        return []
    try:
        blends = [blend for blend in _blends(args) if blend.words]
    except ValueError as error:
        return [str(error)]
    if not blends:
        return ["--data-path is missing; make data with 'megatron-recover data --output PREFIX' and give that PREFIX"]
    shared = [blend.flag for blend in blends if blend.split is None]
    if len(shared) > 1 or (shared and len(blends) > 1):
        return [f"{' and '.join(blend.flag for blend in blends)} exclude each other; give one of them"]
    try:
        ratios = _ratios(args, shared)
    except ValueError as error:
        return [str(error)]
    found = _without_data(args, blends, ratios)
    for blend in blends:
        for prefix in blend.prefixes():
            if "://" not in prefix:
                found += _data_set(args, blend, prefix, ratios)
    return found


def _blends(args: Namespace) -> list[_Blend]:
    """Return the lists of all data flags, some of them empty.

    Raises ValueError for a file that cannot be read or is no such list, and for an empty
    `--data-args-path`.
    """
    blends = [
        _Blend("--data-path", None, args.data_path or ()),
        _Blend("--train-data-path", "train", args.train_data_path or ()),
        _Blend("--valid-data-path", "valid", args.valid_data_path or ()),
        _Blend("--test-data-path", "test", args.test_data_path or ()),
    ]
    if args.data_args_path is not None:
        flag = f"--data-args-path {args.data_args_path}"
        words = _text(flag, args.data_args_path).split()
        if not words:
            raise ValueError(f"{flag} names no data; write PREFIX words into it, as for --data-path")
        blends.append(_Blend(flag, None, words))
    if args.per_split_data_args_path is not None:
        flag = f"--per-split-data-args-path {args.per_split_data_args_path}"
        try:
            lists = msgspec.convert(json.loads(_text(flag, args.per_split_data_args_path)), dict[str, list[str] | str | None])
            blends += [_Blend(flag, split, _words(lists[split])) for split in _SPLITS]
        except (json.JSONDecodeError, msgspec.ValidationError, KeyError) as error:
            raise ValueError(
                f'{flag} is not {{"train": [PREFIX, ...], "valid": [...], "test": [...]}} in JSON: {error}; correct it'
            ) from error
    return blends


def _text(flag: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ValueError(f"{flag} cannot be read ({reason}); give a file that lists the data") from error


def _words(listed: list[str] | str | None) -> list[str]:
    return listed.split() if isinstance(listed, str) else listed or []


def _ratios(args: Namespace, shared: Sequence[str]) -> list[float] | None:
    """Return the shares of training, validation and testing; None if each split has its own data.

    `shared` are the flags whose data `--split` cuts. Raises ValueError for a wrong, missing or
    needless `--split`. With `--data-path` a missing one is upstream's default.
    """
    if not shared:
        if args.split is not None:
            raise ValueError(f"--split {args.split} has no meaning where every split has data of its own; leave it out")
        return None
    if args.split is None and shared != ["--data-path"]:
        raise ValueError(f"--split is missing; {shared[0]} needs it, for example --split 90,5,5")
    split = args.split or _DEFAULT_SPLIT
    words = re.findall(r"[.0-9]+", split)
    if "-" in split or len(words) > len(_SPLITS) or not all(map(is_number, words)) or not sum(map(float, words)):
        raise ValueError(f"--split {split} does not give the shares of training, validation and testing; write it like 90,5,5")
    return [*map(float, words), 0.0, 0.0][: len(_SPLITS)]


def _without_data(args: Namespace, blends: Sequence[_Blend], ratios: Sequence[float] | None) -> list[str]:
    """Return one line for each split that will be read and has no data. Testing may be without."""
    if ratios is not None:
        given, remedy = {name for name, ratio in zip(_SPLITS, ratios, strict=True) if ratio > 0}, "give it a share"
        what = f"--split {args.split} has nothing for"
    else:
        given, remedy = {blend.split for blend in blends}, "give it some"
        what = f"{blends[0].flag} comes without data for"
    found = [f"{what} {_SPLITS['train']}; {remedy}"] if "train" not in given else []
    if "valid" not in given and args.eval_iters > 0:
        found.append(f"{what} {_SPLITS['valid']}, and --eval-iters is {args.eval_iters}; {remedy}, or set --eval-iters 0")
    return found


def _data_set(args: Namespace, blend: _Blend, prefix: str, ratios: Sequence[float] | None) -> list[str]:
    """Return one line for each mistake in one data set: in its files, or else in its splits.

    Upstream splits a data set by its sequences. The lines call them documents.
    """
    missing = []
    for file in (f"{prefix}.bin", f"{prefix}.idx"):
        try:
            with open(file, "rb") as opened:
                header = opened.read(_INDEX_HEADER.size)
        except FileNotFoundError:
            missing.append(file)
        except OSError as error:
            return [f"{blend.flag} {prefix}: {file} cannot be read ({error.strerror}); make it readable"]
    stem, end = os.path.splitext(prefix)
    if missing and end in (".bin", ".idx") and os.path.exists(prefix):
        return [f"{blend.flag} {prefix}: name the data without {end}, as {stem}"]
    if missing:
        files = " and ".join(missing)
        return [f"{blend.flag} {prefix}: {files} not found; make them with 'megatron-recover data --output {prefix} PATH...'"]
    if len(header) < _INDEX_HEADER.size or not header.startswith(_INDEX_MAGIC):
        return [f"{blend.flag} {prefix}: {prefix}.idx is no index of Megatron's; make it with 'megatron-recover data'"]
    num = _INDEX_HEADER.unpack(header)[3]
    if ratios is None:
        empty = not num and (blend.split == "train" or args.eval_iters > 0)
        return [f"{blend.flag} {prefix} has no documents; make it with 'megatron-recover data'"] if empty else []
    ends = [sum(ratios[: index + 1]) / sum(ratios) for index in range(len(ratios))]
    split = args.split or _DEFAULT_SPLIT
    return [
        f"--split {split} leaves none of the {num} documents of {prefix} for {what}; give more documents, or it a share of 0"
        for (name, what), ratio, begin, end in zip(_SPLITS.items(), ratios, [0.0, *ends], ends, strict=False)
        if ratio > 0 and round(begin * num) == round(end * num) and (name == "train" or args.eval_iters > 0)
    ]


def is_number(word: str) -> bool:
    """Return whether `float` accepts a word, as it does each weight in a list of data sets."""
    try:
        float(word)
    except ValueError:
        return False
    return True
