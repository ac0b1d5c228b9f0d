"""The OpenAI-compatible front of an engine loop."""
