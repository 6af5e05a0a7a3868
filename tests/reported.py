"""Write the folders of runs by hand for the tests of reports."""

import json

import yaml


def config_of(**changes):
    config = {
        "seed": 0, "num_clients": 4, "num_rounds": 40, "output_dir": "somewhere", "evaluate_only": None,
        "strategy": {"name": "fedavg", "server": "fedavg", "local": {"lr": 0.1}},
        "dataset": {"name": "digits"}, "partition": {"name": "dirichlet", "alpha": 0.1},
        "participation": {"name": "full"}, "model": {"name": "cnn"}, "engine": {"name": "local"},
    }  # fmt: skip
    for key, value in changes.items():
        group, dot, inner = key.replace("__", ".").partition(".")
        if dot:
            config[group] = {**config[group], inner: value}
        else:
            config[group] = value
    return config


def method(name, **changes):
    """Return a configuration's changes for another method with FedAvg's strategy."""
    return {"strategy": {"name": name, "server": "fedavg", "local": {"lr": 0.1}}, **changes}


def write_run(
    folder, accuracies=(0.1, 0.5, 0.8, 0.7), *, scope=("global", "test"), spread=None, clients=(), more=(), summary=None,
    replies=None, system=None, **changes
):  # fmt: skip
    """Write a run with accuracies of rounds 0, 10, 20, ... and two participants that upload 1 MiB each in these rounds.

    Further rows of ``clients.csv`` and ``metrics.csv`` are ``clients`` and ``more``. In each round ``replies`` of the two
    replies are accepted. Further system metrics are ``system``.
    """
    folder.mkdir(parents=True)
    config = config_of(**changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    lines = ["round,scope,split,metric,value"]
    for number, accuracy in enumerate(accuracies):
        place = f"{10 * number},{','.join(scope)}"
        lines.append(f"{place},accuracy,{accuracy}")
        if spread is not None:
            lines.append(f"{place},accuracy_std,{spread[number]}")
        if number:
            counts = SYSTEM if replies is None else SYSTEM | {"bytes_up": replies[number - 1] * 2**20}
            lines += [f"{10 * number},global,system,{name},{value}" for name, value in (counts | (system or {})).items()]
    lines += [",".join(map(str, row)) for row in more]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    rows = [",".join(map(str, row)) for row in clients]
    (folder / "clients.csv").write_text("\n".join(["round,client,metric,value", *rows]) + "\n")
    if summary is not False:
        said = {"status": "finished", "seed": config["seed"], "seconds": 3.0, "device": "cpu", "versions": {"torch": "2.6"}}
        (folder / "summary.json").write_text(json.dumps(said | (summary or {})))
    return folder


SYSTEM = {"participants": 2, "bytes_up": 2 * 2**20, "bytes_down": 4 * 2**20}
