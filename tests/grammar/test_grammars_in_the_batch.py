"""Requests under a grammar beside others: nobody waits for them, nobody's tokens change."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedlc import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from pagedlc_engine.grammar import GrammarCompiler, TokenVocabulary
from scripted_model import ScriptedLLM
from tests.engine.tiny_models import tiny_llm

Make = Callable[..., ScriptedLLM]
OBJECT = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}


class Gate:
    """Holds compilations up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        inner = GrammarCompiler._run

        def run(compiler: GrammarCompiler, *args: object) -> None:
            self.reached.set()
            self.opened.wait(20)
            inner(compiler, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(GrammarCompiler, "_run", run)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def regex(pattern: str, **params: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "structured_outputs": {"regex": pattern}, **params})


def test_nobody_waits_behind_a_grammar_that_is_being_compiled(scripted_llm: Make, gate: Gate) -> None:
    llm = scripted_llm("aaaa", max_num_seqs=1).load()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, "x", regex("a{4}"))
        assert gate.reached.wait(20)
        assert llm.generate("y", SamplingParams(max_tokens=20))[0].outputs[0].text == "aaaa"
        eventually(lambda: llm.stats().num_waiting == 1)
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
        assert not waiting.done()
        gate.opened.set()
        assert waiting.result(20)[0].outputs[0].text == "aaaa"


def test_a_request_can_be_given_up_while_its_grammar_is_compiled(scripted_llm: Make, gate: Gate) -> None:
    llm = scripted_llm("aaaa").load()
    with ThreadPoolExecutor(1) as pool:
        stream = llm.generate_stream("x", regex("a{4}", n=2), request_id="mine")
        chunks = pool.submit(list, stream)
        assert gate.reached.wait(20)
        llm.abort("mine")
        assert [chunk.finish_reason for chunk in chunks.result(20)] == ["abort", "abort"]
    gate.opened.set()
    assert llm.generate("x", regex("a{4}"))[0].outputs[0].text == "aaaa"


def test_a_grammar_that_takes_too_long_is_that_requests_error(gate: Gate) -> None:
    def vocabulary() -> TokenVocabulary:
        raise AssertionError("never reached")

    compiler = GrammarCompiler(vocabulary, time_limit=0.02)
    with pytest.raises(InvalidRequestError, match=r"0\.02 seconds"):
        compiler.compile(StructuredOutputsParams(regex="a")).result(20)


def test_a_grammar_is_compiled_once_and_a_failure_is_not_kept(tiny: LLM) -> None:
    calls = 0

    def vocabulary() -> TokenVocabulary:
        nonlocal calls
        calls += 1
        return tiny.tokenizer.vocabulary(300)

    compiler = GrammarCompiler(vocabulary, capacity=2)
    specs = [StructuredOutputsParams(json={"const": number}) for number in range(3)]
    first = [compiler.compile(spec) for spec in specs[:2]]
    assert [compiler.compile(StructuredOutputsParams(json={"const": number})) for number in range(2)] == first
    assert first[0].result(20) is not first[1].result(20)
    compiler.compile(specs[2]).result(20)
    assert compiler.compile(specs[1]) is first[1]
    assert compiler.compile(specs[0]) is not first[0]
    bad = StructuredOutputsParams(regex="[")
    failed = compiler.compile(bad)
    assert isinstance(failed.exception(20), InvalidRequestError)
    assert compiler.compile(bad) is not failed
    assert calls == 1


def test_of_large_grammars_fewer_are_kept(tiny: LLM) -> None:
    compiler = GrammarCompiler(lambda: tiny.tokenizer.vocabulary(300), text_capacity=2500)
    specs = [StructuredOutputsParams(regex="a" * 1000 + str(number)) for number in range(3)]
    kept = [compiler.compile(spec) for spec in specs]
    assert compiler.compile(specs[2]) is kept[2]
    assert compiler.compile(specs[1]) is kept[1]
    assert compiler.compile(specs[0]) is not kept[0]
    large = StructuredOutputsParams(choice=["b" * 3000, "c"])
    assert large.num_characters == 3001
    found = compiler.compile(large)
    assert compiler.compile(large) is found


def test_the_others_get_the_same_tokens_as_alone(tiny: LLM) -> None:
    free = [SamplingParams(max_tokens=24, seed=seed, temperature=1.0, ignore_eos=True) for seed in range(6)]
    alone = [tiny.generate("hello", params)[0].outputs[0].token_ids for params in free]
    bound = [SamplingParams(max_tokens=24, seed=seed, structured_outputs={"json": OBJECT}) for seed in range(6)]
    bound_alone = [tiny.generate("hello", params)[0].outputs[0].token_ids for params in bound]
    mixed = tiny.generate(["hello"] * 12, [*free, *bound])
    assert [output.outputs[0].token_ids for output in mixed] == [*alone, *bound_alone]


def test_many_threads_with_many_grammars(tiny: LLM) -> None:
    def one(number: int) -> bool:
        pattern = f"[a-z]{{{number % 5 + 1}}}-{number % 11}"
        text = tiny.generate("x", regex(pattern, temperature=2.0, seed=number))[0].outputs[0].text
        return re.fullmatch(pattern, text) is not None

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(one, range(60)))


def test_an_answer_that_loses_its_blocks_goes_on_where_its_grammar_was(tiny: LLM, tmp_path: Path) -> None:
    pattern = "([a-z]{3}[0-9]{3}){8}"
    params = [regex(pattern, max_tokens=60, temperature=2.0, seed=seed) for seed in range(6)]
    prompts = [[seed + 1] * 20 for seed in range(6)]
    expected = [output.outputs[0].token_ids for output in tiny.generate(prompts, params)]
    with tiny_llm(tmp_path, vocab_size=300, num_blocks=14, max_model_len=200) as crowded:
        found = [output.outputs[0] for output in crowded.generate(prompts, params)]
        assert crowded.stats().num_preemptions > 0
    assert all(re.fullmatch(pattern, answer.text) for answer in found)
    assert [answer.token_ids for answer in found] == expected


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_running_ahead_changes_nothing(scripted_llm: Make, run_ahead: int) -> None:
    script = {"free": "The quick brown fox jumps. " * 3, "bound": 'Sure: {"a": "fox"} and more'}
    prompts = ["free", "bound", "free 2", "bound 2"]
    params = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, structured_outputs={"json": OBJECT})] * 2
    found = scripted_llm(script, run_ahead=run_ahead).generate(prompts, params)
    assert [output.outputs[0].text for output in found] == ["The quick brown fox jumps. " * 3, '{"a": "fox"}'] * 2
