"""Measure how far the losses and parameters of a run are from a reference run, without judging."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megatron_recover import packages, trace
from megatron_recover.flags import value_of
from megatron_recover.observe.history import History

if TYPE_CHECKING:
    from torch import Tensor


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A run against its reference. The fields are also fields of `summary.json`."""

    reference: str
    loss_max_abs_diff: float | None
    """Largest loss difference over the steps that both runs have; None without a common step. A
    resumed run has only the later steps."""
    param_max_rel_diff: float | None
    """Largest max |a - b| / max |b| over the parameter tensors, or max |a - b| where b is zero.
    None if the digests are not known to be equal and the checkpoints cannot be compared, as those
    of different models."""
    param_bit_identical: bool | None
    """True if the digests of the newest step that has some are equal; None if a digest is missing,
    or layouts or those steps differ."""


def compare(run: History, reference: History, name: str) -> Comparison:
    """Compare the losses and parameters of a run with a reference called `name`.

    Parameters are compared by their digests. If the digests are not known to be equal, the newest
    checkpoints are compared, if both are of the same iteration. Raises `packages.Lacking` if that
    would need torch and it is not there, and OSError or torch's `CheckpointException` if a
    checkpoint cannot be read.
    """
    identical = _bit_identical(run, reference)
    difference = 0.0 if identical else _parameter_difference(run, reference)
    return Comparison(
        reference=name,
        loss_max_abs_diff=_loss_difference(run.losses(), reference.losses()),
        param_max_rel_diff=difference,
        param_bit_identical=identical,
    )


def _loss_difference(run: Mapping[str, float], reference: Mapping[str, float]) -> float | None:
    differences = [abs(run[label] - reference[label]) for label in run.keys() & reference.keys()]
    return max(differences, key=_with_nan_last, default=None)


def _with_nan_last(value: float) -> tuple[bool, float]:
    """Return a key that sorts numbers as they are, and what is no number behind them all."""
    return math.isnan(value), value


def _bit_identical(run: History, reference: History) -> bool | None:
    layouts = [started.layout if (started := history.first(trace.RunStarted)) else None for history in (run, reference)]
    (label, mine), (their_label, theirs) = run.last_digests, reference.last_digests
    if layouts[0] != layouts[1] or label != their_label or not mine or mine.keys() != theirs.keys():
        return None
    return mine == theirs


def _parameter_difference(run: History, reference: History) -> float | None:
    places = _newest_checkpoint(run), _newest_checkpoint(reference)
    if places[0] is None or places[1] is None or places[0].name != places[1].name:
        return None
    packages.require([packages.TORCH])
    mine, theirs = dict(_tensors(places[0])), dict(_tensors(places[1]))
    if {name: tensor.shape for name, tensor in mine.items()} != {name: tensor.shape for name, tensor in theirs.items()}:
        return None
    found = [0.0]
    for name, tensor in mine.items():
        scale = theirs[name].abs().max().item()
        difference = (tensor - theirs[name]).abs().max().item()
        found.append(difference / scale if scale else difference)
    return max(found, key=_with_nan_last)


def _newest_checkpoint(history: History) -> Path | None:
    """Return the folder of the last checkpoint that the run finished, or None.

    The folder comes from `--save` of the run's command line. Return None also if the folder has no
    `.metadata`.
    """
    finished = [event.iteration for _, event in history.of(trace.Checkpoint) if event.phase == "finished"]
    started = history.first(trace.RunStarted)
    folder = value_of(started.argv, "--save") if started else None
    if not finished or folder is None:
        return None
    place = Path(folder) / f"iter_{finished[-1]:07d}"
    return place if (place / ".metadata").is_file() else None


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value, as float64, of each parameter in a checkpoint of format `torch_dist`.

    Optimizer state, random state and tensors of integers are left out.
    """
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(("optimizer.", "rng_state"))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that there is no process group; none is needed
        try:
            load(state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # no Exception for Python
            raise OSError(f"{checkpoint} cannot be read: {str(error).splitlines()[-1]}") from error
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.numel():
            yield name, tensor.double()
