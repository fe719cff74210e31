"""Scenario files: what is wrong is told with key, line and remedy, and nothing is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover.sim.timed.scenario_file import load, parse

SCENARIOS = Path(__file__).parents[2] / "scenarios"
GOOD = """\
policies = ["recover", "checkpoint-restart"]

[job]
replicas = 4
ranks = 2
stages = 2
microbatches = 32
steps = 5

[compute]
microbatch_s = 1.0

[network]
bytes_per_s = 1e9
gradient_bytes = 1e9

[failures]
every_steps = 2
until_replicas = 2

[checkpoint]
save_s = 2
restart_s = 100
"""
FAULT = """
[[fault]]
replica = 1
rank = 0
point = "backward"
step = 3
"""
ONE_FAULT = GOOD.replace("every_steps = 2\n", "").replace(', "checkpoint-restart"', "") + FAULT


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("replicas = 4", "replica = 4", "line 4: unknown key 'replica'; did you mean replicas?"),
        ("replicas = 4\n", "", "line 3: replicas is missing"),
        ("replicas = 4", 'replicas = "four"', "line 4: replicas: Expected `int`, got `str`"),
        ("replicas = 4", "replicas = 0", "line 4: replicas: Expected `int` >= 1"),
        ("replicas = 4", "replicas = 40", "line 7: microbatches is 32; it must be at least replicas, which is 40"),
        ("stages = 2", "stages = 3", "line 6: stages is 3; it must divide ranks, which is 2"),
        ("replicas = 4", "replicas = 4\nseed = -1", "line 5: seed: Expected `int` >= 0"),
        ("microbatch_s = 1.0", "microbatch_s = -1.0", "line 11: microbatch_s: Expected `float` > 0.0"),
        ("microbatch_s = 1.0", "microbatch_s = nan", "line 11: microbatch_s"),
        ("bytes_per_s = 1e9", "bytes_per_s = inf", "line 14: bytes_per_s: Expected `float` <= 1e+18"),
        ("every_steps = 2", "per_gpu_hour = -1e-5", "line 18: per_gpu_hour: Expected `float` > 0.0"),
        ("every_steps = 2", "every_steps = 2\nper_gpu_hour = 1e-5", "line 19: every_steps and per_gpu_hour are both given"),
        ("until_replicas = 2", "until_replicas = 5", "line 19: until_replicas is 5; it must be at most replicas, which is 4"),
        ("until_replicas = 2", 'at = "dawn"', "line 19: at: Invalid enum value 'dawn'; known are reduction, anywhere"),
        ("[checkpoint]", "[checkpoints]", "line 21: unknown key 'checkpoints'; did you mean checkpoint?"),
        (
            "[checkpoint]\nsave_s = 2\nrestart_s = 100\n",
            "",
            "line 1: policies has checkpoint-restart, which needs a table [check",
        ),
        ("policies = [", "drop = 3\npolicies = [", "line 1: 'drop' is a table; write [drop] and its keys below"),
        ("[network]\nbytes_per_s = 1e9\ngradient_bytes = 1e9", "", "line 1: [network] is missing"),
        ('"recover", ', '"recovr", ', "line 1: policies: Invalid enum value 'recovr'"),
        ('"recover", ', '"checkpoint-restart", ', "line 1: policies has one twice"),
        ('["recover", "checkpoint-restart"]', "[]", "line 1: policies: Expected `array` of length >= 1"),
        ("replicas = 4", "replicas = = 4", "not a TOML file"),
        ("microbatch_s = 1.0", "microbatch_s = 1e300", "line 11: microbatch_s: Expected `float` <= 1000000000.0"),
        ("gradient_bytes = 1e9", "gradient_bytes = 1e308", "line 15: gradient_bytes: Expected `float` <= 1e+18"),
        (
            "gradient_bytes = 1e9",
            "gradient_bytes = 1e9\nlatency_s = 50",
            "line 16: latency_s is 50: with 4 replicas it takes 100 s to begin at all, and follow_s of [failures] is",
        ),
        ("gradient_bytes = 1e9", "gradient_bytes = 1e9\nmessage_s = 30", "line 16: message_s is 30: with 4 replicas it takes"),
        ("bytes_per_s = 1e9", "bytes_per_s = 5", "line 14: bytes_per_s is 5: with 4 replicas it takes 12.8 s to begin at all"),
        (
            "every_steps = 2",
            "every_steps = 2\nfollow_s = 1e-5",
            "line 19: message_s is 2e-05: with 4 replicas it takes",
        ),
    ],
)
def test_a_wrong_scenario_is_refused_with_key_and_line(before: str, after: str, message: str) -> None:
    text = GOOD.replace(before, after)
    assert text != GOOD
    with pytest.raises(ValueError) as refusal:
        parse(text)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("replica = 1", "replica = 4", "line 25: replica is 4; it must be 0 to 3"),
        ("rank = 0", "rank = -1", "line 26: rank is -1; it must be 0 to 1"),
        ("step = 3", "step = 5", "line 28: step is 5; it must be 0 to 4"),
        ("step = 3", "kind = \"stop\"", "line 28: kind stop is not simulated"),
        ("step = 3", "bucket = 1", "line 28: backward is passed for no bucket; leave bucket out, or take reduce"),
        ("step = 3", "microbatch = 3", "line 28: microbatch is not simulated; give the occurrence"),
        ("step = 3", 'until = "generation"', "line 28: until is of a kind that is not simulated; leave it out"),
        ("step = 3", "factor = 2.0", "line 28: factor is of a kind that is not simulated; leave it out"),
        ("step = 3", "steps = 2", "line 28: steps is of a kind that is not simulated; leave it out"),
        ("step = 3", "occurrence = 0", "line 28: occurrence is 0; it must be 1 or more"),
        ('"backward"', '"in_vote"', "line 27: in_vote is not simulated; points are forward, backward"),
        ('"backward"', '"backwards"', "line 27: backwards is not simulated; points are forward, backward, recompute"),
        ("step = 3", "stepp = 3", "line 28: unknown key 'stepp'; did you mean step?"),
        ("[[fault]]", "[fault]", "line 24: write each fault as a [[fault]] table"),
        ("until_replicas = 2", "every_steps = 2", "line 18: every_steps and [[fault]] are both given"),
        ('["recover"]', '["recover", "checkpoint-restart"]', "line 1: with [[fault]] only the policy"),
    ],
)  # fmt: skip
def test_a_wrong_fault_is_refused_with_key_and_line(before: str, after: str, message: str) -> None:
    text = ONE_FAULT.replace(before, after)
    assert text != ONE_FAULT
    with pytest.raises(ValueError) as refusal:
        parse(text)
    assert message in str(refusal.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError) as refusal:
        parse(GOOD.replace("replicas = 4", "replicas = -4").replace("save_s = 2", "save = 2"))
    assert [line.split(":")[0] for line in str(refusal.value).splitlines()] == ["line 4", "line 22", "line 21"]


def test_all_mistakes_of_a_fault_are_told_at_once() -> None:
    wrong = FAULT.replace("replica = 1", "replica = 7").replace("rank = 0", "rank = -1").replace('"backward"', '"in_vote"')
    text = ONE_FAULT.replace(FAULT, wrong + "microbatch = 1\n")
    with pytest.raises(ValueError) as refusal:
        parse(text)
    told = [line.split()[2] for line in str(refusal.value).splitlines()]
    assert told == ["in_vote", "microbatch", "replica", "rank"]
    with pytest.raises(ValueError) as refusal:
        parse(text.replace("ranks = 2", "ranks = 0"))
    told = [line.split()[2] for line in str(refusal.value).splitlines()]
    assert told == ["ranks:", "in_vote", "microbatch"], "of how many is not known"


def test_what_is_right_is_read() -> None:
    assert parse(GOOD).job.replicas == 4
    assert parse(ONE_FAULT).fault[0].step == 3


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.name)
def test_the_scenarios_that_come_with_the_project_are_right(path: Path) -> None:
    load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a TOML file"):
        load(tmp_path / "binary.toml")
