"""Networks that people train, written as they write them: nothing in here knows of distfx.

Every size is an argument, so that tests can make them tiny; the defaults are those of the papers.
"""
