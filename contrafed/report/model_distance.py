"""Measure how far apart the models of two runs are (MpFedcon, Figure 3)."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from contrafed.core.deviation import distance
from contrafed.core.errors import UserError
from contrafed.core.run_folder import read_config
from contrafed.core.tensors import select_prefix
from contrafed.engines.personal_models import place_in


def distance_of_runs(solo: str | Path, shared: str | Path) -> float:
    """Compute the mean ``distance``, over training clients, of one run's personal models from another run's global model.

    MpFedcon, Figure 3: SOLO (``strategy=local save_personal=true``) and FedAvg.

    Raises:
        UserError: If a file is missing.
    """
    folder, file = Path(place_in(Path(solo))), Path(shared) / "model.safetensors"
    if not file.is_file():
        raise UserError(f"there is no {file}; give the folder of a finished run")
    config = read_config(Path(solo))
    trained = config["num_clients"] - config.get("held_out_clients", 0)
    places = sorted(place for place in folder.glob("*.safetensors") if int(place.stem) < trained)
    if not places:
        raise UserError(f"there are no personal models in {folder}; the run needs save_personal=true")
    model = load_file(file)
    return float(torch.tensor([distance(select_prefix(load_file(place), "model"), model) for place in places]).mean())
