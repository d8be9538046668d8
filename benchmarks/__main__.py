"""``python -m benchmarks``: what a machine without a GPU can measure."""

from benchmarks.cpu_peers import main

main()
