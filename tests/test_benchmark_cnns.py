"""The convolutional networks of published tables: parameters and work as their authors state them, captured and planned quickly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar import plan
from autopar.capture import capture
from benchmarks._cnns import Cnn, DenseNet, Inverted, ResNet, cnn, described, image_of

pytestmark = pytest.mark.pure

ALPA = "method=data_parallel; image 224; base channels {}; width factor 4"


def on_meta(name: str, *, extra: str = "", source: str = "") -> nn.Module:
    with torch.device("meta"):
        model = cnn(name, extra=extra, source=source)
    assert model is not None, name
    return model


def batch(size: int, image: int) -> tuple[Tensor, Tensor]:
    return torch.empty(size, 3, image, image, device="meta"), torch.empty(size, dtype=torch.int64, device="meta")


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Sources of the counts: the model pages of torchvision (num_params) but for SE-ResNeXt (timm's legacy_seresnext101_32x4d, 48.96M).
@pytest.mark.parametrize(
    "name, parameters",
    [
        ("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032), ("resnet101", 44_549_160),
        ("resnet152", 60_192_808), ("resnext50-32x4d", 25_028_904), ("resnext101-32x8d", 88_791_336),
        ("resnext101-64x4d", 83_455_272), ("resnext101-32x4d", 44_177_704), ("se-resnext101-32x4d", 48_955_416),
        ("wide_resnet50_2", 68_883_240), ("wide_resnet101_2", 126_886_696), ("vgg11", 132_863_336), ("vgg13", 133_047_848),
        ("vgg16", 138_357_544), ("vgg16_bn", 138_365_992), ("vgg19", 143_667_240), ("densenet121", 7_978_856),
        ("densenet161", 28_681_000), ("densenet169", 14_149_480), ("densenet201", 20_013_928), ("mobilenet_v2", 3_504_872),
        ("efficientnet-b0", 5_288_548), ("efficientnet-b1", 7_794_184), ("efficientnet-b2", 9_109_994),
        ("efficientnet-b3", 12_233_232), ("efficientnet-b4", 19_341_616), ("efficientnet-b5", 30_389_784),
        ("efficientnet-b6", 43_040_704), ("efficientnet-b7", 66_347_960),
    ],
)  # fmt: skip
def test_parameters_are_the_known_ones(name: str, parameters: int) -> None:
    assert count(on_meta(name)) == parameters


@pytest.mark.parametrize("base, printed", [(224, 895_432_000), (320, 1_822_840_000), (448, 3_566_792_000), (640, 7_270_024_000)])
def test_wide_resnet_has_the_parameters_that_alpa_printed(base: int, printed: int) -> None:
    """Printed to thousands."""
    assert round(count(on_meta(f"WideResNet50-C{base}-W4", extra=ALPA.format(base))), -3) == printed


# Multiply-adds of one image in the forward pass, from torchvision's model pages (GFLOPS) and the papers.
@pytest.mark.parametrize(
    "name, image, giga",
    [
        ("resnet50", 224, 4.09), ("resnext50-32x4d", 224, 4.23), ("vgg16", 224, 15.47), ("mobilenet_v2", 224, 0.30),
        ("efficientnet-b0", 224, 0.39), ("efficientnet-b4", 380, 4.39),
    ],
)  # fmt: skip
def test_work_is_the_known_one(name: str, image: int, giga: float) -> None:
    model = on_meta(name).eval()
    with FlopCounterMode(display=False) as counter:
        model(*batch(2, image))
    assert counter.get_total_flops() / 2 / 2 / 1e9 == pytest.approx(giga, abs=0.01)


def test_wide_squeeze_takes_its_width_from_the_expanded_channels() -> None:
    narrow, wide = described("efficientnet-b0"), described("efficientnet-widese-b0")
    assert isinstance(narrow, Inverted) and isinstance(wide, Inverted)
    assert (narrow.squeeze, wide.squeeze) == ("input", "expanded")
    assert narrow.stages == wide.stages
    assert count(on_meta("efficientnet-widese-b0")) > count(on_meta("efficientnet-b0"))


def test_nvidia_squeezes_to_sixteen_channels() -> None:
    """Each of the blocks, of C channels: C * 16 both ways, and 16 + C biases."""
    plain, squeezed = count(on_meta("resnext101-32x4d")), count(on_meta("se-resnext101-32x4d", source="nvidia-dle"))
    outputs = [c for c, blocks in ((256, 3), (512, 4), (1024, 23), (2048, 3)) for _ in range(blocks)]
    assert squeezed - plain == sum(2 * 16 * c + 16 + c for c in outputs)


@pytest.mark.parametrize("name", ["resnet50", "ResNet-50", "resnet50v1.5", "ResNet50 v1.5", "resnet_50"])
def test_names_are_read_leniently(name: str) -> None:
    assert described(name) == ResNet(blocks=(3, 4, 6, 3), bottleneck=True)


@pytest.mark.parametrize(
    "one, other",
    [
        ("efficientnet_widese_b4", "EfficientNet-WideSE-B4"), ("SE-ResNeXt101-32x4d", "se_resnext101_32x4d"), ("VGG-16", "vgg16"),
        ("WideResNet50-C224-W4", "wide_resnet50_c224_w4"),
    ],
)  # fmt: skip
def test_spellings_of_one_network_are_equal(one: str, other: str) -> None:
    assert described(one) is not None
    assert described(one) == described(other)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2", "", "resnet", "resnet51", "resnet50v1", "resnet50v2", "resnext101", "se-resnet18", "efficientnet-b8", "efficientnet",
        "efficientnetv2-b0", "efficientnet-quant-b0", "wide_resnet50", "inception_v3", "unet", "ssd-resnet50", "vgg12",
    ],
)  # fmt: skip
def test_what_a_name_leaves_open_is_not_guessed(name: str) -> None:
    assert described(name) is None
    assert cnn(name) is None


def test_wide_resnet_is_completed_by_what_the_row_states_and_contradictions_are_none() -> None:
    stated = described("wide_resnet50", extra=ALPA.format(320))
    assert stated == described("WideResNet50-C320-W4")
    assert isinstance(stated, ResNet) and (stated.base, stated.middle, stated.enter) == (320, 4, 1)
    assert described("WideResNet50-C224-W4", extra=ALPA.format(320)) is None
    assert described("WideResNet50-C224") is None


def test_image_of_the_row_or_of_the_variant() -> None:
    assert [image_of(f"efficientnet-b{i}") for i in range(8)] == [224, 240, 260, 300, 380, 456, 528, 600]
    assert image_of("efficientnet-widese-b4") == 380
    assert image_of("resnet50", extra="MXNet (not PyTorch)") == 224
    assert image_of("efficientnet-b4", extra="image 224; per-GPU batch from configs.yml") == 224


SMALL: dict[str, Cnn] = {
    "basic": ResNet(blocks=(1, 2), bottleneck=False, base=8, classes=5),
    "bottleneck": ResNet(blocks=(2, 1), bottleneck=True, base=8, enter=2, middle=2, groups=4, squeeze="sixteen", classes=5),
    "inverted": Inverted(
        stages=((1, 8, 1, 1, 3), (4, 16, 2, 2, 5)), stem=8, head=32, activation=nn.SiLU, dropout=0.0, squeeze="input", classes=5
    ),
    "dense": DenseNet(blocks=(2, 1, 1), growth=4, stem=8, classes=5),
}


@pytest.mark.parametrize("kind", SMALL)
def test_captured_networks_compute_the_same_loss_and_gradients(kind: str) -> None:
    capture(SMALL[kind].build(), (torch.randn(4, 3, 32, 32), torch.arange(4)))  # raises where they differ


def test_stages_of_equal_blocks_are_planned_as_such() -> None:
    made = plan(
        on_meta("resnet50"), 8, example_inputs=batch(8 * 32, 224), cluster="dgx-a100",
        pins={"dp": 8, "tp": 1, "pp": 1, "zero": 0, "recompute": "none"},
    )  # fmt: skip
    assert made.mesh == {"pp": 1, "dp": 8, "tp": 1}
    assert made.stages[0].parameters == 25_557_032
    assert {"features.3.1", "features.3.5", "features.4.2"} <= set(made.stages[0].blocks)
    # three times the forward pass, which is 4.09 G multiply-adds an image
    assert made.stages[0].flops == pytest.approx(3 * 2 * 4.09e9 * 32, rel=0.02)
