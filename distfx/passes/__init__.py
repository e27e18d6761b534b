"""The compiler: passes from ``GraphModule`` to ``GraphModule``. Knows nothing of processes or sockets."""
