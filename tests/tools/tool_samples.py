"""Tools, templates in the shape of the model families, and helpers that feed parsers in every possible way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedlc.tools import ChatMessage, ToolCallEnd, ToolCallStart
from pagedlc.tools.events import AnswerEvent
from pagedlc.tools.parser import CallParser

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
            "required": ["b", "a"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time."}}
TOOLS = [WEATHER, ADD, NOW]
NAMES = ["get_weather", "add", "now"]

QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall one inside <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
QWEN_THINKING = QWEN_LIKE.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n",
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- elif always_thinking is defined %}{{- '<think>\\n' }}{%- endif %}{%- endif %}\n",
)
LLAMA_LIKE = """{{- bos_token }}
{%- set head = '<|start_header_id|>' %}{%- set end = '<|end_header_id|>\\n\\n' %}
{{- head + 'system' + end }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- if tools %}
    {{- head + 'user' + end + 'Answer with {"name": function, "parameters": values}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0].content + '<|eot_id|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('One tool call at a time!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head + 'assistant' + end + '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- head + 'ipython' + end + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- head + message.role + end + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head + 'assistant' + end }}{%- endif %}
"""
MISTRAL_LIKE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Ids have 9 characters!') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('Ids have 9 characters!') }}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_NAMED = MISTRAL_LIKE.replace("'[TOOL_CALLS]['", "'[TOOL_CALLS]name[ARGS]'")


def numbered_ids() -> Callable[[], str]:
    """Ids that are the same for every parser."""
    numbers = count()
    return lambda: f"id{next(numbers)}"


def fold(events: Iterable[AnswerEvent]) -> ChatMessage:
    """The message of these events; checks that they come in a sensible order."""
    message = ChatMessage()
    open_call: int | None = None
    for event in events:
        if isinstance(event, ToolCallStart):
            assert open_call is None, "a call begins inside another"
            assert event.index == len(message.tool_calls)
            open_call = event.index
        elif isinstance(event, ToolCallEnd):
            assert open_call == event.index
            open_call = None
        elif open_call is not None:
            assert getattr(event, "index", None) == open_call, f"{event} inside a call"
        message.add([event])
    assert open_call is None, "a call never ends"
    return message


def feed_all(parser: CallParser, pieces: Iterable[str]) -> ChatMessage:
    """What the pieces of an answer add up to."""
    events: list[Any] = []
    for piece in pieces:
        events += parser.feed(piece)
    return fold([*events, *parser.finish()])


def splits(text: str) -> Iterator[list[str]]:
    """The text whole, letter by letter, and cut in two and in three at every place (within reason)."""
    yield [text]
    yield list(text)
    for first in range(1, len(text)):
        yield [text[:first], text[first:]]
        for second in (first + 1, first + 7):
            if second < len(text):
                yield [text[:first], text[first:second], text[second:]]


def tokens(text: str) -> list[str]:
    """Pieces like those that a tokenizer makes."""
    return re.findall(r" ?\w+|\s+|[^\w\s]{1,3}", text)


def make_model(folder: Path, template: str, *specials: str) -> Path:
    """A model folder with a byte-level tokenizer, special tokens and a chat template, for a scripted model."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ("<s>", "</s>", *specials)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256 + len(specials)}
    ends = {"bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({**config, **shape, **ends, "num_key_value_heads": 2}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder
