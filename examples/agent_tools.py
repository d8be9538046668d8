"""A LangChain agent with two tools, streamed, on a model in this process.

Arguments are held to the tools' schemas while they are written, so no call is ever malformed. Run it with
``python examples/agent_tools.py``. No server, no key, no network.

The default model is small enough for any computer, and too small to say what a tool told it: its calls are right, its
answers are not. Set ``MODEL`` to a larger one for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from langchain_pagedlc import VLLMChat

MODEL = "smollm2"
SYSTEM = "You are the porter of a small hotel. Look things up with the tools, and tell the guest what they say."


@tool
def weather(city: Literal["Oslo", "Rome", "Zürich"]) -> str:
    """The weather in a city today."""
    return {"Oslo": "Snow, -3 degrees.", "Rome": "Sunny, 19 degrees.", "Zürich": "Fog, 6 degrees."}[city]


@tool
def breakfast_hours() -> str:
    """When breakfast is served in the hotel."""
    return "Breakfast is from 7 to 10."


@wrap_model_call
def look_up_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> Any:
    """One tool call, then the answer. A model as small as the default one needs this help; leave it out for others."""
    looked_up = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(tool_choice="none" if looked_up else "any"))


def main() -> None:
    chat = VLLMChat(model=MODEL, temperature=0, repetition_penalty=1.1, max_tokens=48)
    agent = create_agent(
        chat,
        [weather, breakfast_hours],
        system_prompt=SYSTEM,
        middleware=[look_up_first],
        checkpointer=InMemorySaver(),
    )
    guest: Any = {"configurable": {"thread_id": "room 12"}}

    for question in ("How is the weather in Zürich?", "When is breakfast?"):
        print(f"\nGuest: {question}")
        for message, _ in agent.stream({"messages": [HumanMessage(question)]}, guest, stream_mode="messages"):
            if isinstance(message, ToolMessage):
                print(f"\n  result: {message.content}")
            elif isinstance(message, AIMessageChunk):
                for piece in message.tool_call_chunks:
                    print(f"  call: {piece['name']} " if piece["name"] else piece["args"], end="", flush=True)
                print(message.text, end="", flush=True)
        print()

    print("\nPrompt tokens of each step, and how many came from the cache:")
    for message in agent.get_state(guest).values["messages"]:
        if usage := getattr(message, "usage_metadata", None):
            print(f"  {usage['input_tokens']}, {usage['input_token_details']['cache_read']} from the cache")

    chat.close()


if __name__ == "__main__":
    main()
