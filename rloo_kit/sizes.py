"""Sizes that the computation keeps to and the memory plan counts with."""

TOKENS_PER_PASS = (8192, 2048)  # on a GPU and on a CPU (`[is_cpu]`), if the file sets none and memory allows it
# Tokens and vocabulary rows of one tile of logits, on an accelerator and on the CPU (`[is_cpu]`): 32 MiB and 2 MiB of
# float32. On one thread, tiles of a whole vocabulary of 151936 rows exceed the cache and take three times as long.
TILE_TOKENS, TILE_VOCABULARY = (1024, 512), (8192, 1024)
CACHE_BLOCK = 64  # tokens by which the KV cache grows: short rollouts take little, long ones copy often but cheaply
GRAPH_CACHE_BLOCK = 16  # the same under CUDA graphs, where it has its full length at once
MERGED_LIMIT_BYTES = 2**26  # largest float32 layers that the native engine copies with the adapter merged
NESTED_BLOCK = 256  # 8-bit absmax of 4-bit weights per 32-bit absmax (bitsandbytes)
BATCHED_TOKENS = 8192  # per forward pass: vLLM's default for its class LLM on GPUs below 70 GiB
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks of adapters that vLLM offers
FEATURE_CACHE_BYTES = 256 * 2**20  # states of images that a frozen vision tower has encoded
