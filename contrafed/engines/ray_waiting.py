"""Wait until a run's Ray workers have started, and print what they wait for if no machine has it free."""

from collections.abc import Mapping, Sequence
from typing import Any

from contrafed.engines import shared_memory
from contrafed.engines.ray_liveness import check_ray, report_dead_ray

# Seconds between two looks at workers that have not started.
LOOK_SECONDS = 3.0


def wait_for_workers(
    workers: Sequence[Any],
    address: shared_memory.Address | None,
    needs: Mapping[str, float],
    machines: frozenset[str],
) -> list[tuple[bool, int, str]]:
    """Return what each worker's ``ready`` returns, once all workers have started.

    Args:
        workers: The workers.
        address: Of the memory that the driver shares.
        needs: The number of CPUs and GPUs of one worker, by Ray's names.
        machines: The ids of the machines that the run began with.
    """
    import ray

    about = [worker.ready.remote(address) for worker in workers]
    lacked, told = 0, False
    with report_dead_ray(machines):
        while True:
            try:
                return ray.get(about, timeout=LOOK_SECONDS)
            except ray.exceptions.GetTimeoutError:
                check_ray(machines=machines)
            if told:
                continue
            lacking = count_lacking(workers, needs)
            told = bool(lacked and lacking)  # at two looks, because a worker takes what it needs before its process runs
            lacked = lacking
            if told:
                each = " and ".join(f"{need:g} {name}{'' if need == 1 else 's'}" for name, need in needs.items() if need)
                fewer = ". Fix: wait for other programs, or a smaller engine.workers" if len(workers) > 1 else ""
                print(f"waiting: no machine has {each} free for {lacking} of {len(workers)} workers{fewer}", flush=True)


def count_lacking(workers: Sequence[Any], needs: Mapping[str, float]) -> int:
    """Return how many of the workers without a process find no machine with what one worker needs."""
    from ray._private.state import actors, available_resources_per_node

    free = available_resources_per_node()  # before the workers, so that one that starts now lacks nothing
    waiting = sum(not actors(worker._actor_id.hex()).get("Pid") for worker in workers)
    room = sum(int(min(there.get(name, 0) / need for name, need in needs.items() if need)) for there in free.values())
    return max(waiting - room, 0)
