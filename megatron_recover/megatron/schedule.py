"""Runs a pass: the pipeline over a queue of microbatch ids, each forward and backward known by its id.

Decides which id each forward and backward of a pass belongs to, and which of the two pipelines runs it. It never decides which
ids a replica computes, never touches a gradient, and starts no gradient synchronisation.

Note [Whose microbatch is it]
    Every stage runs a pass's microbatches in the order of the list, so the k-th forward of a model chunk is ids[k]. The
    tensor that a forward gives is the one that its backward gets; it carries the id across, whatever the schedule does in
    between, and the order of the backwards is checked against the list.

Note [Divisor]
    `num_microbatches` means two things upstream: how long the schedule is, and what the losses are divided by
    (`schedules.forward_step`). Here the first is the length of the list and the second is M, the step's number of
    microbatches over all replicas, so that the sum over replicas is the gradient of the full batch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_recover.megatron.interleaved import InterleavedStage
from megatron_recover.megatron.pipeline import Queue, Stage, Steps
from megatron_recover.megatron.work_queue import Task

_TASK = "recover_task"
"""Attribute of a forward's output tensor: (task, chunk). See Note [Whose microbatch is it]."""


class Listener(Protocol):
    """What a pass tells while it runs, on every stage; `chunk` is the model chunk of the stage."""

    def forward_begins(self, task: Task, chunk: int) -> None:
        """Before the forward reads its samples: set data cursor and random state."""

    def forward_ended(self, task: Task, chunk: int, tokens: Tensor, losses: dict[str, Tensor] | None) -> None:
        """`losses`: what the loss function reports, on the last stage's last chunk; None elsewhere."""

    def backward_begins(self, task: Task, chunk: int, last: bool) -> None:
        """Before the backward; `last`: it is known to be the chunk's last one of the pass."""

    def backward_ended(self, task: Task, chunk: int) -> None:
        """The gradient of the microbatch is in `main_grad` of the chunk's parameters."""


class _Pass:
    """One pass in progress: its ids as they become known, and how far each chunk is."""

    def __init__(self, queue: Queue, divisor: int, listener: Listener, num_chunks: int) -> None:
        self.divisor = divisor
        self.listener = listener
        self._queue = queue
        self._forwards: list[deque[Task]] = [deque() for _ in range(num_chunks)]
        self._backwards: list[deque[Task]] = [deque() for _ in range(num_chunks)]

    def next(self) -> Task | None:
        """As a `Queue`: the next microbatch that the schedule takes in."""
        task = self._queue.next()
        if task is not None:
            for tasks in (*self._forwards, *self._backwards):
                tasks.append(task)
        return task

    def prepare(self) -> None:
        """As a `Queue`."""
        self._queue.prepare()

    def next_forward(self, chunk: int) -> Task:
        return self._forwards[chunk].popleft()

    def next_backward(self, task: Task, chunk: int) -> bool:
        """Whether that of `task` is known to be the chunk's last backward. Raises RuntimeError where another was due."""
        expected = self._backwards[chunk].popleft() if self._backwards[chunk] else None
        if expected is not task:
            raise RuntimeError(f"backward of {task} on chunk {chunk} where {expected} was due")
        return not self._backwards[chunk] and self._queue.has_ended()

    def check_ended(self, forward_only: bool) -> None:
        if any(self._forwards) or (any(self._backwards) and not forward_only):
            raise RuntimeError("the schedule ended before all its microbatches were computed")


class Schedule:
    """Upstream's schedules, told which microbatch each forward and backward is.

    `forward_step` and `backward_step` stand in `megatron.core.pipeline_parallel.schedules` for the functions of the same
    names that the constructor is given (seams `forward_step`, `backward_step`). Outside of `run_pass` they are those.
    """

    def __init__(self, forward_step: Callable[..., Any], backward_step: Callable[..., Any]) -> None:
        self._forward_step = forward_step
        self._backward_step = backward_step
        self._pass: _Pass | None = None

    def forward_step(
        self, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, input_tensor: Any,
        forward_data_store: list[Any], config: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Upstream's `forward_step` with M for `num_microbatches`, for the pass's next id of this chunk."""
        upstream = (forward_step_func, data_iterator, model), (input_tensor, forward_data_store, config, *args)
        if self._pass is None:
            return self._forward_step(*upstream[0], num_microbatches, *upstream[1], **kwargs)
        chunk = kwargs.get("vp_stage") or 0
        task = self._pass.next_forward(chunk)
        num_stored = len(forward_data_store)
        self._pass.listener.forward_begins(task, chunk)
        output, tokens = self._forward_step(*upstream[0], self._pass.divisor, *upstream[1], **kwargs)
        losses = forward_data_store[-1] if len(forward_data_store) > num_stored else None
        self._pass.listener.forward_ended(task, chunk, tokens, losses)
        setattr(output[0] if isinstance(output, list) else output, _TASK, (task, chunk))
        return output, tokens

    def backward_step(self, input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        """Upstream's `backward_step`, known by the id of its forward."""
        if self._pass is None:
            return self._backward_step(input_tensor, output_tensor, output_tensor_grad, config)
        task, chunk = getattr(output_tensor[0] if isinstance(output_tensor, list) else output_tensor, _TASK)
        self._pass.listener.backward_begins(task, chunk, self._pass.next_backward(task, chunk))
        gradient = self._backward_step(input_tensor, output_tensor, output_tensor_grad, config)
        self._pass.listener.backward_ended(task, chunk)
        return gradient

    def run_pass(self, arguments: Mapping[str, Any], queue: Queue, *, divisor: int, listener: Listener) -> None:
        """Run forward and backward (or `forward_only`) of the queue's ids, in its order, until it ends.

        `arguments` are what Megatron called its forward-backward function with. On return every listener call was made for
        every id.
        """
        chunks = arguments["model"] if isinstance(arguments["model"], list) else [arguments["model"]]
        config = get_model_config(chunks[0])
        self._pass = _Pass(queue, divisor, listener, len(chunks))
        try:
            with _no_synchronisation(config, chunks), _timed(config):
                steps = Steps(arguments)
                (Stage if steps.num_chunks == 1 else InterleavedStage)(steps).run(self._pass)
            self._pass.check_ended(bool(arguments.get("forward_only")))
        finally:
            self._pass = None


@contextlib.contextmanager
def _no_synchronisation(config: Any, chunks: Sequence[Any]) -> Iterator[None]:
    """Upstream neither reduces nor finalizes a gradient inside: that is done once a step, when it is committed.

    The finalize function becomes an empty one rather than None, because upstream takes None for "not my business" and
    leaves deferred weight gradients of the embedding uncomputed.
    """
    names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
    saved = {name: getattr(config, name) for name in names}
    config.no_sync_func = config.grad_sync_func = None
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func = lambda *_, **__: None
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [setattr(config, name, value) for name, value in saved.items()])
        for chunk in chunks:
            if hasattr(chunk, "no_sync"):
                stack.enter_context(chunk.no_sync())
        yield


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """The timer that upstream's schedules run around themselves."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()
