# `make demo` and `make test` each do all set-up on a fresh machine, then run. See scripts/setup_env.py for how torch is found.
# `make PYTHON=/path/to/python test` chooses the Python whose torch is used.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
            $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
VENV   := .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.onepass-ready
XDIST   = $(shell $(RUN) -c "import xdist" 2>/dev/null && printf '%s' '-n 2')

.PHONY: demo quick test test-all lint docs gpu-test campaign setup clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	@$(RUN) -m onepass demo

# The inner loop: the IR, plans and a few kernels, in less than a minute.
QUICK := test_ir.py test_monoid.py test_simplify.py test_criterion.py test_shape.py test_plan.py \
         test_codegen.py::test_every_kind_of_schedule
quick: $(STAMP)
	@$(RUN) -m pytest $(XDIST) $(addprefix tests/cpu/,$(QUICK))

test: lint
	@$(RUN) -m pytest $(XDIST) tests/cpu

# What takes long as well: whole models, larger cases.
test-all: lint
	@$(RUN) -m pytest $(XDIST) -m "" tests/cpu

gpu-test: $(STAMP)
	@$(RUN) -m pytest tests/gpu

# Random graphs against float64, resumable by seed: make campaign SEEDS=0:100000
SEEDS ?= 0:30000
campaign: $(STAMP)
	@mkdir -p build/campaign
	@$(RUN) -m tests.campaign.graphs --stage oracle --seeds $(SEEDS) --log build/campaign/oracle.jsonl
	@$(RUN) -m tests.campaign.graphs --stage pairs --seeds 0:27000 --log build/campaign/pairs.jsonl
	@$(RUN) -m tests.campaign.graphs --stage "pair kernels" --seeds 0:4340 --log build/campaign/pair_kernels.jsonl
	@$(RUN) -m tests.campaign.graphs --stage interpret --seeds 0:3000 --log build/campaign/interpret.jsonl
	@$(RUN) -m tests.campaign.graphs --stage schedules --seeds 0:3000 --log build/campaign/schedules.jsonl
	@$(RUN) -m tests.campaign.graphs --stage families --seeds 0:4000 --log build/campaign/families.jsonl
	@$(RUN) -m tests.campaign.graphs --stage "one way" --seeds 0:2500 --log build/campaign/one_way.jsonl
	@$(RUN) -m tests.campaign.graphs --stage "other sizes" --seeds 0:3000 --log build/campaign/other_sizes.jsonl
	@$(RUN) -m tests.campaign.graphs --stage integers --seeds 0:3000 --log build/campaign/integers.jsonl
	@$(RUN) -m tests.campaign.store --count 2000 --log build/campaign/store.jsonl
	@$(RUN) -m tests.campaign.workers --count 500 --log build/campaign/workers.jsonl
	@$(RUN) -m tests.campaign.writes --log build/campaign/writes.jsonl
	@$(RUN) -m tests.campaign.crowd --count 64 --log build/campaign/crowd.jsonl
	@$(RUN) -m tests.campaign.interrupts --count 100 --log build/campaign/interrupts.jsonl
	@$(RUN) -m tests.campaign.edges --log build/campaign/edges.jsonl
	@$(RUN) -m tests.campaign.opinfo --log build/campaign/opinfo.jsonl
	@$(RUN) -m tests.campaign.graphs --stage compile --seeds 0:500 --log build/campaign/compile.jsonl

lint: $(STAMP)
	@$(call if_installed,ruff,check .)
	@$(call if_installed,ruff,format --check .)
	@$(call if_installed,mypy,)

# The documentation as a site, in build/site. What builds it goes into an environment of its own.
DOCS := build/docs-env
docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet && echo "the site is in build/site"

$(DOCS)/.ready: pyproject.toml
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet "mkdocs-material>=9.6"
	@touch $@

setup: $(STAMP)

$(STAMP): pyproject.toml $(wildcard constraints/*.txt) scripts/setup_env.py
	@test -n "$(PYTHON)" || { echo "onepass needs Python 3.11 or later, and none is on PATH. Install one, or: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) scripts/setup_env.py $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up leaves a linter out only where nothing can be installed.
if_installed = if $(RUN) -c 'import $(1)' 2>/dev/null; then $(RUN) -m $(1) $(2); \
               else echo "$(1) is not installed here and could not be: skipped"; fi
