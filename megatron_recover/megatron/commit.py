"""Runs each step inside Megatron: begin, obey the leader's orders, apply the committed gradient.

`CommitLoop` replaces Megatron's forward-backward function. Membership, quotas and commits are
decided elsewhere and arrive as orders. `CommitLoop` carries plans out. On `Apply` of a training
step it gives the committed gradient to upstream's finalize; upstream's clip and optimizer follow.
The class is long, but not split: all parts of a step share its number, orders and reduction.

Note [Who calls what]
    Megatron's training loop and evaluation call `CommitLoop.run` through the seam
    `forward_backward`. `run` returns when the step is committed. In training the gradient buffers
    then hold the step's gradient. On the last stage `run` returns the loss dictionaries of all M
    microbatches in the order of their ids. So all that follows (clip, optimizer, logging) is
    upstream's code and sees a whole batch. A step that is given up is the exception.

Note [Giving up]
    A step that is given up has read data and computed gradients. Neither is state. Upstream changes
    the optimizer, the scheduler and the counters of iterations and samples only after `run` has
    returned a gradient. The samples and the random state of a microbatch are functions of its id.
    So with `--save` upstream's own exit for an untrusted result (its rerun machine) saves the state
    of the step before, unless it is saved already. That save takes the same seam as every other
    save. An evaluation ends with the losses of its committed steps. Then the committed request to
    exit ends training in the seam `exit`, as any other such request.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.alike import Alike
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.label import Label, StepKind, label_of
from megatron_recover.core.plan import microbatches_of
from megatron_recover.core.progress import Phase
from megatron_recover.core.rank_messages import Apply, Plan
from megatron_recover.core.values import Work
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.megatron import mtp_losses
from megatron_recover.megatron.data.loaders import MicrobatchCursor
from megatron_recover.megatron.gradient_buffers import GradientBuffers
from megatron_recover.megatron.large_gradients import warn_of_large
from megatron_recover.megatron.losses import gradient_scale, mean_loss
from megatron_recover.megatron.parameter_digest import ParameterDigest
from megatron_recover.megatron.schedule.passes import run_pass
from megatron_recover.megatron.state import Carried, Published, TrainingState
from megatron_recover.progress_page import ProgressPage
from megatron_recover.trainer.communication import is_communication_error, is_device_error
from megatron_recover.trainer.compiling import show_compilations
from megatron_recover.trainer.crossing import NotFinite
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.entering import Entering, Reader
from megatron_recover.trainer.in_work import InWork
from megatron_recover.trainer.ledger import count_tokens, read_losses
from megatron_recover.trainer.microbatches import Microbatches
from megatron_recover.trainer.overlap import Overlap
from megatron_recover.trainer.reduction import Gather, Reduction, gather_over_replica
from megatron_recover.trainer.regions import Regions
from megatron_recover.trainer.state import Scalar
from megatron_recover.trainer.state_server import StateServer
from megatron_recover.trainer.state_window import StateWindow
from megatron_recover.trainer.stopwatch import Stopwatch
from megatron_recover.trainer.work_queue import WorkQueue

if TYPE_CHECKING:
    from megatron_recover.megatron.newcomer import Newcomer

OF_A_STEP_GIVEN_UP = ({}, True, True, True, 0, None, None, None)
"""A tuple as upstream's train_step returns it for an untrusted result: no losses, iteration
skipped, save the state of the iteration before, leave the training loop. The exit code follows from
the record (`core.policy.exit_code`)."""
_NUM_FIRST_STEPS = 2
"""Number of first training steps of a process, in which its libraries compile, tune and
allocate."""


class GivenUp(Exception):
    """Ends upstream's train_step when the step ended without a gradient (`Void.gives_up`)."""


class CommitLoop:
    """Runs the steps of one rank.

    Created before Megatron builds its model; joins the job at its first step.
    """

    def __init__(
        self,
        driver: Driver,
        config: RecoverConfig,
        originals: Mapping[str, Callable[..., Any]],
        *,
        cursor: MicrobatchCursor,
        seed: Callable[[int, int, int], None],
        iteration: Callable[[], int],
        alike: Callable[[], Mapping[str, str]],
        configuration: Callable[[], Mapping[str, str]] = dict,
        carried: Mapping[str, Carried] | None = None,
        counters: Callable[[], Mapping[str, Scalar]] = dict,
        log: trace.Log | None = None,
        faults: FaultInjector | None = None,
        gather: Gather = gather_over_replica,
        page: ProgressPage | None = None,
        before_joining: Callable[[], None] = lambda: None,
        window: StateWindow | None = None,
        server: StateServer | None = None,
        gradients: Callable[[Sequence[Any], int], Regions] = GradientBuffers,
    ) -> None:
        """Store the collaborators; nothing is sent or called yet.

        - `originals`: Megatron's own functions behind the seams of `replacements`.
        - `seed(iteration, microbatch, chunk)` sets the random state of a microbatch.
        - `iteration()` returns Megatron's current iteration, from 1.
        - `alike()` returns what must be equal on the same rank of every replica, by name, without
          shape and state (`megatron/data/alike.py`).
        - `configuration()` returns of that what does not depend on how far the job has come.
        - `carried`: what newcomers get beside the state. None: nothing.
        - `counters()` returns the scalars of the state that Megatron counts (`TrainingState`).
        - `page` shows what this rank does. None: nobody reads it.
        - `before_joining()` is called once, after Megatron has loaded its checkpoint, if any.
        - `window` is opened and closed here. None: nobody copies from it.
        - `server` serves the state of each window to newcomers. None: none can join.
        - `gradients(chunks, bucket_elements)` returns the gradients of Megatron's model chunks.
        """
        self._gradients_of = gradients
        self._window, self._server = window or StateWindow(), server
        self._before_joining = before_joining
        self._page = page or ProgressPage()
        self._in_work = InWork(None)
        self._num_trained = 0
        """Number of training steps that this process has applied."""
        self._driver, self._config, self._originals = driver, config, originals
        self._cursor, self._seed, self._iteration, self._alike = cursor, seed, iteration, alike
        self._configuration, self._carried = configuration, {} if carried is None else carried
        self._faults, self._gather, self._counters = faults, gather, counters
        self._record = trace.RankTrace(log, replica=driver.replica, rank=driver.rank)
        self._reduction: Reduction | None = None
        self._stopwatch: Stopwatch | None = None
        """Measures passes for the pace of the replica. Only on rank 0 with `--recover-rebalance
        on`."""
        self._chunks: list[Any] = []
        self._parameter_digest = ParameterDigest(())
        self._parameters_checksum = 0
        """Newest digest of the parameters. Part of every checksum of the next steps."""
        self._state: TrainingState | None = None
        """The state of this rank; None before the first step or save."""
        self._num_evaluations = 0
        self._applied: tuple[int, Apply, float | None] | None = None
        """(step, order, mean loss) of a committed step until `stepped` records it as applied."""
        self._step = self._next_step = 0
        self._generation = 0
        """Generation of the newest order that `_next_order` returned; 0 before the first."""
        self._settled_generation = 0
        """Generation of the newest commit. A pass of a later generation may follow a fault."""
        self._has_given_up = False

    def close(self) -> None:
        """End the threads that read samples ahead and serve the state. No step may follow."""
        self._cursor.close(self._config.deadlines.close_s)
        if self._server is not None:
            self._server.end()

    # --- seams ------------------------------------------------------------------------------------

    def replacements(self) -> dict[str, Any]:
        """Return the replacement for each seam of the commit loop, by the seam's name."""
        return {
            "forward_backward": self.choose_schedule,
            "train_step": self.train_step,
            "finish_grad_sync": gradient_is_reduced,
        }

    def choose_schedule(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return `run`, whichever schedule upstream would choose (seam `forward_backward`)."""
        return self.run

    def train_step(
        self, forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, opt_param_scheduler: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Call upstream's train_step, then record the step as applied (seam `train_step`).

        Returns what upstream returns, and `OF_A_STEP_GIVEN_UP` for a step that is given up.
        """
        self.know_state(model, optimizer, opt_param_scheduler)
        try:
            with self._fault_in_optimizer():
                outcome = self._originals["train_step"](
                    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, *args, **kwargs
                )
        except GivenUp:
            return OF_A_STEP_GIVEN_UP
        self.stepped()
        return outcome

    def know_state(self, chunks: Sequence[Any], optimizer: Any = None, scheduler: Any = None) -> TrainingState:
        """Return the state of this rank; make it at first, and again once an optimizer is known.

        An evaluation or an agreement may come before the optimizer is known (None).
        """
        if self._state is None or (optimizer is not None and not self._state.has_optimizer):
            self._state = TrainingState(chunks, optimizer, scheduler, self._counters)
        return self._state

    @contextlib.contextmanager
    def _fault_in_optimizer(self) -> Iterator[None]:
        """Let a fault strike before each step of a torch optimizer in the body, if any is set."""
        if (faults := self._faults) is None:
            yield
            return
        # The hook runs inside torch's optimizer step. Upstream has clipped the gradient by then,
        # and this optimizer has not changed any of its parameters yet.
        hook = register_optimizer_step_pre_hook(lambda *_: faults.at(FaultPoint.OPTIMIZER, step=self._step))
        try:
            yield
        finally:
            hook.remove()

    # --- a step -----------------------------------------------------------------------------------

    @property
    def has_joined(self) -> bool:
        """Return whether this rank has joined the job."""
        return self._reduction is not None

    @property
    def has_trained(self) -> bool:
        """Return whether this process has applied a training step, so that state has changed."""
        return self._num_trained > 0

    def join(self, chunks: Sequence[Any]) -> Reduction:
        """Return the reduction of this rank; on the first call also join the job.

        Joining reports the buckets of this rank and blocks until the first generation. Raises
        `JobStopped` if the job ends or this rank fails before, and ValueError for gradients that
        replicas cannot sum (`gradients`, `Reduction`).
        """
        if self._reduction is None:
            self._chunks = list(chunks)
            self._parameter_digest = ParameterDigest(chunks)
            self._reduction = Reduction(
                self._gradients_of(chunks, self._config.bucket_elements),
                stage=parallel_state.get_pipeline_model_parallel_rank(),
                is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True), config=self._config,
                driver=self._driver, gather=self._gather, record=self._record, faults=self._faults,
            )  # fmt: skip
            if self._driver.rank == 0 and self._config.rebalance == "on":
                self._stopwatch = Stopwatch(self._reduction.device)
            self._in_work = InWork.on(self._reduction.device)
            show_compilations(self._page)
            self._parameters_checksum = self._parameter_digest.compute().everything
            parts = self._parts(self._reduction)
            self._before_joining()
            self._driver.join(
                self._reduction.shape, hashlib.blake2b(repr(parts.configuration).encode(), digest_size=8).hexdigest(),
                parts.configuration, parts.beginning, self._server.address if self._server is not None else "",
            )  # fmt: skip
        return self._reduction

    def enter(self, newcomer: Newcomer, reader: Reader) -> None:
        """Bring this rank of a newcomer, which is prepared, into the job (`trainer/entering.py`).

        Returns when upstream may begin its first step. Raises `CannotJoin` and `JobStopped`.
        """
        self.join(newcomer.arguments.model)

        def gather(value: Any) -> Sequence[Any]:
            with self._page.within(Phase.ORDERS):  # a newcomer that waits for a window does not hang
                return self._gather(value)

        entering = Entering(
            self._driver, reader, newcomer.state, install=newcomer.install, gather=gather, record=self._record,
            faults=self._faults,
        )  # fmt: skip
        self._step = self._next_step = entering.enter()
        if self._faults is not None:
            self._faults.at(FaultPoint.ADMITTED, step=self._step)

    def _parts(self, reduction: Reduction) -> Alike:
        """Return what must be equal on the same rank of replicas, as far as it is known by now."""
        state = self.know_state(self._chunks)
        shape, buckets = reduction.shape, hashlib.blake2b(repr(reduction.shape).encode(), digest_size=8).hexdigest()
        described = {"the shape": f"{shape.num_ranks} ranks with {len(shape.bucket_ranks)} buckets ({buckets})"}
        beginning = {
            **described,
            **self._alike(),
            "the digest of names and shapes of the state": f"{state.layout_digest():016x}",
            "the digest of the parameters": f"{self._parameters_checksum:016x}",
            "the digest of all state, optimizer included": f"{state.digest():016x}",
        }
        return Alike(tuple((described | {**self._configuration()}).items()), tuple(beginning.items()))

    def carried(self) -> dict[str, Carried]:
        """Return what this loop has that a newcomer needs and no digest covers."""

        def put(checksum: int) -> None:
            self._parameters_checksum = checksum  # of a rank that has joined: joining computes its own

        return {"parameters_checksum": Carried(lambda: self._parameters_checksum, put)}

    def published(self) -> Published:
        """Return the state of this rank as newcomers read it, after the first training step."""
        return Published(self.know_state(self._chunks), self._carried)

    def run(self, **arguments: Any) -> list[dict[str, Tensor]]:
        """Run one step, shared by all replicas, in place of upstream's forward-backward function.

        Returns the loss dictionaries of all ids in their order on the last stage, an empty list on
        other stages. In training the gradient buffers then hold the committed gradient, and
        upstream has finalized it. An evaluation step that is given up returns an empty list. After
        a step that is given up every call returns an empty list at once, without a step.

        Raises `GivenUp` for a training step that is given up, and whatever `join`, `_next_order`,
        the computation of a microbatch and the reduction raise, among others. Raises ValueError for
        `collect_non_loss_data`: no replica has that data for the whole batch.
        """
        if self._has_given_up:  # the job ends at upstream's next iteration boundary
            return []
        if arguments.get("collect_non_loss_data"):
            raise ValueError("process_non_loss_data_func is not supported: no replica sees the data of the whole batch")
        chunks = arguments["model"] if isinstance(arguments["model"], list) else [arguments["model"]]
        forward_only = bool(arguments.get("forward_only"))
        num_microbatches = arguments["num_microbatches"]
        reduction = self.join(chunks)
        due = not forward_only and self._iteration() % self._config.state_digest_interval == 0
        work = Work(self._label(forward_only), num_microbatches, reduction.buckets(forward_only), due)
        self._cursor.begin(arguments["data_iterator"], num_microbatches)
        self._step = step = self._begin(work, self.know_state(chunks))
        if self._server is not None and self._num_trained and not forward_only:  # before, an optimizer may lack its tensors
            self._server.open(work.label, self.published())
        exactly = self._config.determinism == "exact"
        reduction.begin(
            step, num_microbatches, gradient_scale(chunks[0], arguments) if exactly else 1.0,
            parameters_checksum=self._parameters_checksum,
        )  # fmt: skip
        microbatches = Microbatches(
            reduction, step, forward_only=forward_only, num_chunks=len(chunks), enter=self._enter_microbatch,
            record=self._record, faults=self._faults, journal=self._driver if self._driver.rank == 0 else None,
            page=self._page, in_work=self._in_work, is_first=self._num_trained < _NUM_FIRST_STEPS,
            further_losses=dict if forward_only or not get_model_config(chunks[0]).mtp_num_layers else mtp_losses.taken,
        )  # fmt: skip
        order = self._next_order(work)
        reduction.takes(order)
        while not isinstance(order, Apply):
            if order.voids:
                reduction.void()
            if order.computes:
                self._run_pass(arguments, reduction, microbatches, order)
            else:
                self._driver.pass_ended(order.generation)
                self._reduce(order)
            order = self._next_order(work)
        if order.record.gives_up:
            self._has_given_up = True
            self._applied = (step, order, None)
            self.stepped(trained=False)
            if not forward_only:
                raise GivenUp(order.record.label)
            return []
        return self._apply(order, reduction, chunks, arguments)

    def _next_order(self, work: Work) -> Plan | Apply:
        """Wait for the next order, store its generation and return it.

        Raises `JobStopped`. Raises RuntimeError for an order of another step, of work that is
        neither `work` nor what replaces it when the step is given up, or of an older generation
        than the order that this method returned before.
        """
        order = self._driver.next_order()
        asked: Work | str
        known: tuple[Work | str, ...]
        if isinstance(order, Plan):
            step, asked, known = order.step, order.work, (work, work.given_up())
        else:
            step, asked, known = order.record.step, order.record.label, (work.label, work.given_up().label)
        if step != self._step or asked not in known:
            raise RuntimeError(f"ordered to work on {asked} (step {step}) where Megatron is at {work} (step {self._step})")
        if order.generation < self._generation:
            raise RuntimeError(f"an order of generation {order.generation} comes after one of generation {self._generation}")
        self._generation = order.generation
        if isinstance(order, Apply):
            self._settled_generation = order.generation
        if isinstance(order, Apply) or order.voids:  # the journal begins anew
            self._in_work.forget()
        return order

    def _reduce(self, order: Plan) -> None:
        assert self._reduction is not None
        self._page.enter(Phase.REDUCTION)
        self._reduction.reduce(order, note_finished=self._in_work.note_finished)

    def _run_pass(
        self,
        arguments: dict[str, Any],
        reduction: Reduction,
        microbatches: Microbatches,
        plan: Plan,
    ) -> None:
        """Run the pass that begins with `plan`, and the reduction beside it or after it.

        The first pass of a training step is timed if this rank has a stopwatch. An exception is
        raised after it was reported to the leader (`failing`), with the microbatches that it is
        charged to; InvariantViolation and `JobStopped` are raised at once.
        """
        times = not microbatches.num_passes and not arguments.get("forward_only")
        stopwatch = self._stopwatch if times else None
        queue = WorkQueue(self._driver, plan, self._extended)
        overlap = Overlap(reduction, lambda: queue.plan)
        # What is dealt after a loss is read when it is due: `trainer/read_ahead.py`,
        # Note [What is not read ahead].
        ahead = microbatches_of(plan) if plan.generation == self._settled_generation else ()
        try:
            with overlap, self._cursor.reading_ahead(ahead):
                microbatches.begin_pass(overlap)
                if stopwatch is not None:
                    self._tell_pace(stopwatch)  # of the step before: a GPU may know it only now
                    stopwatch.begin()
                run_pass(
                    arguments, queue, divisor=plan.work.num_microbatches, listener=microbatches,
                    is_first=microbatches.num_passes == 1,
                )  # fmt: skip
                num_computed = microbatches.end_pass()
                if stopwatch is not None:
                    stopwatch.end(num_computed)
                    self._tell_pace(stopwatch)
                self._driver.pass_ended(queue.plan.generation)
                self._page.enter(Phase.REDUCTION)
                overlap.finish(self._in_work.note_finished)
        except InvariantViolation:  # no microbatch caused this, so none is charged with it (INV-9)
            raise
        except Exception as error:
            innocent = is_communication_error(error) or is_device_error(error)
            at_fault = error.microbatches if isinstance(error, NotFinite) else ()
            if isinstance(error, NotFinite) and not at_fault:
                # If a loss is the cause, a rank that has the loss finds it as well, and names its
                # microbatch. The report has to come before the end of this process.
                time.sleep(self._config.deadlines.name_s)
            self._driver.failing(() if innocent else at_fault or microbatches.suspects(), error)
            raise

    def _tell_pace(self, stopwatch: Stopwatch) -> None:
        if (measured := stopwatch.take()) is not None:
            self._driver.pass_timed(*measured)

    def _extended(self, plan: Plan) -> None:
        if self._driver.rank == 0:
            self._record(trace.Extended, generation=plan.generation, step=plan.step, microbatches=microbatches_of(plan))

    def _apply(
        self, order: Apply, reduction: Reduction, chunks: list[Any], arguments: dict[str, Any]
    ) -> list[dict[str, Tensor]]:
        """Make the results the gradient and call upstream's finalize; return the losses.

        In an evaluation record the step as applied instead. The losses are those of all ids on the
        last stage, an empty list on other stages.
        """
        self._page.enter(Phase.OPTIMIZER, ())
        last = reduction.is_last_stage
        losses, loss = [], None
        if last:
            rows, on_host = reduction.committed_rows()
            losses, loss = read_losses(rows, on_host), mean_loss(on_host, reduction.device)
            mtp_losses.give(losses)
        self._applied = (self._step, order, loss)
        if arguments.get("forward_only"):
            self.stepped(trained=False)
            return losses
        if any(chunk.ddp_config.check_for_large_grads for chunk in chunks):
            warn_of_large(reduction.mean_norms(), iteration=self._iteration())
        self._window.close()
        if self._server is not None:
            self._server.close()
        reduction.apply(tuple(version.bucket for version in order.record.versions))
        config = get_model_config(chunks[0])
        tokens = None
        if config.calculate_per_token_loss:
            # Upstream broadcasts the last stage's count to all stages and sums it over the lanes.
            # So the count has to be that of this lane.
            tokens = count_tokens(rows) if last else torch.zeros([], dtype=torch.int, device=reduction.device)
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                chunks, tokens, pg_collection=arguments.get("pg_collection"), force_all_reduce=arguments.get("force_all_reduce")
            )
        return losses

    def _begin(self, work: Work, state: TrainingState) -> int:
        """Report that this rank begins the next step; return the number of the step.

        Where the step's record carries a state digest, compute the digest anew and report it.
        Raises `JobStopped`.
        """
        digest = None
        if work.digests:
            with self._page.within(Phase.DIGEST):
                digest = state.digest()
        if digest is not None:  # recorded before `begin`, after which the leader can vote on it
            self._record(trace.StateDigested, step=self._next_step, label=work.label, digest=f"{digest:016x}")
        step = self._driver.begin(work, digest=digest)
        self._next_step = step + 1
        return step

    def meet(self, round: int) -> None:
        """Wait for all live replicas at the end of training and compare their state.

        `round` counts the calls, from 0. A rank that has had no step joins the job here, with
        the ledger as its only bucket. Of its state only the counters are compared.
        """
        self.agree(Label(StepKind.END, round))

    def agree(self, label: Label, chunks: Sequence[Any] = (), optimizer: Any = None, scheduler: Any = None) -> None:
        """Wait for all live replicas and compare their state, in a step without microbatches.

        Returns when the step is committed, for which their state has to be equal. Raises
        `JobStopped`.

        The empty ledger is reduced as well: the protocol relies on no replica being able to vote on
        a step before all replicas have committed the step before. `chunks` (the model), `optimizer`
        and `scheduler` serve a rank that has had no training step.
        """
        reduction = self.join(chunks)
        work = Work(str(label), 0, reduction.buckets(forward_only=True), digests=True)
        self._step = self._begin(work, self.know_state(chunks, optimizer, scheduler))
        reduction.begin(self._step, 0, parameters_checksum=self._parameters_checksum)
        order = self._next_order(work)
        reduction.takes(order)
        while not isinstance(order, Apply):
            if order.voids:
                reduction.void()
            self._reduce(order)
            order = self._next_order(work)
        self._applied = (self._step, order, None)
        self.stepped(trained=False)

    def stepped(self, trained: bool = True) -> None:
        """Record `applied`: the optimizer has run, or the step has nothing for the optimizer.

        Does nothing without a committed step that is not recorded yet. In a training step whose
        iteration is a multiple of `--recover-digest-interval`, also computes the parameters'
        digest. The iteration is that of the committed label, so all ranks of all replicas agree.
        """
        if self._applied is None:
            return
        (step, order, loss), self._applied = self._applied, None
        self._num_evaluations = 0 if trained else self._num_evaluations
        self._num_trained += trained
        self._window.open()
        interval = self._config.digest_interval
        digests: dict[str, str] = {}
        if trained and interval and label_of(order.record.label).iteration % interval == 0:
            found = self._parameter_digest.compute()
            self._parameters_checksum, digests = found.everything, found.fields()
        self._record(
            trace.Applied, generation=order.generation, step=step, label=order.record.label, loss=loss, **digests,
        )  # fmt: skip
        self._page.enter(Phase.BETWEEN)

    def _enter_microbatch(self, microbatch: int, chunk: int) -> None:
        self._cursor.microbatch = microbatch
        self._seed(self._iteration(), microbatch, chunk)

    def _label(self, forward_only: bool) -> str:
        if not forward_only:
            return str(Label(StepKind.TRAIN, self._iteration()))
        self._num_evaluations += 1
        return str(Label(StepKind.EVALUATE, self._iteration(), self._num_evaluations))


def gradient_is_reduced(chunk: Any, force_all_reduce: bool | None = False) -> None:
    """Mark a chunk's gradient as reduced (seam `finish_grad_sync`).

    The committed gradient is the sum over lanes and replicas already.
    """
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        group.param_gather_dispatched = False
        group.grad_reduce_finished = True
