"""A user's network from torch's transformer layers: its levels, its stack, its layers of dropout."""

import pytest
import torch
from helpers import config_of, stacked_and_alone, workspace_of
from test_models import built_by
from torch import nn
from torch.func import functional_call, vmap

from contrafed.core.split_model import SplitModel, Stages


class Tokens(nn.Module):
    """Patches of 2x2 pixels as tokens (b, n, width)."""

    def __init__(self, channels, width):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, stride=2)

    def forward(self, x):
        return self.patches(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean token."""

    def forward(self, x):
        return x.mean(1)


def transformer(dropout=0.0):
    """Two stages of tokens for grey images of 8x8. Torch's layer has layers of dropout at any rate."""

    def build(config, in_channels, image_size, num_classes):
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True)
        encoder = Stages([Tokens(in_channels, 8), layer], [nn.Identity(), Mean()])
        return SplitModel(encoder, nn.Identity(), nn.Linear(8, num_classes))

    return built_by(build)()


def built(stage, tail, projector=None):
    """Return the model of a ``build`` of one stage and its tail."""

    def build(config, in_channels, image_size, num_classes):
        return SplitModel(Stages([stage(in_channels)], [tail]), projector or nn.Identity(), nn.Linear(8, num_classes))

    return built_by(build)()


def test_levels_are_mean_tokens():
    model, x = transformer(), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        out, tokens = model(x, with_levels=True), model.encoder.stages[0](x)
    assert tokens.shape == (2, 16, 8)
    torch.testing.assert_close(out.levels[0], sum(tokens[:, i] for i in range(16)) / 16)
    torch.testing.assert_close(out.levels[1], out.z)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch cannot batch some layers in a stack
@pytest.mark.parametrize("graded", [True, False])
def test_a_stack_of_three_equals_one_by_one(graded):
    model, x = transformer().double(), torch.randn(3, 2, 1, 8, 8, dtype=torch.float64)
    sets = {n: torch.stack([p.detach() * factor for factor in (1, 2, -1)]) for n, p in model.named_parameters()}

    def levels(params, images):
        return functional_call(model, params, (images,), {"with_levels": True}).levels

    with torch.set_grad_enabled(graded):
        stacked = vmap(levels)(sets, x)
        for row in range(3):
            for found, alone in zip(stacked, levels({n: p[row] for n, p in sets.items()}, x[row]), strict=True):
                torch.testing.assert_close(found[row], alone, rtol=1e-9, atol=1e-9)


def test_layers_of_dropout_are_a_fault_where_they_would_drop(expect_error):
    assert transformer().dropout == 0
    with expect_error("model"):
        transformer(dropout=0.1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_stack_trains_as_its_clients_alone():
    """For a model in evaluation mode torch would fuse the layer without a gradient, and clients would train one by one."""
    workspace = workspace_of(config_of("strategy=fedavg", "num_clients=3"), model=transformer(), dtype=torch.float64)
    seen = []

    class Watched(workspace.client_class):
        def local_update(self, stack):
            seen.append(len(stack))
            return super().local_update(stack)

    stacked_and_alone(workspace, kind=Watched, rounds=1)
    assert seen == [3, 1, 1, 1]


@pytest.mark.parametrize("layer", [lambda: nn.MultiheadAttention(8, 2, dropout=0.1)])
def test_what_a_model_may_not_hold(layer, expect_error):
    with expect_error("model"):
        built(lambda channels: nn.Sequential(Tokens(channels, 8), layer()), Mean())


def test_an_encoder_makes_rows(expect_error):
    """Heads that train alone receive the encoder's output, which methods distinguish from images by its shape."""
    with expect_error("model"):
        built(lambda channels: Tokens(channels, 8), nn.Identity(), nn.Sequential(Mean()))
