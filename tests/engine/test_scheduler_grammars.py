"""The scheduler and sequences under a grammar: never planned ahead of what is known."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_model import FakeEngine, expected_answer, make_request


class Counting:
    """Complete after a number of tokens; remembers what it accepted."""

    copies: list[Counting]

    def __init__(self, end: int) -> None:
        self.end = end
        self.accepted: list[int] = []
        self.copies = []

    @property
    def complete(self) -> bool:
        return len(self.accepted) >= self.end

    def accept(self, token_id: int) -> str | None:
        if token_id == 5 and self.end == 13:
            return "five is not allowed"
        self.accepted.append(token_id)
        return None

    def fill(self, row: object) -> str | None:
        return None

    def copy(self) -> Counting:
        self.copies.append(Counting(self.end))
        return self.copies[-1]


class Watching(FakeEngine):
    def step(self) -> None:
        super().step()
        for sequence in [*self.scheduler._running, *self.scheduler._waiting]:
            if sequence.matcher is not None:
                assert sequence.num_inflight <= 1
                assert sequence.matcher.accepted == sequence.tokens[sequence.num_prompt :].tolist()  # type: ignore[attr-defined]


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), min_size=1, max_size=40),
        st.integers(1, 30),  # max_tokens
        st.sampled_from([1, 1, 3]),  # n
        st.one_of(st.none(), st.integers(1, 35)),  # tokens until its grammar is complete
        st.integers(0, 4),  # steps before it arrives
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(10, 30),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 5, 64]),
    run_ahead=st.integers(0, 3),
)
def test_any_mixture_gives_every_answer_up_to_the_end_of_its_grammar(
    requests: list[tuple[list[int], int, int, int | None, int]],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    run_ahead: int,
) -> None:
    engine = Watching(num_blocks, max_num_seqs=max_num_seqs, budget=budget, run_ahead=run_ahead)
    made = []
    for number, (prompt, max_tokens, n, end, wait) in enumerate(requests):
        for _ in range(wait):
            engine.step()
        request = make_request(str(number), prompt, n=n, max_tokens=max_tokens)
        matcher = None if end is None else Counting(end)
        engine.scheduler.add(request, 0, matcher)
        made.append((request, matcher))
    engine.run()
    assert engine.pool.num_free == engine.pool.num_usable
    for request, matcher in made:
        for index in range(request.params.n):
            answer = expected_answer(request, 10_000)
            tokens = engine.tokens(request.request_id, index)
            last = engine.answers(request.request_id)[index][-1]
            if matcher is None:
                assert tokens == answer
            elif last.finish_reason == "error":
                assert str(last.error) == "five is not allowed"
            else:
                assert tokens == answer[: matcher.end]
                assert last.finish_reason == ("stop" if len(answer) >= matcher.end else "length")
                assert last.stop_reason is None
