"""Serves an engine to many callers: the engine loop, its HTTP front, the life of the process, Triton's model repository."""
