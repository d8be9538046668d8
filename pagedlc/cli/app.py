"""The commands' arguments, and how their errors end: one line on stderr, no traceback."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from pagedlc.cli.options import with_engine_options
from pagedlc_engine.errors import ConfigError, InvalidRequestError, PagedLCError

__all__ = ["app", "run"]

FAILED = 1
WRONG_USE = 2

app = typer.Typer(
    name="pagedlc",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Boxes cut long option names short in a terminal of 80 columns; the plain layout does not.
    rich_markup_mode=None,
)

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="smollm2, a folder with config.json, a .gguf file, or a Hugging Face id."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 always takes the likeliest word.")]
SystemPrompt = Annotated[str, typer.Option("--system", help="What the model is told before the conversation.")]
Stats = Annotated[bool, typer.Option("--stats", help="After each answer: tokens, cache hits, seconds.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pagedlc {version('pagedlc')}")
        raise typer.Exit


@app.callback()
def _pagedlc(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Talk to a language model that runs inside this process, and ask it about your documents."""


@app.command()
@with_engine_options
def ask(
    path: Annotated[str, typer.Argument(metavar="FILE-OR-FOLDER", help="Text, Markdown or PDF.", show_default=False)],
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION...", show_default=False)],
    *,
    model: Model = "smollm2",
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Passages that the model reads per question. [small models: 1, others: 4]"),
    ] = None,
    whole_document_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Read documents whole up to this many tokens; 0 picks passages. [small models: 0, others: 4096]",
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    engine_options: dict[str, Any],
) -> None:
    """Ask about a file or folder of documents; the answer names its sources."""
    from pagedlc.cli.ask import answer_questions

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    retrieval = {"top_k": top_k, "whole_document_tokens": whole_document_tokens}
    if len(questions) > 1 and not any(" " in question for question in questions):
        questions = [" ".join(questions)]  # a question that was not quoted
    answer_questions(path, questions, model, sampling, retrieval, engine_options)


@app.command()
@with_engine_options
def chat(
    *,
    model: Model = "smollm2",
    system: SystemPrompt = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    stats: Stats = False,
    engine_options: dict[str, Any],
) -> None:
    """Chat in the terminal. /reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D or /exit leaves."""
    from pagedlc.cli.chat import converse

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    converse(model, system, sampling, engine_options, show_stats=stats)


def run(arguments: list[str]) -> int:
    """Run a command.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code, as :func:`pagedlc.cli.main` says.
    """
    _quiet_libraries()
    try:
        code: int | None = app(arguments or ["--help"], prog_name="pagedlc", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except (ConfigError, InvalidRequestError) as error:
        return _fail(str(error), WRONG_USE)
    except PagedLCError as error:
        return _fail(str(error), FAILED)
    except BrokenPipeError:
        # The reader has left (`pagedlc ask ... | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code or 0  # typer answers Ctrl-C with 130


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"pagedlc: {' '.join(message.split())}\n")
    return code


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
