"""Names that tables and figures show for methods, choices and keys of the configuration."""

import re

from contrafed.core import registry

# A description's first word, or two, that is the name of a data set: ``CIFAR-10: 60,000 pictures``.
DATASET_TITLE = re.compile(r"^([A-Z][\w-]*(?: [a-z]+)?): ")
# Between the method of a label and its keys: ``fedavg participation=full local.lr=0.1``.
LABEL_KEY = re.compile(r" (?=[a-z][\w.]*=)")
GROUPS = ("dataset", "partition", "participation", "model", "engine", "privacy", "attack", "aggregation", "clock", "schedule")
KEY_NAMES = {
    "strategy.local.lr": "learning rate",
    "strategy.local.iterations": "local steps",
    "strategy.local.epochs": "local epochs",
    "strategy.local.proximal_weight": "proximal weight",
    "dataset.name": "data set",
    "data_fingerprint": "data",
    "partition.alpha": "Dirichlet α",
    "partition.classes_per_client": "classes of a client",
    "participation.beta": "participation β",
    "participation.mean_probability": "participation rate",
    "participation.select": "selected clients",
    "participation.loss_rate": "lost replies",
    "participation.deadline": "deadline",
    "participation.over_select": "over-selection",
    "participation.late": "late clients",
    "participation.staleness_a": "staleness a",
    "clock.name": "clock",
    "clock.step_sigma": "spread of speeds",
    "schedule.name": "schedule",
    "schedule.buffer_size": "buffer",
    "schedule.concurrency": "concurrency",
    "schedule.staleness": "staleness weight",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "eval_every": "rounds between evaluations",
    "evaluate_after": "evaluated after",
}
CHOICE_NAMES = {
    "participation": {"bernoulli": "Bernoulli", "markovian": "Markovian"},
    "partition": {
        "iid": "IID", "dirichlet": "Dirichlet", "balanced_dirichlet": "balanced Dirichlet", "lognormal": "log-normal",
    },
    "model": {
        "cnn": "CNN", "cnn5": "CNN5", "cnn_bn": "CNN with BatchNorm", "cnn_pmfl": "CNN of PMFL", "lenet": "LeNet-5",
        "mlp": "MLP", "mobilenet_v2": "MobileNet V2", "resnet18": "ResNet-18", "shufflenet": "ShuffleNet",
        "squeezenet": "SqueezeNet", "vgg9": "VGG-9",
    },
}  # fmt: skip
NULL = "null"  # the value of a key that is not set
SYMBOLS = {"mu": "μ", "tau": "τ", "alpha": "α", "beta": "β", "eta": "η", "lambda": "λ"}


def name_method(method: str) -> str:
    """Return a method's name as its paper spells it, with strategy and variant: ``FedRCL+FedAdam``, ``PMFL without MCT``."""
    whole, slash, variant = method.partition("/")
    titles = {name: text.partition(": ")[0].removesuffix(" (SOLO)") for name, text in registry.choices("strategy").items()}
    client, plus, server = whole.partition("+")
    title = titles.get(client, _replace_underlines(client)) + (
        f"+{titles.get(server, _replace_underlines(server))}" if plus else ""
    )
    if not slash:
        return title
    if variant.startswith("no_"):
        return f"{title} without {variant.removeprefix('no_').upper()}"
    key, equals, value = variant.partition("=")
    return f"{title} ({f'{SYMBOLS.get(key, _replace_underlines(key))} = {value}' if equals else _replace_underlines(variant)})"


def name_key(key: str) -> str:
    """Return a dotted key in words: ``partition.alpha`` is ``Dirichlet α``, ``strategy.buffer_size`` is ``buffer size``."""
    if key in KEY_NAMES:
        return KEY_NAMES[key]
    group, dot, rest = key.partition(".")
    if not dot or rest == "name":
        return _replace_underlines(group)
    last = _replace_underlines(rest.removeprefix("local.").rpartition(".")[2])
    return last if group == "strategy" else f"{_replace_underlines(group)} {last}"


def name_value(key: str, value: str) -> str:
    """Return a value of a dotted key: ``CIFAR-10`` for ``dataset.name``, ``Markovian`` for ``participation.name``."""
    if key == "participation.deadline" and value[-1:].isdigit():
        return f"{value[1:]} of the cohort" if value.startswith("q") else f"{value} s"
    if value == NULL:
        return "all" if key == "participation.select" else "not set"
    group, _, rest = key.partition(".")
    if rest != "name":
        return _replace_underlines(value)
    if group == "dataset" and (title := DATASET_TITLE.match(registry.choices("dataset").get(value, ""))):
        return title[1]
    return CHOICE_NAMES.get(group, {}).get(value, _replace_underlines(value))


def name_setting(key: str, value: str) -> str:
    """Return a key with its value: ``Dirichlet α = 0.1``. The name of a choice stands for itself: ``Markovian``."""
    shown = name_value(key, value)
    return shown if key.endswith(".name") else f"{name_key(key)} = {shown}"


def name_label(label: str) -> str:
    """Return a label of runs in words: ``fedavg local.lr=0.1 to round 80`` is ``FedAvg, learning rate = 0.1 to round 80``."""
    text, mark, until = label.partition(" to round ")
    method, *settings = LABEL_KEY.split(text)
    remark = method.removeprefix(first := re.split("[ ,]", method)[0])
    pairs = [setting.partition("=") for setting in settings]
    named = [name_method(first) + remark, *(name_setting(_lengthen(key), value) for key, _, value in pairs)]
    return ", ".join(named) + mark + until


def _lengthen(key: str) -> str:
    """Return the dotted key of a short one: ``participation`` is ``participation.name``, ``local.lr`` is a strategy's."""
    if key in GROUPS:
        return f"{key}.name"
    return key if key in KEY_NAMES or key.partition(".")[0] in GROUPS else f"strategy.{key}"


def _replace_underlines(text: str) -> str:
    return text.replace("_", " ")
