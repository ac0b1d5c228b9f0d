"""Streaming gRPC clients of Triton, all at once: `ask_triton.py PORT MODEL < questions.json > answers.json`.

A question is a JSON object of inputs; "cancel_after": n ends the stream after so many responses. An answer holds the
`responses` in order, each with its tensors as JSON values, and the `error` that ended it, or null. Needs tritonclient.
"""

from __future__ import annotations

import json
import queue
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tritonclient.grpc as grpc

TYPES = {
    "text_input": "BYTES", "sampling_parameters": "BYTES", "stop": "BYTES", "stop_words": "BYTES",
    "input_ids": "INT32", "max_tokens": "INT32", "top_k": "INT32", "stop_token_ids": "INT32",
    "temperature": "FP32", "top_p": "FP32", "seed": "UINT64", "random_seed": "UINT64",
    "stream": "BOOL", "ignore_eos": "BOOL",
}  # fmt: skip
DTYPES = {"BYTES": object, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": bool}
PATIENCE = 60  # seconds between two responses


def ask(port: str, model: str, question: dict) -> dict:
    cancel_after = question.pop("cancel_after", None)
    got: queue.Queue = queue.Queue()
    responses, error = [], None
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        inputs = [make_input(name, value) for name, value in question.items()]
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        ended = False
        while not ended and len(responses) != cancel_after:
            result, error = got.get(timeout=PATIENCE)
            if error:
                ended = True
                continue
            message = result.get_response()
            if message.outputs:
                responses.append({output.name: values(result, output.name) for output in message.outputs})
            ended = message.parameters["triton_final_response"].bool_param
        # A stream that is cancelled after its end is never forgotten by Triton 2.51: the model does not unload.
        client.stop_stream(cancel_requests=not ended)
    return {"responses": responses, "error": error and error.message()}


def make_input(name: str, value: object) -> grpc.InferInput:
    kind = TYPES[name]
    items = value if isinstance(value, list) else [value]
    array = np.array([item.encode() if isinstance(item, str) else item for item in items], DTYPES[kind])
    tensor = grpc.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def values(result: grpc.InferResult, name: str) -> list:
    return [item.decode() if isinstance(item, bytes) else item for item in result.as_numpy(name).tolist()]


if __name__ == "__main__":
    port, model = sys.argv[1:]
    questions = json.load(sys.stdin)
    with ThreadPoolExecutor(len(questions)) as pool:
        json.dump(list(pool.map(lambda question: ask(port, model, question), questions)), sys.stdout)
