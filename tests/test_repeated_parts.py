"""Partitions of your own are asked twice, and have the same parts."""

import pytest
import test_own_parts
from test_own_parts import change_part, make_run, piece

from contrafed.data.federation import load_federation

home = test_own_parts.home  # a fixture


@pytest.mark.parametrize("order", ["np.random.default_rng().permutation(len(draw.y))", "torch.randperm(len(draw.y)).numpy()"])
def test_a_partition_has_the_same_parts_when_it_is_asked_again(home, expect_error, order):
    change_part(home, "partition", r"    return np.split.*?\n", f"    return np.array_split({order}, draw.num_clients)\n")
    change_part(home, "partition", "import numpy as np\n", "import numpy as np\nimport torch\n")
    with expect_error("partition"):
        load_federation(make_run(home, "partition").client)


@pytest.mark.parametrize("name", ["lazy", "explicit"])
def test_so_have_partitions_that_say_the_parts_themselves(home, expect_error, name):
    drawn = "order = np.random.default_rng().permutation(np.flatnonzero(~test))\n    return np.array_split(order, 4), None"
    text = f"def explicit(config, test, num_clients):\n    {drawn}\n"
    if name == "lazy":
        text = piece("lazy").replace('generator(seed, "common examples")', "np.random.default_rng()")
    change_part(home, "partition", r"def split.*?\n\n\n", f"{text}\n\n")
    with expect_error("partition"):
        load_federation(make_run(home, "partition").client)
