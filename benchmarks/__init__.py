"""Speed and memory claims, each a table with its ratio to a named figure: `python -m benchmarks.NAME`."""
