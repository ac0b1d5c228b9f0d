"""Serves an engine to many callers: engine loop, HTTP front, the process's life, Triton's model repository."""
