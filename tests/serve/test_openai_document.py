"""The server's OpenAPI document is true: schemathesis makes requests of it, right ones and wrong ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.engine import convert
from tests.serve.live import Server
from tests.waiting import until

KEY = "a-key-of-the-environment"


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory) -> Iterator[Server]:
    """Its answers are short, so that many requests take little time."""
    engine = convert(*pair, tmp_path_factory.mktemp("short") / "engine", max_batch=8, max_seq_len=32, max_query=16)
    with Server(engine.path, "--threads", 1, environment={"DFLASH_TRT_API_KEYS": f"other, {KEY}"}) as server:
        yield server


@pytest.fixture(scope="module")
def document(server) -> dict:
    with server.connect() as connection:
        return json.load(connection.get("/openapi.json"))


def test_schemathesis_finds_nothing_that_the_document_does_not_say(server, tmp_path):
    """All its checks, among them: no 5xx, documented status, type and body, wrong data and missing keys refused.

    Not among them: that right data is always accepted, for no schema knows how many tokens a text has.
    """
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json", "--no-color"]
    amount = ["--phases", "coverage,fuzzing", "--max-examples", "30", "--seed", "1", "--workers", "4"]
    patience = ["--suppress-health-check", "too_slow", "--request-timeout", "60"]  # the machine may be busy
    checks = ["--exclude-checks", "positive_data_acceptance", "--header", f"Authorization: Bearer {KEY}"]
    done = subprocess.run(
        [*command, *amount, *patience, *checks], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0 and "Tested: 6" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in server.errors() and "ERROR" not in server.errors()
    until(lambda: server.running() == 0)


def test_every_operation_has_a_name_of_its_own_and_errors_of_one_form(document):
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert sorted(operation["operationId"] for operation in operations) == [
        "create_chat_completion",
        "create_completion",
        "health",
        "list_models",
        "metrics",
        "retrieve_model",
    ]
    for operation in operations:
        for status, response in operation["responses"].items():
            if status != "200":
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}
        assert ("security" in operation) == (operation["operationId"] not in ("health", "metrics"))
