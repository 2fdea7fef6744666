"""The constants of the cost model that machines don't measure, one line each: what, unit, where measured.

A constant of decoding or of prompts is here only if removing it changes a placement, or a prediction by more
than 2 % (decoding) or 5 % (prompts), in 81 plans of 3 shapes on 4 machines. Drafts, sparse layers and the
disk aren't part of these plans.

Each line ends with the page of `docs/measurements/` whose tables the constant was measured on or fitted to;
"assumed": on none.
"""

# Decoding: seconds per token.
KERNEL_SHARE = 0.9
"""Share of the read bandwidth that CPU kernels reach in a format that isn't measured; assumed."""
CPU_BLOCK_SECONDS = 5e-6
"""Seconds per block of the CPU thread pool besides reading, if it isn't measured; planner.md."""
LAUNCH_SECONDS = 4e-6
"""Seconds per kernel of a decode step besides reading, if it isn't measured; H200; planner.md."""
ATTENTION_LAUNCHES = 3
"""Kernels of attention in a decode step on a GPU; counted."""
FEED_FORWARD_LAUNCHES = 2
"""Kernels of a feed-forward, and of a router, in a decode step on a GPU; counted."""
SYNC_SECONDS = 10e-6
"""Seconds of a CPU-GPU synchronization (activations and back) in a graph, if not measured; planner.md."""
KV_READ_SHARE = 0.8
"""Share of a GPU's bandwidth at which attention reads keys and values; H200; planner.md."""
MAX_KV_BYTES_PER_SECOND = 2.0e12
"""The most that attention reads, float16 bytes per second; smaller types are widened; H200; cuda.md."""
ROUTER_SECONDS = 10e-6
"""GPU seconds of an MoE router and expert selection besides launches and reading; H200; planner.md."""
GPU_EXPERTS_SECONDS = 11e-6
"""GPU seconds of a layer's experts besides launches and reading; H200; planner.md."""
CPU_EXPERTS_SECONDS = 15e-6
"""Seconds to start a layer's experts on the CPU: six barriers of 12 threads; planner.md."""
CPU_EXPERT_DECODE_SHARE = 0.9
"""Share of the rate of large matrices that reading a few experts reaches on the CPU; planner.md."""
SPLIT_TOKEN_SECONDS = 160e-6
"""Host seconds per token of a split model: embedding, launch of the step, sampling; split-models.md."""
OVERLAP_LOSS = 0.25
"""Share of the shorter shard of a split block that overlap doesn't save; assumed, see planner.md."""
MAPPED_SLOWDOWN = 3.0
"""Times as long as repacked weights take, for memory-mapped ones; cpu.md."""
SCATTERED_SLOWDOWN = 1.5
"""Times as long as sequential reads take, for the rows of active neurons; ../internals/sparse.md."""
SPARSE_BLOCKS = 2
"""Overhead of a sparse feed-forward besides reading, in that of a dense one: twice the barriers; counted."""
GATHERED_LAUNCHES = 4
"""Kernels of a feed-forward of which a GPU reads only the active neurons; counted."""
GPU_SCATTERED_SLOWDOWN = 6.0
"""Times as long as sequential reads on a GPU, for the rows and columns of active neurons; sparsity.md."""
DISK_BYTES_PER_SECOND = 2.0e9
"""Bytes per second of large reads of an SSD, if it isn't measured; assumed."""
DISK_READ_SECONDS = 10e-6
"""Seconds of a read with dozens in flight, besides its bytes, if it isn't measured; assumed."""
WINDOW_HIT_SHARE = 0.9
"""Share of the activations of as many hottest neurons that a window of recent ones holds; sparsity.md."""
MAPPED_DISK_SHARE = 0.6
"""Share of the disk's rate at which page faults read mapped weights next to others in memory; sparsity.md."""
KEPT_PAGES_SHARE = 0.5
"""Share of the page cache that still helps the next token, if all weights are mapped; sparsity.md."""

# Prompts: seconds per chunk.
ATTENTION_PREFILL_SHARE = 0.25
"""Speed of attention matmuls, with the softmax between them, relative to weight matmuls; H200; planner.md."""
LAYER_LAUNCH_SECONDS = 0.7e-3
"""Host seconds to launch one layer of a chunk; the GPU waits for it; split-models.md."""
STREAMED_LAUNCH_SECONDS = 1.35e-3
"""The same if any of the layer is streamed; split-models.md."""
MOE_LAUNCH_SECONDS = 1.6e-3
"""The same for an MoE layer, whose selected experts the host reads first; planner.md."""
EXPERT_BATCH_SECONDS = 0.43e-3
"""Host seconds to launch each further batch of experts; planner.md."""
COPY_OVERLAP_LOSS = 0.25
"""Share of the second longest of copies, GPU work and launches that overlap doesn't save; split-models.md."""
EXPERT_COPY_OVERLAP_LOSS = 0.35
"""Share of the shorter of expert copies and expert launches that overlap doesn't save; split-models.md."""
CPU_EXPERT_PREFILL_SHARE = 0.4
"""Speed of expert matmuls, with few tokens each, relative to large ones on the CPU; planner.md."""
EXPERT_SELECTION_SECONDS = 0.5e-3
"""Seconds from a layer's selection to its first expert, and from the last one on; split-models.md."""
UNPACKING_PASSES = 16
"""Reads of GPU memory in the time that a streamed byte takes to become float16; assumed if not measured."""

# Memory.
RANK_BYTES = 768 << 20
"""GPU bytes of a rank of tensor parallel besides its part: its process's context, NCCL's buffers; assumed."""
LIBRARY_BYTES = 192 << 20
"""GPU bytes of torch's libraries and compiled kernels, before that of packing; planner.md."""

# Preferences between plans of about equal speed.
MAX_PREFILL_SLOWDOWN = 1.06
"""Times as long per token as the fastest plan that a plan with faster prompts may take; planner.md."""
MAX_EXPERT_CACHE_SLOWDOWN = 1.03
"""The same for a plan with an expert cache, at uniform routing; moe-expert-cache.md."""
DRAFT_READS = 4 / 3
"""Reads of the draft model per accepted token: four draft tokens give three; speculation.md."""
DRAFT_WEIGHT = 2.0
"""Weight of a second of drafting: a forward for three tokens takes about 1.5 reads; speculation.md."""
