"""Networks that flatten with view, which needs images with channels first in memory."""

from types import SimpleNamespace

import pytest
import torch
from helpers import config_of
from networks import View
from test_networks import DEFAULTS, RUN, make
from torch import nn

from contrafed.core.build import build_model
from contrafed.core.client_run import Choice
from contrafed.core.randomness import torch_generator
from contrafed.core.split_model import SplitModel, Stages
from contrafed.runs.run import run


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_that_flattens_by_view_gets_images_that_allow_it(channels):
    model = make("networks.View", channels, args={"channels": channels})
    images = torch.randn(2, 8, 8, channels).movedim(-1, 1)  # as in a run
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(torch_generator(0, "model init").initial_seed())
        network = View(channels).eval()
    assert torch.equal(model(images).logits, network(images.clone(memory_format=torch.contiguous_format)))


def test_a_file_in_the_current_folder_is_put_on_the_path(tmp_path, monkeypatch, expect_error):
    (tmp_path / "nets_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with expect_error("model.target"):
        make("nets_here.Small")


def test_such_a_network_trains_alone_and_in_a_stack(tmp_path):
    alike = [
        run(config_of(*RUN, "model.target=networks.View", f"engine.stack_size={size}", f"output_dir={tmp_path}/{size}"))
        for size in (1, 2)
    ]
    assert alike[0]["accuracy_final"] == pytest.approx(alike[1]["accuracy_final"], abs=0.02)


def test_a_network_of_ones_own_build_that_flattens_by_view_is_one_line(expect_error):
    def build(config, in_channels, image_size, num_classes):
        return SplitModel(Stages([View(in_channels, rate=0.0)], [nn.Identity()]), nn.Identity(), nn.Linear(10, num_classes))

    choice = Choice("own", SimpleNamespace(build=build, __name__="own.net", __file__="net.py"), SimpleNamespace(), DEFAULTS)
    with expect_error():
        build_model(choice, 1, (8, 8), 10, 0)
