"""torchrun's launch line, judged as torchrun judges it: its flags, its spellings, its variables."""

from __future__ import annotations

import errno
import os
from argparse import REMAINDER, Action
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_recover.cli import launch_line, run
from megatron_recover.cluster.job import Job, claim_log_links, create_run_dir
from megatron_recover.config import RecoverConfig
from megatron_recover.flags import split
from megatron_recover.trace import Layout

FLAGS = "--micro-batch-size 1 --global-batch-size 16 --train-iters 2 --mock-data"


def test_the_table_has_every_flag_of_torchrun_and_no_other() -> None:
    """A torch with a flag outside the table fails here: read what the flag does, and enter it."""
    theirs = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]

    def shape(action: Action) -> tuple[str, tuple[str, ...], bool]:
        return action.dest, tuple(sorted(action.option_strings)), action.nargs != 0

    assert sorted(map(shape, theirs)) == sorted(
        (flag.dest, tuple(sorted(flag.names)), flag.takes_value) for flag in launch_line.TORCHRUN
    )


def test_torchrun_gives_the_script_all_words_behind_it_as_we_do() -> None:
    last = get_args_parser()._actions[-1]
    assert (last.dest, last.nargs) == ("training_script_args", REMAINDER)
    text = "--nproc_per_node 2 -t 3 -r=1 --standalone train.py --nproc-per-node 4 --log-dir x -- --tee"
    line = text.split()
    theirs = get_args_parser().parse_args(line)
    ours, command = split(line, run._parser())
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
    assert split(line.split(), run._parser()) == (ours.split(), command.split())


def read(line: str, **environment: str) -> launch_line.Choice:
    return launch_line.read(run._parser().parse_args(line.split()), environment)


@pytest.mark.parametrize(
    ("line", "environment", "expected"),
    [
        ("--nproc-per-node 8", {}, (8, "none", False)),
        ("--nproc_per_node 8 --nnodes 1:1 --node_rank 0 --rdzv_id a7 --rdzv_backend c10d --standalone", {}, (8, "a7", False)),
        ("-m --nproc-per-node cpu", {}, (len(os.sched_getaffinity(0)), "none", True)),
        ("", {"PET_NPROC_PER_NODE": "4", "PET_RDZV_ID": "b", "PET_MODULE": "1"}, (4, "b", True)),
        ("--nproc-per-node 2", {"PET_NPROC_PER_NODE": "4", "PET_MODULE": "0"}, (2, "none", False)),
        ("", {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "x"}, (None, "none", False)),
    ],
)
def test_flags_and_variables_mean_what_they_mean_to_torchrun(
    line: str, environment: dict[str, str], expected: tuple[int | None, str, bool]
) -> None:
    choice = read(line, **environment)
    assert (choice.num_processes, choice.run_id, choice.is_module) == expected
    assert choice.notes == ()


def test_what_changes_nothing_is_told_in_one_line_each() -> None:
    assert [note.split()[0] for note in read("--max-restarts 3 --master-addr h --master-port 6000", PET_ROLE="a").notes] == [
        "--max-restarts", "--role", "--master-addr", "--master-port",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--nnodes 2", "--nnodes is 2; a job has one node for now: give --nnodes 1"),
        ("--nnodes 1:4", "--nnodes is 1:4; a job has one node for now: give --nnodes 1"),
        ("--node-rank 1", "--node-rank is 1; a job has one node for now: give --node-rank 0"),
        ("--nproc-per-node 0", "--nproc-per-node is 0; give a number of at least 1, gpu, cpu or auto"),
        ("--nproc-per-node many", "--nproc-per-node is many; give a number of at least 1, gpu, cpu or auto"),
        ("--rdzv-backend etcd", "--rdzv-backend etcd is not supported; leave it out: all processes are on this node, and they "
         "meet without an address"),
        ("--no-python", "--no-python is not supported: the training script has to be Python; leave it out"),
        ("--virtual_local_rank --nnodes 3", "--virtual-local-rank is not supported: LOCAL_RANK picks the device of a rank; "
         "leave it out\n--nnodes is 3; a job has one node for now: give --nnodes 1"),
        ("-m --run-path", "--module and --run-path exclude each other; the first is for a module, the second for a file"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_the_remedy(line: str, expected: str) -> None:
    with pytest.raises(ValueError) as refusal:
        read(line)
    assert str(refusal.value) == expected


@pytest.mark.parametrize("text", ["gpu", "auto"])
def test_processes_for_gpus_need_a_gpu(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_line, "has_gpu", lambda: True)
    monkeypatch.setattr(launch_line, "_num_gpus", lambda: 0)
    with pytest.raises(ValueError, match=f"--nproc-per-node is {text}, but torch finds no GPU"):
        read(f"--nproc-per-node {text}")
    monkeypatch.setattr(launch_line, "_num_gpus", lambda: 8)
    assert read(f"--nproc-per-node {text}").num_processes == 8


def test_processes_that_follow_the_machine_are_its_cores_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_line, "has_gpu", lambda: False)
    assert read("--nproc-per-node auto").num_processes == len(os.sched_getaffinity(0))


def size(line: str, flags: str) -> tuple[int, int]:
    arguments = run._parser().parse_args(line.split())
    return run._size(arguments, launch_line.read(arguments, {}), flags.split())


@pytest.mark.parametrize(
    ("line", "flags", "expected"),
    [
        ("--nproc-per-node 8", "", (8, 1)),
        ("--nproc-per-node 8", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", (2, 1)),
        ("--nproc-per-node 8", "--expert-model-parallel-size 4 --tensor-model-parallel-size 2", (2, 2)),
        ("--nproc-per-node 8", "--expert-model-parallel-size 2 --tensor-model-parallel-size 4", (2, 1)),
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
    ours, command = split([*line.split(), "--run-dir", str(tmp_path / "run"), str(script), *FLAGS.split()], run._parser())
    run._job(run._parser().parse_args(ours), command)
    return capsys.readouterr().err.splitlines()


def test_what_follows_from_other_flags_is_told_and_so_is_a_lack_of_protection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    assert told("--nproc-per-node 4", tmp_path / "a", capsys) == [
        "megatron-recover run: 4 replicas of 1 processes (TP 1 x PP 1 x CP 1 x lanes 1)"
    ]
    assert told("--replicas 2", tmp_path / "b", capsys) == []
    assert told("--replicas 1", tmp_path / "c", capsys) == [
        "megatron-recover run: nothing is protected: with one replica every death ends the job; give processes for two or more"
    ]


def test_a_flag_of_ours_behind_the_script_is_the_scripts_and_is_told() -> None:
    command = ["train.py", "--run-dir", "x", "--log-dir", "y", "--chaos=rate=0.1,seed=1", "--replicas", "2"]
    assert launch_line.behind_script(command, run._parser()) == ["--run-dir", "--chaos", "--replicas"]


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
    monkeypatch.setattr(run, "_job", lambda arguments, command: (job, ""))

    def symlink_to(self: Path, target: Path) -> None:
        raise OSError(kind, os.strerror(kind), str(target), None, str(self))

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    with pytest.raises(SystemExit) as end:
        run.main(["--", "train.py"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert f"--log-dir {tmp_path / 'logs'} cannot have links to the logs ({os.strerror(kind)}); give another folder" in told
    assert not (tmp_path / "run").exists() and not list((tmp_path / "logs").iterdir())
