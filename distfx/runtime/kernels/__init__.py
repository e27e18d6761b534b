"""Kernels on local tensors: convolution with halo, norms, pooling, reductions, resampling, random numbers."""
