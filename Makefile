# make demo    an environment, then an answer from the bundled pair
# make test    an environment, then the fast tests         ARGS='-k chat' goes on to pytest,
#              on two cores                                WORKERS=0 keeps them in one process
# make lint    ruff's checks and its formatting
# make env     .venv/, which all of these use              PYTHON=python3.12 chooses its Python,
#                                                          PLAN=1 adds what train.plan needs
.PHONY: env demo test lint

VENV := .venv
WORKERS ?= 2
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PROMPT ?= Hello! Could you help me to find a cheap restaurant?

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0

# The environment's own Python, else the first that runs: a name on PATH may be a version
# manager's empty shell. FOUND holds version and name, or nothing.
CHOICES := $(or $(PYTHON),$(PY) python3.12 python3.11 python3 python3.13)
CHECK := import sys; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])
FOUND := $(shell for python in $(CHOICES); do \
	$$python -c '$(CHECK)' 2>/dev/null && echo $$python && break; done)
VERSION := $(word 1,$(FOUND))
NO_PYTHON = make env: none of $(CHOICES) runs as Python 3.11 or later: install one, \
	or name it with make env PYTHON=/path/to/python3.12

# The stamp names what the environment was made from: when that is still so, nothing is done.
STAMP := $(VENV)/.made-$(VERSION)-$(firstword $(shell cksum pyproject.toml))
# A fixed build for Python 3.11: on Linux a newer torch may bring gigabytes of CUDA libraries.
TORCH := $(if $(filter 3.11,$(VERSION)),torch==2.13.0)

env: $(STAMP) $(if $(PLAN),$(STAMP)-plan)

$(STAMP):
	$(if $(VERSION),,$(error $(NO_PYTHON)))
	$(PY) -c 'import pip, sys; assert sys.version.startswith("$(VERSION).")' 2>/dev/null \
		|| $(word 2,$(FOUND)) -m venv --clear $(VENV)
	$(PIP) install --editable '.[serve,plots,test]' $(TORCH)
	rm -f $(VENV)/.made-*
	touch $@

$(STAMP)-plan: $(STAMP)
	$(PIP) install --editable '.[plan]' \
		"jax-cuda13-plugin==$$($(PY) -c 'import jax; print(jax.__version__)')"
	touch $@

demo: env
	$(PY) -m infer.generate --prompt "$(PROMPT)" --compare

test: env
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
