"""LlamaIndex on a model in this process: complete, chat, and ask documents, streaming. No server, no network.

Run it with ``python examples/llamaindex_quickstart.py``.
"""

from __future__ import annotations

from pathlib import Path

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import ChatMessage

from llama_index.llms.pagedlc import Vllm
from pagedlc.documents import MiniLM, load_documents

DOCUMENTS = Path(__file__).parent / "documents"
QUESTIONS = ("How many items may a reader borrow at a time?", "Is food allowed in the reading room?")


class LocalEmbedding(BaseEmbedding):
    """The sentence embeddings that come with pagedlc's demo, as LlamaIndex takes them."""

    _model: MiniLM = PrivateAttr(default_factory=MiniLM)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.embed(texts).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def main() -> None:
    llm = Vllm(model="smollm2", temperature=0.0, max_new_tokens=64)

    print("complete:", llm.complete("Name three fruits.").text)

    print("stream_chat: ", end="")
    for part in llm.stream_chat([ChatMessage(role="user", content="Write one sentence about the sea.")]):
        print(part.delta, end="", flush=True)
    print()

    Settings.llm = llm
    Settings.embed_model = LocalEmbedding()
    Settings.tokenizer = llm.tokenize  # so that LlamaIndex counts this model's tokens
    Settings.chunk_size, Settings.chunk_overlap = 128, 20

    documents = [Document(text=file.text, metadata={"source": file.source}) for file in load_documents(DOCUMENTS)]
    engine = VectorStoreIndex.from_documents(documents).as_query_engine(similarity_top_k=1, streaming=True)
    for question in QUESTIONS:
        before = llm.llm.stats()
        print(f"\n{question}")
        response = engine.query(question)
        for text in response.response_gen:
            print(text, end="", flush=True)
        after = llm.llm.stats()
        cached, prompt = after.cached_tokens - before.cached_tokens, after.prompt_tokens - before.prompt_tokens
        print(f"\n  from {response.source_nodes[0].metadata['source']}; {cached} of {prompt} prompt tokens were cached")


if __name__ == "__main__":
    main()
