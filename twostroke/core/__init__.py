"""Decisions only: which request runs what, when. No torch, sockets, threads or `time`."""
