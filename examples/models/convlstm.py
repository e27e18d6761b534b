"""Convolutional LSTM: sequences of images, such as radar maps of rain.

After Shi et al., "Convolutional LSTM Network: A Machine Learning Approach for Precipitation Nowcasting" (NeurIPS 2015).
The state is an argument and a result, so that a caller can split a long sequence anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class ConvLSTMCell(nn.Module):
    """One step: input, hidden and cell state to hidden and cell state."""

    def __init__(self, inputs: int, hidden: int, kernel: int = 3, peephole: bool = True) -> None:
        super().__init__()
        self.gates = nn.Conv2d(inputs + hidden, 4 * hidden, kernel, padding=kernel // 2)
        self.peep = nn.Parameter(0.1 * torch.randn(3, hidden, 1, 1)) if peephole else None

    def forward(self, x: Tensor, state: State) -> State:
        h, c = state
        i, f, o, g = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        if self.peep is not None:
            i, f = i + self.peep[0] * c, f + self.peep[1] * c
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        if self.peep is not None:
            o = o + self.peep[2] * c
        return torch.sigmoid(o) * torch.tanh(c), c


class Nowcast(nn.Module):
    """``steps`` images ``n t c h w`` in, the next one out, with the last state."""

    def __init__(self, channels: int = 1, hidden: int = 64, kernel: int = 3) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = ConvLSTMCell(channels, hidden, kernel)
        self.head = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, State]:
        n, _, _, height, width = x.shape
        state = (x.new_zeros(n, self.hidden, height, width), x.new_zeros(n, self.hidden, height, width))
        for image in x.unbind(1):
            state = self.cell(image, state)
        return self.head(state[0]), state
