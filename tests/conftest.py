"""Settings shared by all tests: no network, no progress bars, kernels interpreted, limits left to pytest-timeout."""

import os

from hypothesis import settings

# Triton decides how its functions run when it is first imported, which any test's libraries may do.
os.environ |= {"TRITON_INTERPRET": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
settings.register_profile("dflash", deadline=None)  # two slow cores: a deadline would measure the machine
settings.load_profile("dflash")
