"""A LlamaIndex agent on a model in this process: tools, objects, and answers that can be interrupted.

Run it with ``python examples/llamaindex_agent.py``. The default model is small enough for any computer, and too small
to decide by itself when to call a tool or to make use of the result: it is told which tool to call, and the result is
the answer. Larger models need neither.
"""

from __future__ import annotations

import asyncio

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from llama_index.llms.pagedlc import Vllm


def loan_price(days: int) -> str:
    """Price of a book that is returned late by some days."""
    return f"A book that is {days} days late costs {days * 0.5:.2f} euros."


def opening_hours(day: str) -> str:
    """Opening hours of the library on a day of the week."""
    return "closed" if day.lower() == "sunday" else "9 to 18 o'clock"


class Reader(BaseModel):
    """A reader of the library."""

    name: str
    age: int


async def ask_agent(llm: Vllm) -> None:
    """The model calls a tool; its arguments always match the tool's schema."""
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(loan_price, return_direct=True), opening_hours],
        llm=llm,
        system_prompt="You work in a library.",
        initial_tool_choice="loan_price",
    )
    for question in ("My book is 4 days late. What do I have to pay?", "And if it is 10 days late?"):
        handler = agent.run(question)
        async for event in handler.stream_events():
            if isinstance(event, ToolCallResult):
                print(f"  {event.tool_name}({event.tool_kwargs}) -> {event.tool_output.content}")
            elif isinstance(event, AgentOutput):
                usage = event.raw["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                print(f"  {cached} of {usage['prompt_tokens']} prompt tokens were cached")
        print(f"{question} {await handler}")


def read_object(llm: Vllm) -> None:
    """The grammar of the class' JSON schema makes every answer an object; it can be watched as it grows."""
    prompt = PromptTemplate("Read who this text is about: {text}")
    text = "Anna Keller is 34 years old. She borrows a book every week."
    for reader in llm.stream_structured_predict(Reader, prompt, text=text):
        print(f"{type(reader).__name__}: {reader}")


def interrupt(llm: Vllm) -> None:
    """The answer ends as soon as it has said enough; what it said stays."""
    question = [ChatMessage(role="user", content="Tell me the story of a lighthouse keeper.")]
    response = llm.chat(question, stop_when=lambda text: text.count(".") >= 2)
    print(f"{response.message.content} ({response.additional_kwargs['finish_reason']})")


def main() -> None:
    llm = Vllm(model="smollm2", temperature=0.0, max_new_tokens=64)
    asyncio.run(ask_agent(llm))
    read_object(llm)
    interrupt(llm)


if __name__ == "__main__":
    main()
