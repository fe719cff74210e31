"""Interleaved 1F1B over a queue of microbatches, for stages that hold several model chunks.

Replaces upstream's `forward_backward_pipelining_with_interleaving`
(`core/pipeline_parallel/schedules.py`). While forwards and backwards alternate, messages overlap
with computation, as upstream's do with `overlap_p2p_comm`. The schedule is that of Narayanan et
al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2.2. The order
of forwards, backwards, sends and receives is exactly upstream's if upstream accepts the number of
microbatches and nothing is added to the queue.

Note [Slots]
    Microbatches go through the chunks in groups: all of a group run on the first chunk, then all
    run on the second, and so on. A slot is the forward of one microbatch on one chunk. All stages
    run through the same list of slots (upstream's schedule table) twice: for the forwards, and,
    with the chunks in reverse order, for the backwards. The queue is asked for a microbatch only at
    slots of the first chunk. A group can begin incomplete: while the queue is open, its next
    microbatch may still come.

Note [Vacant slots]
    Upstream refuses a last group that is smaller than the number of stages: the output of a chunk
    would not be back at the first stage when the next chunk begins. Here vacant slots fill up such
    a group. In a vacant slot nothing is computed and nothing is sent. The rest of upstream's order
    for the full group cannot block, because each missing send has its receive missing too. A stage
    with a vacant slot proceeds to the next slot.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from megatron_recover.megatron.schedule.pipeline import MegatronPass, Queue
from megatron_recover.trainer.work_queue import Task


class ScheduleSlot(NamedTuple):
    """One place in the order of forwards, and in the order of backwards. See Note [Slots]."""

    index: int | None
    """Index of the microbatch in the pass, from 0; None: the slot is vacant."""
    chunk: int
    """Chunk of the forward, from the first chunk. For a backward count from the last chunk."""


class ScheduleSlots:
    """The slots of a pass, as far as they are known."""

    def __init__(self, queue: Queue, *, num_stages: int, num_chunks: int, group_size: int) -> None:
        """Begin with no known slot.

        `group_size` is the largest number of microbatches in a group, at least `num_stages`.
        """
        self._queue, self._num_stages, self._num_chunks, self._group_size = queue, num_stages, num_chunks, group_size
        self._slots: list[ScheduleSlot] = []
        self.tasks: list[Task] = []
        """The microbatches of the pass known so far, in the order of `ScheduleSlot.index`."""
        self._num_in_group = 0
        self._has_ended = False

    def at(self, index: int) -> ScheduleSlot | None:
        """Return slot `index`, or None if the pass ends before it. Waits until either is known."""
        while len(self._slots) <= index and not self._has_ended:
            self._grow()
        return self._slots[index] if index < len(self._slots) else None

    def prepare(self, index: int) -> None:
        """Prepare the queue for `at(index)`, if that slot is not known yet.

        Called one forward before `at(index)`.
        """
        if len(self._slots) <= index and not self._has_ended:
            self._queue.prepare()

    def _grow(self) -> None:
        task = self._queue.next()
        if task is None:
            self._has_ended = True
        else:
            self._slots.append(ScheduleSlot(len(self.tasks), 0))
            self.tasks.append(task)
            self._num_in_group += 1
        if self._num_in_group == self._group_size or self._has_ended and self._num_in_group:
            self._complete_group()

    def _complete_group(self) -> None:
        vacant = [ScheduleSlot(None, 0)] * (self._num_stages - self._num_in_group)
        self._slots += vacant
        group = self._slots[-max(self._num_stages, self._num_in_group) :]
        for chunk in range(1, self._num_chunks):
            self._slots += [slot._replace(chunk=chunk) for slot in group]
        self._num_in_group = 0


class InterleavedStage:
    """Runs one pass on one pipeline stage that has several model chunks."""

    def __init__(self, upstream: MegatronPass, queue: Queue) -> None:
        self._upstream, self._queue, self._link = upstream, queue, upstream.link
        self._shape = upstream.shape()
        self._num_stages, self._num_chunks = self._link.total_stages, upstream.num_chunks
        group_size = upstream.config.microbatch_group_size_per_vp_stage
        self._slots = ScheduleSlots(queue, num_stages=self._num_stages, num_chunks=self._num_chunks, group_size=group_size)
        self._num_warmup = 2 * (self._num_stages - self._link.current_stage - 1) + (self._num_chunks - 1) * group_size
        """Number of slots whose forwards run before forwards and backwards alternate, a forward
        first."""
        self._num_backwards = [0] * self._num_chunks
        self._inputs: list[deque[_Message]] = [deque() for _ in range(self._num_chunks)]
        self._gradients: list[deque[_Message]] = [deque() for _ in range(self._num_chunks)]
        self._pending: list[deque[tuple[Any, Any]]] = [deque() for _ in range(self._num_chunks)]
        """Pairs (input, output) of the forwards without a backward so far, by chunk, oldest
        first."""
        self._sends: dict[str, Any] = {}
        """Handle of the newest send in each direction (`send_next`, `send_prev`)."""

    def run(self) -> None:
        """Run all forwards and backwards of the queue (or forwards alone), in upstream's order."""
        if self._slots.at(0) is None:
            return
        if not self._is_first(0):
            self._inputs[0].append(_Message(self._link.recv_forward(self._shape, False)))
        forward = backward = 0
        while self._slots.at(forward) is not None and (forward < self._num_warmup or self._upstream.forward_only):
            self._pass_on(forward, self._forward(forward), overlap=False)
            forward += 1
        if self._upstream.forward_only:
            return
        self._expect_first_gradient(overlap=self._slots.at(forward) is not None)
        while self._slots.at(forward) is not None:
            self._pass_on(forward, self._forward(forward), overlap=True)
            self._pass_back(backward, self._backward(backward), overlap=True)
            forward, backward = forward + 1, backward + 1
        while backward < forward:
            self._pass_back(backward, self._backward(backward), overlap=False)
            backward += 1
        for handle in self._sends.values():
            handle.wait()

    def _is_first(self, chunk: int) -> bool:
        """Return whether `chunk` of this stage is the first chunk of the model."""
        return self._link.is_pp_first_stage and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self._link.is_pp_last_stage and chunk == self._num_chunks - 1

    # --- upstream's steps -------------------------------------------------------------------------

    def _forward(self, index: int) -> Any:
        """Run the forward of slot `index`; return the output to send.

        None: the slot is vacant, or its chunk is the last of the model.
        """
        self._slots.prepare(index + 1)
        number, chunk = self._slots.at(index)
        if number is None:
            return None
        received = None if self._is_first(chunk) else self._inputs[chunk].popleft().get()
        partial = self._upstream.config.num_microbatches_with_partial_activation_checkpoints
        in_flight = index if self._upstream.forward_only else index % (self._num_warmup + 1)
        output = self._upstream.forward(
            self._slots.tasks[number], received, number, chunk, is_last_stage=self._is_last(chunk),
            recompute_all=None if partial is None else in_flight >= partial,
        )  # fmt: skip
        if not self._upstream.forward_only:
            self._pending[chunk].append((received, output))
        return None if self._is_last(chunk) else output

    def _backward(self, index: int) -> Any:
        """Run the backward of slot `index`; return the gradient to send, or None."""
        number, from_last = self._slots.at(index)
        if number is None:
            return None
        chunk = self._num_chunks - 1 - from_last
        gradient = None if self._is_last(chunk) else self._gradients[chunk].popleft().get()
        self._num_backwards[chunk] += 1
        last = self._num_backwards[chunk] == len(self._slots.tasks) and self._queue.has_ended()
        gradient = self._upstream.backward(
            self._slots.tasks[number], *self._pending[chunk].popleft(), gradient, chunk, last=last
        )  # fmt: skip
        return None if self._is_first(chunk) else gradient

    # --- upstream's messages ----------------------------------------------------------------------

    def _pass_on(self, index: int, output: Any, *, overlap: bool) -> None:
        """Send the output of forward slot `index`; begin to receive the input of a later forward.

        Without `overlap` both are complete on return, if a message is due at all. `output` is None
        for a vacant slot and for the last chunk of the model. With `deallocate_pipeline_outputs`
        the call waits for the send of `output`, and then frees the data of `output`.
        """
        chunk = self._comes(index, self._link.is_pp_first_stage)
        answer = self._link.send_forward_recv_forward(
            output, recv_prev=chunk is not None, tensor_shape=self._shape, overlap_p2p_comm=overlap
        )
        received, handles = answer if overlap else (answer, {})
        if chunk is not None:
            self._inputs[chunk].append(_Message(received, handles.get("recv_prev")))
        self._sent("send_next", handles)
        if self._upstream.config.deallocate_pipeline_outputs and "send_next" in self._sends:
            self._sends.pop("send_next").wait()  # the send still reads the memory that is freed
        self._upstream.release(output)

    def _pass_back(self, index: int, gradient: Any, *, overlap: bool) -> None:
        """Send the gradient of backward slot `index`; begin to receive that of a later backward.

        Without `overlap` both are complete on return. `gradient` is None for a vacant slot and for
        the first chunk of the model.
        """
        from_last = self._comes(index, self._link.is_pp_last_stage)
        answer = self._link.send_backward_recv_backward(
            gradient, recv_next=from_last is not None, tensor_shape=self._shape, overlap_p2p_comm=overlap
        )
        received, handles = answer if overlap else (answer, {})
        if from_last is not None:
            self._gradients[self._num_chunks - 1 - from_last].append(_Message(received, handles.get("recv_next")))
        self._sent("send_prev", handles)

    def _expect_first_gradient(self, *, overlap: bool) -> None:
        if self._link.is_pp_last_stage:
            return
        if overlap:
            received, handles = self._link.send_backward_recv_backward(
                None, recv_next=True, tensor_shape=self._shape, overlap_p2p_comm=True
            )
            self._gradients[-1].append(_Message(received, handles.get("recv_next")))
        else:
            self._gradients[-1].append(_Message(self._link.recv_backward(self._shape, False)))

    def _comes(self, index: int, is_leading: bool) -> int | None:
        """Return the chunk for which a message arrives while slot `index` is sent, or None.

        Chunks of backwards count from the last. As a rule the message is for the next slot. The
        leading stage (the first for forwards, the last for backwards) receives from the other end
        of the pipeline. There the message is of the slot `num_stages - 1` before `index`, for the
        next chunk.
        """
        behind = index + 1 - self._num_stages if is_leading else index + 1
        slot = self._slots.at(behind) if behind >= 0 else None
        if slot is None or slot.index is None or (is_leading and slot.chunk == self._num_chunks - 1):
            return None
        return slot.chunk + is_leading

    def _sent(self, way: str, handles: dict[str, Any]) -> None:
        """Wait for the kept send in direction `way`; keep the handle of the new one, if any.

        This is upstream's limit: one send in flight in each direction.
        """
        if way in self._sends:
            self._sends.pop(way).wait()
        if way in handles:
            self._sends[way] = handles[way]


class _Message(NamedTuple):
    """A tensor that is being received, with the handle to wait for (None: it has arrived)."""

    tensor: Any
    handle: Any = None

    def get(self) -> Any:
        if self.handle is not None:
            self.handle.wait()
        return self.tensor
