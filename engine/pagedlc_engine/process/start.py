"""Where the engine's process begins."""

from __future__ import annotations

import socket

from pagedlc_engine.process.lifetime import live_with

__all__ = ["main"]


def main(descriptor: int, parent: int) -> None:
    """Be the engine's process; does not return.

    Args:
        descriptor: This end of the channel.
        parent: The id of the process that holds the other end.
    """
    # Before the imports that take seconds.
    live_with(parent)
    from pagedlc_engine.process.child import serve

    serve(socket.socket(fileno=descriptor))
