"""The twin: the real scheduler on a virtual clock, with costs in the place of devices."""
