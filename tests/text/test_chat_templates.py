"""Conversations become the prompt that the model's template writes; what cannot be rendered is a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedlc.chat import ChatTemplate
from pagedlc.messages import normalize_messages
from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.errors import InvalidRequestError

USER = {"role": "user", "content": "Hi"}
CONVERSATION = [
    {"role": "system", "content": "You answer in rhymes."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "It's 42 — how do you do? 👍🏽"},
    {"role": "user", "content": "And now?\n\n"},
    {"role": "assistant", "content": "The same."},
    {"role": "user", "content": "Bye"},
]
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}[{{ m.content }}]{% endfor %}"
)


def with_templates(tokenizer: Tokenizer, **templates: str) -> Tokenizer:
    return Tokenizer(
        tokenizer.backend,
        bos_token_id=tokenizer.bos_token_id,
        special_tokens_map=tokenizer.special_tokens_map,
        chat_templates=templates,
    )


def test_smollm2_writes_its_own_format_with_its_default_system_prompt(smollm: Tokenizer) -> None:
    assert ChatTemplate(smollm).render_text([USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_rendered_markers_are_special_tokens(smollm: Tokenizer) -> None:
    token_ids = ChatTemplate(smollm).render(CONVERSATION[:2])
    assert token_ids.count(1) == 3
    assert token_ids.count(2) == 2


@pytest.mark.parametrize("turns", [2, 4])
def test_a_longer_conversation_continues_the_tokens_of_the_shorter_one(smollm: Tokenizer, turns: int) -> None:
    chat = ChatTemplate(smollm)
    asked = chat.render(CONVERSATION[:turns])
    answer = smollm.encode(CONVERSATION[turns]["content"]) + smollm.encode("<|im_end|>\n")
    longer = chat.render(CONVERSATION[: turns + 2])
    assert longer[: len(asked) + len(answer)] == asked + answer


def test_the_generation_prompt_can_be_left_out(smollm: Tokenizer) -> None:
    chat = ChatTemplate(smollm)
    closed = chat.render(CONVERSATION[:2], add_generation_prompt=False)
    assert chat.render(CONVERSATION[:2])[: len(closed)] == closed
    assert smollm.decode(closed, False).endswith("30?<|im_end|>\n")


def test_the_last_message_can_be_continued(smollm: Tokenizer) -> None:
    chat = ChatTemplate(smollm)
    messages = [USER, {"role": "assistant", "content": "Well, I"}]
    text = chat.render_text(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nWell, I")
    with pytest.raises(InvalidRequestError, match="add_generation_prompt=False"):
        chat.render(messages, continue_final_message=True)


def test_bos_is_not_doubled(sentencepiece: Tokenizer) -> None:
    chat = ChatTemplate(sentencepiece, "{{ bos_token }}{{ messages[0].content }}")
    token_ids = chat.render([{"role": "user", "content": "The quick"}])
    assert token_ids.count(1) == 1
    assert token_ids[0] == sentencepiece.bos_token_id


def test_a_template_may_be_text_or_a_file(smollm: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "plain.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    for template in (path, str(path), path.read_text()):
        assert ChatTemplate(smollm, template).render_text([USER]) == "user: Hi "


def test_template_variables_reach_the_template(smollm: Tokenizer) -> None:
    chat = ChatTemplate(smollm, "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}")
    assert chat.render_text([USER]) == "Hi"
    assert chat.render_text([USER], enable_thinking=True) == "Hi<think>"


def test_tools_reach_the_template_or_its_tool_variant(smollm: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "größe", "parameters": {}}}
    chat = ChatTemplate(smollm, "{% if tools %}{{ tools[0] | tojson }}{% endif %}{{ messages[0].content }}")
    assert "größe" in chat.render_text([USER], tools=[tool])
    assert chat.render_text([USER], tools=[]) == "Hi"
    two = ChatTemplate(with_templates(smollm, default="plain", tool_use="{{ tools[0].function.name }}"))
    assert two.render_text([USER]) == "plain"
    assert two.render_text([USER], tools=[tool]) == "größe"


# ---- errors


def test_a_model_without_a_template_says_how_to_give_one(smollm: Tokenizer) -> None:
    chat = ChatTemplate(with_templates(smollm))
    assert not chat.available
    with pytest.raises(InvalidRequestError, match="chat_template="):
        chat.render([USER])


def test_the_template_s_own_words_are_in_the_error(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="Roles must alternate user/assistant"):
        ChatTemplate(smollm, STRICT).render([USER, USER])


def test_a_template_that_fails_is_an_invalid_request(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="fails on the messages"):
        ChatTemplate(smollm, "{{ messages[0].content + 1 }}").render([USER])


def test_a_template_cannot_reach_out_of_its_sandbox(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="refuses the messages"):
        ChatTemplate(smollm, "{{ messages.__class__.__mro__ }}").render([USER])


@pytest.mark.parametrize(
    ("template", "message"), [("nowhere.jinja", "no file 'nowhere.jinja'"), ("{% if %}", "not valid Jinja.*line 1")]
)
def test_templates_that_are_none_are_refused_at_once(smollm: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ChatTemplate(smollm, template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("Hello", "must be a list"),
        (USER, "must be a list"),
        (["Hello"], r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], r"messages\[0\] needs a 'role'"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": 5}], "content must be text or a list of parts, not int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url' is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "no text"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"tool_calls\[0\] must look like"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "must be a JSON object, not list",
        ),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        normalize_messages(messages)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("usr", "'usr': did you mean 'user'"),
        ("User", "did you mean 'user'"),
        ("human", "did you mean 'user'"),
        ("AI", "did you mean 'assistant'"),
        ("assistent", "did you mean 'assistant'"),
        ("critic", "knows none of that name. Roles are system, user, assistant, tool."),
    ],
)
def test_a_role_that_nobody_knows_is_refused(smollm: Tokenizer, role: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ChatTemplate(smollm).render([USER, {"role": role, "content": "Hello"}])


def test_a_template_may_know_roles_of_its_own(smollm: Tokenizer) -> None:
    own = "{% for m in messages %}{{ 'Critic' if m.role == 'critic' else m.role }}: {{ m.content }}\n{% endfor %}"
    critic = {"role": "critic", "content": "No."}
    assert ChatTemplate(smollm, own).render_text([USER, critic]).endswith("Critic: No.\n")


# ---- messages


def test_messages_come_to_one_form() -> None:
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "c"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ä"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "result"},
        {"role": "assistant", "content": "done", "tool_calls": []},
    ]
    assert normalize_messages(given) == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "ä"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "result"},
        {"role": "assistant", "content": "done"},
    ]


def test_the_caller_s_messages_are_not_changed() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    normalize_messages([message])
    assert message["content"] is None
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_calls_without_arguments_have_an_empty_object() -> None:
    for arguments in (None, "", "{}", {}):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        assert normalize_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == {}
