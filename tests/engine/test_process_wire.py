"""What goes over the channel comes out as it went in."""

from __future__ import annotations

import pytest

from pagedlc import InvalidRequestError, PagedLCError
from pagedlc_engine.errors import portable
from pagedlc_engine.messages import Output
from pagedlc_engine.process.wire import Vocabulary, pack_commands, pack_outputs, unpack_outputs
from pagedlc_engine.request import Logprob, RequestTimings, TokenDelta
from pagedlc_engine.stats import EngineStats


def test_outputs_come_out_as_they_went_in() -> None:
    first = TokenDelta("a", 0, [1], [{1: Logprob(-0.5, 1)}], prompt_logprobs=[None], timings=RequestTimings(1.0, 2.0))
    last = TokenDelta("a", 0, [2], [{2: Logprob(-1.5, 2)}], "stop", 2, timings=RequestTimings(1.0, 2.0, 3.0, 4.0))
    failed = TokenDelta("b", 1, [], finish_reason="error", error=InvalidRequestError("no"))
    sent = [Output([first], EngineStats(num_steps=1), {1: 2}), Output([last, failed], EngineStats(num_steps=2), {3: 4})]
    [one] = unpack_outputs(pack_outputs(sent[:1]))
    assert one == sent[0]
    [both] = unpack_outputs(pack_outputs(["news", *sent]))[1:]
    assert both.stats == EngineStats(num_steps=2)
    assert both.replies == {1: 2, 3: 4}
    merged, error = both.deltas
    assert merged.token_ids == [1, 2]
    assert merged.logprobs == [*(first.logprobs or []), *(last.logprobs or [])]
    assert (merged.finish_reason, merged.stop_reason, merged.prompt_logprobs) == ("stop", 2, [None])
    assert merged.timings == last.timings
    assert isinstance(error.error, InvalidRequestError)


def test_an_error_keeps_its_cause_as_text() -> None:
    error = PagedLCError("outer")
    error.__cause__ = ZeroDivisionError("inner")
    made = portable(error)
    assert type(made) is PagedLCError
    assert "ZeroDivisionError: inner" in made.__notes__[0]
    assert not hasattr(error, "__notes__")


def test_a_tokenizer_that_cannot_travel_is_the_grammars_problem_only() -> None:
    [packed] = pack_commands([Vocabulary(lambda: 1 / 0)])  # type: ignore[arg-type, return-value]
    with pytest.raises(PagedLCError, match="engine_host='thread'"):
        packed.unpack()
