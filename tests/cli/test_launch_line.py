"""torchrun's launch line, judged as torchrun judges it: its flags, its spellings, its variables."""

from __future__ import annotations

import errno
import os
import re
import signal
from argparse import REMAINDER, Action
from pathlib import Path
from typing import NoReturn, get_args

import pytest
import torch
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.run import get_args_parser
from torch.numa.binding import AffinityMode

from megatron_recover.cli import describing, launch_line, run, run_flags
from megatron_recover.cluster.job import Job, claim_log_links, create_run_dir
from megatron_recover.cluster.rank_process import TOLD_TO_ALL
from megatron_recover.cluster.streams import Stream, Streams
from megatron_recover.config import NumaBinding, RecoverConfig
from megatron_recover.flags import split
from megatron_recover.trace import Layout

ROOT = Path(__file__).resolve().parents[2]
NEW = "an id of its own"
FLAGS = "--micro-batch-size 1 --global-batch-size 16 --train-iters 2 --eval-interval 9 --mock-data"


def test_the_table_has_every_flag_of_torchrun_and_no_other() -> None:
    """A torch with a flag outside the table fails here: read what the flag does, and enter it with its release.

    The table may have flags of newer releases: it is that of torch 2.15, whose source was read.
    """
    theirs = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]
    release = tuple(map(int, torch.__version__.split(".")[:2]))

    def shape(action: Action) -> tuple[str, tuple[str, ...], bool, bool]:
        reads_variable = isinstance(action, env | check_env)
        return action.dest, tuple(sorted(action.option_strings)), action.nargs != 0, reads_variable

    assert sorted(map(shape, theirs)) == sorted(
        (flag.dest, tuple(sorted(flag.names)), flag.takes_value, flag.has_variable)
        for flag in launch_line.TORCHRUN
        if flag.since <= release
    )


def test_the_document_has_the_table() -> None:
    document = (ROOT / "docs" / "reference" / "flags.md").read_text()
    for flag in launch_line.TORCHRUN:
        names = ", ".join(f"`{name}`" for name in flag.names if "_" not in name)
        assert f"\n| {names} | {flag.fate} | {flag.text} |\n" in document, flag.name


def test_torchrun_gives_the_script_all_words_behind_it_as_we_do() -> None:
    last = get_args_parser()._actions[-1]
    assert (last.dest, last.nargs) == ("training_script_args", REMAINDER)
    text = "--nproc_per_node 2 -t 3 -r=1 --standalone train.py --nproc-per-node 4 --log-dir x -- --tee"
    line = text.split()
    theirs = get_args_parser().parse_args(line)
    ours, command = split(line, run_flags.parser())
    assert command == [theirs.training_script, *theirs.training_script_args]
    assert ours == line[: -len(command)]


@pytest.mark.parametrize(
    ("line", "ours", "command"),
    [
        ("--replicas 2 -- a.py --x", "--replicas 2", "a.py --x"),
        ("--replicas 2 a.py -- --x", "--replicas 2", "a.py -- --x"),
        ("--replicas=2 a.py", "--replicas=2", "a.py"),
        ("-m --nproc-per-node 2 pkg.train --x", "-m --nproc-per-node 2", "pkg.train --x"),
        ("--quiet", "--quiet", ""),
        ("--quiet --nproc-per-node", "--quiet --nproc-per-node", ""),
        ("--unknown 3 a.py", "--unknown", "3 a.py"),
        ("--unknown 3 --lr 1 -- a.py", "--unknown 3 --lr 1", "-- a.py"),
        ("--replicas 2 -- ", "--replicas 2", ""),
    ],
)
def test_the_first_word_that_is_no_flag_is_the_script(line: str, ours: str, command: str) -> None:
    assert split(line.split(), run_flags.parser()) == (ours.split(), command.split())


def read(line: str, **environment: str) -> launch_line.Choice:
    return launch_line.read(run_flags.parser().parse_args(line.split()), environment)


@pytest.mark.parametrize(
    ("line", "environment", "expected"),
    [
        ("--nproc-per-node 8", {}, (8, NEW, False)),
        ("--nproc_per_node 8 --nnodes 1:1 --node_rank 0 --rdzv_id a7 --rdzv_backend c10d --standalone", {}, (8, "a7", False)),
        ("-m --nproc-per-node cpu", {}, (len(os.sched_getaffinity(0)), NEW, True)),
        ("", {"PET_NPROC_PER_NODE": "4", "PET_RDZV_ID": "b", "PET_MODULE": "1"}, (4, "b", True)),
        ("--nproc-per-node 2", {"PET_NPROC_PER_NODE": "4", "PET_MODULE": "0"}, (2, NEW, False)),
        ("", {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "x"}, (None, NEW, False)),
        ("--rdzv-backend c10d --nproc-per-node 2", {}, (2, "none", False)),
        ("--rdzv-backend c10d --standalone --nproc-per-node 2", {}, (2, NEW, False)),
    ],
)
def test_flags_and_variables_mean_what_they_mean_to_torchrun(
    line: str, environment: dict[str, str], expected: tuple[int | None, str, bool]
) -> None:
    choice = read(line, **environment)
    run_id = NEW if re.fullmatch("[0-9a-f-]{36}", choice.run_id) else choice.run_id
    assert (choice.num_processes, run_id, choice.is_module) == expected
    assert choice.notes == ()


def test_what_changes_nothing_is_told_in_one_line_each() -> None:
    notes = read("--max-restarts 3 --master-addr h --master-port 6000", PET_RUN_PATH="1").notes
    assert [note.split()[0] for note in notes] == [
        "--max-restarts", "--run-path", "--master-addr", "--master-port",
    ]  # fmt: skip


def test_a_mistake_in_a_variable_names_the_variable() -> None:
    with pytest.raises(ValueError) as refusal:
        read("--node-rank 3", PET_NNODES="2", PET_NPROC_PER_NODE="many", PET_NODE_RANK="2")
    assert str(refusal.value).splitlines() == [
        "--node-rank is 3, and --nnodes is 2; give a number from 0 to 1, or leave it out",
        "--nproc-per-node (PET_NPROC_PER_NODE of the environment) is many; give a number of at least 1, gpu, cpu or auto",
    ]


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:1", "0:3,7:2", "0:0,1:1,2:2,3:3"])
def test_streams_are_those_of_torchrun(text: str) -> None:
    streams = read(f"-r {text} --tee {text}").streams
    assert streams.redirects == streams.tee == Std.from_str(text)


def test_flags_about_logs_are_read() -> None:
    streams = read(
        "--tee 0:1,12:3 --local_ranks_filter 3,12 --role trainer --duplicate-stdout-filters a,b,,c "
        "--duplicate_stderr_filters d",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${rank}|",
    ).streams  # fmt: skip
    assert streams == Streams(
        tee={0: 1, 12: 3}, shown=frozenset({3, 12}), role="trainer", prefix="${rank}|",
        filters={Stream.OUT: ("a", "b,c"), Stream.ERR: ("d",)},
    )  # fmt: skip
    assert streams.named == {"--redirects": set(), "--tee": {0, 12}, "--local-ranks-filter": {3, 12}}
    assert read("--log-line-prefix-template x", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="y").streams.prefix == "x"
    assert read("").streams == Streams()


def test_the_end_of_a_job_is_read() -> None:
    assert read("").signals == TOLD_TO_ALL and read("").shutdown_s is None
    choice = read("--signals-to-handle SIGTERM,SIGQUIT --shutdown_timeout 0", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="9")
    assert (choice.signals, choice.shutdown_s) == ((signal.SIGTERM, signal.SIGQUIT), 0)
    assert read("", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="9").shutdown_s == 9
    parser = get_args_parser()
    assert set(parser.get_default("signals_to_handle").split(",")) <= set(launch_line._CAN_END), "torchrun's own default"


def test_binding_is_near_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(get_args(NumaBinding)) == {mode.value for mode in AffinityMode}
    monkeypatch.setattr(launch_line, "has_gpu", lambda: True)
    assert read("--numa-binding core-complex").numa_binding == "core-complex"
    assert read("", PET_NUMA_BINDING="node").numa_binding is None, "torchrun reads no such variable"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--nnodes few", "--nnodes is few; give a number of nodes, N or MIN:MAX, such as 4 or 2:4"),
        ("--node-rank 1", "--node-rank is 1, and --nnodes is 1; give 0, or leave it out"),
        ("--nproc-per-node 0", "--nproc-per-node is 0; give a number of at least 1, gpu, cpu or auto"),
        ("--nproc-per-node many", "--nproc-per-node is many; give a number of at least 1, gpu, cpu or auto"),
        ("--rdzv-backend etcd", "--rdzv-backend etcd is not supported; give c10d or static, or leave it out on one node"),
        ("--no-python", "--no-python is not supported: the training script has to be Python; leave it out"),
        ("--virtual_local_rank --nnodes 3", "--virtual-local-rank is not supported: LOCAL_RANK picks the device of a rank; "
         "leave it out"),
        ("--tee 4", "--tee is 4; give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of these by rank, such as 0:1,1:3"),
        ("-r 0:1,", "--redirects is 0:1,; give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of these by rank, such as "
         "0:1,1:3"),
        ("--local-ranks-filter first", "--local-ranks-filter is first; give numbers of ranks, such as 0,7"),
        ("--tee 0:2 --duplicate-stdout-filters a", "--duplicate-stdout-filters selects teed lines, and --tee names no stdout; "
         "give --tee 3"),
        ("--signals-to-handle SIGTERM,SIGKILL", "--signals-to-handle is SIGTERM,SIGKILL; give some of SIGHUP, SIGINT, SIGQUIT, "
         "SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, separated by commas"),
        ("--shutdown-timeout -1", "--shutdown-timeout is -1; give a whole number of seconds"),
        ("--numa-binding close", "--numa-binding is close; give one of node, socket, exclusive, core-complex"),
        ("--numa-binding node", "--numa-binding is node, but this machine has no GPU near which a rank could run; leave it "
         "out, or use numactl"),
        ("--print-completion zsh", "--print-completion is not supported: torchrun prints completions of its own name; leave it "
         "out"),
        ("--rdzv-id a/b --log-dir logs", "--rdzv-id is a/b, and a folder of --log-dir has this name; give one without /"),
        ("-m --run-path", "--module and --run-path exclude each other; the first is for a module, the second for a file"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_the_remedy(line: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_line, "has_gpu", lambda: False)
    with pytest.raises(ValueError) as refusal:
        read(line)
    assert str(refusal.value) == expected


def test_flags_that_do_not_suit_the_job_are_refused() -> None:
    line = read("--tee 0:1,4:3 --redirects 3:1 --local-ranks-filter 3,5 --shutdown-timeout 61")
    with pytest.raises(ValueError) as refusal:
        launch_line.judge(line, num_processes=4, config=RecoverConfig(deadline_s=60.0))
    assert str(refusal.value).splitlines() == [
        "--tee names rank 4; the ranks of this job are 0 to 3, counted over all replicas",
        "--local-ranks-filter names rank 5; the ranks of this job are 0 to 3, counted over all replicas",
        "--shutdown-timeout (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT of the environment) is 61; it must be at most "
        "--recover-deadline-s (60), after which a job that does not end is ended in any case",
    ]  # fmt: skip
    launch_line.judge(line, num_processes=6, config=RecoverConfig(deadline_s=61.0))


@pytest.mark.parametrize("text", ["gpu", "auto"])
def test_processes_for_gpus_need_a_gpu(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_line, "has_gpu", lambda: True)
    monkeypatch.setattr(launch_line, "gpu_bytes", tuple)
    with pytest.raises(ValueError, match=f"--nproc-per-node is {text}, but torch finds no GPU"):
        read(f"--nproc-per-node {text}")
    monkeypatch.setattr(launch_line, "gpu_bytes", lambda: (80 * 10**9,) * 8)
    assert read(f"--nproc-per-node {text}").num_processes == 8


def test_processes_that_follow_the_machine_are_its_cores_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_line, "has_gpu", lambda: False)
    assert read("--nproc-per-node auto").num_processes == len(os.sched_getaffinity(0))


def size(line: str, flags: str) -> tuple[int, int]:
    arguments = run_flags.parser().parse_args(line.split())
    return describing._size(arguments, describing._slots(launch_line.read(arguments, {}), None), flags.split())


@pytest.mark.parametrize(
    ("line", "flags", "expected"),
    [
        ("--nproc-per-node 8", "", (8, 1)),
        ("--nproc-per-node 8", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", (2, 1)),
        ("--nproc-per-node 8", "--expert-model-parallel-size 4 --tensor-model-parallel-size 2", (1, 4)),
        (
            "--nproc-per-node 8",
            "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
            (2, 2),
        ),
        (
            "--nproc-per-node 8",
            "--expert-model-parallel-size 2 --tensor-model-parallel-size 4 --expert-tensor-parallel-size 1",
            (2, 1),
        ),
        ("--nproc-per-node 8 --lanes 4", "", (2, 4)),
        ("--nproc-per-node 8 --replicas 2", "--tensor-model-parallel-size 4", (2, 1)),
        ("--replicas 3", "--tensor-model-parallel-size 4", (3, 1)),
        ("--replicas 3 --lanes 2", "", (3, 2)),
    ],
)
def test_replicas_follow_from_processes_and_from_the_size_of_one(line: str, flags: str, expected: tuple[int, int]) -> None:
    assert size(line, flags) == expected


@pytest.mark.parametrize(
    ("line", "flags", "expected"),
    [
        ("", "", "the number of processes is missing; give --nproc-per-node, as for torchrun, or --replicas"),
        ("--nproc-per-node 8", "--tensor-model-parallel-size 3",
         "--nproc-per-node is 8, but a replica has TP x PP x CP x lanes = 3 processes, so these are not whole replicas; change "
         "one of them"),
        ("--nproc-per-node 8 --replicas 3", "--tensor-model-parallel-size 2",
         "--nproc-per-node is 8, but a replica has TP x PP x CP x lanes = 2 processes, so these are not 3 replicas; change one "
         "of them"),
    ],
)  # fmt: skip
def test_processes_that_make_no_whole_replicas_are_refused(line: str, flags: str, expected: str) -> None:
    with pytest.raises(ValueError) as refusal:
        size(line, flags)
    assert str(refusal.value) == expected


def told(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the launcher says of a line before the job starts."""
    script = tmp_path / "train.py"
    script.touch()
    ours, command = split([*line.split(), "--run-dir", str(tmp_path / "run"), str(script), *FLAGS.split()], run_flags.parser())
    describing.job_of(run_flags.parser().parse_args(ours), command)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("line", "flags", "expected"),
    [
        (
            "--replicas 2 --spares 2",
            "--recover-heal off",
            "--spares is 2, but no lost replica is replaced (--recover-heal off); leave out --spares, or give --recover-heal "
            "in-place",
        ),
        (
            "--replicas 2 --spares 2",
            "--optimizer-cpu-offload",
            "--spares is 2, but no lost replica is replaced: --optimizer-cpu-offload lets no replica join while others train: "
            "copies between host and device may still run between two steps; leave it out, or leave out --spares",
        ),
        ("--replicas 2 --spares -1", "--recover-heal in-place", "--spares is -1; it must be a number of slots, 0 or more"),
    ],
)
def test_spares_without_use_are_refused(tmp_path: Path, line: str, flags: str, expected: str) -> None:
    (tmp_path / "train.py").touch()
    words = [*line.split(), "--run-dir", str(tmp_path / "run"), str(tmp_path / "train.py"), *FLAGS.split(), *flags.split()]
    ours, command = split(words, run_flags.parser())
    with pytest.raises(ValueError) as refusal:
        describing.job_of(run_flags.parser().parse_args(ours), command)
    assert str(refusal.value).startswith(expected)


def test_spare_slots_follow_those_of_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["--replicas", "2", "--spares", "3", "--run-dir", str(tmp_path / "run"), str(tmp_path / "train.py"), *FLAGS.split()]
    ours, command = split([*words, "--recover-heal", "in-place"], run_flags.parser())
    job, *_ = describing.job_of(run_flags.parser().parse_args(ours), command)
    assert job.spares == (2, 3, 4) and job.num_ranks_here == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ()),
        ("--recover-heal off", ("--recover-heal off",)),
        (
            "--optimizer-cpu-offload --phase-transition-iterations 1",
            ("--optimizer-cpu-offload", "--phase-transition-iterations"),
        ),
    ],
)
def test_a_job_knows_the_flags_because_of_which_nothing_is_healed(
    tmp_path: Path, flags: str, expected: tuple[str, ...]
) -> None:
    (script := tmp_path / "train.py").touch()
    words = ["--replicas", "2", "--run-dir", str(tmp_path / "run"), str(script), *FLAGS.split(), *flags.split()]
    ours, command = split(words, run_flags.parser())
    job, *_ = describing.job_of(run_flags.parser().parse_args(ours), command)
    assert (job.not_healed_by, job.config.heal) == (expected, "off" if expected else "in-place")


def test_a_job_whose_batch_changes_knows_its_fewest_microbatches(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    flags = FLAGS.replace("--global-batch-size 16", "--step-batch-size-schedule 0:16,64:8")
    ours, command = split(
        ["--replicas", "2", "--run-dir", str(tmp_path / "run"), str(script), *flags.split()], run_flags.parser()
    )
    job, *_ = describing.job_of(run_flags.parser().parse_args(ours), command)
    assert (job.num_microbatches, job.least_microbatches) == (None, 8)


def test_what_follows_from_other_flags_is_told_and_so_is_a_lack_of_protection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    assert told("--nproc-per-node 4", tmp_path / "a", capsys) == [
        "megatron-recover run: 4 replicas of 1 process (TP 1 x PP 1 x CP 1 x lanes 1)"
    ]
    assert told("--replicas 2", tmp_path / "b", capsys) == []
    assert told("--replicas 1", tmp_path / "c", capsys) == [
        "megatron-recover run: nothing is protected: with one replica every death ends the job; give processes for two or more"
    ]


def test_where_processes_are_missing_the_flag_behind_the_script_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as end:
        run.main(["--run-dir", str(tmp_path / "run"), str(script), *FLAGS.split(), "--nproc-per-node", "2"])
    missing, behind = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "the number of processes is missing" in missing
    assert behind.endswith(f"write: megatron-recover run --nproc-per-node 2 ... {script} ...")


def test_what_torchrun_takes_for_none_is_taken_so() -> None:
    choice = read(f"--log-dir {os.devnull}", PET_LOCAL_RANKS_FILTER="")
    assert (choice.log_dir, choice.streams.shown) == (None, frozenset())


def test_a_short_flag_and_its_value_may_be_one_word() -> None:
    ours, command = split(["-t3", "-r", "1:2", "--nproc-per-node", "2", "train.py", "-t3"], run_flags.parser())
    assert command == ["train.py", "-t3"]
    arguments = run_flags.parser().parse_args(ours)
    assert (arguments.tee, arguments.redirects, arguments.nproc_per_node) == ("3", "1:2", "2")


def test_a_flag_of_ours_behind_the_script_is_the_scripts_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train.py", "--run-dir", "x", "--log-dir", "y", "--chaos=rate=0.1,seed=1", "--nproc_per_node", "8", "--replicas"]
    assert launch_line.behind_script(command, run_flags.parser()) == [
        "--run-dir x", "--chaos=rate=0.1,seed=1", "--nproc_per_node 8", "--replicas",
    ]  # fmt: skip
    jobs: list[Job] = []

    def start(job: Job, **_: object) -> NoReturn:
        jobs.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "Launcher", start)
    (script := tmp_path / "train.py").touch()
    with pytest.raises(KeyboardInterrupt):
        run.main(
            ["--replicas", "2", "--run-dir", str(tmp_path / "run"), str(script), *FLAGS.split(), "--trace-level", "faults"]
        )
    assert (jobs[0].trace_level, jobs[0].argv[-2:]) == ("microbatches", ("--trace-level", "faults"))
    assert capsys.readouterr().err == (
        f"megatron-recover run: --trace-level faults behind {script} is the script's; if it is for the launcher, write: "
        f"megatron-recover run --trace-level faults ... {script} ...\n"
    )


def test_a_folder_for_logs_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--log-dir .*file cannot be used .*; give another folder"):
        claim_log_links(tmp_path / "file", "none")


@pytest.mark.parametrize("kind", [errno.EPERM, errno.ENOSPC], ids=["a file system without links", "a full disk"])
def test_where_no_links_can_be_made_nothing_is_left_and_the_folder_of_the_links_is_named(
    kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(
        argv=("train.py",), num_replicas=2, layout=Layout(tp=1, pp=1), config=RecoverConfig(),
        run_dir=create_run_dir(tmp_path / "run"), log_links=claim_log_links(tmp_path / "logs", "none"),
    )  # fmt: skip
    monkeypatch.setattr(describing, "job_of", lambda arguments, command: (job, "", None))

    def symlink_to(self: Path, target: Path) -> None:
        raise OSError(kind, os.strerror(kind), str(target), None, str(self))

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    with pytest.raises(SystemExit) as end:
        run.main(["--", "train.py"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert f"--log-dir {tmp_path / 'logs'} cannot have links to the logs ({os.strerror(kind)}); give another folder" in told
    assert not (tmp_path / "run").exists() and not list((tmp_path / "logs").iterdir())


def test_links_to_the_logs_may_be_in_the_run_directory(tmp_path: Path) -> None:
    choice = read(f"--nproc-per-node 2 --log-dir {tmp_path / 'run'}")
    links, run_dir = describing._folders(choice, tmp_path / "run", None)
    assert run_dir == tmp_path / "run" and links is not None and links.parent == run_dir
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--log-dir"):
        describing._folders(read(f"--nproc-per-node 2 --log-dir {tmp_path / 'file'}"), tmp_path / "other", None)
    assert not (tmp_path / "other").exists()
