"""`python -m attnflow` is the command line."""

from attnflow.cli import main

main()
