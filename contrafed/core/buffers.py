"""Buffers of a model: named tensors next to its parameters, and BatchNorm over the real examples of a padded batch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

# Layers whose forward pass is torch's own BatchNorm. SyncBatchNorm has nothing to synchronise here.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class MaskedBatchNorm(_BatchNorm):
    """BatchNorm whose moments in training are those of the real examples of a batch. Names, momentum and eps are torch's.

    A stack of clients pads its batches. With ``mask`` (b,), 1 for an example and 0 for padding, padding has no influence.
    Running statistics are updated in place, as torch does, so that under ``vmap`` each client has its own.
    """

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (b, C, ...). Raises ``ValueError`` in training where x has other than b rows."""
        kind = self.running_mean.dtype  # type: ignore[union-attr]
        x = x.to(kind)  # moments in bfloat16 would be useless
        shape = (1, -1) + (1,) * (x.dim() - 2)
        if self.training and self.mask is not None:
            mean, var = self._update(x, self.mask, shape)
        else:
            # Copies: a later forward pass of the same step may update these in place.
            mean, var = self.running_mean.clone(), self.running_var.clone().clamp_min(0)  # type: ignore[union-attr]
        scale = torch.rsqrt(var + self.eps)
        if self.affine:
            scale = scale * self.weight
            return x * scale.reshape(shape) + (self.bias - mean * scale).reshape(shape)
        return (x - mean.reshape(shape)) * scale.reshape(shape)

    def _update(self, x: Tensor, mask: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return mean and variance (C,) over the real examples, and add them to the running statistics."""
        if len(x) != len(mask):
            raise ValueError(f"BatchNorm got {len(x)} rows of {len(mask)} examples: it takes one row for each example")
        real = mask.to(x).reshape((-1,) + (1,) * (x.dim() - 1))
        dims = (0, *range(2, x.dim()))
        count = real.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
        mean = (x * real).sum(dims) / count
        var = ((x - mean.reshape(shape)).square() * real).sum(dims) / count
        with torch.no_grad():
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            rate = 1 / self.num_batches_tracked.to(x.dtype) if self.momentum is None else self.momentum  # type: ignore[operator, union-attr]
            unbiased = var.detach() * (count / (count - 1).clamp_min(1))
            self.running_mean.mul_(1 - rate).add_(rate * mean.detach())  # type: ignore[union-attr]
            self.running_var.mul_(1 - rate).add_(rate * unbiased)  # type: ignore[union-attr]
        return mean, var


def prepare_buffers(model: nn.Module) -> str:
    """Turn a model's buffers into named tensors that a stack of clients can have, or return what stands against it.

    Floating-point buffers and counters (whole numbers without a dimension, from here on floats) are named tensors. Others, such
    as tables of positions, are constants: they leave the ``state_dict``, as those have that are not persistent.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _NormBase) and (fault := _layer_fault(layer)):
            return f"{name} ({type(layer).__name__}) {fault}"
        if type(layer) in BATCH_NORMS:
            layer.__class__ = MaskedBatchNorm  # as it is, with another forward pass
    kept = model.state_dict(keep_vars=True)
    for name, value in list(model.named_buffers()):
        home = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        if name in kept and not value.is_floating_point() and not value.dim():
            home._buffers[leaf] = value.float()
        elif not value.is_floating_point():
            home._non_persistent_buffers_set.add(leaf)
    return ""


def _layer_fault(layer: _NormBase) -> str:
    """Return why a normalisation layer cannot train in a stack of clients, with the fix. Empty if it can."""
    if isinstance(layer, _InstanceNorm):
        fix = "Fix: track_running_stats=False"
        return f"mixes the statistics of padded examples into its buffers. {fix}" if layer.track_running_stats else ""
    if type(layer) not in (*BATCH_NORMS, MaskedBatchNorm):
        return (
            "has a forward pass of its own. Fix: use torch's nn.BatchNorm1d, 2d or 3d, and what follows it as a layer behind it"
        )
    if layer.running_mean is None or not layer.track_running_stats:
        why = "so that answers depend on which images are evaluated together"
        return f"has no running statistics, {why}. Fix: track_running_stats=True"
    return ""


def list_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that are named tensors: those of the model's ``state_dict``."""
    kept = model.state_dict(keep_vars=True)
    return [name for name, _ in model.named_buffers() if name in kept]


def list_normalisation(model: nn.Module) -> set[str]:
    """Return the names of all parameters and buffers of normalisation layers."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, NORMALISATION)]
    found = set()
    for path, layer in layers:
        for name in (*(name for name, _ in layer.named_parameters()), *(name for name, _ in layer.named_buffers())):
            found.add(f"{path}.{name}" if path else name)
    return found


def has_batch_norm(model: nn.Module) -> bool:
    """Whether some layer is BatchNorm whose statistics are not frozen."""
    layers = (layer for layer in model.modules() if isinstance(layer, MaskedBatchNorm))
    return any("running_mean" not in layer._non_persistent_buffers_set for layer in layers)


@contextlib.contextmanager
def in_training(layers: list[nn.Module], mask: Tensor) -> Iterator[None]:
    """Have layers in training mode, and BatchNorm know the ``mask`` (b,) of real examples, until the block ends."""
    norms = [layer for layer in layers if isinstance(layer, MaskedBatchNorm)]
    for layer in layers:
        layer.training = True
    for norm in norms:
        norm.mask = mask
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        for norm in norms:
            norm.mask = None
