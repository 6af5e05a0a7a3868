"""Count a client's traffic in a round by its paper's formula, a class attribute of the method's client, in symbols.

| symbol | scalars |
| --- | --- |
| theta | the model |
| phi | its shared parts |
| pi | its classifier |
| omega | class prototypes, C x D |
| h | FedPAC's class means, C x D |
| v | FedPAC's variance, 1 |

The papers count every class of a table, and no class counts in addition.
"""

from typing import Any

from contrafed.core.split_model import SplitModel
from contrafed.training.base import PARTS, Client

BYTES_PER_NUMBER = 4  # of a float32


def get_formula(client_class: type[Client]) -> tuple[str, str] | None:
    """Return the symbols that a client receives and uploads, such as ("phi omega", "phi omega"), or None if it has no formula.

    A client that overrides ``message_spec`` must set its own ``traffic``, because the inherited formula is for other messages.
    """
    for cls in client_class.__mro__:
        if "traffic" in vars(cls):
            found: tuple[str, str] | None = vars(cls)["traffic"]
            return found
        if "message_spec" in vars(cls):
            break
    return None


def count_scalars(client_class: type[Client], model: SplitModel, config: Any) -> tuple[int, int] | None:
    """Return the scalars that a client receives and uploads in a round by its paper's formula, or None without one."""
    if (formula := get_formula(client_class)) is None:
        return None
    parts = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in PARTS}
    shared = client_class.list_shared(model, config)
    phi = sum(value.numel() for name, value in model.named_parameters() if name in shared)
    sizes = {"theta": sum(parts.values()), "phi": phi, "pi": parts["classifier"], "v": 1}
    sizes |= dict.fromkeys(("omega", "h"), model.num_classes * model.embedding_size)
    down, up = (sum(sizes[symbol] for symbol in symbols.split()) for symbols in formula)
    return down, up
