"""The scheduler over a stand-in model: answers are right, blocks are exact, whatever happens meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_model import BLOCK, FakeEngine, expected_answer, make_request

from pagedlc_engine.errors import InvalidRequestError
from pagedlc_engine.plan import StepResult


def finish_reasons(engine: FakeEngine, request_id: str) -> dict[int, str | None]:
    return {index: deltas[-1].finish_reason for index, deltas in engine.answers(request_id).items()}


def test_a_single_request_gets_its_tokens_and_frees_its_blocks() -> None:
    engine = FakeEngine(10)
    request = make_request("a", [1, 2, 3], max_tokens=40)
    engine.add(request)
    engine.run()
    assert engine.tokens("a") == expected_answer(request, 10_000)
    assert finish_reasons(engine, "a") == {0: "length"}
    assert engine.pool.num_free == engine.pool.num_usable


def test_a_stop_token_ends_the_answer_and_is_its_last_token() -> None:
    engine = FakeEngine(10)
    answer = expected_answer(make_request("x", [1], max_tokens=30), 10_000)
    stop = answer[5]
    request = make_request("a", [1], max_tokens=30, stop_token_ids=[stop])
    engine.add(request)
    engine.run()
    assert engine.tokens("a") == answer[: answer.index(stop) + 1]
    assert engine.answers("a")[0][-1].finish_reason == "stop"
    assert engine.answers("a")[0][-1].stop_reason == stop


def test_a_shared_prefix_is_computed_once_even_when_both_arrive_together() -> None:
    engine = FakeEngine(40, budget=1000)
    prefix = [3] * (4 * BLOCK)
    for name in "abc":
        engine.add(make_request(name, [*prefix, ord(name) % 7], max_tokens=1))
    engine.run()
    assert engine.computed_tokens == 4 * BLOCK + 3
    assert [engine.answers(name)[0][-1].num_cached_tokens for name in "abc"] == [0, 4 * BLOCK, 4 * BLOCK]


def test_a_prefix_that_another_request_is_still_computing_in_chunks_is_waited_for() -> None:
    engine = FakeEngine(40, budget=24)
    prefix = [3] * (8 * BLOCK)
    engine.add(make_request("a", [*prefix, 1], max_tokens=1))
    engine.add(make_request("b", [*prefix, 2], max_tokens=1))
    engine.run()
    assert engine.computed_tokens == 8 * BLOCK + 2


def test_the_next_turn_of_a_conversation_hits_the_blocks_of_the_generated_answer() -> None:
    engine = FakeEngine(40)
    engine.add(make_request("a", [1] * 20, max_tokens=60))
    engine.run()
    history = [1] * 20 + engine.tokens("a")
    engine.add(make_request("b", [*history, 5], max_tokens=1))
    engine.run()
    assert engine.answers("b")[0][-1].num_cached_tokens == (len(history) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_of_a_prompt_that_is_all_there_only_the_last_token_is_computed(run_ahead: int) -> None:
    engine = FakeEngine(40, run_ahead=run_ahead)
    prompt = [3] * (4 * BLOCK)
    for name in "ab":
        engine.add(make_request(name, prompt, max_tokens=BLOCK + 2))
        engine.run()
    assert engine.tokens("b") == engine.tokens("a") == expected_answer(make_request("a", prompt, max_tokens=18), 10_000)
    assert engine.answers("b")[0][-1].num_cached_tokens == 4 * BLOCK - 1
    assert engine.computed_tokens == 4 * BLOCK + 1 + 2 * (BLOCK + 1)


def test_the_last_block_of_a_prompt_is_not_written_while_another_request_holds_it() -> None:
    engine = FakeEngine(40, budget=1000)
    prompt = [3] * (4 * BLOCK)
    for name in "ab":
        engine.add(make_request(name, prompt, max_tokens=4))
    engine.step()
    first, second = (engine.cache.table(sequence.key) for sequence in engine.scheduler._running)
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    engine.run()
    assert engine.tokens("a") == engine.tokens("b")
    assert engine.answers("b")[0][-1].num_cached_tokens == 3 * BLOCK


def test_a_salt_keeps_tenants_apart() -> None:
    engine = FakeEngine(40)
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        engine.add(make_request(name, [1] * 50, max_tokens=1, salt=salt))
        engine.run()
    assert [engine.answers(name)[0][-1].num_cached_tokens for name in "abc"] == [0, 0, 48]


def test_a_long_prompt_does_not_hold_up_running_streams() -> None:
    engine = FakeEngine(100, budget=32)
    engine.add(make_request("stream", [1], max_tokens=50))
    engine.step()
    engine.add(make_request("long", [2] * 500, max_tokens=1))
    for _ in range(10):
        before = len(engine.tokens("stream"))
        engine.step()
        assert len(engine.tokens("stream")) == before + 1


@pytest.mark.parametrize(("whole", "longest"), [(False, 32), (True, 96)])
def test_steps_are_short_only_while_somebody_reads_a_stream(whole: bool, longest: int) -> None:
    engine = FakeEngine(60, budget=96, while_streaming=32)
    engine.add(replace(make_request("a", [1] * 90, max_tokens=20), whole=whole))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == 90
    engine.add(make_request("b", [2] * 300, max_tokens=1))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == longest


def test_priorities_decide_who_is_admitted_first() -> None:
    engine = FakeEngine(100, max_num_seqs=1)
    engine.add(make_request("later", [1], max_tokens=3, priority=1))
    engine.add(make_request("sooner", [1], max_tokens=3, priority=0))
    engine.run()
    assert engine.deltas[0].request_id == "sooner"


def test_when_blocks_run_out_the_least_important_request_is_recomputed_and_all_answers_stay_right() -> None:
    engine = FakeEngine(9, max_num_seqs=4, budget=200)
    requests = [make_request(name, [ord(name) % 7] * 20, max_tokens=60) for name in "abcd"]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert engine.tokens(request.request_id) == expected_answer(request, 10_000)


def test_forks_share_the_prompt_and_copy_only_the_block_they_write() -> None:
    engine = FakeEngine(40, budget=100)
    engine.add(make_request("a", [1] * 40, n=3, max_tokens=4))
    engine.step()
    assert engine.computed_tokens == 40
    assert engine.pool.num_usable - engine.pool.num_free == 3
    engine.step()
    assert engine.pool.num_usable - engine.pool.num_free == 5
    engine.run()
    assert engine.tokens("a", 0) == engine.tokens("a", 1) == engine.tokens("a", 2)


def test_aborting_one_answer_leaves_the_others() -> None:
    engine = FakeEngine(40)
    engine.add(make_request("a", [1] * 20, n=2, max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.abort("a", 1)
    engine.run()
    assert finish_reasons(engine, "a") == {0: "length", 1: "abort"}


def test_every_answer_of_an_aborted_request_is_told_even_before_it_started() -> None:
    engine = FakeEngine(40)
    engine.add(make_request("a", [1] * 20, n=3, max_tokens=30))
    engine.abort("a")
    assert finish_reasons(engine, "a") == {0: "abort", 1: "abort", 2: "abort"}
    assert not engine.scheduler.has_work()


def test_a_failed_step_ends_only_its_requests_and_its_blocks_are_not_reused() -> None:
    engine = FakeEngine(40, max_num_seqs=1)
    engine.add(make_request("bad", [1] * 64, max_tokens=5))
    engine.add(make_request("good", [1] * 64, max_tokens=5))
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.deltas += engine.scheduler.fail_step(plan, InvalidRequestError("broken"))
    assert finish_reasons(engine, "bad") == {0: "error"}
    engine.run()
    assert engine.answers("good")[0][-1].num_cached_tokens == 0
    assert finish_reasons(engine, "good") == {0: "length"}


def test_a_row_without_a_usable_token_is_that_requests_error() -> None:
    engine = FakeEngine(40)
    engine.add(make_request("bad", [1] * 20, max_tokens=5))
    engine.add(make_request("good", [2] * 5, max_tokens=5))
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine._launch(plan)
    engine.deltas += engine.scheduler.update(plan, StepResult([0, 3], [None, None], failures={0: "not finite"}))
    error = engine.answers("bad")[0][-1].error
    assert error is not None
    assert "not finite" in str(error)
    assert engine.tokens("good") == [3]
    assert engine.pool.lookup_chain(make_request("x", [1] * 20).block_hashes[:1]) == []


def test_two_live_requests_cannot_have_one_id() -> None:
    engine = FakeEngine(40)
    engine.add(make_request("a", [1], max_tokens=5))
    with pytest.raises(InvalidRequestError, match="'a'"):
        engine.add(make_request("a", [1], max_tokens=5))


def test_max_num_seqs_can_change_while_requests_run() -> None:
    engine = FakeEngine(100, max_num_seqs=1)
    for name in "abcd":
        engine.add(make_request(name, [1], max_tokens=20))
    engine.step()
    assert engine.scheduler.stats().num_running == 1
    engine.scheduler.max_num_seqs = 3
    engine.step()
    assert engine.scheduler.stats().num_running == 3


arrivals = st.lists(
    st.tuples(
        st.sampled_from([0, 16, 24, 48, 80]),  # tokens of a prefix that many requests share
        st.lists(st.integers(0, 6), min_size=1, max_size=24),  # tokens of its own
        st.integers(1, 40),  # max_tokens
        st.sampled_from([1, 1, 1, 2, 4]),  # n
        st.integers(0, 1),  # priority
        st.integers(0, 6),  # steps before it arrives
        st.sampled_from([None, None, None, 0, 1, 5, 20]),  # steps after which it is aborted
        st.sampled_from([(), (0,), (3,)]),  # stop tokens
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    num_blocks=st.integers(10, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 5, 32, 256]),
    caching=st.booleans(),
    run_ahead=st.integers(0, 3),
)
def test_any_traffic_gives_every_request_its_own_answer_and_loses_no_block(
    arrivals: list[tuple[int, list[int], int, int, int, int, int | None, tuple[int, ...]]],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
    run_ahead: int,
) -> None:
    engine = FakeEngine(num_blocks, max_num_seqs=max_num_seqs, budget=budget, caching=caching, run_ahead=run_ahead)
    requests = []
    aborts: list[list[object]] = []
    for number, (shared, own, max_tokens, n, priority, wait, abort_after, stops) in enumerate(arrivals):
        for _ in range(wait):
            engine.step()
        request = make_request(
            str(number), [1] * shared + own, priority=priority, n=n, max_tokens=max_tokens, stop_token_ids=stops
        )
        engine.add(request)
        requests.append(request)
        if abort_after is not None:
            aborts.append([abort_after, str(number)])
        for entry in aborts:
            if entry[0] == 0:
                engine.abort(str(entry[1]))
            entry[0] = int(str(entry[0])) - 1
    engine.run()
    assert engine.pool.num_free == engine.pool.num_usable
    assert not engine.scheduler.live_request_ids()
    for request in requests:
        answer = expected_answer(request, engine.scheduler.max_model_len)
        found = engine.answers(request.request_id)
        assert sorted(found) == list(range(request.params.n))
        for index, deltas in found.items():
            tokens = engine.tokens(request.request_id, index)
            assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            if deltas[-1].finish_reason == "abort":
                assert answer[: len(tokens)] == tokens
            else:
                assert tokens == answer
