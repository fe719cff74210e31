"""The binding to FSDP2: a replica whose lanes share parameters, gradients and optimizer.

It works on modules that torch's `fully_shard` has sharded, whoever wrapped them. Megatron does so
with `--use-torch-fsdp2`. Steps, plans, sums and state are those of every other replica; only where
a gradient and a parameter lie differs.
"""
