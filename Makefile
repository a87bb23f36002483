# inferd: what one does with the source tree. Every verb does what it needs first, and nothing twice.
#
#   make setup    system packages (as root on Debian or Ubuntu), .venv with everything for development, the extensions.
#                 WITH="clients tensorflow tensorrt" adds what more tests need: clients in other languages and proxies
#                 (as root on Debian); TensorFlow, and real packages of TensorRT, for which no GPU is needed, each in an
#                 environment of its own
#   make build    the Cython extensions in place, those of bench/ and tests/ too; BUILD=debug or BUILD=asan for those builds
#   make serve    the demo: makes its model repository and serves it on 127.0.0.1:8001
#   make test     all tests but the long ones, in JOBS=3 processes, after lint; this is what CI runs.  ARGS='-k codec -x'
#                 goes to pytest
#   make lint     ruff, mypy, cython-lint
#   make instructions  fails where a call needs over 1 % more instructions than recorded; needs valgrind
#   make fuzz     the coverage-guided fuzz targets, TIME=60 seconds each
#   make simulate SEEDS=1000 whole servers in virtual time, each as its seed says; SEED=n runs one and tells its story;
#                 CROWD=40000: so many calls more in each, by clients in C. In the debug build, with all assertions, which
#                 lies in a copy of the tree; WITH=release: in the build that is in place
#   make mutants  mutants of the native code, drawn at random, for HOURS=1: who finds each, simulations or tests?
#                 PACKAGE="memory gpu": of these only. It may be killed, and goes on from its record (CONTRIBUTING.md)
#   make soak     the long tests; new examples for tests of properties; random clients through both doors, every answer
#                 checked; hostile clients; Python workers that are killed; models on demand; all features at once for
#                 SECONDS=1800. WITH=asan or WITH=tsan: workers, all features and the conformance suite, with the whole
#                 server under that sanitizer
#   make bench    measures the server and its peers, writes bench/results/
#   make gpu      tests and measurements that need a GPU: gpu-tests.json, gpu-bench.json
#   make wheel    dist/: a wheel that brings its libraries, and the source distribution; both are tried. For another
#                 interpreter: PYTHON=python3.13 VENV=build/python3.13
#   make image    the image of the Dockerfile, TARGET=cpu, with docker or buildah (tools/image.sh); it is tried
#   make clean    everything made here, .venv included
#
# What is generated and committed: tools/generate_pb.py makes inferd_client/pb/, tools/generate_docs.py tables of docs/.
#
# Variables: PYTHON (python3), PORT (8001), TORCH_INDEX (where the CPU build of torch is found, should the package
# sources that pip is configured with lack it).

PYTHON ?= python3
PORT ?= 8001
BUILD ?= release
TIME ?= 60
SECONDS ?= 1800
SEEDS ?= 1000
SEED ?=
HOURS ?= 1
PACKAGE ?=
CROWD ?=
TARGET ?= cpu
JOBS ?= 3
ARGS ?=
WITH ?=
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
TENSORRT := build/tensorrt
LEAN := 11.4.0.106
TENSORFLOW := build/tensorflow
TENSORFLOW_VERSION := 2.21.0
RTX := 1.7.1.116
SIMULATED := $(if $(filter release,$(WITH)),$(PY),tools/sanitize.sh debug)
NATIVE := $(shell find _native backends inferd_client -name '*.pyx' -o -name '*.px[di]' -o -name '*.h' 2>/dev/null) \
    $(wildcard backends/triton_api/*.c)
CHECKS := $(shell find bench tests -name '*.pyx' -o -name '*.px[di]' -o -name '*.h' 2>/dev/null)

# The files below are stamps: empty, newer than what their step was made from. Extensions are compiled while packages are
# installed, which is what most of the time to the first answer goes to.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += --jobs=2
endif
TOOLS := $(VENV)/.tools
DEMONSTRABLE := $(VENV)/.demonstrable
INSTALLED := $(VENV)/.installed
PACKING := $(VENV)/.packing
COMMAND := $(VENV)/.command
SERVABLE := build/.servable-$(BUILD)
BUILT := build/.built-$(BUILD)
DEMO := demo/.made

export PIP_ROOT_USER_ACTION := ignore
# Compiled modules are kept: servers, workers and tests start in half the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup build serve test lint instructions compiled-tests fuzz simulate mutants soak soak-release soak-asan soak-tsan bench gpu wheel image clean with-clients with-tensorflow with-tensorrt
.DELETE_ON_ERROR:

setup: $(COMMAND) $(INSTALLED) build $(addprefix with-,$(filter-out asan tsan release,$(WITH)))

$(VENV)/.created: tools/system_packages.sh
	tools/system_packages.sh $(PYTHON)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	touch $@

$(TOOLS): $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install pip setuptools wheel Cython -c constraints.txt
	touch $@

# torch is installed on its own, by its CPU version: a plain `torch` is gigabytes of CUDA libraries. Of these packages a
# small part is imported, and compiled then: to compile all takes half a minute.
$(DEMONSTRABLE): $(TOOLS)
	$(PIP) install --no-compile --no-deps 'torch==$(TORCH_VERSION)+cpu' || \
	    $(PIP) install --no-compile --no-deps 'torch==$(TORCH_VERSION)+cpu' --index-url $(TORCH_INDEX)
	$(PY) tools/requirements.py demo > $(VENV)/demo.txt
	$(PIP) install --no-compile -r $(VENV)/demo.txt -c constraints.txt
	touch $@

# The last line makes sure that nothing replaced torch.
$(INSTALLED): $(COMMAND)
	$(PY) tools/requirements.py dev > $(VENV)/dev.txt
	$(PIP) install -r $(VENV)/dev.txt -c constraints.txt
	$(PY) -c 'import torch; assert torch.version.cuda is None, "this torch is not the CPU build"'
	touch $@

# The extensions are built by `make build`; the editable install only makes the command `inferd` and the import paths.
$(COMMAND): $(DEMONSTRABLE) pyproject.toml
	PYTHONWARNINGS=ignore INFERD_ONLY=none $(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

build: $(BUILT)

# Only one kind of build lies in the tree: changing the kind, or how extensions are built, builds everything anew. The
# extensions of bench/ and tests/ are no part of what `make serve` waits for.
$(SERVABLE): $(TOOLS) setup.py $(NATIVE)
	@other=$$(ls build/.servable-* build/.built-* 2>/dev/null | grep -v -e '-$(BUILD)$$'); \
	INFERD_PART=server INFERD_BUILD=$(BUILD) $(PY) setup.py -q build_ext --inplace \
	    $(if $(wildcard $@),$(if $(filter setup.py,$?),--force),$${other:+--force}) && rm -f $$other
	touch $@

$(BUILT): $(SERVABLE) setup.py $(CHECKS)
	@INFERD_PART=checks INFERD_BUILD=$(BUILD) $(PY) setup.py -q build_ext --inplace \
	    $(if $(wildcard $@),$(if $(filter setup.py,$?),--force),--force)
	touch $@

with-clients: $(INSTALLED) $(BUILT)
	tools/client_packages.sh $(PY)

# By their own names and without dependencies: the package that would gather them fetches libraries from NVIDIA's index.
with-tensorflow: $(TENSORFLOW)/.installed-$(TENSORFLOW_VERSION)

# Apart: it wants other versions of packages than the server is tested with.
$(TENSORFLOW)/.installed-$(TENSORFLOW_VERSION): $(VENV)/.created
	test -x $(TENSORFLOW)/bin/python || $(PY) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/python -m pip --disable-pip-version-check --quiet install tensorflow-cpu==$(TENSORFLOW_VERSION)
	touch $@

with-tensorrt: $(TENSORRT)/.installed-$(LEAN)-$(RTX)

$(TENSORRT)/.installed-$(LEAN)-$(RTX): $(VENV)/.created
	test -x $(TENSORRT)/bin/python || $(PY) -m venv $(TENSORRT)
	$(TENSORRT)/bin/python -m pip --disable-pip-version-check --quiet install numpy
	$(TENSORRT)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
	    tensorrt-lean-cu13-libs==$(LEAN) tensorrt-lean-cu13-bindings==$(LEAN) \
	    tensorrt-rtx-cu13-libs==$(RTX) tensorrt-rtx-cu13-bindings==$(RTX)
	touch $@

$(DEMO): $(wildcard examples/*.py examples/digits/*.py examples/ensembles/*.py examples/ensembles/*/*.py) | $(COMMAND)
	$(PY) examples/digits/make_repository.py demo/models
	$(PY) examples/ensembles/make_repository.py demo/models
	touch $@

serve: $(COMMAND) $(DEMO) $(SERVABLE)
	$(VENV)/bin/inferd serve --model-repository demo/models --grpc-port $(PORT)

# What fails beside other tests is run once more, alone: that tells a busy machine from a fault.
test: setup
	@$(MAKE) --no-print-directory --output-sync=target lint compiled-tests
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m "not long" $(ARGS) || \
	    $(PY) -m pytest -q --last-failed --last-failed-no-failures none

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint _native backends inferd_client bench examples tests  # it runs pycodestyle

instructions: setup
	$(PY) -m bench.instructions --check

# Each process that runs tests would compile all of them itself: they are compiled beside lint, which needs one processor.
compiled-tests: setup
	@$(PY) -m pytest -q --collect-only > /dev/null || true

fuzz: setup
	$(PY) -m tests.fuzz --seconds $(TIME)

simulate: setup
	$(SIMULATED) -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --random) $(if $(CROWD),--crowd $(CROWD))

# It leaves the processors to whatever else runs.
mutants: setup
	nice -n 19 $(PY) -m tests.mutants --hours $(HOURS) $(if $(PACKAGE),--package $(PACKAGE)) $(ARGS)

soak: setup $(addprefix soak-,$(or $(filter asan tsan,$(WITH)),release))

soak-release: setup
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m long
	INFERD_NEW_EXAMPLES=1 $(PY) -m pytest -q -m hypothesis -n $(JOBS) tests
	INFERD_STATEFUL_EXAMPLES=2000 $(PY) -m pytest -q tests/native/test_calls_stateful.py tests/engine/test_requests_stateful.py
	INFERD_CROSSTALK_REQUESTS=300000 INFERD_EFFORT=10 $(PY) -m pytest -q tests/engine/test_crosstalk.py tests/native/test_codec.py
	INFERD_EVERY_TAKE=1 $(PY) -m pytest -q tests/simulation/test_simulation.py -k refused
	$(PY) -m tests.simulation --seeds 0 --twice --first $$(od -An -N4 -tu4 /dev/urandom) --seconds 150
	$(PY) -m tests.simulation --seeds 0 --first $$(od -An -N4 -tu4 /dev/urandom) --seconds 150 --crowd 40000
	tools/sanitize.sh debug -m tests.simulation --seeds 0 --first $$(od -An -N4 -tu4 /dev/urandom) --seconds 300
	INFERD_UPDATE_SECONDS=60 $(PY) -m pytest -q tests/proxy
	$(PY) -m tests.storms.soak
	$(PY) -m tests.storms.abuse
	$(PY) -m tests.storms.chaos
	$(PY) -m tests.storms.demand
	$(PY) -m tests.storms.leaving
	$(PY) -m tests.storms.mixed --seconds $(SECONDS)

soak-asan soak-tsan: setup
	tools/sanitize.sh $(@:soak-%=%) tests/conformance -n $(JOBS) --dist loadfile
	tools/sanitize.sh $(@:soak-%=%) -m tests.storms.chaos --instrumented --seconds 300
	tools/sanitize.sh $(@:soak-%=%) -m tests.storms.leaving --instrumented --seconds 60 --times 3
	tools/sanitize.sh $(@:soak-%=%) -m tests.storms.mixed --instrumented --seconds $(SECONDS)

bench: setup
	$(PY) -m bench.run

gpu: setup
	INFERD_GPU_REPORT=gpu-tests.json $(PY) -m pytest -q -rs tests/gpu $(ARGS)
	$(PY) -m bench.gpu gpu-bench.json

$(PACKING): $(TOOLS)
	$(PY) tools/requirements.py packing > $(VENV)/packing.txt
	$(PIP) install -r $(VENV)/packing.txt -c constraints.txt
	touch $@

# No framework is needed. INFERD_ONLY: a source distribution has no need of translated extensions.
wheel: $(PACKING)
	rm -rf build/wheel dist
	$(PIP) wheel --no-build-isolation --no-deps -w build/wheel .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" auditwheel repair --strip -w dist build/wheel/*.whl
	INFERD_ONLY=none $(PY) setup.py -q sdist
	$(VENV)/bin/twine check --strict dist/*
	$(VENV)/bin/check-wheel-contents dist/*.whl
	$(PY) -m pytest -q tests/packaging/test_wheel.py

image: setup
	tools/image.sh $(TARGET)
	INFERD_IMAGE=localhost/inferd:$(TARGET) $(PY) -m pytest -q tests/packaging/test_image.py

clean:
	rm -rf $(VENV) build dist demo *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache fuzz-corpus
	find _native backends inferd_client bench tests -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
