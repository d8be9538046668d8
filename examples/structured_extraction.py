"""Objects out of text: the answer is held to a schema while it is written, and can be read while it grows.

Run it with ``python examples/structured_extraction.py``. No server, no key, no network.
"""

from __future__ import annotations

from typing import Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_pagedlc import VLLMChat

NOTES = [
    "Maria Keller rang. Her boiler has been leaking since this morning and the cellar is under water.",
    "Tom Okafor asks whether we could look at the squeaking garden gate some time in spring.",
]


class Job(BaseModel):
    """A job for a craftsman."""

    customer: str = Field(max_length=30, description="Name of the customer")
    item: str = Field(max_length=30, description="What is broken")
    urgency: Literal["today", "this week", "some time"]


class Contact(TypedDict):
    """Someone who rang."""

    first_name: str
    last_name: str


def main() -> None:
    chat = VLLMChat(model="smollm2", temperature=0, repetition_penalty=1.05, max_tokens=80)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You read notes of a craftsman's office and fill in forms."), ("human", "{note}")]
    )

    print("Instances of a pydantic model, all notes at once:")
    for job in (prompt | chat.with_structured_output(Job)).batch([{"note": note} for note in NOTES]):
        print(" ", repr(job))

    print("\nA dict while it grows:")
    for contact in (prompt | chat.with_structured_output(Contact)).stream({"note": NOTES[0]}):
        print(" ", contact)

    print("\nWhen there are too few tokens for the object, the error says so:")
    try:
        chat.with_structured_output(Job, max_tokens=8).invoke(NOTES[0])
    except OutputParserException as error:
        print(" ", str(error).splitlines()[0])

    chat.close()


if __name__ == "__main__":
    main()
