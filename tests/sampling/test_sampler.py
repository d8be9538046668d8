"""What a request gets from the sampler, parameter by parameter, against the slow reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sampling_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlc_engine.errors import InvalidRequestError, PagedLCError
from pagedlc_engine.request import SamplingParams
from pagedlc_engine.sampling import Sampler

V = 300
CPU = torch.device("cpu")


def make_logits(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def add(sampler: Sampler, slot: int = 0, seed: int = 0, **options: Any) -> None:
    """Add a request whose prompt, output, stop tokens and bad words may be left out."""
    prompt = options.pop("prompt", [1, 2, 3])
    output = options.pop("output", [])
    stop = options.pop("stop_ids", [])
    words = options.pop("words", [])
    sampler.add(slot, SamplingParams(**options), seed, prompt, output, stop, words)


def generate(logits: torch.Tensor, seed: int = 0, **options: Any) -> list[int]:
    """Tokens of one request alone, one per row of ``logits``."""
    sampler = Sampler(V, CPU)
    add(sampler, seed=seed, **options)
    return [sampler.sample(row[None], [0]).token_ids.item() for row in logits]


def assert_drawn(token: int, probabilities: np.ndarray, number: float) -> None:
    """``token`` is what ``number`` points at in the distribution, up to rounding in float32."""
    assert probabilities[token] > 0
    edges = np.concatenate([[0.0], probabilities.cumsum()])
    assert edges[token] - 1e-5 <= number <= edges[token + 1] + 1e-5


def assert_follows_reference(steps: int = 6, logits_seed: int = 0, scale: float = 2.0, **options: Any) -> None:
    logits = make_logits(steps, logits_seed, scale)
    tokens = generate(logits, seed=7, **options)
    prompt, output = options.pop("prompt", [1, 2, 3]), list(options.pop("output", []))
    stop, words = options.pop("stop_ids", []), options.pop("words", [])
    params = SamplingParams(**options)
    for row, token in zip(logits.tolist(), tokens, strict=True):
        edited = reference.edited_logits(row, params, prompt, output, stop, words)
        if params.greedy:
            assert edited[token] == pytest.approx(max(edited), abs=1e-5)
        else:
            assert_drawn(token, reference.probabilities(edited, params), reference.uniform(7, len(output)))
        output.append(token)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 2},
        {"top_k": 50},
        {"top_k": V},
        {"top_k": V + 100},
        {"top_k": -1},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 3.0},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 250, "top_p": 0.9, "temperature": 4.0},
        {"min_p": 0.02, "top_p": 0.7},
        {"min_p": 0.1, "top_k": 9, "top_p": 0.9, "temperature": 1.5},
        {"repetition_penalty": 1.5, "prompt": list(range(0, V, 3))},
        {"repetition_penalty": 0.5, "temperature": 0.0, "output": [4, 4, 9]},
        {"frequency_penalty": 1.2, "output": [5, 5, 5, 6], "temperature": 0.5},
        {"frequency_penalty": -2.0, "temperature": 0.0, "output": [17, 17, 17, 17]},
        {"presence_penalty": 2.0, "output": [17] * 5, "logit_bias": {17: 10.0}, "temperature": 0.0},
        {"presence_penalty": 2.0, "output": list(range(0, V, 2))},
        {"repetition_penalty": 1.3, "presence_penalty": -1.0, "frequency_penalty": 0.7, "output": [1, 8, 8, 200]},
        {"logit_bias": {7: 5.0, 8: -3.0, 299: 6.0}},
        {"logit_bias": {7: 100.0}, "temperature": 0.0},
        {"logit_bias": dict.fromkeys(range(V - 4), -math.inf)},
        {"logit_bias": {7: 8.0, 9: 8.0}, "frequency_penalty": 2.0, "repetition_penalty": 1.2, "top_k": 5},
        {"min_tokens": 3, "stop_ids": list(range(0, V, 2))},
        {"words": [[token] for token in range(0, V, 2)]},
        {"words": [[9, token] for token in range(0, V, 2)], "output": [1, 9]},
    ],
)
def test_every_parameter_matches_the_reference(options: dict[str, Any]) -> None:
    assert_follows_reference(**options)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_combination_of_parameters_matches_the_reference(data: st.DataObject) -> None:
    tokens = st.integers(0, V - 1)
    assert_follows_reference(
        steps=3,
        logits_seed=data.draw(st.integers(0, 1000)),
        scale=data.draw(st.sampled_from([0.5, 2.0, 8.0])),
        temperature=data.draw(st.sampled_from([0.0, 0.4, 1.0, 2.5])),
        top_k=data.draw(st.sampled_from([0, 2, 17, 120])),
        top_p=data.draw(st.sampled_from([0.2, 0.9, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.03])),
        repetition_penalty=data.draw(st.sampled_from([0.8, 1.0, 1.4])),
        frequency_penalty=data.draw(st.sampled_from([-0.5, 0.0, 1.0])),
        presence_penalty=data.draw(st.sampled_from([-0.5, 0.0, 1.0])),
        logit_bias=data.draw(st.dictionaries(tokens, st.floats(-10, 10), max_size=5)),
        min_tokens=data.draw(st.integers(0, 4)),
        stop_ids=data.draw(st.lists(tokens, max_size=5)),
        words=data.draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4)),
        prompt=data.draw(st.lists(tokens, min_size=1, max_size=8)),
        output=data.draw(st.lists(tokens, max_size=8)),
    )


def test_greedy_takes_the_first_of_the_likeliest_tokens() -> None:
    logits = make_logits(4)
    logits[1, [40, 130, 290]] = 50.0
    assert generate(logits, temperature=0.0) == logits.argmax(-1).tolist()
    assert generate(logits, temperature=0.0)[1] == 40
    assert generate(logits, top_k=1) == logits.argmax(-1).tolist()
    assert generate(logits, temperature=1e-9) == logits.argmax(-1).tolist()


def test_a_stop_token_is_possible_only_after_min_tokens() -> None:
    logits = torch.zeros(6, V)
    logits[:, 5] = 90.0
    tokens = generate(logits, temperature=0.0, min_tokens=4, stop_ids=[5, 5, 10_000])
    assert [token == 5 for token in tokens] == [False] * 4 + [True] * 2


def test_a_bad_word_of_several_tokens_is_cut_before_its_last_token() -> None:
    logits = torch.zeros(4, V)
    for row, token in enumerate([11, 12, 13, 13]):
        logits[row, token] = 90.0
    words = [[11, 12, 13], [13, 13]]
    assert generate(logits, temperature=0.0, words=words) == [11, 12, 0, 13]
    # A word that began in the prompt was not generated, so its end is allowed.
    assert generate(logits[2:3], temperature=0.0, words=words, prompt=[11, 12]) == [13]
    assert generate(logits[2:3], temperature=0.0, words=words, output=[11, 12]) == [0]


def test_bad_words_outside_the_vocabulary_or_empty_do_nothing() -> None:
    logits = make_logits(3)
    words = [[], [V + 5], [-1], [V, 3]]
    assert generate(logits, temperature=0.0, words=words) == logits.argmax(-1).tolist()


def test_a_preempted_request_goes_on_where_it_was() -> None:
    logits = make_logits(12)
    options: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "top_p": 0.9,
        "min_tokens": 8,
        "stop_ids": [3, 4],
        "words": [[7, 8], [9]],
    }
    whole = generate(logits, seed=5, **options)
    sampler = Sampler(V, CPU)
    add(sampler, slot=2, seed=5, **options)
    first = [sampler.sample(row[None], [2]).token_ids.item() for row in logits[:5]]
    sampler.remove(2)
    add(sampler, slot=2, seed=99, repetition_penalty=2.0, prompt=[200, 201])
    sampler.sample(logits[:1], [2])
    sampler.remove(2)
    add(sampler, slot=0, seed=5, output=first, **options)
    rest = [sampler.sample(row[None], [0]).token_ids.item() for row in logits[5:]]
    assert first + rest == whole


VARIED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 40},
    {"top_k": 5, "top_p": 0.5},
    {"top_p": 0.95, "temperature": 3.0},
    {"top_p": 0.3, "logprobs": 3},
    {"min_p": 0.1},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"presence_penalty": 1.0, "prompt": list(range(150))},
    {"words": [[5], [6, 7]], "temperature": 0.7},
    {"logit_bias": {5: 4.0}, "min_tokens": 5, "stop_ids": [1, 2, 3], "top_k": 200},
]


def test_tokens_do_not_depend_on_what_else_is_in_the_batch() -> None:
    steps = 8
    logits = [make_logits(steps, seed=slot) for slot in range(len(VARIED))]
    alone = [generate(rows, seed=slot, **VARIED[slot]) for slot, rows in enumerate(logits)]
    sampler = Sampler(V, CPU)
    for slot, options in enumerate(VARIED):
        add(sampler, slot=slot, seed=slot, **options)
    together: list[list[int]] = [[] for _ in VARIED]
    shuffler = torch.Generator().manual_seed(1)
    while any(len(tokens) < steps for tokens in together):
        order = torch.randperm(len(VARIED), generator=shuffler).tolist()
        slots = [slot for slot in order if len(together[slot]) < steps][: 1 + len(order) // 2]
        batch = torch.stack([logits[slot][len(together[slot])] for slot in slots])
        for slot, token in zip(slots, sampler.sample(batch, slots).token_ids.tolist(), strict=True):
            together[slot].append(token)
    assert together == alone


def test_large_batches_give_the_same_tokens_as_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedlc_engine.sampling.plan._ELEMENTS_AT_ONCE", 7 * V)
    sampler = Sampler(V, CPU)
    rows = make_logits(40)
    options = [VARIED[row % len(VARIED)] for row in range(40)]
    for slot in range(40):
        add(sampler, slot=slot, seed=slot, **options[slot])
    together = sampler.sample(rows, range(40)).token_ids.tolist()
    assert together == [generate(rows[row : row + 1], seed=row, **options[row])[0] for row in range(40)]


def test_seeds_and_steps_give_unlike_tokens_and_the_same_seed_the_same() -> None:
    flat = torch.zeros(20, V)
    assert generate(flat, seed=1) == generate(flat, seed=1)
    assert generate(flat, seed=1) != generate(flat, seed=2)
    assert len(set(generate(flat, seed=1))) > 15
    assert generate(flat, seed=-1) == generate(flat, seed=2**64 - 1)


def test_the_logits_given_are_left_unchanged() -> None:
    logits = make_logits(len(VARIED))
    before = logits.clone()
    sampler = Sampler(V, CPU)
    for slot, options in enumerate(VARIED):
        add(sampler, slot=slot, **options)
    sampler.sample(logits, range(len(VARIED)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_of_bad_logits_fails_alone(poison: float) -> None:
    good = make_logits(len(VARIED))
    for bad in range(len(VARIED)):
        logits = good.clone()
        logits[bad, :] = poison
        if not math.isinf(poison):
            logits[bad, :] = good[bad]
            logits[bad, 17] = poison
        tokens: list[list[int]] = []
        for batch in (good, logits):
            sampler = Sampler(V, CPU)
            for slot, options in enumerate(VARIED):
                add(sampler, slot=slot, seed=slot, **options)
            for _ in range(2):
                sampled = sampler.sample(batch, range(len(VARIED)))
            tokens.append(sampled.token_ids.tolist())
        assert list(sampled.failures()) == [bad]
        assert "not finite" in sampled.failures()[bad]
        assert sampled.logprobs[bad] is None
        assert 0 <= tokens[1][bad] < V
        assert [t for row, t in enumerate(tokens[0]) if row != bad] == [
            t for row, t in enumerate(tokens[1]) if row != bad
        ]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.5, "min_p": 0.1}])
def test_forbidding_every_token_is_reported_and_harms_no_other_row(options: dict[str, Any]) -> None:
    sampler = Sampler(V, CPU)
    add(sampler, slot=0, logit_bias=dict.fromkeys(range(V), -math.inf), logprobs=1, **options)
    add(sampler, slot=1, temperature=0.0)
    logits = make_logits(2)
    sampled = sampler.sample(logits, [0, 1])
    assert list(sampled.failures()) == [0]
    assert "forbid the whole vocabulary" in sampled.failures()[0]
    assert 0 <= sampled.token_ids[0] < V
    assert sampled.token_ids[1] == logits[1].argmax()


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((1, V), -math.inf)
    logits[0, [3, 128, 299]] = torch.tensor([0.0, 1.0, 0.5])
    sampler = Sampler(V, CPU)
    add(sampler)
    drawn = {sampler.sample(logits, [0]).token_ids.item() for _ in range(60)}
    assert drawn == {3, 128, 299}


def test_a_slot_without_a_request_is_named() -> None:
    sampler = Sampler(V, CPU)
    add(sampler, slot=0)
    add(sampler, slot=9)
    sampler.sample(make_logits(2), [0, 9])
    sampler.remove(9)
    sampler.remove(9)
    with pytest.raises(PagedLCError, match=r"Slots \[9\]"):
        sampler.sample(make_logits(2), [0, 9])
    with pytest.raises(PagedLCError, match="shape"):
        sampler.sample(make_logits(2), [0])


def test_a_request_added_to_a_used_slot_replaces_the_old_one() -> None:
    logits = make_logits(4)
    sampler = Sampler(V, CPU)
    add(sampler, slot=0, repetition_penalty=1.9, temperature=0.0, logit_bias={3: 100.0})
    sampler.sample(logits[:1], [0])
    add(sampler, slot=0, temperature=0.0)
    assert sampler.sample(logits[:1], [0]).token_ids.item() == logits[0].argmax()


def test_biases_are_taken_in_once_however_often_the_batch_changes() -> None:
    sampler = Sampler(V, CPU)
    wanted = SamplingParams(temperature=0.0, logit_bias={7: 50.0, **dict.fromkeys(range(8, V), -5.0)})
    sampler.add(0, wanted, 0, [1], [], [], [])
    assert wanted.logit_bias is not None
    # Looking at all of them again would hold up every stream whenever a request comes or goes.
    wanted.logit_bias.clear()
    add(sampler, slot=1, temperature=0.0)
    add(sampler, slot=2, temperature=0.0, logit_bias={9: 50.0})
    logits = make_logits(3)
    for slots in ([0], [0, 1], [2, 1, 0]):
        expected = {0: 7, 1: int(logits[slots.index(1)].argmax()) if 1 in slots else 0, 2: 9}
        tokens = sampler.sample(logits[: len(slots)], slots).token_ids.tolist()
        assert tokens == [expected[slot] for slot in slots]


def test_penalties_start_afresh_when_a_slot_is_used_again() -> None:
    logits = torch.zeros(1, V)
    logits[0, 5] = 1.0
    sampler = Sampler(V, CPU)
    add(sampler, frequency_penalty=0.1, temperature=0.0)
    for _ in range(4):
        sampler.sample(logits, [0])
    sampler.remove(0)
    add(sampler, frequency_penalty=0.9, temperature=0.0)
    tokens = [sampler.sample(logits, [0]).token_ids.item() for _ in range(3)]
    assert tokens == [5, 5, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, V]}, f"token {V}"),
        ({"prompt": [-1]}, "token -1"),
        ({"logit_bias": {V: 1.0}}, f"token id {V}"),
        ({"logit_bias": {3: math.nan}}, "token 3"),
        ({"logit_bias": {3: math.inf}}, "-inf to ban"),
    ],
)
def test_what_cannot_be_sampled_is_refused_when_added(options: dict[str, Any], message: str) -> None:
    sampler = Sampler(V, CPU)
    with pytest.raises(InvalidRequestError, match=message):
        add(sampler, **options)
    with pytest.raises(PagedLCError, match="hold no request"):
        sampler.sample(make_logits(1), [0])


def test_extreme_penalties_still_give_a_token() -> None:
    sampler = Sampler(V, CPU)
    for slot, penalty in enumerate([1e-40, 1e-20, 1e20, 1e38]):
        add(sampler, slot=slot, repetition_penalty=penalty, prompt=list(range(V)))
    assert sampler.sample(make_logits(4, scale=20.0), range(4)).failures() == {}
