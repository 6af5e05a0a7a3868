"""Split networks into encoder, projector and classifier, and name the features between them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from contrafed.core.buffers import in_training, list_buffers, list_normalisation
from contrafed.core.client_run import Buffers
from contrafed.core.drawn import NETWORK, Drawn, drawing


class Features(NamedTuple):
    """The outputs of a model for b images."""

    logits: Tensor  # (b, C)
    z: Tensor  # (b, D) input of the classifier: the representation that contrastive losses compare
    levels: tuple[Tensor, ...]  # (b, C_l) pooled outputs of the encoder's stages, lowest first, or empty unless requested

    def select_levels(self, which: int | Literal["last"]) -> tuple[Tensor, ...]:
        """Return the first ``which`` levels, or only the last one."""
        return self.levels[-1:] if which == "last" else self.levels[:which]


class Stages(nn.Module):
    """An encoder as a list of stages, each with a tail: ``tails[l](stages[l](x))`` is the input of stage l+1.

    Stage l maps its input to its level: (b, D), (b, C, H, W) or n tokens (b, n, D). The level is then pooled globally. It is a
    pre-activation, because FedRCL compares features before the last ReLU of a stage. A tail is an activation, a pool, a
    flattening, or nothing.
    """

    def __init__(self, stages: Sequence[nn.Module], tails: Sequence[nn.Module]) -> None:
        """Build the encoder.

        Raises:
            ValueError: Unless each stage has one tail.
        """
        super().__init__()
        if len(stages) != len(tails):
            got = f"{len(stages)} stages and {len(tails)} tails"
            raise ValueError(f"Stages takes a tail for each stage, got {got}; nn.Identity() does nothing")
        self.stages, self.tails = nn.ModuleList(stages), nn.ModuleList(tails)

    def outputs(self, x: Tensor) -> list[Tensor]:
        """Return the output of every stage's tail, lowest first. The last one is what ``forward`` returns."""
        found: list[Tensor] = []
        for stage, tail in zip(self.stages, self.tails, strict=True):
            x = tail(stage(x))
            found.append(x)
        return found

    def find_fault(self, x: Tensor) -> str:
        """Return what stands against the network when it is tried on images ``x``. Here it is nothing, the empty text."""
        return ""

    def resume(self, x: Tensor, level: int) -> Tensor:
        """Return the last stage's output, given the output ``x`` of the first ``level`` stages."""
        for stage, tail in zip(self.stages[level:], self.tails[level:], strict=True):
            x = tail(stage(x))
        return x

    def forward(self, x: Tensor, levels: list[Tensor] | None = None) -> Tensor:
        """Return the last stage's output, and append every stage's pooled features to ``levels`` if given."""
        for stage, tail in zip(self.stages, self.tails, strict=True):
            x = stage(x)
            if levels is not None:
                levels.append(_pooled_level(x))
            x = tail(x)
        return x


def _pooled_level(x: Tensor) -> Tensor:
    """Return the mean over all axes except channels: pixels of (b, C, H, W), tokens of (b, n, D)."""
    if x.dim() == 2:
        return x
    return x.mean(1) if x.dim() == 3 else x.mean((2, 3))


class SplitModel(nn.Module):
    """A network whose parameters and buffers are named ``encoder.*``, ``projector.*`` and ``classifier.*``.

    It can be used with other parameters than its own (``holding``) and under ``vmap``. So it has no in-place operation, no
    random draw and no branch on data.
    """

    buffers_are: Buffers = "average"  # model.buffers
    trained_parts: frozenset[str] = frozenset()  # whose buffers a phase's forward passes update, and whose layers drop
    encoded_by: Mapping[str, int] = MappingProxyType({})  # encoder whose outputs a phase's batches have: where its tensors are
    own_names: Mapping[str, str] = MappingProxyType({})  # of a network's state dict -> names of these tensors
    takes_channels: int = 0  # 3 for a network of colour images that gets grey ones, which are then repeated
    image_size: tuple[int, int] | None = None  # (H, W) to which images are resized (model.image_size)
    frozen_names: frozenset[str] = frozenset()  # of the constants that model.freeze made
    notices: tuple[str, ...] = ()  # lines about the model that a run prints
    one_by_one: str = ""  # why clients cannot train as a stack, or empty

    def __init__(
        self,
        encoder: Stages,
        projector: nn.Module,
        classifier: nn.Linear,
        dropout: float = 0.0,
        dropped: tuple[str, ...] = ("classifier",),
    ) -> None:
        """Build the network from its three parts.

        Args:
            encoder: The encoder.
            projector: A sequence of layers, or ``nn.Identity`` for none.
            classifier: The last layer.
            dropout: Dropout rate before the layers ``dropped``.
            dropped: Names of these layers. It must contain the classifier.

        Raises:
            TypeError: For a classifier or a projector of another kind.
            ValueError: For wrong names in ``dropped``.
        """
        super().__init__()
        if not isinstance(classifier, nn.Linear):
            got = type(classifier).__name__
            raise TypeError(f"a SplitModel's classifier is an nn.Linear, got {got}; layers before it are the projector")
        if type(projector) not in (nn.Sequential, nn.Identity):  # a user's own class may do more than call its layers in turn
            got = type(projector).__name__
            raise TypeError(f"a SplitModel's projector is an nn.Sequential, or an nn.Identity for none, got {got}")
        layers = ["classifier", *(f"projector.{number}" for number, _ in projector.named_children())]
        if "classifier" not in dropped or not set(dropped) <= set(layers):
            raise ValueError(f"dropped must name the classifier, and may name {', '.join(layers[1:]) or 'nothing else'}")
        self.encoder, self.projector, self.classifier = encoder, projector, classifier
        self.embedding_size = classifier.in_features  # D
        self.num_classes = classifier.out_features
        self.dropout, self.dropped = dropout, dropped

    def forward(
        self,
        x: Tensor,
        dropout_mask: Mapping[str, Tensor] | None = None,
        with_levels: bool = False,
        encoded: bool = False,
    ) -> Features:
        """Compute the features of b images.

        Args:
            x: Images (b, C, H, W), or the encoder's outputs (b, E) if ``encoded``.
            dropout_mask: By layer, factors 0 or 1/(1-p) (b, D) on its input. None means evaluation mode.
            with_levels: Pool the stages' outputs too. That costs time, so only methods that compare them ask for it.
            encoded: Whether ``x`` are the encoder's outputs, which have no levels. Raises ``TypeError`` if they are asked for.
        """
        if encoded and with_levels:
            raise TypeError("with_levels needs images, but the encoder is frozen and was run before. Fix: reads_images = True")
        levels: list[Tensor] | None = [] if with_levels else None
        masks = dropout_mask or {}
        z = x if encoded else self.encoder(x, levels)
        for number, layer in self.projector.named_children():
            name = f"projector.{number}"
            z = layer(z * masks[name] if name in masks else z)
        logits = self.classifier(z * masks["classifier"] if "classifier" in masks else z)
        return Features(logits, z, tuple(levels or ()))

    def resume(self, x: Tensor, level: int, dropout_mask: Mapping[str, Tensor] | None = None) -> Features:
        """Return the features, given the output ``x`` of the encoder's first ``level`` stages for b images."""
        return self(self.encoder.resume(x, level), dropout_mask, encoded=True)  # type: ignore[no-any-return]

    def represent(self, x: Tensor) -> Tensor:
        """Return only z (b, D) of images x, in evaluation mode."""
        z: Tensor = self.projector(self.encoder(x))
        return z

    @contextlib.contextmanager
    def holding(self, params: Mapping[str, Tensor]) -> Iterator["SplitModel"]:
        """Use ``params`` in place of this model's parameters of those names until the block ends. Not thread-safe.

        A pass of PMFL's CNN takes 1.50 ms, and 1.66 ms with ``torch.func.functional_call`` (docs/BENCHMARKS.md).
        """
        own = [(home, leaf, home[leaf], value) for name, value in params.items() for home, leaf in [self._homes[name]]]
        try:
            for home, leaf, _, value in own:
                home[leaf] = value
            yield self
        finally:
            for home, leaf, before, _ in own:
                home[leaf] = before

    @cached_property
    def _homes(self) -> dict[str, tuple[dict[str, Any], str]]:
        """The table of its module, and the key there, for each parameter and then for each buffer."""
        names = [*(name for name, _ in self.named_parameters()), *self._buffer_list]
        parts = [(name, *name.rpartition(".")[::2]) for name in names]
        modules = {name: self.get_submodule(path) for name, path, _ in parts}
        tables = {name: home._buffers if name in self.buffer_names else home._parameters for name, home in modules.items()}
        return {name: (tables[name], leaf) for name, _, leaf in parts}  # type: ignore[misc]

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and then the buffers by name: the tensors that ``holding`` replaces."""
        return {name: table[key] for name, (table, key) in self._homes.items()}

    @cached_property
    def _buffer_list(self) -> list[str]:
        return list_buffers(self)

    # The names of the buffers among the tensors, and of the tensors of normalisation layers.
    buffer_names = cached_property(lambda self: frozenset(self._buffer_list))
    normalisation_names = cached_property(lambda self: frozenset(list_normalisation(self)))

    @cached_property
    def _layers_with_buffers(self) -> list[tuple[str, nn.Module]]:
        """Each layer that has a buffer, with its part of the model."""
        paths = dict.fromkeys(name.rpartition(".")[0] for name in self._buffer_list)
        return [(path.partition(".")[0], self.get_submodule(path)) for path in paths]

    @cached_property
    def _drawing_layers(self) -> list[tuple[str, Drawn]]:
        """Each layer within the network that drops at random, with its part of the model."""
        return [(name.partition(".")[0], layer) for name, layer in self.named_modules() if isinstance(layer, Drawn)]

    @property
    def draws(self) -> bool:
        """Whether layers within the network drop at random."""
        return bool(self._drawing_layers)

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that ``model.freeze`` made constants, by name."""
        return {name: self.get_buffer(name) for name in sorted(self.frozen_names)}

    def training_on(self, mask: Tensor, dropout: Mapping[str, Tensor] | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context. Within it the buffers of ``trained_parts`` learn from a batch, and their layers drop.

        Args:
            mask: 1 for an example, 0 for padding (b,).
            dropout: The batch's factors and numbers. None for a pass without dropout.
        """
        return self._training_on(mask, dropout) if self._buffer_list or self._drawing_layers else contextlib.nullcontext()

    @contextlib.contextmanager
    def _training_on(self, mask: Tensor, dropout: Mapping[str, Tensor] | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._buffer_list and self.buffers_are != "frozen":
                learning = [layer for part, layer in self._layers_with_buffers if part in self.trained_parts]
                stack.enter_context(in_training(learning, mask))
            if self._drawing_layers and dropout is not None:
                layers = [layer for part, layer in self._drawing_layers if part in self.trained_parts]
                stack.enter_context(drawing(layers, dropout.get(NETWORK)))
            yield


def projector_of(width: int, projection: Sequence[int]) -> tuple[nn.Module, int]:
    """Return an MLP projector with these layer widths and ReLU between them, and its output width."""
    if not projection:
        return nn.Identity(), width
    layers: list[nn.Module] = []
    for i, size in enumerate(projection):
        layers += ([nn.ReLU()] if i else []) + [nn.Linear(width, size)]
        width = size
    return nn.Sequential(*layers), width


def features_of(encoder: nn.Module, in_channels: int, image_size: tuple[int, int]) -> int:
    """Return how many features an encoder makes of an image, by running one in evaluation mode, which changes no buffer."""
    training = encoder.training
    with torch.no_grad():
        found = int(encoder.eval()(torch.zeros(1, in_channels, *image_size)).shape[1])
    encoder.train(training)
    return found


def hidden_layers(
    stages: list[nn.Module], tails: list[nn.Module], hidden: Sequence[int], in_channels: int, image_size: tuple[int, int]
) -> int:
    """Append a flattening and fully connected layers with ReLU to an encoder's stages, and return the last width.

    Args:
        stages: The stages, extended in place.
        tails: The tails, extended in place.
        hidden: Widths of the new layers.
        in_channels: Channels of an image.
        image_size: Height and width in pixels.
    """
    tails[-1] = nn.Sequential(tails[-1], nn.Flatten())
    return add_hidden(stages, tails, hidden, features_of(Stages(stages, tails), in_channels, image_size))


def add_hidden(stages: list[nn.Module], tails: list[nn.Module], hidden: Sequence[int], width: int) -> int:
    """Append fully connected layers with ReLU to stages that end in rows of ``width`` numbers, and return the last width."""
    for size in hidden:
        stages.append(nn.Linear(width, size))
        tails.append(nn.ReLU())
        width = size
    return width


def add_pooling(encoder_stages: Sequence[nn.Module], tails: Sequence[nn.Module]) -> Stages:
    """Return the stages with a global average pool after the last."""
    ends = list(tails)
    ends[-1] = nn.Sequential(ends[-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Stages(encoder_stages, ends)
