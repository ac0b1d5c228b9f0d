"""Two ranks open engine directories that do not go together. Rank 0 prints, for each case, what the two were told.

Arguments: cases as `DIRECTORY OF RANK 0,DIRECTORY OF RANK 1,VERSION OF RANK 1,BATCH OF RANK 1`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import dflash_trt.runtime.open as runtime
from dflash_trt.errors import DflashError
from dflash_trt.runtime.world import find_world

with find_world() as world:
    for case in sys.argv[1:]:
        *directories, version, batch = case.split(",")
        runtime.__version__ = version if world.rank else "1"
        try:
            runtime.open_engine_on(
                world, Path(directories[world.rank]), "generate", batch=int(batch) if world.rank else 2
            )
            told = ""
        except DflashError as error:
            told = f"{error.exit_code}: {error}"
        answers = world.share("told", told)
        if world.rank == 0:
            print(json.dumps(answers), flush=True)
