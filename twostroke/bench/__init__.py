"""Load generators and their reports; they speak HTTP."""
