"""The ``pagedlc`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code.

    0 is success, 1 a failure (missing file, model that cannot be read), 2 a wrong argument or option, 130 Ctrl-C.

    Args:
        arguments: Without the program's name; ``None`` takes those of the process.
    """
    # The rest is imported on demand, so that installing the package costs a plain `import pagedlc` nothing.
    from pagedlc.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))
