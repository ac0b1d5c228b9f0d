"""Measures a running engine: whether it says what independent implementations say, and how fast."""
