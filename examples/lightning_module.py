"""Lightning in parallel: python examples/lightning_module.py --devices 2 --pin tp=2

AutoparStrategy compiles one submodule of the LightningModule, which stays as it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations.lightning import AutoparStrategy


class Classification(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        found = self.model(x)
        self.log("val_loss", F.cross_entropy(found, y))
        self.log("val_accuracy", (found.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)}


def data(size: int, seed: int) -> DataLoader[Any]:
    x = torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)  # of the global batch


def main(argv: Sequence[str] | None = None) -> pl.Trainer:
    """The Trainer, after training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", action="append", default=[], help="what is decided already, such as tp=2; may be repeated")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--output", default="lightning", help="folder of logs and checkpoints")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    strategy = AutoparStrategy("model", pins={k: int(v) for k, v in (pin.split("=") for pin in options.pin)})
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=options.devices, strategy=strategy, max_epochs=2,
        default_root_dir=options.output, gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classification(), data(64, 1), data(16, 2))
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
    return trainer


if __name__ == "__main__":
    main()
