"""Compare a step with frozen models with FedAvg's step, and with the forward passes that it needs at least."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import compose_on, in_turns


def contrast(folder: Path, repeats: int, device: str) -> None:
    """Compare PMFL's and MOON's step with FedAvg's, and with plain steps and frozen passes of the same network and batch.

    On a CPU one client is timed, on a GPU a stack of 25. The bare passes of so many clients are not timed.
    """
    import torch
    from omegaconf import OmegaConf

    from contrafed.core.client_run import client_run_of
    from contrafed.engines.worker import reuse_memory
    from contrafed.training.workspace import Workspace

    torch.set_num_threads(1)
    reuse_memory()
    clients = [0] if device == "cpu" else list(range(25))
    print("| method | model, batch | s / step | x FedAvg's | bare | ratio | with our pool | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    epochs = ("strategy.local.iterations=null", "strategy.local.epochs=5")
    for method, model, batch, more in (
        ("pmfl", "cnn5", 32, ()),
        ("pmfl", "cnn5", 16, ()),
        ("pmfl", "cnn_pmfl", 16, ()),
        ("moon", "cnn5", 16, epochs),
    ):

        def rounds_of(method, model=model, batch=batch, more=more):
            """Return a function that trains the clients for one more round, their workspace, and their steps per round."""
            overrides = (f"strategy={method}", f"model={model}", f"strategy.local.batch_size={batch}", *more)
            common = ("strategy.local.lr=0.001", "num_clients=250", "partition=iid")
            config: Any = OmegaConf.to_container(compose_on(folder, *overrides, *common))
            workspace = Workspace(client_run_of(config), device=device)
            received = [{f"model/{n}": v for n, v in workspace.initial.items()}] * len(clients)
            client_states: list[Any] = [{} for _ in clients]
            rounds = iter(range(1, 10**6))

            def one():
                updates = workspace.client_class(workspace, clients, client_states).update(received, next(rounds))
                client_states[:] = [update.client_state for update in updates]
                if device != "cpu":
                    torch.cuda.synchronize()

            one(), one()  # the buffer is full and there is a previous model
            return one, workspace, workspace.client_class(workspace, clients).num_local_steps(160)

        ours, workspace, steps = rounds_of(method)
        fedavg, _, _ = rounds_of("fedavg")
        functions = {"ours": ours, "fedavg": fedavg}
        if device == "cpu":
            functions |= {kind: bare_passes(workspace.model, batch, steps, method, kind) for kind in ("bare", "pool")}
        found = in_turns(functions, 4 * repeats)
        ours = found["ours"]
        row = [method, f"{model}, {batch}", f"{ours / steps:.4f}", f"{ours / found['fedavg']:.2f}"]
        for kind in ("bare", "pool"):
            row += [f"{found[kind] / steps:.4f}", f"{ours / found[kind]:.2f}"] if kind in found else ["-", "-"]
        print(f"| {' | '.join(row)} |")


def bare_passes(model: Any, batch: int, steps: int, method: str, kind: str) -> Callable[[], None]:
    """Return a function that takes plain steps and the frozen forward passes of a method.

    The network pools with torch's module. For kind ``pool`` it pools with ours, which is faster without a gradient.
    """
    import torch
    from torch import nn

    from contrafed.core.layers import HalvingPool

    network = copy.deepcopy(model).train().requires_grad_(True)
    if kind == "bare":
        for parent in list(network.modules()):
            for name, child in parent.named_children():
                if isinstance(child, HalvingPool):
                    setattr(parent, name, nn.MaxPool2d(2))
    frozen = [copy.deepcopy(network).requires_grad_(False) for _ in range(7)]
    x = torch.randn(batch, 32, 32, 3).permute(0, 3, 1, 2)
    y = torch.randint(0, 10, (batch,))
    # PMFL: N + 1 a step, and Z once. MOON: two for each of the 160 examples, once.
    passes = 6 * steps + 1 if method == "pmfl" else 2 * 160 // batch

    def bare() -> None:
        optimizer = torch.optim.SGD(network.parameters(), 0.001)
        for step in range(steps):
            with torch.no_grad():
                for i in range(passes * step // steps, passes * (step + 1) // steps):
                    frozen[i % len(frozen)](x)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x).logits, y).backward()
            optimizer.step()

    return bare
