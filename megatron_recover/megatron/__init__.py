"""The bindings to Megatron. A training script imports one name from here: `pretrain`."""

from megatron_recover.megatron.training import pretrain

__all__ = ["pretrain"]
