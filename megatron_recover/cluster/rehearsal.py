"""A simulated scenario on real processes: the command that runs it, and the duration of its steps.

A small GPT stands for the model. `scripts/paced_pretrain.py` stretches each forward and backward to
the scenario's wall time, so the number of cores matters little. Dealing, sums, votes and recovery
are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_recover.observe.goodput import Goodput, StepTime
from megatron_recover.observe.history import History
from megatron_recover.shipped import shipped
from megatron_recover.sim.timed.models import Scenario

PACED = shipped("scripts") / "paced_pretrain.py"
MAX_PROCESSES = 32
"""Maximum of ranks. With more on one machine, the machine is measured and not the job."""
HEADS = 4
"""Attention heads of the model; the tensor parallel size must divide this number."""


def refusals(scenario: Scenario) -> Iterator[str]:
    """Yield why a scenario cannot run on real processes of this machine, one line per reason."""
    job, failures = scenario.job, scenario.failures
    if job.replicas * job.ranks > MAX_PROCESSES:
        yield f"[job] replicas x ranks is {job.replicas * job.ranks}; on one machine it must be at most {MAX_PROCESSES}"
    if job.steps < 2:
        yield "[job] steps is 1; the first step, in which processes warm up, is not compared: give 2 or more"
    if job.ranks < job.stages:
        yield f"[job] stages is {job.stages}, and ranks is {job.ranks}; real processes need a rank for each stage"
    elif HEADS % (job.ranks // job.stages):
        yield f"[job] ranks / stages is {job.ranks // job.stages}; the small model needs 1, 2 or 4"
    if failures.every_steps is not None or failures.per_gpu_hour is not None:
        yield "[failures] has a rate; real processes take exact [[fault]] tables"
    if scenario.repair is not None or job.gpus_a_rank > 1:
        yield "[repair] and gpus_a_rank of [job] are for the simulator only; leave them out"


def flags(scenario: Scenario, data: Path) -> list[str]:
    """Return the script and its flags, as they follow `--` in `megatron-recover run`.

    `data`: the prefix of an indexed data set, for `--data-path`.
    """
    job = scenario.job
    text = (
        f"--num-layers {max(2, job.stages)} --hidden-size 32 --num-attention-heads {HEADS} --seq-length 32"
        f" --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size {job.microbatches} --train-iters {job.steps}"
        f" --lr 1e-3 --lr-decay-style constant --seed {job.seed} --tensor-model-parallel-size {job.ranks // job.stages}"
        f" --pipeline-model-parallel-size {job.stages} --tokenizer-type NullTokenizer --vocab-size 257 --split 80,20,0"
        f" --log-interval 1 --eval-interval 1000000 --eval-iters 1 --recover-bucket-elements 8000"
        f" --recover-heal off"  # as in the simulation: `refusals` allows no [repair]
        f" --paced-forward-s {scenario.compute.microbatch_s * scenario.compute.forward_share}"
        f" --paced-backward-s {scenario.compute.microbatch_s * (1 - scenario.compute.forward_share)}"
    )
    return [str(PACED), *text.split(), "--data-path", str(data)]


def step_times(run_dir: Path) -> tuple[StepTime, ...]:
    """Return the times of all committed training steps of a run, from its trace."""
    return tuple(one for one in Goodput(History.read(run_dir)).steps if one.is_training)
