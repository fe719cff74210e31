# `make demo` and `make test` set everything up by themselves; PYTHON=/path/to/python3.12 names an interpreter.
PY := .venv/bin/python
# Tests whose subject is time, to fractions of a second, and that mostly wait: when the others, which compute, are done.
TIMED := tests/cluster
# Those in the same folder whose subject is something else.
UNTIMED := $(patsubst %,$(TIMED)/test_%.py,agent warm endings undying chaos coordinator_driver memory_file)
# What `make nodes-test` and `make slurm-test` run, but the tests of the nodes themselves, which are quick.
NODES := tests/nodes
# All others, which do not overlap with any of these: pytest would run a file of a folder that it is to ignore neither way.
OTHERS := $(filter-out %/__pycache__/ $(TIMED)/ $(NODES)/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)
# What a wheelhouse has beside what every verb needs.
EXTRAS ?= train,plot,tensorboard,metrics
SOURCES := megatron_recover patches scripts tests benchmarks setup.py
export OMP_NUM_THREADS := 1
# Tests start hundreds of programs, and pytest rewrites each test's module: what is compiled once is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test coverage lint explore fuzz sweep repair gpu-test nodes-test long-test slurm-test campaign bench dist wheelhouse licences clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:           ## make .venv (fast when it exists)
	@PYTHON="$(PYTHON)" scripts/setup.sh

demo: setup      ## train on real text, kill real processes, which come back; prove that nothing was lost; FSDP=1: with FSDP2
	@$(PY) -m megatron_recover demo $(if $(FSDP),--fsdp2)

test: setup lint ## everything that CI runs
	@$(PY) -m pytest -q -n 3 -m "not slow" --dist worksteal $(OTHERS) $(UNTIMED) $(NODES)/test_harness.py
	@$(PY) -m pytest -q -n 2 -m "not slow" --dist worksteal $(TIMED) $(UNTIMED:%=--ignore=%)

coverage: setup  ## branch coverage of the protocol by its own tests; fails below the floor (pyproject.toml)
	@$(PY) -m coverage run -m pytest -q tests/core
	@$(PY) -m coverage report

lint: setup      ## ruff (rules and format), mypy --strict, the layer rule
	@$(PY) -m ruff check $(SOURCES)
	@$(PY) -m ruff format --check $(SOURCES)
	@$(PY) -m mypy
	@.venv/bin/lint-imports --no-cache

explore: setup   ## explore more than 10^7 states of the protocol, JOBS scenarios at a time (long)
	@echo "Exploring the larger scenarios (about ten minutes on two cores) ..."
	@$(PY) -m megatron_recover.sim.explore.explorer --config full --jobs $(or $(JOBS),2)

fuzz: setup      ## SEEDS random jobs on a virtual clock from SEED on, each judged (default 10000 from 1)
	@$(PY) -m megatron_recover.sim.timed.fuzz --seeds $(or $(SEEDS),10000) --seed $(or $(SEED),1) --jobs 2
	@$(PY) -m scripts.study.judged_fuzz --seeds $$(( ($(or $(SEEDS),10000) + 9) / 10 )) --seed $(or $(SEED),1) --jobs 2

sweep: setup     ## simulate rates of failures and sizes up to 100,000 GPUs: OUT/sweep.csv and a plot (default runs/sweep; long)
	@$(PY) -m scripts.study.sweep scenarios/large.toml --out $(or $(OUT),runs/sweep) $(if $(LOSSES),--losses $(LOSSES))

repair: setup    ## simulate the return of lost replicas at up to 98,304 GPUs: three tables in OUT (default runs/repair; long)
	@$(PY) -m scripts.study.repair --out $(or $(OUT),runs/repair) $(if $(DAYS),--days $(DAYS))

gpu-test: setup  ## the CUDA and NCCL part, JOBS (4) tests at a time: a row for each finding; says why where there is no GPU
	@$(PY) -m pytest -q -n $(or $(JOBS),4) --dist loadgroup tests/gpu

nodes-test: setup ## jobs on four nodes on this machine, each a set of namespaces, whose nodes die, freeze and are cut off (as root)
	@$(PY) -m pytest -q -n 2 $(NODES) --ignore-glob='$(NODES)/test_slurm*.py'

long-test: setup  ## what `make test` leaves out for time: more jobs, more instants of a death, larger explorations (hours)
	@$(PY) -m pytest -q -n 2 -m slow --dist worksteal $(filter-out tests/slurm/,$(OTHERS)) $(TIMED)

slurm-test: setup ## jobs under a real Slurm on those nodes: what it does when a node dies (as root, with Debian's slurm-wlm and munge)
	@$(PY) -m pytest -q -m slow tests/slurm
	@$(PY) -m pytest -q -n 6 $(NODES)/test_slurm.py
	@$(PY) -m pytest -q -n 2 $(NODES)/test_slurm_scripts.py

campaign: setup  ## real jobs of random shapes until FAULTS (300) random faults from SEED (1) on have struck, each judged (as root: also disks and nodes); ONLY=joins or losses; FSDP=1: with FSDP2; OUT=FILE: the record
	@$(PY) -m tests.system.campaign --faults $(or $(FAULTS),300) --seed $(or $(SEED),1) $(if $(ONLY),--only $(ONLY)) $(if $(FSDP),--fsdp2) $(if $(OUT),--out $(OUT))

bench: setup     ## all benchmarks: a table, and bench.json
	@$(PY) -m benchmarks.run

dist: setup      ## build wheel and source distribution of the commit at HEAD into OUT (default dist)
	@scripts/dist.sh $(or $(OUT),dist)

wheelhouse: setup ## collect this commit's wheel and all that it needs in OUT (default wheelhouse), 3 GB; EXTRAS= for an image: a few MB
	@scripts/wheelhouse.sh $(or $(OUT),wheelhouse) "$(EXTRAS)"

licences: setup  ## write the licences of all dependencies into docs/reference/licences.md
	@$(PY) -m scripts.study.licences

clean:           ## remove .venv and caches, not run directories
	rm -rf .venv .coverage build *.egg-info .pytest_cache .mypy_cache .ruff_cache
