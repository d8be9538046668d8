"""An engine in a process of its own: the same answers, clear errors, and no process left behind."""

from __future__ import annotations

import enum
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import PATHS, all_blocks_free, engine_processes, eventually, is_running, let_a_crowd_share, params
from tiny_models import make_tiny_model, tiny_llm

from pagedlc import (
    LLM,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    PagedLCError,
    RequestOutput,
    SamplingParams,
)
from pagedlc_engine.client import EngineClient
from pagedlc_engine.request import TokenLogprobs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def threaded(folder: Path) -> Iterator[LLM]:
    with tiny_llm(folder) as made:
        yield made


def with_process(folder: Path) -> Iterator[tuple[LLM, int]]:
    before = engine_processes()
    with tiny_llm(folder, engine_host="process") as made:
        made.load()
        [pid] = engine_processes() - before
        yield made, pid
    assert pid not in engine_processes()


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[tuple[LLM, int]]:
    """A model that no test breaks, and its process."""
    yield from with_process(folder)


@pytest.fixture(scope="module")
def llm(shared: tuple[LLM, int]) -> LLM:
    return shared[0]


@pytest.fixture
def own(folder: Path) -> Iterator[tuple[LLM, int]]:
    """A model that a test may break, and its process."""
    yield from with_process(folder)


# -- the same answers ---------------------------------------------------------------------------------


def flat(positions: list[TokenLogprobs] | list[TokenLogprobs | None] | None) -> list[float]:
    """All numbers in a row."""
    return [item.logprob for position in positions or [] for item in (position or {}).values()]


def test_answers_numbers_and_logprobs_are_those_of_the_thread(llm: LLM, threaded: LLM) -> None:
    prompts = [list(range(1, length)) for length in (2, 40, 41)]
    for sampling in (
        params(12, temperature=0, logprobs=3, prompt_logprobs=2),
        params(12, seed=3, n=3, top_p=0.9),
        params(12, temperature=0, logit_bias={65: 100.0}),
    ):
        for host in (llm, threaded):
            host.reset_prefix_cache()
        ours, theirs = llm.generate(prompts, sampling), threaded.generate(prompts, sampling)
        for here, there in zip(ours, theirs, strict=True):
            assert [answer.text for answer in here.outputs] == [answer.text for answer in there.outputs]
            assert here.num_cached_tokens == there.num_cached_tokens
            for mine, other in zip(here.outputs, there.outputs, strict=True):
                assert mine.token_ids == other.token_ids
                # Requests may meet in other batches, which moves last bits.
                assert flat(mine.logprobs) == pytest.approx(flat(other.logprobs), abs=1e-4)
            assert flat(here.prompt_logprobs) == pytest.approx(flat(there.prompt_logprobs), abs=1e-4)
    timings = ours[0].timings
    assert timings.queue_time is not None
    assert timings.total_time is not None
    assert 0 <= timings.queue_time <= timings.total_time


async def test_streams_bring_the_same_text(llm: LLM, threaded: LLM) -> None:
    sampling = params(40, temperature=0)
    expected = threaded.generate("hello", sampling)[0].outputs[0]
    chunks = list(llm.generate_stream("hello", sampling))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    chunks = [chunk async for chunk in llm.agenerate_stream("hello", sampling)]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert chunks[-1].finish_reason == "length"


def test_structured_outputs_hold_there_too(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
    answers = [output.outputs[0].text for output in llm.generate(["Is it?"] * 3, sampling)]
    assert set(answers) <= {"yes", "no"}
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        llm.generate("x", SamplingParams(structured_outputs={"regex": "("}))


def test_the_prefix_cache_can_be_asked_and_emptied(llm: LLM) -> None:
    prompt = list(range(1, 50))
    llm.generate([prompt], params(2))
    assert llm.explain_prefix(prompt).num_cached_tokens == 48
    llm.reset_prefix_cache()
    assert llm.explain_prefix(prompt).num_cached_tokens == 0


def test_limits_can_be_changed_and_numbers_are_seen(llm: LLM) -> None:
    before = llm.stats().generation_tokens
    llm.configure(max_num_seqs=3)
    llm.generate([[1, 2]], params(5))
    stats = llm.stats()
    assert stats.generation_tokens == before + 5
    assert stats.max_num_seqs == 3
    assert stats.tokens_per_second > 0
    llm.configure(max_num_seqs=64)


def test_the_numbers_of_a_silent_long_answer_are_seen_on_the_way(llm: LLM) -> None:
    thread = threading.Thread(target=lambda: llm.generate([[1, 2]], params(500)))
    thread.start()
    eventually(lambda: llm.stats().num_running == 1)
    thread.join(60)
    assert llm.stats().num_running == 0


# -- many users ---------------------------------------------------------------------------------------


def test_16_threads_and_50_tasks_share_it_and_no_block_is_lost(llm: LLM, threaded: LLM) -> None:
    let_a_crowd_share(llm, threaded, num_threads=16, num_tasks=50, cancel_every=5)


def test_abort_and_close_free_the_blocks(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(500))
    next(stream)
    stream.close()
    chunks = []
    for chunk in llm.generate_stream([1, 2, 3], params(500), request_id="mine"):
        chunks.append(chunk)
        llm.abort("mine")
    assert chunks[-1].finish_reason == "abort"
    eventually(lambda: all_blocks_free(llm))


def test_the_integrations_take_it_and_share_one_process(folder: Path) -> None:
    from langchain_pagedlc import VLLM, VLLMChat
    from llama_index.llms.pagedlc import Vllm

    before = engine_processes()
    options: dict[str, Any] = {"load_format": "dummy", "num_blocks": 300, "engine_host": "process", "max_tokens": 4}
    name = str(make_tiny_model(folder / "integrations"))
    chat, completion = VLLMChat(model=name, **options), VLLM(model=name, **options)
    index = Vllm(model=name, **options)
    assert chat.invoke("a").usage_metadata["output_tokens"] <= 4
    assert isinstance(completion.invoke("a"), str)
    assert isinstance(index.complete("a").text, str)
    assert len(engine_processes() - before) == 1
    del chat, completion, index
    gc.collect()
    eventually(lambda: engine_processes() == before)


def test_a_bad_request_is_its_own_affair(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(60))
    first = next(stream)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[10_000_000]], params(5))
    assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in stream) == 60


def test_values_of_the_programs_own_classes_go_over_as_what_they_are(llm: LLM) -> None:
    class Urgency(enum.IntEnum):
        HIGH = 1

    class Tenant(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "another"

    (output,) = llm.generate([[1, 2, 3]], params(3), priority=Urgency.HIGH, cache_salt=Tenant("a"))
    assert len(output.outputs[0].token_ids) == 3
    choice = {"choice": [Tenant("yes"), Tenant("no")]}
    assert text_of(llm.generate([1, 2, 3], params(5, structured_outputs=choice))) in ("yes", "no")


def text_of(outputs: list[RequestOutput]) -> str:
    return outputs[0].outputs[0].text


def test_a_model_loaded_in_a_thread_that_ends_lives_on(folder: Path) -> None:
    made = tiny_llm(folder, engine_host="process")
    loader = threading.Thread(target=made.load)
    loader.start()
    loader.join(60)
    assert made.generate([[1]], params(2))[0].finished
    made.close()


# -- its end ------------------------------------------------------------------------------------------


def test_closing_ends_requests_with_an_error_and_leaves_no_process(own: tuple[LLM, int]) -> None:
    llm, pid = own
    stream = llm.generate_stream([1, 2, 3], params(500))
    next(stream)
    threading.Timer(0.02, llm.close).start()
    with pytest.raises(EngineClosedError, match="closed"):
        list(stream)
    eventually(lambda: pid not in engine_processes())
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate([[1]])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_fails_its_requests_and_later_ones(own: tuple[LLM, int], number: signal.Signals) -> None:
    llm, pid = own
    stream = llm.generate_stream([1, 2, 3], params(500))
    next(stream)
    os.kill(pid, number)
    with pytest.raises(EngineDeadError, match=f"was killed by {number.name}") as caught:
        list(stream)
    assert "Make a new LLM (or VLLMChat" in str(caught.value)
    if number == signal.SIGSEGV:
        assert "Fatal Python error" in str(caught.value)
    with pytest.raises(EngineDeadError, match=number.name):
        llm.generate([[1]], params(2))
    with pytest.raises(EngineDeadError, match=number.name):
        llm.explain_prefix([1, 2, 3])
    assert not llm.usable
    assert pid not in engine_processes()
    stats = llm.stats()
    assert (stats.num_running, stats.num_blocks, stats.tokens_per_second) == (0, 0, 0.0)
    assert stats.prompt_tokens == 3


def test_a_process_that_ends_before_its_client_is_there_fails_its_requests(folder: Path) -> None:
    before = engine_processes()
    with tiny_llm(folder, engine_host="process") as made:
        host = made._start_host()
        [pid] = engine_processes() - before
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: pid not in engine_processes())
        made._client = EngineClient(host)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            made.generate([[1]], params(2))


def test_a_stopped_process_does_not_hold_up_closing(own: tuple[LLM, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedlc_engine.process.host._EXIT_SECONDS", 0.2)
    llm, pid = own
    os.kill(pid, signal.SIGSTOP)
    llm.close()
    assert not is_running(pid)


def test_ctrl_c_at_the_terminal_is_not_for_the_engine(shared: tuple[LLM, int]) -> None:
    llm, pid = shared
    assert os.getsid(pid) != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    assert llm.generate([[1]], params(2))[0].finished


@pytest.mark.usefixtures("no_collection")
def test_an_interrupted_answer_leaves_the_engine_usable(llm: LLM) -> None:
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 2000, params(400))
    assert llm.generate([[1]], params(2))[0].finished
    eventually(lambda: all_blocks_free(llm))


def test_an_engine_nobody_holds_ends_its_process(folder: Path) -> None:
    before = engine_processes()
    made = tiny_llm(folder, engine_host="process").load()
    [pid] = engine_processes() - before
    del made
    gc.collect()
    eventually(lambda: pid not in engine_processes())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_neither_uses_nor_ends_the_engine(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2, 3], params(300))
    next(stream)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            stream.close()
            llm.generate([[1]], params(2))
        except EngineDeadError as error:
            llm.close()
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"forked" in os.read(read, 1000)
    os.close(read)
    assert list(stream)[-1].finish_reason == "length"
    assert llm.generate([[1]], params(2))[0].finished


# -- loading ------------------------------------------------------------------------------------------


def test_what_can_be_wrong_before_loading_starts_no_process(folder: Path) -> None:
    before = engine_processes()
    with pytest.raises(ModelNotFoundError):
        LLM(str(folder / "missing"), engine_host="process")
    with pytest.raises(ConfigError, match="engine_host"):
        tiny_llm(folder, engine_host="proces")
    assert engine_processes() == before


def test_a_load_error_arrives_as_itself(folder: Path) -> None:
    before = engine_processes()
    broken = make_tiny_model(folder / "broken")
    (broken / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        LLM(str(broken), engine_host="process").load()
    with pytest.raises(ConfigError, match="holds only"):
        tiny_llm(folder, engine_host="process", num_blocks=4, max_model_len=512).load()
    eventually(lambda: engine_processes() == before)


def test_a_process_that_ends_while_it_loads_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('no Python today')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *PATHS]))
    with pytest.raises(EngineDeadError, match=r"exit code 1 while it loaded(.|\n)*no Python today"):
        tiny_llm(folder, engine_host="process").load()


def test_a_process_that_cannot_be_started_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(PagedLCError, match=r"cannot be started .*engine_host='thread'"):
        tiny_llm(folder, engine_host="process").load()


@pytest.mark.usefixtures("no_collection")
def test_interrupted_loading_leaves_no_process(folder: Path) -> None:
    before = engine_processes()
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.4, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        tiny_llm(folder, engine_host="process").load()
    assert engine_processes() == before


def test_progress_is_shown_here(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with tiny_llm(folder, engine_host="process", use_tqdm=True) as made:
        made.load()
        assert "Loading tiny" in capfd.readouterr().err


def test_a_loop_that_fails_tells_everyone_and_the_log(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = "def broken(self):\n    raise RuntimeError('a bug')\n"
    hook = f"from pagedlc_engine.scheduler import Scheduler\n{broken}Scheduler.schedule = broken\n"
    (tmp_path / "sitecustomize.py").write_text(hook)  # Python runs it when the engine's process starts
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *PATHS]))
    with tiny_llm(folder, engine_host="process") as made:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="RuntimeError: a bug"):
                made.generate([[1]], params(2))
    [record] = [item for item in caplog.records if item.name == "pagedlc_engine.loop"]
    assert "loop failed" in record.message
    assert "in broken" in record.message
