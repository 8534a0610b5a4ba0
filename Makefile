# Berth: `make help` lists the targets.
GO      ?= go
BIN     := bin/berth
VERSION ?= $(shell git describe --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X github.com/berthkv/berth/internal/config.Version=$(VERSION)
# Where large things that tests install are kept; outside the checkout.
CACHE   ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/berth

.PHONY: help build build-nixl demo test check lint fuzz bench allocs proof hostile chaos soak clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

build: ## build bin/berth, one static binary
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/berth

build-nixl: ## build bin/berth with the nixl link: exchanges data with LMCache; needs a C compiler, and NIXL's library at run time
	@CGO_ENABLED=1 $(GO) build -trimpath -tags nixl -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/berth

demo: build ## move real KV cache between real processes and compare every answer (DEMO='--link tcp --chaos ...')
	@$(BIN) demo $(DEMO)

test: ## run the whole test suite with the race detector
	@command -v $${CC:-cc} >/dev/null || { echo "make test needs a C compiler for the race detector: install gcc, or set CC"; exit 1; }
	@command -v python3 >/dev/null || { echo "make test needs Python 3.10 or later for the tests against libzmq: install python3"; exit 1; }
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make test needs Python 3.10 or later; this is $$(python3 --version)"; exit 1; }
	$(GO) test -race -shuffle=on -timeout 15m ./...
	$(GO) test -race -tags nixl ./internal/config
	@echo "all random histories of reserve and outbound: fewer run with the race detector"
	$(GO) test -run 'TestAgainstModel|TestRandomHistories' ./internal/reserve ./internal/outbound

# Real LMCache peers, in an environment of their own outside the checkout.
LMCACHE := $(CACHE)/lmcache-1
INTEROP  = BERTH_LMCACHE_PYTHON=$(LMCACHE)/bin/python BERTH_NIXL_LIB=$$(ls -d $(LMCACHE)/lib/python3*/site-packages/.nixl_cu13.mesonpy.libs) CGO_ENABLED=1

.PHONY: lmcache interop compare
lmcache:
	@command -v $${CC:-cc} >/dev/null || { echo "interop: a C compiler is needed for the nixl link: install gcc, or set CC"; exit 1; }
	@bash interop/peers/install.sh $(LMCACHE)

interop: lmcache ## exchange real bytes with real LMCache peers, both ways (installs them: 6.7 GB in CACHE)
	$(INTEROP) $(GO) test -count=1 -tags 'nixl interop' -timeout 15m -v $(if $(RUN),-run '$(RUN)') ./interop

compare: lmcache ## the same scenarios with LMCache and Berth on either side, as a table
	@$(INTEROP) $(GO) test -count=1 -tags 'nixl interop' -timeout 14m -run Compare -v ./interop | grep -v '^=== '

.PHONY: python python-test
python: ## build the wheel of berth-kv, the Python client and vLLM connector, into dist/
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make python needs Python 3.10 or later; this is $$(python3 --version)"; exit 1; }
	@[ -x dist/venv/bin/python ] || python3 -m venv dist/venv
	@rm -f dist/berth_kv-*.whl
	@dist/venv/bin/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist ./python
	@ls dist/berth_kv-*.whl

python-test: build python ## test the Python client against real agents, from its wheel
	@bash python/tests/run.sh $(PYTEST)

# Real vLLM, in an environment of its own outside the checkout.
VLLM := $(CACHE)/vllm-1

.PHONY: vllm vllm-short demo-vllm bench-vllm
vllm: build python lmcache ## test the vLLM connector on servers of real vLLM, and with LMCache's proxy (installs both: 14 GB in CACHE)
	@bash python/tests/install-vllm.sh $(VLLM) lmcache $(LMCACHE)/bin/python
	@KV_TEST_LMCACHE=$(LMCACHE)/bin/python bash python/tests/run-vllm.sh $(VLLM) $(or $(PYTEST),$(addprefix tests/vllm/test_,vllm.py settings.py bfloat16.py))

vllm-short: build python ## its hooks over real agents and caches, and one pair of servers (installs vLLM: 7 GB in CACHE)
	@bash python/tests/install-vllm.sh $(VLLM)
	@bash python/tests/run-vllm.sh $(VLLM) $(or $(PYTEST),tests/vllm/test_connector.py tests/vllm/test_short.py)

demo-vllm: build python ## ask real vLLM a few questions through Berth, and see where the KV went (installs it: 7 GB in CACHE)
	@bash python/tests/install-vllm.sh $(VLLM)
	@bash python/tests/run-vllm.sh $(VLLM) demo.py

bench-vllm: build python ## time to first token through Berth's 1P1D beside plain vLLM and vLLM's NixlConnector (BENCH='--rounds 5')
	@bash python/tests/install-vllm.sh $(VLLM) nixl
	@bash python/tests/run-vllm.sh $(VLLM) cost.py $(BENCH)

check: lint ## formatting, vet, linters, tidy modules, tests with and without invariants, short fuzzing
	$(GO) test -race -shuffle=on -tags invariants -timeout 15m ./...
	$(MAKE) test
	$(MAKE) fuzz FUZZTIME=10s

# Built from source at the first run, which takes some minutes; kept in Go's cache.
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.6.2
lint: ## formatting, vet, linters (.golangci.yml), tidy modules
	@out=$$(gofmt -l .); [ -z "$$out" ] || { echo "not gofmt'ed:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(GO) mod tidy -diff
	$(GO) run $(GOLANGCI) run --timeout 15m ./...

FUZZTIME ?= 60s
# A worker that is busy when the time is over makes Go's fuzzer report "context deadline exceeded" though it found nothing: no finding.
fuzz: ## fuzz every decoder for FUZZTIME each
	@for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
	    echo "$$p $$f"; \
	    out=$$($(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p 2>&1) && rc=0 || rc=1; \
	    echo "$$out" | tail -3; \
	    if [ $$rc = 1 ]; then \
	      echo "$$out" | grep -qx '    context deadline exceeded' && ! echo "$$out" | grep -q 'Failing input' || { echo "$$out"; exit 1; }; \
	    fi; \
	  done; done

bench: ## run the Go benchmarks
	$(GO) test -run '^$$' -bench . -benchmem ./...

allocs: ## compare the allocations of the hot paths' benchmarks with .ci/allocs.txt
	@GO='$(GO)' .ci/allocs

hostile compare: SHELL := bash
hostile compare: .SHELLFLAGS := -o pipefail -c
hostile: ## set every attack of the tables on an agent and a proxy: what honest requests take without and with it, and its memory
	@$(GO) test -count=1 -timeout 15m -run '^TestHostile(Proxy)?$$' -v ./internal/e2e -hostile | sed -nE 's/^ *hostile(_proxy)?_test.go:[0-9]+: \|/|/p; /FAIL/p; /^ok/p'

PROOF ?= ci
proof: export GOMEMLIMIT ?= 15GiB
proof: ## explore every interleaving of the cores in small systems, faults included (PROOF=full: more faults, an hour and 16 GB)
	$(GO) test -count=1 -timeout 24h -run '^TestProof$$' -v ./internal/explore -proof $(PROOF)
	$(GO) test -count=1 -timeout 24h -run 'TestPlants|TestException|TestReplay|TestReduction|TestTwins' ./internal/explore -proof $(PROOF)

CHAOS ?= full
SEED  ?= 0
SOAK  ?= 1h
chaos: build ## kill, stop, cut and starve a deployment of real processes under load (CHAOS=short as in CI, SEED=n)
	$(GO) test -count=1 -timeout 2h -run '^TestChaos$$' -v ./internal/chaos -berth ../../$(BIN) -chaos $(CHAOS) -seed $(SEED)

soak: build ## the same for an hour without killing agents; says what grows (SOAK=5m, SEED=n)
	$(GO) test -count=1 -timeout 12h -run '^TestSoak$$' -v ./internal/chaos -berth ../../$(BIN) -soak $(SOAK) -seed $(SEED)

.PHONY: sim
SEEDS    ?= 200
REQUESTS ?= 2000
sim: ## simulate whole nodes on virtual time, with faults: SEEDS seeds from SEED on, of REQUESTS each (SIM='-json -load hot')
	$(GO) run ./internal/sim/cmd -seed $(SEED) -seeds $(SEEDS) -requests $(REQUESTS) $(SIM)

clean: ## remove what was built
	rm -rf bin dist
