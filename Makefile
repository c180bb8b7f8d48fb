# make serve ARGS="--port 9000"   serve a model (the default one is fetched once)
# make test  ARGS="-k scheduler"  every test
# make check                      format, lint, types, import rules
# make bench ARGS="--json"        start-up and throughput of this machine
# make setup                      .venv with all that the above need
#
# Each makes .venv when it is missing and installs again when pyproject.toml has changed: the
# stamps live in .venv, so removing .venv is all it takes to start afresh.

RUN := .venv/.installed-run
ALL := .venv/.installed-all

.PHONY: setup serve test check bench

setup: $(ALL)

serve: $(RUN)
	@.venv/bin/twostroke serve $(ARGS)

test: $(ALL)
	@scripts/test $(ARGS)

check: $(ALL)
	@scripts/check

bench: $(RUN)
	@scripts/bench $(ARGS)

$(RUN): pyproject.toml scripts/setup
	@scripts/setup run

$(ALL): pyproject.toml scripts/setup
	@scripts/setup all
