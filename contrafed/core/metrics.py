"""Compute scores of predicted labels other than accuracy, with torchmetrics.

The key ``metrics`` may name them. torch is imported when they are used.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from contrafed.core.errors import UserError, unknown

if TYPE_CHECKING:  # the key is checked before torch is imported
    from torch import Tensor

ACCURACY = "accuracy"
# Name: function of torchmetrics.functional.classification, and its arguments.
FUNCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "macro_f1": ("multiclass_f1_score", {"average": "macro"}),
    "weighted_f1": ("multiclass_f1_score", {"average": "weighted"}),
    "macro_precision": ("multiclass_precision", {"average": "macro"}),
    "macro_recall": ("multiclass_recall", {"average": "macro"}),
    "mcc": ("multiclass_matthews_corrcoef", {}),
}


def beside_accuracy(names: Iterable[str]) -> list[str]:
    """Return the requested metrics without accuracy, which is always computed.

    Raises:
        UserError: For an unknown metric, or one that is named twice.
    """
    for name in names:
        if name not in FUNCTIONS and name != ACCURACY:
            raise unknown("metrics entry", name, (ACCURACY, *FUNCTIONS))
    if len(set(names)) < len(list(names)):
        raise UserError(f"metrics names one twice: {', '.join(names)}")
    return [name for name in names if name != ACCURACY]


def confusion(predicted: "Tensor", y: "Tensor", mask: "Tensor", num_classes: int) -> "Tensor":
    """Count how often each true class (row) was predicted as each class (column).

    Args:
        predicted: Predicted classes (n,).
        y: True classes (n,).
        mask: 1 for examples that count, 0 for padding (n,).
        num_classes: C.

    Returns:
        The confusion matrix (C, C).
    """
    from torch.nn.functional import one_hot

    return (one_hot(y, num_classes).to(mask) * mask.unsqueeze(1)).T @ one_hot(predicted, num_classes).to(mask)


def scores_of(names: Iterable[str], counts: "Tensor") -> dict[str, float]:
    """Compute metrics from a confusion matrix, which contains all that they depend on.

    Args:
        names: Names of the metrics.
        counts: Confusion matrix (C, C).

    Returns:
        {name: score}, all 0 if the matrix is empty.
    """
    import torch
    from torchmetrics.functional import classification

    classes = len(counts)
    cells = torch.arange(classes * classes, device="cpu").repeat_interleave(counts.flatten().round().long().cpu())
    if not len(cells):
        return dict.fromkeys(names, 0.0)
    y, predicted = cells // classes, cells % classes

    def score(function: str, arguments: dict[str, Any]) -> float:
        # Sums in single precision may end slightly above 1.
        return min(float(getattr(classification, function)(predicted, y, num_classes=classes, **arguments)), 1.0)

    return {name: score(*FUNCTIONS[name]) for name in names}
