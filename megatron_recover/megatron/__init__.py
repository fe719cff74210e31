"""The bindings to Megatron. A training script needs two names: `parse_arguments` and `pretrain`."""

from megatron_recover.megatron.training import parse_arguments, pretrain

__all__ = ["parse_arguments", "pretrain"]
