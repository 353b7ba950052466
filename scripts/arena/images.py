"""Classifiers of 5,000 real MNIST digits, as jobs of trainer.py: a ResNet, a DenseNet, and a network like VGG16."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("train", "papers"))

import torch
from figures_training import DenseNet, Vgg, images, resnet
from torch import Tensor, nn
from torch.nn import functional

BATCH = 16
"""Images of a worker and step."""


class ImageJob:
    """Batches, gradients and the accuracy on images that were not seen.

    Its normalization sees the batch of one worker at a time, and its running means those of all workers.
    """

    together = False  # each worker's batch is normalized by itself

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.train, self.labels, self.test, self.test_labels = images()

    def gradient(self, flat: Tensor, generators: Sequence[torch.Generator], out: Tensor) -> None:
        """Writes the gradient of one worker's batch at the parameters ``flat`` to ``out``, both float32 ``[NUMEL]``."""
        (generator,) = generators
        nn.utils.vector_to_parameters(flat, self.parameters)
        self.model.train()
        chosen = torch.randint(len(self.train), (BATCH,), generator=generator)
        loss = functional.cross_entropy(self.model(self.train[chosen]), self.labels[chosen])
        out.copy_(torch.cat([part.flatten() for part in torch.autograd.grad(loss, self.parameters)]))

    @torch.no_grad()
    def validate(self, flat: Tensor) -> tuple[float, float]:
        """Loss in nats and accuracy on 1,000 images."""
        nn.utils.vector_to_parameters(flat, self.parameters)
        self.model.eval()
        scores = self.model(self.test)
        accuracy = (scores.argmax(1) == self.test_labels).float().mean()
        return float(functional.cross_entropy(scores, self.test_labels)), float(accuracy)


class ImageModel:
    """A model, with the attributes that trainer.py reads of a module such as gpt_job."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make = make
        self.SHAPES = [tuple(parameter.shape) for parameter in make().parameters()]
        self.SIZES = [parameter.numel() for parameter in make().parameters()]
        self.NUMEL = sum(self.SIZES)

    def initial(self, seed: int) -> Tensor:
        """The parameters of a new model, float32 ``[NUMEL]``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.utils.parameters_to_vector(self.make().parameters()).detach()

    def Job(self, batch: int, dtype: torch.dtype) -> ImageJob:  # noqa: N802 - as the class of the modules
        return ImageJob(self.make())


MODELS = {"resnet": ImageModel(resnet), "densenet": ImageModel(DenseNet), "vgg": ImageModel(Vgg)}
