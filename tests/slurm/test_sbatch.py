"""The verb `sbatch`: what it prints, submits and refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron_recover import cli
from megatron_recover.cli import sbatch
from megatron_recover.cluster.slurm import check
from tests.observe import traces

SAVING = ["--nproc-per-node", "2", "train.py", "--save", "ckpt", "--load", "ckpt"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a training script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["sbatch", *words]) == 0
    return capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["sbatch", *words])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


@pytest.mark.parametrize(
    "launcher",
    [
        "", "torchrun", "/opt/env/bin/torchrun", "megatron-recover run", "python -m torch.distributed.run",
        "/usr/bin/python3.12 -u -m torch.distributed.run", "python -m torch.distributed.launch",
        "python3 -m megatron_recover run", "python3 -m megatron_recover.run",
    ],
)  # fmt: skip
def test_the_launch_line_may_keep_its_launcher(launcher: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, "--nodes", "2", "--chain", "2", "--", *launcher.split(), *SAVING)
    assert "launch=(\n  --nproc-per-node 2 train.py\n  --save ckpt\n  --load ckpt\n)\n" in text
    assert f"RUN={folder}/runs/train\n" in text and f"MARK={folder}/ckpt/STOP\n" in text
    assert "#SBATCH --job-name=train\n#SBATCH --nodes=1\n" in text and "--nnodes 2 --rdzv-backend c10d" in text
    assert check.findings(text) == []


def test_options_become_lines_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--nodelist n[001-003,7] --time 1-2:30 --partition gpu --account a --gpus-per-node h100:8 --job-name j --port 4000"
    text = _printed(capsys, *words.split(), "--sbatch=--qos=high", "--module", "cuda/13", "--venv", "/v e", "--", *SAVING)
    for line in (
        "#SBATCH --time=1-2:30", "#SBATCH --partition=gpu", "#SBATCH --account=a", "#SBATCH --gpus-per-node=h100:8",
        "#SBATCH --job-name=j", "#SBATCH --nodes=4", "#SBATCH --nodelist=n[001-003,7]", "#SBATCH --qos=high",
        "module load cuda/13", ". '/v e'/bin/activate", "PYTHON='/v e/bin/python'",
    ):  # fmt: skip
        assert f"{line}\n" in text
    assert '--nnodes 4 --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:4000"' in text


def test_a_job_has_the_name_of_its_module_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, "--", "--nproc-per-node", "8", "-m", "my_package.train")
    assert "#SBATCH --job-name=train\n" in text and f"RUN={Path('runs', 'train').absolute()}\n" in text


@pytest.mark.parametrize("flag", ["--nproc-per-node=gpu", "--nproc_per_node=auto", "--nproc-per-node=2 --numa-binding=node"])
def test_what_a_flag_asks_of_the_machine_is_left_to_that_of_the_job(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag in _printed(capsys, "--", *flag.split(), *SAVING[2:])


def test_steps_of_one_node_get_a_network_of_their_job_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how_to/slurm.md names this line for HPE Slingshot."""
    network = "--network=job_vni,single_node_vni"
    text = _printed(capsys, "--nodes", "4", "--shape", "allocation", f"--sbatch={network}", "--", *SAVING)
    assert f"#SBATCH {network}\n" in text and check.findings(text) == []


def test_one_node_has_nobody_to_meet_and_a_job_that_saves_nothing_never_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, "--", *SAVING[:3])
    assert not re.search('rdzv|nnodes|key|requeue "|--chained|STOP|--no-kill', text)
    assert "#SBATCH --no-requeue\n" in text


@pytest.mark.parametrize(
    ("words", "is_array"),
    [("", False), ("--nodes 1", False), ("--nodes 2", True), ("--spares 1", True), ("--nodelist a,b", False),
     ("--nodes 2 --shape allocation", False), ("--shape array", True)],
)  # fmt: skip
def test_several_nodes_are_an_array_unless_named(words: str, is_array: bool, capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, *words.split(), "--", *SAVING)
    assert ("#SBATCH --array=0-" in text) == is_array
    assert ("scontrol requeue" in text) != is_array
    assert ("One start. With --chain N" in text) == is_array


def test_the_margin_comes_from_a_former_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = traces.write(folder / "former", traces.quiet_run(3).events)
    assert cli.main(["sbatch", "--like", str(run_dir), "--", *SAVING]) == 0
    said = capsys.readouterr()
    assert "#SBATCH --signal=USR2@61\n" in said.out and "begins to end 61 s before its time limit: longest step 0." in said.err
    assert _refused(capsys, "--like", str(folder / "no"), "--", *SAVING) == [
        f"megatron-recover sbatch: --like: no trace at {folder}/no; give the --run-dir of a run"
    ]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("2-0:0:5", 172805)],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert sbatch.seconds(time) == seconds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "the launch line is missing; write it behind --, as in: -- --nproc-per-node 8 pretrain_gpt.py ..."),
        ("-- --nproc-per-node 2 other.py",
         "there is no training script other.py here, where the job will run; write its path"),
        ("-- --nproc-per-node 2 launch.sh",
         "launch.sh is a shell script; write the Python script, not the shell script, and its flags"),
        ("-- torchrun torchrun train.py",
         "torchrun is no training script; leave out the word: megatron-recover run takes its place"),
        ("-- torchrun train.py", "the number of processes is missing; give --nproc-per-node, as for torchrun, or --replicas"),
        ("--nodes 2 -- --replicas 2 train.py",
         "the number of processes is missing; with several nodes give --nproc-per-node, as for torchrun"),
        ("-- torchrun --nproc-per-node=eight train.py",
         "--nproc-per-node is eight; give a number of at least 1, gpu, cpu or auto"),
        ("-- --nproc-per-node gpu --tee 9 train.py",
         "--tee is 9; give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of these by rank, such as 0:1,1:3"),
        ("-- --replicas 1 --numa-binding near train.py",
         "--numa-binding is near; give one of node, socket, exclusive, core-complex"),
        ("-- --nnodes 2 --rdzv_endpoint h:1 train.py",
         "--nnodes of the launch line is given by the script; leave it out"),
        ("--nodes 0 -- --replicas 1 train.py", "--nodes is 0; it must be at least 1"),
        ("--shape allocation --spares 1 -- --replicas 1 train.py",
         "--spares is 1; it is the number of spare jobs of --shape array"),
        ("--nodes 2 --requeues 1 -- --replicas 1 train.py",
         "--requeues is 1; only a single job of --shape allocation is requeued; leave it out, or change --shape"),
        ("--nodes 2 --port 4000 -- --replicas 1 train.py",
         "--port is 4000; the agents of --shape array meet through a file; leave it out"),
        ("--shape array --nodelist a,b -- --replicas 1 train.py",
         "--nodelist is for --shape allocation, since each job of an array has one node; leave it out"),
        ("--chain 2 -- --replicas 1 train.py", "--chain needs --save in the launch line: otherwise each job would begin anew"),
        ("-- --replicas 1 train.py --save x",
         "--save is {0}/x, and --load is None: a job that comes back would not resume; give both the same "
         "folder, or --requeues 0"),
        ("--nodelist a,b --nodes 3 -- --replicas 1 train.py", "--nodelist names 2 hosts, and --nodes is 3; leave out --nodes"),
        ("--nodelist n[2-1] -- --replicas 1 train.py", "'n[2-1]' is no host list: the range 2-1 ends below its beginning"),
        ("--time 5 -- --replicas 1 train.py",
         "the job would begin to end 300 s before a limit of 300 s; give a longer --time or a shorter "
         "--signal-s"),
        ("--time soon -- --replicas 1 train.py",
         "--time is soon; give minutes, minutes:seconds, hours:minutes:seconds or days-hours:minutes:seconds"),
        ("--run-dir a%b -- --replicas 1 train.py",
         "--run-dir is '{0}/a%b'; Slurm replaces % in it and splits it at blanks: use letters, digits and "
         "./+@=-_"),
        ("--container-mounts a:b -- --replicas 1 train.py", "--container-mounts needs --container-image"),
        ("--container-image i -- --replicas 1 train.py",
         "the training script is train.py: a container begins in the working directory of its image, not in {0}; write the "
         "full path in the container, such as {0}/train.py, and name its folder in --container-mounts"),
        ("--container-image i -- --replicas 1 -m train --data-path 0.5 /data/a 0.5 data/b",
         "--data-path is data/b: a container begins in the working directory of its image, not in {0}; write the "
         "full path in the container, such as {0}/data/b, and name its folder in --container-mounts"),
        ("--container-image i --requeues 0 -- --replicas 1 -m train --save=ckpt",
         "--save is ckpt: a container begins in the working directory of its image, not in {0}; write the "
         "full path in the container, such as {0}/ckpt, and name its folder in --container-mounts"),
        ("--container-image i -- --replicas 1 /w/train.py --save /c --load /c",
         "--save is /c, which is in no mount of the container: what is written there is lost with the step; make the "
         "folder on the host, and give --container-mounts /c:/c"),
        ("--container-image i --container-mounts /data:/data,tmpfs:/c -- --replicas 1 -m train --load /c --save /c",
         "--load is /c, which is in no mount of the container: what is written there is lost with the step; make the "
         "folder on the host, and give --container-mounts /data:/data,tmpfs:/c,/c:/c"),
        ("--container-image i -- --replicas 1 --log-dir /logs /w/train.py",
         "--log-dir is /logs, which is in no mount of the container: what is written there is lost with the step; make the "
         "folder on the host, and give --container-mounts /logs:/logs"),
        ("--venv v -- --replicas 1 train.py",
         "--venv is v; give its full path, since Slurm starts it in a folder that may be another"),
        ("--sbatch=--nodes=3 -- --replicas 1 train.py", "--sbatch: --nodes is given by the script; leave it out"),
        ("--sbatch=--comment=mine -- --replicas 1 train.py", "--sbatch: --comment is given by the script; leave it out"),
        ("--sbatch=qos -- --replicas 1 train.py",
         "--sbatch is 'qos'; give one option with =, such as --sbatch=\"--constraint=h100\""),
        ("--sbatch=--gpus-per-task=1 -- --replicas 1 train.py",
         "--sbatch: --gpus-per-task shows an agent only a part of the node's GPUs, and the agent starts the "
         "ranks of all; write --gpus-per-node=NUMBER on the #SBATCH side instead"),
        ("--nodes 4 --shape allocation --sbatch=--gpus=32 -- --nproc-per-node 8 train.py",
         "--sbatch: srun inherits --gpus=32, and one node does not have them all: no step starts; write "
         "--gpus-per-node=NUMBER instead"),
        ("--nproc-per-node 2 -- --replicas 1 train.py", "--nproc-per-node belongs to the launch line; write it behind --"),
        ("--qos x -- --replicas 1 train.py",
         "--qos is unknown; megatron-recover sbatch --help lists all; flags of the launch line go behind --, "
         "other options of sbatch into --sbatch=..."),
        ("--like a --signal-s 3 -- --replicas 1 train.py", "--like and --signal-s exclude each other; leave one out"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_the_remedy(words: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "launch.sh").touch()
    assert _refused(capsys, *words.split())[0] == f"megatron-recover sbatch: {said.format(folder)}"


@pytest.mark.parametrize(
    ("given", "save", "place"),
    [
        ("/shared/x:/ckpt", "/ckpt/a", "/shared/x/a"),
        ("/shared/ckpt", "/shared/ckpt/a", "/shared/ckpt/a"),
        ("/a:/ckpt:ro+rprivate,/b:/ckpt/new,/c:/ckpt/newer", "/ckpt/new/er", "/b/er"),
        ("./here:/ckpt", "/ckpt", "{0}/here"),
        (None, "{0}/runs/train/ckpt", "{0}/runs/train/ckpt"),  # the folder of --run-dir is mounted by itself
    ],
)
def test_the_script_looks_for_the_mark_where_the_host_has_the_folder_of_the_containers_save(
    given: str | None, save: str, place: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mounts = [] if given is None else ["--container-mounts", given]
    save = save.format(folder)
    words = ["--container-image", "i", *mounts, "--chain", "2", "--job-name", "train", "--", *SAVING[:2], "-m", "train"]
    text = _printed(capsys, *words, "--save", save, "--load", save)
    assert f"MARK={place.format(folder)}/STOP\n" in text and f"  --save {save}\n" in text


_SBATCH = """\
#!/bin/sh
echo "$@" >> {log}
echo "1$(wc -l < {log});cluster"
"""


@pytest.mark.parametrize(
    ("shape", "submissions"),
    [("allocation", ["--parsable {0}"]),
     ("array", ["--parsable {0}", "--parsable --dependency=afterany:11 {0}", "--parsable --dependency=afterany:12 {0}"])],
)  # fmt: skip
def test_a_submitted_script_stays_in_the_folder_of_the_series(
    shape: str, submissions: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here sbatch only notes how it is called; `test_jobs.py` has a real one."""
    (folder / "bin").mkdir()
    fake, log = folder / "bin" / "sbatch", folder / "calls"
    fake.write_text(_SBATCH.format(log=log))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    said = _printed(capsys, "--shape", shape, "--chain", "3", "--submit", "--", *SAVING)
    place = folder / "runs" / "train" / sbatch.SCRIPT_NAME
    assert log.read_text().splitlines() == [each.format(place) for each in submissions]
    assert said == "".join(f"submitted job 1{number}: {place}\n" for number in range(1, len(submissions) + 1))
    assert check.findings(place.read_text()) == []


def test_where_sbatch_refuses_the_script_is_kept_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert cli.main(["sbatch", "--submit", "--", *SAVING]) == 1
    place = folder / "runs" / "train" / sbatch.SCRIPT_NAME
    said = f"megatron-recover sbatch: sbatch has refused it, as it says; the script is left as {place}\n"
    assert capsys.readouterr().err == said and place.is_file()


def test_where_there_is_no_sbatch_the_script_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert cli.main(["sbatch", "--submit", "--", *SAVING]) == 1
    place = folder / "runs" / "train" / sbatch.SCRIPT_NAME
    assert capsys.readouterr().err == f"megatron-recover sbatch: there is no sbatch here; submit {place} on a login node\n"
    assert place.read_text().startswith("#!/bin/bash\n")
