"""Measuring an engine: a load generator over HTTP, and fixed cases over the offline API."""
