"""capture: from an unmodified ``nn.Module`` to a functional FX graph of ATen calls."""
