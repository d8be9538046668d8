"""pagedlc: an LLM that lives inside your own process, for LangChain and LlamaIndex."""
