"""The toy trainer on several nodes whose newcomers join (`toy.py`, `tests/cluster/joining_toy.py`)."""

from __future__ import annotations

from tests.cluster.joining_toy import JoiningToy
from tests.cluster.toy import main
from tests.nodes.toy import NodesToy


class NodesJoiningToy(NodesToy, JoiningToy):
    """One rank, which is a whole replica."""


if __name__ == "__main__":
    main(NodesJoiningToy)
