"""Intermediate representation: symbolic sizes, layouts, moves, the exchange, inserted operators, node metadata."""
