"""Load the initial global model, and evaluate the global model on the server."""

import copy
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from flwr.app import MetricRecord
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from contrafed.config.run_config import Run
from contrafed.core.errors import UserError
from contrafed.core.metrics import beside_accuracy, confusion, scores_of
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import Tensors
from contrafed.core.weighted_sum import cores
from contrafed.data.federation import Federation
from contrafed.server.base import Round
from contrafed.server.replies import norm
from contrafed.training.workspace import Workspace

# In a run's folder.
MODEL_FILE = "model.safetensors"
# A global model whose norm is so many times the initial one (or 1, where that is less) has diverged.
DIVERGED_NORM_RATIO = 1e6


def initial_file(run: Run) -> str | None:
    """Return the file of a run's initial global model, None if it is drawn or if the run resumes from a checkpoint."""
    if run.resume:
        return None
    return str(Path(run.evaluate_only) / MODEL_FILE) if run.evaluate_only else run.init_from


def initial_model(drawn: Mapping[str, Tensor], path: str | None, frozen: Mapping[str, Tensor] | None = None) -> Tensors:
    """Return the initial global model: as ``drawn`` from the seed, or loaded from a safetensors file of the same shapes.

    The file may have the ``frozen`` tensors too, which every client has already.

    Raises:
        UserError: If the file cannot be read, or has other tensors or numbers that are not finite.
    """
    if path is None:
        return {name: value.detach().cpu() for name, value in drawn.items()}
    try:
        loaded = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is no safetensors file ({' '.join(str(error).split())})") from error
    for name, value in (frozen or {}).items():
        if name in loaded and not torch.equal(loaded.pop(name), value.cpu()):
            raise UserError(f"{path} does not fit: {name} is frozen here with other values. Fix: model.pretrained={path}")
    if more := sorted(loaded.keys() - drawn.keys()):
        raise UserError(f"{path} does not fit: it has {more[0]}, which this model has not")
    for name, value in drawn.items():
        if name not in loaded or loaded[name].shape != value.shape:
            found = f"shape {tuple(loaded[name].shape)}" if name in loaded else "none"
            raise UserError(f"{path} does not fit: {name} needs shape {tuple(value.shape)}, found {found}")
        if not loaded[name].is_floating_point() or not bool(loaded[name].isfinite().all()):
            kind = str(loaded[name].dtype).removeprefix("torch.")
            raise UserError(f"{path} does not fit: {name} must be finite floating-point numbers, found {kind}")
    return {name: loaded[name].to(value.dtype) for name, value in drawn.items()}


def evaluate(
    workspace: Workspace, federation: Federation, run: Run, server_round: int, model: Tensors, whole: bool
) -> MetricRecord | None:
    """Evaluate the global model on the central test set and, if requested, on all training examples.

    Without a central test set (merged splits) the test parts of all clients that may train are used together. The same holds
    for validation examples, if there are any.

    Args:
        workspace: The workspace.
        federation: The data on the server.
        run: The run.
        server_round: The round.
        model: The global model.
        whole: Whether all parts of the model are shared. Otherwise there is no complete global model, and the result is empty.

    Returns:
        The scores, empty without images on the server, None between evaluations.
    """
    if server_round % run.eval_every and server_round != run.num_rounds:
        return None
    if not whole:
        return MetricRecord({})
    parts = {"test": test_examples(federation, run.num_trained)}
    parts["validation"] = validation_examples(federation, run.num_trained)
    if run.eval_train:
        parts["train"] = np.concatenate([federation.partition.true_train(n) for n in range(run.num_trained)])
    scores: dict[str, int | float | list[int] | list[float]] = {}
    evaluated, names = evaluating(workspace, model), beside_accuracy(run.metrics)
    for split, rows in parts.items():
        if len(rows):
            loss, accuracy, counts = score(workspace, evaluated, rows)
            more = scores_of(names, counts) if names else {}
            scores |= {f"{split}/{name}": value for name, value in {"accuracy": accuracy, "loss": loss, **more}.items()}
    return MetricRecord(scores)


def find_divergence(done: Round, model: Tensors, initial_norm: float) -> str:
    """Return why a round's global model counts as diverged, empty where it does not. A model that is not finite ends a run."""
    wrong = [name for name, value in (done.evaluation or {}).items() if not math.isfinite(value)]
    if wrong:
        return f"{wrong[0]} is {done.evaluation[wrong[0]]}" if done.evaluation else ""
    size = norm(model.values())
    return f"its norm is {size:.3g}" if size > DIVERGED_NORM_RATIO * max(initial_norm, 1.0) else ""


def test_examples(federation: Federation, num_trained: int) -> np.ndarray:
    """Return the central test set (n,), or without one the test parts of the first ``num_trained`` clients together."""
    index = federation.central_test
    return index if len(index) else np.concatenate([federation.partition.test(n) for n in range(num_trained)])


def validation_examples(federation: Federation, num_trained: int) -> np.ndarray:
    """Return the central validation set (n,), or without one the validation parts of the first ``num_trained`` clients."""
    index, partition = federation.central_validation, federation.partition
    if len(index) or not partition.validation_sizes[:num_trained].any():
        return index
    return np.concatenate([partition.validation(n) for n in range(num_trained)])


def evaluating(workspace: Workspace, model: Tensors) -> SplitModel:
    """Return a new network with the parameters ``model``."""
    evaluated = copy.deepcopy(workspace.model)
    own = evaluated.state_dict()
    for name, value in model.items():  # load_state_dict would want the counters of frozen BatchNorm layers too
        own[name].copy_(value)
    return evaluated


def representations(workspace: Workspace, model: Tensors, index: np.ndarray) -> np.ndarray:
    """Return z (n, D) of the examples ``index`` (n,) under a model on any device."""
    evaluated, batches = (
        evaluating(workspace, model),
        torch.from_numpy(index).to(workspace.device).split(workspace.evaluation_batch),
    )
    with torch.no_grad():
        return torch.cat([evaluated.represent(workspace.images(rows)) for rows in batches]).cpu().numpy()


def score(workspace: Workspace, model: SplitModel, index: np.ndarray) -> tuple[float, float, Tensor]:
    """Compute mean cross-entropy, accuracy and confusion matrix of a model.

    All CPU cores are used. The batches are fixed, so that sums do not depend on the number of cores.

    Args:
        workspace: The workspace.
        model: A network with its own parameters, because threads that share a module would see each other's ``holding``.
        index: The examples (n,).

    Returns:
        Loss, accuracy and confusion matrix (C, C), all zeros without examples.
    """
    if not len(index):
        return 0.0, 0.0, torch.zeros(model.num_classes, model.num_classes)

    @torch.no_grad()
    def sums(rows: Tensor) -> tuple[Tensor, Tensor]:
        y, logits = workspace.labels(rows), model(workspace.images(rows)).logits
        counts = confusion(logits.argmax(1), y, torch.ones_like(y, dtype=logits.dtype), model.num_classes)
        return torch.nn.functional.cross_entropy(logits, y, reduction="sum"), counts

    batches = torch.from_numpy(index).to(workspace.device).split(workspace.evaluation_batch)
    with ThreadPoolExecutor(cores()) as pool:
        each = pool.map(sums, batches) if workspace.device.type == "cpu" else map(sums, batches)
        losses, counts = zip(*each, strict=True)
    total = torch.stack(counts).sum(0)
    # Read at the end, because on an accelerator each read waits.
    return sum(map(float, losses)) / len(index), float(total.trace()) / len(index), total
