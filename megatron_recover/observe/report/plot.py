"""Draw the loss plot of a run as SVG, from its trace.

The plot shows the loss of the run and of its reference run, every fault in a training step, every
return of a replica, and the number of replicas.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_recover import packages, trace
from megatron_recover.core.label import label_of
from megatron_recover.host.whole_file import replacing
from megatron_recover.observe.history import History
from megatron_recover.observe.joins import joins
from megatron_recover.observe.summary import faults

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "loss.svg"

TEXTS = 8
"""Largest number of faults that have texts. More texts would hide the curve, so only lines are
drawn."""

_RUN, _REFERENCE, _FAULT, _JOIN, _GREY = "#1f5fa8", "#f2b441", "#b3261e", "#1e7d4f", "#5f6368"


def _curve(history: History) -> tuple[list[int], list[float]]:
    points = [(label_of(label).iteration, loss) for label, loss in history.losses().items() if label_of(label).is_training]
    return [iteration for iteration, _ in points], [loss for _, loss in points]


def _members(history: History) -> tuple[list[int], list[int]]:
    """Return the trained iterations and the sizes of the generations that committed them."""
    sizes = {
        label_of(record.label).iteration: len(history.roster(record.generation))
        for record in history.records.values()
        if label_of(record.label).is_training
    }
    return list(sizes), list(sizes.values())


def _draw_faults(axes: Axes, below: Axes, history: History) -> None:
    """Draw a line at the training step that each fault hit.

    With at most `TEXTS` such faults each line has a text. The texts are on alternating heights, so
    that neighbours stay readable.
    """
    steps = [(fault, fault.label) for fault in faults(history) if fault.label is not None and label_of(fault.label).is_training]
    for number, (fault, label) in enumerate(steps):
        at = label_of(label).iteration
        for each in (axes, below):
            each.axvline(at, color=_FAULT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        if len(steps) > TEXTS:
            continue
        axes.annotate(
            f"{fault.kind}: replica {fault.replica} rank {fault.rank}\n{fault.where}",
            xy=(at, 0.97 - 0.13 * (number % 4)), xycoords=("data", "axes fraction"), xytext=(5, 0),
            textcoords="offset points", color=_FAULT, fontsize=8, va="top",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )  # fmt: skip


def _draw_joins(axes: Axes, below: Axes, history: History) -> None:
    """Draw a line at the first step of each newcomer that became a member, with a text as above."""
    found = [one for one in joins(history) if one.label is not None and label_of(one.label).is_training]
    for number, one in enumerate(found):
        at = label_of(one.label or "").iteration
        for each in (axes, below):
            each.axvline(at, color=_JOIN, linewidth=1.2, linestyle=(0, (1, 2)), zorder=1)
        if len(found) > TEXTS:
            continue
        place = f"\nin the place of replica {' '.join(map(str, one.in_place_of))}" if one.in_place_of else ""
        axes.annotate(
            f"replica {one.replica} joins{place}",
            xy=(at, 0.45 - 0.15 * (number % 3)), xycoords=("data", "axes fraction"), xytext=(5, 0),
            textcoords="offset points", color=_JOIN, fontsize=8, va="top",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )  # fmt: skip


def left_out() -> str | None:
    """Return why there can be no plot, with the remedy; None if `draw` can make one."""
    lacking = packages.mistakes(packages.PLOT)
    return f"{PLOT_FILE} is left out: {lacking[0]}" if lacking else None


def draw(folder: Path, history: History, reference: History | None = None) -> Path:
    """Draw `loss.svg` into a folder and return its path. Call it only if nothing is `left_out`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    style: dict[Any, Any] = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _GREY, "svg.hashsalt": "loss",
        "svg.fonttype": "none", "xtick.color": _GREY, "ytick.color": _GREY, "axes.labelcolor": _GREY,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, (axes, below) = pyplot.subplots(
            2, 1, sharex=True, figsize=(9, 4.8), height_ratios=(4, 1), layout="constrained"
        )  # fmt: skip
        if reference is not None:
            axes.plot(*_curve(reference), color=_REFERENCE, linewidth=6, alpha=0.8, label="undisturbed reference")
        axes.plot(*_curve(history), color=_RUN, linewidth=1.8, marker="o", markersize=3, label="this run")
        iterations, sizes = _members(history)
        below.step(iterations, sizes, where="mid", color=_RUN, linewidth=1.8)
        below.fill_between(iterations, sizes, step="mid", color=_RUN, alpha=0.15)
        _draw_faults(axes, below, history)
        _draw_joins(axes, below, history)
        axes.set_ylabel("loss")
        axes.grid(axis="y", color="#e8eaed")
        axes.set_axisbelow(True)
        axes.legend(loc="lower left", frameon=False)
        below.set(ylabel="replicas", xlabel="iteration", ylim=(0, max([*sizes, 1]) + 0.4))
        below.yaxis.set_major_locator(MaxNLocator(integer=True))
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(_title(history), fontsize=10, x=0.01, ha="left")
        place = folder / PLOT_FILE
        with replacing(place) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return place


def _title(history: History) -> str:
    started = history.first(trace.RunStarted)
    steps = sum(label_of(record.label).is_training for record in history.records.values())
    if started is None:
        return f"{steps} training steps"
    layout = started.layout
    what = f"TP{layout.tp} x PP{layout.pp}" + (f" x CP{layout.cp}" if layout.cp > 1 else "")
    return f"{steps} training steps, {started.replicas} replicas of {what} at the start, determinism {started.determinism}"
