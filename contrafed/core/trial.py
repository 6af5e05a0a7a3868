"""Try a network on a few examples: what its forward passes must leave as it is, and whether clients can train as a stack."""

import contextlib
import copy
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contrafed.core.buffers import MaskedBatchNorm
from contrafed.core.randomness import keeping_global_state, read_global_state
from contrafed.core.registry import short_place
from contrafed.core.tensors import Tensors

REAL, PADDED = 6, 2  # examples of a tried batch
HIDDEN_FIX = "nn.ModuleList, nn.ModuleDict or nn.ParameterList"  # of layers in a plain list or dictionary
OTHER = 0.1  # relative difference of two counts that are not equal


@contextlib.contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Put a module's buffers back when the block ends, so that a trial changes nothing that a run begins with."""
    kept = [
        (home._buffers, leaf, value, value.clone())
        for home in module.modules()
        for leaf, value in home._buffers.items()
        if value is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for table, leaf, value, before in kept:
                table[leaf] = value.copy_(before)


def find_changed(module: nn.Module, before: Tensors) -> str:
    """Return the name of a buffer that is another one than ``before``, empty if none is."""
    now = dict(module.named_buffers())
    return next((n for n, v in before.items() if n not in now or now[n].shape != v.shape or not torch.equal(now[n], v)), "")


def copy_buffers(module: nn.Module) -> Tensors:
    """Return copies of a module's buffers by name."""
    return {name: value.clone() for name, value in module.named_buffers()}


def list_own_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of an author by name: those that are neither torch's nor Contrafed's."""
    return [pair for pair in module.named_modules() if not type(pair[1]).__module__.startswith(("torch.nn.", "contrafed."))]


def has_own_buffers(module: nn.Module) -> bool:
    """Return whether a layer of an author has buffers, or other tensors as constants."""
    return any(layer._buffers for _, layer in list_own_layers(module))


def find_changed_in_evaluation(module: nn.Module, x: Tensor) -> str:
    """Return the name of a buffer that a pass in evaluation mode over ``x`` changes, empty if none does."""
    if not has_own_buffers(module):
        return ""
    before = copy_buffers(module)
    with keeping_buffers(module):
        with contextlib.suppress(Exception):  # such as a wrong head's, which a later pass reports with its reason
            module.eval()(x)
        return find_changed(module, before)


def list_numbers(module: nn.Module) -> dict[str, Any]:
    """Return the plain numbers, and the lengths of lists, that the layers of an author keep, by name."""
    found: dict[str, Any] = {}
    for path, layer in list_own_layers(module):
        for key, value in vars(layer).items():
            number = len(value) if isinstance(value, list) else value
            if isinstance(number, int | float) and key != "training" and not key.startswith("_"):
                found[f"{path}.{key}" if path else key] = number
    return found


def find_changed_number(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the name of a number that two passes over the same examples changed, empty if none did."""
    return next((name for name, value in after.items() if name in before and before[name] != value), "")


def find_uninitialised(module: Any) -> str:
    """Return what is wrong with a layer whose class does not call ``super().__init__()``, with its line, or nothing."""
    layers = [module]
    for layer in layers:
        if "_modules" not in vars(layer):
            code = getattr(type(layer).__init__, "__code__", None)
            where = "" if code is None else f" ({short_place(code.co_filename, code.co_firstlineno)})"
            return f"{type(layer).__name__}.__init__ does not call super().__init__(){where}. Fix: call it first"
        layers += [each for each in layer._modules.values() if each is not None]
    return ""


def find_hidden_layers(module: nn.Module) -> tuple[str, type, str] | None:
    """Return the name, the layer's class and the attribute of layers or parameters in a plain list or dictionary, or None."""
    for path, layer in module.named_modules():
        for key, value in vars(layer).items():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if not key.startswith("_") and any(isinstance(each, nn.Module | nn.Parameter) for each in inside):
                return f"{path}.{key}" if path else key, type(layer), key
    return None


def find_untrained(model: Any, images: Tensor) -> str:
    """Return a line about parameters of a ``SplitModel``'s encoder that get no gradient, empty if all get one."""
    names = [name for name, _ in model.encoder.named_parameters()]
    leaves = {f"encoder.{name}": value.detach().requires_grad_() for name, value in model.encoder.named_parameters()}
    with torch.enable_grad(), model.holding(leaves):
        total = model.encoder(images[:1]).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else [None] * len(names)
    unused = [own_name(model, name) for name, grad in zip(leaves, grads, strict=True) if grad is None]
    if not unused:
        return ""
    return (
        f"{len(unused)} of {len(names)} tensors never train, such as {unused[0]}, because the output has no gradient for them"
    )


def place_outside(error: Exception, models: str) -> str:
    """Return the innermost place of an error outside of torch, of this package and of the folder of ``models``, or nothing."""
    inside = (Path(torch.__file__).parent, Path(__file__).resolve().parent.parent, Path(models).resolve().parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(Path(frame.filename).resolve().is_relative_to(each) for each in inside)]
    return short_place(own[-1].filename, own[-1].lineno) if own else ""


class Pass(NamedTuple):
    """A pass in training mode: the representations of the real examples, the buffers after it, and what it did to them."""

    z: Tensor
    buffers: Tensors
    assigned: str  # a buffer that became another tensor
    with_graph: str  # a buffer that keeps the graph of its gradient


def train_once(model: Any, x: Tensor, mask: Tensor) -> Pass:
    """Pass ``x`` through a ``SplitModel`` in training mode, on copies of its tensors."""
    names = model.buffer_names
    model.trained_parts = frozenset(name.partition(".")[0] for name in names)
    copies = {name: value.detach().clone() for name, value in model.tensors().items()}
    with torch.enable_grad(), model.holding(copies), model.training_on(mask):
        for name, value in copies.items():
            value.requires_grad_(name not in names)
        z = model.represent(x)
        held = model.tensors()
        assigned = next((name for name in sorted(names) if held[name] is not copies[name]), "")
    model.trained_parts = frozenset()
    graph = next((name for name in sorted(names) if copies[name].requires_grad), "")
    return Pass(z.detach()[mask > 0], {name: copies[name].detach() for name in sorted(names)}, assigned, graph)


def lay_out(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` (b, ...) as ``like`` is laid out in memory. Images of a run have their channels last there."""
    if like.dim() != 4 or like.stride(1) != 1:
        return x
    count, channels, height, width = x.shape
    return x.new_empty(count, height, width, channels).movedim(-1, 1).copy_(x)


def make_noise(like: Tensor, count: int, start: float = 0.0) -> Tensor:
    """Return ``count`` examples of fixed noise in the form of ``like`` (b, ...). Tokens are 0 and 1."""
    shape = (count, *like.shape[1:])
    numbers = torch.arange(float(torch.Size(shape).numel())).add(start).mul(12.9898).sin().mul(437.5).frac().view(shape)
    return lay_out(numbers.to(like) if like.is_floating_point() else (numbers > 0).to(like), like)


def find_training_fault(model: Any, images: Tensor) -> str:
    """Return what a ``SplitModel`` does to its buffers in training that clients cannot keep, with a fix."""
    before, count = copy_buffers(model), REAL if has_own_buffers(model) else 2
    tried = train_once(model, make_noise(images, count), torch.ones(count))
    if name := find_changed(model, before):
        return f"its forward pass changes {own_name(model, name)}. Fix: keep there numbers that are floats, or one counter"
    if tried.assigned:
        name = own_name(model, tried.assigned)
        fix = f"Fix: in place, such as self.{name.rpartition('.')[2]}.copy_(value)"
        return f"its forward pass assigns {name}, so that the new value is lost. {fix}"
    if tried.with_graph:
        name = own_name(model, tried.with_graph)
        return f"its forward pass leaves a graph in {name}. Fix: change buffers under torch.no_grad()"
    return ""


def find_inactive(model: Any, images: Tensor) -> str:
    """Return which layer of a ``SplitModel`` acts only in training mode, where it never is, with a fix, or nothing.

    Clients have only layers with buffers in training mode. Draws in evaluation are left to ``contrafed check``.
    """
    learning = {layer for _, layer in model._layers_with_buffers}
    without = {name: layer for name, layer in model.named_modules() if layer not in learning}
    x = make_noise(images, len(images))
    torch.backends.mha.set_fastpath_enabled(False)  # type: ignore[no-untyped-call]  # as in a Workspace

    def acts(*training: nn.Module) -> bool:
        """Return whether these layers in training mode draw, or change the representations."""
        z = _represent(model, x, set(training))
        same = z is not None and z.shape == plain.shape and torch.allclose(z, plain, rtol=1e-3, atol=1e-4, equal_nan=True)
        return not same

    try:
        with keeping_global_state(), keeping_buffers(model):
            plain = _represent(model, x, set())
            if plain is None or not acts(*without.values()) or acts():
                return ""
            name = next((name for name, layer in without.items() if acts(layer)), "")
    finally:
        model.eval()
    return f"{name or 'the network'} ({type(without[name]).__name__}) {INACTIVE}"


def _represent(model: Any, x: Tensor, training: set[nn.Module]) -> Any:
    """Return the representations of ``x`` with some layers in training mode, or None if the pass draws or raises."""
    for layer in model.modules():
        layer.training = layer in training
    before = read_global_state()
    try:
        z = model.represent(x)
    except Exception:  # such as of another output in training
        return None
    return z if isinstance(z, Tensor) and read_global_state() == before else None


INACTIVE = (
    "acts differently in training, and layers without buffers are never in training mode here. "
    "Fix: dropout=RATE of SplitModel, contrafed.core.drawn.replace_drawing(network) for layers that drop, "
    "or a buffer in the layer that reads self.training"
)


def find_padding_influence(model: Any, images: Tensor) -> str:
    """Return why padded examples have an influence in training, or nothing. With a reason clients cannot be a stack.

    BatchNorm leaves padded examples out. Own layers that learn from a batch cannot.
    """
    if all(isinstance(layer, MaskedBatchNorm) for _, layer in model._layers_with_buffers):
        return ""
    real, padding = make_noise(images, REAL), [make_noise(images, PADDED, start) for start in (0.1, 0.7)]
    mask = torch.ones(REAL)
    alone = train_once(model, real, mask).buffers
    one, other = (train_once(model, torch.cat([real, each]), torch.cat([mask, torch.zeros(PADDED)])) for each in padding)
    for name, value in alone.items():
        counts = not value.dim() and not torch.isclose(value, one.buffers[name], rtol=OTHER, atol=0)
        if counts or differ(one.buffers[name], other.buffers[name]):
            return f"{own_name(model, name)} learns from a whole batch, which is padded in a stack"
    if differ(one.z, other.z):
        return "examples of a batch have influence on each other in training, and batches are padded in a stack"
    return ""


def find_copy_fault(model: Any, x: Tensor) -> str:
    """Return why a model cannot be copied after a pass over ``x``, which a run does to evaluate it, empty if it can."""
    with torch.enable_grad():
        model.represent(x)
    try:
        copy.deepcopy(model)
    except Exception as error:  # such as of tensors with a graph, or of an open file
        said = textwrap.shorten(str(error), 100, placeholder="")
        fix = "torch.nn.utils.parametrizations.weight_norm for weight_norm, or parameters and buffers in place of other tensors"
        return f"it cannot be copied ({type(error).__name__}: {said}). Fix: {fix}"
    return ""


def own_name(model: Any, name: str) -> str:
    """Return a tensor's name in the network that a ``SplitModel`` is made of."""
    return next((theirs for theirs, ours in model.own_names.items() if ours == name), name)


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ. Elements that are not numbers are equal to each other."""
    return not torch.equal(one.nan_to_num(), other.nan_to_num())
