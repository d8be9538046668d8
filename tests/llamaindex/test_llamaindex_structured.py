"""Objects as answers: the grammar makes them, whole and streamed (scripted model)."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.types import PydanticProgramMode
from llamaindex_tools import PERSON, PERSON_JSON, PROMPT, THINKING_TEMPLATE, Person, call
from pydantic import BaseModel, RootModel, ValidationError, field_validator

from llama_index.llms.pagedlc import IncompleteOutputError, Vllm
from pagedlc_engine.errors import InvalidRequestError

TEXT = {"text": "Zoë {Müller}"}


async def every_way(llm: Vllm, cls: type[BaseModel] = Person, **options: Any) -> list[list[Any]]:
    """The objects of all four methods, streams last."""
    stream = llm.stream_structured_predict(cls, PROMPT, llm_kwargs=options, **TEXT)
    astream = await llm.astream_structured_predict(cls, PROMPT, llm_kwargs=options, **TEXT)
    return [
        [llm.structured_predict(cls, PROMPT, llm_kwargs=options, **TEXT)],
        [await llm.astructured_predict(cls, PROMPT, llm_kwargs=options, **TEXT)],
        list(stream),
        [found async for found in astream],
    ]


@pytest.mark.parametrize("cls", [dict, {"type": "object"}, None])
def test_an_object_is_of_a_pydantic_class(scripted: Any, cls: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    with pytest.raises(InvalidRequestError, match="must be a pydantic class"):
        llm.structured_predict(cls, PROMPT, **TEXT)


@pytest.mark.parametrize("says", [PERSON_JSON, PERSON.model_dump_json(indent=2), f"Sure! {PERSON_JSON} Anything else?"])
async def test_all_ways_give_the_object(scripted: Any, says: str) -> None:
    llm, _ = scripted(says)
    for objects in await every_way(llm):
        assert objects[-1] == PERSON
        assert type(objects[-1]) is Person


class Ticket(BaseModel):
    kind: Literal["bug", "wish"]
    urgent: bool


async def test_a_model_that_says_something_else_says_an_object_all_the_same(scripted: Any) -> None:
    llm, _ = scripted("I am not sure what you mean.")
    for objects in await every_way(llm, Ticket):
        assert isinstance(objects[-1], Ticket)


def test_partial_objects_grow(scripted: Any) -> None:
    llm, _ = scripted(Person(name="Zoë Müller-Lüdenscheidt " * 5, age=42, homes=[]).model_dump_json())
    objects = list(llm.stream_structured_predict(Person, PROMPT, **TEXT))
    assert len(objects) > 2
    names = [found.name or "" for found in objects]
    assert len(set(names)) > 1
    assert all(later.startswith(earlier) for earlier, later in pairwise(names))
    # A number is there when it is complete, and what is there stays.
    assert {found.age for found in objects} == {None, 42}
    assert [found.age for found in objects] == sorted((found.age for found in objects), key=lambda age: age or 0)
    assert not isinstance(objects[0], Person)


async def test_the_model_reads_the_schema_and_the_system_prompt(scripted: Any) -> None:
    llm, engine = scripted(PERSON_JSON, system_prompt="Be brief.")
    llm.structured_predict(Person, PROMPT, **TEXT)
    prompt = engine.turns[0].prompt
    assert prompt.count("Be brief.") == 1
    assert "First and last name" in prompt
    assert "Who is it? Zoë {Müller}" in prompt


def test_the_next_turn_shares_the_schema_with_the_one_before(scripted: Any) -> None:
    llm, engine = scripted([PERSON_JSON, PERSON_JSON])
    structured = llm.as_structured_llm(Person)
    history = [ChatMessage(role="user", content="Who is it?")]
    history.append(structured.chat(history).message)
    structured.chat([*history, ChatMessage(role="user", content="Are you sure?")])
    assert engine.stats().cached_tokens > len(engine.turns[0].prompt_token_ids) - 16


# -- objects that do not come --


async def test_an_object_that_max_tokens_cuts_off_is_an_error_that_says_so(scripted: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    asks = [
        lambda: llm.structured_predict(Person, PROMPT, llm_kwargs={"max_tokens": 8}, **TEXT),
        lambda: list(llm.stream_structured_predict(Person, PROMPT, llm_kwargs={"max_tokens": 8}, **TEXT)),
        lambda: llm.as_structured_llm(Person).chat([ChatMessage(content="Who?")], max_tokens=8),
    ]
    for ask in asks:
        with pytest.raises(
            IncompleteOutputError, match=r"Person was cut off after 8 tokens; raise max_new_tokens"
        ) as error:
            ask()
        assert error.value.finish_reason == "length"
        assert error.value.text.startswith('{"name":')
    with pytest.raises(IncompleteOutputError):
        await llm.astructured_predict(Person, PROMPT, llm_kwargs={"max_tokens": 8}, **TEXT)


async def test_an_object_that_a_stop_string_cuts_off_is_an_error_that_says_so(scripted: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    structured, messages = llm.as_structured_llm(Person), [ChatMessage(content="Who?")]
    options = {"stop": [","]}
    asks = [
        lambda: llm.structured_predict(Person, PROMPT, llm_kwargs=options, **TEXT),
        lambda: list(llm.stream_structured_predict(Person, PROMPT, llm_kwargs=options, **TEXT)),
        lambda: structured.chat(messages, **options),
        lambda: list(structured.stream_chat(messages, **options)),
    ]
    said = r"the JSON of a Person was cut off after \d+ tokens by the stop string ','; leave it out of stop"
    for ask in asks:
        with pytest.raises(IncompleteOutputError, match=said) as error:
            ask()
        assert error.value.finish_reason == "stop"
        assert error.value.text == '{"name":"Zoë Müller"'
    with pytest.raises(IncompleteOutputError):
        await llm.astructured_predict(Person, PROMPT, llm_kwargs=options, **TEXT)


async def test_an_object_that_is_complete_before_a_stop_string_is_whole(scripted: Any) -> None:
    llm, _ = scripted('{"kind": "bug", "urgent": true}')
    for objects in await every_way(llm, Ticket, stop=["}"], include_stop_str_in_output=True):
        assert objects[-1] == Ticket(kind="bug", urgent=True)
    response = llm.chat([ChatMessage(content="Hi")], stop=["}"], include_stop_str_in_output=True)
    assert response.additional_kwargs["stop_reason"] == "}"


def test_a_number_that_a_stop_string_cuts_off_is_no_number(scripted: Any) -> None:
    llm, _ = scripted("12345")
    with pytest.raises(IncompleteOutputError, match="stop string '4'"):
        llm.structured_predict(RootModel[int], PROMPT, llm_kwargs={"stop": ["4"]}, **TEXT)


def test_what_was_streamed_before_the_cut_stays(scripted: Any) -> None:
    llm, engine = scripted(PERSON_JSON)
    length = len(engine.tokenizer.encode(PERSON_JSON[: PERSON_JSON.index("ller")]))
    objects = llm.stream_structured_predict(Person, PROMPT, llm_kwargs={"max_tokens": length}, **TEXT)
    seen: list[Any] = []
    with pytest.raises(IncompleteOutputError):
        seen.extend(objects)
    assert seen[-1].name == "Zoë Mü"
    seen.clear()
    with pytest.raises(IncompleteOutputError):
        seen.extend(llm.stream_structured_predict(Person, PROMPT, llm_kwargs={"stop": ["ller"]}, **TEXT))
    assert seen[-1].name == "Zoë Mü"


def test_an_object_that_fits_exactly_is_complete(scripted: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    exactly = llm.chat([ChatMessage(content="Who?")], structured_outputs={"json": Person.model_json_schema()})
    length = exactly.additional_kwargs["completion_tokens"]
    assert llm.structured_predict(Person, PROMPT, llm_kwargs={"max_tokens": length}, **TEXT) == PERSON


def test_a_number_that_is_cut_off_is_no_number(scripted: Any) -> None:
    llm, engine = scripted("123456789")
    length = len(engine.tokenizer.encode("123456789")) - 1
    with pytest.raises(IncompleteOutputError):
        llm.structured_predict(RootModel[int], PROMPT, llm_kwargs={"max_tokens": length}, **TEXT)


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


async def test_rules_beyond_the_schema_are_pydantic_s(scripted: Any) -> None:
    llm, _ = scripted('{"number": 3}')
    with pytest.raises(ValidationError, match="must be even"):
        llm.structured_predict(Even, PROMPT, **TEXT)
    with pytest.raises(ValidationError, match="must be even"):
        list(llm.stream_structured_predict(Even, PROMPT, **TEXT))


# -- the structured LLM --


async def test_structured_llm_in_all_eight_ways(scripted: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    structured = llm.as_structured_llm(Person)
    messages = [ChatMessage(role="user", content='Who is {name} in {"a": 1}?')]
    chats = [structured.chat(messages), await structured.achat(messages), *list(structured.stream_chat(messages))[-1:]]
    chats += [part async for part in await structured.astream_chat(messages)][-1:]
    completions = [structured.complete("Who?"), await structured.acomplete("Who?")]
    completions += list(structured.stream_complete("Who?"))[-1:]
    completions += [part async for part in await structured.astream_complete("Who?")][-1:]
    texts = [chat.message.content for chat in chats] + [completion.text for completion in completions]
    assert [response.raw for response in [*chats, *completions]] == [PERSON] * 8
    assert [json.loads(text) for text in texts] == [PERSON.model_dump()] * 8
    assert structured.metadata == llm.metadata


@pytest.mark.parametrize(
    ("mode", "says"),
    [(PydanticProgramMode.FUNCTION, call("Person", **PERSON.model_dump())), (PydanticProgramMode.LLM, PERSON_JSON)],
)
async def test_llama_index_s_other_ways_stay(scripted: Any, mode: PydanticProgramMode, says: str) -> None:
    llm, engine = scripted(says, pydantic_program_mode=mode)
    for objects in await every_way(llm):
        assert objects[-1].model_dump() == PERSON.model_dump()
    assert all("Answer with a JSON object" not in turn.prompt for turn in engine.turns)


def test_a_text_completion_program(scripted: Any) -> None:
    llm, _ = scripted(PERSON_JSON)
    program = LLMTextCompletionProgram.from_defaults(output_cls=Person, prompt_template_str="Who is {text}?", llm=llm)
    assert program(text="she") == PERSON


def test_a_model_without_chat_template(make: Any) -> None:
    llm, fake = make(engine={"has_template": False, "answer": PERSON_JSON})
    assert llm.structured_predict(Person, PROMPT, **TEXT) == PERSON
    assert fake.calls[0].prompt.startswith("user: Who is it?")
    assert json.loads(fake.calls[0].params.structured_outputs.json) == Person.model_json_schema()


async def test_thoughts_come_before_the_object(scripted: Any) -> None:
    llm, _ = scripted(f"A {{name}}, I think.\n</think>\n\n{PERSON_JSON}", chat_template=THINKING_TEMPLATE)
    for objects in await every_way(llm):
        assert objects[-1] == PERSON


async def test_events(scripted: Any, events: list[Any]) -> None:
    llm, _ = scripted(PERSON_JSON)
    results = await every_way(llm)
    names = [event.class_name() for event in events]
    assert names.count("LLMStructuredPredictStartEvent") == names.count("LLMStructuredPredictEndEvent") == 4
    assert names.count("LLMStructuredPredictInProgressEvent") == len(results[2]) + len(results[3])
    assert names.count("LLMChatStartEvent") == names.count("LLMChatEndEvent") == 4
    end = next(event for event in events if event.class_name() == "LLMStructuredPredictEndEvent")
    assert end.output == PERSON


def test_chat_templates_of_llama_index(scripted: Any) -> None:
    llm, engine = scripted(PERSON_JSON)
    prompt = ChatPromptTemplate.from_messages([("system", "Extract."), ("user", "Text: {text}")])
    assert llm.structured_predict(Person, prompt, **TEXT) == PERSON
    assert engine.turns[0].prompt.index("JSON schema") < engine.turns[0].prompt.index("Text: Zoë {Müller}")
