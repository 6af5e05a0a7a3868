"""Hold what a process needs to run clients of one experiment: the data, the model's shape, and the method's client."""

import inspect
import textwrap
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor

from contrafed.core import registry
from contrafed.core.client_run import Choice, ClientRun
from contrafed.core.errors import UserError
from contrafed.core.split_model import SplitModel, build_model
from contrafed.data.federation import Federation, load_federation
from contrafed.training.loop import PARTS, parts_fault
from contrafed.training.stack_size import cpu_stack_size

# Number of examples that an evaluation takes at a time, over all clients of a stack. On a CPU activations then fit its cache.
# An accelerator needs more: as many as have EVALUATION_NUMBERS numbers together, and at most 1,024.
EVALUATION_BATCH, EVALUATION_BATCH_ELSEWHERE, EVALUATION_NUMBERS = 256, 1024, 2**22
# Number of examples of each client that it takes at a time in an ``exact`` workspace.
EXACT_PASS_EXAMPLES = 32


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
        stack_size: int | None = None,
    ) -> None:
        """Load what is not given.

        Args:
            run: The clients' part of the configuration.
            device: Where clients train.
            dtype: The type of all computation.
            federation: The data and the partition.
            model: The model, with its initial weights.
            stack_size: The number of clients that train together. None: all on a GPU, and on a CPU a stack of a tiny model.
        """
        self.run = run
        self.seed = run.seed
        self.device = torch.device(device)
        self.dtype = dtype
        self.federation = federation or load_federation(run)
        self.client_class = client_class_of(run.strategy)
        self.config = run.strategy.config
        data = self.federation.data
        self.model = model or make_model(run, self.federation)
        self.model = self.model.to(device=self.device, dtype=dtype).eval().requires_grad_(False)
        # For models in evaluation mode torch fuses transformer layers, which then have no gradient in a stack.
        torch.backends.mha.set_fastpath_enabled(False)  # type: ignore[no-untyped-call]
        self.initial: dict[str, Tensor] = self.model.tensors()
        on_cpu = self.device.type == "cpu"
        self.stack_size = stack_size or (cpu_stack_size(self.model, self.config) if on_cpu else run.num_clients)
        # Whether a client has the same bits alone and in any stack. So a tiny model's do not depend on the engine.
        self.exact = on_cpu and stack_size is None and self.stack_size > 1
        # Channels last: convolutions and pools on a CPU take half the time on such images, the evaluation a third.
        # Without a copy where the images are so in memory already.
        try:
            self.x, self.y = data.x.to(self.device).permute(0, 2, 3, 1).contiguous(), data.y.to(self.device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"the images take {data.x.nbytes / 1e9:.1f} GB, for which the GPU has no room: engine=local engine.device=cpu, "
                "a smaller dataset.fraction, or with engine=ray fewer engine.workers and a larger engine.gpus_per_worker"
            ) from error
        fitting = max(1, min(EVALUATION_BATCH_ELSEWHERE, EVALUATION_NUMBERS // self.x[0].numel())) if len(self.x) else 1
        self.evaluation_batch = EVALUATION_BATCH if self.device.type == "cpu" else fitting
        # (x/255 - mean) / std as one multiplication and one addition. There is a factor per number of an image, because a
        # vector operation over three channels at a time is five times as slow.
        mean = torch.tensor(data.mean, dtype=dtype, device=self.device)
        std = torch.tensor(data.std, dtype=dtype, device=self.device)
        every = torch.zeros(self.x.shape[1:], dtype=dtype, device=self.device)
        self.scale, self.shift = every + 1 / (255 * std), every - mean / std

    @cached_property
    def largest_client(self) -> int:
        """The number of training examples of the largest client."""
        return int(np.max(self.federation.partition.sizes, initial=1))

    def pass_examples(self, clients: int) -> int:
        """Return how many examples of each of so many clients an evaluation takes at a time."""
        return EXACT_PASS_EXAMPLES if self.exact else max(1, self.evaluation_batch // clients)

    def images(self, index: Tensor) -> Tensor:
        """Return normalised images (..., C, H, W), channels last in memory, of the examples ``index`` (...)."""
        return self.normalise_images(self.x.index_select(0, index.reshape(-1)).unflatten(0, index.shape))

    def normalise_images(self, raw: Tensor) -> Tensor:
        """Normalise raw images (..., H, W, C) uint8 to (..., C, H, W)."""
        return raw.to(self.dtype).mul_(self.scale).add_(self.shift).movedim(-1, -3)

    def labels(self, index: Tensor) -> Tensor:
        """Return labels (...) of the examples ``index`` (...)."""
        return self.y.index_select(0, index.reshape(-1)).reshape(index.shape)


def make_model(run: ClientRun, federation: Federation) -> SplitModel:
    """Build the model for a federation's images. Its initial weights are drawn from the seed."""
    data = federation.data
    _, channels, height, width = data.x.shape
    return build_model(run.model, channels, (height, width), data.num_classes, run.seed)


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
