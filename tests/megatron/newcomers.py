"""A replica trains as real processes with upstream's real `pretrain`, and a newcomer goes on from a copy of its state.

`go_on(flags, num_ranks)` returns what the ranks of both have found. Each has its world for itself; between them are files.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
import re
import shutil
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_recover.core.values import Work
from megatron_recover.trainer.state import Scalar
from tests.forks import CONTEXT, results_of
from tests.megatron.processes import Round, ScriptedDriver

DEADLINE_S = 120.0
ENTERS = 4
"""The newcomer enters with this training step."""
SAVED = 2
"""The iteration of the checkpoint, if there is one."""
_OF_THIS_RUN = re.compile(r"^ \[[^]]*\]|(elapsed time per iteration \(ms\)|lm loss|number of \w+ iterations): +[0-9.E+]+ \|")
"""What differs in the log of Megatron: times, and what it averages with the iteration before, unless that was its first."""

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
    "--train-iters 6 --lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1 --clip-grad 1.0 --weight-decay 0.01 "
    "--seed 1234 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data --log-interval 1 --eval-iters 1 --eval-interval 2 "
    "--split 80,10,10 --recover-determinism exact --recover-bucket-elements 8000 --recover-rebalance off "
)


class Copied(msgspec.Struct, frozen=True):
    """The state of a rank at the beginning of a training step."""

    tensors: list[tuple[str, Tensor]]
    scalars: dict[str, Scalar]
    digest: int
    layout: int


class Found(msgspec.Struct, frozen=True):
    """What a rank has found from the step on with which the newcomer enters."""

    at_entrance: Copied
    steps: list[tuple[str, list[range]]]
    """Label of each step, and the samples of its first microbatch in each iterator."""
    at_end: Copied
    ends: list[Any]
    """What Megatron's training loop returns: iterations and floating-point operations."""
    configuration: dict[str, str]
    """What is compared with a newcomer's of the arguments, at the time when this rank joins."""
    saves: list[int]
    """Iterations that Megatron asks to save."""
    log: list[str]
    """Lines of Megatron's log about the first and the third iteration and evaluation from then on, without times."""


class Rank(ScriptedDriver):
    """The driver of a rank of one replica that computes all microbatches itself."""

    def __init__(self, rank: int) -> None:
        self.rank, self.held = rank, {}
        self.begun: list[tuple[str, list[range]]] = []
        self.before: Callable[[str], None] = lambda label: None
        self.cursor: Any = None

    def begin(self, work: Work, requests: Sequence[str] = (), digest: int | None = None) -> int:
        self._script = [Round(passes=(tuple(range(work.num_microbatches)),))]
        if self.begun or work.label == f"train {ENTERS}":
            self.begun.append((work.label, [iterator.indices(0) for iterator in self.cursor._iterators]))
        self.before(work.label)
        return super().begin(work, requests, digest)


def go_on(flags: str, num_ranks: int = 1, *, resumes: bool = False) -> tuple[list[Found], list[Found]]:
    """Train from the beginning, and from the copied state; return what each rank of the two has found.

    `resumes`: the first begins with a checkpoint, which is gone when the newcomer is formed.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        if resumes:
            _start("first", f"{flags} --save {saved} --save-interval {SAVED} --exit-interval {SAVED}", num_ranks, folder)
            flags += f" --load {saved} --exit-on-missing-checkpoint"
        donors = _start("donor", flags, num_ranks, folder)
        shutil.rmtree(saved, ignore_errors=True)
        return donors, _start("newcomer", flags, num_ranks, folder)


def _start(kind: str, flags: str, num_ranks: int, folder: str) -> list[Found]:
    place = Path(folder) / kind
    place.mkdir()
    ranks = [
        CONTEXT.Process(target=_rank, args=(kind, flags, num_ranks, rank, folder), daemon=kind != "first")
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    return [pickle.loads(path.read_bytes()) for path in results_of(ranks, place, DEADLINE_S)]


def copy_of(state: Any) -> Copied:
    return Copied(
        [(tensor.layout, tensor.data.clone()) for tensor in state.tensors()],
        state.scalars(), state.digest(), state.layout_digest(),
    )  # fmt: skip


def _rank(kind: str, flags: str, num_ranks: int, rank: int, folder: str) -> None:
    place = Path(folder) / kind
    try:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, and not used: there is a store
        logging.getLogger("megatron").setLevel(logging.ERROR)
        sys.argv = ["pretrain_gpt.py", *FLAGS.split(), *flags.replace("FOLDER", folder).split()]
        store = dist.FileStore(str(place / "store"), num_ranks)
        donor = Path(folder) / "donor" / f"result.{rank}"
        found = None
        if kind == "first":
            with contextlib.suppress(SystemExit):  # how Megatron ends at `--exit-interval`
                _train(kind, store, lambda: None)
        else:
            found = _train(kind, store, lambda: pickle.loads(donor.read_bytes()).at_entrance)
        (place / f"result.{rank}").write_bytes(pickle.dumps(found))
        dist.barrier()
    except BaseException:
        (place / f"error.{rank}").write_text(f"{kind} rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


class Training:
    """One rank's training by upstream's loop, with what a rank of a job puts into it."""

    def __init__(self, kind: str, args: Namespace, originals: Mapping[str, Callable[..., Any]], copied: Callable[[], Copied]):
        from megatron.training import get_args

        from megatron_recover.megatron import newcomer as newcomers
        from megatron_recover.megatron.commit import CommitLoop
        from megatron_recover.megatron.data import alike
        from megatron_recover.megatron.data.loaders import MicrobatchCursor
        from megatron_recover.megatron.data.randomness import seeding
        from megatron_recover.megatron.launch.arguments import recover_config
        from megatron_recover.megatron.state import Carried, counters

        self.kind, self.originals, self.copied, self.get_args = kind, originals, copied, get_args
        self.driver, self.cursor, self.seed = Rank(args.rank), MicrobatchCursor(), seeding(args.seed)
        self.driver.cursor, self.driver.before = self.cursor, self.copy
        self.at_entrance: list[Copied] = []
        self.ends: list[Any] = []
        self.saves: list[int] = []
        self.configuration: dict[str, str] = {}
        self.carried: dict[str, Carried] = {}
        self.loop = CommitLoop(
            self.driver, recover_config(args), originals, cursor=self.cursor, seed=self.seed,
            iteration=lambda: args.curr_iteration + 1, alike=dict, counters=lambda: counters(args), carried=self.carried,
            before_joining=lambda: self.configuration.update(alike.arguments(args, args.rank, unchanging=True)),
        )  # fmt: skip
        self.progress = newcomers.Progress(get_args)
        self.carried |= {**self.progress.carried(), **self.loop.carried()}

    def replacements(self) -> dict[str, Any]:
        from megatron_recover.megatron.data.loaders import Loaders, never_ends
        from megatron_recover.megatron.newcomer import Entrance

        @functools.wraps(self.originals["train"])
        def train(*arguments: Any, **others: Any) -> Any:
            result = self.originals["train"](*arguments, **others)
            self.ends.extend(result)
            return result

        entrance = Entrance(
            self.originals["load_checkpoint"], train, newcomer=self.newcomer,
            enter=self.enter if self.kind == "newcomer" else None,
        )  # fmt: skip
        own = {"cyclic": never_ends, "data_loader": Loaders(self.cursor, self.get_args).build}
        return {**self.loop.replacements(), **entrance.replacements(), **own}

    def newcomer(self, arguments: Any) -> Any:
        from megatron_recover.megatron.newcomer import Newcomer

        state = self.loop.know_state(arguments.model, arguments.optimizer, arguments.opt_param_scheduler)
        return Newcomer(
            arguments, state, self.get_args, carried=self.carried, cursor=self.cursor, seed=self.seed,
            train_step=self.originals["train_step"],
        )  # fmt: skip

    def enter(self, newcomer: Any) -> None:
        """Do as `CommitLoop.enter`, with the copied state in place of what `trainer/entering.py` reads."""
        from megatron_recover.megatron.state import Published

        given = self.copied()
        self.loop.join(newcomer.arguments.model)
        assert [each.layout for each in newcomer.state.tensors()] == [layout for layout, _ in given.tensors]
        assert newcomer.state.layout_digest() == given.layout
        for mine, (_, data) in zip(newcomer.state.tensors(), given.tensors, strict=True):
            mine.data.copy_(data)
        for _ in range(2):  # a newcomer that is too late reads again
            newcomer.install(given.scalars)
        self.at_entrance.append(copy_of(Published(newcomer.state, self.carried)))

    def copy(self, label: str) -> None:
        if label == f"train {ENTERS}" and self.kind == "donor":
            self.at_entrance.append(copy_of(self.loop.published()))

    def watch_iterations(self) -> None:
        """Have Megatron's own boundary between two iterations note the progress, and what would be saved."""
        from megatron.training import training

        exits = training.checkpoint_and_decide_exit

        def noted(*arguments: Any) -> bool:
            self.progress.passed(arguments[4])
            return exits(*arguments)

        def asked(iteration: int, *arguments: Any, **others: Any) -> None:
            if iteration >= ENTERS - 1:
                self.saves.append(iteration)

        training.checkpoint_and_decide_exit = noted
        if self.kind != "first":
            training.save_checkpoint_and_time = asked

    def found(self, output: str) -> Found:
        log = [line for line in output.splitlines() if re.search(rf"iteration +({ENTERS}|{ENTERS + 2})\b.* \|", line)]
        lines = [" ".join(_OF_THIS_RUN.sub("", line).split()) for line in log]
        assert "checkpoint" not in output or self.kind != "newcomer", output
        return Found(
            self.at_entrance[0], self.driver.begun, copy_of(self.loop.published()), self.ends, self.configuration, self.saves,
            lines,
        )  # fmt: skip


def _train(kind: str, store: Any, copied: Callable[[], Copied]) -> Found:
    import megatron.training
    from megatron.core.enums import ModelType

    from megatron_recover.megatron.launch.parsing import parse, prepare_device
    from megatron_recover.megatron.seams import seams
    from scripts import pretrain_gpt

    torch.set_num_threads(1)
    prepare_device()
    replaced = {"forward_backward", "train_step", "finish_grad_sync", "cyclic", "data_loader", "train", "load_checkpoint"}
    installation = seams.Installation([seam for seam in seams.load() if seam.name in replaced])
    args = parse(
        None, {"tokenizer_type": "GPT2BPETokenizer"}, {"enable_one_logger": False, "dist_ckpt_optim_fully_reshardable": True}
    )
    args.align_param_gather = False
    training = Training(kind, args, installation.originals, copied)
    installation.install(training.replacements())
    training.watch_iterations()
    pretrain_gpt.datasets_provider.is_distributed = True
    with contextlib.redirect_stdout(io.StringIO()) as output:
        megatron.training.pretrain(
            pretrain_gpt.configure(args), pretrain_gpt.datasets_provider, ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step, store=store,
        )  # fmt: skip
    training.loop.close()
    return training.found(output.getvalue())
