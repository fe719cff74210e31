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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_recover.megatron.work_queue import Task


class Queue(Protocol):
    """What a schedule pulls its microbatches from; the same in the same order on all ranks of a replica."""

    def next(self) -> Task | None:
        """The next microbatch; None, for good, when the pass has no more. May wait for either to be known."""

    def has_ended(self) -> bool:
        """Whether it is known already that the pass has no more. Never waits."""


class Stage:
    """One pipeline stage in one pass: upstream's steps and messages, with what they need besides the microbatch.

    Upstream's `forward_step` and `backward_step` are looked up where upstream looks them up, so that the seams of
    `schedule.Schedule` stand behind them here as well.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """`arguments`: what Megatron called its forward-backward function with."""
        self._model, self._iterator = _only(arguments["model"]), _only(arguments["data_iterator"])
        self._config = config = get_model_config(self._model)
        self._function = arguments["forward_step_func"]
        self._forward_only = bool(arguments.get("forward_only"))
        self._first_val_step = arguments.get("first_val_step")
        self._link = arguments.get("p2p_communicator") or P2PCommunicator(
            parallel_state.get_pipeline_model_parallel_group(), config
        )
        groups = arguments.get("pg_collection") or schedules._build_default_pg_collection()
        self._cp_size = groups.cp.size()
        shapes = schedules.get_tensor_shapes(
            seq_length=arguments["seq_length"], micro_batch_size=arguments["micro_batch_size"],
            decoder_seq_length=arguments.get("decoder_seq_length"), config=config, tp_group=groups.tp, cp_group=groups.cp,
        )  # fmt: skip
        adjust = arguments.get("adjust_tensor_shapes_fn")
        self._received_shapes, self._sent_shapes = adjust(shapes, shapes) if adjust is not None else (shapes, shapes)
        self._num_forwards = 0
        self._pending: deque[tuple[Any, Any]] = deque()
        """(input, output) of the forwards whose backward has yet to come."""

    def run(self, queue: Queue) -> None:
        """Forward and backward of all that the queue gives (or forward alone), in upstream's order."""
        timers = self._config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=self._config.barrier_with_L1_time)
        if self._forward_only:
            while queue.next() is not None:
                self._send_forward(self._forward(self._receive_forward()))
        else:
            self._train(queue)
        if timers is not None:
            timers("forward-backward").stop()

    def _train(self, queue: Queue) -> None:
        for _ in range(self._link.total_stages - self._link.current_stage - 1):
            if queue.next() is None:
                break
            received = self._receive_forward()
            output = self._forward(received)
            self._send_forward(output)
            self._keep(received, output)
        else:
            self._alternate(queue)
        while self._pending:
            gradient = self._link.recv_backward(self._sent_shapes, self._link.is_pp_last_stage)
            self._send_backward(self._backward(gradient))

    def _alternate(self, queue: Queue) -> None:
        """One forward, one backward, until the queue ends. See Note [When the end must be known]."""
        more = queue.next() is not None
        received = self._receive_forward() if more else None
        while more:
            output = self._forward(received)
            gradient = self._link.send_forward_recv_backward(output, self._sent_shapes, self._link.is_pp_last_stage)
            self._keep(received, output)
            del output  # its graph has to go before the next forward
            gradient = self._backward(gradient)
            if more := queue.next() is not None:
                received = self._link.send_backward_recv_forward(gradient, self._received_shapes, self._link.is_pp_first_stage)
            else:
                self._send_backward(gradient)

    # --- upstream's steps and messages -----------------------------------------------------------------------------------

    def _forward(self, received: Any) -> Any:
        index, self._num_forwards = self._num_forwards, self._num_forwards + 1
        partial = self._config.num_microbatches_with_partial_activation_checkpoints
        in_flight = self._link.total_stages - self._link.current_stage
        output, _ = schedules.forward_step(
            self._function, self._iterator, self._model, self._num_forwards, received, [], self._config, self._cp_size,
            checkpoint_activations_microbatch=None if partial is None else index % in_flight >= partial,
            is_first_microbatch=schedules.check_first_val_step(self._first_val_step, self._forward_only, index == 0),
            current_microbatch=index, is_last_stage=self._link.is_pp_last_stage,
        )  # fmt: skip
        return output

    def _keep(self, received: Any, output: Any) -> None:
        self._pending.append((received, output))
        schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _backward(self, gradient: Any) -> Any:
        """The backward of the oldest forward that has none."""
        return schedules.backward_step(*self._pending.popleft(), gradient, self._config)

    def _receive_forward(self) -> Any:
        return self._link.recv_forward(self._received_shapes, self._link.is_pp_first_stage)

    def _send_forward(self, output: Any) -> None:
        self._link.send_forward(output, self._link.is_pp_last_stage)

    def _send_backward(self, gradient: Any) -> None:
        self._link.send_backward(gradient, self._link.is_pp_first_stage)


def _only(items: Any) -> Any:
    """Upstream takes one or a list of one."""
    if not isinstance(items, list):
        return items
    [item] = items
    return item
