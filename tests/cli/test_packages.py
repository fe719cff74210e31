"""What is judged of installed packages, and what the documents and pyproject.toml say of them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from megatron_recover import cli, packages
from megatron_recover.cli import explain, finish
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.megatron.launch.preflight import preflight
from megatron_recover.megatron.seams import seams
from megatron_recover.observe import compare
from megatron_recover.observe.report import plot
from tests.observe import traces

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_is_judged_is_what_the_wheel_asks_for() -> None:
    assert tuple(PROJECT["dependencies"]) == packages.REQUIRED
    asked = {extra: tuple(requirements) for extra, requirements in PROJECT["optional-dependencies"].items()}
    assert {extra: asked[extra] for extra in packages.EXTRAS} == packages.EXTRAS
    installed = re.search(r"-e '\.\[(.+)\]'", (ROOT / "scripts" / "setup.sh").read_text())
    assert installed and installed[1].split(",") == [*packages.EXTRAS, "dev"]
    rows = re.findall(r"^\| `(\w+)` \| ([\w, -]+) \|", (ROOT / "docs/how_to/install.md").read_text(), re.MULTILINE)
    assert {extra: names.split(", ") for extra, names in rows} == {
        extra: [packages.name_of(each) for each in requirements] for extra, requirements in packages.EXTRAS.items()
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("2.11.0", True), ("2.11", True), ("2.11.0a0+nv25.9", True), ("2.11.0rc1", True), ("2.13.0+cu130", True),
        ("v2.11.1", True), ("2.12.0.dev20260101", True), ("3", False), ("3.0a0", False), ("2.10.9", False),
        ("2.9.0a0+nv25.9", False), ("2", False), ("main", False), ("", False),
    ],
)  # fmt: skip
def test_previews_and_builds_of_images_count_as_their_release(found: str, expected: bool) -> None:
    assert packages.suffices(found, "torch>=2.11,<3") is expected


def _with(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = packages.version
    monkeypatch.setattr(packages, "version", lambda name: versions.get(name, real(name)))


def test_verbs_that_train_are_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with(monkeypatch, torch="2.10.0a0+nv25.12", numpy=None)
    lines = packages.mistakes(packages.EXTRAS["train"])
    assert [line.partition(";")[0] for line in lines] == [
        "torch is 2.10.0a0+nv25.12, but 2.11 or newer is needed", "numpy is not installed",
    ]  # fmt: skip
    assert lines[0].endswith(" -m pip install 'torch>=2.11'") and lines[1].endswith(" -m pip install 'numpy>=1.26'")
    script = ROOT / "scripts" / "pretrain_gpt.py"
    scenario = next((ROOT / "scenarios").glob("*.toml"))
    for verb in (
        ("run", "--replicas", "2", "--run-dir", f"{tmp_path}/run", str(script)), ("plan", str(script)),
        ("data", "--output", f"{tmp_path}/set"), ("demo", "--run-dir", f"{tmp_path}/demo"),
        ("simulate", str(scenario), "--processes", f"{tmp_path}/processes"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            cli.main([*verb])
        said = capsys.readouterr().err
        begin = f"megatron-recover {verb[0]}: {'--processes: ' if verb[0] == 'simulate' else ''}"
        assert (end.value.code, said) == (ExitCode.BAD_INPUT, "".join(f"{begin}{line}\n" for line in lines))
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", "packages"])
    said = capsys.readouterr()
    assert end.value.code == ExitCode.BAD_INPUT and all(line in said.err for line in lines)
    assert re.search(r"^torch +>=2.11 +2.10.0a0\+nv25.12, not in the range +run, ", said.out, re.MULTILINE)
    assert re.search(r"^numpy +>=1.26 +none +run, ", said.out, re.MULTILINE)


def test_what_every_verb_needs_is_judged_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _with(monkeypatch, msgspec="0.18.6", psutil=None)
    assert cli.main(["check", "/nowhere"]) == ExitCode.BAD_INPUT
    old, missing, checkout = capsys.readouterr().err.splitlines()
    assert old.startswith("megatron-recover check: msgspec is 0.18.6, but 0.19 or newer is needed; ")
    assert missing.startswith("megatron-recover check: psutil is not installed; ")
    assert f"`make setup` in {ROOT}, then `. .venv/bin/activate` there" in checkout
    assert cli.main(["--help"]) == 0


def test_without_matplotlib_all_but_the_plot_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = traces.write(tmp_path, traces.faulty_run().events)
    _with(monkeypatch, matplotlib="3.7")
    assert finish.main([str(run_dir)]) == 0
    assert (run_dir / "summary.json").exists() and not (run_dir / plot.PLOT_FILE).exists()
    assert cli.main(["report", str(run_dir)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(
        "megatron-recover report: loss.svg is left out: matplotlib is 3.7, but 3.8 or newer is needed; "
    ) and said.err.endswith("pip install 'matplotlib>=3.8'\n")  # fmt: skip
    assert "loss.svg" not in said.out and "summary.json" in said.out


def test_check_asks_for_torch_only_to_compare_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(traces.write(tmp_path / name, events)) for name, events in (
        ("run", traces.faulty_run().events), ("reference", traces.quiet_run().events),
    )]  # fmt: skip
    command = ["check", runs[0], "--against", runs[1]]
    _with(monkeypatch, torch=None)
    assert cli.main(command) == 0
    monkeypatch.setattr(compare, "_bit_identical", lambda *_: None)
    monkeypatch.setattr(compare, "_newest_checkpoint", lambda _: tmp_path)
    for verb in ("check", "report"):
        with pytest.raises(SystemExit) as end:
            cli.main([verb, *command[1:]])
        assert end.value.code == ExitCode.BAD_INPUT
        assert "--against: the checkpoints of the two runs cannot be compared: torch is not inst" in capsys.readouterr().err


def test_tensorboard_is_asked_for_only_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = shlex.split(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --eval-interval 9 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 257"
    )
    _with(monkeypatch, tensorboard=None)
    preflight(flags, num_replicas=2)
    with pytest.raises(ValueError, match="^--tensorboard-dir: tensorboard is not installed; .* 'tensorboard>=2.16', or leave"):
        preflight([*flags, "--tensorboard-dir", "/tmp"], num_replicas=2)


def test_the_megatron_that_is_imported_is_judged_not_the_one_that_pip_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    assert packages.version("megatron-core") == metadata.version("megatron-core")
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    monkeypatch.setattr(spec, "origin", str(core / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert packages.version("megatron-core") == ""
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc1'\n")
    assert packages.version("megatron-core") == "0.20.0rc1"
    wanted = f"megatron-core is 0.20.0rc1 in {tmp_path}, but 0.19 or newer is needed, and older than 0.20; "
    of_checkout = "check out a release that fits there, or start a script of another checkout"
    assert packages.mistakes(["megatron-core>=0.19,<0.20"]) == [f"{wanted}{of_checkout}"]
    assert seams.refusal(seams.load(), ["a misfit"]) == (
        f"the Megatron in {tmp_path} is not supported; {of_checkout} (megatron-core 0.19):\n  a misfit"
    )
    (tmp_path / "megatron_core-0.20.0rc1.dist-info").mkdir()
    [line] = packages.mistakes(["megatron-core>=0.19,<0.20"])
    assert line.startswith(f"{wanted}put the folder of a checkout of it in PYTHONPATH, or: ") and "pip install" in line
    assert f"the Megatron in {tmp_path} is not supported; install megatron-core 0.19 (pip" in seams.refusal(seams.load(), [])


def test_every_package_is_explained_with_its_use() -> None:
    rows = [re.split(r"  +", line) for line in explain.used_packages().splitlines()[1:]]
    requirements = [*packages.REQUIRED, *(each for extra in packages.EXTRAS.values() for each in extra)]
    assert [row[0] for row in rows] == [packages.name_of(each) for each in requirements]
    assert all(len(row) == 4 and row[3] for row in rows) and explain._USES.keys() == packages.EXTRAS.keys()
