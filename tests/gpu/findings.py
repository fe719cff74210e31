"""What `make gpu-test` decides: a row for each finding about GPUs, passed, failed, or not decidable on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Outcome = Literal["passed", "failed", "skipped"]
Verdict = Literal["passed", "failed", "not decidable"]

FINDINGS: Mapping[str, str] = {
    "G1": "a CUDA machine starts a run, and its ranks train",
    "G2": "this target has run something",
    "G3": "memory that a kernel may still write is not used again",
    "G4": "an error of NCCL is a failed sum and costs no process",
    "G6": "a rank holds between steps what `megatron-recover plan` says",
    "G7": "sums take one stream and one set of scratch",
    "G8": "a second pass keeps the gradients of the first, also with Transformer Engine",
    "G9": "no two replicas of a node use one name",
    "G10": "`exact` is bit-identical",
    "G11": "synchronisations a step do not grow with buckets",
    "G12": "samples that are read ahead reach the device without a wait",
    "G15": "replicas stay bit-identical over NCCL's own sums",
    "G16": "a peer that dies over NVLink takes nobody along",
    "G17": "sums beside a replica's own collectives come to an end",
    "CP": "a job with context parallelism finishes through a death what it began",
    "TE": "a job with layers that only CUDA has finishes through a death what it began",
    "FSDP": "a job whose replicas FSDP2 shards finishes through a death what it began",
    "JOIN": "a lost replica comes back, and reads state that lies on a device",
    "G18": "a microbatch counts as finished when the device has finished it",
}
"""Name of each finding, or of what runs nowhere else (CP, TE, FSDP, JOIN) -> what must hold. Others need no GPU: which Megatron
is judged (G5), how long a save takes (G13: docs/how_to/save_and_resume.md), flags without effect (G14:
`--check-for-large-grads` and `--num-workers` work)."""


WITHOUT_A_GPU: Mapping[str, str] = {
    "G7": "tests/data_plane/test_nccl_logic.py decides it without a GPU",
    "G9": "tests/host/test_names.py decides it without a GPU",
}
"""Why no test on a device decides a finding."""


def verdicts(outcomes: Iterable[tuple[str, Outcome]]) -> dict[str, Verdict]:
    """The verdict on each finding, from (finding, outcome) of each test that is marked with it."""
    found: dict[str, set[Outcome]] = {name: set() for name in FINDINGS}
    for name, outcome in outcomes:
        found[name].add(outcome)
    return {
        name: "failed" if "failed" in each else "passed" if "passed" in each else "not decidable"
        for name, each in found.items()
    }


def table(found: Mapping[str, Verdict], reasons: Mapping[str, str]) -> list[str]:
    """The lines of the table; `reasons` says why something is not decidable."""
    rows = [f"{name:4} {verdict:14} {FINDINGS[name]}" for name, verdict in found.items()]
    return [
        row + (f" ({reasons.get(name, 'no test of this machine decides it')})" if found[name] == "not decidable" else "")
        for row, name in zip(rows, found, strict=True)
    ]


def has_failed(found: Mapping[str, Verdict], *, has_gpu: bool) -> bool:
    """Whether the target fails: something failed, or there is a GPU and nothing was shown on it."""
    return "failed" in found.values() or (has_gpu and "passed" not in found.values())
