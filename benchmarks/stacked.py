"""Compare ways of computing a stack of clients on a GPU: one training step, and one pass of frozen models.

The networks are the same. PMFL's frozen models see the batches of five steps at once.

    python benchmarks/stacked.py --device cuda

Contrafed's way is ``grouped``: under ``vmap`` the clients' convolutions become one grouped convolution. The other ways take
turns with it:

one by one     a loop over the clients
contiguous     grouped, images with channels first in memory
im2col         images unfolded, their patches multiplied with each client's weights as one batched product
compile        grouped, through torch.compile
graph          grouped, captured as a CUDA graph and replayed
im2col graph   im2col, captured and replayed likewise

The last column has the differences of the results. In single precision gradients differ by some 1e-3 if rounding decides which
pixel a pool takes. In double precision all ways agree to 1e-14.
"""

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from timing import in_turns  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.func import vmap  # noqa: E402

# name: (model, clients, batch size, images a frozen model sees at once, bfloat16)
SETTINGS = {
    "PMFL's CNN, 25 clients, batch 16": ("cnn_pmfl", 25, 16, 80, False),
    "FedRCL's ResNet-18, 5 clients, batch 50, bfloat16": ("resnet18", 5, 50, 50, True),
}
WAYS = ("grouped", "one by one", "contiguous", "im2col", "compile", "graph", "im2col graph")


class Unfolded(nn.Conv2d):
    """A convolution as im2col and a matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of x (b, C, H, W)."""
        (kh, kw), (ph, pw), (sh, sw) = self.kernel_size, self.padding, self.stride  # type: ignore[misc]
        height, width = (x.shape[2] + 2 * ph - kh) // sh + 1, (x.shape[3] + 2 * pw - kw) // sw + 1
        patches = F.unfold(x, (kh, kw), padding=(ph, pw), stride=(sh, sw))  # (b, C kh kw, H' W')
        out = self.weight.flatten(1) @ patches
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        return out.unflatten(2, (height, width))


def unfold_convolutions(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose convolutions are ``Unfolded``."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Unfolded
    return model


class Work:
    """A training step of B clients on a batch each, and a pass of as many frozen models on ``ahead`` images each."""

    def __init__(self, way: str, model: Any, clients: int, batch: int, ahead: int, mixed: bool, device: str) -> None:
        self.device, self.mixed, self.alone = device, mixed, way == "one by one"
        self.model = (unfold_convolutions(model) if way.startswith("im2col") else copy.deepcopy(model)).to(device)
        generator = torch.Generator().manual_seed(0)

        def copies() -> dict[str, Tensor]:
            """Return the model's tensors for every client, each slightly different."""
            return {
                name: (value.detach().cpu() + 0.01 * torch.randn(clients, *value.shape, generator=generator)).to(device)
                for name, value in model.named_parameters()
            }

        def images(count: int) -> Tensor:
            x = torch.randn(clients, count, 32, 32, 3, generator=generator).to(device).movedim(-1, -3)
            return x.contiguous() if way == "contiguous" else x

        self.params = {name: value.requires_grad_() for name, value in copies().items()}
        self.frozen = copies()
        self.x, self.each = images(batch), images(ahead)
        self.y = torch.randint(0, 10, (clients, batch), generator=generator).to(device)
        self.step: Callable[[], Any] = self.train
        self.embed: Callable[[], Any] = self.represent
        if way == "compile":
            self.loss = torch.compile(self.loss)  # type: ignore[method-assign]
            self.represent = torch.compile(self.represent)  # type: ignore[method-assign]
            self.embed = self.represent
        elif way.endswith("graph"):
            self.step, self.embed = capture_graph(self.train), capture_graph(self.represent)

    def one(self, params: dict[str, Tensor], x: Tensor) -> Any:
        """Run one client's model."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed, cache_enabled=False), self.model.holding(params):
            return tuple(out.float() for out in self.model(x)[:2])

    def over(self, params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Run every client's model, and return logits and representations."""
        if not self.alone:
            both: tuple[Tensor, Tensor] = vmap(self.one)(params, x)
            return both
        apart = {name: value.unbind() for name, value in params.items()}
        rows = [self.one({name: values[k] for name, values in apart.items()}, x[k]) for k in range(len(x))]
        logits, z = zip(*rows, strict=True)
        return torch.stack(logits), torch.stack(z)

    def loss(self) -> Tensor:
        """Return the sum of the clients' mean cross-entropies."""
        logits, _ = self.over(self.params, self.x)
        return F.cross_entropy(logits.flatten(0, 1), self.y.flatten(), reduction="sum") / self.y.shape[1]

    def train(self) -> dict[str, Tensor]:
        """Return the gradients of a step that changes no weight."""
        loss = self.loss()
        return dict(zip(self.params, torch.autograd.grad(loss, list(self.params.values())), strict=True))

    def represent(self) -> Tensor:
        """Return the frozen models' representations."""
        with torch.no_grad():
            return self.over(self.frozen, self.each)[1]


def capture_graph(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that replays a function's kernels. Its result is the same memory each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def difference(found: Any, expected: Any) -> float:
    """Return the largest relative difference between two results, tensor by tensor."""
    pairs = zip(found.values(), expected.values(), strict=True) if isinstance(found, dict) else [(found, expected)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def compare(title: str, ways: list[str], repeats: int, device: str) -> None:
    """Print a table of one setting."""
    from omegaconf import OmegaConf

    from contrafed import compose
    from contrafed.core.build import build_model
    from contrafed.core.client_run import choose

    name, clients, batch, ahead, mixed = SETTINGS[title]
    chosen = choose("model", OmegaConf.to_container(compose(f"model={name}").model))  # type: ignore[arg-type]
    model = build_model(chosen, 3, (32, 32), 10, 0)
    works: dict[str, Work] = {}
    failed: dict[str, str] = {}
    expected: tuple[Any, Any] | None = None
    apart: dict[str, tuple[float, float]] = {}
    for way in ways:
        try:
            work = Work(way, model, clients, batch, ahead, mixed, device)
            result = work.step(), work.embed()
        except Exception as error:  # a failure of a way is a result too
            failed[way] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            continue
        expected = expected or result
        apart[way] = difference(result[0], expected[0]), difference(result[1], expected[1])
        works[way] = work
    functions: dict[str, Callable[[], None]] = {}
    for way, work in works.items():
        functions |= {
            f"{way}, step": synchronize_after(work.step, device),
            f"{way}, pass": synchronize_after(work.embed, device),
        }
    found = {name: 1000 * seconds for name, seconds in in_turns(functions, repeats).items()}
    base = "grouped" if "grouped" in works else next(iter(works), "")
    print(f"\n{title}\n\n| way | step, ms | beside grouped | frozen pass, ms | beside grouped | gradients, z differ by |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way in works:
        step, embed = found[f"{way}, step"], found[f"{way}, pass"]
        beside = [value / found[f"{base}, {what}"] for value, what in ((step, "step"), (embed, "pass"))]
        far = " and ".join(f"{value:.0e}" for value in apart[way])
        print(f"| {way} | {step:.2f} | {beside[0]:.2f} | {embed:.2f} | {beside[1]:.2f} | {far} |")
    for way, why in failed.items():
        print(f"| {way} | - | - | - | - | {why} |")


def synchronize_after(function: Callable[[], Any], device: str) -> Callable[[], None]:
    """Return a function that calls a function and waits until the accelerator is done."""

    def call() -> None:
        function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return call


def main() -> None:
    """Compare the ways in every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if options.device.startswith('cuda') else options.device}, torch {torch.__version__}")
    for title in SETTINGS:
        if options.device == "cpu" and "ResNet" in title:
            continue
        compare(title, options.ways, options.repeats, options.device)


if __name__ == "__main__":
    main()
