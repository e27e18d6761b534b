"""Intermediate representation: symbolic sizes, layouts, moves, the exchange, inserted operators, typed node metadata. Imports nothing else of distfx."""
