"""Settings shared by all tests: no network, no progress bars, and time limits left to pytest-timeout."""

import os

from hypothesis import settings

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
settings.register_profile("dflash", deadline=None)  # two slow cores: a deadline would measure the machine
settings.load_profile("dflash")
