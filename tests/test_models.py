"""Split networks: shapes, names, parameter counts, seeds, and equality of stacks and single clients."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import config_of, make_local_training, slow, workspace_of
from omegaconf import OmegaConf
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from contrafed.core import registry
from contrafed.core.build import build_model
from contrafed.core.client_run import Choice, choose
from contrafed.core.errors import UserError
from contrafed.core.inputs import accepted_kinds
from contrafed.core.layers import HalvingPool, group_norm
from contrafed.core.randomness import torch_generator
from contrafed.core.split_model import SplitModel, Stages
from contrafed.models.resnet18 import Strided
from contrafed.models.shufflenet import Unit
from contrafed.training.batches import Batches, draw_dropout
from contrafed.training.client_stack import ClientStack

SMALL_MODELS = ("mlp", "cnn", "cnn_pmfl", "cnn5", "lenet")


def settings_of(name, **changes):
    return choose("model", {**OmegaConf.to_container(OmegaConf.load(registry.CONF / "model" / f"{name}.yaml")), **changes})


# tests/test_networks.py has model=torch.
MODELS = [
    name for name in sorted(registry.choices("model")) if name != "torch" and "image" in accepted_kinds(settings_of(name))
]


def make(name, channels=3, size=32, classes=10, seed=0, **changes):
    return build_model(settings_of(name, **changes), channels, (size, size), classes, seed)


class Raising(nn.Module):
    """A layer with a mistake."""

    def forward(self, x):
        return {}["size"]


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (1, (28, 28)), (3, (32, 32)), (3, (9, 40))])
@pytest.mark.parametrize("name", MODELS)
def test_any_image_gives_finite_logits_and_named_features(name, channels, size):
    model = build_model(settings_of(name), channels, size, 7, seed=0)
    with torch.no_grad():
        out = model(torch.randn(2, channels, *size), with_levels=True)
    assert out.logits.shape == (2, 7)
    assert torch.isfinite(out.logits).all()
    assert out.z.shape == (2, model.embedding_size)
    assert torch.equal(model.classifier(out.z), out.logits)
    assert len(out.levels) == len(model.encoder.stages)
    assert all(level.dim() == 2 and len(level) == 2 for level in out.levels)
    assert {n.split(".")[0] for n, _ in model.named_parameters()} <= {"encoder", "projector", "classifier"}
    assert name == "cnn_bn" or not list(model.buffers())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_resumes_from_what_any_stage_hands_on(name):
    model = make(name)
    x = torch.randn(2, 3, 32, 32)
    dropped = {layer: torch.rand(2, model.get_submodule(layer).in_features) for layer in model.dropped}
    with torch.no_grad():
        outputs, whole = model.encoder.outputs(x), model(x, dropped)
        assert len(outputs) == len(model.encoder.stages)
        for level, handed_on in enumerate([x, *outputs]):
            for found, expected in zip(model.resume(handed_on, level, dropped), whole, strict=True):
                assert found is expected or torch.equal(found, expected)


@pytest.mark.parametrize("name", ["cnn_pmfl", "squeezenet"])
def test_larger_images(name):
    with torch.no_grad():
        assert make(name, 3, 64)(torch.randn(2, 3, 64, 64)).logits.shape == (2, 10)


def test_parameter_counts_match_the_papers():
    fedcrl = make("cnn")
    assert (count(fedcrl), count(fedcrl.encoder)) == (259_914, 258_624)
    assert count(make("cnn_pmfl")) == 551_786
    assert count(make("cnn5", projection=[])) == 307_842
    assert make("cnn5").embedding_size == 256  # of MpFedcon's class centres
    # The usual MNIST CNN: 5x5 convolutions of 32 and 64 channels, 1024 -> 512 -> 10.
    assert count(make("cnn", 1, 28, hidden=512)) == 832 + 51_264 + 524_800 + 5_130
    assert count(make("cnn", 1, 28, hidden=512, padding=2)) == 1_663_370  # as McMahan et al. 2017 print for theirs


def test_too_small_an_image_is_padded_instead():
    assert make("cnn", 1, 8).encoder.stages[0].padding == (2, 2)
    assert make("cnn", 1, 28).encoder.stages[0].padding == (0, 0)


def test_the_representation_is_taken_before_or_after_the_relu():
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        after, before = make("cnn")(x).z, make("cnn", rep_relu=False)(x).z
    assert (before < 0).any()
    assert torch.equal(after, before.relu())


@pytest.mark.parametrize("name", MODELS)
def test_later_stages_continue_from_any_stage(name):
    """FedMLB's hybrid paths: the stages above l on the output of stage l give the same logits."""
    model, x = make(name, 1, 8), torch.randn(2, 1, 8, 8)
    pairs = list(zip(model.encoder.stages, model.encoder.tails, strict=True))
    with torch.no_grad():
        out = model(x, with_levels=True)
        for (stage, tail), level in zip(pairs, out.levels, strict=True):
            x = stage(x)
            assert torch.equal(level, x if x.dim() == 2 else x.mean((2, 3)))
            x = tail(x)
        assert torch.equal(model.classifier(model.projector(x)), out.logits)


def test_resnet_levels_have_the_stages_channels_before_the_last_relu():
    with torch.no_grad():
        out = make("resnet18")(torch.randn(2, 3, 32, 32), with_levels=True)
    assert [level.shape[1] for level in out.levels] == [64, 64, 128, 256, 512]
    assert (out.levels[-1] < 0).any()  # a pooled ReLU output could not be negative


@pytest.mark.parametrize(("width", "own"), [(4, [True, True, False]), (16, [False, False, False])])
def test_narrow_shortcuts_of_the_resnet_avoid_onednns_strided_convolution(width, own):
    model = make("resnet18", width=width).double()
    shortcuts = [layer for name, layer in model.named_modules() if name.endswith("shortcut.0")]
    assert [isinstance(layer, Strided) for layer in shortcuts] == own
    for layer in shortcuts:
        x = torch.randn(2, layer.in_channels, 9, 8, dtype=torch.float64)
        torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, stride=2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters", "levels"),
    [
        ("shufflenet", 1_012_108, [24, 240, 480, 960]),
        ("squeezenet", 781_156, [96, 128, 128, 256, 256, 384, 384, 512, 512]),
        ("vgg9", 3_539_428, [32, 64, 128, 128, 256, 256, 512, 512]),
        ("mobilenet_v2", 2_369_380, [32, 16, 24, 32, 64, 96, 160, 1280]),
    ],
)
def test_backbones_of_fedrcls_table_6(name, parameters, levels):
    """Sizes with 100 classes. FedRCL compares the first five levels, which follow the activation if there is one."""
    model = make(name, classes=100)
    with torch.no_grad():
        out = model(torch.randn(2, 3, 32, 32), with_levels=True)
    assert count(model) == parameters
    assert [level.shape[1] for level in out.levels] == levels
    assert out.levels[0].min() >= 0
    norms = [module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)]
    assert {module.num_groups for module in norms} == {2}


def test_shufflenet_shuffles_channels_between_its_groups():
    """Without the shuffle an output channel of a unit would depend on one group's inputs alone."""
    unit = Unit(24, 24, 1, 2)
    unit.squeeze[1] = unit.depthwise[1] = unit.expand[1] = torch.nn.Identity()  # a norm spreads what it sees
    for parameter in unit.parameters():
        parameter.data.abs_()  # so that no ReLU stops a gradient
    x = torch.rand(1, 24, 4, 4, requires_grad=True)
    unit(x)[0, 0].sum().backward()
    assert (x.grad.sum((0, 2, 3)).view(3, 8) > 0).all(1).tolist() == [True, True, False]  # two of its group's channels


@pytest.mark.parametrize("name", [*SMALL_MODELS, "resnet18", "squeezenet", "shufflenet", slow("mobilenet_v2"), "vgg9"])
def test_a_stack_of_three_equals_one_by_one(name):
    small = {"resnet18": {"width": 4}}.get(name, {})
    model = make(name, 1, 8, **small).double()
    sets = [dict(make(name, 1, 8, seed=s, **small).double().named_parameters()) for s in range(3)]
    x = torch.randn(3, 2, 1, 8, 8, dtype=torch.float64)

    def loss(params, images):
        out = functional_call(model, params, (images,), {"with_levels": True})
        return sum(part.square().sum() for part in (out.logits, out.z, *out.levels)), out.logits

    stacked = {n: torch.stack([s[n].detach() for s in sets]).requires_grad_() for n in sets[0]}
    losses, logits = vmap(loss, randomness="error")(stacked, x)
    losses.sum().backward()
    for row, params in enumerate(sets):
        alone, alone_logits = loss(params, x[row])
        torch.testing.assert_close(logits[row], alone_logits, rtol=1e-9, atol=1e-9)
        alone.backward()
        for n, p in params.items():
            torch.testing.assert_close(stacked[n].grad[row], p.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (3, 2)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_pool_without_a_gradient_is_torchs(size, memory_format):
    x = torch.randn(4, 6, *size).round(decimals=1).to(memory_format=memory_format)  # rounded: windows with ties
    x[0, 0, 0, 0] = math.nan
    x[1, :, 1, 1] = -math.inf
    pool = HalvingPool()
    with torch.no_grad():
        fast = pool(x)
        stacked = vmap(pool)(x.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(fast, pool(x), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(stacked, pool(x), rtol=0, atol=0, equal_nan=True)
    assert fast.is_contiguous(memory_format=memory_format)


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    a, b, c = (dict(make("cnn", seed=s).named_parameters()) for s in (5, 5, 6))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["encoder.stages.0.weight"], c["encoder.stages.0.weight"])


def test_building_seeds_no_accelerator(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    make("mlp", 1, 8)
    assert not seeded


def test_kaiming_normal_where_pmfl_has_it():
    model = make("cnn_pmfl")
    weight = model.projector[0].weight  # 2048 -> 256
    assert weight.std().item() == pytest.approx((2 / 2048) ** 0.5, rel=0.02)
    assert weight.abs().max() > 3 * weight.std()  # a uniform draw would end at 1.73 stds
    biases = {n: p.abs().max().item() for n, p in model.named_parameters() if n.endswith("bias")}
    assert [n for n, largest in biases.items() if largest] == ["classifier.bias"]


def test_dropout_factors_reach_the_classifier_only():
    model = make("cnn", dropout=0.3)
    x, mask = torch.randn(2, 3, 32, 32), torch.zeros(2, 128)
    mask[:, :64] = 1 / 0.7
    with torch.no_grad():
        plain, dropped = model(x), model(x, {"classifier": mask})
    assert torch.equal(plain.z, dropped.z)
    torch.testing.assert_close(dropped.logits, model.classifier(plain.z * mask))


def test_dropout_before_each_hidden_layer_and_the_classifier():
    """FedAU's network: the loss and its gradient change at each place, and each has separate draws."""
    config = config_of("strategy=fedavg", "num_clients=4", "model=cnn_pmfl", "model.hidden=[12,9]", "model.dropout=0.4")
    workspace = workspace_of(config, dtype=torch.float64)
    client, params = workspace.client_class(workspace, [0]), workspace.initial
    assert workspace.model.dropped == ("classifier", "projector.0", "projector.2")
    stack = ClientStack([0], [workspace.federation.partition.train(0)], 1, params, {}, {})
    batch = Batches.draw(workspace, make_local_training(iterations=1, batch_size=16), stack, "batches").at(0, 1)
    assert {layer: mask.shape[-1] for layer, mask in batch.dropout.items()} == {
        "classifier": 9, "projector.0": 128, "projector.2": 12,
    }  # fmt: skip
    factors = torch.cat([mask.flatten() for mask in batch.dropout.values()])
    assert set(factors.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert not torch.equal(batch.dropout["projector.0"][..., :9], batch.dropout["classifier"])
    whole = {layer: torch.ones_like(mask) for layer, mask in batch.dropout.items()}

    def loss(dropout):
        one = tree_map(lambda t: t[0], batch._replace(dropout=dropout))
        return client.loss(params, one, {})["loss"].item()

    losses = [loss(whole), *(loss(whole | {layer: mask}) for layer, mask in batch.dropout.items()), loss(batch.dropout)]
    assert len({round(value, 9) for value in losses}) == 5
    with torch.no_grad():
        assert losses[0] == client.task_loss(workspace.model(batch.x[0]), tree_map(lambda t: t[0], batch)).item()


def test_the_classifiers_dropout_is_drawn_whatever_other_layers_have_it():
    drawn = [draw_dropout(0.2, layer, 9, 50, 0, "batches", 3, 1) for layer in ("classifier", "projector.0", "projector.2")]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    stream = torch.rand(50, 9, generator=torch_generator(0, "batches dropout", 3, 1))
    assert torch.equal(drawn[0], (stream >= 0.2).float() / 0.8)


def test_projection_is_the_projector():
    model = make("cnn", projection=[256, 256])
    assert model.embedding_size == 256
    assert count(model.projector) == 128 * 256 + 256 + 256 * 256 + 256


def test_faults_are_one_line(expect_error):
    for key, (channels, size), changes in (
        ("model", (1, 7), {}),
        ("model", (4, 32), {}),
        ("model.hiden", (1, 8), {"hiden": 3}),
        ("model.dropout", (1, 8), {"dropout": 1.0}),
        ("model", (1, 8), {"channels": [8] * 4}),
        ("model.channels", (1, 8), {"channels": []}),
    ):
        with expect_error(key):
            build_model(settings_of("cnn", **changes), channels, (size, size), 10, 0)


def test_group_norm_computes_in_full_precision_whatever_comes_in():
    """Autocast on CUDA ensures it for a single client, but not for a stack."""
    norm, x = group_norm(8, 2), torch.randn(3, 8, 4, 4).bfloat16()
    assert torch.equal(norm(x), norm(x.float()))
    assert norm(x).dtype == torch.float32
    assert norm.double()(x.double()).dtype == torch.float64
    norm.float()
    stacked = vmap(lambda weight, image: functional_call(norm, {"weight": weight}, image))
    assert stacked(norm.weight.expand(2, 8), x.expand(2, *x.shape)).dtype == torch.float32


def built_by(build):
    """Return a user's model with this ``build`` for grey images."""
    module = SimpleNamespace(__name__="mine", __file__=__file__, build=build)
    return lambda **options: build_model(Choice("mine", module, None, {}), 1, (8, 8), 10, 0, **options)


def split_of(stage, width=16):
    """Return a ``build`` of one stage and a classifier of so many inputs."""

    def build(config, in_channels, image_size, num_classes):
        return SplitModel(Stages([stage()], [nn.ReLU()]), nn.Identity(), nn.Linear(width, num_classes))

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            split_of(lambda: nn.Linear(64, 16)),
            "model=mine cannot take images of 1x8x8: mat1 and mat2 shapes cannot be multiplied",
        ),
        (
            split_of(lambda: nn.Linear(8, 16)),
            "mine.build must return a contrafed.core.split_model.SplitModel "
            "whose classifier gets (2, 16) of 2 images, got (2, 1, 8, 16); "
            "nn.Flatten() makes a row of each image",
        ),
        (split_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), width=17), "gets (2, 17) of 2 images, got (2, 16)"),
        (split_of(lambda: nn.Flatten(0), width=128), "gets (2, 128) of 2 images, got (128,); nn.Flatten() "),
        (split_of(Raising), "cannot take images of 1x8x8: KeyError: 'size' (" + __file__),
    ],
)
def test_layers_that_do_not_fit_each_other_are_one_line(build, message):
    with pytest.raises(UserError) as found:
        built_by(build)()
    assert message in str(found.value)
    assert "\n" not in str(found.value)
    assert isinstance(built_by(build)(tried=False), SplitModel)


def test_trying_a_model_leaves_weights_and_random_numbers_as_they_are():
    torch.manual_seed(3)
    tried, after = make("resnet18", 1, 8), torch.rand(2)
    torch.manual_seed(3)
    plain, expected = build_model(settings_of("resnet18"), 1, (8, 8), 10, 0, tried=False), torch.rand(2)
    assert torch.equal(after, expected)
    assert all(torch.equal(a, b) for a, b in zip(tried.parameters(), plain.parameters(), strict=True))
