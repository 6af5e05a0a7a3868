"""model=torch: any nn.Module is split at its head, has weights of a file, frozen parts, and layers that drop."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import build_received, checked_jobs, close, config_of, same, stacked_and_alone
from networks import Small
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny import engines_agree
from torch import nn

from contrafed.core import registry
from contrafed.core.build import build_model
from contrafed.core.client_run import Choice, choose, client_run_of
from contrafed.core.drawn import Drawn, draw_uniform
from contrafed.core.randomness import torch_generator
from contrafed.core.split_model import SplitModel, Stages
from contrafed.core.tensors import size_of
from contrafed.runs.run import run
from contrafed.training.batches import draw_numbers
from contrafed.training.errors import LocalError
from contrafed.training.workspace import Workspace

DEFAULTS = OmegaConf.to_container(OmegaConf.load(registry.CONF / "model" / "torch.yaml"))
RUN = (
    "model=torch", "model.target=networks.Small", "engine=local", "tracker=none", "num_clients=4", "num_rounds=2",
    "eval_every=2", "participation=full", "partition.min_client_size=20", "strategy=fedavg", "strategy.local.iterations=2",
)  # fmt: skip


def make(target="networks.Small", channels=3, size=8, classes=10, seed=0, **changes):
    return build_model(choose("model", DEFAULTS | {"target": target} | changes), channels, (size, size), classes, seed)


@cache
def workspace_for(*overrides):
    return Workspace(client_run_of(config_of(*RUN, *overrides)), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------- a split


def test_the_split_network_computes_what_the_network_does():
    model, x = make(classes=7), torch.randn(3, 3, 8, 8)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(torch_generator(0, "model init").initial_seed())
        network = Small().eval()
    with torch.no_grad():
        out = model(x, with_levels=True)
        assert torch.equal(out.logits, network(x))
    assert torch.equal(out.levels[0], out.z)
    assert (model.embedding_size, model.dropout) == (6, 0.3)
    assert model.own_names["head.1.weight"] == "classifier.weight"
    assert same(model.tensors(), make("networks.make_small", classes=7).tensors())
    assert not same(model.tensors(), make(classes=7, seed=1).tensors())


def test_grey_images_are_repeated_and_resized():
    grey = workspace_for("model.image_size=16", "dataset.normalize=imagenet")
    index = torch.arange(3)
    found, raw = grey.images(index), grey.federation.data.x[:3].double() / 255
    assert found.shape == (3, 3, 16, 16)
    mean, std = torch.tensor([0.485, 0.456, 0.406]).double(), torch.tensor([0.229, 0.224, 0.225]).double()
    wanted = (raw.repeat(1, 3, 1, 1) - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    wanted = torch.nn.functional.interpolate(wanted, (16, 16), mode="bilinear", antialias=True)
    torch.testing.assert_close(found, wanted)
    own = Workspace(client_run_of(config_of("model=mlp", "model.image_size=12", "dataset.normalize=imagenet")))
    assert own.images(index).shape == (3, 1, 12, 12)
    assert own.scale[0, 0].item() == pytest.approx(1 / 255 / np.mean([0.229, 0.224, 0.225]))


@pytest.mark.parametrize("strategy", ["fedavg", "moon", "perfedavg"])
def test_a_stack_equals_its_clients_alone_with_all_that_drops(strategy):
    overrides = ("strategy.local.iterations=null", "strategy.local.epochs=1", "strategy.local.last_batch=merge")
    stacked_and_alone(workspace_for(*overrides, f"strategy={strategy}", "partition=iid", "num_clients=60"), [0, 1, 2], rounds=1)


def test_iterates_that_a_client_does_not_have_are_no_zeros():
    """Of clients with unequal steps some have fewer. An output of zeros is NaN here."""
    overrides = ("model.target=networks.Normed", "strategy=pmfl", "strategy.local.iterations=null", "strategy.local.epochs=1")
    stacked_and_alone(workspace_for(*overrides, "partition=dirichlet"))


def test_what_drops_is_a_function_of_the_seed():
    numbers = draw_numbers(2000, 0, "batches", 1, 0).squeeze(1)
    found = draw_uniform(numbers, 1, 30)
    assert found.mean().item() == pytest.approx(0.5, abs=0.01)
    assert found.var().item() == pytest.approx(1 / 12, abs=0.002)
    assert (torch.corrcoef(torch.cat([found.T, draw_uniform(numbers, 2, 30).T])) - torch.eye(60)).abs().max() < 0.12
    layer, x = Drawn(0.25, 3, 1), torch.ones(2000, 4, 3, 3)
    assert torch.equal(layer(x), x)
    layer.numbers = numbers
    out = layer(x)
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (out == out[..., :1, :1]).all()
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ValueError, match="rows"):
        layer(torch.ones(3, 4))


def test_dropout_changes_the_training_and_not_the_evaluation():
    updates, scores = [], []
    for rate in (0.0, 0.4):
        workspace = workspace_for(f"model.args={{rate: {rate}}}")
        client = workspace.client_class(workspace, [0])
        updates.append(client.update([build_received(workspace)], 1)[0].tensors)
        scores.append(client.evaluate_clients([build_received(workspace)], 1, split="train")[0].metrics)
    assert scores[0] == scores[1]
    assert not same(*updates)


def test_a_head_is_named_by_its_number_in_a_sequence():
    assert make(target="networks.sequence", channels=1, head=3).classifier.in_features == 5


# ---------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"target": None}, "model.target"),
        ({"target": "Small"}, "model.target"),
        ({"target": "no_such_package.Small"}, "model.target"),
        ({"target": "networks.Smal"}, "model.target"),
        ({"target": "os.system", "args": {"command": "true"}}, "model.target"),
        ({"target": "networks.without_annotation"}, "model.target"),
        ({"target": "networks.wrong"}, "model.target"),
        ({"args": {"depth": 3}}, "model.args"),
        ({"args": {"width": -1}}, "model.target"),
        ({"head": "fc"}, "model.head"),
        ({"head": "stem.0"}, "model.head"),
        ({"head": "inner.0"}, "model.head"),
        ({"target": "networks.Grey", "args": {"mistake": "after"}}, "model.head"),
        ({"target": "networks.Grey", "args": {"mistake": "functional"}}, "model.target"),
        ({"target": "networks.Grey", "args": {"mistake": "attention"}}, "model.target"),
        ({"target": "networks.Grey", "args": {"mistake": "shared"}}, "model.target"),
        *(({"target": "networks.Grey", "args": {"mistake": name}}, "model.target") for name in ("mixing", "output")),
        ({"freeze": ["sten.*"]}, "model.freeze"),
        ({"freeze": ["*"]}, "model.freeze"),
        ({"freeze": ["stem"]}, "model.freeze"),
        ({"freeze": ["encoder"]}, "model.freeze"),
        ({"freeze": ["!stem.*"]}, "model.freeze"),
        ({"freeze": ["*.running_mean"]}, "model.freeze"),
        ({"image_size": 4}, "model.image_size"),
        ({"pretrained": "absent.pt"}, "model.pretrained"),
        ({"target": "networks.Grey", "args": {"mistake": "squeezing"}}, "model.target"),
        ({"target": "networks.Normalised"}, "model.target"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(changes, key, expect_error):
    with expect_error(key):
        make(**{"channels": 1} | changes)


# ----------------------------------------------------------------------------------------------------------------- weights


def replace_tensors(state, **changes):
    return {name: value for name, value in (state | changes).items() if value is not None}


def test_weights_come_from_a_file(tmp_path):
    network = Small(num_classes=10)
    save_file(network.state_dict(), tmp_path / "a.safetensors")
    torch.save({"state_dict": {f"module.{n}": v for n, v in network.state_dict().items()}}, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        model = make(pretrained=str(tmp_path / name))
        for own, value in network.named_parameters():
            assert torch.equal(model.tensors()[model.own_names[own]], value)
        assert model.notices == ()
    drawn = make(classes=4)
    for classes, state in (
        (4, network.state_dict()),
        (10, replace_tensors(network.state_dict(), **{"head.1.weight": None, "head.1.bias": None})),
    ):
        save_file(state, tmp_path / "b.safetensors")
        model = make(classes=classes, pretrained=str(tmp_path / "b.safetensors"))
        assert "head starts as drawn" in model.notices[0]
        assert torch.equal(model.tensors()["encoder.stages.0.net.branch.weight"], network.branch.weight)
    assert torch.equal(make(classes=4, pretrained=str(tmp_path / "a.pt")).classifier.weight, drawn.classifier.weight)


@pytest.mark.parametrize(
    "changes",
    [
        {"branch.bias": None},
        {"branch.scale": torch.ones(2)},
        {"branch.bias": torch.ones(3)},
        {"branch.bias": torch.full((4,), torch.nan)},
        {"head.1.weight": torch.ones(10, 5)},
    ],
)
def test_a_file_that_does_not_fit_is_one_line(changes, tmp_path, expect_error):
    save_file(replace_tensors(Small(num_classes=10).state_dict(), **changes), tmp_path / "a.safetensors")
    with expect_error("model.pretrained"):
        make(pretrained=str(tmp_path / "a.safetensors"))


def test_a_sweep_takes_weights_that_fit_the_data_and_refuses_a_file_that_nothing_can_read(tmp_path, expect_error):
    """It assumes images of another size before its first job."""
    config = config_of("model=mlp")["model"]
    save_file(build_model(choose("model", config), 1, (8, 8), 10, 0).state_dict(), tmp_path / "a.safetensors")
    sweep = ("model=mlp", "num_clients=4", "strategy=fedavg,fedprox")
    runs = checked_jobs(*sweep, f"model.pretrained={tmp_path}/a.safetensors")
    assert [run.client.model.values["pretrained"] for run in runs] == [f"{tmp_path}/a.safetensors"] * 2
    with expect_error():
        checked_jobs(*sweep, f"model.pretrained={tmp_path}/b.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"no weights")
    with expect_error():
        checked_jobs(*sweep, f"model.pretrained={tmp_path}/b.safetensors")


def test_a_network_of_ones_own_can_name_the_tensors_of_a_file(tmp_path, expect_error):
    """As torchvision's names of a body whose head is the classifier."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
    state = {**body.state_dict(), "fc.weight": torch.ones(10, 6), "fc.bias": torch.ones(10)}
    save_file({name: torch.full_like(value, 2) for name, value in state.items()}, tmp_path / "a.safetensors")
    mapped = {name: f"encoder.stages.0.{name}" for name in body.state_dict()}
    mapped |= {"fc.weight": "classifier.weight", "fc.bias": "classifier.bias"}

    def make_own(names):
        def build(config, in_channels, image_size, num_classes):
            model = SplitModel(Stages([body], [nn.ReLU()]), nn.Identity(), nn.Linear(6, num_classes))
            model.own_names = names
            return model

        module = SimpleNamespace(__name__="mine", __file__=__file__, build=build)
        values = {"pretrained": f"{tmp_path}/a.safetensors", "freeze": ["1.weight"] if names else []}
        return build_model(Choice("mine", module, None, values), 1, (8, 8), 10, 0)

    with expect_error("model.pretrained") as found:
        make_own({})
    assert "model.own_names" in str(found.value)
    model = make_own(mapped)
    assert all((value == 2).all() for value in model.state_dict().values())
    assert model.frozen_names == {"encoder.stages.0.1.weight"}


@pytest.mark.parametrize(
    "content", [b"", b"no weights", (64).to_bytes(8, "little") + b'{"x":', Small(), {"epoch": 3}, b"secret"]
)
def test_other_files_are_one_line(content, tmp_path, expect_error):
    file = tmp_path / "a.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with expect_error("model.pretrained"):
        make(pretrained=str(file))


# ------------------------------------------------------------------------------------------------------------------ frozen


def test_frozen_parameters_neither_train_nor_are_sent():
    plain, workspace = workspace_for(), workspace_for("model.freeze=[stem.*,encoder.*.branch.*]")
    model = workspace.model
    names = {name for name in plain.model.tensors() if ".stem." in name or ".branch." in name}
    assert plain.model.tensors().keys() - model.tensors().keys() == names == model.frozen_names
    down, up = workspace.client_class.message_spec(model, workspace.config)
    assert not any(name.partition("/")[2] in names for name in (*down, *up))
    before = {name: value.clone() for name, value in model.frozen_tensors().items()}
    for update in stacked_and_alone(workspace, [0, 1, 2]):
        assert size_of(update.tensors) == size_of({n: v for n, v in plain.initial.items() if n not in names})
        assert any(not torch.equal(v, workspace.initial[n.partition("/")[2]]) for n, v in update.tensors.items())
    assert same(model.frozen_tensors(), before)


def test_outputs_of_a_frozen_encoder_are_computed_once():
    """Head and frozen encoder give the bits of training the head of the same model."""
    frozen = workspace_for("model.freeze=[encoder.*]", "strategy.local.iterations=60")
    calls = []
    frozen.model.encoder.register_forward_hook(lambda *_: calls.append(1))
    (update,) = frozen.client_class(frozen, [0]).update([build_received(frozen)], 1)
    assert set(update.tensors) == {"model/classifier.weight", "model/classifier.bias"}
    assert len(calls) < 5
    plain = workspace_for("strategy.local.iterations=60", "model.buffers=frozen")

    class Head(plain.client_class):
        def local_update(self, stack):
            self.train(stack, parts=("classifier",))
            return self.make_upload(stack)

    (other,) = Head(plain, [0]).update([build_received(plain)], 1)
    assert all(torch.equal(value, other.tensors[name]) for name, value in update.tensors.items())


SAME_IMAGES = (
    "model.freeze=[encoder.*]", "strategy.local.epochs=3", "strategy.local.iterations=null", "strategy.local.augment=[]",
    "strategy.local.lr=0.1", "strategy.local.batch_size=16", "strategy.local.weight_decay=0", "strategy.local.clip_norm=null",
    "strategy.local.lr_decay=1",
)  # fmt: skip


def test_a_method_that_reads_images_has_them_also_if_the_encoder_is_frozen():
    """FedMLB without its terms is FedAvg, and FedRCL and FitNet have the levels of the images."""
    off = ("strategy=fedmlb", "strategy.hybrid_weight=0", "strategy.distil_weight=0")
    ours, fedavg = (workspace_for(*SAME_IMAGES, *chosen) for chosen in (off, ("strategy=fedavg",)))
    updates = [each.client_class(each, [0]).update([build_received(each)], 1)[0] for each in (ours, fedavg)]
    close(updates[0].tensors, updates[1].tensors)
    metrics = {}
    for method in ("fedrcl", "fedavg_fitnet"):
        workspace = workspace_for(*SAME_IMAGES, f"strategy={method}")
        (update,) = workspace.client_class(workspace, [0]).update([build_received(workspace)], 1)
        metrics[method] = update.metrics
    assert metrics["fedrcl"]["contrast"] > 0.1
    assert metrics["fedavg_fitnet"]["hint"] == pytest.approx(0, abs=1e-28)  # of equal levels: at most rounding, squared


def test_a_rate_of_one_drops_all_as_torchs_does():
    layer, x = Drawn(1.0, 0, None), torch.ones(2, 3)
    layer.numbers = torch.tensor([1, 2])
    assert torch.equal(layer(x), nn.functional.dropout(x, 1.0, training=True))


def test_levels_of_encoder_outputs_are_refused():
    workspace = workspace_for(*SAME_IMAGES)

    class Levels(workspace.client_class):
        def loss(self, params, batch, loss_inputs):
            return {"loss": self.task_loss(self.forward(params, batch, with_levels=True), batch)}

    with pytest.raises(LocalError, match="reads_images"):
        Levels(workspace, [0]).update([build_received(workspace)], 1)


def test_a_run_writes_the_whole_model_and_its_lines(tmp_path, capsys):
    save_file(Small().state_dict(), tmp_path / "a.safetensors")
    changes = ("model.freeze=[stem.*]", f"model.pretrained={tmp_path}/a.safetensors", "model.image_size=12")
    summary = run(config_of(*RUN, *changes, f"output_dir={tmp_path}/run"))
    said = capsys.readouterr().out
    for line in ("so the head starts as drawn", "120 of ", "repeated in 3 channels and resized from 8x8 to 12x12"):
        assert line in said
    file = f"{summary['folder']}/model.safetensors"
    written = load_file(file)
    model = make(size=12, channels=1, pretrained=file)
    assert written.keys() == model.state_dict().keys()
    assert torch.equal(written["encoder.stages.0.net.stem.0.weight"], load_file(tmp_path / "a.safetensors")["stem.0.weight"])
    again = run(config_of(*RUN, *changes, f"init_from={file}", f"output_dir={tmp_path}/b"))
    assert again["bytes_up_per_client"] == summary["bytes_up_per_client"] < 4 * sum(v.numel() for v in written.values())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_engines_agree_bit_for_bit_with_all_that_drops(tmp_path, engine):
    changes = ("model.target=torchvision.models.efficientnet_b0", "model.freeze=[features.0.*]", "dataset.fraction=0.1")
    engines_agree(tmp_path, engine, *RUN, *changes)


def test_what_vmap_refuses_runs_one_by_one_and_a_line_says_so(tmp_path, capsys):
    changes = ("model.target=networks.Grey", "model.args={mistake: branch}", "engine.stack_size=4")
    assert run(config_of(*RUN, *changes, f"output_dir={tmp_path}/run"))["failures"] == 0
    assert capsys.readouterr().out.count("one by one") == 1


# ------------------------------------------------------------------------------------------------- networks of other people

NETWORKS = [
    ("torchvision.models.resnet18", {}, "fc", ()),
    ("torchvision.models.mobilenet_v3_small", {}, "classifier.3", ()),
    ("torchvision.models.efficientnet_b0", {}, "classifier.1", ()),
    ("torchvision.models.vit_b_16", {"image_size": 32}, "heads.head", ("model.image_size=32",)),
    ("timm.models.resnet10t", {}, "fc", ("model.image_size=32",)),
    (
        "transformers.ViTForImageClassification",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        },
        "classifier",
        ("model.image_size=32",),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "args", "head", "more"), NETWORKS, ids=[each[0] for each in NETWORKS])
def test_networks_that_people_have(target, args, head, more, tmp_path, capsys):
    """Without downloads. Two clients as a stack, and alone, give nearly the same model."""
    pytest.importorskip(target.partition(".")[0])
    models = []
    for stack in (1, 2):
        changes = (
            f"model.target={target}",
            "model.args={" + ", ".join(f"{key}: {value}" for key, value in args.items()) + "}",
            f"model.head={head}",
            f"engine.stack_size={stack}",
        )
        small = ("num_clients=2", "num_rounds=1", "eval_every=1", "strategy.local.lr=0.01", "dataset.fraction=0.1")
        summary = run(config_of(*RUN, *small, *changes, *more, f"output_dir={tmp_path}/{stack}"))
        assert summary["failures"] == 0
        assert "one by one" not in capsys.readouterr().out
        models.append(load_file(f"{summary['folder']}/model.safetensors"))
    assert np.mean([float((models[0][n] - v).abs().max()) for n, v in models[1].items()]) < 1e-3
