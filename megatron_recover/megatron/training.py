"""Runs one rank: from Megatron's arguments to the exit code of the process.

Under `megatron-recover run`, `begin` puts `_Training` behind the two functions of Megatron that a
training script calls (`launch/script.py`). `_Training` parses the arguments, installs the seams,
lets upstream train, and makes all replicas end together.

`pretrain` is for scripts that shall also run on CPU under torchrun. Without a launcher (no
`RankContext`) it installs no seam: upstream trains. Only the parsing differs: `--rerun-mode` is
`disabled` by default, the `--recover-*` flags are known, and bad arguments end with code 2. Where
torch finds no GPU, `cpu.py` is used.

Steps, membership and data are decided elsewhere.

torch and Megatron are imported inside functions, since the launcher imports this package to judge a
command line.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_recover import trace
from megatron_recover.authentication.admission import recording_strangers
from megatron_recover.config import (
    DRY_RUN_PASSED,
    FOR_CONSOLE,
    RankContext,
    RecoverConfig,
    rank_context,
    separate_flight_records,
    wandb_run_id,
)
from megatron_recover.control_plane.rendezvous import join_store
from megatron_recover.core import policy
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.label import Label, StepKind
from megatron_recover.faults import FaultInjector
from megatron_recover.megatron.launch import numa, script
from megatron_recover.megatron.launch.arguments import (
    adapt,
    flag_of,
    fsdp2_notes,
    gpu_refusals,
    kernel_refusals,
    not_healed,
    provider_refusals,
    recover_config,
    refusals,
    without_interval,
)
from megatron_recover.megatron.launch.batch_schedule import take_default_batch
from megatron_recover.megatron.launch.device import device_line, other_device
from megatron_recover.megatron.launch.parsing import bad_input_ends, parse, prepare_device, refuse
from megatron_recover.progress_page import ProgressPage
from megatron_recover.trace import ring
from megatron_recover.trace.node_clock import NodeClock

if TYPE_CHECKING:
    from megatron_recover.control_plane.rank_driver import RankDriver
    from megatron_recover.data_plane.transport import Endpoint
    from megatron_recover.megatron.checkpoint.checkpoints import Checkpoints
    from megatron_recover.megatron.commit import CommitLoop
    from megatron_recover.megatron.newcomer import Newcomer
    from megatron_recover.megatron.seams import seams
    from megatron_recover.trainer.state_server import StateServer
    from megatron_recover.trainer.state_window import StateWindow

Provider = script.Provider


def begin(context: RankContext) -> None:
    """Put the training of this rank behind Megatron's entry points, before its script runs.

    Bad input ends the process with exit code 2. Under the launcher the wrapped `pretrain` never
    returns. It raises SystemExit with the exit code, or what the training raised. If a run of W&B
    does not end, the process ends at once with the exit code. In the dry run `pretrain` ends before
    training, with code 100. docs/reference/exit_codes.md lists the exit codes.
    """
    if context.dry_run:
        with bad_input_ends():  # first: nothing has replaced a function of Megatron yet
            from megatron_recover.megatron.seams.judging import judge_megatron

            for line in judge_megatron(accepts_unknown=flag_of("accept_unknown_megatron") in sys.argv):
                print(f"{FOR_CONSOLE}{line}", flush=True)
    prepare_device()
    with bad_input_ends():
        numa.bind(context)
    script.wrap(_Training(context))


def pretrain(
    configure: Callable[[Namespace], Any],
    datasets_provider: Callable[..., Any],
    model_type: Any,
    forward_step: Callable[..., Any],
    *,
    extra_args_provider: Provider | None = None,
    args_defaults: dict[str, Any] | None = None,
    **others: Any,
) -> None:
    """Parse Megatron's arguments and train; recover from faults under `megatron-recover run`.

    `configure(args)` returns the configuration for upstream's `pretrain`. `extra_args_provider` and
    `args_defaults` are those of upstream's `parse_and_validate_args`, all others those of its
    `pretrain`. Under the launcher this is the two calls of upstream's scripts; see `begin`.
    """
    context = rank_context()
    if context is not None and not script.is_wrapped():
        begin(context)
    import megatron.training
    from megatron.training.arguments import parse_and_validate_args

    if script.is_wrapped():
        args = parse_and_validate_args(extra_args_provider=extra_args_provider, args_defaults=args_defaults or {})
    else:
        args = parse(extra_args_provider, args_defaults or {})
    with contextlib.nullcontext() if context is None else bad_input_ends():
        configuration = configure(args)
    megatron.training.pretrain(configuration, datasets_provider, model_type, forward_step, **others)


def _start_of(context: RankContext) -> str:
    """Return a text that only this start of a job has, and all of its ranks."""
    return f"{context.run_dir} {context.coordinator} {context.started_at!r}"


class _Training:
    """Builds and runs all parts of one rank of a recoverable job (`script.EntryPoints`)."""

    def __init__(self, context: RankContext) -> None:
        from megatron_recover.authentication.key import inherited_key
        from megatron_recover.megatron.reporting import TensorBoardFactory
        from megatron_recover.megatron.wandb_run import WandbFactory

        self._context, self._key = context, inherited_key()
        self._page = ProgressPage.inherited()
        self._clock = NodeClock.inherited(context)
        self._log = ring.log_of_rank(context, self._clock)
        self._clock.report_refused(
            lambda ahead_s: self._log.record(
                trace.ClockRefused(replica=context.replica, rank=context.rank, ahead_s=round(ahead_s, 3))
            )
        )
        self._faults = FaultInjector.of(
            context.faults,
            replica=context.replica,
            rank=context.rank,
            record=lambda **fields: self._log.record(trace.Fault(**fields)),
        )
        self._installation: seams.Installation
        self._settings: tuple[Namespace, RecoverConfig] | None = None
        self._saves_in_background = False
        self._driver: RankDriver | None = None
        self._tensorboard = TensorBoardFactory(lambda: self._driver)
        self._wandb = WandbFactory(lambda: self._driver, wandb_run_id(), _start_of(context))

    def parse(
        self, extra_args_provider: Provider | None, args_defaults: Mapping[str, Any], *, ignores_unknown: bool = False
    ) -> Namespace:
        """Return the arguments of the script and of Megatron, checked and adapted for this rank.

        Bad input ends the process with exit code 2.
        """
        self._settings = self._arguments(extra_args_provider, args_defaults, ignores_unknown)
        return self._settings[0]

    def pretrain(self, arguments: dict[str, Any]) -> None:
        """Train until the job ends, and end the process as `begin` describes.

        `arguments` are those of upstream's `pretrain`, by name. The process ends with exit code 2
        if `parse` was not called before, or for an argument that is not supported, such as a store.
        """
        with bad_input_ends():
            if self._settings is None:
                raise ValueError(
                    f"{sys.argv[0]} calls pretrain without arguments of Megatron; call parse_and_validate_args of "
                    "megatron.training.arguments first, as upstream's pretrain_gpt.py does"
                )
            if arguments.get("process_non_loss_data_func") is not None:
                raise ValueError("process_non_loss_data_func is not supported: no replica sees a whole batch; leave it out")
            if arguments.pop("store", None) is not None:
                raise ValueError("store is not supported: each replica has a store of its own; leave it out")
            refuse(provider_refusals(self._settings[0], arguments["train_valid_test_dataset_provider"]))
        sys.exit(self._run(*self._settings, arguments))

    def is_writer(self) -> bool:
        """Return whether this rank's replica is the one that logs and saves at present."""
        return self._driver.is_writer() if self._driver is not None else self._context.replica == 0

    def _run(self, args: Namespace, config: RecoverConfig, arguments: dict[str, Any]) -> int:
        """Train until the job ends and return the exit code.

        A dry run returns before training begins. If the training raises InvariantViolation, the
        code is 14. A SystemExit of upstream with code 0 or None counts as the end of training.
        Raises `JobStopped` and whatever else the training raises.
        """
        from megatron.training import pretrain, print_rank_0

        from megatron_recover.control_plane.rank_driver import JobStopped
        from megatron_recover.megatron.checkpoint import disk_format, resuming
        from megatron_recover.megatron.data.index_cache import building_cache_once

        if self._context.dry_run:
            with bad_input_ends(), contextlib.closing(_endpoint(config, self._context, self._key, self._log.record)):
                refuse(disk_format.refusals(args))
                resuming.judge(args, config.resume_data)
            return DRY_RUN_PASSED
        if self._context.rank == 0 and not self._context.newcomer and (note := resuming.judge(args, "other")):
            print(f"megatron-recover: {note}", flush=True)
        timeout = timedelta(seconds=config.deadlines.leader_s)
        store = join_store(self._context, self._key, timeout, self._log.record, self._clock)
        driver = self._driver = self._create_driver(config)
        checkpoints, loop = self._install(args, config, driver)
        try:
            provider = building_cache_once(
                arguments["train_valid_test_dataset_provider"], args, patience_s=config.deadlines.build_s, page=self._page
            )
            script.original(pretrain)(**arguments | {"train_valid_test_dataset_provider": provider, "store": store})
        except SystemExit as stop:  # Megatron's way to end early; `JobStopped` is one as well
            if stop.code not in (None, 0):
                raise
            if isinstance(stop, JobStopped):  # as long as the others train, only a replica that leaves is stopped with 0
                driver.close()
                return self._ended(ExitCode.OK)
        except InvariantViolation as error:
            traceback.print_exc()
            driver.failing((), error)
            return ExitCode.INVARIANT_VIOLATED
        except BaseException as error:
            driver.failing((), error)
            raise
        finally:
            loop.close()
        if args.iteration >= args.train_iters:
            print_rank_0(f"nothing was left to train: the checkpoint is of iteration {args.iteration} of {args.train_iters}")
        checkpoints.settle(loop.meet, has_trained=loop.has_trained or self._context.newcomer)
        if not loop.has_joined:  # nothing was left to do; all replicas still have to end together
            loop.meet(0)
        try:
            driver.close()
        except BaseException:
            self._wandb.end()
            raise
        # Only now: until the job ends, this replica may save and may become the writer.
        return self._ended(policy.exit_code(sorted(driver.requests)))

    def _ended(self, code: int) -> int:
        """End this rank's run at Weights & Biases, if it has one, and return `code`."""
        if not self._wandb.end():
            from megatron_recover.megatron import wandb_run

            wandb_run.end_process(code)
        return code

    # --- Setting up -------------------------------------------------------------------------------

    def _arguments(
        self, extra_args_provider: Provider | None, args_defaults: Mapping[str, Any], ignores_unknown: bool
    ) -> tuple[Namespace, RecoverConfig]:
        import torch

        from megatron_recover.megatron.seams import seams

        with bad_input_ends():  # only now: a script may replace functions of Megatron before it calls us
            self._installation = seams.Installation(seams.load(), seams.load_anchors())
        self._installation.install({"tensorboard": self._tensorboard.set_writer, "wandb": self._wandb.set_writer})
        # Upstream creates a one-logger in the last rank of each world, and each replica is a world.
        # Fully reshardable: a checkpoint must not depend on the number of lanes. Without a
        # persistent worker upstream would drop --async-save; none is started here.
        args = parse(
            extra_args_provider, args_defaults,
            {"enable_one_logger": False, "dist_ckpt_optim_fully_reshardable": True, "use_persistent_ckpt_worker": True},
            ignores_unknown=ignores_unknown,
        )  # fmt: skip
        with bad_input_ends():
            self._installation.check_arguments(args)
            lanes = args.world_size // (
                args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
            )
            take_default_batch(args, sys.argv[1:], args_defaults, lanes=lanes, replicas=self._context.num_replicas)
            self._saves_in_background = args.async_save
            args.async_strategy = "mcore"  # the other is for processes of a package that nothing here starts
            adapted = adapt(args, lanes=lanes, replica=self._context.replica, replicas=self._context.num_replicas)
            args.align_param_gather = False  # upstream's schedules align; here hooks gather
            found = [*refusals(args, lanes=lanes), *without_interval(args)]
            config = recover_config(args)
            num_ranks = self._context.num_ranks * self._context.num_replicas
            num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            found += gpu_refusals(config, num_ranks=num_ranks, num_gpus=num_gpus, deterministic=args.deterministic_mode)
            found += kernel_refusals(args, on_gpu=num_gpus > 0)
            refuse(found)
            if self._context.dry_run:
                used = -(-num_ranks // config.ranks_per_gpu)
                notes = [*adapted, *fsdp2_notes(args, lanes=lanes), *not_healed(args)]
                for line in (*notes, device_line(num_gpus=num_gpus, num_used=used)):
                    print(f"{FOR_CONSOLE}{line}", flush=True)
            args.flight_recorder_dump_path = separate_flight_records(
                args.flight_recorder_dump_path, self._context.replica, self._context.run_dir
            )
            # A shorter timeout of collectives would end a replica that is only slow.
            args.distributed_timeout_minutes = config.deadlines.deadline_s / 60
            return args, config

    def _create_driver(self, config: RecoverConfig) -> RankDriver:
        from megatron_recover.control_plane.rank_driver import RankDriver

        with bad_input_ends():
            endpoint = _endpoint(config, self._context, self._key, self._log.record)
        return RankDriver(
            self._context, config, endpoint,
            key=self._key, clock=self._clock, record=self._log.record, faults=self._faults, page=self._page,
        )  # fmt: skip

    def _install(self, args: Namespace, config: RecoverConfig, driver: RankDriver) -> tuple[Checkpoints, CommitLoop]:
        from megatron.training import get_args

        from megatron_recover.fsdp2.gradients import scale_gradients
        from megatron_recover.fsdp2.loading import chained_state_dict
        from megatron_recover.fsdp2.parameter_gradient import Sharding
        from megatron_recover.megatron.checkpoint.boundary import Boundary
        from megatron_recover.megatron.commit import CommitLoop
        from megatron_recover.megatron.data import alike as parts
        from megatron_recover.megatron.data.fill_in_middle import FillInMiddle
        from megatron_recover.megatron.data.index_builder import IndexBuilder
        from megatron_recover.megatron.data.loaders import Loaders, MicrobatchCursor, never_ends
        from megatron_recover.megatron.data.randomness import seeding
        from megatron_recover.megatron.gradient_buffers import gradients_of, sums_in_fp32
        from megatron_recover.megatron.newcomer import Entrance, Newcomer, Progress
        from megatron_recover.megatron.reporting import LogLine
        from megatron_recover.megatron.state import Carried, counters
        from megatron_recover.trainer.state_window import StateWindow

        originals = self._installation.originals
        self._wandb.finish_s = config.deadlines.close_s

        def before_joining() -> None:
            with bad_input_ends():
                refuse(other_device(self._context.gpu))
            checkpoints.tell_what_was_loaded()

        cursor, window, seed = MicrobatchCursor(self._page, args.num_workers), StateWindow(), seeding(args.seed)
        around = functools.cache(lambda: parts.surroundings(args, exact=config.determinism == "exact"))
        carried: dict[str, Carried] = {}
        loop = CommitLoop(
            driver, config, originals, cursor=cursor, seed=seed, carried=carried,
            iteration=lambda: args.curr_iteration + 1,
            alike=lambda: parts.arguments(args, driver.rank) | around(),
            configuration=lambda: parts.arguments(args, driver.rank, unchanging=True) | around(),
            counters=lambda: counters(args), log=self._log, faults=self._faults, page=self._page,
            before_joining=before_joining, window=window, server=self._server(config, driver, window),
            gradients=gradients_of(args),
        )  # fmt: skip
        checkpoints = self._create_checkpoints(args, config, driver, loop, window)

        def flush() -> None:
            self._tensorboard.flush()
            self._wandb.flush()

        progress = Progress(get_args)
        carried |= {**progress.carried(), **loop.carried(), **checkpoints.carried()}
        entrance = Entrance(
            originals["load_checkpoint"], originals["train"], enter=self._enter(config, loop),
            newcomer=lambda arguments: Newcomer(
                arguments, loop.know_state(arguments.model, arguments.optimizer, arguments.opt_param_scheduler), get_args,
                carried=carried, cursor=cursor, seed=seed, train_step=originals["train_step"], faults=self._faults,
            ),
        )  # fmt: skip
        # A newcomer counts from the start of the run, or nobody would ask for the end in time.
        began = self._context.started_at if self._context.newcomer else None
        boundary = Boundary(driver, checkpoints, originals["exit"], get_args, progress.passed, began)
        boundary.take_over(args)
        self._installation.install(
            {
                **loop.replacements(),
                **checkpoints.replacements(),
                **entrance.replacements(),
                "chained_state_dict": chained_state_dict,
                "scale_gradients": scale_gradients,
                "fully_shard": Sharding(originals["fully_shard"], in_fp32=sums_in_fp32(args)).fully_shard,
                "compile_helpers": IndexBuilder(originals["compile_helpers"], config.deadlines.build_s).compile,
                "cyclic": never_ends,
                "data_loader": Loaders(cursor, get_args).build,
                "fim": FillInMiddle(originals["fim"]),
                "log_line": LogLine(driver, self._context.num_replicas, originals["log_line"], flush).print_rank_last,
                "exit": boundary.decide,
            }
        )
        missing = self._installation.missing()
        if missing:
            raise RuntimeError(f"nothing was installed for {', '.join(missing)}")
        return checkpoints, loop

    def _create_checkpoints(
        self, args: Namespace, config: RecoverConfig, driver: RankDriver, loop: CommitLoop, window: StateWindow
    ) -> Checkpoints:
        from megatron.training import get_args

        from megatron_recover.megatron.checkpoint.checkpoints import Checkpoints
        from megatron_recover.megatron.data import alike as parts

        return Checkpoints(
            driver, self._installation.originals, get_args,
            agree=lambda iteration, *state: loop.agree(Label(StepKind.SAVE, iteration), *state),
            save=args.save, samples=parts.samples(args) if args.save and driver.rank == 0 else {},
            deadlines=config.deadlines, log=self._log, faults=self._faults,
            window=window if self._saves_in_background else None, run_id=self._wandb.run_id,
            is_newcomer=self._context.newcomer,
        )  # fmt: skip

    def _server(self, config: RecoverConfig, driver: RankDriver, window: StateWindow) -> StateServer | None:
        """Return what serves the state of this rank to newcomers; None if none are formed."""
        from megatron_recover.trainer.state_server import StateServer

        if config.heal == "off":
            return None
        context = self._context

        def digested(label: str, digest: int) -> None:
            self._log.record(
                trace.StateDigested(
                    replica=context.replica, rank=context.rank, step=driver.step, label=label, digest=f"{digest:016x}"
                )
            )
            driver.digested(label, digest)

        return StateServer(
            key=self._key, replica=context.replica, rank=context.rank, host=context.address, ports=context.ports,
            deadlines=config.deadlines, digested=digested, window=window,
            report=recording_strangers(self._log.record, replica=context.replica, rank=context.rank),
        )  # fmt: skip

    def _enter(self, config: RecoverConfig, loop: CommitLoop) -> Callable[[Newcomer], None] | None:
        """Return what brings this rank into the job if it is one of a newcomer, else None."""
        from megatron_recover.trainer.state_reader import StateReader

        context = self._context
        if not context.newcomer:
            return None

        def enter(newcomer: Newcomer) -> None:
            reader = StateReader(
                key=self._key, replica=context.replica, rank=context.rank, deadlines=config.deadlines, faults=self._faults
            )  # fmt: skip
            try:
                loop.enter(newcomer, reader)
            finally:
                reader.end()

        return enter


def _endpoint(config: RecoverConfig, context: RankContext, key: bytes, record: Callable[[trace.Event], None]) -> Endpoint:
    """Open this rank's endpoint on the data plane and return it.

    Raises ValueError where the transport does not serve the device.
    """
    import torch

    from megatron_recover.data_plane.endpoints import open_endpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return open_endpoint(
        config.transport, key=key, rank=context.rank, num_ranks=context.num_ranks, device=device,
        deadlines=config.deadlines, report=recording_strangers(record, replica=context.replica, rank=context.rank),
        host=context.address, ports=context.ports,
    )  # fmt: skip
