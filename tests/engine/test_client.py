"""Many users of one engine at once: threads, asyncio tasks, cancelled and forgotten requests, and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_helpers import all_blocks_free, eventually, let_a_crowd_share, params
from tiny_models import tiny_llm

from pagedlc import (
    LLM,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PagedLCError,
    PromptTooLongError,
)
from pagedlc_engine.client import Mailbox, RequestHandle
from pagedlc_engine.hosts import EngineHost
from pagedlc_engine.messages import Command
from pagedlc_engine.request import Request


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with tiny_llm(tmp_path) as made:
        yield made


def test_32_threads_and_200_tasks_share_an_engine_and_no_block_is_lost(llm: LLM) -> None:
    let_a_crowd_share(llm, llm, num_threads=32, num_tasks=200, cancel_every=4)


def test_an_engine_whose_thread_cannot_start_can_be_loaded_later(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[object] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "pagedlc-engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", ignored.append)
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            llm.load()
        gc.collect()
    assert not ignored
    assert llm.generate([[1, 2, 3]], params(2))[0].outputs[0].token_ids


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(500))
    next(stream)
    stream.close()
    eventually(lambda: all_blocks_free(llm))


def test_a_stream_that_is_forgotten_frees_its_blocks(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(500))
    next(stream)
    del stream
    gc.collect()
    eventually(lambda: all_blocks_free(llm))


def test_abort_by_id_ends_a_stream_with_what_it_has(llm: LLM) -> None:
    chunks = []
    for chunk in llm.generate_stream([1, 2, 3], params(500), request_id="mine"):
        chunks.append(chunk)
        if len(chunks) == 3:
            llm.abort("mine")
    assert chunks[-1].finish_reason == "abort"
    assert 3 <= chunks[-1].num_generated_tokens < 500


async def test_a_broken_off_async_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.agenerate_stream([1, 2, 3], params(500))
    async for chunk in stream:
        assert chunk.finish_reason is None
        break
    await stream.aclose()
    await asyncio.to_thread(eventually, lambda: all_blocks_free(llm))


def test_a_consumer_that_lags_gets_fewer_larger_chunks_and_every_token(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(200, temperature=0))
    chunks = [next(stream)]
    eventually(lambda: llm.stats().num_running == 0)
    chunks += stream
    assert len(chunks) <= 3
    whole = llm.generate([[1, 2, 3]], params(200, temperature=0))[0].outputs[0]
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(llm: LLM) -> None:
    sampling = params(24, temperature=1.0, seed=7)
    alone = llm.generate([[5, 6, 7]], sampling)[0].outputs[0].token_ids
    others = [[number, 9] for number in range(1, 20)]
    crowd = llm.generate([*others, [5, 6, 7], *others], [params(24)] * 19 + [sampling] + [params(24)] * 19)
    assert crowd[19].outputs[0].token_ids == alone
    assert llm.generate([[5, 6, 7]], params(24, temperature=1.0, seed=8))[0].outputs[0].token_ids != alone


def test_n_answers_differ_and_each_is_what_its_seed_gives(llm: LLM) -> None:
    output = llm.generate([[5, 6, 7] * 9], params(16, n=4, seed=3))[0]
    answers = [answer.token_ids for answer in output.outputs]
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(answer) for answer in answers}) == 4
    alone = llm.generate([[5, 6, 7] * 9], params(16, seed=5))[0].outputs[0].token_ids
    assert answers[2] == alone


def test_timings_and_counts_are_there(llm: LLM) -> None:
    output = llm.generate([list(range(1, 40))], params(8))[0]
    again = llm.generate([list(range(1, 40))], params(8))[0]
    assert output.num_cached_tokens == 0
    assert again.num_cached_tokens == 32
    timings = output.timings
    assert timings.queue_time is not None
    assert timings.time_to_first_token is not None
    assert timings.time_per_output_token is not None
    assert timings.total_time is not None
    assert 0 <= timings.queue_time <= timings.time_to_first_token <= timings.total_time
    stats = llm.stats()
    assert stats.generation_tokens == 16
    assert stats.prefix_cache_hit_rate == pytest.approx(32 / 78)
    assert stats.tokens_per_second > 0


def test_bad_requests_hurt_nobody_else(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(60, temperature=0))
    first = next(stream)
    bad: list[tuple[object, type[Exception], str]] = [
        ([], InvalidRequestError, "empty"),
        ({"prompt_token_ids": [10_000_000]}, InvalidRequestError, "vocabulary"),
        ({"prompt_token_ids": [-1]}, InvalidRequestError, "vocabulary"),
        ({"prompt_token_ids": [1] * 600}, PromptTooLongError, "600 tokens"),
        ({"text": "x"}, InvalidRequestError, "prompt_token_ids"),
        (3.5, InvalidRequestError, "token ids"),
    ]
    for prompt, kind, words in bad:
        with pytest.raises(kind, match=words):
            llm.generate([prompt] if not isinstance(prompt, float) else prompt, params(5))  # type: ignore[arg-type, list-item]
    for more in ({"logit_bias": {10_000_000: 1.0}}, {"stop_token_ids": [-5]}):
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            llm.generate([[1]], params(5, **more))
    rest = [token for chunk in stream for token in chunk.token_ids]
    assert len(first.token_ids) + len(rest) == 60


def test_closing_the_engine_ends_running_requests_with_an_error(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(500))
    next(stream)
    threading.Timer(0.05, llm.close).start()
    with pytest.raises(EngineClosedError, match="closed"):
        list(stream)
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate([[1]])


def test_a_handle_shows_what_came_before_an_error(llm: LLM) -> None:
    client = llm.load()._ready()
    seven, *_ = llm.tokenizer.encode("7", add_special_tokens=False)
    no_way_on = params(9, structured_outputs={"regex": "ca7"}, bad_words=["7"])
    handle = client.submit(Request("mine", [1], no_way_on, bad_words_token_ids=((seven,),)))
    eventually(lambda: all_blocks_free(llm))  # all deltas are there, and come in one piece
    seen: list[int] = []
    with pytest.raises(InvalidRequestError, match="No token is left"):
        seen.extend(token for delta in handle for token in delta.token_ids)
    assert llm.tokenizer.decode(seen) == "ca"


@pytest.mark.parametrize("before", [True, False])
def test_closing_the_engine_in_the_middle_of_a_call_ends_the_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """As a handler of a signal may do, on the very thread that is handing requests over."""
    client = llm.load()._client
    assert client is not None
    send = client._host.send

    def interrupted(command: Command) -> None:
        if before:
            send(command)
        llm.close()
        if not before:
            send(command)

    monkeypatch.setattr(client._host, "send", interrupted)
    with pytest.raises(EngineClosedError):
        llm.generate([[1, 2], [3, 4]], params(4))


def test_closing_while_weights_load_leaves_no_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler of a signal may do, on the very thread that loads."""
    start = llm._start_host
    hosts: list[EngineHost] = []

    def interrupted() -> EngineHost:
        hosts.append(start())
        llm.close()
        return hosts[0]

    monkeypatch.setattr(llm, "_start_host", interrupted)
    with pytest.raises(EngineClosedError):
        llm.load()
    assert not hosts[0]._thread.is_alive()  # type: ignore[attr-defined]
    with pytest.raises(EngineClosedError):
        llm.load()


def test_closing_the_engine_while_the_cache_is_looked_at_ends_that(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    client = llm.load()._client
    assert client is not None
    monkeypatch.setattr(client._host, "send", lambda command: llm.close())
    with pytest.raises(EngineClosedError):
        llm.explain_prefix([1, 2])


def test_a_second_engine_works_after_the_first_is_closed(tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        with tiny_llm(tmp_path) as llm:
            answers.append(llm.generate([[1, 2]], params(5, temperature=0))[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def engine_parts() -> tuple[set[int], set[threading.Thread]]:
    decoders = {id(item) for item in gc.get_objects() if type(item).__name__ == "Decoder"}
    return decoders, {thread for thread in threading.enumerate() if thread.name == "pagedlc-engine"}


def test_an_engine_nobody_holds_gives_its_memory_back(tmp_path: Path) -> None:
    gc.collect()
    others, other_threads = engine_parts()
    llm = tiny_llm(tmp_path).load()
    llm.generate([[1, 2]], params(5))
    decoders, threads = engine_parts()
    assert len(decoders - others) == 1
    assert len(threads - other_threads) == 1
    del llm
    gc.collect()
    eventually(lambda: not any(thread.is_alive() for thread in threads - other_threads))
    gc.collect()
    assert not engine_parts()[0] - others


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_gets_an_error_and_not_a_hang(llm: LLM) -> None:
    client = llm.load()._client
    assert client is not None
    read, write = os.pipe()
    held, forked = threading.Event(), threading.Event()

    def hand_over() -> None:
        with client._lock:
            held.set()
            forked.wait()

    other = threading.Thread(target=hand_over)
    other.start()
    held.wait()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[1]], params(2))
            os.write(write, b"answered")
        except EngineDeadError as error:
            llm.close()
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    forked.set()
    other.join()
    answered = select.select([read], [], [], 20)[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert answered
    assert b"forked" in os.read(read, 1000)
    os.close(read)
    os.close(write)


def test_an_engine_that_dies_tells_everyone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedlc_engine.scheduler import Scheduler

    stream = llm.generate_stream([1, 2, 3], params(500))
    next(stream)

    def broken(self: Scheduler) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Scheduler, "schedule", broken)
    with pytest.raises(EngineDeadError, match="a bug"):
        list(stream)
    with pytest.raises(EngineDeadError, match="a bug"):
        llm.generate([[1]], params(2))


def test_an_id_can_be_used_again_as_soon_as_its_stream_is_closed(llm: LLM) -> None:
    for _ in range(6):
        stream = llm.generate_stream([1, 2], params(400), request_id="turn")
        next(stream)
        stream.close()
        chunks = list(llm.generate_stream([1, 2], params(20), request_id="turn"))
        assert chunks[-1].finish_reason == "length"
        assert {chunk.request_id for chunk in chunks} == {"turn"}
    eventually(lambda: all_blocks_free(llm))


def test_readers_of_one_mailbox_all_come_to_its_end(llm: LLM) -> None:
    async def read(handle: RequestHandle) -> list[int]:
        return [token async for delta in handle for token in delta.token_ids]

    client = llm.load()._ready()
    for number in range(40):
        handle = client.submit(Request(f"r{number}", [1, 2], params(3)))
        tokens: list[int] = []
        thread = threading.Thread(target=lambda h=handle, t=tokens: t.extend(i for d in h for i in d.token_ids))
        thread.start()
        found = asyncio.run(asyncio.wait_for(read(handle), 20))
        thread.join(20)
        assert not thread.is_alive()
        assert len(found) + len(tokens) == 3


def test_of_requests_handed_over_together_none_goes_on_when_one_is_refused(llm: LLM) -> None:
    client = llm.load()._ready()
    running = client.submit(Request("taken", [1], params(1000)))
    together = [Request("new", [1, 2], params(1000)), Request("taken", [3], params(1))]
    with pytest.raises(InvalidRequestError, match="'taken' is running already") as kept:
        client.submit_all(together, Mailbox(2))
    again = client.submit(Request("new", [1, 2], params(3)))
    assert sum(len(delta.token_ids) for delta in again) == 3
    running.close()
    eventually(lambda: all_blocks_free(llm))
    assert kept.value is not None


def test_a_closed_event_loop_is_nobodys_problem(llm: LLM) -> None:
    async def begin() -> None:
        await anext(llm.agenerate_stream([1, 2], params(300)))

    for _ in range(5):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
    assert llm.generate([[1]], params(3))[0].finished


def test_errors_do_not_keep_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    others, _threads = engine_parts()
    llm = tiny_llm(tmp_path).load()
    monkeypatch.setattr("pagedlc_engine.model.decoder.Decoder.compute_logits", lambda self, hidden: 1 / 0)
    kept = []
    for _ in range(2):
        with pytest.raises(PagedLCError, match="ZeroDivisionError") as caught:
            llm.generate([[1]], params(2))
        kept.append(caught.value)
    assert kept[0] is not kept[1]
    llm.close()
    del llm
    gc.collect()
    assert not engine_parts()[0] - others


def test_timings_of_a_chunk_do_not_change_afterwards(llm: LLM) -> None:
    chunks = list(llm.generate_stream([1, 2], params(30)))
    assert chunks[0].timings.total_time is None
    assert chunks[-1].timings.total_time is not None


def test_speed_is_shown_while_whole_answers_are_made(llm: LLM) -> None:
    thread = threading.Thread(target=lambda: llm.generate([[1, 2]], params(400)))
    thread.start()
    eventually(lambda: llm.stats().tokens_per_second > 0)
    assert llm.stats().generation_tokens > 0
    thread.join(60)
