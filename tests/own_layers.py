"""Networks of model=torch whose forward passes change buffers or keep numbers, for tests of what is right and refused."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    """A small network of grey images of 8x8 pixels. ``work`` is what a network does to its hidden layer (b, 8)."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.body = nn.Linear(64, 8)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.kept, self.rng = 0, np.random.default_rng(0)
        self.head = nn.Linear(8, num_classes)

    def work(self, x):
        return x

    def forward(self, x):
        return self.head(self.work(self.body(x.flatten(1))).relu())


class Counter(Base):
    def work(self, x):
        if self.training:
            self.calls += 1
        return x / (1 + self.calls)


class RunningMean(Base):
    def work(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Centred(Base):
    """BatchNorm as authors write it, with the batch's own mean in training."""

    def work(self, x):
        if not self.training:
            return x - self.mean
        self.calls += 1
        mean = x.mean(0)
        self.mean.mul_(0.9).add_(mean.detach(), alpha=0.1)
        return x - mean


class SeenExamples(Base):
    def work(self, x):
        if self.training:
            self.calls += len(x)
        return x


class Spectral(Base):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.body = nn.utils.parametrizations.spectral_norm(self.body)


class Unconditional(Base):
    def work(self, x):
        self.calls += 1
        return x


class Assigned(Base):
    def work(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class AssignedCounter(Base):
    def work(self, x):
        if self.training:
            self.calls = self.calls + 1
        return x


class WithGraph(Base):
    def work(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x


class Histogram(Base):
    def work(self, x):
        if self.training:
            self.counts[0] += 1
        return x


class Numpy(Base):
    def work(self, x):
        return x * float(np.random.rand())  # noqa: NPY002


class NumpyGenerator(Base):
    def work(self, x):
        return x * float(self.rng.random())


class NumpyInTraining(Base):
    def work(self, x):
        return x * float(self.rng.random()) if self.training else x


class PythonRandom(Base):
    def work(self, x):
        return x * random.random()


class PlainNumber(Base):
    def work(self, x):
        self.kept += self.training
        return x


class LastBatch(Base):
    def work(self, x):
        y, self.kept = x + self.kept, x.detach().mean()
        return y


class WithoutBuffers(nn.Module):
    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        x = self.body(x.flatten(1))
        return self.head(x - x.mean(0) if self.training else x)


class WithoutSuper(nn.Module):
    def __init__(self, num_classes: int = 10):
        self.head = nn.Linear(64, num_classes)


class WithoutLayers(nn.Module):
    def __init__(self, num_classes: int = 10):
        self.classes = num_classes


class LayerWithoutSuper(Base):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.last = WithoutLayers()


class Divides(Base):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.share = 1 // 0


class RaisesInForward(Base):
    def work(self, x):
        return x[{}]


class WrongShape(Base):
    def work(self, x):
        return x.view(len(x), 3, 3)


class HiddenLayers(Base):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.blocks = [nn.Linear(8, 8) for _ in range(2)]


class Lazy(Base):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.body = nn.LazyLinear(8)


class Logarithm(Base):
    def work(self, x):
        return x.log()


class BatchStatistics(Base):
    def work(self, x):
        return F.batch_norm(x, None, None, training=True)


class WithoutGradient(Base):
    def work(self, x):
        return x.detach()
