"""Names that tables and figures show for methods, choices and keys of the configuration."""

import re

from contrafed.core import registry

# A description's first word, or two, that is the name of a data set: ``CIFAR-10: 60,000 pictures``.
DATASET_TITLE = re.compile(r"^([A-Z][\w-]*(?: [a-z]+)?): ")
KEY_NAMES = {
    "strategy.local.lr": "learning rate",
    "strategy.local.iterations": "local steps",
    "strategy.local.epochs": "local epochs",
    "strategy.local.proximal_weight": "proximal weight",
    "dataset.name": "data set",
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


def _replace_underlines(text: str) -> str:
    return text.replace("_", " ")
