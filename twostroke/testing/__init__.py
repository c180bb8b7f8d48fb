"""Shipped fakes, at the seams that matter: for users, tests and the twin."""
