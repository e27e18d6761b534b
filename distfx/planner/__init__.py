"""Strategies and their costs."""
