"""`python -m motet` is `motet`."""

from motet.cli import main

main()
