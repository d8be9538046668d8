"""Whatever the schema, the seed and the model's nonsense: an answer that is complete is valid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from schema_strategies import schemas

from pagedlc import LLM, SamplingParams

PER_EXAMPLE = 25


cases = st.lists(
    st.tuples(schemas(), st.integers(0, 2**32), st.sampled_from([1.5, 2.5, 5.0]), st.booleans()),
    min_size=PER_EXAMPLE,
    max_size=PER_EXAMPLE,
)


def check(llm: LLM, batch: list[tuple[dict[str, Any], int, float, bool]]) -> int:
    """Generate for all; returns how many answers were complete."""
    haste = {llm.tokenizer.encode(text)[0]: 15.0 for text in '"]}'}
    params = [
        SamplingParams(
            max_tokens=200,
            temperature=temperature,
            seed=seed,
            logit_bias=haste,
            structured_outputs={"json": schema, "disable_any_whitespace": compact},
        )
        for schema, seed, temperature, compact in batch
    ]
    complete = 0
    for (schema, *_), output in zip(batch, llm.generate(["x"] * len(batch), params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            complete += 1
            value = json.loads(answer.text)
            Draft202012Validator(schema, format_checker=FormatChecker()).validate(value)
            json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
        else:
            assert answer.finish_reason == "length"
    return complete


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=cases)
def test_200_random_schemas(tiny: LLM, batch: list[tuple[dict[str, Any], int, float, bool]]) -> None:
    check(tiny, batch)


BOUNDED: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 8},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"enum": ["grün", None, 3]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "day": {"type": "string", "format": "date"}},
        "required": ["name", "day"],
    },
]


def test_answers_of_bounded_length_are_all_complete(tiny: LLM) -> None:
    batch = [(schema, seed, 2.5, False) for schema in BOUNDED for seed in range(6)]
    assert check(tiny, batch) == len(batch)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(batch=cases)
def test_10000_random_schemas(tiny: LLM, batch: list[tuple[dict[str, Any], int, float, bool]]) -> None:
    check(tiny, batch)
