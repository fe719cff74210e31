"""1F1B over a queue of microbatches, which can still grow while the schedule runs.

Replaces upstream's two schedules without virtual stages (`core/pipeline_parallel/schedules.py`):
`forward_backward_no_pipelining` and `forward_backward_pipelining_without_interleaving`. Uses
upstream's own `forward_step`, `backward_step` and `P2PCommunicator`. As long as nothing is added to
the queue, the order of forwards, backwards, sends and receives is exactly upstream's. The queue
decides which microbatch comes next and when the pass ends.

Note [When the end must be known]
    Upstream computes two things from the number of microbatches: how many warm-up forwards there
    are, and which iteration is the last. Here one question to the queue replaces both: is there
    another microbatch? It is asked as late as possible: before a stage receives the input of its
    next forward. In the steady state that is after the backward of the microbatch before. The end
    is requested one forward earlier (`Queue.prepare`). So work that arrives until then extends the
    steady state and costs no bubble.

Note [Divisor]
    In upstream `num_microbatches` has two uses: the length of the schedule, and the divisor of the
    losses (`schedules.forward_step`). Here the queue determines the length. The divisor is M, the
    number of microbatches of the step over all replicas. So the sum over replicas is the gradient
    of the full batch. With `--calculate-per-token-loss` upstream divides no loss that comes with a
    token count. It divides the summed gradient by the number of tokens when it finalizes the
    gradient.
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
    """The source of a pass's microbatches, equal and in equal order on all ranks of a replica."""

    def prepare(self) -> None:
        """Request the end of the pass, if no further microbatch is known.

        Call it one forward before `next`. Earlier would exclude microbatches that are still being
        dealt; later would make `next` wait.
        """

    def next(self) -> Task | None:
        """Return the next microbatch, or None, for good, when the pass has no more.

        Waits until either is known.
        """

    def has_ended(self) -> bool:
        """Return whether the pass is known to have no more microbatches. Never waits."""


class Listener(Protocol):
    """Receives the events of a pass, on every stage. `chunk` is the model chunk of the stage."""

    def forward_begins(self, task: Task, chunk: int) -> None:
        """Set data cursor and random state. Called before the forward reads its samples."""

    def forward_ended(self, task: Task, chunk: int, tokens: Tensor, losses: dict[str, Tensor] | None) -> None:
        """Note the end of a forward.

        `losses` is the report of the loss function on the last stage's last chunk; None elsewhere.
        """

    def backward_begins(self, task: Task, chunk: int, last: bool) -> None:
        """Note that a backward is about to begin.

        `last`: this backward is known to be the chunk's last backward of the pass.
        """

    def backward_ended(self, task: Task, chunk: int) -> None:
        """Note that the microbatch's gradient is in `main_grad` of the chunk's parameters."""


class MegatronPass:
    """Calls upstream's forward and backward on one rank; holds its link and message shapes."""

    def __init__(self, arguments: Mapping[str, Any], *, divisor: int, listener: Listener, is_first: bool = True) -> None:
        """Store the `arguments` of Megatron's call of its forward-backward function.

        For `divisor` see Note [Divisor]. `is_first`: this is the step's first pass. Only in that
        pass is a microbatch marked as the first one: at that mark Transformer Engine overwrites
        `main_grad` instead of adding to it (`is_first_microbatch` in its pytorch/module/linear.py),
        which would erase what earlier passes have computed. Raises ValueError for a pipeline of
        unlike modules.
        """
        self._arguments, self._divisor, self._listener, self._is_first = arguments, divisor, listener, is_first
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
        """Run the forward of a microbatch, number `index` of the pass; return its output.

        `recompute_all` is upstream's `checkpoint_activations_microbatch`; None: as configured.
        """
        reports: list[dict[str, Tensor]] = []
        self._listener.forward_begins(task, chunk)
        output, tokens = schedules.forward_step(
            self._arguments["forward_step_func"], self._iterators[chunk], self.models[chunk], self._divisor, received, reports,
            self.config, self._groups.cp.size(), checkpoint_activations_microbatch=recompute_all,
            is_first_microbatch=schedules.check_first_val_step(
                self._arguments.get("first_val_step"), self.forward_only, self._is_first and index == 0
            ),
            current_microbatch=index, vp_stage=chunk if self.num_chunks > 1 else None, is_last_stage=is_last_stage,
        )  # fmt: skip
        self._listener.forward_ended(task, chunk, tokens, reports[-1] if reports else None)
        return output

    def backward(self, task: Task, received: Any, output: Any, gradient: Any, chunk: int, *, last: bool) -> Any:
        """Run the backward of a microbatch; return the gradient of its forward's input `received`.

        For `last` see `Listener.backward_begins`.
        """
        self._listener.backward_begins(task, chunk, last)
        gradient = schedules.backward_step(received, output, gradient, self.config)
        self._listener.backward_ended(task, chunk)
        return gradient

    def release(self, output: Any) -> None:
        """Free the data of an output that was sent, with `deallocate_pipeline_outputs` only.

        Its autograd graph is kept.
        """
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def shape(self) -> list[int]:
        """Return the shape of a message between model chunks: [sequence, microbatch, hidden]."""
        length = self._arguments["seq_length"] // self._groups.cp.size()
        if self.config.sequence_parallel:
            length //= self._groups.tp.size()
        return [length, self._arguments["micro_batch_size"], self.config.hidden_size]

    def shapes(self) -> tuple[list[Any], list[Any]]:
        """Return the shapes that a stage with one chunk receives and sends in a forward."""
        shapes = schedules.get_tensor_shapes(
            seq_length=self._arguments["seq_length"], micro_batch_size=self._arguments["micro_batch_size"],
            decoder_seq_length=self._arguments.get("decoder_seq_length"), config=self.config,
            tp_group=self._groups.tp, cp_group=self._groups.cp,
        )  # fmt: skip
        adjust = self._arguments.get("adjust_tensor_shapes_fn")
        return adjust(shapes, shapes) if adjust is not None else (shapes, shapes)


class Stage:
    """Runs one pass on one pipeline stage that has a single model chunk."""

    def __init__(self, upstream: MegatronPass, queue: Queue) -> None:
        self._upstream, self._queue, self._link = upstream, queue, upstream.link
        self._received_shapes, self._sent_shapes = upstream.shapes()
        self._num_forwards = 0
        self._pending: deque[tuple[Task, Any, Any]] = deque()
        """(microbatch, input, output) of each forward without a backward so far, oldest first."""

    def run(self) -> None:
        """Run all forwards and backwards of the queue (or forwards alone), in upstream's order."""
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
        """Alternate forwards and backwards until the queue ends.

        See Note [When the end must be known].
        """
        task = self._next()
        received = None if task is None else self._receive_forward()
        while task is not None:
            output = self._forward(task, received)
            gradient = self._link.send_forward_recv_backward(output, self._sent_shapes, self._link.is_pp_last_stage)
            self._keep(task, received, output)
            del output  # free its graph before the next forward
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

    # --- upstream's steps and messages ------------------------------------------------------------

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
        """Run the backward of the oldest forward without one; return the gradient of its input."""
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
    """Return `items` as a list: upstream accepts one item or a list."""
    return items if isinstance(items, list) else [items]
