"""embedding_bag: the mean of the tokens' embeddings, then fully connected layers, for texts."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, add_hidden, projector_of

INPUTS = ("tokens",)


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    width: Annotated[int, Range(ge=1)]
    padding: Annotated[int, Range(ge=0)] | None
    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


class Bag(nn.Module):
    """The mean of an example's embeddings, without those of a token that only fills up the row."""

    def __init__(self, num_tokens: int, width: int, padding: int | None) -> None:
        super().__init__()
        self.embedding, self.padding = nn.Embedding(num_tokens, width), padding

    def forward(self, x: Tensor) -> Tensor:
        """Return the means (b, width) of tokens (b, 1, n), zeros for a row of padding alone."""
        x = x.squeeze(-2)
        found: Tensor = self.embedding(x)
        if self.padding is None:
            return found.mean(-2)
        real = (x != self.padding).to(found).unsqueeze(-1)
        return (found * real).sum(-2) / real.sum(-2).clamp_min(1)


def build(config: Config, in_channels: int, image_size: tuple[int, ...], num_classes: int) -> SplitModel:
    """Build the bag and the hidden layers, each with ReLU.

    Source: the classifier of Joulin et al. 2017 (1607.01759) without n-grams, and with hidden layers.

    Args:
        config: Settings of the model.
        in_channels: How many different tokens there are.
        image_size: Tokens of an example.
        num_classes: Number of classes.

    Raises:
        UserError: If an example has more than one axis, or for a padding that is no token.
    """
    if len(image_size) != 1:
        raise UserError(f"model=embedding_bag takes rows of tokens, got {'x'.join(map(str, image_size))}")
    if config.padding is not None and config.padding >= in_channels:
        raise UserError(f"model.padding={config.padding} is no token of 0..{in_channels - 1}. Fix: leave it null")
    stages: list[nn.Module] = [Bag(in_channels, config.width, config.padding)]
    tails: list[nn.Module] = [nn.Identity()]
    width = add_hidden(stages, tails, config.hidden, config.width)
    projector, width = projector_of(width, config.projection)
    return SplitModel(Stages(stages, tails), projector, nn.Linear(width, num_classes))
