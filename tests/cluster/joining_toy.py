"""A toy of one rank whose newcomers join: the real way in (`trainer/entering.py`), and the real transfer of state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.core.values import Work
from megatron_recover.trainer.entering import Entering
from megatron_recover.trainer.state import Scalar, State
from megatron_recover.trainer.state_reader import StateReader
from megatron_recover.trainer.state_server import StateServer
from megatron_recover.trainer.state_window import StateWindow
from tests.cluster import toy


class ToyState(State):
    def __init__(self, owner: JoiningToy) -> None:
        self.owner = owner

    def values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        yield "parameters", self.owner.parameters
        yield "iteration", self.owner.iteration


class JoiningToy(toy.Toy):
    """Serves its state in every step, and reads it from others if it is a newcomer."""

    iteration = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        context, self.window = self.context, StateWindow()
        place = {"key": self.key, "replica": context.replica, "rank": context.rank}
        self.server = StateServer(
            **place, host=context.address, ports=context.ports, deadlines=self.deadlines, digested=self.member.digested,
            window=self.window, report=self.report_strangers,
        )  # fmt: skip
        self.reader = StateReader(**place, deadlines=self.deadlines)

    def run(self) -> None:
        self.member.join(self.shape, "toy", state_address=self.server.address)
        if self.context.newcomer:
            record = trace.RankTrace(self.log, replica=self.context.replica, rank=self.context.rank)
            Entering(
                self.member, self.reader, ToyState(self), install=self.install, gather=lambda value: [value], record=record
            ).enter()
        self.train(self.iteration)
        self.server.end()

    def install(self, scalars: Mapping[str, Scalar]) -> None:
        iteration = scalars["iteration"]
        assert isinstance(iteration, int)
        self.iteration = iteration

    def begins(self, work: Work) -> None:
        self.window.open()
        self.iteration = label_of(work.label).iteration
        self.server.open(work.label, ToyState(self))

    def applies(self, work: Work) -> None:
        self.window.close()
        self.server.close()


if __name__ == "__main__":
    toy.main(JoiningToy)
