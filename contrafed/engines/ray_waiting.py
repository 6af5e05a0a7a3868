"""Wait until a run's Ray workers have started, and say so if other programs of the cluster use what they need."""

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
) -> list[tuple[bool, int]]:
    """Return what each worker's ``ready`` returns, once all workers have started.

    Args:
        workers: The workers.
        address: Of the memory that the driver shares.
        needs: The number of CPUs and GPUs of one worker, by Ray's names.
        machines: The ids of the machines that the run began with.
    """
    import ray

    about = [worker.ready.remote(address) for worker in workers]
    lacked, told = False, False
    with report_dead_ray(machines):
        while True:
            try:
                return ray.get(about, timeout=LOOK_SECONDS)
            except ray.exceptions.GetTimeoutError:
                check_ray(machines=machines)
            if told:
                continue
            lacking = find_lacking(workers, needs)
            told = lacked and bool(lacking)  # at two looks, because a worker takes what it needs before its process runs
            lacked = bool(lacking)
            if told:
                fewer = ". A smaller engine.workers needs fewer" if len(workers) > 1 else ""
                print(f"waiting for {' and '.join(lacking)} that other programs of the cluster use{fewer}", flush=True)


def find_lacking(workers: Sequence[Any], needs: Mapping[str, float]) -> list[str]:
    """Return what the workers without a process need beyond what is free in the cluster, such as ``2 CPUs``."""
    import ray
    from ray._private.state import actors

    free = ray.available_resources()  # before the workers, so that one that starts now lacks nothing
    waiting = sum(not actors(worker._actor_id.hex()).get("Pid") for worker in workers)
    lacking = {name: round(waiting * need - free.get(name, 0), 4) for name, need in needs.items()}
    return [f"{number:g} {name}{'' if number == 1 else 's'}" for name, number in lacking.items() if number > 0]
