"""What to change and why: formulas, what was observed, and verdicts. Arithmetic only, no I/O."""
