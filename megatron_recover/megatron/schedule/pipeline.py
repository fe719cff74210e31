"""1F1B over a queue of microbatches: the schedule learns what it computes while it runs.

Stands where upstream's schedules without virtual stages stand (`core/pipeline_parallel/schedules.py`:
`forward_backward_no_pipelining`, `forward_backward_pipelining_without_interleaving`), over upstream's own `forward_step`,
`backward_step` and `P2PCommunicator`. As long as nothing is added to the queue, the order of forwards, backwards, sends and
receives is exactly upstream's. It decides nothing: what comes next, and when nothing does, is the queue's answer.

Note [When the end must be known]
    Upstream computes its number of warm-up forwards, and whether an iteration is the last one, from the number of
    microbatches. Here both are one question, asked as late as can be: before a stage receives the input of its next forward. In
    the steady state that is after the backward of the microbatch before, so that work which arrives until then
    extends the steady state and costs no bubble.

Note [Divisor]
    `num_microbatches` means two things upstream: how long the schedule is, and what the losses are divided by
    (`schedules.forward_step`). Here the first is the queue's affair and the second is M, the step's number of microbatches over
    all replicas, so that the sum over replicas is the gradient of the full batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_recover.trainer.work_queue import Task


class Queue(Protocol):
    """What a schedule pulls its microbatches from; the same in the same order on all ranks of a replica."""

    def prepare(self) -> None:
        """One more forward, and `next` is called: ask now for what its answer hangs on, so that it need not wait."""

    def next(self) -> Task | None:
        """The next microbatch; None, for good, when the pass has no more. May wait for either to be known."""

    def has_ended(self) -> bool:
        """Whether it is known already that the pass has no more. Never waits."""


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


class Upstream:
    """Upstream's forward, backward and messages of one rank, with what they need besides the microbatch."""

    def __init__(self, arguments: Mapping[str, Any], *, divisor: int, listener: Listener) -> None:
        """`arguments`: what Megatron called its forward-backward function with; `divisor`: see Note [Divisor].

        Raises ValueError where modules are unlike.
        """
        self._arguments, self._divisor, self._listener = arguments, divisor, listener
        self.models, self._iterators = _list(arguments["model"]), _list(arguments["data_iterator"])
        self.num_chunks = len(self.models)
        self.config = config = get_model_config(self.models[0])
        self.forward_only = bool(arguments.get("forward_only"))
        self.link = arguments.get("p2p_communicator") or P2PCommunicator(
            parallel_state.get_pipeline_model_parallel_group(), config
        )
        self._groups = arguments.get("pg_collection") or schedules._build_default_pg_collection()
        if not isinstance(self._groups, ProcessGroupCollection):
            raise ValueError("a pipeline of unlike modules (MultiModuleProcessGroupCollection) is not supported")

    def forward(
        self, task: Task, received: Any, index: int, chunk: int, *, is_last_stage: bool, recompute_all: bool | None
    ) -> Any:
        """Output of the microbatch, number `index` of the pass. `recompute_all`: None where the configuration says."""
        reports: list[dict[str, Tensor]] = []
        self._listener.forward_begins(task, chunk)
        output, tokens = schedules.forward_step(
            self._arguments["forward_step_func"], self._iterators[chunk], self.models[chunk], self._divisor, received, reports,
            self.config, self._groups.cp.size(), checkpoint_activations_microbatch=recompute_all,
            is_first_microbatch=schedules.check_first_val_step(
                self._arguments.get("first_val_step"), self.forward_only, index == 0
            ),
            current_microbatch=index, vp_stage=chunk if self.num_chunks > 1 else None, is_last_stage=is_last_stage,
        )  # fmt: skip
        self._listener.forward_ended(task, chunk, tokens, reports[-1] if reports else None)
        return output

    def backward(self, task: Task, received: Any, output: Any, gradient: Any, chunk: int, *, last: bool) -> Any:
        """Gradient of what was received. `last`: see `Listener.backward_begins`."""
        self._listener.backward_begins(task, chunk, last)
        gradient = schedules.backward_step(received, output, gradient, self.config)
        self._listener.backward_ended(task, chunk)
        return gradient

    def release(self, output: Any) -> None:
        """The output was sent: its data can go, its graph stays."""
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def shape(self) -> list[int]:
        """Of every message between model chunks: [sequence, microbatch, hidden]."""
        length = self._arguments["seq_length"] // self._groups.cp.size()
        if self.config.sequence_parallel:
            length //= self._groups.tp.size()
        return [length, self._arguments["micro_batch_size"], self.config.hidden_size]

    def shapes(self) -> tuple[list[Any], list[Any]]:
        """Of what a stage with one chunk receives and sends."""
        shapes = schedules.get_tensor_shapes(
            seq_length=self._arguments["seq_length"], micro_batch_size=self._arguments["micro_batch_size"],
            decoder_seq_length=self._arguments.get("decoder_seq_length"), config=self.config,
            tp_group=self._groups.tp, cp_group=self._groups.cp,
        )  # fmt: skip
        adjust = self._arguments.get("adjust_tensor_shapes_fn")
        return adjust(shapes, shapes) if adjust is not None else (shapes, shapes)


class Stage:
    """One pipeline stage in one pass."""

    def __init__(self, upstream: Upstream, queue: Queue) -> None:
        self._upstream, self._queue, self._link = upstream, queue, upstream.link
        self._received_shapes, self._sent_shapes = upstream.shapes()
        self._num_forwards = 0
        self._pending: deque[tuple[Task, Any, Any]] = deque()
        """(microbatch, input, output) of the forwards whose backward has yet to come."""

    def run(self) -> None:
        """Forward and backward of all that the queue gives (or forward alone), in upstream's order."""
        if self._upstream.forward_only:
            while (task := self._next()) is not None:
                self._send_forward(self._forward(task, self._receive_forward()))
            return
        for _ in range(self._link.total_stages - self._link.current_stage - 1):
            task = self._next()
            if task is None:
                break
            received = self._receive_forward()
            output = self._forward(task, received)
            self._send_forward(output)
            self._keep(task, received, output)
        else:
            self._alternate()
        while self._pending:
            gradient = self._link.recv_backward(self._sent_shapes, self._link.is_pp_last_stage)
            self._send_backward(self._backward(gradient))

    def _alternate(self) -> None:
        """One forward, one backward, until the queue ends. See Note [When the end must be known]."""
        task = self._next()
        received = None if task is None else self._receive_forward()
        while task is not None:
            output = self._forward(task, received)
            gradient = self._link.send_forward_recv_backward(output, self._sent_shapes, self._link.is_pp_last_stage)
            self._keep(task, received, output)
            del output  # its graph has to go before the next forward
            gradient = self._backward(gradient)
            if (task := self._next()) is not None:
                received = self._link.send_backward_recv_forward(gradient, self._received_shapes, self._link.is_pp_first_stage)
            else:
                self._send_backward(gradient)

    def _next(self) -> Task | None:
        task = self._queue.next()
        if task is not None:
            self._queue.prepare()
        return task

    # --- upstream's steps and messages -----------------------------------------------------------------------------------

    def _forward(self, task: Task, received: Any) -> Any:
        index, self._num_forwards = self._num_forwards, self._num_forwards + 1
        partial = self._upstream.config.num_microbatches_with_partial_activation_checkpoints
        in_flight = self._link.total_stages - self._link.current_stage
        return self._upstream.forward(
            task, received, index, 0, is_last_stage=self._link.is_pp_last_stage,
            recompute_all=None if partial is None else index % in_flight >= partial,
        )  # fmt: skip

    def _keep(self, task: Task, received: Any, output: Any) -> None:
        self._pending.append((task, received, output))
        self._upstream.release(output)

    def _backward(self, gradient: Any) -> Any:
        """The backward of the oldest forward that has none."""
        task, received, output = self._pending.popleft()
        last = not self._pending and self._queue.has_ended()
        return self._upstream.backward(task, received, output, gradient, 0, last=last)

    def _receive_forward(self) -> Any:
        return self._link.recv_forward(self._received_shapes, self._link.is_pp_first_stage)

    def _send_forward(self, output: Any) -> None:
        self._link.send_forward(output, self._link.is_pp_last_stage)

    def _send_backward(self, gradient: Any) -> None:
        self._link.send_backward(gradient, self._link.is_pp_first_stage)


def _list(items: Any) -> list[Any]:
    """Upstream takes one or a list of one."""
    return items if isinstance(items, list) else [items]
