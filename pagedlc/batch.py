"""Requests that are read together, from submission to results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pagedlc.answers import RequestReader
from pagedlc.outputs import CompletionChunk, RequestOutput
from pagedlc.prefix import PrefixHistory
from pagedlc.prompts import PreparedRequest
from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.client import EngineClient, Mailbox, RequestHandle
from pagedlc_engine.errors import InvalidRequestError, PagedLCError, own_copy
from pagedlc_engine.request import TokenDelta

__all__ = ["RequestBatch"]

#: Requests that reach the engine together: they fill its next step, and while that runs the next ones get ready.
_TOGETHER = 64


class RequestBatch:
    """Submits requests, all at once, and reads their answers from one mailbox.

    Args:
        client: The engine.
        tokenizer: Turns tokens into text.
        history: Remembers the requests when the batch is closed.
        requests: At least one.
        whole: Nobody looks at an answer before it is finished: where no stop string has to be watched for, the engine
            hands it over in one piece.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        history: PrefixHistory,
        requests: Sequence[PreparedRequest],
        *,
        whole: bool = False,
    ) -> None:
        self.mailbox = Mailbox(sum(item.request.params.n for item in requests))
        self._history = history
        self._readers = {
            item.request.request_id: RequestReader(tokenizer, item.request, item.text, item.token_ids)
            for item in requests
        }
        self._positions = {item.request.request_id: at for at, item in enumerate(requests)}
        self._handles: dict[str, RequestHandle] = {}
        for first in range(0, len(requests), _TOGETHER):
            group = [
                replace(item.request, whole=whole and not item.request.params.stop)
                for item in requests[first : first + _TOGETHER]
            ]
            handles = client.submit_all(group, self.mailbox)
            self._handles.update((handle.request_id, handle) for handle in handles)

    def chunks(self, deltas: Sequence[TokenDelta]) -> Iterator[CompletionChunk]:
        """What deltas add to the answers; an answer that a stop string completes is aborted in the engine.

        Raises:
            PagedLCError: A request's error, after what came before it.
        """
        for delta in deltas:
            chunk = self._readers[delta.request_id].read(delta)
            if chunk is None:  # of an answer that a stop string completed: the engine was a token ahead
                continue
            if chunk.finish_reason is not None and delta.finish_reason is None:
                self._handles[delta.request_id].abort(delta.index)
            error = delta.error if chunk.finish_reason is None else None
            if error is None or chunk.token_ids:
                yield chunk
            if error is not None:
                raise self._named(own_copy(error), delta.request_id)

    def _named(self, error: PagedLCError, request_id: str) -> PagedLCError:
        """The error of one request among several says whose it is."""
        if isinstance(error, InvalidRequestError) and len(self._positions) > 1:
            return type(error)(f"Prompt {self._positions[request_id]}: {error}")
        return error

    def read(self, deltas: Sequence[TokenDelta]) -> int:
        """Take deltas in; returns how many requests they completed.

        Raises:
            PagedLCError: A request's error, with the ``outputs`` of those that were finished.
        """
        ended: set[str] = set()
        errors: list[PagedLCError] = []
        for delta in deltas:  # all of them: others may finish in the same piece
            try:
                ended.update(chunk.request_id for chunk in self.chunks([delta]) if chunk.finish_reason is not None)
            except PagedLCError as error:
                errors.append(error)
        if errors:
            errors[0].outputs = [reader.result() if reader.finished else None for reader in self._readers.values()]
            try:
                raise errors[0]
            finally:
                del errors  # the error's traceback holds this frame
        return sum(self._readers[request_id].finished for request_id in ended)

    def results(self) -> list[RequestOutput]:
        """What has been read so far, in the order of the requests."""
        return [reader.result() for reader in self._readers.values()]

    def close(self) -> None:
        """Give up whatever is not finished."""
        for handle in self._handles.values():
            handle.close()
        for reader in self._readers.values():
            self._history.add(reader.request.prompt_token_ids, reader.first_answer, reader.request.cache_salt)
