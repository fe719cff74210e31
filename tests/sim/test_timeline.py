"""The pictures of docs/design/schedule.md are of the schedules as they are, and the model behind them counts right."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover.core.values import Pipeline
from scripts.draw.gantt import DRAWINGS, drawn
from scripts.draw.timeline import Action, Timeline, disturbed, reopened, undisturbed

PAGE = Path(__file__).parents[2] / "docs" / "design" / "schedule.md"
PIPES = [Pipeline(1), Pipeline(2), Pipeline(4), Pipeline(2, 2), Pipeline(4, 2), Pipeline(3, 3)]


def test_the_drawn_schedules_are_current() -> None:
    page = PAGE.read_text()
    assert drawn(page) == page, "run: python -m scripts.draw.gantt docs/design/schedule.md"
    assert all(f"<!-- drawn: {name} -->" in page for name in DRAWINGS)


def test_a_drawing_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KeyError, match="another"):
        drawn("<!-- drawn: another -->\n<!-- end -->")


@pytest.mark.parametrize("pipe", PIPES)
def test_a_pass_without_a_loss_takes_what_is_known_of_1f1b(pipe: Pipeline) -> None:
    """(N + (P - 1) / V) microbatches, for whole groups (Narayanan et al. 2021, section 2.2)."""
    for groups in (1, 2, 3):
        num = groups * pipe.num_stages
        timeline = undisturbed(pipe, num)
        gap = 3 * (pipe.num_stages - 1) / pipe.num_chunks
        assert timeline.end == pytest.approx(3 * num + gap)


@pytest.mark.parametrize("pipe", PIPES)
def test_everything_is_computed_once_and_after_what_it_needs(pipe: Pipeline) -> None:
    for num, late in ((1, 1), (pipe.num_stages, 1), (5, 3)):
        asked = undisturbed(pipe, num).asked
        for timeline in (disturbed(pipe, num, late, asked), disturbed(pipe, num, late, asked + 0.1)):
            assert set(timeline.starts) == {
                Action(stage, chunk, microbatch, is_backward)
                for stage in range(pipe.num_stages) for chunk in range(pipe.num_chunks)
                for microbatch in range(num + late) for is_backward in (False, True)
            }  # fmt: skip
            for operation, start in timeline.starts.items():
                need = operation.needs(pipe)
                assert need is None or start >= timeline.starts[need] + need.seconds(pipe)


@pytest.mark.parametrize("pipe", PIPES)
def test_what_is_dealt_before_the_end_is_asked_for_makes_the_steady_state_longer(pipe: Pipeline) -> None:
    num, late = 2 * pipe.num_stages, pipe.num_stages
    alone, longer = undisturbed(pipe, num), undisturbed(pipe, num + late)
    in_time, too_late = (disturbed(pipe, num, late, alone.asked + wait) for wait in (0, 0.1))
    assert in_time.in_schedule and in_time == longer._replace(in_schedule=True)
    assert not too_late.in_schedule
    assert too_late.end == pytest.approx(alone.end + undisturbed(pipe, late).end)


@pytest.mark.parametrize("pipe", [pipe for pipe in PIPES if pipe.num_chunks == 1])
def test_the_best_re_opening_is_between_the_two(pipe: Pipeline) -> None:
    num, late = 6, 2
    alone = undisturbed(pipe, num)

    def ends(arrival: float) -> tuple[float, float, float]:
        timelines: tuple[Timeline, ...] = (
            disturbed(pipe, num, late, 0.0), reopened(pipe, num, late, arrival), disturbed(pipe, num, late, arrival),
        )  # fmt: skip
        best, opened, second = (timeline.end for timeline in timelines)
        return best, opened, second

    for arrival in (alone.asked + 0.1, (alone.asked + alone.end) / 2, alone.end):
        best, opened, second = ends(arrival)
        assert best <= opened <= second
    assert ends(0.0) == (ends(0.0)[0],) * 3
