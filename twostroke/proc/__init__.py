"""One main per process: the only place where parts are wired together."""
