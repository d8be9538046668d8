"""A format can be added from outside in a few lines, as docs/tools.md shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tool_samples import TOOLS

from pagedlc import SamplingParams
from pagedlc.tools import ChatTurn
from scripted_model import ScriptedLLM

DOCS = Path(__file__).parents[2] / "docs" / "tools.md"


def test_the_format_of_the_documentation_works(scripted_llm: Callable[..., ScriptedLLM]) -> None:
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.S) if "Arrow" in block
    )
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    llm = scripted_llm(
        'Go => {"name": "now", "arguments": {}} <=\n=> {"name": "add", "arguments": {"b": 1, "a": 2}} <='
    )
    arrow = namespace["ArrowFormat"]()
    turn = ChatTurn(llm, [{"role": "user", "content": "Hi"}], TOOLS, tool_call_format=arrow, parallel_tool_calls=True)
    *_, last = turn.stream(SamplingParams(max_tokens=200))
    assert last.message.text == "Go"
    assert [(call.name, call.valid) for call in last.message.tool_calls] == [("now", True), ("add", True)]
