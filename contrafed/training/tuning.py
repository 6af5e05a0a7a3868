"""Fine-tune clients before the evaluation, for FedAvg+FT and FedBABU."""

from contrafed.training.base import Client, ClientStack, LocalTraining, Tensors


def fine_tune(client: Client, stack: ClientStack, local_training: LocalTraining, parts: tuple[str, ...]) -> dict[str, Tensors]:
    """Return the received model. In the run's last evaluation return the fine-tuned one, with the received one as
    ``untuned``.
    """
    if not stack.final:
        return {"model": stack.params}
    untuned = {name: value.clone() for name, value in stack.params.items()}
    client.train(stack, local_training=local_training, parts=parts, purpose="fine-tuning batches")
    return {"model": stack.params, "untuned": untuned}
