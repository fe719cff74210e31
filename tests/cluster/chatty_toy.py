"""The toy, with ranks that print a kilobyte in each step, by Python and past it."""

from __future__ import annotations

import os

from tests.cluster.toy import Toy, main


class ChattyToy(Toy):
    """Prints as Megatron and as native code do."""

    def step(self, iteration: int, sums) -> tuple[str, ...]:  # noqa: ANN001
        """Do a step, and print."""
        requests = super().step(iteration, sums)
        print(f"step {iteration} {'x' * 500}", flush=True)
        os.write(2, b"y" * 500 + b"\n")
        return requests


if __name__ == "__main__":
    main(ChattyToy)
