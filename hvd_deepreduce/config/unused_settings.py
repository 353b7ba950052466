"""Which settings of a config have no effect beside the others. ``Config`` refuses them, but for those that say what
happens anyway, such as ``min_elements: 0`` in a scope where every tensor is compressed: of these a job warns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hvd_deepreduce.codecs.interfaces import Codec, Sparsifier, ValueCodec
from hvd_deepreduce.codecs.value.sign import Sign
from hvd_deepreduce.config.error_feedback import Feedback
from hvd_deepreduce.config.local_sgd import LocalSettings
from hvd_deepreduce.exchange.settings import AutoExchange, DenseStreamExchange, ReduceScatter


class UnusedSetting(NamedTuple):
    """A setting without effect.

    Attributes:
        setting: such as ``"bucket_bytes"`` or ``"exchange.bits"``.
        because: the settings of which one is the reason.
        sentence: for the error.
        anyway: whether the value is what happens without the setting, so that nothing contradicts it.
    """

    setting: str
    because: tuple[str, ...]
    sentence: str
    anyway: bool = False


def instead_of_index_and_value(config: Mapping[str, Any]) -> list[Codec]:
    """What writes indices and values itself: a joint codec, or an exchange that is not the containers' allgather."""
    joint, exchange = config["joint"], config["exchange"]
    return [*([joint] if joint else []), *([exchange] if getattr(exchange, "implementation", None) else [])]


def needs_index(config: Mapping[str, Any]) -> bool:
    """Whether a receiver needs an index section. ``config`` is as in ``find``."""
    sparsifier = config["sparsifier"]
    if instead_of_index_and_value(config) or not isinstance(sparsifier, Sparsifier) or sparsifier.sends_all:
        return False
    return not sparsifier.shared_randomness


def find(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[UnusedSetting]:
    """The settings that are not at their defaults and have no effect.

    Not among them are ``seed`` and ``threads``, which a job sets whatever its codecs are.

    Args:
        config: the values of all keys of a config. Codecs are objects; nothing else is validated yet.
        defaults: the defaults of these keys.
    """
    sparsifier, index, value, exchange = (config[key] for key in ("sparsifier", "index", "value", "exchange"))
    scope, instead = config["scope"], instead_of_index_and_value(config)
    for kind in ("index", "value"):
        if instead and config[kind] is not None:
            yield UnusedSetting(
                kind, ("joint", "exchange"),
                f"{kind} is {config[kind].name!r} beside {instead[0].name!r}, which writes indices and values itself: "
                "leave index and value out, or set them to None",
            )  # fmt: skip
    if not instead and index is not None and getattr(sparsifier, "sends_all", False):
        yield UnusedSetting(
            "index", ("sparsifier",),
            f"index is {index.name!r}, and sparsifier {sparsifier.name!r} sends all elements, so that there are no "
            "indices: leave index out, or choose another sparsifier",
        )  # fmt: skip
    if config["density_schedule"] is not None and isinstance(sparsifier, Sparsifier) and not hasattr(
        sparsifier, "density"
    ):
        yield UnusedSetting(
            "density_schedule", ("sparsifier",),
            f"density_schedule is {config['density_schedule']!r} and has no effect, since sparsifier "
            f"{sparsifier.name!r} has no density: leave density_schedule out, or choose another sparsifier",
        )  # fmt: skip
    memory = config["memory"]
    if memory != defaults["memory"]:
        reason = ""
        if config["error_feedback"] is False:
            reason = "error_feedback is False, so that nothing is kept"
        elif getattr(sparsifier, "sends_all", False):
            reason = f"sparsifier {sparsifier.name!r} sends all elements, so that no momentum is kept"
        elif exchange in instead:
            reason = f"exchange {exchange.name!r} does not tell which elements it has sent"
        if reason:
            yield UnusedSetting(
                "memory", ("error_feedback", "sparsifier", "exchange"),
                f"memory is {getattr(memory, 'name', None)!r} and has no effect, since {reason}: leave "
                "memory out, or set it to 'residual', and give the optimizer a momentum of its own",
            )  # fmt: skip
            memory = defaults["memory"]
    votes = isinstance(value, Sign) and value.magnitude == "one" and not instead
    if votes and config["error_feedback"] is not False and isinstance(memory, Feedback) and not memory.leaves_whole:
        yield UnusedSetting(
            "value.magnitude", ("memory", "error_feedback", "sparsifier"),
            f"value.magnitude is 'one', so that what is sent can be far larger than the values, and memory is "
            f"{memory.name!r}, which would keep the difference and grow without bound: set memory to "
            "'scaled_momentum', or error_feedback to False, or leave magnitude out",
        )  # fmt: skip
    sorts = isinstance(value, ValueCodec) and value.sorts
    if config["force_index"] is True and not instead and sorts and getattr(index, "name", None) == "packed":
        yield UnusedSetting(
            "force_index", ("index",),
            "force_index is True and has no effect, since index is 'packed', and packed indices in the order of the "
            "values are sent without it: leave force_index out",
            True,
        )  # fmt: skip
    if config["force_index"] is True and (instead or not (index and sorts)):
        reason = "there is no index codec"
        if index and value and not instead:
            reason = f"the value codec {value.name!r} does not sort the values"
        yield UnusedSetting(
            "force_index", ("sparsifier", "index", "value", "joint", "exchange"),
            f"force_index is True, and {reason}: another form of the indices would never be sent. Leave force_index "
            "out",
        )  # fmt: skip
    for key, needed, has_effect, anyway in (
        ("bucket_bytes", "'bucket' or 'tensor'", scope != "model", None),
        ("selection", "'model' or 'bucket'", scope != "tensor", "tensor"),
        ("min_elements", "'tensor'", scope == "tensor", 0),
    ):
        if not has_effect and config[key] != defaults[key]:
            yield UnusedSetting(
                key, ("scope", "exchange", "hierarchical"),
                f"{key} is {config[key]!r} and has no effect, since scope is {scope!r}: leave {key} out, or set scope "
                f"to {needed}",
                config[key] == anyway,
            )  # fmt: skip
    if isinstance(memory, Feedback) and memory.has_velocity and scope == "tensor" and config["min_elements"]:
        yield UnusedSetting(
            "min_elements", ("memory",),
            f"min_elements is {config['min_elements']!r} and has no effect, since memory is {memory.name!r}, which "
            "gives momentum to tensors of every size: leave min_elements out",
        )  # fmt: skip
    for kind in ("sparsifier", "index", "value", "joint", "exchange"):
        codec = config[kind]
        for setting, because, reason in codec.unused_settings() if isinstance(codec, Codec) else ():
            yield from _of_codec(kind, codec, setting, (kind, f"{kind}.{because}"), reason)
    yield from _of_local(config)
    if config["hierarchical"] is not False:
        yield from _of_levels(config)
    if isinstance(exchange, AutoExchange | ReduceScatter) and isinstance(sparsifier, Sparsifier):
        drawn = sparsifier.shared_randomness and index is None and config["joint"] is None
        if drawn or sparsifier.sends_all:
            reason = f"sparsifier {sparsifier.name!r} sends no indices, so that none can be chosen from the sum's"
            yield from _of_codec("exchange", exchange, "density", ("exchange", "sparsifier", "index", "joint"), reason)
    if isinstance(exchange, ReduceScatter):
        reason = ""
        if config["hierarchical"] is not False:
            reason = "hierarchical is given, and the sums of nodes are float32"
        elif config["local"] is not None:
            reason = "local is given, and updates are float32"
        if reason:
            causes = ("exchange", "hierarchical", "local")
            yield from _of_codec("exchange", exchange, "round_sum", causes, reason)
    if isinstance(exchange, DenseStreamExchange):
        reason = ""
        if config["error_feedback"] is False:
            reason = "error_feedback is False, so that there is no residual to fill blocks from"
        elif not exchange.has_zeros:
            reason = f"coded is True and value is {exchange.value!r}, so that blocks have no zeros inside"
        if reason:
            yield from _of_codec("exchange", exchange, "fill", ("exchange", "error_feedback"), reason, False)


def _of_local(config: Mapping[str, Any]) -> Iterator[UnusedSetting]:
    local = config["local"]
    if not isinstance(local, LocalSettings):
        return
    for setting, has_effect, reason, anyway in (
        ("nesterov", local.momentum > 0, "local.momentum is 0", False),
        ("mix", local.delay > 0, "local.delay is 0", None),
        ("decay", config["error_feedback"] is not False, "error_feedback is False, so that there is no residual", 0),
    ):
        given = getattr(local, setting)
        if not has_effect and given != LocalSettings.model_fields[setting].default:
            sentence = f"local.{setting} is {given!r} and has no effect, since {reason}: leave {setting} out"
            yield UnusedSetting(f"local.{setting}", ("local", "error_feedback"), sentence, given == anyway)


def _of_levels(config: Mapping[str, Any]) -> Iterator[UnusedSetting]:
    """What ``hierarchical`` cannot be combined with."""
    exchange, reason = config["exchange"], ""
    if getattr(exchange, "implementation", None):
        reason = (
            f"exchange is {exchange.name!r}, which needs all ranks: set exchange to 'allgather' or 'reduce_scatter', "
            "or leave hierarchical out"
        )
    elif isinstance(exchange, AutoExchange):
        reason = (
            "exchange is 'auto', which compares exchanges of all ranks at one level: set exchange to 'allgather' or "
            "'reduce_scatter', or leave hierarchical out"
        )
    elif config["scope"] == "tensor":
        reason = (
            "scope is 'tensor', and the ranks of a node have slices of whole vectors: set scope to 'bucket' or "
            "'model', with selection 'tensor' for settings of single tensors, or leave hierarchical out"
        )
    elif config["local"] is not None:
        reason = "local is given, and LocalSGD exchanges updates at one level: leave hierarchical out"
    if reason:
        because = ("exchange", "scope", "local", "min_elements", "overrides", "selection")
        yield UnusedSetting("hierarchical", because, f"hierarchical is {config['hierarchical']!r} and {reason}")


def _of_codec(
    kind: str, codec: Codec, setting: str, because: tuple[str, ...], reason: str, anyway: object = None
) -> Iterator[UnusedSetting]:
    given = getattr(codec, setting)
    if given != type(codec).model_fields[setting].default:
        sentence = f"{kind}.{setting} is {given!r} and has no effect, since {reason}: leave {setting} out"
        yield UnusedSetting(f"{kind}.{setting}", because, sentence, given == anyway)
