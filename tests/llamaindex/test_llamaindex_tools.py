"""Tool calls: what the model says, what grammar and parser make of it, and what LlamaIndex gets (scripted model)."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llamaindex_tools import PERSON, THINKING_TEMPLATE, TOOLS, Person, call, get_weather

from llama_index.llms.pagedlc import IncompleteOutputError, Vllm
from pagedlc_engine.errors import InvalidRequestError

ASK = "What is the weather?"
WEATHER = call("get_weather", city="Zürich")
NOW = call("now")


async def every_way(llm: Vllm, **options: Any) -> list[list[ChatResponse]]:
    """The responses of all four methods, streams last."""
    stream = llm.stream_chat_with_tools(TOOLS, ASK, **options)
    astream = await llm.astream_chat_with_tools(TOOLS, ASK, **options)
    return [
        [llm.chat_with_tools(TOOLS, ASK, **options)],
        [await llm.achat_with_tools(TOOLS, ASK, **options)],
        list(stream),
        [response async for response in astream],
    ]


def calls_of(llm: Vllm, response: ChatResponse) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of the calls, which must say the same in every place where LlamaIndex looks for them."""
    selections = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    dicts = response.message.additional_kwargs.get("tool_calls", [])
    for selection, block, written in zip(selections, blocks, dicts, strict=True):
        assert selection.tool_id == block.tool_call_id == written["id"]
        assert selection.tool_name == block.tool_name == written["function"]["name"]
        assert selection.tool_kwargs == block.tool_kwargs == json.loads(written["function"]["arguments"])
    assert len({selection.tool_id for selection in selections}) == len(selections)
    return [(selection.tool_name, selection.tool_kwargs) for selection in selections]


@pytest.mark.parametrize(
    ("says", "options", "text", "expected"),
    [
        (f"Let me see.\n{WEATHER}", {}, "Let me see.", [("get_weather", {"city": "Zürich"})]),
        (NOW, {}, "", [("now", {})]),
        ("It is cold.", {}, "It is cold.", []),
        (
            f"{WEATHER}\n{NOW}\n{call('add', a=1, b=-2)}",
            {"allow_parallel_tool_calls": True},
            "",
            [("get_weather", {"city": "Zürich"}), ("now", {}), ("add", {"a": 1, "b": -2})],
        ),
        (f"{WEATHER}\n{NOW}", {}, "", [("get_weather", {"city": "Zürich"})]),
        (call("get_weather", city='"東京" \\ {a}\n'), {}, "", [("get_weather", {"city": '"東京" \\ {a}\n'})]),
        (f"I would rather talk. {NOW}", {"tool_required": True}, "", [("now", {})]),
        (f"{NOW} please", {"tool_choice": "now"}, "", [("now", {})]),
        (WEATHER, {"tool_choice": "none"}, WEATHER, []),
        (WEATHER, {"tool_choice": "none", "tool_required": True}, WEATHER, []),
    ],
    ids=[
        "text-and-call",
        "no-argument",
        "text",
        "parallel",
        "one",
        "quoting",
        "required",
        "named",
        "none",
        "none-wins",
    ],
)
async def test_the_same_calls_whole_and_streamed(
    scripted: Any, says: str, options: dict[str, Any], text: str, expected: Any
) -> None:
    llm, _ = scripted(says)
    for responses in await every_way(llm, **options):
        assert responses[-1].message.content == text
        assert calls_of(llm, responses[-1]) == expected
        assert responses[-1].additional_kwargs["finish_reason"] == ("tool_calls" if expected else "stop")
        if len(responses) > 1:
            assert "".join(response.delta or "" for response in responses) == text


@pytest.mark.parametrize("options", [{"tool_required": True}, {"tool_choice": "add"}, {"tool_choice": "any"}], ids=str)
async def test_a_model_that_does_not_want_to_has_to_call(scripted: Any, options: dict[str, Any]) -> None:
    llm, _ = scripted("No. I will not.")
    for responses in await every_way(llm, **options):
        ((name, arguments),) = calls_of(llm, responses[-1])
        assert name == options.get("tool_choice", name).replace("any", name)
        FunctionTool.from_defaults(next(tool.fn for tool in TOOLS if tool.metadata.name == name))(**arguments)


@pytest.mark.parametrize("says", ["<tool_call>{'name': oops", call("fly", to="Mars"), call("add", a="x", c=[1])])
async def test_malformed_calls_cannot_be_made(scripted: Any, says: str) -> None:
    llm, _ = scripted(says)
    for responses in await every_way(llm):
        ((name, arguments),) = calls_of(llm, responses[-1])
        fields = next(tool for tool in TOOLS if tool.metadata.name == name).metadata.fn_schema.model_fields
        assert arguments.keys() == fields.keys()


def test_with_tools_text_streams_and_arguments_grow(scripted: Any) -> None:
    city = "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch"
    llm, _ = scripted(f"{'Let me look at the map first. ' * 6}\n{call('get_weather', city=city)}")
    responses = list(llm.stream_chat_with_tools(TOOLS, ASK))
    # The engine joins what it says while nobody listens: on a busy machine there are fewer pieces than tokens.
    assert sum(bool(response.delta) for response in responses) > 2
    cities = [arguments.get("city", "") for response in responses for _, arguments in calls_of(llm, response)]
    assert len(set(cities)) > 2
    assert all(later.startswith(earlier) for earlier, later in pairwise(cities))
    identities = {(block.tool_call_id, block.tool_name) for r in responses for block in r.message.blocks[1:]}
    assert len(identities) == 1


def test_a_number_comes_when_it_is_complete(scripted: Any) -> None:
    llm, _ = scripted(call("add", a=123456789, b=-987654321))
    seen = [arguments for r in llm.stream_chat_with_tools(TOOLS, ASK) for _, arguments in calls_of(llm, r)]
    assert {arguments.get("a", 123456789) for arguments in seen} == {123456789}
    assert seen[-1] == {"a": 123456789, "b": -987654321}


# -- when it ends too early --


async def test_a_call_that_max_tokens_cuts_off_is_no_call_and_an_error_says_so(scripted: Any) -> None:
    llm, engine = scripted(WEATHER)
    length = len(engine.tokenizer.encode(WEATHER[: WEATHER.index("rich")]))
    for responses in await every_way(llm, max_tokens=length):
        response = responses[-1]
        assert [type(block) for block in response.message.blocks] == [TextBlock]
        assert response.additional_kwargs["finish_reason"] == "length"
        assert response.additional_kwargs["invalid_tool_calls"][0]["arguments"].startswith('{"city": "Z')
        for strict in (True, False):
            with pytest.raises(IncompleteOutputError, match=f"get_weather was cut off after {length} tokens"):
                llm.get_tool_calls_from_response(response, error_on_no_tool_call=strict)


def test_no_call_is_an_error_only_when_asked(scripted: Any) -> None:
    llm, _ = scripted("It is cold.")
    response = llm.chat_with_tools(TOOLS, ASK)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match=r"called no tool .* 'It is cold.'"):
        llm.get_tool_calls_from_response(response)


def test_calls_of_other_providers_are_read(make: Any) -> None:
    block = ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs='{"a": 1, "b"')
    response = ChatResponse(message=ChatMessage(role="assistant", blocks=[block]))
    (selection,) = make()[0].get_tool_calls_from_response(response)
    assert selection == ToolSelection(tool_id="c1", tool_name="add", tool_kwargs={"a": 1})


# -- what goes in --


def test_history_is_not_changed_and_the_question_follows_it(scripted: Any) -> None:
    llm, engine = scripted("Yes.")
    history = [ChatMessage(role="user", content="Hello there"), ChatMessage(role="assistant", content="Hi!")]
    llm.chat_with_tools(TOOLS, ChatMessage(role="user", content="And now?"), history)
    assert len(history) == 2
    prompt = engine.turns[0].prompt
    assert prompt.index("get_weather") < prompt.index("Hello there") < prompt.index("Hi!") < prompt.index("And now?")


def test_a_call_and_its_result_go_back_as_the_model_wrote_them(scripted: Any) -> None:
    llm, engine = scripted([WEATHER, "Snow."])
    ask = ChatMessage(role="user", content=ASK)
    answer = llm.chat_with_tools(TOOLS, chat_history=[ask]).message
    result = ChatMessage(
        role="tool", content="冷たい", additional_kwargs={"tool_call_id": answer.blocks[1].tool_call_id}
    )
    last = llm.chat_with_tools(TOOLS, chat_history=[ask, answer, result])
    assert last.message.content == "Snow."
    assert f"{WEATHER}<|im_end|>" in engine.turns[1].prompt
    assert "<tool_response>\n冷たい\n</tool_response>" in engine.turns[1].prompt
    assert last.additional_kwargs["cached_tokens"] > len(engine.turns[0].prompt_token_ids) - 16


def test_tools_in_any_shape(scripted: Any) -> None:
    llm, _ = scripted(WEATHER)
    as_dict = TOOLS[0].metadata.to_openai_tool()
    for tools in (TOOLS, [as_dict], [FunctionTool.from_defaults(get_weather), as_dict | {"function": {"name": "x"}}]):
        response = llm.chat([ChatMessage(role="user", content=ASK)], tools=tools)
        assert calls_of(llm, response) == [("get_weather", {"city": "Zürich"})]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_choice": "fly"}, "no tool 'fly'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "Two tools are named 'get_weather'"),
        ({"tools": [], "tool_choice": "add"}, "no tool 'add'"),
        ({"tools": 5}, "must be a list of tools"),
        ({"tools": [print]}, "is no tool.*FunctionTool"),
    ],
    ids=["choice", "twice", "no-tools", "no-list", "function"],
)
def test_what_cannot_be_is_refused(make: Any, options: dict[str, Any], says: str) -> None:
    llm, fake = make()
    for ask in (llm.chat_with_tools, llm.stream_chat_with_tools):
        with pytest.raises(InvalidRequestError, match=says):
            ask(**{"tools": TOOLS, "user_msg": ASK, **options})
    assert fake.calls == []


def test_tools_need_the_chat_template(make: Any) -> None:
    llm, _ = make(messages_to_prompt=lambda messages: "x")
    assert not llm.metadata.is_function_calling_model
    with pytest.raises(InvalidRequestError, match="messages_to_prompt"):
        llm.chat_with_tools(TOOLS, ASK)
    with pytest.raises(InvalidRequestError, match=r"call chat\(\)"):
        make()[0].complete(ASK, tools=TOOLS)


def test_metadata_says_whether_tools_work(make: Any) -> None:
    assert make()[0].metadata.is_function_calling_model
    assert not make(engine={"has_template": False})[0].metadata.is_function_calling_model
    assert not make(is_function_calling_model=False)[0].metadata.is_function_calling_model


# -- LlamaIndex runs them --


async def test_predict_and_call(scripted: Any) -> None:
    llm, _ = scripted(f"{call('add', a=2, b=3)}\n{NOW}")
    assert llm.predict_and_call(TOOLS, ASK).response == "5"
    assert (await llm.apredict_and_call(TOOLS, ASK)).response == "5"
    both = llm.predict_and_call(TOOLS, ASK, allow_parallel_tool_calls=True)
    assert [source.raw_output for source in both.sources] == [5, "12:30"]


def test_llama_index_s_own_program_over_tools(scripted: Any) -> None:
    llm, _ = scripted(call("Person", **PERSON.model_dump()))
    program = FunctionCallingProgram.from_defaults(Person, prompt_template_str="Who is {name}?", llm=llm)
    assert program(name="she") == PERSON
    assert list(program.stream_call(name="she"))[-1] == PERSON


# -- thoughts --


@pytest.mark.parametrize("quiet", [False, True])
async def test_thoughts_have_a_block_of_their_own(scripted: Any, quiet: bool) -> None:
    thought = "" if quiet else "They ask for a city.\n" * 6 + "Easy."
    says = f"{thought}\n</think>\n\nIt is Paris." if thought else "It is Paris."
    llm, _ = scripted(says, chat_template=THINKING_TEMPLATE)
    options = {"chat_template_kwargs": {"quiet": quiet}}
    messages = [ChatMessage(role="user", content="Capital of France?")]
    whole = [llm.chat(messages, **options), await llm.achat(messages, **options)]
    astream = await llm.astream_chat(messages, **options)
    for parts in (list(llm.stream_chat(messages, **options)), [part async for part in astream]):
        assert "".join(part.delta or "" for part in parts) == "It is Paris."
        thinking = [part.additional_kwargs.get("thinking_delta", "") for part in parts]
        assert "".join(thinking) == thought
        assert quiet or sum(map(bool, thinking)) > 1
        whole.append(parts[-1])
    for response in whole:
        thoughts = [block.content for block in response.message.blocks if isinstance(block, ThinkingBlock)]
        assert thoughts == ([thought] if thought else [])
        assert response.message.content == "It is Paris."
    completion = llm.complete("Capital of France?", **options)
    assert completion.text == "It is Paris."
    assert completion.additional_kwargs.get("thinking", "") == thought


def test_thoughts_come_before_a_call(scripted: Any) -> None:
    llm, _ = scripted(f"I need the time.\n</think>\n\n{NOW}", chat_template=THINKING_TEMPLATE)
    for options in ({}, {"tool_required": True}):
        *_, last = llm.stream_chat_with_tools(TOOLS, ASK, **options)
        assert last.message.blocks[0] == ThinkingBlock(content="I need the time.")
        assert calls_of(llm, last) == [("now", {})]
