"""Runs step plans on a device: model, KV pool, attention, sampler."""
