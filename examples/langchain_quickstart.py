"""LangChain on a model in this process: a chain, streaming, and a batch that shares its system prompt.

Run it with ``python examples/langchain_quickstart.py``. No server, no key, no network.
"""

from __future__ import annotations

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_pagedlc import VLLMChat

SYSTEM = """You are the guide of a small museum of clocks. The museum is open from 10 to 17 o'clock, except on
Mondays. A ticket costs 6 euros, and children come in free. The tower clock on the second floor is from 1712 and
strikes every quarter of an hour. Guided tours start at 11 and at 15 o'clock. There is a café on the ground floor,
and the garden is open all year. Dogs may come into the garden, but not into the house. Answer in one sentence."""

QUESTIONS = [
    "When does the museum open?",
    "What does a ticket cost?",
    "How old is the tower clock?",
    "May I bring my dog?",
]


def main() -> None:
    chat = VLLMChat(model="smollm2", temperature=0, max_tokens=40)
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", "{question}")])
    chain = prompt | chat | StrOutputParser()

    print("A chain:")
    print(" ", chain.invoke({"question": QUESTIONS[0]}))

    print("\nThe same, as it is written:")
    print("  ", end="")
    for text in chain.stream({"question": QUESTIONS[1]}):
        print(text, end="", flush=True)
    print()

    print("\nAll questions at once. The system prompt is in the cache by now:")
    answers = (prompt | chat).batch([{"question": question} for question in QUESTIONS])
    for question, answer in zip(QUESTIONS, answers, strict=True):
        usage = answer.usage_metadata
        print(f"  {question} {answer.text}")
        print(f"    {usage['input_tokens']} prompt tokens, {usage['input_token_details']['cache_read']} from the cache")

    chat.close()


if __name__ == "__main__":
    main()
