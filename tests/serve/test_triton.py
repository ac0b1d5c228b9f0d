"""Triton Inference Server, a real one, serves engines: its own, one of two ranks, and one that somebody else runs.

The server is the wheel's, in an environment of its own: `make test` sets up .venv-triton; DFLASH_TRT_TRITON_PYTHON is
another.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from dflash_trt.runtime import Generator, Request
from dflash_trt.serve.repository import write_repository
from tests.runtime.mpi import CLI, ENVIRONMENT, ROOT
from tests.serve.caller import Connection
from tests.serve.live import Server
from tests.waiting import until

PYTHON = Path(os.environ.get("DFLASH_TRT_TRITON_PYTHON") or ROOT / ".venv-triton" / "bin" / "python")
CLIENT = Path(__file__).parent / "programs" / "ask_triton.py"
LONG = {"max_tokens": 1990, "ignore_eos": True}  # the engines hold 2,048 tokens
CLIENTS = 64


class Triton:
    """A tritonserver on free ports; ready once entered, ended once left."""

    def __init__(self, start: Path, *further: object, log: Path):
        assert PYTHON.is_file(), f"there is no {PYTHON}: make .venv-triton/.ready, or set DFLASH_TRT_TRITON_PYTHON"
        self.http, self.grpc, self.metrics_port = free_ports(3)
        ports = ["--http-port", self.http, "--grpc-port", self.grpc, "--metrics-port", self.metrics_port]
        self.log = log
        with log.open("w") as to:
            self.process = subprocess.Popen(
                list(map(str, [PYTHON, start, *ports, *further])),
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | {"DFLASH_TRT_COMMAND": shlex.join(CLI)},
            )

    def __enter__(self) -> Triton:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError), _local(self.http) as one, _local(self.metrics_port) as other:
                return [one.get("/v2/health/ready").status, other.get("/metrics").status] == [200, 200]
            return False

        try:
            until(ready, 120)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def generate(self, model: str = "dflash", **question: Any) -> dict[str, Any]:
        """As JSON has it; of an error {"error": …}."""
        with _local(self.http) as connection:
            connection.post(f"/v2/models/{model}/generate", question)
            return json.load(connection.getresponse())

    @contextlib.contextmanager
    def stream(self, model: str = "dflash", **question: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of generate_stream; the connection is closed at the end."""
        with _local(self.http) as connection:
            connection.post(f"/v2/models/{model}/generate_stream", question | {"stream": True})
            yield connection.events()

    def clients(self, *questions: dict[str, Any], model: str = "dflash") -> list[dict[str, Any]]:
        """A gRPC client a question, all at once; what `programs/ask_triton.py` says."""
        words = [str(PYTHON), str(CLIENT), str(self.grpc), model]
        done = subprocess.run(words, input=json.dumps(questions), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def metric(self, name: str, **labels: str) -> float:
        with _local(self.metrics_port) as connection:
            text = connection.get("/metrics").read().decode()
        wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        found = re.search(rf"^{name}{{{wanted}}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def cancelled(self) -> float:
        return self.metric("dflash_requests_total", finish_reason="cancelled", model="dflash")

    def taken(self) -> float:
        """Requests that have come to the engine, and have not ended early."""
        now = [self.metric(f"dflash_requests_{which}", model="dflash") for which in ("waiting", "running")]
        return sum(now) + self.metric("dflash_requests_total", finish_reason="length", model="dflash")

    def running(self) -> float:
        return self.metric("dflash_kv_slots_used", model="dflash")


def _local(port: int) -> Connection:
    return Connection(f"http://127.0.0.1:{port}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def outside(engine, tmp_path_factory) -> Iterator[Server]:
    """A server that Triton does not start."""
    path = tmp_path_factory.mktemp("socket") / "s"
    with Server(engine, "--threads", 1, "--no-http", "--socket", path) as server:
        yield server


@pytest.fixture(scope="module")
def triton(engine, parallel, outside, tmp_path_factory) -> Iterator[Triton]:
    """One server with three models, as starting takes its time."""
    root = tmp_path_factory.mktemp("triton")
    one_thread = ["--threads", "1"]
    main = write_repository(engine, root / "main", name="dflash", grace=20, arguments=one_thread)
    others = [
        write_repository(parallel, root / "other", name="two", max_waiting=2, grace=20, arguments=one_thread).path,
        write_repository(engine, root / "attached", name="attached", socket=Path(outside.socket)).path,
    ]
    words = [f"--model-repository={path}" for path in others]
    with Triton(main.start, "--", *words, log=root / "log") as server:
        yield server


def texts_of(generator: Generator, requests: list[Request]) -> list[str]:
    texts = dict.fromkeys((request.id for request in requests), "")
    for out in generator.generate(requests):
        texts[out.request_id] += out.text
    return list(texts.values())


def joined(responses: list[dict[str, Any]]) -> str:
    return "".join(response["text_output"][0] for response in responses)


def test_64_streaming_clients_get_the_texts_of_the_generator_each_its_own(triton, generator):
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list("abcdefgh "), rng.integers(1, 60))) for _ in range(CLIENTS)]
    lengths = rng.integers(1, 50, CLIENTS).tolist()
    pairs = list(zip(prompts, lengths, strict=True))
    requests = [
        Request(prompt, length, stop=("bbab",) if length % 2 else (), ignore_eos=True) for prompt, length in pairs
    ]
    questions: list[dict[str, Any]] = []
    for number, (prompt, length) in enumerate(pairs):
        given: dict[str, Any] = {"text_input": prompt} if number % 3 else {"input_ids": list(prompt.encode())}
        given |= {"stop_words": ["bbab"]} if length % 2 else {}
        questions.append(given | {"max_tokens": length, "stream": True, "ignore_eos": True})
    answers = triton.clients(*questions)
    assert [answer["error"] for answer in answers] == [None] * CLIENTS
    assert [joined(answer["responses"]) for answer in answers] == texts_of(generator, requests)
    for answer, prompt, length in zip(answers, prompts, lengths, strict=True):
        *before, last = answer["responses"]
        assert all(response.keys() == {"text_output", "output_ids"} for response in before)
        statistics = json.loads(last["statistics"][0])
        assert statistics["prompt_tokens"] == len(prompt)
        ids = [token for response in answer["responses"] for token in response["output_ids"]]
        assert statistics["new_tokens"] == len(ids) <= length
        assert last["finish_reason"] == ["length"] or (length % 2 and last["finish_reason"] == ["stop"])
    assert max(len(answer["responses"]) for answer in answers) > 2, "they come in pieces"


def test_generate_and_generate_stream_say_the_same(triton, generator):
    (text,) = texts_of(generator, [Request("wort", 1000, ignore_eos=True)])
    whole = triton.generate(text_input="wort", max_tokens=1000, ignore_eos=True)
    assert whole["text_output"] == text and whole["finish_reason"] == "length"
    assert generator.tokenizer.decode(whole["output_ids"]) == text
    with triton.stream(text_input="wort", max_tokens=1000, ignore_eos=True) as events:
        pieces = list(events)
    assert "".join(piece["text_output"] for piece in pieces) == text
    assert len(pieces) > 2, "a busy machine makes fewer of them, and larger ones, but not of a thousand tokens"
    assert json.loads(pieces[-1]["statistics"]).keys() == json.loads(whole["statistics"]).keys()


def test_parameters_come_as_tensors_as_sampling_parameters_or_beside_them(triton):
    given = {"max_tokens": 20, "temperature": 0.8, "seed": 7}
    ways = [
        given,
        {"parameters": given},
        {"sampling_parameters": json.dumps(given)},
        {"sampling_parameters": json.dumps({key: str(value) for key, value in given.items()})},
        {"max_tokens": 20, "temperature": 0.8, "random_seed": 7},
    ]
    answers = {triton.generate(text_input="a", **way)["text_output"] for way in ways}
    assert len(answers) == 1
    assert triton.generate(text_input="a", max_tokens=20)["text_output"] not in answers, "those were drawn"


def test_the_prompt_and_the_counts_come_with_the_answer_if_asked_for(triton):
    plain = triton.generate(text_input="abc", max_tokens=5, ignore_eos=True)
    more = {"exclude_input_in_output": False, "return_num_input_tokens": True, "return_num_output_tokens": True}
    full = triton.generate(text_input="abc", max_tokens=5, ignore_eos=True, **more)
    assert full["text_output"] == "abc" + plain["text_output"]
    assert (full["num_input_tokens"], full["num_output_tokens"]) == (3, 5)
    assert "num_input_tokens" not in plain


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"text_input": ""}, "the prompt has no tokens — "),
        ({"text_input": "a" * 3000}, "the prompt has 3000 tokens"),
        ({"input_ids": [1, 2, 999]}, "token id 999 is outside the vocabulary of 256"),
        ({"text_input": "a", "input_ids": [1, 2]}, "there must be one prompt — request — "),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "a", "top_p": 2.0}, "top_p"),
        ({"text_input": "a", "max_token": 5}, "there is no parameter 'max_token' — parameters: max_token — known are "),
        ({"text_input": "a", "sampling_parameters": '{"beams": 2}'}, "there is no parameter 'beams'"),
        ({"text_input": "a", "sampling_parameters": "{"}, "not JSON"),
        ({"text_input": "a", "sampling_parameters": "[" * 100_000}, "nested too deeply — sampling_parameters — "),
        ({"text_input": "a", "sampling_parameters": r'{"\ud800": 1}'}, "half a character — sampling_parameters — "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_says_what_is_wrong_and_others_go_on(triton, question, words):
    assert words in triton.generate(**question)["error"]
    with triton.stream(**question) as events:
        assert words in next(events)["error"]
    assert triton.generate(text_input="a", max_tokens=3)["output_ids"]


def test_grpc_clients_get_the_text_of_an_error(triton):
    answers = triton.clients(
        {"text_input": ""}, {"text_input": "ä", "max_tokens": 2}, {"text_input": "a", "top_k": 5000}
    )
    assert [answer["error"] is None for answer in answers] == [False, True, False]
    assert "the prompt has no tokens — prompt — give at least one token" in answers[0]["error"]


def test_who_leaves_early_frees_the_slot(triton):
    before = triton.cancelled()
    questions = [LONG | {"text_input": "a", "stream": True, "cancel_after": 2 * n} for n in (1, 2, 3)]
    triton.clients(*questions)
    with triton.stream(text_input="b", **LONG) as events:
        next(events)
    until(lambda: triton.cancelled() == before + len(questions) + 1 and not triton.running())


def test_a_full_queue_refuses_what_does_not_fit(triton):
    questions = [LONG | {"text_input": "a", "stream": True, "cancel_after": 60}] * 12
    full = [answer["error"] for answer in triton.clients(*questions, model="two") if answer["error"]]
    assert 0 < len(full) <= 6, "4 slots, and 2 may wait"
    assert all("2 requests wait already" in error for error in full)


def test_metrics_of_triton_and_of_the_engine_are_on_one_port(triton):
    triton.generate(text_input="a", max_tokens=9, ignore_eos=True)
    length = {"finish_reason": "length", "model": "dflash"}
    before = triton.metric("dflash_requests_total", **length)
    triton.generate(text_input="a", max_tokens=9, ignore_eos=True)
    until(lambda: triton.metric("dflash_requests_total", **length) > before)
    assert triton.metric("nv_inference_request_success", model="dflash", version="1") > 1
    assert triton.metric("dflash_kv_slots", model="dflash") == triton.metric("dflash_kv_slots", model="two") == 4
    assert 1 <= triton.metric("dflash_acceptance_length", model="dflash") <= 8
    count = triton.metric("dflash_time_to_first_token_seconds_count", model="dflash")
    assert triton.metric("dflash_time_to_first_token_seconds_bucket", le=r"\+Inf", model="dflash") == count > 0


def test_an_engine_that_refuses_ends_the_server_with_its_own_words(engine, tmp_path):
    moved = shutil.copytree(engine, tmp_path / "engine", symlinks=True)
    made = write_repository(moved, tmp_path / "repository", name="dflash")
    (moved / "tokenizer.json").unlink()
    server = Triton(made.start, log=tmp_path / "log")
    assert server.process.wait(timeout=60) == 1
    assert f"the file has moved or is gone — {moved}/tokenizer.json" in server.log.read_text()


# These come last, and in this order: each ends something that all tests of this module share.


def test_the_model_attaches_to_a_server_and_finds_it_again(triton, engine, generator, outside):
    def ended() -> float:
        return triton.metric("dflash_requests_total", finish_reason="length", model="attached")

    question = {"model": "attached", "text_input": "ab", "max_tokens": 12, "ignore_eos": True}
    (text,) = texts_of(generator, [Request("ab", 12, ignore_eos=True)])
    assert triton.generate(**question)["text_output"] == text
    until(lambda: ended() == 1)
    outside.process.kill()
    outside.process.wait()
    refusal = triton.generate(**question)["error"]
    assert "no engine answers" in refusal and f"--socket {outside.socket}" in refusal
    with Server(engine, "--threads", 1, "--no-http", "--socket", outside.socket):
        assert triton.generate(**question)["text_output"] == text
        until(lambda: ended() == 2)  # that server has counted one alone


def test_a_killed_rank_fails_what_runs_and_the_engine_comes_back(triton, parallel, generator):
    (text,) = texts_of(generator, [Request("ab", 12)])
    question = {"model": "two", "text_input": "ab", "max_tokens": 12}
    assert triton.generate(**question)["text_output"] == text
    with triton.stream(**question | LONG) as events:
        next(events)
        os.kill(rank_of(parallel, 1), signal.SIGKILL)
        assert "error" in (last := list(events)[-1])
    assert "rank 1" in last["error"] or "being started again" in last["error"]
    until(lambda: triton.generate(**question).get("text_output") == text, 60)
    assert triton.generate(text_input="ab", max_tokens=12)["text_output"] == text, "the other model is as it was"


def test_sigterm_lets_requests_end(triton, parallel, generator):
    (text,) = texts_of(generator, [Request("ab", 400, ignore_eos=True)])
    question = {"text_input": "ab", "max_tokens": 400, "ignore_eos": True}
    with (
        triton.stream(**question) as one,
        triton.stream("two", **question) as two,
    ):
        begun = [next(one), next(two)]
        triton.process.send_signal(signal.SIGTERM)
        for first, rest in zip(begun, (one, two), strict=True):
            assert first["text_output"] + "".join(event["text_output"] for event in rest) == text
    assert triton.process.wait(timeout=60) == 0
    assert "Traceback" not in triton.log.read_text()
    until(lambda: not processes_of(parallel))


def rank_of(engine: Path, rank: int) -> int:
    """The pid of a rank of that engine."""
    label = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    (found,) = [int(process.name) for process in processes_of(engine) if label in environment_of(process)]
    return found


def processes_of(engine: Path) -> list[Path]:
    """Those of this machine that were started with it."""
    return [process for process in Path("/proc").glob("[0-9]*") if f" {engine} " in command_of(process)]


def command_of(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def environment_of(process: Path) -> list[bytes]:
    with contextlib.suppress(OSError):
        return (process / "environ").read_bytes().split(b"\0")
    return []


def test_requests_that_outlast_the_grace_are_told_so_and_the_server_ends(engine, tmp_path):
    made = write_repository(engine, tmp_path / "repository", name="dflash", grace=0.5, arguments=["--threads", "1"])
    with Triton(made.start, log=tmp_path / "log") as server:
        with contextlib.ExitStack() as stack:  # Triton waits for connections to close, too
            callers = [stack.enter_context(_local(server.http)) for _ in range(16)]
            for caller in callers:
                caller.post("/v2/models/dflash/generate_stream", LONG | {"text_input": "ab", "stream": True})
            until(lambda: server.taken() >= len(callers))
            server.process.send_signal(signal.SIGTERM)
            lasts = [list(caller.events())[-1] for caller in callers]
        assert server.process.wait(timeout=30) == 0
    cut = [last["error"] for last in lasts if "error" in last]
    assert cut and all("stopped before the answer was complete" in error for error in cut)
    assert all("error" in last or "finish_reason" in last for last in lasts)
