"""``pagedlc chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from pagedlc import LLM, CompletionChunk, SamplingParams
from pagedlc.cli.output import note, prompt_statistics
from pagedlc_engine.errors import InvalidRequestError

__all__ = ["converse"]

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def converse(
    model: str, system: str, sampling: Mapping[str, Any], engine_options: Mapping[str, Any], *, show_stats: bool
) -> None:
    """Read lines from stdin and stream answers to stdout, until ``/exit`` or the end of the input.

    Args:
        model: Model name or path.
        system: What the model is told first; may be empty.
        sampling: Keywords of :class:`SamplingParams`.
        engine_options: Keywords of :class:`LLM`.
        show_stats: Print token counts and times after each answer, to stderr.
    """
    params = SamplingParams(**sampling)
    with LLM(model, **engine_options) as llm:
        llm.load()
        _Chat(llm, params, system, show_stats).run()


class _Chat:
    def __init__(self, llm: LLM, params: SamplingParams, system: str, show_stats: bool) -> None:
        self._llm = llm
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self._show_stats = show_stats
        self._messages: list[dict[str, Any]] = list(self._start)

    def run(self) -> None:
        interactive = sys.stdin.isatty()
        if interactive:
            _enable_line_editing()
            note(f"{self._llm.model_name}. {HELP}")
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                if interactive:
                    print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line == "/exit":
                return
            self._obey(line)

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self._messages = list(self._start)
            note("The conversation is forgotten.")
        elif line.startswith("/"):
            note(f"There is no command {line.split()[0]}. {HELP}")
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Stream an answer. One that is stopped or fails leaves the conversation in a state that can go on."""
        asked = [*self._messages, {"role": "user", "content": line}]
        text, last = "", None
        try:
            with contextlib.closing(self._llm.chat_stream(asked, self._params)) as chunks:
                for last in chunks:
                    text += last.text
                    sys.stdout.write(last.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write(" [stopped]")
        except InvalidRequestError as error:
            note(f"{' '.join(str(error).split())} (/reset forgets the conversation.)")
            return
        print(flush=True)
        self._messages = [*asked, {"role": "assistant", "content": text}]
        if last is not None and last.finish_reason == "length":
            note("The answer was cut: see --max-tokens and --max-model-len.")
        if self._show_stats and last is not None:
            note(_statistics(last))


def _statistics(last: CompletionChunk) -> str:
    timings = last.timings
    line = prompt_statistics(last.num_prompt_tokens, last.num_cached_tokens, timings.time_to_first_token)
    speed = f", {1 / timings.time_per_output_token:.0f} per second" if timings.time_per_output_token else ""
    return f"{line}; {last.num_generated_tokens} tokens{speed}"


def _enable_line_editing() -> None:
    # Some builds of Python come without readline; input() then works without arrow keys and history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
