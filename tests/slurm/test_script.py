"""Printed batch scripts: golden texts, clean by shellcheck and by our own judge, accepted by a real slurmctld."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_recover.cluster.slurm import check, script
from tests.slurm.machine import Machine

HERE = Path(__file__).parent
LAUNCH = ("--nproc-per-node", "8", "pretrain_gpt.py", "--num-layers", "2")
SAVING = (*LAUNCH, "--save", "/shared/a b", "--load", "/shared/a b")
COMMON = {"python": "/opt/venv/bin/python", "run_dir": "/shared/runs/gpt", "command": ("megatron-recover", "sbatch", "...")}
KEPT = {**COMMON, "launch": SAVING, "save": "/shared/a b"}
TIMED = ("--job-name=gpt", "--partition=p", "--time=2:00:00", "--gpus-per-node=8")
SETTINGS = {
    "allocation": script.Settings(
        **KEPT, nodes=64, shape="allocation", directives=TIMED, modules=("cuda/13",), venv="/opt/venv", signal_s=180
    ),
    "array": script.Settings(**KEPT, nodes=64, shape="array", spares=2, chain=3, directives=TIMED),
    "chain": script.Settings(**KEPT, nodes=4, shape="allocation", chain=10, directives=TIMED),
    "container": script.Settings(
        **{**KEPT, "python": "/usr/bin/python3"}, nodes=4, shape="allocation", directives=TIMED,
        container=("--container-image=/images/it's.sqsh", "--container-mounts=/shared:/shared,/data:/data"),
    ),
    "one_node": script.Settings(**COMMON, launch=LAUNCH, nodes=1, shape="allocation"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_the_script_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    golden = HERE / "golden" / f"{name}.sbatch"
    if request.config.getoption("--update"):
        golden.write_text(script.text(SETTINGS[name]))
    assert script.text(SETTINGS[name]) == golden.read_text()


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        (("--rdzv-conf", "last_call_timeout=60"), "--rdzv-conf last_call_timeout=60,join_timeout=3600"),
        (("--rdzv-conf=last_call_timeout=60",), "--rdzv-conf=last_call_timeout=60,join_timeout=3600"),
        (("--rdzv-conf", "join_timeout=9"), "--rdzv-conf join_timeout=9\n"),
    ],
)
def test_jobs_of_an_array_wait_an_hour_for_the_queue_whatever_else_the_launch_line_configures(
    given: tuple[str, ...], printed: str
) -> None:
    text = script.text(script.Settings(**COMMON, launch=(*given, *LAUNCH), nodes=4, shape="array"))
    assert printed in text and text.count("join_timeout=") == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_no_step_takes_an_option_of_the_allocation_in_which_the_job_was_submitted(name: str) -> None:
    text = script.text(SETTINGS[name])
    [unset] = [each for each in text.replace("\\\n", "").splitlines() if each.startswith("unset ")]
    assert unset.split()[1:] == list(script.OF_ANOTHER_JOB)
    sruns = [each for each in text.splitlines() if each.strip().startswith("srun --") and "--help" not in each]
    assert sruns and all("--mem=0" in each for each in sruns)
    assert text.index("unset SLURM") < text.index("srun ", text.index("launch=("))


@pytest.mark.parametrize("name", SETTINGS)
def test_our_own_scripts_pass_the_judge(name: str) -> None:
    assert check.findings(script.text(SETTINGS[name])) == []


@pytest.mark.parametrize(
    ("line", "without"),
    [
        ("#SBATCH --no-kill\n", ""), ("srun --no-kill", "srun"), (" --kill-on-bad-exit=0 --wait", " --wait"),
        ("=0 --wait=0 ", "=0 "), ("#SBATCH --open-mode=append\n", ""), ('"${launch[@]}" &', '"${launch[@]}"'),
    ],
)  # fmt: skip
def test_the_judge_misses_each_safeguard_that_is_taken_out(line: str, without: str) -> None:
    text = script.text(SETTINGS["allocation"])
    assert text.count(line) == 1
    assert len(check.findings(text.replace(line, without))) == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_each_start_has_its_run_directory_in_the_comment_of_its_job(name: str) -> None:
    text = script.text(SETTINGS[name])
    [line] = [each for each in text.splitlines() if "Comment=" in each]
    assert line == f'scontrol update JobId="$SLURM_JOB_ID" Comment="{script.COMMENT}$start"'
    assert text.index('start="$RUN/') < text.index(line) < text.index('--run-dir "$start"')


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: apt-get install shellcheck")
def test_scripts_are_clean_by_shellcheck() -> None:
    done = subprocess.run(["shellcheck", *sorted(map(str, (HERE / "golden").iterdir()))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_slurmctld_or_a_judge_that_fails_ends_no_run(tmp_path: Path) -> None:
    """The first srun is gone, and nothing is known of the run at first. It goes on until Slurm says that no step is left."""
    for name, answers in {
        "squeue": ["exit 1", "echo 7.0", "echo 7.batch"],
        "python": ["exit 1", "exit 1", "echo unknown", "echo finished 0"],
        "sleep": [":"] * 9,
    }.items():
        command, calls = tmp_path / name, tmp_path / f"{name}.calls"
        cases = "".join(f"{number}) {answer};; " for number, answer in enumerate(answers, start=1))
        command.write_text(f"#!/bin/bash\necho >> {calls}\ncase $(wc -l < {calls}) in {cases}esac\n")
        command.chmod(0o755)
    text = script.text(SETTINGS["allocation"])
    judge = text[text.index("judge() {") : text.index("# An earlier start")]
    wait = text[text.index("verdict=$(judge)") : text.index("# The run is over. The srun")]
    done = subprocess.run(
        ["bash", "-c", f'PYTHON=python SLURM_JOB_ID=7 start=x steps=(0)\n{judge}\n{wait}\necho "$verdict"'],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("unknown\n", "")
    assert len((tmp_path / "squeue.calls").read_text().splitlines()) == 3


def test_the_key_is_written_through_no_link_and_is_readable_for_its_owner_alone(tmp_path: Path) -> None:
    text = script.text(SETTINGS["array"])
    begin = text.index('if [ ! -e "$RUN/key" ]; then')
    part = text[begin : text.index("# Want of memory")]
    other = tmp_path / "mine"
    other.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".key-7").symlink_to(other)
    done = subprocess.run(["bash", "-c", f"umask 0; SLURM_JOB_ID=7 RUN={run}\n{part}"], capture_output=True, text=True)
    assert (done.stdout, done.stderr, other.read_text()) == ("", "", "precious")
    key = run / "key"
    assert len(key.read_text().strip()) == 44 and key.stat().st_mode & 0o777 == 0o600 and key.stat().st_nlink == 1
    key.unlink()
    (tmp_path / "base64").write_text("#!/bin/sh\nexit 1\n")  # a disk without room
    (tmp_path / "base64").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", f"SLURM_JOB_ID=7 RUN={run}\n{part}"], env=environment)
    assert not key.exists(), "an empty key would be found by every later start"


@pytest.mark.parametrize(
    ("status", "verdict", "running", "is_over"),
    [
        (10, "unknown", "echo n2", True),
        (10, "unknown", "echo n2; echo n1", False),  # this node alone does not reach the other
        (10, "unknown", "exit 1", False),
        (1, "unknown", "echo n2", False),
        (10, "requeue 13", "echo n2", False),
    ],
)
def test_a_job_of_an_array_that_finds_no_coordinator_spares_the_later_ones_its_wait(
    tmp_path: Path, status: int, verdict: str, running: str, is_over: bool
) -> None:
    (tmp_path / "7").mkdir()
    assert _end_of_a_job(tmp_path, status, verdict, running) == is_over


def test_where_slurm_has_other_names_for_the_hosts_none_of_them_counts_as_lost(tmp_path: Path) -> None:
    """The file of the endpoint has the name of the host, and squeue has Slurm's."""
    (tmp_path / "7").mkdir()
    assert not _end_of_a_job(tmp_path, 10, "unknown", "echo slurm-n1", node="slurm-n2")


@pytest.mark.parametrize(
    ("published", "status", "is_over"),
    [
        (True, 10, True),  # too few jobs came
        (True, 15, True),
        (False, 10, True),  # the owner of the endpoint has died before it wrote its address
        (False, 137, False),  # this agent has died, and the owner may be about to write it
    ],
)
def test_a_run_that_ended_while_its_nodes_met_takes_the_jobs_that_wait_from_the_queue(
    tmp_path: Path, published: bool, status: int, is_over: bool
) -> None:
    """A job that is held would keep the next array of a chain in the queue, and would find nobody once it is released."""
    assert _end_of_a_job(tmp_path, status, "unknown", "echo n2; echo n1", published=published) == is_over


def _end_of_a_job(folder: Path, status: int, verdict: str, running: str, *, published: bool = True, node: str = "n2") -> bool:
    """Run the end of a script of an array whose agent ended with `status`; return whether it ends the whole array.

    It runs on the host n2, which Slurm knows as `node`.
    """
    for name, line in {"squeue": running, "scancel": f'echo "$@" >> {folder}/scancelled'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    if published:
        (folder / "7.endpoint").write_text("10.0.0.1:29400\n")
    (folder / "7.endpoint.owner").write_text("n1.cluster")
    text = script.text(SETTINGS["array"])
    end = text[text.index("# Takes the jobs of this array") : text.index("# The trace says how")]
    names = f"HOSTNAME=n2.cluster SLURMD_NODENAME={node} SLURM_ARRAY_JOB_ID=7"
    begin = f'{names} RUN={folder} start={folder}/7 verdict="{verdict}"; (exit {status}) & step=$!; wait "$step"'
    done = subprocess.run(
        ["bash", "-c", f"{begin}\n{end}"], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    is_over, cancelled = (folder / "7.over").exists(), folder / "scancelled"
    assert (cancelled.read_text() if cancelled.exists() else "") == ("--state=PENDING 7\n" if is_over else "")
    logs = f"The run ended before training began: see the logs of the nodes, {folder}/*.log\n"
    assert (done.stdout, done.stderr) == (logs if is_over else "", "")
    return is_over


def test_a_real_slurmctld_accepts_the_scripts(machine: Machine, tmp_path: Path) -> None:
    """64 nodes that nobody has: slurmctld judges all options of the script, and says when it could start."""
    for name, settings in SETTINGS.items():
        place = tmp_path / f"{name}.sbatch"
        place.write_text(script.text(settings))
        done = machine.run("sbatch", "--test-only", "--partition=wide", str(place))
        assert done.returncode == 0 and "to start at" in done.stderr, f"{name}: {done.stderr}"
        assert ("using 4096 processors on nodes f[001-064]" in done.stderr) == (name == "allocation"), f"{name}: {done.stderr}"
