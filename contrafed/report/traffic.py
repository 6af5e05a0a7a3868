"""What a node moves in a round by the papers' formulas."""

from collections.abc import Collection, Mapping

from contrafed.core.errors import unknown

BYTES = 4  # of a float32
# theta: the model; phi: the parts of it that the method shares; pi: the classifier; omega: class prototypes C x D; h: FedPAC's
# class means C x D; v: its variance.
WHOLE = (
    *("apfl", "ditto", "fedadam", "fedagm", "fedala", "fedamp", "fedau", "fedavg", "fedavg_fitnet", "fedavg_ft", "fedavgm"),
    *("fedawe", "fedcl", "feddecorr", "feddyn", "fedexp", "fedhyper", "fedlc", "fedmlb", "fednova", "fedntd", "fedppo"),
    *("fedprox", "fedrcl", "fedscl", "fedvarp", "mifa", "moon", "perfedavg", "pfedme", "pmfl"),
)
FORMULAS: Mapping[str, tuple[str, str]] = {  # method -> what comes down, what goes up
    **dict.fromkeys(WHOLE, ("theta", "theta")),
    "local": ("", ""),
    "scaffold": ("theta theta", "theta theta"),
    **dict.fromkeys(("fedbabu", "fedper", "fedrep", "lgfedavg"), ("phi", "phi")),
    "fedproto": ("omega", "omega"),
    "fedgh": ("pi", "omega"),
    "fedcrl": ("phi omega", "phi omega"),
    "fedcosr": ("phi omega", "phi omega"),
    "fedpac": ("theta omega", "theta omega v h"),
    "mpfedcon": ("phi omega", "phi omega"),
    "fedproc": ("theta omega", "theta omega"),
}


def formula(method: str, parts: Mapping[str, int], shared: Collection[str], num_classes: int, width: int) -> tuple[int, int]:
    """Return the scalars that a node receives and sends in a round by its paper's formula.

    ``parts``: parameters of encoder, projector and classifier; ``shared``: which of them travel; ``width`` (D) of a
    representation. Raises ``UserError`` for a method without a formula. The papers count every class of a table, and no
    counts beside it.
    """
    if method not in FORMULAS:
        raise unknown("method with a traffic formula", method, FORMULAS)
    phi = sum(parts[part] for part in shared)
    sizes = {"theta": sum(parts.values()), "phi": phi, "pi": parts["classifier"], "v": 1}
    sizes |= dict.fromkeys(("omega", "h"), num_classes * width)
    down, up = (sum(sizes[symbol] for symbol in symbols.split()) for symbols in FORMULAS[method])
    return down, up
