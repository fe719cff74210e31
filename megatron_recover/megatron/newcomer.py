"""Megatron's side of a newcomer: a rank of a replica that is formed while others train.

Upstream builds the model, the optimizer and the data of a newcomer as of every rank. Loading is
skipped, since the state comes from the other replicas. `Entrance` stands before upstream's training
loop: there the newcomer is prepared, and waits until it may enter. How it reads the state, and when
it may enter, is decided elsewhere.

Note [Prepared]
    An optimizer creates its tensors in its first step, and libraries compile, tune and connect when
    they are first used. The others shall not wait for any of that. So a newcomer runs upstream's
    own training step once, with a few microbatches and with a gradient of zeros: that step is
    successful whatever the loss scale is. It changes parameters, optimizer, scheduler and scaler,
    all of which are overwritten (`Newcomer.install`). Nothing is reduced over replicas, and no
    protocol runs. Of what only the reduction uses, the groups of lanes are connected here; its
    kernels run for the first time in the step with which the newcomer enters.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_recover.core.progress import Phase
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.fsdp2 import gradients, shards
from megatron_recover.megatron import late_gather, mtp_losses
from megatron_recover.megatron.data.loaders import MicrobatchCursor, of_loaders
from megatron_recover.megatron.schedule.passes import run_pass
from megatron_recover.megatron.state import CARRIED, Carried, TrainingState
from megatron_recover.trainer.state import Scalar, State
from megatron_recover.trainer.work_queue import Task


class Progress:
    """The progress of Megatron, as its training loop counts it in variables of its own."""

    def __init__(self, get_args: Callable[[], Namespace]) -> None:
        """Use Megatron's arguments; nothing is read yet."""
        self._get_args = get_args
        self._operations: int | float | None = None

    def passed(self, num_floating_point_operations_so_far: int | float) -> None:
        """Note the count of operations that Megatron has after an iteration."""
        self._operations = num_floating_point_operations_so_far

    def carried(self) -> dict[str, Carried]:
        """Return the finished iterations and the operations so far, by name."""
        return {
            "iteration": Carried(lambda: self._get_args().curr_iteration, self._put_iteration),
            # As text: the integer soon has more than 64 bits, and no digit may be lost.
            "num_floating_point_operations_so_far": Carried(self._get_operations, self._put_operations),
        }

    def _put_iteration(self, iteration: int) -> None:
        args = self._get_args()
        args.iteration = args.curr_iteration = iteration

    def _get_operations(self) -> str:
        begun_with = self._get_args().num_floating_point_operations_so_far
        return repr(begun_with if self._operations is None else self._operations)

    def _put_operations(self, text: str) -> None:
        self._get_args().num_floating_point_operations_so_far = ast.literal_eval(text)


class TrainArguments(NamedTuple):
    """The arguments of upstream's `train` that a newcomer uses, under upstream's names."""

    forward_step_func: Any
    model: list[Any]
    optimizer: Any
    opt_param_scheduler: Any
    train_data_iterator: Any
    valid_data_iterator: Any
    config: Any
    p2p_communicator: Any
    pg_collection: Any


class Newcomer:
    """One rank of a newcomer, from the end of its building to its entrance."""

    def __init__(
        self,
        arguments: TrainArguments,
        state: TrainingState,
        get_args: Callable[[], Namespace],
        *,
        carried: Mapping[str, Carried],
        cursor: MicrobatchCursor,
        seed: Callable[[int, int, int], None],
        train_step: Callable[..., Any],
        faults: FaultInjector | None = None,
    ) -> None:
        """Store the parts of this rank.

        - `state`: that of model, optimizer and scheduler of `arguments`.
        - `carried`: the same names as on the replicas whose state is read.
        - `cursor`: that of the data iterators of `arguments`.
        - `seed(iteration, microbatch, chunk)` sets the random state of a microbatch.
        - `train_step`: upstream's function of this name.
        """
        self.arguments, self.state = arguments, state
        self._get_args, self._carried, self._train_step = get_args, carried, train_step
        self._cursor, self._seed, self._faults = cursor, seed, faults

    # --- before the state is read -----------------------------------------------------------------

    def prepare(self) -> None:
        """Create all tensors of the state, and use once what a step uses (Note [Prepared]).

        Call this once, on all ranks of the replica together. Raises RuntimeError if upstream skips
        the step, and ValueError for state that cannot be filled in place.
        """
        if self._faults is not None:
            self._faults.at(FaultPoint.FORM)
        arguments, args = self.arguments, self._get_args()
        for chunk in arguments.model:
            chunk.train()
        with self._cursor.page.within(Phase.FIRST_STEPS), _as_in_training(arguments, args):
            _, skipped, *_ = self._train_step(
                arguments.forward_step_func, arguments.train_data_iterator, arguments.model, arguments.optimizer,
                arguments.opt_param_scheduler, arguments.config, self._into_a_dump, iteration=args.iteration,
                pg_collection=arguments.pg_collection, p2p_communicator=arguments.p2p_communicator,
            )  # fmt: skip
        if skipped:
            raise RuntimeError("Megatron has skipped a step whose gradient is zero")
        get_moe_metrics_tracker().clear()
        for group, device in late_gather.lanes_of(arguments.model):
            torch.distributed.all_reduce(torch.zeros(1, device=device), group=group)
        copies = copies_in(self.state)
        if copies:
            raise ValueError(f"this state cannot be filled in place: {', '.join(copies)}")

    def _into_a_dump(self, **arguments: Any) -> list[dict[str, Tensor]]:
        """Run a few microbatches in place of upstream's forward-backward function.

        Leaves a gradient of zeros, finalized. Returns the reports of the losses.
        """
        config, num_microbatches = get_model_config(arguments["model"][0]), arguments["num_microbatches"]
        self._cursor.begin(arguments["data_iterator"], num_microbatches)
        dump = _Dump(self._enter)
        run_pass(
            arguments, _Few(min(num_microbatches, config.pipeline_model_parallel_size)), divisor=num_microbatches, listener=dump
        )
        for chunk in arguments["model"]:
            if shards.is_sharded(chunk):
                gradients.zero(chunk)
            else:
                chunk.zero_grad_buffer()
        tokens = None
        if config.calculate_per_token_loss:
            tokens = torch.ones([], dtype=torch.int, device=next(arguments["model"][0].parameters()).device)
        config.finalize_model_grads_func(arguments["model"], tokens, pg_collection=arguments["pg_collection"])
        return dump.reports

    def _enter(self, microbatch: int, chunk: int) -> None:
        self._cursor.microbatch = microbatch
        self._seed(self._get_args().iteration + 1, microbatch, chunk)

    # --- when it was read -------------------------------------------------------------------------

    def install(self, scalars: Mapping[str, Scalar]) -> None:
        """Set all scalars of the state as they were on another replica, and what follows from them.

        `scalars` are those of its state as `published`, at the beginning of the training step that
        this rank enters with. The tensors must be there already. Call this on all ranks of the
        replica together. Then `state.scalars()` equals the scalars that are not `Carried`. Raises
        ValueError with the names of those that do not, and of those that only one side has.
        """
        args = self._get_args()
        of_state = {name: value for name, value in scalars.items() if not name.startswith(f"{CARRIED}.")}
        for name, value in self.state.assign(of_state).items():
            setattr(args, name, value)
        beside = {name.partition(".")[2]: value for name, value in scalars.items() if name not in of_state}
        if beside.keys() != self._carried.keys():
            raise ValueError(f"what is carried differs: {sorted(beside.keys() ^ self._carried.keys())}")
        for name, value in beside.items():
            self._carried[name].put(value)
        if unlike := different(self.state.scalars(), of_state):
            raise ValueError(f"scalars of the state that cannot be set: {', '.join(unlike)}")
        self._follow(args)

    def _follow(self, args: Namespace) -> None:
        """Set what follows from the scalars, as upstream does when it has loaded a checkpoint."""
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        arguments = self.arguments
        for iterators, consumed in (
            (arguments.train_data_iterator, args.consumed_train_samples),
            (arguments.valid_data_iterator, args.consumed_valid_samples),
        ):
            for iterator in of_loaders(iterators):
                iterator.move(consumed)
        if any(late_gather.is_late(chunk) for chunk in arguments.model):
            # Upstream's first step computes with the parameters as they are.
            from megatron.training.training import force_param_sync

            with torch.no_grad():
                force_param_sync(arguments.model, arguments.optimizer)


def copies_in(state: State) -> list[str]:
    """Return the names of the tensors that `State.tensors` makes anew with each call."""
    one, other = state.tensors(), state.tensors()  # both kept, so that no memory is used twice
    return [a.name for a, b in zip(one, other, strict=True) if a.data.data_ptr() != b.data.data_ptr()]


def different(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> list[str]:
    """Return the names whose scalars a digest would tell apart, in the order of the names."""
    return sorted(name for name in one.keys() | other.keys() if repr(one.get(name)) != repr(other.get(name)))


@contextlib.contextmanager
def _as_in_training(arguments: TrainArguments, args: Namespace) -> Iterator[None]:
    """Let the body train as in the first iteration of upstream's `train`, which sets this itself.

    That is what a step reads of `config`, and that no hook gathers parameters.
    """
    from megatron.training import get_timers
    from megatron.training.training import (
        disable_forward_pre_hook,
        enable_forward_pre_hook,
        finalize_model_grads,
        should_disable_forward_pre_hook,
    )

    config = arguments.config
    before = {name: getattr(config, name) for name in ("grad_scale_func", "timers", "finalize_model_grads_func")}
    config.grad_scale_func, config.timers = arguments.optimizer.scale_loss, get_timers()
    config.finalize_model_grads_func = config.finalize_model_grads_func or finalize_model_grads
    has_hooks = should_disable_forward_pre_hook(args)
    if has_hooks:
        disable_forward_pre_hook(arguments.model, param_sync=False)
    try:
        yield
    finally:
        if has_hooks:
            enable_forward_pre_hook(arguments.model)
        for name, value in before.items():
            setattr(config, name, value)


class _Few:
    """A queue with the first microbatches of a step (`schedule.pipeline.Queue`)."""

    def __init__(self, num_microbatches: int) -> None:
        self._tasks = deque(Task(microbatch, (), 0) for microbatch in range(num_microbatches))

    def prepare(self) -> None:
        pass

    def next(self) -> Task | None:
        return self._tasks.popleft() if self._tasks else None

    def has_ended(self) -> bool:
        return not self._tasks


class _Dump:
    """Takes what microbatches report, and drops their tokens (`schedule.pipeline.Listener`)."""

    def __init__(self, enter: Callable[[int, int], None]) -> None:
        self._enter = enter
        self.reports: list[dict[str, Tensor]] = []

    def forward_begins(self, task: Task, chunk: int) -> None:
        self._enter(task.microbatch, chunk)

    def forward_ended(self, task: Task, chunk: int, tokens: Tensor, losses: dict[str, Tensor] | None) -> None:
        mtp_losses.taken()
        if losses is not None:
            self.reports.append(losses)

    def backward_begins(self, task: Task, chunk: int, last: bool) -> None:
        pass

    def backward_ended(self, task: Task, chunk: int) -> None:
        pass


class Entrance:
    """Stands before upstream's loading and training (seams `load_checkpoint` and `train`)."""

    def __init__(
        self,
        load_checkpoint: Callable[..., Any],
        train: Callable[..., Any],
        *,
        newcomer: Callable[[TrainArguments], Newcomer],
        enter: Callable[[Newcomer], None] | None,
    ) -> None:
        """Use upstream's functions behind the two seams.

        `enter(newcomer)` is called with a newcomer that is prepared; it returns when the state is
        installed and the newcomer may begin its first step. None: this rank is none of a newcomer,
        and both seams are upstream's functions.
        """
        self._load_checkpoint, self._train, self._newcomer, self._enter = load_checkpoint, train, newcomer, enter
        self._signature = inspect.signature(train)

    def replacements(self) -> dict[str, Any]:
        """Return the replacement for each of the two seams, by the seam's name."""
        return {"load_checkpoint": self.load_checkpoint, "train": self.train}

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return iteration and floating-point operations of what upstream loads.

        A newcomer loads nothing, so both are 0, whether there is a checkpoint or not.
        """
        return self._load_checkpoint(*args, **kwargs) if self._enter is None else (0, 0)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Call upstream's `train`; a newcomer first waits until it may enter."""
        if self._enter is not None:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            newcomer = self._newcomer(TrainArguments(**{name: bound.arguments[name] for name in TrainArguments._fields}))
            newcomer.prepare()
            self._enter(newcomer)
        return self._train(*args, **kwargs)
