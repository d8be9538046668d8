"""``python -m pagedlc_engine.process SOCKET PARENT``: the engine's process. Started by ``host``, not by people."""

from __future__ import annotations

import socket
import sys

from pagedlc_engine.process.lifetime import live_with

if __name__ == "__main__":
    descriptor, parent = map(int, sys.argv[1:])
    # Before the imports that take seconds.
    live_with(parent)
    from pagedlc_engine.process.child import serve

    serve(socket.socket(fileno=descriptor))
