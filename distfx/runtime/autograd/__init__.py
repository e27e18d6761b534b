"""Moves and parameter gradients as autograd functions."""
