"""What the commands print besides answers."""

from __future__ import annotations

import sys

__all__ = ["note", "prompt_statistics"]

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def note(text: str) -> None:
    """Print a line to stderr, dimmed on a terminal."""
    dim, plain = (DIM, PLAIN) if sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{dim}{text}{plain}\n")
    sys.stderr.flush()


def prompt_statistics(num_prompt_tokens: int, num_cached_tokens: int, time_to_first_token: float | None) -> str:
    """One line about a prompt: how much of it the prefix cache served, and when the first token came."""
    line = f"{num_prompt_tokens} prompt tokens, {num_cached_tokens} from the prefix cache"
    return line if time_to_first_token is None else f"{line}; first token after {time_to_first_token:.2f} s"
