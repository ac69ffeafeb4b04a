"""`python -m podstream`."""

from podstream.cli import main

main()
