"""`megatron-recover data`: text files, byte for byte, into Megatron's `.bin` and `.idx`.

Every file is one document: its bytes as tokens 0..255, then the end-of-document token 256. Train on it with
``--tokenizer-type NullTokenizer --vocab-size 257``.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_recover.flags import Parser

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Directories that hold what pip installed: no part of the standard library, and not the same on any two machines."""


def files_in(paths: Sequence[Path], suffixes: Sequence[str]) -> Iterator[Path]:
    """Each path that is a file, and the files with one of the suffixes under each that is a directory, in sorted order."""
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                installed = PACKAGES & set(file.relative_to(path).parts)
                if file.is_file() and not installed and (not suffixes or file.suffix in suffixes):
                    yield file
        else:
            yield path


def write_dataset(output: Path, files: Iterator[Path]) -> tuple[int, int]:
    """Write `<output>.bin` and `<output>.idx` and return the number of documents and of tokens (end-of-document included).

    Both files appear complete or not at all. Empty files are left out. Raises OSError for what cannot be read or written
    and ValueError where nothing was read.
    """
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    binary, index = Path(f"{partial}.bin"), Path(f"{partial}.idx")
    num_documents = num_tokens = 0
    try:
        builder = IndexedDatasetBuilder(str(binary), dtype=numpy.uint16)
        for file in files:
            text = numpy.frombuffer(file.read_bytes(), dtype=numpy.uint8)
            if not text.size:
                continue
            document = numpy.append(text.astype(numpy.uint16), numpy.uint16(END_OF_DOCUMENT))
            builder.add_document(document, [document.size])
            num_documents, num_tokens = num_documents + 1, num_tokens + document.size
        builder.finalize(str(index))
        if not num_documents:
            raise ValueError("no text was found")
        os.replace(binary, f"{output}.bin")
        os.replace(index, f"{output}.idx")
    finally:
        binary.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
    return num_documents, num_tokens


def main(argv: Sequence[str]) -> int:
    """Run the verb; 0, or 2 with a message on bad input."""
    parser = Parser(
        prog="megatron-recover data", description="Turn text into a Megatron dataset, byte by byte, one document a file."
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", type=Path,
        help="files and directories (default: the sources of Python's standard library)",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="PREFIX", required=True, type=Path, help="write PREFIX.bin and PREFIX.idx (Megatron's --data-path)"
    )
    parser.add_argument(
        "--suffix", metavar=".EXT", action="append", default=[],
        help="in directories take only such files; repeatable (default: all; .py where no PATH is given)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    paths, suffixes = options.paths, options.suffix
    if not paths:
        paths, suffixes = [Path(sysconfig.get_paths()["stdlib"])], suffixes or [".py"]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        print(f"megatron-recover data: no such file or directory: {', '.join(missing)}", file=sys.stderr)
        return 2
    try:
        num_documents, num_tokens = write_dataset(options.output, files_in(paths, suffixes))
    except (OSError, ValueError) as error:
        hint = f" (PATH {', '.join(map(str, paths))}, --suffix {' '.join(suffixes) or 'any'})"
        print(f"megatron-recover data: {error}{hint}", file=sys.stderr)
        return 2
    print(
        f"{options.output}.bin, {options.output}.idx: {num_documents} documents, {num_tokens} tokens; "
        f"train on it with --data-path {options.output} --tokenizer-type NullTokenizer --vocab-size {VOCABULARY_SIZE}"
    )
    return 0
