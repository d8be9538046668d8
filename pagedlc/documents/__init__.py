"""Questions about documents: read files, find the passages that matter, let the model answer from them."""

from pagedlc.documents.embedding import Embedder, MiniLM
from pagedlc.documents.index import Hit, PassageIndex
from pagedlc.documents.loading import SUPPORTED_SUFFIXES, Document, DocumentError, load_documents
from pagedlc.documents.qa import Answer, DocumentQA
from pagedlc.documents.splitting import Passage, split_documents

__all__ = [
    "SUPPORTED_SUFFIXES",
    "Answer",
    "Document",
    "DocumentError",
    "DocumentQA",
    "Embedder",
    "Hit",
    "MiniLM",
    "Passage",
    "PassageIndex",
    "load_documents",
    "split_documents",
]
