"""The judge of batch scripts: a bad script for each rule, by which only that rule strikes, and good ones without a finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import cli
from megatron_recover.cluster.slurm import check
from megatron_recover.cluster.slurm.batch_script import read

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "scripts" / "slurm"
GOOD = (HERE / "by_hand.sbatch").read_text()
EXPECTED = {
    "no_kill_of_the_job": (7, "add the line: #SBATCH --no-kill", "_no_kill"),
    "no_kill_of_the_step": (12, "add --no-kill to it", "_no_kill"),
    "kill_on_bad_exit": (12, "write --kill-on-bad-exit=0", "_bad_exit"),
    "wait": (12, "write --wait=0", "_wait"),
    "signal_to_the_shell": (6, "write #SBATCH --signal=USR2@120, by which each agent gets the signal", "_batch_signal"),
    "one_srun_for_all_nodes": (
        12, "start one srun for each node in the background: --nodes=1 --ntasks=1 --nodelist=NODE ... &, "
        "and wait behind the loop", "_foreground"),
    "srun_in_the_foreground": (12, "end the line with &", "_foreground"),
    "no_wait_behind_the_agents": (12, "add the line: wait", "_early_end"),
    "torchrun": (12, "write megatron-recover run, and add --key-file FILE with several nodes", "_torchrun"),
    "no_key": (12, "add --key-file FILE", "_key"),
    "no_key_of_a_module": (12, "add --key-file FILE", "_key"),
    "cpus_of_the_job_only": (13, "add --cpus-per-task=32 to it", "_cpus"),
    "gpus_per_task": (12, "write --gpus-per-node=NUMBER on the #SBATCH side instead", "_gpus"),
    "gpus_of_the_whole_job": (4, "write --gpus-per-node=NUMBER instead", "_gpus"),
    "tasks_of_a_node": (3, "write #SBATCH --ntasks-per-node=1, and the number of ranks into --nproc-per-node", "_tasks"),
    "singleton_array": (3, "write #SBATCH --array=1-10%1", "_chain"),
    "open_mode": (7, "add the line: #SBATCH --open-mode=append", "_open_mode"),
    "container_around_the_script": (6, "move --container-image to the srun", "_container"),
    "shell_without_exec": (12, "write exec in front of the agent's command", "_wrapper"),
    "wrapper": (12, "start the interpreter itself: srun ... /full/path/python -P -m megatron_recover run ...", "_wrapper"),
    "no_signal": (7, "add the line: #SBATCH --signal=USR2@300", "_no_signal"),
    "one_core": (7, "add the line: #SBATCH --exclusive", "_one_core"),
    "no_interpreter": (1, "add the first line: #!/bin/bash", "_interpreter"),
    "no_step": (6, "start it by srun: srun --nodes=1 --ntasks=1 ... /full/path/python -P -m megatron_recover run ...",
                "_no_step"),
}  # fmt: skip
"""File -> line and remedy of its one finding, and the rule that has it."""
MISSING = ("_no_signal", "_one_core")
"""The rules that strike where a script has few #SBATCH lines."""


def test_there_is_a_bad_script_for_each_rule() -> None:
    assert {path.stem for path in (HERE / "bad").iterdir()} == set(EXPECTED)
    assert {rule for _, _, rule in EXPECTED.values()} == {rule.__name__ for rule in check.RULES}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_bad_script_has_its_one_finding(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, remedy, _ = EXPECTED[name]
    place = HERE / "bad" / f"{name}.sbatch"
    assert cli.main(["sbatch", "--check", str(place)]) == 2
    [found] = capsys.readouterr().out.splitlines()
    assert found.startswith(f"{place}:{line}: ") and found.endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("#SBATCH --no-kill", "#SBATCH -k  # for a lost node"),
        ("srun --no-kill --nodes=1 --ntasks=1", "srun -k -N1 -n 1"),
        ("srun --no-kill", "exec srun --no-kill"),
        ("srun --no-kill", "NCCL_DEBUG=INFO /usr/bin/srun --no-kill"),
        ("srun --no-kill", "env NCCL_DEBUG=INFO nohup srun --no-kill"),
        ("srun --no-kill", "timeout -k 60 3600 srun --no-kill"),
        ("--kill-on-bad-exit=0 --wait=0", "-K0 -W 0"),
        ("#SBATCH --no-kill", "#SBATCH --no-kill\n#SBATCH --cpus-per-task=32"),
        ("/opt/venv/bin/python", "bash -c 'cd /work && exec \"$@\"' agent /opt/venv/bin/python"),
        ("/opt/venv/bin/python", "bash -o pipefail -lc 'exec \"$@\"' agent /opt/venv/bin/python"),
        ("wait\n", "wait\nsrun --overlap -n1 /opt/venv/bin/python -P -m megatron_recover verdict RUN\nsrun nvidia-smi\n"),
        ("wait\n", "cat <<EOF\nsrun torchrun\nEOF\nwait  # srun torchrun doesn't count here\n"),
        ("wait\n", "wait\necho srun torchrun\n"),
        ("srun --no-kill", 'flags=(--no-kill\n  --mpi=none)\n  srun "${flags[@]}"'),
        ("#SBATCH --open-mode=append", "#SBATCH --no-requeue"),
        ("wait\n", "while squeue -h -j $SLURM_JOB_ID -s | grep -q .; do sleep 10; done\n"),
        ("&\ndone\nwait\n", "& done; wait $!\n"),
        ('--key-file "$RUN/key"', '--key-file="$RUN/key"'),
        ('4 --key-file "$RUN/key"', '"$SLURM_NNODES" --key-file "$RUN/key"'),
        ('--key-file "$RUN/key"', '"${flags[@]}"'),
        ('4 --key-file "$RUN/key"', "1"),
    ],
)  # fmt: skip
def test_scripts_that_are_right_have_no_finding(old: str, new: str) -> None:
    text = GOOD.replace(old, new, 1) if old else GOOD
    assert (text != GOOD) == (old != new)
    assert check.findings(text) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("#SBATCH --no-kill", "#SBATCH --no-kill=off", "_no_kill"),
        ("srun --no-kill", "srun -k=off", "_no_kill"),
        ("srun --no-kill", "srun --no-kill=off", "_no_kill"),
        ("srun --no-kill", "nohup srun", "_no_kill"),
        ("/opt/venv/bin/python", "bash -lc '\"$@\"' agent /opt/venv/bin/python", "_wrapper"),
        ("/opt/venv/bin/python", "bash agent.bash -c 'exec python'", "_wrapper"),
    ],
)
def test_the_same_mistake_is_found_however_it_is_written(old: str, new: str, rule: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    assert [each.__name__ for each in check.RULES if list(each(read(text)))] == [rule]


def test_gpus_of_the_whole_job_are_right_where_srun_has_a_number_of_its_own() -> None:
    of_the_job = GOOD.replace("#SBATCH --no-kill", "#SBATCH --no-kill\n#SBATCH --gpus=32")
    assert check.findings(of_the_job.replace("srun --no-kill", "srun --gpus=8 --no-kill")) == []
    assert len(check.findings(of_the_job)) == 1


def test_several_nodes_need_a_key_from_the_script() -> None:
    """The number of nodes may be a variable of Slurm. The key may be a variable of the environment."""
    without = GOOD.replace(' --key-file "$RUN/key"', "")
    for number in ("4", "2:4", '"$SLURM_JOB_NUM_NODES"', '4 --rdzv-endpoint "${nodes[0]}:29500"'):
        text = without.replace("--nnodes 4", f"--nnodes {number}")
        [found] = check.findings(text)
        assert (found.what, found.remedy) == ("run of several nodes needs a key", "add --key-file FILE")
        assert check.findings(text.replace("RUN=", 'export MEGATRON_RECOVER_KEY="$(< key)"\nRUN=', 1)) == []
        assert len(check.findings(text.replace("RUN=", "# MEGATRON_RECOVER_KEY\nRUN=", 1))) == 1


def test_a_script_that_waits_before_it_starts_its_agents_ends_while_they_run() -> None:
    """A loop that starts the agents, and a wait for something else, keep no script."""
    loop = 'for node in "${nodes[@]}"; do'
    for old, new in ((loop, f"sleep 1 & wait\n{loop}"), (loop, "while read -r node; do")):
        [found] = check.findings(GOOD.replace("done\nwait\n", "done\n").replace(old, new))
        assert found.what == "the batch script ends while its agents run, and Slurm ends all steps with it"


def test_a_signal_to_the_shell_is_right_where_the_shell_has_a_trap_for_it() -> None:
    to_the_shell = GOOD.replace("USR2@120", "B:USR2@120")
    assert check.findings(to_the_shell.replace("RUN=", "trap 'kill -USR2 %1' SIGUSR2\nRUN=", 1)) == []
    assert len(check.findings(to_the_shell.replace("RUN=", "trap : TERM\nRUN=", 1))) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "#SBATCH -N 2-8\nsrun -n8 torchrun x",
            {"_no_kill", "_foreground", "_bad_exit", "_wait", "_open_mode", "_torchrun", *MISSING},
        ),
        ("#SBATCH -n 16 --ntasks-per-node=8\n$LAUNCH", {"_no_kill", "_tasks", "_no_step", "_open_mode", *MISSING}),
        ("#SBATCH --gpu-bind=closest\nsrun --wait=0 -K0 $LAUNCH", {"_gpus", "_open_mode", *MISSING}),
        ("#SBATCH -c 8\nsrun --wait=0 -K0 -c8 --signal=USR2@60 $LAUNCH", {"_open_mode"}),
        ("#SBATCH --cpus-per-gpu=8\nsrun --wait=0 -K0 $LAUNCH", {"_no_signal", "_open_mode"}),
        ("srun 'an open quote", {"_no_step", "_open_mode", *MISSING}),
        ("", {"_no_step", "_open_mode", *MISSING}),
    ],
)
def test_other_scripts_have_all_of_their_findings(text: str, expected: set[str]) -> None:
    assert {rule.__name__ for rule in check.RULES if list(rule(read(f"#!/bin/bash\n{text}\n")))} == expected


def test_a_script_that_another_submits_is_judged_on_its_lines() -> None:
    bad = GOOD.replace("#SBATCH --no-kill\n", "")
    around = f"#!/bin/bash\nmkdir -p runs\nsbatch --parsable <<'END'\n{bad}END\nsrun torchrun x\n"
    assert [(each.line, each.remedy) for each in check.findings(around)] == [(10, "add the line: #SBATCH --no-kill")]
    assert check.findings(f"sbatch <<END\n{GOOD}".replace("$", "\\$")) == []


_NONE = "it has neither an #SBATCH line nor an srun"
_LAUNCH = f"{_NONE}; print a batch script for its launch line: megatron-recover sbatch -- LAUNCH LINE"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", _LAUNCH),
        ("#!/bin/bash\n# sbatch this, or srun it\ntorchrun --nproc-per-node 8 pretrain_gpt.py\n", _LAUNCH),
        ("import torch\nprint(torch.__version__)\n", _LAUNCH),
        ((EXAMPLES / "laptop.sh").read_text(), _LAUNCH),
        *(
            ((EXAMPLES / f"{name}.sh").read_text(),
             f"{_NONE}, and prints a batch script; write what it prints to a file, and judge that file")
            for name in ("container", "eight_gpus", "many_nodes")
        ),
        ("#!/bin/bash\nA=1 sbatch -p batch train.sbatch\n", f"{_NONE}, and submits another script; judge that one"),
    ],
)  # fmt: skip
def test_what_is_no_batch_script_is_told_as_such(
    text: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "any"
    place.write_text(text)
    with pytest.raises(SystemExit) as end:
        cli.main(["sbatch", "--check", str(place)])
    said = capsys.readouterr()
    assert (end.value.code, said.out, said.err) == (2, "", f"megatron-recover sbatch: {place} is no batch script: {why}\n")


def test_a_script_with_options_on_the_line_of_sbatch_is_judged() -> None:
    assert check.refusal("#!/bin/bash\nsrun torchrun train.py\n") is None
    assert check.refusal("#!/bin/bash\n#SBATCH --nodes=1\n$LAUNCH\n") is None


def test_a_script_that_cannot_be_read_and_a_launch_line_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, said in (
        (
            ["--check", str(tmp_path / "none")],
            f"{tmp_path / 'none'} cannot be read (No such file or directory); make it readable, or name another",
        ),
        (["--check", str(HERE / "by_hand.sbatch"), "--", "train.py"], "--check takes no launch line; leave out train.py"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["sbatch", *words])
        assert (end.value.code, capsys.readouterr().err) == (2, f"megatron-recover sbatch: {said}\n")
