"""The scripted model: what other tests rely on when they let it speak."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from langchain_pagedlc import VLLMChat
from llama_index.llms.pagedlc import Vllm
from pagedlc import PagedLCError, SamplingParams
from scripted_model import ScriptedLLM, Turn

Make = Callable[..., ScriptedLLM]
TEXT = "The sky is blue – naïve 😀.\n"


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_it_says_its_script_and_ends(scripted_llm: Make, run_ahead: int, temperature: float) -> None:
    llm = scripted_llm(TEXT, run_ahead=run_ahead)
    output = llm.generate("Hello", SamplingParams(max_tokens=50, temperature=temperature, n=2))[0]
    assert [(answer.text, answer.finish_reason) for answer in output.outputs] == [(TEXT, "stop")] * 2


def test_each_request_gets_its_own_answer(scripted_llm: Make) -> None:
    by_prompt = scripted_llm({"sky": "blue", "grass": "green"})
    outputs = by_prompt.generate(["the grass", "the sky"] * 40, SamplingParams(temperature=0))
    assert [output.outputs[0].text for output in outputs] == ["green", "blue"] * 40
    in_turn = scripted_llm(["one", "two"])
    assert [in_turn.generate("?")[0].outputs[0].text for _ in range(2)] == ["one", "two"]
    with pytest.raises(PagedLCError, match="2 answers"):
        in_turn.generate("?")


def test_a_function_sees_the_prompt_and_may_answer_with_exact_tokens(scripted_llm: Make) -> None:
    def answer(turn: Turn) -> list[int]:
        assert turn.prompt == "Hello"
        return [65, 66, 67 + turn.number]

    llm = scripted_llm(answer)
    found = [llm.generate("Hello", SamplingParams(max_tokens=3))[0].outputs[0].token_ids for _ in range(2)]
    assert found == [[65, 66, 67], [65, 66, 68]]
    assert [turn.number for turn in llm.turns] == [0, 1]


def test_what_is_forbidden_is_left_out(scripted_llm: Make) -> None:
    llm = scripted_llm("one two three")
    banned = llm.tokenizer.encode(" two")
    assert len(banned) == 1
    params = SamplingParams(temperature=0, logit_bias={banned[0]: float("-inf")})
    assert llm.generate("?", params)[0].outputs[0].text == "one two three"
    assert banned[0] not in llm.generate("?", params)[0].outputs[0].token_ids


def test_a_conversation_is_read_back_from_the_cache(scripted_llm: Make) -> None:
    llm = scripted_llm("word " * 40)
    first = llm.generate([list(range(10, 60))], SamplingParams(max_tokens=100))[0]
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    second = llm.generate([history], SamplingParams(max_tokens=100))[0]
    assert second.num_cached_tokens >= len(history) - 32
    assert second.outputs[0].text == "word " * 40


def test_both_integrations_talk_to_it(scripted_llm: Make) -> None:
    llm = scripted_llm({"Hi": "Hello there!"})
    chat = VLLMChat(temperature=0, **llm.options)
    assert chat.llm is llm
    assert chat.invoke("Hi").content == "Hello there!"
    assert "".join(str(chunk.content) for chunk in chat.stream("Hi")) == "Hello there!"
    assert Vllm(temperature=0, **llm.options).complete("Hi").text == "Hello there!"
    assert len(llm.turns) == 3
