"""From a request's tensors to the body of POST /v1/completions.

The names are those of Triton's own LLM models: tensors as TensorRT-LLM's, `sampling_parameters` as vLLM's. A value may
come as a tensor, in the JSON of `sampling_parameters` or as a request parameter; names that nobody knows are refused.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIASES = {"random_seed": "seed", "stop_words": "stop"}
SAMPLING: dict[str, type] = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "seed": int,
            "stop": str, "stop_token_ids": int, "ignore_eos": bool}  # fmt: skip
LISTS = {"stop", "stop_token_ids"}
FLAGS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens",
         "return_num_output_tokens")  # fmt: skip
INPUTS = ("text_input", "input_ids", "sampling_parameters", *FLAGS, *SAMPLING, *ALIASES)
RESERVED = {
    "id",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "headers",
    "binary_data_output",
}


_LONGEST = 80  # characters of what is wrong that an error repeats
_EXAMPLE = 'give {"temperature": 0.7}, for example'


class BadRequest(Exception):
    """What is wrong — where — what to do."""


@dataclass(frozen=True)
class Question:
    """`echo` goes before the answer: the prompt, for those who want it, or nothing."""

    body: dict[str, Any]
    stream: bool
    echo: str
    count_input: bool
    count_output: bool


def read_question(tensors: Mapping[str, np.ndarray], parameters: str = "") -> Question:
    """`tensors` are the inputs that came; `parameters` is the JSON of the request's parameters. Raises BadRequest."""
    inputs = {name: _values(name, tensor) for name, tensor in tensors.items()}
    flags = {name: bool(inputs[name][0]) for name in FLAGS if name in inputs}
    text, ids = inputs.get("text_input"), inputs.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("there must be one prompt — request — give either text_input or input_ids")
    echo = "" if flags.get("exclude_input_in_output", True) else text
    if echo is None:
        raise BadRequest("token ids have no text to repeat — exclude_input_in_output — give text_input or leave it out")
    body = {"prompt": text[0] if text else ids} | _sampling(inputs, parameters)
    if "temperature" not in body:  # greedy, unless something else asks for draws
        body["temperature"] = 1.0 if body.keys() & {"top_p", "top_k"} else 0.0
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return Question(
        body=body,
        stream=flags.get("stream", False),
        echo=echo[0] if echo else "",
        count_input=flags.get("return_num_input_tokens", False),
        count_output=flags.get("return_num_output_tokens", False),
    )


def _sampling(inputs: Mapping[str, list[Any]], parameters: str) -> dict[str, Any]:
    """What was said about sampling, in the server's names."""
    given = [(name, name, value) for name, value in inputs.items() if ALIASES.get(name, name) in SAMPLING]
    for text in inputs.get("sampling_parameters", []):
        given += [(f"sampling_parameters: {key}", key, value) for key, value in _object(text).items()]
    for key, value in (_object(parameters, "parameters") if parameters else {}).items():
        if key not in RESERVED and not key.startswith("triton_"):
            given.append((f"parameters: {key}", key, value))
    found: dict[str, Any] = {}
    for where, key, value in given:
        name = ALIASES.get(key, key)
        if name not in SAMPLING:
            known = ", ".join([*SAMPLING, *ALIASES])
            raise BadRequest(f"there is no parameter {_short(key)} — {where[:_LONGEST]} — known are {known}")
        if name in found:
            raise BadRequest(f"{name} is given twice — {where} — leave one out")
        items = value if isinstance(value, list) else [value]
        converted = [_convert(item, SAMPLING[name], where) for item in items]
        if name in LISTS:
            found[name] = [item for item in converted if item != ""]  # some clients send "" for "no stop words"
        elif len(items) == 1:
            found[name] = converted[0]
        else:
            raise BadRequest(f"{name} is a list — {where} — give one value")
    return found


def _values(name: str, tensor: np.ndarray) -> list[Any]:
    """The tensor's values as Python has them; bytes become text."""
    values = tensor.reshape(-1).tolist()
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        raise BadRequest(f"{what} — {name} — send UTF-8") from None


def _object(text: str, where: str = "sampling_parameters") -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest(f"not text: a \\u escape is half a character — {where} — send both halves") from None
    except ValueError as error:
        raise BadRequest(f"not JSON: {error} — {where} — {_EXAMPLE}") from None
    except RecursionError:
        raise BadRequest(f"nested too deeply — {where} — {_EXAMPLE}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"not a JSON object — {where} — {_EXAMPLE}")
    return value


def _short(value: Any) -> str:
    """As Python writes it, but neither long nor deep."""
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = shown.maxlong = _LONGEST
    return shown.repr(value)


def _convert(value: Any, kind: type, where: str) -> Any:
    """`value` as `kind`. Some clients quote their numbers."""
    spelled = {"true": True, "false": False}
    try:
        if kind is str and isinstance(value, str):
            return value
        if kind is bool and isinstance(value, str) and value.lower() in spelled:
            return spelled[value.lower()]
        if kind is bool and value in (True, False):
            return bool(value)
        if kind is int and not isinstance(value, bool) and (not isinstance(value, float) or value.is_integer()):
            return int(value)
        if kind is float and not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
    raise BadRequest(f"{_short(value)} is not {wanted} — {where} — give {wanted}")
