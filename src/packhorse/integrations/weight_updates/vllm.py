"""Weight transfer engines for vLLM: the worker's side and the trainer's.

`register` adds both to vLLM's factories under the name "packhorse":

    WeightTransferConfig(backend="packhorse")                     # the server
    WeightTransferTrainerFactory.trainer_init(                    # the trainer, in every rank
        TrainerInitInfo(url="tcp://10.0.0.1:0", rank=rank), client=client, source=source
    ).send_weights()                                              # after each step

Nothing of vLLM is a base class, because the signatures changed in 0.23, 0.25, 0.26 and 0.29: the
engines take what those releases pass, by what it can do. An update is fetched, checked and decoded
before the model is touched. The model is then loaded from the mirror: as a whole, through vLLM's
layerwise reloading, or with `apply="patches"` only where elements changed. If that fails, the next
update loads everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from packhorse.integrations.weight_updates.links import (
    Follower,
    Publisher,
    open_publisher,
    this_host,
)
from packhorse.integrations.weight_updates.mirror import Mirror, Trainer
from packhorse.late_import import import_late
from packhorse.wire.updates import StagedUpdate

__all__ = [
    "BACKEND",
    "DeltaTrainerEngine",
    "DeltaWeightTransferEngine",
    "InitInfo",
    "TrainerInitInfo",
    "UpdateInfo",
    "register",
]

BACKEND = "packhorse"
_WAYS = ("reload", "patches")
_Info = TypeVar("_Info")


@dataclass
class InitInfo:
    """What a worker is told once.

    Attributes:
        url: where updates come from: `tcp://host:port`, a folder, or a URL that fsspec knows.
        timeout: seconds to wait for a version.
        apply: "reload" loads all weights through vLLM's layerwise reloading; "patches" writes only
            changed elements, which needs a model whose loaders copy plainly, and vLLM 0.30 or
            later.
        options: options for fsspec's file system.
    """

    url: str
    timeout: float = 300.0
    apply: str = "reload"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.apply not in _WAYS:
            raise ValueError(f"apply is {self.apply!r}; it must be one of {', '.join(_WAYS)}")


@dataclass
class UpdateInfo:
    """What a worker is told for each update.

    Attributes:
        version: the version to load.
        stream: the stream that it is of, in hex.
    """

    version: int
    stream: str


@dataclass
class TrainerInitInfo:
    """What the trainer's engine is told once, in every rank.

    Attributes:
        url: where to put updates; by default a free port of this machine.
        rank: the rank of this process; rank 0 sends.
        timeout: seconds that a worker waits for a version.
        apply: as for `InitInfo`.
        options: options for fsspec's file system.
        sender: options of `DeltaSender`.
    """

    backend: ClassVar[str] = BACKEND

    url: str | None = None
    rank: int = 0
    timeout: float = 300.0
    apply: str = "reload"
    options: dict[str, Any] = field(default_factory=dict)
    sender: dict[str, Any] = field(default_factory=dict)

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends."""
        return self.rank == 0


class DeltaWeightTransferEngine:
    """The worker's side. vLLM makes it and calls its methods."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, *parts: Any, **named: Any) -> None:
        """
        Args:
            config: vLLM's configuration of the transfer.
            parts: the configuration of vLLM, the device and the model, in the order of the release;
                releases before 0.26 pass no model.
            named: the same by name.
        """
        given = [*parts, *named.values()]
        self.config = config
        self.model = next((part for part in given if hasattr(part, "load_weights")), None)
        self.vllm_config = next((part for part in given if hasattr(part, "model_config")), None)
        self.model_config = getattr(self.vllm_config, "model_config", None)
        self._mirror = Mirror()
        self._follower: Follower | None = None
        self._apply = _WAYS[0]
        self._is_loaded = False  # whether the model has all that the mirror has
        self._default = self.model, self.model_config

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Sets the model that is loaded."""
        self.model, self.model_config = model, model_config
        self._is_loaded = False

    def reset_weight_update_target(self) -> None:
        """Lets the engine load its own model again."""
        self._is_loaded = self._is_loaded and self.model is self._default[0]
        self.model, self.model_config = self._default

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """The dataclass of a dict.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        return _parse(InitInfo, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """The dataclass of a dict.

        Raises:
            ValueError: a field is missing or unknown.
        """
        return _parse(UpdateInfo, update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Opens the source of updates."""
        self.shutdown()
        self._apply = init_info.apply
        self._follower = Follower(
            init_info.url, timeout=init_info.timeout, options=init_info.options
        )

    def start_weight_update(self, *args: Any, **named: Any) -> None:
        """Does nothing: the model is not touched before the update is checked."""

    def finish_weight_update(self, *args: Any, **named: Any) -> None:
        """Does nothing: `receive_weights` has finished the model."""

    def drain_pending(self) -> None:
        """Does nothing: nothing is deferred."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a version; the same as `receive_weights`, from a dict."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(
        self, update_info: UpdateInfo, load_weights: Callable[[Any], Any] | None = None
    ) -> None:
        """Fetches a version, checks and decodes it, and loads the model.

        Args:
            update_info: which version.
            load_weights: the loader, which releases before 0.26 pass.

        Raises:
            ValueError: `init_transfer_engine` was not called, or there is no model.
            PeerError: the version does not come in time.
            PackhorseError: as `DeltaReceiver.stage`. The model is as it was.
        """
        if self._follower is None:
            raise ValueError("init_weight_transfer_engine must be called first")
        stream, version = bytes.fromhex(update_info.stream), update_info.version
        is_held = self._mirror.holds(stream, version)
        if is_held and self._is_loaded:
            return  # the call is a repetition
        if not is_held:
            staged = self._follower.stage(self._mirror.receiver, stream, version)
            if self._can_patch(staged, load_weights):
                self._patch(staged)
                _wait_for_device()
                return
            self._mirror.commit(staged)
        self._reload(load_weights)
        _wait_for_device()

    def shutdown(self) -> None:
        """Closes the connection."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def _can_patch(self, staged: StagedUpdate, load_weights: object) -> bool:
        return (
            self._apply == "patches"
            and self._is_loaded
            and load_weights is None
            and not staged.is_anchor
            and self.model is not None
        )

    def _patch(self, staged: StagedUpdate) -> None:
        """Writes changed elements to the model, through vLLM's loader of patches."""
        patching = import_late("vllm.model_executor.model_loader.checkpoint_weight_patch")
        state = self._mirror.receiver.state
        patches = [
            patching.CheckpointWeightPatch(
                name, tuple(state[name].shape), state[name].dtype, values, indices
            )
            for name, indices, values in staged.changes()
        ]
        self._is_loaded = False
        patching.load_checkpoint_weight_patches(self.model, patches)
        self._mirror.commit(staged)
        self._is_loaded = True

    def _reload(self, load_weights: Callable[[Any], Any] | None) -> None:
        """Loads all weights from the mirror."""
        self._is_loaded = False
        if load_weights is not None:
            load_weights(list(self._mirror.tensors()))
        elif self.model is None:
            raise ValueError("this release of vLLM passes neither a model nor a loader")
        else:
            reloading = import_late("vllm.model_executor.model_loader.reload")
            reloading.initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(self._mirror.tensors())
            finally:
                reloading.finalize_layerwise_reload(self.model, self.model_config)
        self._is_loaded = True

    @staticmethod
    def trainer_send_weights(iterator: Iterable[Any], trainer_args: Any) -> None:
        """Refuses: a sender remembers what it sent, so it is an object of its own.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("use DeltaTrainerEngine.trainer_init(...).send_weights()")


class DeltaTrainerEngine:
    """The trainer's side."""

    init_info_cls = TrainerInitInfo

    def __init__(self, init_info: TrainerInitInfo, *, client: Any, source: Any) -> None:
        """
        Args:
            init_info: what the engine is told.
            client: vLLM's client, or any object with its methods.
            source: iterated for names and tensors at each update.
        """
        self.client = client
        self.source = source
        self.is_sender = init_info.is_sender
        self._trainer = Trainer(**init_info.sender)
        self._publisher: Publisher | None = None
        if self.is_sender:
            url = init_info.url or f"tcp://{this_host()}:0"
            self._publisher, seen = open_publisher(url, init_info.options)
            told = {"url": seen, "timeout": init_info.timeout, "apply": init_info.apply}
            client.init_weight_transfer_engine({**told, "options": init_info.options})

    @classmethod
    def trainer_init(
        cls, config: Any = None, init_info: Any = None, *, client: Any, source: Any = None
    ) -> DeltaTrainerEngine:
        """Makes an engine, and tells the workers where updates come from.

        Args:
            config: `TrainerInitInfo`, or what vLLM 0.29 passes before it.
            init_info: `TrainerInitInfo`, if it is not the first argument.
            client: vLLM's client.
            source: iterated for names and tensors at each update.

        Raises:
            ValueError: there is no source.
        """
        if source is None:
            raise ValueError("a source of weights is needed")
        return cls(init_info or config, client=client, source=source)

    def send_weights(self, source: Any = None) -> None:
        """Packs the weights as they are now, publishes them, and lets the workers load them. Every
        rank calls this; ranks that do not send only iterate the source.

        Args:
            source: names and tensors, if they are others than those of `trainer_init`.

        Raises:
            PackhorseError, TypeError, ValueError: as `DeltaSender.pack`.
            Exception: what the client raises. The next update leads on from this version.
        """
        weights = self.source if source is None else source
        if self._publisher is None:
            for _ in weights:
                pass
            return
        update = self._trainer.pack(weights)
        self._publisher.publish(update)
        self.client.start_weight_update()
        told = {"version": update.version, "stream": update.stream_id.hex()}
        self.client.update_weights(told)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Stops serving updates."""
        close = getattr(self._publisher, "close", None)
        if close is not None:
            close()


def register() -> None:
    """Adds both engines to vLLM's factories as "packhorse"; once they are there, this does nothing.

    Raises:
        ImportError: vLLM is not installed, or has no weight transfer.
    """
    factory = import_late("vllm.distributed.weight_transfer.factory")
    for name, engine in (
        ("WeightTransferEngineFactory", DeltaWeightTransferEngine),
        ("WeightTransferTrainerFactory", DeltaTrainerEngine),
    ):
        kind = getattr(factory, name, None)
        if kind is not None and BACKEND not in kind._registry:
            kind.register_engine(BACKEND, engine)


def _wait_for_device() -> None:
    """Waits until copies to the device are done, so that the next step has the new weights."""
    accelerator = getattr(import_late("torch"), "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        accelerator.synchronize()


def _parse(kind: type[_Info], fields: dict[str, Any]) -> _Info:
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error
