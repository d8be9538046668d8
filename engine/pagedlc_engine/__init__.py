"""pagedlc's engine: a paged, continuously batching decoder. It knows tokens, not text or frameworks."""
