"""Autograd functions: moves with their adjoints, and the reduction of parameter gradients."""
