"""Trains a small ResNet in Keras on scikit-learn's 1,797 handwritten digits, on every rank of a Horovod job.

    mpirun -np 2 python scripts/train/train_tensorflow.py --config recommended
    mpirun -np 2 python scripts/train/train_tensorflow.py --config none          # dense, for comparison

The job is that of train_torch.py, with ``model.fit``. Each rank trains on its own part of the data. After each epoch,
rank 0 computes the test accuracy and writes OUT/metrics.json, every rank saves a checkpoint, and all ranks check that
their parameters are equal to the bit. ``--resume`` continues from the checkpoints.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import typer
from history import History, same_on_all_ranks
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hvd_deepreduce.tensorflow import DeepReduce

keras = tf.keras
layers = keras.layers


def convolution(outputs: int, size: int, stride: int = 1) -> Any:
    """A convolution without a bias, because a normalization follows it."""
    return layers.Conv2D(outputs, size, stride, padding="same", use_bias=False,
                         kernel_regularizer=keras.regularizers.L2(2.5e-4))  # fmt: skip


def normalization() -> Any:
    """Batch normalization with the momentum and epsilon of PyTorch, which are better for so few steps."""
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)


def block(x: Any, outputs: int, stride: int) -> Any:
    """Two 3x3 convolutions with a shortcut connection (He et al., CVPR 2016, figure 2)."""
    y = layers.ReLU()(normalization()(convolution(outputs, 3, stride)(x)))
    y = normalization()(convolution(outputs, 3)(y))
    return layers.ReLU()(y + (convolution(outputs, 1, stride)(x) if stride > 1 else x))


def resnet(width: int = 64) -> Any:
    """A stem and three blocks for 8x8 grey images and ten classes: 0.7 million parameters."""
    image = x = keras.Input((8, 8, 1))
    x = layers.ReLU()(normalization()(convolution(width, 3)(x)))
    for outputs, stride in ((width, 1), (2 * width, 2), (2 * width, 1)):
        x = block(x, outputs, stride)
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def digits() -> list[Any]:
    """Training images, test images, training labels, test labels: 1,437 and 360 images."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 8 - 1).astype("float32")
    return train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)


class Timed(keras.callbacks.Callback):  # type: ignore[misc]
    """Measures the seconds that the batches of an epoch take."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self.begin


def main(
    config: Annotated[str, typer.Option(help="a preset, a YAML file, or none for dense")] = "none",
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="images per rank and step")] = 32,
    lr: Annotated[float, typer.Option(help="the largest learning rate of the cosine schedule")] = 0.05,
    seed: int = 0,
    width: Annotated[int, typer.Option(min=1, help="channels of the first layers")] = 64,
    out: Annotated[Path, typer.Option(help="folder for metrics and checkpoints")] = Path("runs/train_tensorflow"),
    resume: Annotated[bool, typer.Option("--resume", help="continue from the checkpoints in OUT")] = False,
    stop_after: Annotated[int | None, typer.Option(help="stop after this epoch, as if interrupted")] = None,
) -> None:
    """Trains, and writes OUT/metrics.json, OUT/config.yaml and the checkpoints."""
    hvd.init()
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    keras.utils.set_random_seed(seed)
    images, test_images, labels, test_labels = digits()
    steps = len(images) // hvd.size() // batch_size
    model = resnet(width)
    warm = epochs * steps // 5
    schedule = keras.optimizers.schedules.CosineDecay
    plain = keras.optimizers.SGD(schedule(lr / 25, epochs * steps - warm, warmup_target=lr, warmup_steps=warm), 0.9)
    compression = None if config == "none" else DeepReduce(config, seed=seed)
    optimizer = hvd.DistributedOptimizer(plain, compression=compression or hvd.Compression.none)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    variables = model.trainable_variables
    settings = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed, "width": width, "ranks": hvd.size(),
                "steps_per_epoch": steps}  # fmt: skip
    numel = sum(v.shape.num_elements() for v in variables)
    history = History(out, config, compression, hvd.rank(), settings, numel)
    # Each rank saves its own file, because normalization statistics and residuals differ between ranks.
    saved = {"model": model, "optimizer": optimizer, **({"compression": compression} if compression else {})}
    checkpoint = tf.train.Checkpoint(**saved)
    mine = out / f"checkpoint.rank{hvd.rank()}"
    if resume:
        if not mine.with_suffix(f"{mine.suffix}.index").exists():
            raise SystemExit(f"there is no checkpoint {mine.name} in {out}: run once without --resume first")
        checkpoint.read(str(mine)).assert_existing_objects_matched()
        history.rows = json.loads((out / "metrics.json").read_text())["epochs_done"]
    hvd.broadcast_variables(variables, root_rank=0)
    timed = Timed()
    for epoch in range(len(history.rows), epochs):
        before = history.total()
        own = np.random.default_rng((seed, epoch)).permutation(len(images))[hvd.rank() :: hvd.size()]
        own = own[: steps * batch_size]
        loss = model.fit(
            images[own], labels[own], batch_size, initial_epoch=epoch, epochs=epoch + 1, shuffle=False, verbose=0,
            callbacks=[timed],
        ).history["loss"][0]  # fmt: skip
        parameters = (v.numpy() for v in variables)
        same_on_all_ranks(parameters, lambda digest: hvd.allgather(tf.constant(digest[None])).numpy())
        mean = float(hvd.allreduce(tf.constant(loss)))
        accuracy = float((model.predict(test_images, verbose=0).argmax(1) == test_labels).mean())
        # Within a graph, the waiting of Horovod cannot be separated from the work of TensorFlow.
        history.add(before, steps, timed.seconds, loss=mean, accuracy=accuracy)
        checkpoint.write(str(mine))
        history.write(f"epoch {epoch + 1:2}/{epochs}", "accuracy {accuracy:.2%}")
        hvd.allreduce(tf.zeros(1))  # no rank stops before the metrics are written
        if stop_after == epoch + 1:
            break
    hvd.shutdown()


if __name__ == "__main__":
    typer.run(main)
