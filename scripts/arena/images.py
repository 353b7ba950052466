"""Classifiers of handwritten digits, as jobs of trainer.py: a ResNet and a DenseNet on 5,000 images of MNIST, and the
ResNet of train_torch.py on its own."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train", "papers"))

import torch
from figures_training import images, resnet
from torch import Tensor, nn
from torch.nn import functional
from train_torch import ResNet, digits

Images = Sequence[Tensor]
"""Those to train on, their labels, those to test on, their labels."""


class DenseNet(nn.Module):
    """Two dense blocks of four layers with growth 12, as DenseNet40-K12 has three of twelve (Huang et al., 2017)."""

    def __init__(self, growth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2 * growth, 3, padding=1, bias=False)
        channels, layers = 2 * growth, []
        self.ends = (4, 8)
        for _ in range(8):
            layers.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(),
                                        nn.Conv2d(channels, growth, 3, padding=1, bias=False)))  # fmt: skip
            channels += growth
        self.layers, self.norm = nn.ModuleList(layers), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.avg_pool2d(self.stem(x), 2)
        for number, layer in enumerate(self.layers):
            x = torch.cat([x, layer(x)], 1)
            if number + 1 == self.ends[0]:
                x = functional.avg_pool2d(x, 2)
        return self.head(functional.relu(self.norm(x)).mean((2, 3)))


class ImageJob:
    """Batches, gradients and the accuracy on images that were not seen.

    Its normalization sees the batch of one worker at a time, and its running means those of all workers.
    """

    together = False  # each worker's batch is normalized by itself

    def __init__(self, model: nn.Module, data: Images, batch: int) -> None:
        self.model, self.parameters, self.batch = model, list(model.parameters()), batch
        self.train, self.labels, self.test, self.test_labels = data

    def gradient(self, flat: Tensor, generators: Sequence[torch.Generator], out: Tensor) -> None:
        """Writes the gradient of one worker's batch at the parameters ``flat`` to ``out``, both float32 ``[NUMEL]``."""
        (generator,) = generators
        nn.utils.vector_to_parameters(flat, self.parameters)
        self.model.train()
        chosen = torch.randint(len(self.train), (self.batch,), generator=generator)
        loss = functional.cross_entropy(self.model(self.train[chosen]), self.labels[chosen])
        out.copy_(torch.cat([part.flatten() for part in torch.autograd.grad(loss, self.parameters)]))

    @torch.no_grad()
    def validate(self, flat: Tensor) -> tuple[float, float]:
        """Loss in nats and accuracy on the images to test on."""
        nn.utils.vector_to_parameters(flat, self.parameters)
        self.model.eval()
        scores = self.model(self.test)
        accuracy = (scores.argmax(1) == self.test_labels).float().mean()
        return float(functional.cross_entropy(scores, self.test_labels)), float(accuracy)


class ImageModel:
    """A model, with the attributes that trainer.py reads of a Gpt.

    Args:
        make: a new model.
        data: gives the images.
        batch: images of a worker and step.
    """

    def __init__(self, make: Callable[[], nn.Module], data: Callable[[], Images] = images, batch: int = 16) -> None:
        self.make, self.data, self.batch = make, data, batch
        self.SHAPES = [tuple(parameter.shape) for parameter in make().parameters()]
        self.SIZES = [parameter.numel() for parameter in make().parameters()]
        self.NUMEL = sum(self.SIZES)

    def initial(self, seed: int) -> Tensor:
        """The parameters of a new model, float32 ``[NUMEL]``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.utils.parameters_to_vector(self.make().parameters()).detach()

    def Job(self, batch: int) -> ImageJob:  # noqa: N802 - as the class of the modules
        return ImageJob(self.make(), self.data(), self.batch)


MODELS = {
    "resnet": ImageModel(resnet), "densenet": ImageModel(DenseNet),
    "digits": ImageModel(lambda: ResNet(96), digits, 4),
}  # fmt: skip
