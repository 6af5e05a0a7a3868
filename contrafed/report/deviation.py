"""How far apart the participants of a round pull (PMFL, Definition 1), and how far apart models are (MpFedcon, Figure 3)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from contrafed.config.run_config import read_config
from contrafed.core.errors import UserError
from contrafed.core.tensors import Tensors, flat, group
from contrafed.core.weighted_sum import combine, squared_distance
from contrafed.engines.personal_models import place_in


def deviation(deltas: Sequence[Tensors]) -> tuple[float, float]:
    """Return Dev = sum_k (1 - cos(Delta_k, mean Delta)) over m participants' updates, and Dev / m; (0, 0) for none.

    The sum is the paper's, in [0, 2 m], and grows with m. The cosine with a zero vector counts 0.
    """
    if not deltas:
        return 0.0, 0.0
    mean = flat(combine(deltas, [1 / len(deltas)] * len(deltas)))
    cosines = [_cosine(flat({name: delta[name] for name in deltas[0]}).double(), mean) for delta in deltas]
    total = sum(1 - cosine for cosine in cosines)
    return total, total / len(deltas)


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the mean squared difference of two models' parameters of the same names. Raises ``ValueError`` for others."""
    if a.keys() != b.keys():
        raise ValueError(f"one model alone has {min(a.keys() ^ b.keys())}")
    return squared_distance(a, b) / sum(value.numel() for value in a.values())


def distance_of_runs(solo: str | Path, shared: str | Path) -> float:
    """Return ``distance`` between the personal models that one run saved and the global model that another left.

    Its mean over the nodes that train. MpFedcon, Figure 3: SOLO (``strategy=local save_personal=true``) and FedAvg. Raises
    ``UserError`` where a file is missing.
    """
    folder, file = Path(place_in(Path(solo))), Path(shared) / "model.safetensors"
    if not file.is_file():
        raise UserError(f"there is no {file}; give the folder of a finished run")
    config = read_config(Path(solo))
    trained = config["num_nodes"] - config.get("held_out_nodes", 0)
    places = sorted(place for place in folder.glob("*.safetensors") if int(place.stem) < trained)
    if not places:
        raise UserError(f"there are no personal models in {folder}; the run needs save_personal=true")
    model = load_file(file)
    return float(torch.tensor([distance(group(load_file(place), "model"), model) for place in places]).mean())
