"""Load on a server by `aiperf`, NVIDIA's generator, in its own environment and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.served import Server
from dflash_trt.errors import Failure, UserError

# With these set, aiperf 0.13 takes a tokenizer's path for a name on the hub (ai-dynamo/aiperf, pull request 1339).
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PATIENCE = 600  # seconds


@dataclass(frozen=True)
class Load:
    """What `users`, each sending a request as soon as the last is answered, got. Times in milliseconds."""

    users: int
    requests: int
    tokens: int  # new ones, as the server counts them
    tokens_per_second: float  # of all users
    tokens_per_second_per_user: float  # behind the first token, mean over requests
    first_token: dict[str, float]  # p50, p95; waiting for a slot included
    inter_token: dict[str, float]  # p50, p95; of a request's mean


def write_prompts(prompts: Sequence[str], file: Path) -> Path:
    """As aiperf reads them."""
    file.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
    return file


def check_aiperf(aiperf: Path) -> str:
    """Its version. Raises UserError if it cannot be run."""
    try:
        return subprocess.run([aiperf, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        fix = "`make bench-serving` installs it (requirements-aiperf.txt); or leave the load out with --no-sweep"
        raise UserError(f"aiperf cannot be run: {error}", where=aiperf, fix=fix) from None


def put_load(
    aiperf: Path, server: Server, tokenizer: Path, prompts: Path, *, users: int, requests: int, max_new_tokens: int
) -> Load:
    """Send `requests` greedy chats, `users` of them at any time. Raises Failure if one of them goes wrong."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(aiperf, "profile", "--url", server.url, "--model", server.model),
            *("--endpoint-type", "chat", "--streaming", "--extra-inputs", "temperature:0"),
            # a chunk may hold several tokens: only the server knows how many there are
            *("--use-server-token-count", "--tokenizer", tokenizer, "--osl", max_new_tokens),
            *("--input-file", prompts, "--custom-dataset-type", "single-turn"),
            *("--dataset-sampling-strategy", "sequential"),
            *("--concurrency", users, "--request-count", requests),
            # on a few cores its own processes must not be many
            *("--workers-max", 1, "--record-processors", 1, "--ui", "none"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--export-level", "summary", "--artifact-dir", folder),
        ]
        environment = {name: value for name, value in os.environ.items() if name not in _OFFLINE}
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, timeout=_PATIENCE
        )
        file = Path(folder) / "profile_export_aiperf.json"
        if done.returncode or not file.is_file():
            raise Failure(f"aiperf failed (exit code {done.returncode}): {(done.stdout + done.stderr)[-2000:]}")
        found = json.loads(file.read_text())
    answered = round(found["request_count"]["avg"])
    if found["error_summary"] or answered != requests:
        raise Failure(f"{answered} of {requests} requests were answered: {found['error_summary']}")
    return Load(
        users=users,
        requests=requests,
        tokens=round(found["total_usage_completion_tokens"]["avg"]),
        tokens_per_second=found["output_token_throughput"]["avg"],
        tokens_per_second_per_user=found["output_token_throughput_per_user"]["avg"],
        first_token={name: found["time_to_first_token"][name] for name in ("p50", "p95")},
        inter_token={name: found["inter_token_latency"][name] for name in ("p50", "p95")},
    )
