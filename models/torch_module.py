"""torch: any ``nn.Module`` by its dotted path, split at its head, such as ``torchvision.models.resnet18`` at ``fc``."""

import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contrafed.core.drawn import drops, replace_drawing
from contrafed.core.errors import UserError, nearest, unknown
from contrafed.core.randomness import keeping_global_state, read_global_state
from contrafed.core.split_model import SplitModel, Stages
from contrafed.core.trial import (
    HIDDEN_FIX,
    copy_buffers,
    differ,
    find_changed,
    find_changed_number,
    find_hidden_layers,
    find_uninitialised,
    has_own_buffers,
    keeping_buffers,
    list_numbers,
    place_outside,
)
from contrafed.core.weights import make_constant

EXAMPLE = "model.target=torchvision.models.resnet18"


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    target: str | None
    args: dict
    head: str | int | None  # a number names a layer of an nn.Sequential


class Network(nn.Module):
    """A network without its head: it maps images (b, C, H, W) to the head's input (b, D)."""

    def __init__(self, net: nn.Module, name: str, head: nn.Linear) -> None:
        super().__init__()
        self.name, self.sizes = name, (head.in_features, head.out_features)
        self.net = net
        self.takes_copies = False  # of images with channels first in memory
        self.place_head(nn.Identity())

    def place_head(self, layer: nn.Module) -> None:
        """Put a layer where the head was."""
        self.net.set_submodule(self.name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's input (b, D)."""
        out = self.net(x.clone(memory_format=torch.contiguous_format) if self.takes_copies else x)
        if not isinstance(out, Tensor):  # such as the outputs of Hugging Face's models
            out = out["logits"] if isinstance(out, Mapping) and "logits" in out else getattr(out, "logits", out)
        out = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(out, Tensor):
            got = type(out).__name__
            raise UserError(f"model.target: the network returns {got}. Fix: a tensor (b, classes), or logits by this name")
        return out

    def note_layout(self, x: Tensor) -> None:
        """Try images ``x`` as they are in a run, and have them copied if the network calls ``view`` on what follows."""
        try:
            with torch.no_grad(), keeping_global_state(), keeping_buffers(self):
                self(x)
        except Exception as error:  # others are reported when the model is tried
            self.takes_copies = "view size is not compatible" in str(error)

    def split_fault(self, x: Tensor) -> str:
        """Return why the layer is not the head of the network, tried on images ``x``. It is empty if it is."""
        head = nn.Linear(*self.sizes)
        self.place_head(head)
        try:
            whole = self(x)
        finally:
            self.place_head(nn.Identity())
        fault = f"model.head: {self.name} is not the last layer, what follows would be lost. Fix: another head, or end with it"
        try:
            z = self(x)
        except Exception:  # what follows takes its outputs alone
            return fault
        if z.dim() != 2:
            return f"model.head: {self.name} gets {tuple(z.shape)} of {len(x)} images, not a row of each. Fix: the last layer"
        same = z.shape[1] == head.in_features and torch.allclose(whole, head(z), rtol=1e-4, atol=1e-5)
        return "" if same else fault

    def mixing_fault(self, x: Tensor) -> str:
        """Return whether images of a batch have influence on each other in evaluation, as a fault. It is empty if not."""
        together = self(x)
        try:
            alone = torch.cat([self(x[k : k + 1]) for k in range(len(x))])
        except ValueError as error:
            if "more than 1 value" in str(error):  # F.batch_norm in training
                return f"model.target: {MIXES}"
            raise
        if alone.shape != together.shape:
            return f"model.target: {SQUEEZES}"
        same = torch.allclose(together, alone, rtol=1e-3, atol=1e-4)
        return "" if same else f"model.target: {MIXES}"

    def repeat_fault(self, x: Tensor) -> str:
        """Return why two passes over images ``x`` are not alike, or training is where it may not be."""
        self.place_head(nn.Linear(*self.sizes))
        layers = list(self.modules())
        without = [layer for layer in layers if layer._buffers.keys() <= layer._non_persistent_buffers_set]
        try:
            with keeping_global_state(), keeping_buffers(self):
                if not has_own_buffers(self) and self._is_alike(x, layers):
                    return ""
                plain, before = self._try_twice(x, []), copy_buffers(self)
                trained = plain if isinstance(plain, str) else self._try_twice(x, layers)
                if isinstance(plain, str) or isinstance(trained, str):
                    return f"model.target: {plain if isinstance(plain, str) else trained}"
                if not plain.isfinite().all():
                    return f"model.target: {NOT_FINITE}"
                _set_training(without)
                same = torch.allclose(self(x), plain, rtol=1e-3, atol=1e-4) and not find_changed(self, before)
                return "" if same else f"model.target: {ACTS}"
        finally:
            self.eval()
            self.place_head(nn.Identity())

    def _is_alike(self, x: Tensor, layers: list[nn.Module]) -> bool:
        """Return whether passes in evaluation and in training give the same finite outputs, without a draw."""
        torch.backends.mha.set_fastpath_enabled(False)  # type: ignore[no-untyped-call]  # as in a Workspace
        before, plain, numbers = read_global_state(), self(x), list_numbers(self)
        _set_training(layers)
        trained = self(x)
        self.eval()
        same = torch.equal(plain, trained) and bool(plain.isfinite().all())
        return same and list_numbers(self) == numbers and read_global_state() == before

    def _try_twice(self, x: Tensor, training: list[nn.Module]) -> Tensor | str:
        """Return the outputs for ``x`` with some layers in training mode, or why another pass gives others."""
        _set_training(training)
        before, outputs, numbers = read_global_state(), [], []
        for _ in range(2):
            with keeping_buffers(self):
                outputs.append(self(x))
            numbers.append(list_numbers(self))
        self.eval()
        if read_global_state() != before:
            return DRAWS
        if name := find_changed_number(*numbers):
            return f"{name} changes in the forward pass, and all clients share it. Fix: {KEPT}"
        return f"{DIFFERS}. Fix: {KEPT}" if differ(*outputs) else outputs[0]


def _set_training(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer.training = True


class Encoder(Stages):
    """The encoder of such a model, in one stage."""

    def find_fault(self, x: Tensor) -> str:
        """Return what stands against the network, tried on images ``x`` (b, C, H, W); empty for nothing."""
        body: Any = self.stages[0]
        return body.repeat_fault(x) or body.split_fault(x) or body.mixing_fault(x)


ACTS = (
    "layers without buffers act differently in training, and such layers are never in training mode here. "
    "Fix: a buffer, such as a running mean, in the layer that reads self.training"
)
NOT_FINITE = "its outputs for values from -1 to 1 are not finite. Fix: no logarithm or root of what may be negative"
DIFFERS = "two passes over the same images differ, so it draws at random or keeps numbers beside its buffers"
KEPT = "a buffer for what lasts, as register_buffer makes it, and no generator in the forward pass"
SQUEEZES = "its output for one image has another shape. Fix: flatten(1) in place of squeeze()"
MIXES = "images of one batch have influence on each other. Fix: nn.BatchNorm2d, or statistics of each image"
DRAWS = (
    "its forward pass draws at random outside layers of dropout. Fix: nn.Dropout in place of F.dropout, rates of 0 in "
    "model.args, such as attention_dropout: 0, and no random numbers in a forward pass of your own"
)


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build the network, and split it: the encoder is all of it up to its head, the classifier is the head.

    A head with another number of outputs than there are classes is replaced by a new one. Dropout right before the head becomes
    the model's, and other layers that drop draw from the run's seed. In-place activations become plain ones, with the same
    numbers. Parameters that the network itself keeps fixed are constants.

    Args:
        config: Settings of the model.
        in_channels: Channels of an image.
        image_size: Height and width in pixels. A network that takes another size raises when it is tried.
        num_classes: Number of classes.

    Raises:
        UserError: For a path, arguments or a head that do not fit.
    """
    net = make_network(config)
    _check_shared(net)
    name, head = find_head(net, None if config.head is None else str(config.head))
    dropout = _take_dropout(net, name)
    replace_drawing(net)
    if left := [layer_name or type(layer).__name__ for layer_name, layer in net.named_modules() if drops(layer)]:
        fix = "Fix: a rate of 0 in model.args, such as attention_dropout: 0"
        raise UserError(
            f"model.target: {left[0]} drops within its forward pass, where its draws cannot be equal everywhere. {fix}"
        )
    for layer in net.modules():
        if getattr(layer, "inplace", False) is True:
            layer.inplace = False  # type: ignore[assignment]
    for each in [each for each, value in net.named_parameters() if not value.requires_grad]:
        make_constant(net, each)
    stem = next((layer for layer in net.modules() if isinstance(layer, nn.Conv2d)), None)
    names = {n: f"classifier.{n.rpartition('.')[2]}" if n.startswith(f"{name}.") else f"{PREFIX}{n}" for n in net.state_dict()}
    bias = head.bias is not None
    classifier = head if head.out_features == num_classes else nn.Linear(head.in_features, num_classes, bias)
    network = Network(net, name, head)
    model = SplitModel(Encoder([network], [nn.Identity()]), nn.Identity(), classifier, dropout).eval()
    model.own_names = names
    if stem is not None and in_channels == 1 and stem.in_channels == 3:
        model.takes_channels = 3
    network.note_layout(torch.zeros(2, *image_size, model.takes_channels or in_channels).movedim(-1, 1))
    return model


PREFIX = "encoder.stages.0.net."


def make_network(config: Config) -> nn.Module:
    """Return the network that ``target`` builds with ``args``. Raises ``UserError``."""
    target = config.target
    if target is None:
        raise UserError(f"model.target: missing. Fix: the dotted path of a network, such as {EXAMPLE}")
    found = _import(target)
    if not _makes_modules(found):
        raise UserError(
            f"model.target: {target} is neither a class of torch.nn.Module nor a function that is annotated to return one. "
            f"Fix: write -> nn.Module at your own function, or another path, such as {EXAMPLE}"
        )
    args = {str(name): value for name, value in config.args.items()}
    try:
        # A class of transformers takes a configuration, whose arguments these are.
        kind = getattr(found, "config_class", None)
        net = found(kind(**args)) if isinstance(kind, type) else found(**args)
    except Exception as error:
        raise UserError(_describe_fault(found, target, error)) from error
    if not isinstance(net, nn.Module):
        raise UserError(f"model.target: {target} returns {type(net).__name__}, not a torch.nn.Module. Fix: another path")
    if fault := find_uninitialised(net):
        raise UserError(f"model.target: {fault}")
    if hidden := find_hidden_layers(net):
        raise UserError(f"model.target: {hidden[0]} hides layers, so that they never train. Fix: {HIDDEN_FIX}")
    if lazy := [name for name, value in net.named_parameters() if nn.parameter.is_lazy(value)]:
        raise UserError(f"model.target: {lazy[0]} has no size yet. Fix: pass an example through the network in its __init__")
    return net


def _describe_fault(found: Any, target: str, error: Exception) -> str:
    """Return the line about an error in the code that builds a network, with the author's line."""
    said, place = " ".join(str(error).split())[:200], place_outside(error, __file__)
    where = f" ({place})" if place else ""
    if isinstance(error, TypeError) and "argument" in said:
        return f"model.args: {target} takes other arguments ({said}){where}. Fix: its own"
    if isinstance(error, AttributeError) and "before Module.__init__()" in said:
        return f"model.target: {target} assigns a layer before super().__init__(){where}. Fix: call super().__init__() first"
    return f"model.target: {target} raises {type(error).__name__}: {said}{where}. Fix: that line, or model.args"


def _import(target: str) -> Any:
    """Return the object at a dotted path of a module and a name in it. Raises ``UserError``."""
    package, _, name = target.rpartition(".")
    if not package or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"model.target={target}: not a dotted path. Fix: PACKAGE.MODULE.NAME, such as {EXAMPLE}")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        here = Path(str(error.name).partition(".")[0])
        is_here = "." not in str(error.name) and (here.is_dir() or here.with_suffix(".py").is_file())
        fix = "export PYTHONPATH=$PWD" if is_here else "install it, or check the path"
        line = f"model.target: {target} needs the package {error.name}, which is not installed. Fix: {fix}"
        raise UserError(line) from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"model.target: {package} cannot be imported ({said})") from error
    if not hasattr(module, name):
        known = [each for each in dir(module) if not each.startswith("_")]
        raise UserError(f"model.target: {package} has no {name}{nearest(name, known).removesuffix('?')}. Fix: check the path")
    return getattr(module, name)


def _makes_modules(found: Any) -> bool:
    """Return whether a call of ``found`` makes a network: a class of ``nn.Module``, or a function annotated to return one.

    A server's settings name the target on devices too, so no other function may be called.
    """
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    if not inspect.isfunction(found):
        return False
    try:
        kind = typing.get_type_hints(found).get("return")
    except Exception:  # annotations that cannot be resolved
        kind = found.__annotations__.get("return")
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def find_head(net: nn.Module, wanted: str | None) -> tuple[str, nn.Linear]:
    """Return name and layer of the head: the one that is ``wanted``, or else the last linear layer. Raises ``UserError``."""
    layers = dict(net.named_modules())
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear) and name]
    if wanted is None:
        if not linear:
            raise UserError("model.head: the network has no nn.Linear, of which the last is the head. Fix: end it with one")
        wanted = linear[-1]
    if wanted not in layers:
        fault = unknown("layer", wanted, linear[-5:])
        raise UserError(f"model.head: {fault}")
    if wanted not in linear:
        kind = type(layers[wanted]).__name__
        raise UserError(f"model.head: {wanted} is {kind}, not nn.Linear. Fix: one of {', '.join(linear[-3:]) or 'none'}")
    return wanted, typing.cast(nn.Linear, layers[wanted])


def _check_shared(net: nn.Module) -> None:
    """Raise ``UserError`` if one parameter has two names, because each name is trained and averaged by itself."""
    names: dict[int, str] = {}
    for name, value in net.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(id(value), name)) != name:
            raise UserError(f"model.target: {first} and {name} are one tensor. Fix: a network that shares no weights")


def _take_dropout(net: nn.Module, head: str) -> float:
    """Return the rate of the dropout layer right before the head in its ``nn.Sequential``, and take that layer out."""
    path, _, last = head.rpartition(".")
    home = net.get_submodule(path)
    if not path or not isinstance(home, nn.Sequential):
        return 0.0
    names = [name for name, _ in home.named_children()]
    before = names[names.index(last) - 1] if names.index(last) else None
    layer = getattr(home, before) if before is not None else None
    if type(layer) is not nn.Dropout or before is None or layer.p >= 1:
        return 0.0
    home._modules[before] = nn.Identity()
    return float(layer.p)
