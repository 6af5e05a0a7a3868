"""What the methods share whose nodes train once more before they are judged: FedAvg+FT and FedBABU."""

from contrafed.training.base import Client, LocalTraining, Stack, Tensors


def tuned(client: Client, stack: Stack, work: LocalTraining, parts: tuple[str, ...]) -> dict[str, Tensors]:
    """Return what nodes received; in the run's last evaluation what ``work`` makes of it, and beside it ``untuned``."""
    if not stack.final:
        return {"model": stack.params}
    untuned = {name: value.clone() for name, value in stack.params.items()}
    client.train(stack, work=work, parts=parts, purpose="fine-tuning batches")
    return {"model": stack.params, "untuned": untuned}
