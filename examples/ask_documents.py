"""Ask the documents beside this file, through a LangChain chain and through a LlamaIndex query engine.

Both frameworks use one engine inside this process, and so one prefix cache: what a prompt has in common with an
earlier one, from its beginning, is not computed again. That is why instructions and passages stand first in the
prompts below, and the question last.

    python examples/ask_documents.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import ChatPromptTemplate as LlamaIndexPrompt
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode

from langchain_pagedlc import VLLMChat
from llama_index.llms.pagedlc import Vllm
from pagedlc import LLM, shared_llm
from pagedlc.documents import MiniLM, Passage, load_documents, split_documents

DOCUMENTS = Path(__file__).parent / "documents"
MODEL = "smollm2"
INSTRUCTIONS = "Answer the question from the documents, in one short sentence."
# The small default model reads one passage at a time best; give larger models more.
PASSAGES_PER_QUESTION = 1
MINILM = MiniLM()

#: A question to the tokens of its answer, and the places they come from.
Ask = Callable[[str], tuple[Iterable[str], list[str]]]


class LangChainMiniLM(Embeddings):
    """The embedding model for LangChain."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return MINILM.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class LlamaIndexMiniLM(BaseEmbedding):
    """The embedding model for LlamaIndex."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return MINILM.embed([text])[0].tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def langchain_answers(passages: list[Passage]) -> Ask:
    """A retriever that finds the passage to read, and a chain that answers from it."""
    store = InMemoryVectorStore(LangChainMiniLM())
    store.add_documents([Document(p.full_text, metadata={"label": p.label}) for p in passages])
    retriever = store.as_retriever(search_kwargs={"k": PASSAGES_PER_QUESTION})
    prompt = ChatPromptTemplate.from_messages([("system", INSTRUCTIONS + "\n\n{passages}"), ("human", "{question}")])
    chain = prompt | VLLMChat(model=MODEL, temperature=0, max_tokens=64) | StrOutputParser()

    def ask(question: str) -> tuple[Iterable[str], list[str]]:
        found = retriever.invoke(question)
        text = "\n\n".join(document.page_content for document in found)
        tokens = chain.stream({"passages": text, "question": question})
        return tokens, [document.metadata["label"] for document in found]

    return ask


def llama_index_answers(passages: list[Passage]) -> Ask:
    """A query engine over the same passages, with the same prompt."""
    nodes = [TextNode(text=p.full_text, metadata={"label": p.label}) for p in passages]
    for node in nodes:
        node.excluded_llm_metadata_keys = node.excluded_embed_metadata_keys = ["label"]
    prompt = LlamaIndexPrompt.from_messages([("system", INSTRUCTIONS + "\n\n{context_str}"), ("user", "{query_str}")])
    engine = VectorStoreIndex(nodes, embed_model=LlamaIndexMiniLM()).as_query_engine(
        llm=Vllm(model=MODEL, temperature=0, max_new_tokens=64),
        similarity_top_k=PASSAGES_PER_QUESTION,
        text_qa_template=prompt,
        streaming=True,
    )

    def ask(question: str) -> tuple[Iterable[str], list[str]]:
        response = engine.query(question)
        return response.response_gen, [found.node.metadata["label"] for found in response.source_nodes]

    return ask


def show_answer(ask: Ask, question: str) -> None:
    """Print the answer as it comes, and its sources."""
    print(f"\n  {question}\n  ", end="", flush=True)
    tokens, sources = ask(question)
    for token in tokens:
        print(token, end="", flush=True)
    print(f"\n    source: {'; '.join(sources)}")


def show_prefix_cache(passages: list[Passage], llm: LLM) -> None:
    """Put all passages into one prompt, ask once through LangChain and once more through LlamaIndex."""
    system = INSTRUCTIONS + "\n\n" + "\n\n".join(passage.full_text for passage in passages)
    langchain = VLLMChat(model=MODEL, temperature=0, max_tokens=1)
    llama_index = Vllm(model=MODEL, temperature=0, max_new_tokens=1)

    def measure(name: str, first_token: Callable[[], object]) -> float:
        before, started = llm.stats(), time.perf_counter()
        first_token()
        seconds, after = time.perf_counter() - started, llm.stats()
        cached = after.cached_tokens - before.cached_tokens
        computed = after.prompt_tokens - before.prompt_tokens - cached
        print(f"  {name:<32} {computed:>5} tokens computed, {cached:>5} from the cache, first token {seconds:.2f} s")
        return seconds

    cold_chat = [("system", system), ("human", "How many books may I borrow?")]
    warm_chat = [
        ChatMessage(role="system", content=system),
        ChatMessage(role="user", content="Which fee is charged for late returns?"),
    ]
    cold = measure("first question, by LangChain", lambda: langchain.invoke(cold_chat))
    warm = measure("next question, by LlamaIndex", lambda: llama_index.chat(warm_chat))
    print(f"  The prefix cache saved {cold - warm:.2f} of {cold:.2f} seconds.")


def main() -> None:
    passages = split_documents(load_documents(DOCUMENTS))
    print(f"{len(passages)} passages from {len({passage.source for passage in passages})} documents.")

    # The engine behind every VLLMChat and Vllm below: they name the same model and options.
    llm = shared_llm(MODEL).load()

    print("\nA LangChain chain answers:")
    ask = langchain_answers(passages)
    show_answer(ask, "How many square metres does a plot measure?")
    show_answer(ask, "How many items may a reader borrow at a time?")
    show_answer(ask, "On which days is the library closed?")

    print("\nA LlamaIndex query engine answers:")
    ask = llama_index_answers(passages)
    show_answer(ask, "How long does the battery of the Lumo 3 last?")
    show_answer(ask, "What is the yearly rent of a plot?")

    print("\nAll documents in one prompt, and two questions:")
    show_prefix_cache(passages, llm)


if __name__ == "__main__":
    main()
