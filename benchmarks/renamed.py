"""Old and new names of keys and values, for records of a checkout that has the old ones."""

# Old dotted key -> new dotted key. It holds for all keys below it too; the longest old key wins.
RENAMED: dict[str, str] = {
    "num_nodes": "num_clients",
    "eval_nodes": "eval_clients",
    "held_out_nodes": "held_out_clients",
    "wait_for_nodes": "wait_for_clients",
    "judge": "evaluate_after",
    "attack.nodes": "attack.clients",
    "engine.cpus_per_node": "engine.cpus_per_client",
    "engine.gpus_per_node": "engine.gpus_per_client",
    "partition.classes_per_node": "partition.classes_per_client",
    "partition.examples_per_node": "partition.examples_per_client",
    "partition.min_node_size": "partition.min_client_size",
    "partition.scarce_nodes": "partition.scarce_clients",
    "node": "client",  # no key: an axis of a figure
}

# New dotted key -> {old value: new value}, also for each value of a list. Keys have no indexes: published.cells.value.
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "evaluate_after": {"received": "download", "post_train": "local_training"},
    "log": {"nodes_train": "clients_train"},
    "partition.scheme": {"per_node": "per_client"},
    "strategy.normalize": {"all_nodes": "all_clients"},
    "strategy.weights": {"all_nodes": "all_clients"},
    "published.cells.std": {"nodes_accuracy_best_std": "clients_accuracy_best_std"},
    "published.cells.value": {
        "nodes_accuracy_best": "clients_accuracy_best",
        "nodes_accuracy_last10_mean": "clients_accuracy_last10_mean",
    },
    "published.plot.metric": {
        "global/nodes/accuracy": "global/clients/accuracy",
        "global/nodes/loss": "global/clients/loss",
        "nodes:accuracy": "clients:accuracy",
        "nodes:accuracy_gain": "clients:accuracy_gain",
        "nodes:probability": "clients:probability",
        "summary:nodes_accuracy_best": "summary:clients_accuracy_best",
        "summary:nodes_accuracy_last10_mean": "summary:clients_accuracy_last10_mean",
    },
    "published.scope": {"nodes": "clients"},
    "published.setting": {"one node": "one client"},
}

# Old -> new text of a cell of metrics.csv, such as the name of a split.
RENAMED_CELLS: dict[str, str] = {"nodes": "clients"}
