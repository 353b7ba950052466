"""ResNet-50 and VGG16, written from their papers, and real images to train them on. Benchmarks use their gradients."""

import torch
from sklearn.datasets import load_sample_images
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut connection (He et al., CVPR 2016, figure 5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.around = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


def resnet50(classes: int) -> nn.Sequential:
    """He et al., table 1: stages of 3, 4, 6 and 3 bottlenecks; 25.6 M parameters with 1,000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    ]  # fmt: skip
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def vgg16(classes: int) -> nn.Sequential:
    """Simonyan and Zisserman, ICLR 2015, column D: 134.3 M parameters with 10 classes."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(7 * 7 * 512, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, classes))


NETWORKS = {"resnet50": resnet50, "vgg16": vgg16}


class Photographs:
    """Random crops of scikit-learn's two photographs. The class of a crop is the tile of the photograph it is from."""

    def __init__(self, classes: int, side: int = 64) -> None:
        photographs = load_sample_images().images
        self.images = [torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 128 - 1 for image in photographs]
        self.classes, self.side = classes, side

    def batch(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Images, float32 ``[size, 3, side, side]``, and their classes, int64 ``[size]``."""
        labels = torch.randint(0, self.classes, (size,), generator=generator)
        crops = []
        for label in labels.tolist():
            image = self.images[label % len(self.images)]
            tiles = -(-self.classes // len(self.images))
            left_edge, right_edge = (
                int(edge * (image.shape[2] - self.side) / tiles)
                for edge in (label // len(self.images), label // len(self.images) + 1)
            )
            top = int(torch.randint(0, image.shape[1] - self.side, (), generator=generator))
            left = int(torch.randint(left_edge, max(right_edge, left_edge + 1), (), generator=generator))
            crops.append(image[:, top : top + self.side, left : left + self.side])
        return torch.stack(crops), labels
