"""Pre-trains a GPT with Megatron, with the flags of upstream's script of this name, on CUDA or CPU.

    megatron-recover run --replicas 3 scripts/pretrain_gpt.py <flags>   survives dying processes
    torchrun --nproc-per-node 2 scripts/pretrain_gpt.py <flags>         plain Megatron

Upstream's own script runs under `megatron-recover run`, too. This one also trains on a CPU under
torchrun, waits for the device less often, and makes no attention mask that the model ignores.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from megatron_recover import megatron as recover

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.training.config.container import PretrainConfigContainer
    from megatron.training.models.gpt import GPTModelConfig
    from torch import Tensor

FIELDS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")


def batch_of(data_iterator: Iterator[dict[str, Tensor]], args: Namespace, vp_stage: int | None) -> dict[str, Tensor | None]:
    """Return the tensors of the next microbatch that this stage needs, on every rank of the stage.

    On a stage in the middle all are None and nothing is read. Else tensor-parallel rank 0 reads the
    samples, and the other tensor-parallel ranks receive the tensors. Each context-parallel rank
    keeps its part of the sequence.
    """
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training.utils import is_first_or_last_pipeline_stage

    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(FIELDS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Tensor | None] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {name: sample[name].cuda(non_blocking=True) if name in sample else None for name in FIELDS}
        batch |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "local_cp_size", "max_seqlen"))
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
        use_per_sequence_balancing=False,
    )


def loss_of(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the summed loss of a microbatch, its number of tokens, and the report.

    Loss and number are scalars; the report has both, in one tensor of 2 elements. A loss that is
    not finite is found where the step is reduced, without a wait for the device in each microbatch.
    """
    import torch

    losses, mask = output_tensor.view(-1).float(), loss_mask.view(-1).float()
    loss, num_tokens = torch.sum(losses * mask), mask.sum().to(torch.int)
    return loss, num_tokens.detach().clone(), {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: GPTModel) -> tuple[Tensor, Callable[..., object]]:
    """Run the forward of one microbatch on this stage; return the output and its loss function."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args, get_timers

    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    batch = batch_of(data_iterator, args, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_of, batch["loss_mask"])


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Return the configuration of upstream's dataset builder, from Megatron's arguments."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def datasets_provider(num_samples: Sequence[int | None], vp_stage: int | None = None) -> Sequence[GPTDataset | None]:
    """Return training, validation and test set, as upstream's builder makes them for `num_samples`.

    A set without data is None; so is each set on ranks that read no data.
    """
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    def reads_data() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    args = get_args()
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, reads_data, dataset_config(args)).build()


def needs_attention_mask(args: Namespace, model: GPTModelConfig) -> bool:
    """Return whether the samples need an attention mask, of sequence length squared bytes.

    The layers of upstream's GPT are causal. Transformer Engine's attention then masks by itself and
    ignores a mask that is given. Upstream's local attention uses the mask, and builds one in every
    layer if there is none. The layers of experimental variants and of ModelOpt may need any mask.
    """
    return (
        model.transformer.transformer_impl != "transformer_engine"
        or model.transformer.experimental_attention_variant is not None
        or model.restore_modelopt_state
        or args.reset_attention_mask
    )


def configure(args: Namespace) -> PretrainConfigContainer:
    """Return upstream's configuration of model and training.

    Leaves out the attention mask if the model does not need one. Raises ValueError for unsupported
    flags.
    """
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    for unsupported in ("fim_data", "spec"):
        if getattr(args, unsupported):
            raise ValueError(f"--{unsupported.replace('_', '-')} is not supported by this script; leave it out")
    model = gpt_config_from_args(args)
    if args.create_attention_mask_in_dataloader and not needs_attention_mask(args, model):
        args.create_attention_mask_in_dataloader = False
        if args.rank == 0:
            print("the attention makes its causal mask itself: --no-create-attention-mask-in-dataloader is set", flush=True)
    return pretrain_cfg_container_from_args(args, model)


def main() -> None:
    """Train, with recovery under `megatron-recover run`."""
    from megatron.core.enums import ModelType

    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    recover.pretrain(
        configure,
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )


if __name__ == "__main__":
    main()
