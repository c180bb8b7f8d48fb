"""Which layout to run, and why a running one is slow."""
