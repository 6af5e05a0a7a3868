"""Small networks as users have them, for tests of model=torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth


class Small(nn.Module):
    """A network of colour images with BatchNorm, in-place activations, and every kind of layer that drops."""

    def __init__(self, width: int = 4, rate: float = 0.3, num_classes: int = 7):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.branch = nn.Conv2d(width, width, 3, 1, 1)
        self.depth, self.drop = StochasticDepth(rate, "row"), nn.Dropout2d(rate)
        self.inner = nn.Sequential(nn.Linear(width, 6), nn.Hardswish(inplace=True), nn.Dropout(rate, inplace=True))
        self.register_buffer("places", torch.arange(3))
        self.head = nn.Sequential(nn.Dropout(rate), nn.Linear(6, num_classes))

    def forward(self, x):
        x = self.stem(x)
        x = x + self.depth(self.drop(self.branch(x)))
        return self.head(self.inner(x.mean((2, 3))))


class Normed(nn.Sequential):
    """A network with weight normalisation, which divides by 0 where all weights are 0."""

    def __init__(self, num_classes: int = 10):
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 5))
        super().__init__(nn.Flatten(), normed, nn.ReLU(), nn.Linear(5, num_classes))


class View(nn.Module):
    """Flattens by ``view``, as many networks do, which needs images with channels first in memory."""

    def __init__(self, channels: int = 1, rate: float = 0.5, flag: bool = True):
        super().__init__()
        self.dropout, self.flag = rate, flag  # of a layer
        self.conv, self.drop = nn.Conv2d(channels, 4, 3), nn.Dropout(rate)
        self.inner, self.fc = nn.Linear(36, 5), nn.Linear(5, 10)

    def forward(self, x):
        x = F.max_pool2d(self.conv(x).relu(), 2)
        return self.fc(self.drop(self.inner(x.view(-1, 36)).relu()))


class Normalised(nn.Sequential):
    """Has torch's older weight normalisation, whose weight is a tensor with a graph."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, 5)), nn.ReLU(), nn.Linear(5, 10))


class Grey(nn.Module):
    """A network of grey images without buffers. Its arguments make mistakes."""

    def __init__(self, mistake: str = "", num_classes: int = 10):
        super().__init__()
        self.mistake = mistake
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(1), nn.LazyLinear(5))
        self.body(torch.zeros(1, 1, 8, 8))
        self.fc = nn.Linear(5, num_classes)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1) if mistake == "attention" else None
        self.twin = self.body[3] if mistake == "shared" else None

    def forward(self, x):
        x = self.body(x)
        if self.mistake == "squeezing":
            x = x.squeeze()
        if self.mistake == "mixing":
            x = x - x.mean(0)
        if self.mistake == "functional":
            x = F.dropout(x, 0.5, self.training)
        if self.mistake == "branch" and float(x.sum()) > 1e9:  # what vmap refuses
            x = x + 1
        out = self.fc(x)
        if self.mistake == "output":
            return {"scores": out}
        return out.log_softmax(1) if self.mistake == "after" else out


def make_small(**arguments) -> nn.Module:
    return Small(**arguments)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))


def without_annotation(**arguments):
    return Small(**arguments)


def wrong(**arguments) -> nn.Module:
    return Tensor()
