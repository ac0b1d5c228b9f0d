"""What Triton's clients may send, in all the ways they do, becomes one body for the server."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.triton.dflash_triton.question import SAMPLING, BadRequest, read_question

DTYPES: dict[type, type] = {int: np.int32, float: np.float32, bool: bool, str: object}


def tensor(value: Any) -> np.ndarray:
    """As Triton hands them over: text is bytes."""
    items = value if isinstance(value, list) else [value]
    return np.array([v.encode() if isinstance(v, str) else v for v in items], DTYPES[type(items[0])])


def body(parameters: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    tensors = {"text_input": tensor("é")} | {name: tensor(value) for name, value in inputs.items()}
    return dict(read_question(tensors, json.dumps(parameters) if parameters else "").body)


def test_a_prompt_alone_is_answered_greedily_and_as_a_stream_with_all_there_is_to_know():
    assert body() == {
        "prompt": "é",
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert read_question({"input_ids": tensor([1, 2])}).body["prompt"] == [1, 2]


def test_limits_without_a_temperature_mean_that_tokens_are_drawn():
    assert body(top_p=0.5)["temperature"] == body(top_k=5)["temperature"] == 1.0
    assert body(seed=5)["temperature"] == 0.0
    assert body(top_p=0.5, temperature=0.25)["temperature"] == 0.25


def test_aliases_and_lists():
    found = body(random_seed=3, stop_words=["a", "", "b"], stop_token_ids=7, ignore_eos=True)
    assert (found["seed"], found["stop"], found["stop_token_ids"], found["ignore_eos"]) == (3, ["a", "b"], [7], True)
    assert body(stop="x")["stop"] == ["x"]


def test_numbers_may_be_quoted_and_parameters_may_come_in_three_ways():
    spoken = {"max_tokens": "5", "temperature": "0.5", "ignore_eos": "True"}
    assert body(sampling_parameters=json.dumps(spoken)) == body(max_tokens=5, temperature=0.5, ignore_eos=True)
    own = {"triton_enable_empty_final_response": True, "id": "x", "binary_data_output": True}
    assert body({"max_tokens": 5, "stop": ["x"]} | own) == body(max_tokens=5, stop="x")


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**64 - 1])
def test_seeds_are_exact_in_whatever_way_they_come(seed):
    ways = [
        read_question({"text_input": tensor("é"), "seed": np.array([seed], np.uint64)}).body,
        body(sampling_parameters=json.dumps({"seed": seed})),
        body(sampling_parameters=json.dumps({"seed": str(seed)})),
        body({"random_seed": seed}),
    ]
    assert [way["seed"] for way in ways] == [seed] * 4


@pytest.mark.parametrize(
    ("inputs", "parameters", "words"),
    [
        ({"input_ids": [1]}, {}, "there must be one prompt — request — give either"),
        ({}, {"temprature": 1}, "there is no parameter 'temprature' — parameters: temprature — known are max_tokens, "),
        ({"sampling_parameters": '{"n": 2}'}, {}, "there is no parameter 'n' — sampling_parameters: n — known are "),
        ({"sampling_parameters": "[1]"}, {}, "not a JSON object — sampling_parameters"),
        ({"sampling_parameters": "{'a': 1}"}, {}, "not JSON: "),
        ({"sampling_parameters": '{"seed": 1}', "seed": 1}, {}, "seed is given twice — sampling_parameters: seed"),
        ({"seed": 1, "random_seed": 1}, {}, "seed is given twice — random_seed — leave one out"),
        ({"temperature": math.nan}, {}, "nan is not a finite number — temperature"),
        ({"sampling_parameters": '{"max_tokens": 1.5}'}, {}, "1.5 is not a whole number — sampling_parameters: max_"),
        ({"sampling_parameters": '{"max_tokens": true}'}, {}, "True is not a whole number"),
        ({"sampling_parameters": '{"stop": 5}'}, {}, "5 is not text — sampling_parameters: stop — give text"),
        ({}, {"top_p": [0.5, 0.6]}, "top_p is a list — parameters: top_p — give one value"),
        ({}, {"ignore_eos": "perhaps"}, "'perhaps' is not true or false"),
    ],
)
def test_what_is_wrong_is_said_with_its_name(inputs, parameters, words):
    with pytest.raises(BadRequest) as refusal:
        body(parameters, **inputs)
    assert words in str(refusal.value)


def test_text_must_be_utf8_and_ids_have_none_to_repeat():
    with pytest.raises(BadRequest, match="not UTF-8: byte 0xff at 1 — text_input"):
        read_question({"text_input": np.array([b"a\xff"], object)})
    with pytest.raises(BadRequest, match="exclude_input_in_output"):
        read_question({"input_ids": tensor([1]), "exclude_input_in_output": tensor(False)})
    assert read_question({"text_input": tensor("a"), "exclude_input_in_output": tensor(False)}).echo == "a"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*SAMPLING, "random_seed", "other"]), json_values, max_size=4), st.booleans())
def test_whatever_the_values_are_they_are_refused_or_become_json(values, as_parameters):
    text = json.dumps(values)
    try:
        found = body(values) if as_parameters else body(sampling_parameters=text)
    except BadRequest as error:
        assert str(error).count(" — ") >= 2
    else:
        json.dumps(found, allow_nan=False)
