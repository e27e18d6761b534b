"""What runs on a rank: segments, moves, local kernels, transports. Knows nothing of the compiler."""
