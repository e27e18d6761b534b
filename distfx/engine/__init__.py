"""What runs on each call: agree on the call, select or compile a graph, bind it, run it."""
