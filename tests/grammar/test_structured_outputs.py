"""What a user gets with ``SamplingParams(structured_outputs=...)``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import date
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pydantic import UUID4, Base64Bytes, BaseModel, SecretStr

from pagedlc import LLM, CompletionOutput, InvalidRequestError, PagedLCError, SamplingParams, StructuredOutputsParams
from scripted_model import ScriptedLLM

Make = Callable[..., ScriptedLLM]

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
MUTUAL = {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}
NESTED: dict[str, Any] = reduce(lambda schema, _: {"type": "array", "items": schema}, range(150), {})


class Forecast(BaseModel):
    city: str
    days: int


def answer(llm: LLM, structured: Any, **params: Any) -> CompletionOutput:
    chosen = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, "structured_outputs": structured, **params})
    return llm.generate("Hello", chosen)[0].outputs[0]


# -- kinds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [CITY, json.dumps(CITY), Forecast], ids=["dict", "text", "pydantic"])
def test_a_schema_may_be_a_dict_text_or_a_class(scripted_llm: Make, schema: Any) -> None:
    llm = scripted_llm('Of course! Here it is: {"city": "Zürich 😀", "days": 3}. Anything else?')
    found = answer(llm, StructuredOutputsParams(json=schema))
    assert found.text == '{"city": "Zürich 😀", "days": 3}'
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": r"[a-z]{3}-\d{2}/x"}, r"[a-z]{3}-\d{2}/x"),
        ({"choice": ["yes", "no", 'maybe "so"']}, r'yes|no|maybe "so"'),
        ({"grammar": 'root ::= pair (", " pair){1,2}\npair ::= [ab] "=" [0-9]+ ";"'}, r"[ab]=\d+;(, [ab]=\d+;){1,2}"),
        ({"grammar": 'start: "a" B+ "."\nB: /[xy]/'}, r"a[xy]+\."),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 12}}, "1[012]"),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_model_of_random_weights_keeps_to_it(tiny: LLM, structured: dict[str, Any], pattern: str, seed: int) -> None:
    found = answer(tiny, structured, temperature=3.0, seed=seed, logit_bias={25: 6.0, 13: 6.0})
    if found.finish_reason == "stop":
        assert re.fullmatch(pattern, found.text)
    else:
        assert found.finish_reason == "length"


def test_digits_are_ascii_and_letters_are_not_only(tiny: LLM) -> None:
    said = answer(tiny, {"regex": r"\d{40}\w{40}"}, temperature=5.0, seed=1, max_tokens=400).text
    assert said[:40].isascii()
    assert not said[40:].isascii()


def test_some_json_object(scripted_llm: Make) -> None:
    text = '{"any": [1, 2.5, {"thing": null}]}'
    assert answer(scripted_llm(f"Well, {text}"), {"json_object": True}).text == text


def test_every_answer_of_a_request_follows_the_grammar_on_its_own(tiny: LLM) -> None:
    params = SamplingParams(n=8, temperature=2.0, seed=1, structured_outputs={"regex": "[a-z]{6}"})
    texts = [found.text for found in tiny.generate("x", params)[0].outputs]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)
    assert len(set(texts)) == 8


# -- text -------------------------------------------------------------------------------------------------


def test_letters_are_never_escaped(scripted_llm: Make) -> None:
    said = answer(scripted_llm('{"city": "Z\\u00fcrich\\u65e5", "days": 3}'), {"json": CITY}).text
    assert not re.search(r"\\u(?!00[01])", said)  # control characters can be written in no other way


def test_blanks_are_bounded_readable_json_is_possible_and_compact_json_can_be_asked_for(scripted_llm: Make) -> None:
    pretty = '{\n  "city": "Bern",\n  "days": 3\n}'
    assert answer(scripted_llm(pretty), {"json": CITY}).text == pretty
    compact = answer(scripted_llm(pretty), {"json": CITY, "disable_any_whitespace": True})
    assert compact.text == '{"city":"Bern","days":3}'
    endless = answer(scripted_llm("{" + "\n" * 500), {"json": CITY}, max_tokens=60)
    assert "\n\n" not in endless.text


def test_objects_have_no_undeclared_properties_unless_asked_for(scripted_llm: Make) -> None:
    text = '{"city": "Bern", "days": 3, "extra": 1}'
    assert "extra" not in answer(scripted_llm(text), {"json": CITY}).text
    assert answer(scripted_llm(text), {"json": CITY, "disable_additional_properties": False}).text == text
    combined = {"allOf": [{"$ref": "#/$defs/a"}], "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    combined["$defs"] = {"a": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    found = json.loads(answer(scripted_llm('{"a": 1, "b": 2}'), {"json": combined}).text)
    assert {"a", "b"} <= set(found)


def test_ids_that_are_no_token_are_never_sampled(tiny: LLM) -> None:
    found = answer(tiny, {"regex": r"(.|\n){40}"}, temperature=5.0, seed=3)
    assert found.finish_reason == "stop"
    assert max(found.token_ids) < tiny.tokenizer.vocab_size
    assert len(found.text) == 40
    assert "\ufffd" not in found.text


class Upload(BaseModel):
    path: Path
    password: SecretStr
    key: UUID4
    content: Base64Bytes
    raw: bytes
    day: date
    timeout: float = math.inf


UPLOAD = {
    "path": "/tmp/a.txt",
    "password": "x",
    "key": "e3b0c442-98fc-4c14-9afb-f4c8996fb924",
    "content": "YQ==",
    "raw": "b",
    "day": "2026-12-01",
    "timeout": 3.5,
}


def test_a_class_may_have_formats_that_no_grammar_knows_and_an_infinite_default(scripted_llm: Make) -> None:
    found = Upload.model_validate_json(answer(scripted_llm(json.dumps(UPLOAD)), {"json": Upload}, max_tokens=200).text)
    assert found.model_dump(mode="json")["path"] == "/tmp/a.txt"
    assert (found.day, found.timeout) == (date(2026, 12, 1), 3.5)


@pytest.mark.parametrize(
    ("known", "example"),
    [
        ("date-time", "2026-12-01T04:18:00Z"),
        ("time", "04:18:00Z"),
        ("date", "2026-12-01"),
        ("duration", "P3D"),
        ("email", "a@b.ch"),
        ("hostname", "b.ch"),
        ("ipv4", "10.0.0.1"),
        ("ipv6", "1:2:3:4:5:6:7:8"),
        ("uuid", "e3b0c442-98fc-4c14-9afb-f4c8996fb924"),
        ("uri", "https://b.ch"),
    ],
)
def test_a_format_that_the_grammar_knows_is_enforced(scripted_llm: Make, known: str, example: str) -> None:
    form = {"json": {"type": "string", "format": known}}
    assert json.loads(answer(scripted_llm(f'"{example}"'), form).text) == example
    assert not answer(scripted_llm('"(("'), form).text.startswith('"(')


def test_what_only_looks_like_a_keyword_is_kept(scripted_llm: Make) -> None:
    names = {name: {"type": "integer"} for name in ("format", "default", "examples")}
    form = {"type": "object", "properties": names, "required": list(names)}
    text = '{"format": 1, "default": 2, "examples": 3}'
    assert answer(scripted_llm(text), {"json": form}).text == text
    text = '{"format": "path", "default": 1}'
    assert answer(scripted_llm(text), {"json": {"enum": [json.loads(text)]}}).text == text
    elsewhere = {"$ref": "#/components/schemas/default", "components": {"schemas": {"default": {"const": 7}}}}
    assert answer(scripted_llm("7"), {"json": elsewhere}).text == "7"


# -- the other parameters ---------------------------------------------------------------------------------


def test_an_answer_cut_off_by_max_tokens_says_so(scripted_llm: Make) -> None:
    text = '{"city": "Bern", "days": 3}'
    whole = answer(scripted_llm(text), {"json": CITY})
    cut = answer(scripted_llm(text), {"json": CITY}, max_tokens=len(whole.token_ids) - 1)
    assert cut.finish_reason == "length"
    assert text.startswith(cut.text)
    exact = answer(scripted_llm(text), {"json": CITY}, max_tokens=len(whole.token_ids))
    assert (exact.text, exact.finish_reason) == (text, "stop")


def test_the_grammars_end_is_the_end(scripted_llm: Make) -> None:
    llm = scripted_llm("yes and much more")
    for more in ({"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20}):
        found = answer(llm, {"choice": ["yes", "no"]}, **more)
        assert (found.text, found.finish_reason) == ("yes", "stop")
    assert answer(scripted_llm("aaaa"), {"regex": "a*"}, ignore_eos=True).text == "aaaa"


def test_min_tokens_holds_while_the_grammar_can_go_on(scripted_llm: Make) -> None:
    assert len(answer(scripted_llm("a"), {"regex": "[ab]*"}, min_tokens=12, max_tokens=12).token_ids) == 12


def test_stop_strings_and_stop_tokens_still_stop(scripted_llm: Make) -> None:
    llm = scripted_llm('{"city": "Bern", "days": 3}')
    found = answer(llm, {"json": CITY}, stop=["Bern"])
    assert (found.text, found.stop_reason) == ('{"city": "', "Bern")
    token = llm.tokenizer.encode("Bern")[0]
    assert answer(llm, {"json": CITY}, stop_token_ids=[token]).finish_reason == "stop"


def test_no_bias_reaches_a_forbidden_token(tiny: LLM) -> None:
    found = answer(tiny, {"regex": "[0-9]{5}"}, logit_bias={65: 1e30}, temperature=1.0, seed=1)
    assert re.fullmatch("[0-9]{5}", found.text)


def test_bad_words_hold_and_if_nothing_is_left_the_request_fails(tiny: LLM) -> None:
    for seed in range(5):
        assert answer(tiny, {"choice": ["yes", "no"]}, bad_words=["y"], temperature=3.0, seed=seed).text == "no"
    with pytest.raises(PagedLCError, match="structured_outputs"):
        answer(tiny, {"choice": ["no"]}, bad_words=["n"])


def test_logprobs_stay_those_of_the_model(tiny: LLM) -> None:
    free = tiny.generate("x", SamplingParams(max_tokens=1, temperature=0, logprobs=20))[0].outputs[0]
    bound = answer(tiny, {"regex": "[0-9]{3}"}, logprobs=20)
    assert free.logprobs is not None
    assert bound.logprobs is not None
    plain = tiny.generate("Hello", SamplingParams(max_tokens=1, temperature=0, logprobs=20))[0].outputs[0]
    assert plain.logprobs is not None
    likeliest = plain.token_ids[0]
    assert bound.logprobs[0][likeliest].logprob == pytest.approx(plain.logprobs[0][likeliest].logprob, abs=1e-4)
    assert bound.logprobs[0][bound.token_ids[0]].rank > 1


# -- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[]"}, "object"),
        ({"json": {"default": object()}}, "as JSON"),
        ({"json": LLM}, "no JSON schema"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"regex": ""}, "regex"),
        ({"jsn": {}}, "'json'"),
        ({"choice": ["yes", "\ud83d"]}, "choice is not valid Unicode"),
        ({"json": '{"enum": ["\\ud83d"]}'}, "json is not valid Unicode"),
        ({"json": {"properties": {"\udc00": {}}}}, "json is not valid Unicode"),
        ({"regex": "\ud83d"}, "regex is not valid Unicode"),
        ({"grammar": 'root ::= "\ud83d"'}, "grammar is not valid Unicode"),
        ({"structural_tag": {"type": "const_string", "value": "\ud83d"}}, "structural_tag is not valid Unicode"),
        ({"json_object": True, "whitespace_pattern": "\ud83d"}, "whitespace_pattern is not valid Unicode"),
    ],
)
def test_cheap_mistakes_are_found_before_anything_runs(structured: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(structured_outputs=structured)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, r'cannot be enforced and must be left out: \["uniqueItems"'),
        ({"json": {"$ref": "#"}}, "nothing can match here"),
        ({"json": {"$ref": "#/$defs/a", "$defs": MUTUAL}}, "nothing can match here"),
        (
            {"json": CITY | {"properties": {"city": {"$ref": "#/properties/city"}, "days": {}}}},
            "nothing can match here",
        ),
        ({"grammar": "root ::= root"}, "nothing can match here"),
        ({"grammar": "start: a\na: b\nb: a"}, "nothing can match here"),
        ({"json": NESTED}, "nested too deeply$"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"json": {"$ref": "#/nowhere"}}, "json"),
        ({"json": False}, "json"),
        ({"regex": "["}, "regex"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "nonsense"}, "grammar"),
        ({"structural_tag": {"type": "triggered_tags", "triggers": ["<a>"], "tags": []}}, "tags"),
        ({"structural_tag": {"type": "nonsense"}}, "nonsense"),
    ],
)
def test_a_grammar_that_does_not_compile_is_that_requests_error(
    tiny: LLM, structured: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        answer(tiny, structured)
    assert "backtrace" not in str(caught.value)
    assert answer(tiny, {"regex": "[ab]{2}"}).finish_reason == "stop"
