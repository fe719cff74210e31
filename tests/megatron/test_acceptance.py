"""Upstream's own configurations: how many are refused must not grow."""

from __future__ import annotations

import pytest

from scripts.study import acceptance
from tests.system import upstream

AT_MOST = {"functional": 201, "release": 14}
"""Of 215 and 14 at core_v0.19.0. Lower these numbers with each flag that is supported; the goal is 30 and 2."""


def test_at_most_so_many_of_upstreams_configurations_are_refused() -> None:
    checkout = upstream.script("pretrain_gpt.py").parent
    configurations = [*acceptance.judged(checkout)]
    print(acceptance.table(configurations))
    assert {each.kind for each in configurations} == {*AT_MOST}
    for kind, number in AT_MOST.items():
        refused = [each.name for each in configurations if each.kind == kind and each.refused]
        assert len(refused) <= number, (kind, refused)


def test_flags_become_words_as_upstreams_runner_makes_them() -> None:
    flags = {"--bf16": True, "--fp16": False, "--lr": 1e-4, "--split": "9,1", "--save": None, "--data-path": "0.5 a 0.5 'b c'"}
    assert acceptance.words(flags) == ["--bf16", "--lr", "0.0001", "--split", "9,1", "--data-path", "0.5", "a", "0.5", "b c"]


def test_the_table_counts_each_configuration_once_and_names_what_one_is_refused_for_alone() -> None:
    told = acceptance.table([
        acceptance.Judged("a", "release", ("--x", "--x", "--y")),
        acceptance.Judged("b", "release", ("--y",)),
        acceptance.Judged("c", "release", ()),
        acceptance.Judged("d", "functional", ()),
    ])  # fmt: skip
    assert told.splitlines() == [
        "functional: 0 of 1 refused", "release: 2 of 3 refused", "", "functional, by flag (for it alone):", "",
        "release, by flag (for it alone):", "    2 (  1)  --y", "    1 (  0)  --x",
    ]  # fmt: skip


def test_a_folder_without_configurations_is_refused(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert acceptance.main([str(tmp_path)]) == 2
    assert "has no model_config.yaml; give a clone of Megatron-LM" in capsys.readouterr().err
