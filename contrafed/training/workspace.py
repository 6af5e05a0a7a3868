"""Hold what a process needs to run clients of one experiment: the data, the model's shape, and the method's client."""

import inspect
import math
import textwrap
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from flwr.client import NumPyClient
from torch import Tensor

from contrafed.core import registry
from contrafed.core.client_run import Choice, ClientRun
from contrafed.core.errors import UserError
from contrafed.core.inputs import Inputs, build_model_for
from contrafed.core.split_model import SplitModel
from contrafed.data.federation import Federation, load_federation
from contrafed.data.shifted_partition import ShiftedPartition
from contrafed.training.loop import PARTS, parts_fault

# Number of examples that an evaluation takes at a time, over all clients of a stack. On a CPU activations then fit its cache.
# An accelerator needs more: as many as have EVALUATION_NUMBERS numbers together, and at most 1,024.
EVALUATION_BATCH, EVALUATION_BATCH_ELSEWHERE, EVALUATION_NUMBERS = 256, 1024, 2**22


def client_class_of(strategy: Choice) -> Any:
    """Return the ``Client`` class of a choice.

    Raises:
        UserError: If its shared parts are not parts of a model, or if its code fails.
    """
    found: Any = registry.only_subclass(strategy.module, NumPyClient, "contrafed.Client")
    if not hasattr(found, "shared_parts"):
        raise UserError(f"{strategy.module.__name__}: {found.__name__} must inherit contrafed.Client")
    half = f"strategy={strategy.name}: {found.__name__}"
    with registry.report_author_errors(f"{half}.shared_parts", inspect.getfile(found)):
        parts = found.shared_parts(strategy.config)
    where = f"{half}.{'shared' if parts is found.shared else 'shared_parts'}"
    if fault := parts_fault(parts, PARTS):
        raise UserError(where + fault)
    return found


class Workspace:
    """The data set on its device, the partition, the model, and the hyper-parameters of the client.

    There is one per process and experiment. Clients are index arrays into it. The model's own parameters are only a template,
    because every computation passes its parameters in.
    """

    def __init__(
        self,
        run: ClientRun,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        federation: Federation | None = None,
        model: SplitModel | None = None,
    ) -> None:
        self.run = run
        self.seed = run.seed
        self.device = torch.device(device)
        self.dtype = dtype
        self.federation = federation or load_federation(run)
        self.client_class = client_class_of(run.strategy)
        self.config = run.strategy.config
        data = self.federation.data
        self.kind = data.kind
        self.model = model or make_model(run, self.federation)
        self.model = self.model.to(device=self.device, dtype=dtype).eval().requires_grad_(False)
        # For models in evaluation mode torch fuses transformer layers, which then have no gradient in a stack.
        torch.backends.mha.set_fastpath_enabled(False)  # type: ignore[no-untyped-call]
        self.initial: dict[str, Tensor] = self.model.tensors()
        # Channels last: convolutions and pools on a CPU take half the time on such images, the evaluation a third.
        # Without a copy where the images are so in memory already.
        try:
            x = data.x.to(self.device)
            self.x, self.y = x.permute(0, 2, 3, 1).contiguous() if self.kind == "image" else x, data.y.to(self.device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"the images take {data.x.nbytes / 1e9:.1f} GB, for which the GPU has no room: engine=local engine.device=cpu, "
                "a smaller dataset.fraction, or with engine=ray fewer engine.workers and a larger engine.gpus_per_worker"
            ) from error
        partition = self.federation.partition
        self.shifter = partition.make_shifter(self.device) if isinstance(partition, ShiftedPartition) else None
        numbers = self.x[0].numel() if len(self.x) else EVALUATION_NUMBERS
        if self.model.image_size is not None:
            numbers = max(numbers, 3 * math.prod(self.model.image_size))
        fitting = max(1, min(EVALUATION_BATCH_ELSEWHERE, EVALUATION_NUMBERS // numbers))
        self.evaluation_batch = EVALUATION_BATCH if self.device.type == "cpu" else fitting
        if self.model.image_size is not None:
            self.evaluation_batch = min(self.evaluation_batch, fitting)
        # (x/255 - mean) / std as one multiplication and one addition. There is a factor per number of an image, because a
        # vector operation over three channels at a time is five times as slow.
        if self.kind == "tokens":
            return
        mean, std = (self._spread(values) for values in (data.mean, data.std))
        shape = self.x.shape[1:] if self.kind == "values" else (*self.x.shape[1:3], len(mean))
        every = torch.zeros(shape, dtype=dtype, device=self.device)
        self.scale, self.shift = every + 1 / ((255 if self.kind == "image" else 1) * std), every - mean / std

    def _spread(self, values: tuple[float, ...]) -> Tensor:
        """Return the mean or deviation of each channel that the model takes, given those of the data or of colours.

        Of other values it is that of each channel (C, 1, ...), or of each column of a table.
        """
        found = torch.tensor(values, dtype=self.dtype, device=self.device)
        if self.kind == "values":
            return found.view(-1, *[1] * (self.x.dim() - 2)) if len(found) == self.x.shape[1] else found
        channels = self.model.takes_channels or self.x.shape[3]
        return found if len(found) == channels else found.mean().expand(channels)

    def images(self, index: Tensor) -> Tensor:
        """Return normalised images (..., C, H, W), channels last in memory, of the examples ``index`` (...)."""
        return self.normalise_images(self.raw_images(index.reshape(-1)).unflatten(0, index.shape))

    def raw_images(self, index: Tensor) -> Tensor:
        """Return images (n, H, W, C) uint8 of the examples ``index`` (n,), with their client's feature shift, if any."""
        if self.shifter is None:
            return self.x.index_select(0, index)
        return self.shifter.shift(self.x.index_select(0, self.shifter.examples(index)), index)

    def normalise_images(self, raw: Tensor) -> Tensor:
        """Normalise raw images (..., H, W, C) uint8 to (..., C, H, W), with the channels and the size that the model takes.

        Other values keep their axes, and tokens stay.
        """
        if self.kind == "tokens":
            return raw.long()
        if self.kind == "values":
            return raw.to(self.dtype).mul(self.scale).add_(self.shift)
        if raw.shape[-1] == self.scale.shape[-1]:
            found = raw.to(self.dtype).mul_(self.scale).add_(self.shift).movedim(-1, -3)
        else:  # grey images for a network of colour images
            found = (raw.to(self.dtype) * self.scale).add_(self.shift).movedim(-1, -3)
        return found if self.model.image_size is None else resize_images(found, self.model.image_size)

    def labels(self, index: Tensor) -> Tensor:
        """Return labels (...) of the examples ``index`` (...)."""
        found = index if self.shifter is None else self.shifter.examples(index)
        return self.y.index_select(0, found.reshape(-1)).reshape(index.shape)


def resize_images(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images (..., C, H, W) in another size, by bilinear interpolation with antialiasing as torchvision's Resize."""
    flat = images.reshape(-1, *images.shape[-3:])
    if not len(flat):
        return images.new_empty((*images.shape[:-2], *size))
    return F.interpolate(flat, size, mode="bilinear", antialias=True).reshape(*images.shape[:-2], *size)


def make_model(run: ClientRun, federation: Federation) -> SplitModel:
    """Build the model for a federation's examples. Its initial weights are drawn from the seed."""
    inputs = federation.data.inputs
    if inputs.kind != "image":
        check_image_settings(run, inputs)
    return build_model_for(run.model, inputs, federation.data.num_classes, run.seed)


def check_image_settings(run: ClientRun, inputs: Inputs) -> None:
    """Raise ``UserError`` for settings that only images have, if the data are others."""
    local = getattr(run.strategy.config, "local", None)
    augment, shift = getattr(local, "augment", ()), run.partition.config.feature_shift.kind
    changed = {
        f"strategy.local.augment=[{','.join(augment)}]": bool(augment),
        f"dataset.normalize={run.dataset.config.normalize}": run.dataset.config.normalize != "moments",
        f"partition.feature_shift.kind={shift}": shift != "none",
    }
    if key := next((key for key, is_set in changed.items() if is_set), None):
        raise UserError(f"{key} is for images, and an example of these data is {inputs}. Fix: leave it out")


def default_device() -> str:
    """Return ``cuda`` if this process sees a GPU, else ``cpu``. Raises ``UserError`` for a GPU that cannot compute."""
    if not torch.cuda.is_available():
        return "cpu"
    if fault := fault_of("cuda"):
        raise UserError(
            f"the GPU cannot be used ({fault}); engine=local engine.device=cpu does without, as does all with "
            "CUDA_VISIBLE_DEVICES= in the environment"
        )
    return "cuda"


def fault_of(device: str | None) -> str:
    """Return why a device cannot run what a run requires, empty if it can.

    It may be absent, have no double precision (Apple's), or be too old for this PyTorch. The last one appears in its first sum.
    """
    try:
        (torch.zeros(1, dtype=torch.float64, device=device) + 1).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        return textwrap.shorten(str(error), 100, placeholder=" ...") or type(error).__name__
    return ""


@lru_cache(maxsize=1)
def workspace_for(settings: str, own: tuple[int, str] | None = None) -> Workspace:
    """Return this process's ``Workspace`` for the JSON of a message. It is built once, and kept until another is requested.

    Args:
        settings: The client's part of the configuration, as JSON.
        own: On a device with its own data: the client's partition id, and the path.
    """
    if settings in _installed:
        return _installed[settings]
    run = ClientRun.from_json(settings)
    return Workspace(run, device=default_device(), federation=load_federation(run, own))


_installed: dict[str, Workspace] = {}


def install(settings: str, workspace: Workspace) -> None:
    """Make ``workspace_for(settings)`` return ``workspace``. So an engine chooses the device and shares data by reference."""
    uninstall()
    _installed[settings] = workspace


def uninstall() -> None:
    """Discard every workspace, so that its memory is free for the next run."""
    _installed.clear()
    workspace_for.cache_clear()
