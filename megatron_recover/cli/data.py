"""`megatron-recover data`: turns text files, byte for byte, into Megatron's `.bin` and `.idx`.

Every file with text in it is one document: its bytes as tokens 0..255, then the end-of-document
token 256. Of a directory `files_in` chooses the files. Train on the data set with
``--tokenizer-type NullTokenizer --vocab-size 257``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_recover import packages
from megatron_recover.flags import Parser

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Directories of packages that pip installed. They are no part of the standard library, and differ
between machines."""


def files_in(paths: Sequence[Path], suffixes: Sequence[str]) -> Iterator[Path]:
    """Yield the paths that are no directories, and the files below each directory, sorted.

    In directories only files with one of the suffixes count; without suffixes all do. Files there
    of packages that pip installed do not count. Raises OSError if a directory cannot be read, since
    the data set must not silently lack part of the input.
    """
    for path in paths:
        if path.is_dir():
            found = (folder / name for folder, _, names in path.walk(on_error=_raise) for name in names)
            for file in sorted(found):
                installed = PACKAGES & set(file.relative_to(path).parts)
                if file.is_file() and not installed and (not suffixes or file.suffix in suffixes):
                    yield file
        else:
            yield path


def _raise(error: OSError) -> None:
    raise error


def write_dataset(output: Path, files: Iterable[Path]) -> tuple[int, int]:
    """Write `<output>.bin` and `<output>.idx`; return the number of documents and of tokens.

    The tokens include the end-of-document tokens. Each file appears complete or not at all. Both
    replace former ones, `<output>.idx` last. Empty files are left out. Raises OSError if a file
    cannot be written, and ValueError if a file cannot be read or no text was found.
    """
    import numpy

    with _without_warnings():
        from megatron_recover.megatron.cpu import leave_out_what_needs_a_gpu

        leave_out_what_needs_a_gpu()
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    binary, index = _partial(output)
    num_documents = num_tokens = 0
    try:
        builder = IndexedDatasetBuilder(str(binary), dtype=numpy.uint16)
        for file in files:
            text = numpy.frombuffer(_bytes_of(file), dtype=numpy.uint8)
            if not text.size:
                continue
            document = numpy.append(text.astype(numpy.uint16), numpy.uint16(END_OF_DOCUMENT))
            builder.add_document(document, [document.size])
            num_documents, num_tokens = num_documents + 1, num_tokens + document.size
        builder.finalize(str(index))
        if not num_documents:
            raise ValueError("no text was found")
        Path(f"{output}.idx").unlink(missing_ok=True)  # so that an old index never belongs to a new text
        os.replace(binary, f"{output}.bin")
        os.replace(index, f"{output}.idx")
    finally:
        binary.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
    return num_documents, num_tokens


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress all warnings, and all log lines up to level WARNING, inside this context.

    Imports of torch and Megatron warn about GPUs, which do not matter to a data set.
    """
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _partial(output: Path) -> tuple[Path, Path]:
    """Return the names of the two files while they are written."""
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    return Path(f"{partial}.bin"), Path(f"{partial}.idx")


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(_unreadable(error)) from error


def _unreadable(error: OSError) -> str:
    return f"PATH {error.filename} cannot be read ({error.strerror}); leave it out or make it readable"


def _input(paths: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files that are not empty, and named paths such as pipes, whose size is unknown.

    Raises ValueError with one line for each mistake, also if there are no such files.
    """
    wrong = [f"--suffix {suffix} does not begin with a dot; write it like .py" for suffix in suffixes if suffix[:1] != "."]
    try:
        wrong += [f"PATH {path} does not exist; correct it" for path in paths if not path.exists()]
        files = [] if wrong else [file for file in files_in(paths, suffixes) if not file.is_file() or file.stat().st_size]
    except OSError as error:
        raise ValueError(_unreadable(error)) from error
    if not files and not wrong:
        only = f" with --suffix {' '.join(suffixes)}" if suffixes else ""
        wrong = [f"PATH {', '.join(map(str, paths))} has no text{only}; name files that are not empty"]
    if wrong:
        raise ValueError("\n".join(wrong))
    return files


def _claim(prefix: str, *, overwrite: bool) -> Path:
    """Return the output prefix after a check that files can be written there.

    Creates the folder of the files. The check comes before imports that take seconds. Raises
    ValueError for a bad prefix, and for existing files without `overwrite`. Raises OSError if
    nothing can be written.
    """
    output = Path(prefix)
    if os.path.basename(prefix) in ("", ".", ".."):
        raise ValueError(
            f"--output {prefix or '.'} is no PREFIX; give a path that .bin and .idx can be added to, such as {output / 'text'}"
        )
    there = [f"{output}{end}" for end in (".bin", ".idx") if os.path.lexists(f"{output}{end}")]
    if there and not overwrite:
        raise ValueError(f"--output {output}: {' and '.join(there)} would be replaced; give another PREFIX, or --overwrite")
    folders = [path for path in there if os.path.isdir(path)]
    if folders:
        raise ValueError(f"--output {output}: {' and '.join(folders)} is a directory; give another PREFIX")
    output.parent.mkdir(parents=True, exist_ok=True)
    binary, _ = _partial(output)
    binary.touch()
    binary.unlink()
    return output


def main(argv: Sequence[str]) -> int:
    """Run the verb; return 0, or exit with 2 and a message if no data set can be written."""
    parser = Parser(
        prog="megatron-recover data", description="Turn text into a Megatron dataset, byte by byte, one document a file."
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="*", type=Path,
        help="files and directories (default: the sources of Python's standard library)",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="PREFIX", required=True, help="write PREFIX.bin and PREFIX.idx (Megatron's --data-path)"
    )
    parser.add_argument(
        "--suffix", metavar=".EXT", action="append", default=[],
        help="read only such files in directories; repeatable (default: all; .py where no PATH is given)",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace PREFIX.bin and PREFIX.idx where they exist")
    options = parser.parse_args(argv)
    if lacking := packages.mistakes(packages.TRAINING):
        parser.error("\n".join(lacking))
    paths, suffixes = options.paths, options.suffix
    if not paths:
        paths, suffixes = [Path(sysconfig.get_paths()["stdlib"])], suffixes or [".py"]
    try:
        files = _input(paths, suffixes)
        output = _claim(options.output, overwrite=options.overwrite)
        num_documents, num_tokens = write_dataset(output, files)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file stands where a folder is meant" if in_the_way else error.strerror
        parser.error(f"--output {options.output} cannot be written ({why}); give another PREFIX, or make room there")
    print(
        f"{output}.bin, {output}.idx: {num_documents} documents, {num_tokens} tokens; "
        f"train on it with --data-path {output} --tokenizer-type NullTokenizer --vocab-size {VOCABULARY_SIZE}"
    )
    return 0
