"""The code that runs on each rank: transports, moves and local kernels. It does not depend on the compiler."""
