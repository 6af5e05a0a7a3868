"""Record additional values for analyses (``log=[...]``), as rows of ``metrics.csv`` and ``clients.csv``.

| | rows |
| --- | --- |
| ``deviation`` | every round: ``fit`` ``deviation``, ``deviation_mean``: PMFL's Dev^t and Dev^t / m |
| ``weights`` | every round: ``weight_all`` by client, also of unavailable clients (PMFL, FedAU) |
| ``features`` | evaluated rounds: ``fit`` ``features_within``, ``_between``, ``_effective_rank``, ``_vci``, mean over clients |
| ``clients_train`` | at the end: ``train_accuracy`` and ``train_loss`` by client, of the final global model |
| ``probability`` | at the end: ``probability`` by client, the p_k of a pattern that has them |
"""

from dataclasses import asdict

import numpy as np

from contrafed.config.run_config import Run
from contrafed.core.covariance import spread
from contrafed.core.deviation import deviation
from contrafed.core.errors import UserError
from contrafed.core.tensors import Tensors
from contrafed.data.federation import Federation
from contrafed.data.shifted_partition import ShiftedPartition
from contrafed.runs.evaluation import evaluating, representations, score, test_examples
from contrafed.runs.output import RunRecorder
from contrafed.server.base import FederatedStrategy, Replies
from contrafed.server.buffers import leave_out
from contrafed.server.checks import weights_of
from contrafed.training.workspace import Workspace

SHIFT_METRIC = "feature_shift"  # of clients.csv with partition.feature_shift: degrees, factor or deviation of each client
WEIGHT_METRIC = "weight_all"  # of clients.csv with log=[weights]


class Logged:
    """Records values of a run's server. Does nothing unless ``log`` has entries."""

    def __init__(self, run: Run, workspace: Workspace, federation: Federation, strategy: FederatedStrategy) -> None:
        """Raise ``UserError`` for an entry of ``log`` without data."""
        self.run, self.workspace, self.federation, self.strategy = run, workspace, federation, strategy
        if "features" in run.log and not len(test_examples(federation, run.num_trained)):
            raise UserError("log=[features] needs test images on the server")
        if set(run.log) - {"clients_train", "probability"}:
            strategy.on_aggregated = self._watch

    def _watch(self, replies: Replies) -> None:
        """Write the values of a round's replies into the round."""
        done, log = self.strategy.round, self.run.log
        if "deviation" in log and len(replies):
            done.metrics["deviation"], done.metrics["deviation_mean"] = deviation(self._parameter_deltas(replies))
        weights = weights_of(self.strategy) if "weights" in log else None
        if weights is not None:
            clients = np.flatnonzero(np.isfinite(weights) & (self.strategy.population.sizes > 0))
            done.client_metrics[WEIGHT_METRIC] = (clients, weights[clients])
        now = done.server_round
        if "features" in log and len(replies) and (now % self.run.eval_every == 0 or now == self.run.num_rounds):
            found = [asdict(spread(*self._features(model))) for model in replies.models()]
            done.metrics |= {f"features_{name}": float(np.mean([each[name] for each in found])) for name in found[0]}

    def _parameter_deltas(self, replies: Replies) -> list[Tensors]:
        """Return each client's update without buffers, whose counters would dominate the cosine."""
        return [leave_out(delta, self.strategy.buffers) for delta in replies.deltas()]

    def _features(self, model: Tensors) -> tuple[np.ndarray, np.ndarray]:
        """Return z (n, D) and labels (n,) of the test images under a client's model."""
        index = test_examples(self.federation, self.run.num_trained)
        z = representations(self.workspace, self.workspace.initial | model, index)
        return z, self.federation.labels(index)

    def finish(self, recorder: RunRecorder, model: Tensors, status: str) -> None:
        """Write p_k and the feature shifts, and evaluate a finished run's model on each training part of clients that train."""
        p = self.strategy.participation.probabilities
        if "probability" in self.run.log and p is not None:
            recorder.clients(recorder.rounds, range(len(p)), "probability", p)
        partition = self.federation.partition
        if isinstance(partition, ShiftedPartition):
            recorder.clients(recorder.rounds, range(partition.num_clients), SHIFT_METRIC, partition.shifts)
        if "clients_train" not in self.run.log or status != "finished":
            return
        evaluated = evaluating(self.workspace, model)
        clients = [client for client in range(self.run.num_trained) if len(partition.train(client))]
        scores = [score(self.workspace, evaluated, partition.true_train(client))[:2] for client in clients]
        for place, name in enumerate(("train_loss", "train_accuracy")):
            recorder.clients(recorder.rounds, clients, name, [each[place] for each in scores])
