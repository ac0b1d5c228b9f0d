"""Answers the same prompts with several engine directories of as many ranks as there are, one after the other.

Arguments: a JSON list of prompts (token ids), the number of new tokens, and the directories. Rank 0 prints for each
directory a JSON list of lists: the tokens with the drafter, and those without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dflash_trt.runtime import Generator, Request
from dflash_trt.runtime.lockstep import follow, lead
from dflash_trt.runtime.open import open_engine_on, open_session
from dflash_trt.runtime.world import find_world

prompts, length, directories = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]

with find_world() as world:
    for directory in directories:
        engine = open_engine_on(world, Path(directory), "generate")
        answers = []
        for draft in (True, False):
            session = open_session(engine, draft=draft, threads=1, world=world)
            if world.rank:
                follow(session, world)
                continue
            requests = [Request(prompt, length, ignore_eos=True, id=str(n)) for n, prompt in enumerate(prompts)]
            tokens: list[list[int]] = [[] for _ in prompts]
            with lead(session, world) as leading:
                for out in Generator(leading).generate(requests):
                    tokens[int(out.request_id)] += out.token_ids
            answers.append(tokens)
        if world.rank == 0:
            print(json.dumps(answers), flush=True)
