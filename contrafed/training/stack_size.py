"""Choose how many clients train as one stack on a CPU: a pure function of the model and of the training settings."""

from typing import Any

from torch import nn

from contrafed.training.local_training import LocalTraining

# On a CPU a stack saves calls, not arithmetic. It saves nothing with more numbers in a model (docs/BENCHMARKS.md).
MAX_TINY_NUMBERS = 200_000
# Numbers in the models of a stack on a CPU, and its largest number of clients.
STACK_NUMBERS, MAX_STACK_CLIENTS = 2**22, 128


def cpu_stack_size(model: nn.Module, config: Any) -> int:
    """Return how many clients a stack on a CPU has, 1 if clients train one by one.

    Tiny models of fully connected layers are stacked. Matrix products compute each client with the same bits alone and in any
    stack, which grouped convolutions do not. Batches of a fraction of a client's examples have no common width, so these
    clients train one by one.

    Args:
        model: The model.
        config: The method's settings.
    """
    trainings = [value for value in vars(config).values() if isinstance(value, LocalTraining)]
    layers = [layer for layer in model.modules() if [*layer.parameters(False), *layer.buffers(False)]]
    count = sum(value.numel() for value in model.parameters())
    tiny = 0 < count <= MAX_TINY_NUMBERS and all(type(layer) is nn.Linear for layer in layers)
    if not tiny or not trainings or any(isinstance(training.batch_size, float) for training in trainings):
        return 1
    return min(MAX_STACK_CLIENTS, STACK_NUMBERS // count)
