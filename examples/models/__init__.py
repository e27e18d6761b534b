"""Networks that people train, as ordinary PyTorch. Nothing here depends on distfx.

Every size is an argument, so that tests can build small ones. The defaults are those of the papers.
"""
