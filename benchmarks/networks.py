"""Train networks of other people with model=torch, and compare a round with a plain PyTorch loop of the same steps.

    python benchmarks/networks.py [NAME ...] [--steps 3] [--batch 16] [--repeats 3]

Prints a table: parameters, whether two clients train as a stack, and seconds a round next to the loop. Two clients train, one
by one, in turns with the loop, in one process and one thread. Networks of packages that are not installed are left out.
"""

import argparse
import contextlib
import importlib.util
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VIT = {
    **{"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768},
    **{"image_size": 32, "patch_size": 4, "num_labels": 10},
}
# A network -> the arguments with which it is built.
NETWORKS: dict[str, dict[str, Any]] = {
    "torchvision.models.resnet18": {},
    "torchvision.models.mobilenet_v3_small": {},
    "torchvision.models.efficientnet_b0": {},
    "torchvision.models.vit_b_16": {"image_size": 32},
    "timm.models.resnet10t": {},
    "transformers.ViTForImageClassification": VIT,
}
SIDE, CLIENTS = 32, 2


def compose_network(target: str, steps: int, batch: int) -> Any:
    """Return the composed configuration of two clients on digits as colour images."""
    from contrafed import compose

    args = ", ".join(f"{key}: {value}" for key, value in NETWORKS[target].items())
    return compose(
        "model=torch", f"model.target={target}", f"model.args={{{args}}}", f"model.image_size={SIDE}",
        "strategy=fedavg", f"strategy.local.iterations={steps}", f"strategy.local.batch_size={batch}",
        "strategy.local.lr=0.01", f"num_clients={CLIENTS}", "dataset=digits", "participation=full",
        "dataset.fraction=0.1", "engine=local", "engine.stack_size=2", "num_rounds=1", "eval_every=1", "tracker=none",
    )  # fmt: skip


def time_loop(net: Any, images: Any, labels: Any, steps: int) -> float:
    """Return the seconds of ``steps`` steps of SGD for each client on a copy of the network's weights."""
    import torch

    start = {name: value.clone() for name, value in net.state_dict().items()}
    began = time.perf_counter()
    for _ in range(CLIENTS):
        net.load_state_dict(start)
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            out = net(images)
            torch.nn.functional.cross_entropy(getattr(out, "logits", out), labels).backward()
            optimizer.step()
    return time.perf_counter() - began


def measure(target: str, steps: int, batch: int, repeats: int) -> str:
    """Return a row of the table."""
    import torch
    from omegaconf import OmegaConf

    from contrafed.core.client_run import client_run_of
    from contrafed.models.torch_module import Config, make_network
    from contrafed.training.workspace import Workspace

    config: Any = OmegaConf.to_container(compose_network(target, steps, batch), resolve=True)
    workspace = Workspace(client_run_of(config))
    net = make_network(Config(target, NETWORKS[target], None))
    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    clients = [workspace.client_class(workspace, [client]) for client in range(CLIENTS)]
    images, labels = workspace.images(torch.arange(batch)), workspace.labels(torch.arange(batch))
    rounds, loops = [], []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        for client in clients:
            client.update([received], 1)
        rounds.append(time.perf_counter() - began)
        loops.append(time_loop(net, images, labels, steps))
        if not repeat:  # the first pass warms up
            rounds.clear(), loops.clear()
    ours, theirs = statistics.median(rounds), statistics.median(loops)
    count = sum(value.numel() for value in workspace.model.parameters())
    kind = "stacked" if stacks(target, config) else "one by one"
    return f"| `{target}` | {count:,} | {kind} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |"


def stacks(target: str, config: Any) -> bool:
    """Return whether two clients train as one stack, in a run of one round."""
    from contrafed import run

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        summary = run(config | {"output_dir": f"{folder}/run"})
    if summary["failures"]:
        raise RuntimeError(f"{target}: {said.getvalue()}")
    return "one by one" not in said.getvalue()


def main() -> None:
    """Print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="networks of the table, all by default")
    for option, default in (("steps", 3), ("batch", 16), ("repeats", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | parameters | two clients | seconds a round | loop | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for target in NETWORKS:
        if importlib.util.find_spec(target.partition(".")[0]) and (not asked.names or target.rpartition(".")[2] in asked.names):
            print(measure(target, asked.steps, asked.batch, asked.repeats), flush=True)


if __name__ == "__main__":
    main()
