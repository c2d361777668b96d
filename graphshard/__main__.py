"""`python -m graphshard`: the command line."""

from __future__ import annotations

from graphshard.cli import main

if __name__ == "__main__":
    main()
