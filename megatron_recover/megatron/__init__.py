"""The bindings to Megatron. A training script needs one name: `pretrain`."""

from megatron_recover.megatron.training import pretrain

__all__ = ["pretrain"]
