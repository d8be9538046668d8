"""Structured output: three kinds of schemas, three methods, whole and growing, cut off and beside tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_ways import all_ways, call_text, whole
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from langchain_pagedlc import VLLMChat
from pagedlc import InvalidRequestError
from scripted_model import ScriptedLLM

ScriptedFactory = Callable[..., ScriptedLLM]


class Person(BaseModel):
    """Someone."""

    name: str
    age: int = Field(ge=0)
    friends: list[str] = []


class PersonDict(TypedDict):
    """Someone."""

    name: str
    age: int
    friends: list[str]


JSON_SCHEMA = {**Person.model_json_schema(), "required": ["name", "age", "friends"]}
VALUES = {"name": "Zoë", "age": 36, "friends": ["Ada", "Bob"]}
SCRIPT = json.dumps(VALUES, ensure_ascii=False)
SCHEMAS: list[Any] = [Person, PersonDict, JSON_SCHEMA]
METHODS = ["json_schema", "function_calling", "json_mode"]


def script_for(schema: Any, method: str) -> str:
    if method != "function_calling":
        return SCRIPT
    name = schema["title"] if isinstance(schema, dict) else schema.__name__
    return call_text(name, **VALUES)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", SCHEMAS)
async def test_every_schema_by_every_method(scripted_llm: ScriptedFactory, schema: Any, method: Any) -> None:
    chat = VLLMChat(**scripted_llm(script_for(schema, method)).options, temperature=0)
    structured = chat.with_structured_output(schema, method=method)
    expected: Any = Person(**VALUES) if schema is Person else VALUES  # type: ignore[arg-type]
    assert structured.invoke("Who?") == expected
    assert await structured.ainvoke("Who?") == expected
    growing = list(structured.stream("Who?"))
    assert growing[-1] == expected
    assert [part async for part in structured.astream("Who?")][-1] == expected
    if schema is Person:
        assert all(isinstance(part, Person) for part in growing)
        return
    assert len(growing) > 5
    for earlier, later in pairwise(growing):
        assert earlier.keys() <= later.keys()
        assert str(later.get("name", "")).startswith(str(earlier.get("name", "")))
        assert len(later.get("friends", [])) >= len(earlier.get("friends", []))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_schema_holds_whatever_the_model_wants(scripted_llm: ScriptedFactory, method: Any) -> None:
    class Choice(BaseModel):
        """A choice."""

        colour: Literal["red", "green"]
        sure: bool

    chat = VLLMChat(**scripted_llm("Blue, I would say, green perhaps.").options, temperature=0)
    assert isinstance(chat.with_structured_output(Choice, method=method).invoke("Which?"), Choice)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Person, JSON_SCHEMA])
async def test_an_object_that_is_cut_off_says_so(scripted_llm: ScriptedFactory, schema: Any, method: Any) -> None:
    chat = VLLMChat(**scripted_llm(script_for(schema, method)).options, temperature=0, max_tokens=22)
    structured = chat.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match=r"length.*raise max_tokens"):
        structured.invoke("Who?")
    with pytest.raises(OutputParserException, match=r"length.*raise max_tokens"):
        list(structured.stream("Who?"))
    with pytest.raises(OutputParserException, match=r"length.*raise max_tokens"):
        [part async for part in structured.astream("Who?")]
    with_raw = chat.with_structured_output(schema, method=method, include_raw=True)
    streamed = [part async for part in with_raw.astream("Who?")]
    for result in (with_raw.invoke("Who?"), *streamed, *with_raw.stream("Who?")):
        assert result["raw"].response_metadata["finish_reason"] == "length"
        assert result["parsed"] is None
        assert "max_tokens" in str(result["parsing_error"])


@pytest.mark.parametrize("method", METHODS)
async def test_options_of_a_call_count_with_and_without_the_message(scripted_llm: ScriptedFactory, method: Any) -> None:
    chat = VLLMChat(**scripted_llm(script_for(Person, method)).options, temperature=0, max_tokens=22)
    structured = chat.with_structured_output(Person, method=method, include_raw=True)
    expected = chat.with_structured_output(Person, method=method).invoke("Who?", max_tokens=200)
    results = [
        structured.invoke("Who?", max_tokens=200),
        await structured.ainvoke("Who?", max_tokens=200),
        *structured.batch(["Who?"], max_tokens=200),
        next(part for part in structured.stream("Who?", max_tokens=200) if "parsed" in part),
    ]
    assert [result["parsed"] for result in results] == [expected] * 4
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        structured.invoke("Who?", max_tokns=200)


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("stop", ["oë", "6", "}"])
async def test_an_object_that_a_stop_string_cuts_off_says_so(
    scripted_llm: ScriptedFactory, schema: Any, method: Any, stop: str
) -> None:
    chat = VLLMChat(**scripted_llm(SCRIPT).options, temperature=0)
    structured = chat.with_structured_output(schema, method=method, stop=[stop])
    said = f"The stop string '{stop}' ended the answer before the object was complete"
    with pytest.raises(OutputParserException, match=said):
        structured.invoke("Who?")
    with pytest.raises(OutputParserException, match=said):
        list(structured.stream("Who?"))
    with pytest.raises(OutputParserException, match=said):
        [part async for part in structured.astream("Who?")]
    result = chat.with_structured_output(schema, method=method, include_raw=True, stop=[stop]).invoke("Who?")
    assert result["parsed"] is None
    assert said in str(result["parsing_error"])


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_object_that_is_complete_before_a_stop_string_is_whole(scripted_llm: ScriptedFactory, schema: Any) -> None:
    chat = VLLMChat(**scripted_llm(SCRIPT).options, temperature=0, stop="}", include_stop_str_in_output=True)
    structured = chat.with_structured_output(schema, include_raw=True)
    result = structured.invoke("Who?")
    assert result["raw"].response_metadata["stop_reason"] == "}"
    assert result["parsing_error"] is None
    assert list(chat.with_structured_output(schema).stream("Who?"))[-1] == result["parsed"]


def test_a_number_that_a_stop_string_cuts_off_is_no_number(scripted_llm: ScriptedFactory) -> None:
    structured = VLLMChat(**scripted_llm("12345").options, temperature=0).with_structured_output({"type": "integer"})
    assert structured.invoke("How many?") == 12345
    with pytest.raises(OutputParserException, match="stop string '4'"):
        structured.invoke("How many?", stop=["4"])


@pytest.mark.parametrize("schema", [Person, JSON_SCHEMA])
def test_a_call_that_a_stop_token_cuts_off_says_so(scripted_llm: ScriptedFactory, schema: Any) -> None:
    llm = scripted_llm(script_for(schema, "function_calling"))
    chat = VLLMChat(**llm.options, temperature=0, stop_token_ids=llm.tokenizer.encode("36"))
    structured = chat.with_structured_output(schema, method="function_calling")
    for ask in (structured.invoke, lambda question: list(structured.stream(question))):
        with pytest.raises(OutputParserException, match=r"stop token \d+ ended .* leave it out of stop_token_ids"):
            ask("Who?")


class Adult(BaseModel):
    """A grown-up."""

    name: str
    age: int

    @field_validator("age")
    @classmethod
    def is_grown_up(cls, value: int) -> int:
        if value < 18:
            raise ValueError("must be 18 at least")
        return value


@pytest.mark.parametrize("method", METHODS)
def test_an_object_that_its_class_refuses_is_an_error(scripted_llm: ScriptedFactory, method: Any) -> None:
    values = {"name": "Zoë", "age": 6}
    script = call_text("Adult", **values) if method == "function_calling" else json.dumps(values, ensure_ascii=False)
    chat = VLLMChat(**scripted_llm(script).options, temperature=0)
    structured = chat.with_structured_output(Adult, method=method)
    with pytest.raises(OutputParserException, match="must be 18 at least"):
        structured.invoke("Who?")
    with pytest.raises(OutputParserException, match="must be 18 at least"):
        list(structured.stream("Who?"))


@pytest.mark.parametrize("method", METHODS)
def test_the_raw_message_beside_the_object(scripted_llm: ScriptedFactory, method: Any) -> None:
    chat = VLLMChat(**scripted_llm(script_for(Person, method)).options, temperature=0)
    result = chat.with_structured_output(Person, method=method, include_raw=True).invoke("Who?")
    assert isinstance(result["raw"], AIMessage)
    assert result["parsed"] == Person(**VALUES)  # type: ignore[arg-type]
    assert result["parsing_error"] is None


def test_json_mode_needs_no_schema(scripted_llm: ScriptedFactory) -> None:
    chat = VLLMChat(**scripted_llm('{"anything": [1, 2]}').options)
    assert chat.with_structured_output(method="json_mode").invoke("Hi") == {"anything": [1, 2]}


def test_a_recursive_model(scripted_llm: ScriptedFactory) -> None:
    tree = '{"name": "root", "children": [{"name": "leaf", "children": []}]}'
    chat = VLLMChat(**scripted_llm(tree).options, temperature=0)
    assert chat.with_structured_output(Tree).invoke("Hi") == Tree(name="root", children=[Tree(name="leaf")])


@pytest.mark.parametrize("strict", [None, True])
def test_a_recursive_model_as_a_tool(scripted_llm: ScriptedFactory, strict: bool | None) -> None:
    """What the model wants does not fit, however deep it stands; what it may say does."""
    for schema in (Tree, Garden):
        values: Any = {"name": "a", "children": [{"name": "b", "children": ["c"]}]}
        script = call_text(schema.__name__, **(values if schema is Tree else {"tree": values}))
        chat = VLLMChat(**scripted_llm(script).options, temperature=0)
        found = chat.with_structured_output(schema, method="function_calling", strict=strict).invoke("Hi")
        assert isinstance(found, schema)
        tree = found if isinstance(found, Tree) else found.tree  # type: ignore[attr-defined]
        assert tree.children[0].name == "b"


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Garden(BaseModel):
    tree: Tree


COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"title": "Tree", "anyOf": [COUNT, {"$ref": "#/$defs/Name"}], "$defs": {"Name": NAME}}, {"name": "Zoë"}),
        ({"title": "Tree", "allOf": [{"$ref": "#/$defs/Count"}], "$defs": {"Count": COUNT}}, {"count": 3}),
        ({"title": "Tree", "$ref": "#/$defs/Count", "$defs": {"Count": COUNT}}, {"count": 3}),
        (
            {"title": "Tree", "type": "object", "patternProperties": {"^n": {"type": "integer"}}},
            {"n": 1},
        ),
        (Tree.model_json_schema(), {"name": "root", "children": [{"name": "leaf", "children": []}]}),
    ],
)
def test_the_schema_of_a_call_need_not_list_properties_at_its_top(
    scripted_llm: ScriptedFactory, schema: dict[str, Any], values: dict[str, Any], strict: bool | None
) -> None:
    chat = VLLMChat(**scripted_llm(call_text("Tree", **values)).options, temperature=0)
    structured = chat.with_structured_output(schema, method="function_calling", strict=strict)
    assert structured.invoke("Who?") == values
    (call,) = chat.bind_tools([schema], tool_choice="Tree", strict=strict).invoke("Who?").tool_calls
    assert call["args"] == values


def test_any_number_of_properties(scripted_llm: ScriptedFactory) -> None:
    schema = {"title": "Counts", "type": "object", "additionalProperties": {"type": "integer"}}
    chat = VLLMChat(**scripted_llm(call_text("Counts", a=1, b=2)).options, temperature=0)
    assert chat.with_structured_output(schema, method="function_calling").invoke("Hi") == {"a": 1, "b": 2}


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}},
        {"type": "string", "enum": ["a", "b"]},
        {"enum": ["a", "b"]},
        {"type": ["object", "null"], "properties": {}},
        {"anyOf": [COUNT, {"type": "string"}]},
        {"$ref": "#/$defs/Word", "$defs": {"Word": {"type": "string"}}},
    ],
)
def test_a_call_has_an_object(scripted_llm: ScriptedFactory, schema: dict[str, Any], strict: bool | None) -> None:
    chat = VLLMChat(**scripted_llm("").options)
    schema = {"title": "Thing", **schema}
    with pytest.raises(InvalidRequestError, match=r'always an object.*method="json_schema"'):
        chat.with_structured_output(schema, method="function_calling", strict=strict)
    with pytest.raises(InvalidRequestError, match="always an object"):
        chat.bind_tools([schema], strict=strict)


def test_what_cannot_work_is_said_at_once(scripted_llm: ScriptedFactory) -> None:
    chat = VLLMChat(**scripted_llm("").options)
    with pytest.raises(InvalidRequestError, match="no method 'xml'"):
        chat.with_structured_output(Person, method="xml")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="needs a schema"):
        chat.with_structured_output()
    with pytest.raises(InvalidRequestError, match="cannot be read as a schema"):
        chat.with_structured_output({"type": "object", "default": object()})
    with pytest.raises(InvalidRequestError, match="cannot be read as a schema"):
        chat.with_structured_output(BaseModel)
    with pytest.raises(InvalidRequestError, match="it needs a title"):
        chat.with_structured_output({"$ref": "#/$defs/Count", "$defs": {"Count": COUNT}}, method="function_calling")
    with pytest.raises(InvalidRequestError, match="leave structured_outputs out"):
        chat.with_structured_output(Person, structured_outputs={"regex": "a"})
    with pytest.raises(InvalidRequestError, match="response_format"):
        chat.invoke("Hi", response_format={"type": "xml"})


RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "Person", "schema": JSON_SCHEMA}}


@pytest.mark.parametrize("response_format", [RESPONSE_FORMAT, {"type": "json_object"}])
async def test_openais_response_format(scripted_llm: ScriptedFactory, response_format: dict[str, Any]) -> None:
    chat = VLLMChat(**scripted_llm(SCRIPT).options, temperature=0)
    for answer in await all_ways(chat, "Who?", response_format=response_format):
        assert json.loads(answer.text) == VALUES
    assert chat.invoke("Who?", response_format={"type": "text"}).text == SCRIPT


def now() -> str:
    """The time of day."""
    return "12 o'clock"


async def test_a_form_beside_tools_is_the_form_of_answers_without_calls(scripted_llm: ScriptedFactory) -> None:
    """As an agent with a response format asks."""
    llm = scripted_llm(lambda turn: call_text("now") if "When" in turn.prompt else SCRIPT)
    chat = VLLMChat(**llm.options, temperature=0).bind_tools([now], response_format=RESPONSE_FORMAT)
    for answer in await all_ways(chat, "When?"):
        assert [call["name"] for call in answer.tool_calls] == ["now"]
        assert answer.text == ""
    for answer in await all_ways(chat, "Who?"):
        assert answer.tool_calls == []
        assert set(json.loads(answer.text)) == set(VALUES)


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_form_comes_after_the_thoughts(scripted_llm: ScriptedFactory) -> None:
    llm = scripted_llm(f"Let me see.\n</think>\n\n{SCRIPT}", chat_template=THINKING)
    chat = VLLMChat(**llm.options, temperature=0)
    assert chat.with_structured_output(PersonDict).invoke("Who?") == VALUES
    answer = whole(list(chat.stream("Who?", response_format=RESPONSE_FORMAT)))  # type: ignore[arg-type]
    assert answer.additional_kwargs["reasoning_content"] == "Let me see."
    assert json.loads(answer.text) == VALUES
