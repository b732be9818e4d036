# make demo    an answer from a real chat model, and what drafting gains; installs no more than that
#              needs. PAIR=demo is the bundled pair, which needs no network.
# make chat    a chat with the same model
# make serve   an OpenAI server with the bundled pair   ARGS='--port 9000' goes on to infer.serve
# make test    the fast tests, on two cores             ARGS='-k chat' goes on to pytest,
#                                                          WORKERS=0 keeps them in one process
# make lint    ruff's checks, its formatting, and a lint of sentences
# make env     .venv/ with all that these need             PYTHON=python3.12 chooses its Python,
#                                                          PLAN=1 adds what the plan programs need
.PHONY: env demo chat serve test lint

VENV := .venv
WORKERS ?= 2
PY := $(VENV)/bin/python
PAIR ?= smollm2

# The environment's own Python, else the first that runs: a name on PATH may be a version
# manager's empty shell. FOUND holds version and name, or nothing.
CHOICES := $(or $(PYTHON),$(PY) python3.12 python3.11 python3 python3.13)
CHECK := import sys; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])
FOUND := $(shell for python in $(CHOICES); do \
	$$python -c '$(CHECK)' 2>/dev/null && echo $$python && break; done)
VERSION := $(word 1,$(FOUND))
NO_PYTHON = make: none of $(CHOICES) runs as Python 3.11 or later: install one, \
	or name it with make PYTHON=/path/to/python3.12

# Stamps name what the environment was made from. The small one stands for what the programs
# need to run, the full one for tests and plots as well. Where a stamp holds, nothing is done.
STAMP := $(VENV)/.made-$(VERSION)-$(firstword $(shell cksum pyproject.toml))
SMALL := $(STAMP)-small
# A fixed build for Python 3.11: on Linux a newer torch may bring gigabytes of CUDA libraries.
TORCH := $(if $(filter 3.11,$(VERSION)),torch==2.13.0)

# Errors only. Modules are compiled when they are first imported, as most never are; a process that
# may not keep what it compiled would do so at every start.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --no-compile --editable

env: $(STAMP) $(if $(PLAN),$(STAMP)-plan)

$(SMALL):
	$(if $(VERSION),,$(error $(NO_PYTHON)))
	@$(PY) -c 'import pip, sys; assert sys.version.startswith("$(VERSION).")' 2>/dev/null \
		|| { echo "Making $(VENV)/ with Python $(VERSION)." \
		&& $(word 2,$(FOUND)) -m venv --clear $(VENV); }
	@echo "Installing jax, flax, transformers and what they need: about 300 MB to download," \
		"1 GB in $(VENV)/, half a minute and the download."
	@$(INSTALL) '.[serve]'
	@rm -f $(VENV)/.made-*
	@touch $@

$(STAMP): $(SMALL)
	@echo "Installing what tests and plots need; torch is the largest part of it."
	@$(INSTALL) '.[serve,plots,test]' $(TORCH)
	@touch $@

$(STAMP)-plan: $(STAMP)
	@echo "Installing the compilers for TPUs and GPUs that train.plan and infer.plan use."
	@$(INSTALL) '.[plan]' \
		"jax-cuda13-plugin==$$($(PY) -c 'import jax; print(jax.__version__)')"
	@touch $@

# Sets PAIR and a question for it: of the bundled pair where the other cannot be had.
CHOOSE_PAIR = PAIR=$(PAIR); $(PY) -m infer.info --pair $$PAIR >/dev/null \
	|| { [ $$? = 2 ] && PAIR=demo && echo "The bundled pair answers instead." >&2; } || exit; \
	ASKED="Why is the sky blue?"; \
	[ $$PAIR != demo ] || ASKED="Hello! Could you help me to find a cheap restaurant?"; \
	ASKED="$(or $(PROMPT),$$ASKED)"

demo: $(SMALL)
	@$(CHOOSE_PAIR); \
	echo "Loading it and compiling for this machine, which takes a while the first time."; \
	echo "It is asked: $$ASKED"; \
	$(PY) -m infer.generate --pair $$PAIR --prompt "$$ASKED" --max-new-tokens 64 --compare demo

chat: $(SMALL)
	@$(CHOOSE_PAIR); $(PY) -m infer.generate --pair $$PAIR --max-new-tokens 512

serve: $(SMALL)
	@$(PY) -m infer.serve $(ARGS)

# Whole files go to the workers, tests/engine as one, in the order that tests/conftest.py gives them.
test: env
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) .ci/sentences
