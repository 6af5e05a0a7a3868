"""mlflow: a run of an MLflow experiment, in a file of the run's folder unless a server is named."""

import logging
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contrafed.core.schema import flatten_keys
from contrafed.core.tracker import Tracked, Tracker

# In the run's folder: the id by which a resumed run is found again.
NAME_FILE = "mlflow.id"
# Parameters that MLflow takes in one call, and characters of one.
AT_ONCE, LONGEST = 100, 500
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


@dataclass(frozen=True)
class Config:
    """Settings of the tracker."""

    experiment: str
    uri: str | None


class MLflow(Tracker):
    """A run with every key of the configuration as a parameter."""

    package = "mlflow"

    def __init__(self, config: Config, run: Tracked) -> None:
        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.uri = config.uri or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self.client: Any = MlflowClient(tracking_uri=self.uri)
        self.last = -1  # the last round that an earlier attempt logged
        name = run.folder / NAME_FILE
        if run.resumed and name.exists():
            self.id = name.read_text(encoding="utf-8")
            self.client.update_run(self.id, "RUNNING")
            names = self.client.get_run(self.id).data.metrics
            self.last = max((each.step for name in names for each in self.client.get_metric_history(self.id, name)), default=-1)
            return
        found = self.client.get_experiment_by_name(config.experiment)
        experiment = found.experiment_id if found is not None else self.client.create_experiment(config.experiment)
        self.id = self.client.create_run(experiment, run_name=run.folder.name).info.run_id
        name.write_text(self.id, encoding="utf-8")
        parameters = [Param(key, str(value)[:LONGEST]) for key, value in flatten_keys(run.composed).items()]
        for start in range(0, len(parameters), AT_ONCE):
            self.client.log_batch(self.id, params=parameters[start : start + AT_ONCE])

    @property
    def line(self) -> str:
        """The command that shows it."""
        return f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}"

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Log a round as the step of its number, unless it is logged: MLflow would keep both values."""
        from mlflow.entities import Metric

        if server_round <= self.last:
            return
        now = int(time.time() * 1000)
        # MLflow takes no other characters in a name.
        named = {re.sub(r"[^\w\-. :/]", "_", name): float(value) for name, value in values.items()}
        self.client.log_batch(self.id, metrics=[Metric(name, value, now, server_round) for name, value in named.items()])

    def close(self, status: str) -> None:
        """End the run."""
        self.client.set_terminated(self.id, STATUS.get(status, "FAILED"))
