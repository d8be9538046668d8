"""``python -m pagedlc.cli``: the ``pagedlc`` command."""

from pagedlc.cli import main

main()
