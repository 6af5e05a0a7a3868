"""FedYogi's strategy: Yogi on the mean update."""

from torch import Tensor

from contrafed.strategies.fedadam import Config, FedAdam

__all__ = ["Config", "FedYogi"]


class FedYogi(FedAdam):
    """Step along Yogi's direction of the mean update D.

    m := b1 m + (1 - b1) D and v := v - (1 - b2) D^2 sign(v - D^2). W := W + eta_g m / (sqrt(v) + eps). A round without replies
    changes nothing.

    Source: Reddi et al. 2021, Algorithm 2. v starts at eps^2, and there is no bias correction.
    """

    paper = FedAdam.paper
    linear_in_updates = True

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """Return v, which moves by at most (1 - b2) D^2."""
        moved: Tensor = before - (1 - self.config.beta2) * square * (before - square).sign()
        return moved
