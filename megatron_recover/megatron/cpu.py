"""Substitutes that let Megatron-Core 0.19 train on CPU with gloo. Used only where CUDA is absent.

Megatron calls `torch.cuda` for a device to allocate on, a stream to wait for and a random state to
keep. On a machine without CUDA each of these has an obvious CPU substitute. `enable_cpu` installs
the substitutes under the names in `TORCH_CUDA`, `TORCH` and `MEGATRON` below, and nowhere else.
`torch.cuda.is_available` still returns False, so code with a CPU path of its own keeps to that
path.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")


class NoStream:
    """Stands for a CUDA stream on a CPU: all work is synchronous, so a wait returns at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 0

    def wait_stream(self, _: NoStream) -> None:
        """Return at once: nothing is pending on a CPU."""

    def record_event(self) -> NoStream:
        """Return this stream, since an event of a CPU is over at once as well."""
        return self

    def synchronize(self) -> None:
        """Return at once: nothing is pending on a CPU."""


class Properties:
    """The device properties that Megatron reads outside of kernels for GPUs.

    Below compute capability 10, with TP or CP above 1, Megatron insists on the environment variable
    CUDA_DEVICE_MAX_CONNECTIONS.
    """

    major = 10
    minor = 0
    name = "cpu"

    @property
    def total_memory(self) -> int:
        """Return the machine's memory in bytes."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _random_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
    """Return the state of the CPU generator; Megatron's tracker stores it in place of the GPU's."""
    return torch.default_generator.get_state()


def _set_random_state(new_state: Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the tensor factory `factory`, changed to replace ``device="cuda"`` by the CPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def _stay(tensor: Tensor, *_: object, **__: object) -> Tensor:
    return tensor


def _type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type`, changed to return CUDA's names, which Megatron's optimizers expect.

    With a dtype it converts the tensor as before.
    """

    @functools.wraps(original)
    def type_of(tensor: Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        if dtype is not None:
            return original(tensor, dtype, non_blocking)
        return original(tensor).replace("torch.", "torch.cuda.", 1)

    return type_of


def _keep_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `core_transformer_config_from_args`, changed to clear `deallocate_pipeline_outputs`.

    So no pipeline stage frees an output after sending it. With virtual stages Megatron frees some
    outputs once the send is issued. On a CUDA stream their memory is reused after the send. gloo
    may still be reading: it would send whatever took the memory's place.
    """

    @functools.wraps(original)
    def config_from(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        config.deallocate_pipeline_outputs = False
        return config

    return config_from


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return `tensor`, as an array of NumPy if `as_numpy` is set: there is no copy and no stream.

    Megatron has tensors of a GPU alone become arrays. gloo wants numbers as the sizes of parts.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _by_broadcasts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that exchanges parameters by upstream's `broadcast_params` instead.

    Ranks have parts of different sizes, which gloo's all-gather refuses and NCCL's takes.
    """
    return lambda optimizer: optimizer.broadcast_params()


def _mesh_on_cpu(original: Any) -> Any:
    """Return `DeviceMesh`, changed to make the mesh of a process group on the CPU.

    Megatron's FSDP2 module names CUDA, and FSDP2 shards on the device of its mesh.
    """

    class MeshOnCpu(original):  # type: ignore[misc]
        @staticmethod
        def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
            return original.from_group(group, CPU.type, *args, **kwargs)

    return MeshOnCpu


def _with_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `WrappedTorchNorm.__new__`, changed to accept `--sequence-parallel`.

    A norm works on each token by itself, so torch's norms need no change. Their parameters get the
    mark of those whose gradient upstream sums over the tensor-parallel ranks, since each of these
    ranks sees a part of the tokens. Apex and Transformer Engine set the same mark.
    """

    @functools.wraps(original)
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new


# Note [Adam of torch]
# Without Transformer Engine and Apex the optimizer is torch's Adam, which counts its steps in one
# tensor per parameter (`step`). Loading a checkpoint into Megatron's distributed optimizer fails on
# `step` in three ways. Megatron reads `step` before the first step has created it. Megatron looks
# for `step` among the tensors of a parameter, although the checkpoint stores it apart. Megatron
# restores one tensor for all parameters, and then every parameter increments the same tensor.


def _with_adam_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `sharded_state_dict`, changed to create Adam's state before loading, if there is none.

    See Note [Adam of torch].
    """

    @functools.wraps(original)
    def sharded_state_dict(self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        if is_loading and not self.optimizer.state:
            for parameter in (each for group in self.optimizer.param_groups for each in group["params"]):
                zeros = {name: torch.zeros_like(parameter) for name in self.optimizer_state_keys}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        return original(self, model_state, is_loading, *args, **kwargs)

    return sharded_state_dict


def _without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_set_main_param_and_optimizer_states`, changed to leave `step` as it is.

    See Note [Adam of torch].
    """

    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        original(self, model_param, {"step": None, **tensors})

    return set_states


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `load_state_dict`, changed to give each parameter a `step` of its own.

    See Note [Adam of torch].
    """

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_state_dict


TORCH_CUDA: Final[dict[str, Callable[..., Any]]] = {
    "current_device": lambda: CPU,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "get_device_properties": lambda device=None: Properties(),
    "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
    "memory_stats": lambda device=None: collections.Counter(),  # no memory of a GPU is used
    "get_rng_state": _random_state,
    "set_rng_state": _set_random_state,
    "manual_seed": _seed,
    "Stream": NoStream,
    "current_stream": lambda device=None: NoStream(),
    "stream": lambda stream: contextlib.nullcontext(),
}
"""Names in `torch.cuda`, each with its substitute on a CPU."""

TORCH: Final[dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    **dict.fromkeys(("tensor", "zeros", "ones", "empty", "empty_like", "full", "rand", "randn", "arange"), _on_cpu),
    "Tensor.cuda": lambda original: _stay,
    "Tensor.type": _type_name,
}
"""Names in `torch`, each with a function that takes the original and returns the substitute."""

_ZERO: Final = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

MEGATRON: Final[dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    # Without these two dropout is silently wrong: the tracker would fork a generator that nothing
    # uses.
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state": lambda original: _random_state,
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": lambda original: _set_random_state,
    # The wheel has the compiled index builder, but not the Makefile that `compile_helpers` would
    # run.
    "megatron.core.datasets.utils:compile_helpers": lambda original: lambda: None,
    "megatron.core.distributed.torch_fully_sharded_data_parallel:DeviceMesh": _mesh_on_cpu,
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__": _with_sequence_parallel,
    "megatron.training.argument_utils:core_transformer_config_from_args": _keep_outputs,
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": lambda original: _as_numbers,
    "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.allgather_params": _by_broadcasts,
    f"{_ZERO}.sharded_state_dict": _with_adam_state,
    f"{_ZERO}._set_main_param_and_optimizer_states": _without_step,
    f"{_ZERO}.load_state_dict": _with_own_steps,
    "megatron.training.training:initialize_megatron": lambda original: functools.partial(original, allow_no_cuda=True),
}
"""Names in Megatron, each with a function that takes the original and returns the substitute."""

FLAGS: Final[dict[str, Any]] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "attention_backend": "unfused",
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
}
"""Defaults of Megatron's arguments on a CPU. A flag that the user gives still wins."""


def _as_is(model: Any = None, **_: Any) -> Any:
    """Stand for `torch.compile`: return the function, or a decorator that does so."""
    return (lambda function: function) if model is None else model


_KERNELS = ("transformer_engine", "apex")
"""Packages whose layers Megatron takes where they are installed, whatever the arguments say."""


def leave_out_what_needs_a_gpu() -> None:
    """Without CUDA, have `torch.compile` return functions as they are, and hide `_KERNELS`.

    Call it before Megatron is imported. Its modules compile small fusions as they are imported:
    importing the compiler takes a second, and on a CPU compiling costs minutes and gains nothing.
    They also look for Transformer Engine and Apex, whose layers put their parameters on a GPU.
    """
    if torch.cuda.is_available():
        return
    torch.compile = _as_is  # type: ignore[assignment]
    for name in _KERNELS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # an import of it raises ModuleNotFoundError


def enable_cpu() -> None:
    """Install the substitutes, so that Megatron runs in this process without CUDA.

    Also silences the warnings of a logger of Megatron's, and has functions that torch has compiled
    run eagerly. Idempotent. Call it before Megatron's arguments are parsed. Raises RuntimeError
    where CUDA is available: there the substitutes would be wrong.
    """
    if torch.cuda.is_available():
        raise RuntimeError("CUDA is available; the CPU substitutes must not be installed")
    if torch.cuda.current_device is TORCH_CUDA["current_device"]:
        return
    for name, value in TORCH_CUDA.items():
        setattr(torch.cuda, name, value)
    for name, wrap in TORCH.items():
        owner, attribute = (torch.Tensor, name.removeprefix("Tensor.")) if name.startswith("Tensor.") else (torch, name)
        setattr(owner, attribute, wrap(getattr(owner, attribute)))
    for name, wrap in MEGATRON.items():
        module, _, path = name.partition(":")
        *owners, attribute = path.split(".")
        target = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(target, attribute, wrap(getattr(target, attribute)))
    # The tracker warns when the CPU's random state changes while the GPU's is forked. Here both are
    # the same generator.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # Where `leave_out_what_needs_a_gpu` was not called, functions have been compiled already.
    torch.compiler.set_stance("force_eager")


def set_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Set the defaults of `FLAGS` on Megatron's parser, so that a user gives model flags only."""
    attention = next(action for action in parser._actions if action.dest == "attention_backend")
    convert = attention.type if callable(attention.type) else str
    parser.set_defaults(**{**FLAGS, "attention_backend": convert(FLAGS["attention_backend"])})
