"""Kernels on local tensors: convolution with halo, norms, pooling, reductions, resampling, random numbers.

:data:`~distfx.runtime.kernels.table.KERNELS` lists those that are plain functions.
"""
