"""What `model.py` is made of: the standard library and numpy alone, for Triton runs it in an interpreter of its own."""
