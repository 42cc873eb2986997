"""Ray Train: python examples/ray_train.py --workers 2 --pin tp=2

Ray starts the workers and makes their process group; autopar compiles in it. On a cluster `ray.init("auto")` finds it; each worker needs
the environment and a folder for checkpoints that all of them see, and `--gpu` gives each worker a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch

HERE = str(Path(__file__).parent)


def loop(config: dict[str, Any]) -> float:
    """What each worker runs: the plain loop, which knows nothing of Ray. The last loss."""
    sys.path.insert(0, config["folder"])
    import plain_loop

    arguments = ["--steps", str(config["steps"]), *(word for pin in config["pins"] for word in ("--pin", pin))]
    losses = plain_loop.main(arguments)
    for loss in losses:
        ray.train.report({"loss": loss})
    return losses[-1]


def main(argv: Sequence[str] | None = None) -> float:
    """The last loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", action="append", default=[], help="what is decided already, such as tp=2; may be repeated")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--output", default="ray", help="folder of Ray's results")
    options = parser.parse_args(argv)

    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), HERE]))
    environment = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=None if options.gpu else options.workers + 1, runtime_env=environment, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"folder": HERE, "steps": options.steps, "pins": options.pin},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        torch_config=ray.train.torch.TorchConfig(backend="nccl" if options.gpu else "gloo"),
        run_config=ray.train.RunConfig(storage_path=str(Path(options.output).resolve())),
    )
    result = trainer.fit()
    ray.shutdown()
    loss = float(result.return_value)
    print(loss)
    return loss


if __name__ == "__main__":
    main()
