"""Build DFlash pairs (target + block-diffusion drafter) into engines and run them."""

__version__ = "0.1.0"
