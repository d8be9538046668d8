"""An interview in which the interviewer cuts in: the new question interrupts the answer that is still being given.

Run it with ``python examples/interview.py``. No server, no key, no network.
"""

from __future__ import annotations

import asyncio

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage

from langchain_pagedlc import VLLMChat

CANDIDATE = "You apply for a job as a gardener. Tell the interviewer about your work with plants, in whole sentences."


class Interview:
    """A conversation with a candidate who can be interrupted."""

    def __init__(self) -> None:
        self.chat = VLLMChat(
            model="smollm2",
            temperature=0,
            repetition_penalty=1.1,
            max_tokens=120,
            conversation_id="interview with the gardener",
            barge_in=True,
        )
        self.history: list[BaseMessage] = [SystemMessage(CANDIDATE)]
        self.saying = ""
        self.under_way = asyncio.Event()
        self.turn = 0

    async def ask(self, question: str) -> AIMessageChunk:
        """Ask, whether or not the candidate is still speaking, and print the answer as it comes."""
        self.turn += 1
        turn = self.turn
        if self.saying:
            # What was said is part of the conversation, as far as it came.
            self.history.append(AIMessage(self.saying))
        self.history.append(HumanMessage(question))
        self.saying = ""
        print(f"\nInterviewer: {question}\nCandidate:   ", end="")
        chunks: list[AIMessageChunk] = []
        async for chunk in self.chat.astream(list(self.history)):
            chunks.append(chunk)
            if turn == self.turn:
                self.saying += chunk.text
                print(chunk.text, end="", flush=True)
            if len(self.saying) > 60:
                self.under_way.set()
        self.under_way.set()
        return sum(chunks[1:], chunks[0])


def report(answer: AIMessageChunk) -> None:
    usage = answer.usage_metadata
    assert usage is not None
    cached = usage["input_token_details"]["cache_read"]
    print(f"  {answer.response_metadata['finish_reason']} after {usage['output_tokens']} tokens;", end="")
    print(f" {cached} of {usage['input_tokens']} prompt tokens came from the cache")


async def main() -> None:
    interview = Interview()

    first = asyncio.create_task(interview.ask("Tell me everything about your experience."))
    await interview.under_way.wait()
    # The next turn of the same conversation ends the one before; nothing else has to be done.
    second = await interview.ask("Sorry to cut in. Which plant do you like best?")
    print("\n\nThe two answers:")
    report(await first)
    report(second)

    print("\nTwo sentences are enough for the next one:")
    question = HumanMessage("Why do you want to work here?")
    conversation = [*interview.history, AIMessage(interview.saying), question]
    third = await interview.chat.ainvoke(conversation, stop_when=lambda text: text.count(".") >= 2)
    print(f"\nInterviewer: {question.text}\nCandidate:   {third.text}")
    print(f"  {third.response_metadata['finish_reason']}")

    interview.chat.close()


if __name__ == "__main__":
    asyncio.run(main())
