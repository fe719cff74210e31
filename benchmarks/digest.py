"""The cost of a state digest: its time as a share of the training step that it belongs to.

Both run in one process, so nothing but the digest differs. A model of linear layers with Adam (12
bytes a parameter) trains on `TOKENS` tokens a step, which is few. A digest takes the same time for
every batch size, so its share of a real step is smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.common import Row, row
from megatron_recover.config import RecoverConfig
from megatron_recover.megatron.state import TrainingState

LAYERS, WIDTH, TOKENS, RUNS = 4, 1024, 2048, 15
_GOAL = "<= 0.02"
"""The goal for the overhead of a fault-free step."""


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rows() -> list[Row]:
    """Return the digest's share of a step, at each step and by default, and its speed."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    leaf = type("Leaf", (), {"optimizer": optimizer, "grad_scaler": None})
    state, batch = TrainingState([model], leaf), torch.randn(TOKENS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    state.digest()
    pairs = [(_seconds(state.digest), _seconds(step)) for _ in range(RUNS)]
    shares = [digest / both for digest, both in pairs]
    num_bytes = sum(tensor.data.nbytes for tensor in state.tensors())
    interval = RecoverConfig().state_digest_interval
    against = f"a step of {TOKENS} tokens, {num_bytes / 12e6:.1f} M parameters, one thread"
    return [
        row("state digest, every step", shares, unit="of a step", baseline=against, goal=_GOAL),
        row(
            f"state digest, every {interval} steps", [share / interval for share in shares], unit="of a step", baseline=against,
            goal=_GOAL,
        ),
        row("state digest, speed", [num_bytes / digest / 1e9 for digest, _ in pairs], unit="GB/s", baseline="one thread"),
    ]  # fmt: skip
