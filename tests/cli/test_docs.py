"""What the documents say about flags, exit codes, files and commands is what the code has."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest

from megatron_recover.cluster import chaos
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.faults import FaultPoint
from megatron_recover.megatron.launch.arguments import ADAPTATIONS, FSDP2_REFUSALS, REFUSALS, cpu_refusals, flag_of
from megatron_recover.sim.timed import models

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def _text(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_refused_flag_is_listed_with_its_reason_and_no_other() -> None:
    section = _text("docs/reference/supported.md").split("## Refused")[1].split("\nOn a CPU")[0]
    listed = {}
    for row in re.findall(r"^\| (`--.+) \| (.+) \| (.+) \|$", section, re.MULTILINE):
        flags, because, instead = (cell.replace("`", "") for cell in row)
        listed |= dict.fromkeys(re.findall(r"--[\w-]+", flags), (because, instead))
    assert listed == {refusal.flag: (refusal.because, refusal.instead) for refusal in REFUSALS}


def test_what_is_refused_with_fsdp2_is_listed_with_its_reason_and_no_other() -> None:
    section = _text("docs/reference/supported.md").split("## With `--use-torch-fsdp2`")[1].split("\n## ")[0]
    rows = [
        tuple(cell.replace("`", "") for cell in row)
        for row in re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)
    ]
    listed = {(what, *why) for what, *why in rows[1:]}
    for refusal in FSDP2_REFUSALS:
        [row] = [row for row in listed if row[0].split(" ")[0] == refusal.flag or row[0] == refusal.flag]
        assert row[1:] == (refusal.because, refusal.instead)
        listed.remove(row)
    assert not listed


def test_every_flag_without_effect_is_listed_with_its_reason_and_no_other() -> None:
    section = _text("docs/reference/supported.md").split("## Without effect")[1].split("## Refused")[0]
    rows = re.findall(r"^\| `(--[\w-]+)`.* \| (.+) \|$", section, re.MULTILINE)
    assert [(flag, because.replace("`", "")) for flag, because in rows] == [(each.flag, each.because) for each in ADAPTATIONS]


def test_what_a_machine_without_cuda_refuses_is_listed_and_no_other() -> None:
    listed = re.findall(r"`(--[\w-]+)`", _text("docs/reference/supported.md").split("\nOn a CPU")[1].split("\n\n")[0])
    refused = Namespace(
        profile=True, use_pytorch_profiler=False, profile_step_start=10, train_iters=11, distributed_backend="nccl",
        transformer_impl="transformer_engine",
    )  # fmt: skip
    assert [line.split()[0] for line in cpu_refusals(refused)] == listed
    refused.distributed_backend, refused.transformer_impl = "gloo", "local"
    assert cpu_refusals(Namespace(**vars(refused) | {"use_pytorch_profiler": True})) == []
    assert cpu_refusals(Namespace(**vars(refused) | {"train_iters": 10})) == []
    in_samples = vars(refused) | {"train_iters": None, "global_batch_size": 1, "step_batch_size_schedule": "9:64,0:16"}
    assert [bool(cpu_refusals(Namespace(**in_samples, train_samples=num))) for num in (160, 176)] == [False, True]


def test_every_recover_flag_is_listed_with_its_default() -> None:
    rows = re.findall(r"^\| `(--recover-[\w-]+)` \| `?([\w.-]+)`? \|", _text("docs/reference/flags.md"), re.MULTILINE)
    defaults = {flag_of(field.name): field.default for field in msgspec.structs.fields(RecoverConfig)}
    assert dict(rows) == {flag: str(value).removesuffix(".0") for flag, value in defaults.items()}


def test_every_exit_code_is_explained() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", _text("docs/reference/exit_codes.md"), re.MULTILINE)
    assert {int(code): name for code, name in rows} == {int(code): code.name for code in ExitCode}


def test_every_fault_point_is_listed_and_no_other() -> None:
    rows = re.findall(r"^\| (`.+?) \|", _text("docs/reference/chaos.md").split("## Fault points")[1], re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [point.value for point in FaultPoint]


def test_the_chaos_files_that_are_shown_are_accepted() -> None:
    files = re.findall(r"^```toml\n(.+?)^```", _text("docs/reference/chaos.md"), re.MULTILINE | re.DOTALL)
    target = chaos.Target(num_replicas=3, num_ranks=1, num_microbatches=9, num_steps=10)
    assert [len(chaos.parse(file, target)) for file in files] == [2, 1]


def test_every_key_of_a_scenario_is_listed_with_its_default() -> None:
    section = _text("docs/reference/scenario.md").split("## Keys of a scenario")[1].split("\n## ")[0]
    table, listed = "", {}
    for key, default in re.findall(r"^\| \**`(\S+)`\** \|(.*?)\|", section, re.MULTILINE):
        table = key[1:-1] if key.startswith("[") else table
        listed[table, "" if key.startswith("[") else key] = default.strip(" `")
    tables = {
        "job": models.JobTable, "compute": models.ComputeTable, "network": models.NetworkTable,
        "failures": models.FailuresTable, "checkpoint": models.CheckpointTable, "drop": models.DropTable,
        "repair": models.RepairTable,
    }  # fmt: skip
    known = {}
    for field in msgspec.structs.fields(models.Scenario):
        if field.name in tables:
            known[field.name, ""] = "none" if field.default is None else ""
            known |= {(field.name, each.name): _default(each) for each in msgspec.structs.fields(tables[field.name])}
        elif field.name != "fault":
            known["", field.name] = _default(field)
    assert listed == known


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is None or field.default is msgspec.NODEFAULT:
        return "none" if field.default is None else ""
    return f"{field.default:.4g}" if isinstance(field.default, float | int) else json.dumps(field.default)


def test_every_package_that_is_imported_is_declared_and_explained() -> None:
    nodes = [node for path in (ROOT / "megatron_recover").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"megatron_recover"}
    others = {"megatron": "megatron-core", "nccl": "nccl4py", "prometheus_client": "prometheus-client"}
    imported = {others.get(name, name) for name in packages}
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *(each for extra, wanted in extras.items() if extra != "dev" for each in wanted)]
    declared = {re.split(r"[\[<>=]", requirement)[0] for requirement in required}
    explained = {*re.findall(r"^\| ([\w-]+)", _text("docs/reference/dependencies.md"), re.MULTILINE), "nccl4py"}
    assert imported - declared == set() and imported - explained == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_document_says_a_paragraph_twice(document: Path) -> None:
    """As a merge of two branches may leave it."""
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    paragraphs = [each.strip() for each in prose.split("\n\n")]
    assert [each for each in {*paragraphs} if len(each) > 100 and paragraphs.count(each) > 1] == []


def test_the_page_of_the_layout_walks_a_launch_from_the_line_to_the_users_script() -> None:
    section = _text("docs/design/architecture.md").split("\n## A launch\n")[1].split("\n## ")[0]
    way = ("flags.split", "cli/launch_line.py", "one_megatron.py", "preflight.py", "`Job`", "cluster/launcher.py",
           "cluster/agent.py", "cluster/forkserver.py", "cluster/warm.py", "Dry run", "cluster/rank_process.py",
           "launch/script.py", "training.begin", "user's script", "upstream's `pretrain`")  # fmt: skip
    places = [section.index(each) for each in way]
    assert places == sorted(places)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_commands_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    rooms = "|".join(path.parent.name for path in (ROOT / "megatron_recover").glob("*/__init__.py"))
    paths = re.findall(rf"`((?:tests|docs|scripts|patches|benchmarks|{rooms})/[\w/-]+\.\w+)`", text)
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "megatron_recover" / path).exists()]
    links = [link for link in re.findall(r"\]\(([^)#:]+)[^)]*\)", text) if not (document.parent / link).exists()]
    targets = re.findall(r"^([a-z-]+):", _text("Makefile"), re.MULTILINE)
    commands = [name for name in re.findall(r"`make ([a-z-]+)`", text) if name not in targets]
    assert (missing, links, commands) == ([], [], []), document.name
