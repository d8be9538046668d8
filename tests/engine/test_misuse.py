"""What a user may get wrong costs that user an error, and nobody else anything."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model, tiny_llm

from pagedlc import (
    LLM,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    OutOfMemoryError,
    SamplingParams,
    UnsupportedModelError,
)
from pagedlc.registry import Registry
from pagedlc_engine.client import Mailbox
from pagedlc_engine.request import TokenDelta


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with tiny_llm(tmp_path, max_num_seqs=2) as made:
        yield made


def busy(llm: LLM) -> tuple[list[threading.Thread], list[int]]:
    """Six requests, of which four wait."""
    lengths: list[int] = []

    def ask() -> None:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        lengths.append(len(llm.generate([[1, 2]], params)[0].outputs[0].token_ids))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    return threads, lengths


@pytest.mark.parametrize(
    "options",
    [{"priority": "high"}, {"priority": None}, {"cache_salt": 5}],
)
def test_wrong_types_are_the_callers_error_while_others_run(llm: LLM, options: dict[str, Any]) -> None:
    llm.load()
    threads, lengths = busy(llm)
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        llm.generate([[1]], SamplingParams(max_tokens=2), **options)
    for thread in threads:
        thread.join(60)
    assert lengths == [60] * 6


def test_abort_takes_one_id_or_several_and_nothing_else(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2], SamplingParams(max_tokens=400, ignore_eos=True), request_id="a")
    next(stream)
    llm.abort(["a", "never was"])
    assert [chunk.finish_reason for chunk in stream][-1] == "abort"
    with pytest.raises(InvalidRequestError, match="string"):
        llm.abort([["a"]])  # type: ignore[list-item]
    assert llm.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finished


@pytest.mark.parametrize("value", [0, 2.5, float("nan"), "3", None])
def test_max_num_seqs_is_a_whole_number_from_one(llm: LLM, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="whole number from 1"):
        llm.configure(max_num_seqs=value)


@pytest.mark.parametrize("values", [{"min_tokens": 2**63, "max_tokens": None}, {"temperature": 1e39}])
def test_numbers_beyond_reason_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(values))):
        SamplingParams(**values)


@pytest.mark.parametrize("prompt", [b"hello", {1: 2, "a": 3}, {"prompt": {"prompt": "x"}}])
def test_what_is_no_prompt_is_said_so(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.generate(prompt)


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_a_token_id_beyond_32_bits_is_named(llm: LLM, number: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{number} has more"):
        llm.generate([[1, number, 3]])
    with pytest.raises(InvalidRequestError, match=f"{number} has more"):
        llm.generate([[1, number, "a", None]])  # type: ignore[list-item]


@pytest.mark.parametrize("name", [None, 5, b"abc", ["a"], "x" * 300, "~nosuchuser/x", "a\0b"])
def test_what_names_no_model(name: Any) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(name)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"rms_norm_eps": "x"},
        {"rope_theta": -1.0},
        {"max_position_embeddings": -5},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    ],
)
def test_a_description_that_makes_no_sense(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = make_tiny_model(tmp_path / "tiny", **changes)
    with pytest.raises(ModelLoadError):
        LLM(str(path), load_format="dummy")


def test_an_architecture_given_as_a_text_is_understood(tmp_path: Path) -> None:
    LLM(str(make_tiny_model(tmp_path / "one", architectures="LlamaForCausalLM")), load_format="dummy")
    with pytest.raises(UnsupportedModelError, match="OtherForCausalLM"):
        LLM(str(make_tiny_model(tmp_path / "two", architectures="OtherForCausalLM")), load_format="dummy")


def test_json_nested_without_end(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny")
    (path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError):
        LLM(str(path), load_format="dummy")


def test_weights_that_fit_no_memory(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "tiny", vocab_size=2**40)
    with pytest.raises(OutOfMemoryError, match="weights"):
        LLM(str(path), load_format="dummy", quantization=None, num_blocks=10).load()


def test_sampling_values_beside_messages_are_sent_where_they_belong(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"'max_tokens'.*SamplingParams"):
        llm.chat([{"role": "user", "content": "x"}], max_tokens=3)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", "^messages must be a list of mappings"),
        (["Hi"], r"^messages\[0\] must be a mapping"),
        ([("user", "Hi")], r"^messages\[0\] must be a mapping .*, not tuple"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls must be a list"),
    ],
)
def test_what_is_no_conversation(llm: LLM, messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.chat(messages)


def test_messages_go_to_chat(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"Messages go to chat\(\)"):
        llm.generate([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0}, r"give each call SamplingParams\(temperature="),
        ({"max_tokens": 5}, r"give each call SamplingParams\(max_tokens="),
        ({"tensor_parallel_size": 2}, "one device"),
        ({"cudagraph_capture_sizes": 5}, "should be a valid list"),
    ],
)
def test_options_that_are_none_of_an_llm_s(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("smollm2", **options)


def test_options_of_vllm_that_ask_for_nothing_are_taken() -> None:
    assert LLM("smollm2", tensor_parallel_size=1, swap_space=4).config == LLM("smollm2").config


@pytest.mark.parametrize(
    ("name", "meant"), [("guided_decoding", "structured_outputs"), ("stop_sequences", "stop"), ("best_of", "n")]
)
def test_what_others_call_a_sampling_parameter(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name!r}. Did you mean {meant!r}"):
        SamplingParams(**{name: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": 5}, "list of JSON schemas"),
        ({"tools": {"a": 1}}, "list of JSON schemas"),
        ({"tools": [5]}, "a dict"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs is a dict"),
        ({"chat_template_kwargs": {"messages": []}}, "cannot hold messages"),
        ({"chat_template_kwargs": {"tools": []}}, "cannot hold tools"),
    ],
)
def test_what_a_chat_template_cannot_take(llm: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.chat([{"role": "user", "content": "a"}], **options)


def test_of_several_conversations_the_wrong_one_is_named(llm: LLM) -> None:
    good = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequestError, match=r"^Conversation 1: "):
        llm.chat([good, [{"role": "user"}]])


@pytest.mark.parametrize("make_another", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(llm: LLM, make_another: Callable[[LLM], object]) -> None:
    with pytest.raises(ConfigError, match="cannot be copied"):
        make_another(llm)


def test_a_request_that_fails_on_its_way_is_named(llm: LLM) -> None:
    impossible = SamplingParams(max_tokens=4, structured_outputs={"regex": "b"}, bad_words=["b"])
    fine = SamplingParams(max_tokens=2)
    with pytest.raises(InvalidRequestError, match=r"^Prompt 1: No token is left"):
        llm.generate([[1], [2]], [fine, impossible])
    with pytest.raises(InvalidRequestError, match=r"^No token is left"):
        llm.generate([[2]], impossible)
    assert len(llm.generate([[1], [2]], fine)) == 2


def test_what_comes_after_a_stop_string_fails_no_answer(llm: LLM) -> None:
    """The engine is a token ahead when the reader finds the stop string, and there it has no way on."""
    params = SamplingParams(max_tokens=9, stop=["a"], structured_outputs={"regex": "ca7"}, bad_words=["7"])
    for _ in range(10):
        (answer,) = llm.generate([[1]], params)[0].outputs
        assert (answer.text, answer.finish_reason) == ("c", "stop")


@pytest.fixture
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads finds all that the engine made in one piece."""
    take = Mailbox.take

    def take_late(mailbox: Mailbox) -> list[TokenDelta]:
        time.sleep(0.1)
        return take(mailbox)

    monkeypatch.setattr(Mailbox, "take", take_late)


@pytest.mark.usefixtures("slow_reader")
def test_a_stop_string_counts_that_comes_in_one_piece_with_an_error(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, stop=["a"], structured_outputs={"regex": "ca7"}, bad_words=["7"])
    (answer,) = llm.generate([[1]], params)[0].outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("c", [66, 64], "stop")


@pytest.mark.usefixtures("slow_reader")
@pytest.mark.parametrize("finished", [0, 1])
def test_a_stop_string_counts_whichever_of_the_prompts_failed_before(llm: LLM, finished: int) -> None:
    failing = SamplingParams(max_tokens=9, stop=["z"], structured_outputs={"regex": "ca7"}, bad_words=["7"])
    params = [failing, failing]
    params[finished] = failing.model_copy(update={"stop": ["a"]})
    with pytest.raises(InvalidRequestError, match=f"Prompt {1 - finished}: No token is left") as caught:
        llm.generate([[1], [1]], params)
    outputs = caught.value.outputs
    assert outputs is not None
    assert [output and output.outputs[0].text for output in outputs] == [
        "c" if at == finished else None for at in (0, 1)
    ]


def test_a_failed_batch_holds_no_engine(tmp_path: Path) -> None:
    failing = SamplingParams(max_tokens=9, structured_outputs={"regex": "ca7"}, bad_words=["7"])

    def fail() -> weakref.ref[LLM]:
        llm = tiny_llm(tmp_path)
        with pytest.raises(InvalidRequestError, match="No token is left"):
            llm.generate([[1], [1]], failing)
        return weakref.ref(llm)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("slow_reader")
def test_a_stream_shows_what_came_before_an_error(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, structured_outputs={"regex": "ca7"}, bad_words=["7"])
    seen: list[str] = []
    with pytest.raises(InvalidRequestError, match="No token is left"):
        seen.extend(chunk.text for chunk in llm.generate_stream([1], params))
    assert "".join(seen) == "ca"


def test_what_was_finished_before_a_request_failed_is_not_lost(tmp_path: Path) -> None:
    fine = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    impossible = SamplingParams(logit_bias=dict.fromkeys(range(258), float("-inf")))
    long = fine.model_copy(update={"max_tokens": 400})  # not done before the failure is seen
    prompts, params = [[1], [2], [3], [4]], [fine, fine, impossible, long]
    with tiny_llm(tmp_path, max_num_seqs=1) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts[:2], fine)]
        for ask in (llm.generate, lambda *given: asyncio.run(llm.agenerate(*given))):
            with pytest.raises(InvalidRequestError, match=r"^Prompt 2: No token is left") as caught:
                ask(prompts, params)
            assert caught.value.outputs is not None
            *done, failed, waiting = caught.value.outputs
            assert [output.outputs[0].token_ids for output in done] == expected
            assert failed is waiting is None
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate([[1], []], fine)
        assert caught.value.outputs is None


def test_thousands_of_choices(llm: LLM) -> None:
    choices = [f"no. {number}: ({number * 7}|x)" for number in range(5000)]
    params = SamplingParams(max_tokens=30, seed=1, structured_outputs={"choice": choices})
    assert llm.generate([[1, 2]], params)[0].outputs[0].text in choices


def test_a_dead_engine_is_not_shared_any_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedlc_engine.scheduler import Scheduler

    registry = Registry()
    options: dict[str, Any] = {"load_format": "dummy", "quantization": None, "num_blocks": 50}
    path = str(make_tiny_model(tmp_path / "tiny"))
    first = registry.get(path, **options)
    assert registry.get(path, **options) is first
    with monkeypatch.context() as broken:
        broken.setattr(Scheduler, "schedule", lambda self: 1 / 0)
        with pytest.raises(EngineDeadError, match=r"Make a new LLM \(or VLLMChat"):
            first.generate([[1]])
    second = registry.get(path, **options)
    assert second is not first
    assert second.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stream_carried_into_a_forked_process_ends_with_an_error(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    child = os.fork()
    if child == 0:
        try:
            list(stream)
        except EngineDeadError:
            os._exit(17)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    stream.close()
