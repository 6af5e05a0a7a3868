"""A simulated GPU: its tensors compute on the CPU, but refuse operations with tensors that are not on it.

A machine without a GPU can thus find a tensor that was not moved. It does not simulate speed, the rounding of real kernels or
bfloat16.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

# What the stand-in calls itself: torch lets no other device exist that is not there. Nothing else here uses it.
NAME = "meta"
aten = torch.ops.aten
# Transfers between the CPU and the simulated accelerator. On a GPU the processor waits there for all earlier work.
crossings = []
COPIES = (aten.copy_.default, aten._to_copy.default)
JOINS = (aten.cat.default, aten.stack.default)
INDEXED_FUNCTIONS = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class There(torch.Tensor):
    """A tensor on the simulated accelerator. Computations use ``values``."""

    @staticmethod
    def __new__(cls, values):
        about = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype, "device": NAME}
        found = torch.Tensor._make_wrapper_subclass(cls, values.size(), **about)
        found.values = values
        return found

    def __repr__(self, **_):
        return f"There({self.values})"

    def tolist(self):
        crossings.append("tolist")
        return self.values.tolist()

    @property
    def is_meta(self):
        return False

    def data_ptr(self):
        return self.values.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _compute(function, args, kwargs or {})


def _compute(function, args, kwargs):
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    goes = any(isinstance(tensor, There) for tensor in tensors)
    if goes and function not in COPIES:
        # As on a GPU: a number may come from anywhere, and so may an index.
        free = {id(leaf) for leaf in tree_leaves(args[1])} if function in INDEXED_FUNCTIONS else set()
        strays = [t for t in tensors if not isinstance(t, There) and (t.dim() or function in JOINS) and id(t) not in free]
        if strays:
            raise RuntimeError(f"{function}: {tuple(strays[0].shape)} is on the CPU, another tensor is not")
    if function is aten.copy_.default:
        goes = isinstance(args[0], There)
    elif kwargs.get("device") is not None:
        goes = torch.device(kwargs["device"]).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu")}
    if (function in COPIES and isinstance(args[function is aten.copy_.default], There) != goes) or (
        function is aten._local_scalar_dense.default and isinstance(args[0], There)
    ):
        crossings.append(str(function))
    values = tree_map(lambda leaf: leaf.values if isinstance(leaf, There) else leaf, (args, kwargs))
    out = function(*values[0], **values[1])
    if not goes:
        return out
    out = tree_map(lambda leaf: There(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)
    return out if function is aten._to_copy.default else return_and_correct_aliasing(function, args, kwargs, out)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _compute(function, args, kwargs or {})


class _Making(TorchFunctionMode):
    """Create tensors of numbers, which torch does outside of a dispatch mode's control."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.tensor and "device" in kwargs:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.new_tensor and isinstance(args[0], There):
            return torch.tensor(args[1], dtype=args[0].dtype).to(NAME)
        if function is torch.Tensor.__getitem__ and isinstance(args[0], There) and isinstance(args[1], list):
            raise RuntimeError("an index that is a list: torch makes it a tensor where no dispatch mode sees it")
        return function(*args, **kwargs)


@contextlib.contextmanager
def accelerator():
    """Let the device NAME compute in this thread."""
    with _Operations(), _Making():
        yield
