"""Draw representations in two dimensions: t-SNE of the clients' test images under a run's models.

    python -m contrafed.report.embedding outputs/RUN              the global model
    python -m contrafed.report.embedding outputs/RUN --personal   personal models (the run needs save_personal=true)

Writes ``embedding.npz`` (x, label, client), ``embedding.png`` and ``embedding.pdf`` to the run's folder. With ``--personal``
the name is ``embedding_personal``.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contrafed.client_app.files import read_personal
from contrafed.core.arguments import Parser
from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.run_folder import read_config
from contrafed.core.tensors import Tensors
from contrafed.data.federation import Federation
from contrafed.engines.personal_models import check_saved, place_in
from contrafed.runs.evaluation import MODEL_FILE, initial_model, representations
from contrafed.runs.setup import check_config
from contrafed.training.loop import part_of
from contrafed.training.workspace import Workspace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS, PERPLEXITY = 3000, 30.0


def sample_stratified(labels: np.ndarray, limit: int, seed: int = 0) -> np.ndarray:
    """Return at most ``limit`` positions in ``labels`` (n,), sorted, with each class's share to within one."""
    if len(labels) <= limit:
        return np.arange(len(labels))
    order = np.lexsort((generator(seed, "embedding points").permutation(len(labels)), labels))
    return np.sort(order[np.arange(limit) * len(labels) // limit])


def tsne(features: np.ndarray) -> np.ndarray:
    """Embed features in two dimensions with scikit-learn's t-SNE, perplexity 30, starting from the principal components.

    Fewer than 91 points have a third of their number as perplexity.

    Args:
        features: (n, D).

    Returns:
        Points (n, 2).

    Raises:
        UserError: For fewer than 4 points, or for numbers that are not finite.
    """
    from sklearn.manifold import TSNE

    if len(features) < 4:
        raise UserError(f"t-SNE needs at least 4 points, got {len(features)}")
    if not np.isfinite(features).all():
        raise UserError("t-SNE needs finite representations, and some are not")
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    found: np.ndarray = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(np.asarray(features, np.float64))
    return found


def of_run(
    folder: str | Path, *, personal: bool = False, limit: int = POINTS, federation: Federation | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute representations of at most ``limit`` test images of a finished run.

    Test parts of clients are used or, without any, the central test split with client -1.

    Args:
        folder: The run's folder.
        personal: Use each client's saved model for its own test part, instead of the global model.
        limit: Largest number of images.
        federation: The run's data, if they are loaded already.

    Returns:
        Representations z (n, D), labels (n,) and clients (n,).

    Raises:
        UserError: For files that are missing or cannot be read.
    """
    folder = Path(folder)
    run = check_config(on_cpu(read_config(folder)))
    workspace = Workspace(run.client, federation=federation)
    partition = workspace.federation.partition
    parts = [partition.test(client) for client in range(run.num_clients)]
    clients, index = np.repeat(np.arange(run.num_clients), [len(part) for part in parts]), np.concatenate(parts)
    if not len(index):
        if personal:
            raise UserError("clients have no test images of their own; partition.test_fraction=0.2 gives them some")
        index = workspace.federation.central_test
        clients = np.full(len(index), -1)
    labels = workspace.federation.labels(index)
    chosen = sample_stratified(labels, limit, run.seed)
    index, clients, labels = index[chosen], clients[chosen], labels[chosen]
    if personal:
        if not Path(place_in(folder)).is_dir():
            raise UserError(f"there are no personal models in {folder}; the run needs save_personal=true")
        check_saved(workspace, place_in(folder))
        own = [(_load_personal_model(folder, client), index[clients == client]) for client in np.unique(clients)]
        z = np.concatenate([representations(workspace, model, examples) for model, examples in own])
        order = np.argsort(clients, kind="stable")
        return z, labels[order], clients[order]
    if missing := stays(workspace):
        raise UserError(
            f"strategy={run.client.strategy.name} leaves its {missing} on the clients, and the global one untrained: --personal"
        )
    if not (folder / MODEL_FILE).is_file():
        raise UserError(f"there is no {MODEL_FILE} in {folder}; give the folder of a finished run")
    model = initial_model(workspace.initial, str(folder / MODEL_FILE), workspace.model.frozen_tensors())
    return representations(workspace, model, index), labels, clients


def on_cpu(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's configuration without its device, its tracker, and the files that it read or wrote."""
    here = {"device": "cpu", "memory_folder": None}
    engine = {key: here[key] if value and key in here else value for key, value in config["engine"].items()}
    return {**config, "engine": engine, "output_dir": ".", "init_from": None, "tracker": {"name": "none"}}


def stays(workspace: Workspace) -> str:
    """Return which part of what makes representations does not travel, empty where all of it does."""
    travels = workspace.client_class.list_shared(workspace.model, workspace.config)
    stay = {part_of(name) for name in workspace.initial if name not in travels}
    kept = [part for part in ("encoder", "projector") if part in stay]
    return " and ".join(kept)


def _load_personal_model(folder: Path, client: int) -> Tensors:
    return read_personal(place_in(folder), int(client))[0]


def draw(points: np.ndarray, labels: np.ndarray) -> "Figure":
    """Return a figure of the points (n, 2) of ``scatter``, with the names of its classes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    scatter(axes, points, labels, int(labels.max()) + 1)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", frameon=False, title="class", markerscale=2)
    return figure


def scatter(axes: Any, points: np.ndarray, labels: np.ndarray, classes: int) -> None:
    """Draw points (n, 2). Up to ten ``classes`` have their own colour, marker and name, more have a scale of colours."""
    from matplotlib import colormaps

    from contrafed.report.plots import MARKERS
    from contrafed.report.style import CLASSES

    few = classes <= len(CLASSES)
    palette = CLASSES if few else colormaps["viridis"].resampled(classes).colors  # type: ignore[attr-defined]
    for label in np.unique(labels).tolist():
        mine = points[labels == label]
        look = {"s": 9, "marker": MARKERS[label], "label": str(label)} if few else {"s": 5}
        axes.scatter(mine[:, 0], mine[:, 1], color=palette[label], linewidths=0, **look)
    axes.set_axis_off()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    from contrafed.report.plots import save

    parser = Parser("python -m contrafed.report.embedding", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--personal", action="store_true", help="each client's own model instead of the global one")
    parser.add_argument("--points", type=int, default=POINTS, help=f"at most so many; default {POINTS}")
    try:
        options = parser.parse_args(arguments)
        z, labels, clients = of_run(options.run, personal=options.personal, limit=options.points)
        points = tsne(z)
        name = "embedding_personal" if options.personal else "embedding"
        np.savez_compressed(options.run / f"{name}.npz", x=points, label=labels, client=clients)
        png, _ = save(draw(points, labels), options.run / name)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(points)} points in {png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
