# Everything runs from the repository root by relative paths, in one virtual environment:
#   make demo | test | lint | bench
# A path with a space in it is fine: nothing below uses a pip-made script (their shebangs cannot
# hold a space) and nothing is a make target by file name. Inductor quotes torch's own folders;
# what it does not quote is its cache folder, so that stays where torch puts it (under TMPDIR).

PYTHON ?= python3
VENV ?= .venv
OUT ?= demo_output
PY = "$(VENV)/bin/python"
# -P keeps the repository root off sys.path: our `nodes` must not hide the host's module.
PYTEST = $(PY) -P -m pytest

# Pinned for tests; the pack itself takes torch 2.7 and newer.
TORCH = torch==2.14.1 torchvision==0.29.1

.PHONY: help venv chromium lint unit slow host browser gpu test demo bench clean

help:
	@echo "make demo    run Z-Image and Qwen-Image off, default and max in a real ComfyUI, on CPU"
	@echo "make test    lint, types, unit tests, tests in a real ComfyUI, browser tests"
	@echo "make lint    ruff and mypy"
	@echo "make gpu     tests on a CUDA device"
	@echo "make bench   benchmarks (needs a CUDA device)"
	@echo "make clean   remove the virtual environment, the cache and all output"
	@echo "COMFYUI_PATH=/path/to/ComfyUI makes demo and test use that host."

# The stamp holds a checksum of what was asked for, so a second run installs nothing.
venv:
	@set -e; \
	want="$$(cat pyproject.toml tests/host/requirements.txt Makefile | cksum)"; \
	if [ "$$(cat "$(VENV)/stamp" 2>/dev/null)" != "$$want" ]; then \
		$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "make needs Python 3.11 or newer; found " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11.")'; \
		if [ ! -x "$(VENV)/bin/python" ] || ! $(PY) -m pip --version >/dev/null 2>&1; then \
			echo "making a virtual environment in $(VENV)"; \
			$(PYTHON) -m venv "$(VENV)" 2>/dev/null || { \
				rm -rf "$(VENV)"; \
				$(PYTHON) -m virtualenv --version >/dev/null 2>&1 \
					|| $(PYTHON) -m pip install --quiet virtualenv \
					|| $(PYTHON) -m pip install --quiet --user --break-system-packages virtualenv; \
				$(PYTHON) -m virtualenv --quiet "$(VENV)"; \
			}; \
		fi; \
		$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["test"], sep="\n")' > "$(VENV)/pack-requirements.txt"; \
		echo "installing torch, the host's requirements and the test tools"; \
		$(PY) -m pip install --quiet $(TORCH) -r tests/host/requirements.txt -r "$(VENV)/pack-requirements.txt"; \
		echo "$$want" > "$(VENV)/stamp"; \
	fi

# Never an error: the browser tests then say in the summary that they did not run.
chromium:
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
		echo "installing chromium for the browser tests"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
			|| echo "BROWSER TESTS WILL NOT RUN: chromium could not be installed"; \
	else \
		echo "BROWSER TESTS WILL NOT RUN: install Chromium first: sudo apt-get install -y chromium"; \
	fi

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

UNIT = $(PYTEST) -q -n 2 --dist loadfile --timeout 300

unit: venv
	$(UNIT) -m "not slow and not host and not browser" tests

# Unit tests that compile blocks, and the long fuzzing run.
slow: venv
	$(UNIT) -m "slow and not host and not browser" tests

host: venv
	$(PY) -P tests/host/provision.py
	$(PYTEST) -q -n 2 --dist loadfile --timeout 600 -m "host and not browser" tests

# Named by folder, so that losing the browser tests is an error ("no tests collected").
browser: venv chromium
	@if [ -d tests/browser ]; then set -x; $(PYTEST) -q --timeout 600 -m browser tests/browser; \
	else echo "no browser tests in this checkout"; fi

# On a machine with a CUDA device; without one every test here says so.
gpu: venv
	$(PY) -P tests/host/provision.py
	$(PYTEST) -q --timeout 1800 tests/gpu tests/speed/kernels

test: lint unit slow host browser

demo: venv
	$(PY) tests/host/demo.py --output "$(OUT)"

bench: venv
	@test -n "$(COMFYUI_PATH)" || { echo "make bench needs COMFYUI_PATH=/path/to/ComfyUI and a CUDA device"; exit 1; }
	$(PY) -m bench.kernels
	$(PY) -m bench.levers --comfy "$(COMFYUI_PATH)" --fp32
	$(PY) -m bench.compile_modes --comfy "$(COMFYUI_PATH)"
	$(PY) -m bench.verify --comfy "$(COMFYUI_PATH)"
	$(PY) -m bench.vae --comfy "$(COMFYUI_PATH)"
	$(PY) -m bench.restart --comfy "$(COMFYUI_PATH)"
	$(PY) -m bench.kernel_times --comfy "$(COMFYUI_PATH)"

clean:
	rm -rf "$(VENV)" .cache .mypy_cache .ruff_cache demo_output test_output
